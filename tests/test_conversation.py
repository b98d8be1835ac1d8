"""The conversation as a template gets it, with tools, calls and results in whichever form it takes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.calls import CallOpened, Content
from stages.conversation import TOOLS_TEXT, entries, told
from stages.judge import Rules, judge
from stages.refusal import Refusal
from stages.schema import ChatRequest
from stages.template import Abilities, Template
from stages.toolcall import CallReader
from tests.captures import captured
from tests.templates import AGENT, CHATML, DEMANDING, STRICT, TEXTUAL
from tests.test_prompt import FORGED, WALL, chat, renderer, shown, tokens
from tests.test_schema import broken

USER = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "function", "function": {"name": "read", "description": "Read a file.", "strict": True}},
    {"type": "function", "function": {"name": "w", "parameters": {"$schema": "x", "anyOf": [{"type": ["a", "b"]}]}}},
]
LINES = "\n".join(json.dumps(tool) for tool in TOOLS)


def call(arguments, name="read", id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*arguments, content=None):
    return {"role": "assistant", "content": content, "tool_calls": [call(one) for one in arguments]}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
WRITTEN = (
    "<tool_call>\n<function=read>\n<parameter=path>\na b\n</parameter>\n"
    "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = '{"path": "a b", "n": 5}'


def with_tools(template, *messages, tools=TOOLS, **fields):
    text = renderer(template).render_chat(chat(*messages, tools=tools, **fields), WALL)
    assert isinstance(text, str), text
    return text


# -- tools -----------------------------------------------------------------------------------------------------------


def test_the_templates_own_form():
    """D1: a template that renders tools gets them as the client wrote them."""
    text = with_tools(AGENT, {"role": "system", "content": "be"}, USER)
    assert text.startswith(f"<|im_start|>system\nbe\n\nTools:\n{LINES}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")


def test_described():
    """D1: one that does not has them described in the system prompt, behind its text or as one of its own."""
    said = TOOLS_TEXT.replace("{tools}", LINES)
    assert with_tools(CHATML, {"role": "system", "content": "be"}, USER).startswith(
        f"<|im_start|>system\nbe\n\n{said}<"
    )
    for messages in ([USER], [{"role": "system", "content": ""}, USER]):
        assert with_tools(CHATML, *messages).startswith(f"<|im_start|>system\n{said}<|im_end|>\n<|im_start|>user\nhi")
    assert with_tools(STRICT, USER).startswith(f"<|im_start|>user\n{said}\n\nhi<|im_end|>")


def test_the_described_form_is_read():
    """D1: the form in the description is one that answers are read in."""
    reader = CallReader(TOOLS)
    deltas = [*reader.push(WRITTEN), *reader.finish()]
    assert [delta.name for delta in deltas if isinstance(delta, CallOpened)] == ["read"]
    assert not [delta for delta in deltas if isinstance(delta, Content)]


@pytest.mark.parametrize("template", [CHATML, AGENT, STRICT])
def test_no_tools(template):
    """D5: ``none`` and an empty list render no tools; ``allowed_tools`` only those it names."""
    plain = shown(USER, template=template)
    assert with_tools(template, USER, tools=[]) == with_tools(template, USER, tool_choice="none") == plain
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "w"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert with_tools(template, USER, tool_choice=choice) == with_tools(template, USER, tools=TOOLS[1:])


@pytest.mark.parametrize("template", [CHATML, AGENT, STRICT])
def test_no_tool_forges(template):
    """A6: names, descriptions and schemas of tools cannot write control tokens."""
    tool = {"type": "function", "function": {"name": FORGED, "description": FORGED, "parameters": {FORGED: [FORGED]}}}
    made = renderer(template)
    asked, forging = chat(USER, tools=TOOLS), chat(USER, tools=[tool])
    plain, forged = tokens(made, asked), tokens(made, forging)
    for token in (1, 2):  # the two control tokens of a turn
        assert plain.count(token) == forged.count(token) > 0
    assert FORGED.splitlines()[0] in made.render_chat(forging, WALL)


# -- calls and results -----------------------------------------------------------------------------------------------


def test_calls_of_the_history():
    """A10: a template that walks calls gets them, with arguments as objects; one that does not, their text."""
    history = (USER, calling(ARGUMENTS, content="ok"), RESULT)
    assert f"assistant\nok{WRITTEN}<|im_end|>" in shown(*history, template=AGENT)
    for template in (CHATML, STRICT):
        assert f"assistant\nok\n{WRITTEN}<|im_end|>" in shown(*history, template=template)
    assert f"assistant\n{WRITTEN}\n{WRITTEN}<|im_end|>" in shown(
        USER, calling(ARGUMENTS, json.loads(ARGUMENTS)), RESULT
    )
    assert 'assistant\n[read {"path": "a b", "n": 5}]<|im_end|>' in shown(USER, calling(ARGUMENTS), template=TEXTUAL)


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", '"x"', "null"])
def test_arguments_that_are_no_object(arguments):
    """A10: a call that was cut off is rendered too, by every template."""
    history = (USER, calling(arguments), RESULT)
    wrapped = f"<function=read>\n<parameter=arguments>\n{arguments}\n</parameter>\n</function>"
    assert wrapped in shown(*history, template=AGENT)
    written = json.dumps({"name": "read", "arguments": arguments})
    assert f"<tool_call>\n{written}\n</tool_call>" in shown(*history, template=CHATML)
    assert f"[read {arguments}]" in shown(*history, template=TEXTUAL)


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_no_arguments(arguments):
    """A10: nothing is an object without fields."""
    for template in (AGENT, CHATML):
        assert "<function=read>\n</function>" in shown(USER, calling(arguments), RESULT, template=template)


def test_calls_without_a_function():
    """A10: a call of another kind in the history stops nobody."""
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "custom"}]}
    for template in (CHATML, STRICT):
        assert "assistant\n<|im_end|>" in shown(USER, said, RESULT, template=template)


def test_results():
    """A10: a template that knows no results gets them as the user's words."""
    history = (USER, calling(ARGUMENTS), RESULT, RESULT)
    text = "<tool_response>\ndone\n</tool_response>"
    assert shown(*history, template=STRICT).endswith(f"user\n{text}\n\n{text}<|im_end|>\n<|im_start|>assistant\n")
    assert shown(*history, template=AGENT).count(f"user\n{text}<|im_end|>") == 2
    assert shown(*history, template=CHATML).count("tool\ndone<|im_end|>") == 2


def test_turn_by_turn():
    """A10: two user messages in a row reach a template that wants turns by turns as one."""
    assert shown(USER, {"role": "user", "content": "b"}, template=STRICT).startswith(
        "<|im_start|>user\nhi\n\nb<|im_end|>"
    )
    assert shown(USER, {"role": "user", "content": "b"}, template=CHATML).count("<|im_start|>user") == 2


def test_mid_system():
    """A12: folded in place, as a system message where the template takes one, else as the user's."""
    history = (USER, {"role": "assistant", "content": "b"}, {"role": "developer", "content": "now"}, USER)
    turns = "user\nhi<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>"
    assert turns + "system\nnow<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in shown(*history, template=AGENT)
    assert turns + "user\nnow\n\nhi<|im_end|>" in shown(*history, template=STRICT)


# -- whatever a template can -----------------------------------------------------------------------------------------

words = st.text(max_size=8)
results = st.builds(lambda text: RESULT | {"content": text}, words)
callings = st.builds(
    lambda content, many: calling(*many, content=content),
    words,
    st.lists(st.sampled_from([ARGUMENTS, "{", "", "{}"]) | st.dictionaries(words, words, max_size=2), max_size=2),
)
plain = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), words)
conversations = st.lists(plain | results | callings, min_size=1, max_size=6)
abilities = st.builds(Abilities, *[st.booleans()] * len(Abilities.__struct_fields__))


@given(conversations, abilities, st.sampled_from([[], TOOLS]))
def test_nothing_it_cannot(messages, can, tools):
    """D1: what a template cannot render is not in what it gets, and what it can is all there."""
    before = entries(chat(*messages).messages)
    after = told(before, tools, can)
    assert can.calls or not any("tool_calls" in entry for entry in after)
    assert can.results or "tool" not in {entry["role"] for entry in after}
    assert can.system or can.mid_system or "system" not in {entry["role"] for entry in after}
    assert can.mid_system or "system" not in {entry["role"] for entry in after[1:]}
    if can == Abilities(tools=True, calls=True, results=True):
        assert after == before
    text = json.dumps(after, ensure_ascii=False)
    assert all(json.dumps(entry["content"], ensure_ascii=False)[1:-1] in text for entry in before)


@given(conversations, st.sampled_from([CHATML, AGENT, TEXTUAL]))
def test_every_conversation_renders(messages, template):
    """A10: no conversation of calls, results and texts makes a common template raise."""
    assert isinstance(made(template).render_chat(chat(USER, *messages), WALL), str)


TEMPLATES = {}


def made(template):
    return TEMPLATES.setdefault(template, renderer(template))


def test_deep_arguments():
    """A14: arguments sent as text may nest as deep as they like: past a body's depth they stay text."""
    for levels, read in ((100, True), (128, True), (129, False), (5000, False), (500_000, False)):
        text = '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)
        entry = entries(chat(USER, calling(text)).messages)[1]
        assert isinstance(entry["tool_calls"][0]["function"]["arguments"], dict) is read
        assert isinstance(made(AGENT).render_chat(chat(USER, calling(text), RESULT), WALL), str)


@given(broken)
def test_captured_and_broken(sent):
    """A6: what a real body with one value replaced holds is rendered or refused, by every template."""
    request = judge(sent[0], json.dumps(sent[1]).encode(), Rules(mid_system="fold")).request
    if isinstance(request, ChatRequest):
        for template in (AGENT, STRICT):
            assert isinstance(made(template).render_chat(request, WALL), str | Refusal)


def test_captured():
    """D1: the tools and calls of real clients render in every template's way."""
    count = 0
    for _, file, body in captured():
        if not body.get("tools"):
            continue
        count += 1
        for template in (CHATML, AGENT, STRICT, TEXTUAL):
            request = chat(*body["messages"], tools=body["tools"])
            text = made(template).render_chat(request, WALL)
            assert not isinstance(text, Refusal), (file, text)
            assert all(tool["function"]["name"] in text for tool in body["tools"])
    assert count > 20


def test_a_template_that_takes_nothing():
    """D1: one that raises at everything can nothing, and what it raises at is not put on how messages are ordered."""
    assert Template("{{ raise_exception('no') }}", {}).can == Abilities(mid_system=False)


def test_a_demanding_template():
    """A10: a template that walks tools that are not there, wants them described and ids of nine is served."""
    bare = [{"type": "function", "function": {"name": "list"}}]
    assert "user: hi" in shown(USER, template=DEMANDING)
    assert "list: {}" in with_tools(DEMANDING, USER, tools=bare)
    again = {"role": "assistant", "content": None, "tool_calls": [call("{}", id="call_2")]}
    history = (USER, calling(ARGUMENTS), RESULT, again, {**RESULT, "tool_call_id": "call_2"}, USER)
    text = with_tools(DEMANDING, *history, tools=bare)
    assert '[call00000 read {"path": "a b", "n": 5}]' in text and "(call00000) tool: done" in text
    assert "[call00001 read {}]" in text and "(call00001) tool: done" in text


def test_what_is_demanded_of_no_template_else():
    """A10: where a template takes tools and ids as they are, they are as they were sent."""
    bare = [{"type": "function", "function": {"name": "list"}}]
    assert json.dumps(bare[0]) in with_tools(AGENT, USER, tools=bare)
    assert Template(AGENT, {}).can.ids and Template(AGENT, {}).can.bare_tools
    assert not Template(DEMANDING, {}).can.ids and not Template(DEMANDING, {}).can.bare_tools
