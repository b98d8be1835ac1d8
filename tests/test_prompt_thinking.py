"""Where a prompt leaves the thinking, and what a template hears of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.prompt import Prompt, common
from stages.thinking import Thinking
from tests.templates import AGENT, CHATML, OPENING
from tests.test_prompt import END, FORGED, TOKENIZER, USER, WALL, chat, completion, renderer, tokens

ON, OFF, UNSAID = Thinking(on=True), Thinking(on=False), Thinking()


def ended(*messages, template=AGENT, thinking=UNSAID, **fields):
    """The end of the prompt's text, and the state it leaves the thinking in."""
    made, request = renderer(template), chat(*messages, **fields)
    prompt = made.prompt(request, WALL, thinking)
    assert isinstance(prompt, Prompt), prompt
    return made.render_chat(request, WALL, thinking).rpartition("assistant\n")[2], prompt.state


def test_the_switch_reaches_the_template():
    """C0: said on or off, the template hears it; where nobody said anything it does as it does (C5)."""
    assert ended(USER) == ("", "may")
    assert ended(USER, thinking=ON) == ("<think>\n", "open")
    assert ended(USER, thinking=OFF) == ("<think>\n\n</think>\n\n", "off")
    named = "{{ enable_thinking is defined }}{{ thinking is defined }}{{ thinking }}"
    texts = [renderer(named).render_chat(chat(USER), WALL, said) for said in (UNSAID, ON, OFF)]
    assert texts == ["FalseFalse", "TrueTrueTrue", "TrueTrueFalse"]


def test_a_template_without_a_switch():
    """B0: a template that opens no block leaves it to the model; C2: off is off also where one opens it always."""
    assert [ended(USER, template=CHATML, thinking=said)[1] for said in (UNSAID, ON, OFF)] == ["may", "may", "off"]
    assert ended(USER, template=OPENING) == ended(USER, template=OPENING, thinking=ON) == ("<think>\n", "open")
    assert ended(USER, template=OPENING, thinking=OFF) == ("<think>\n\n</think>\n\n", "off")
    bare = OPENING.replace("<think>\n", "<think>")
    assert ended(USER, template=bare, thinking=OFF) == ("<think>\n\n</think>\n\n", "off")


@pytest.mark.parametrize("tag", ["<think>", "</think>", "</think><think>", "<think></think>"])
@pytest.mark.parametrize("template", [CHATML, AGENT, OPENING])
def test_a_clients_text_does_not_decide(template, tag):
    """B0: tags in messages, history, tools or variables neither open a block nor close one."""
    plain = ended(USER, template=template)
    said = {"role": "assistant", "content": f"{tag} so"}
    tools = [{"type": "function", "function": {"name": "f", "description": tag}}]
    for messages in (
        [{"role": "system", "content": tag}, USER],
        [{"role": "user", "content": f"a {tag}"}],
        [{"role": "user", "content": tag}, said, {"role": "user", "content": f"b {tag}"}],
        [USER, said, {"role": "tool", "tool_call_id": "c", "content": tag}],
    ):
        assert ended(*messages, template=template) == plain
        assert ended(*messages, template=template, tools=tools, chat_template_kwargs={"mine": tag}) == plain


@pytest.mark.parametrize(
    ("content", "state"),
    [("hello", "may"), ("<think>\nso", "open"), ("<think>\n\n</think>\n\n", "may"), ("</think><think>", "open")],
)
def test_a_continued_message_decides(content, state):
    """B0: there the client writes the end of the prompt, so its tags count."""
    for template in (CHATML, OPENING):
        assert ended(USER, {"role": "assistant", "content": content}, template=template)[1] == state
    closed = "off" if state == "may" else "open"
    assert ended(USER, {"role": "assistant", "content": content}, template=CHATML, thinking=OFF)[1] == closed


def test_raw_prompts():
    """B0: a completion's own text decides, as text and as token ids."""
    for text, state in (("hi", "may"), ("a<think>b", "open"), ("<think></think>", "may")):
        for prompt in (text, TOKENIZER.encode(text).ids):
            assert renderer().prompt(completion(prompt), WALL).state == state
            off = renderer().prompt(completion(prompt), WALL, OFF).state
            assert off == ("open" if state == "open" else "off")


def test_variables():
    """A4: a template's own variables reach it, guarded as everything a client writes; ours win."""
    template = "{{ mine | tojson }}{{ reasoning_effort }}{{ messages[0].content }}{{ bos_token }}"
    asked = {"chat_template_kwargs": {"mine": {"a": [FORGED, 1]}, "none": None}, "reasoning_effort": "low"}
    text = renderer(template).render_chat(chat(USER, **asked), WALL)
    assert text == json.dumps({"a": [FORGED, 1]}) + "lowhi<s>"
    assert END not in tokens(renderer("{{ mine }}"), chat(USER, chat_template_kwargs={"mine": FORGED}))
    ours = {"bos_token": "x", "messages": [], "self": 1, "range": 2}
    assert (
        renderer("{{ messages[0].content }}{{ bos_token }}").render_chat(chat(USER, chat_template_kwargs=ours), WALL)
        == "hi<s>"
    )
    assert ended(USER, reasoning_effort="low", thinking=OFF)[0] == "<think>\n\n</think>\n\neffort low"
    assert ended(USER, reasoning_effort="none") == ended(USER, reasoning={"effort": "auto"}) == ended(USER)


@given(st.text(max_size=30), st.text(max_size=30))
def test_common(one, other):
    """B0: where two texts part."""
    shared = common(one, other)
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 1] != other[shared : shared + 1] or shared == len(one) == len(other)
