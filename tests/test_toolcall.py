import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import calltags, toolcall
from stages.calls import Arguments, CallClosed, CallOpened, Content, Dropped
from stages.toolcall import CallReader
from tests.captures import DATA

CASES_FILE = DATA / "toolcalls" / "xml_call_cases.json"
CASES = json.loads(CASES_FILE.read_text())["cases"] if CASES_FILE.exists() else []
# What the `policy` cases leave to us; where they are silent here, the case's own answer is ours.
POLICY = {
    "anyof_str_null": "D4: where a string is allowed the text stays",
    "typelist_str_null": "D4: the same by a type list",
    "union_str_int": "D4: the same beside an integer",
    "enum_mixed": "D4: equal to a non-string member and to no string one: that member",
    "untyped": "D4: declared without any type takes an object or list as JSON",
    "int_float": "D4: an integer written 5.0 is 5",
    "int_bad": "D4: what does not parse stays text",
    "nan": "D4: NaN is no JSON and stays text",
    "unknown_param": "D4: an undeclared parameter stays text; D8: it is one because its own close counts",
    "case_tool": "D1: names stay as written",
    "cut_tag": "D10: a call that the text ends in is open, none is complete",
    "code_fence": "D1: a fence that holds only calls is read, and is no content",
    "json_bad": "D1: a call of broken JSON is dropped",
    "close_tag_loop": "D8: what follows a call is content as written",
}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
READ = tool("read", path=TEXT, offset=NUMBER, limit=NUMBER)
WRITE = tool("write", path=TEXT, content=TEXT)
TOOLS = [READ, WRITE, tool("ping")]


def read(tools, pieces, parallel=True):
    """Calls as (name, arguments, complete), the content, why calls were dropped, whether one is open, calls complete.

    Also checks the order of the parts: opened, pieces, closed, one call at a time.
    """
    reader = CallReader(tools, parallel)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
    calls, content, dropped, current = [], "", [], None
    for delta in deltas:
        match delta:
            case Content(text):
                assert current is None and text
                content += text
            case CallOpened(index, name):
                assert current is None and index == len(calls)
                current = [name, ""]
            case Arguments(index, piece):
                assert current and index == len(calls) and piece
                current[1] += piece
            case CallClosed(index, complete):
                assert current and index == len(calls)
                calls.append((*current, complete))
                current = None
            case Dropped(reason):
                dropped.append(reason)
    assert current is None
    assert reader.complete == sum(complete for *_, complete in calls)
    return calls, content, dropped, reader.open


def cuts(text, rng, halves=150):
    """By character, cut in two (a sample of long ones), and in random pieces."""
    yield list(text)
    places = range(len(text) + 1)
    for at in places if len(text) <= halves else sorted(rng.sample(places, halves)):
        yield [text[:at], text[at:]]
    for _ in range(10):
        ends = sorted(rng.choices(places, k=rng.randint(1, 12)))
        yield [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def every(text, tools=TOOLS, parallel=True):
    """The one result that all cuts give."""
    whole = read(tools, [text], parallel)
    for pieces in cuts(text, random.Random(len(text))):
        assert read(tools, pieces, parallel) == whole, pieces
    return whole


def typed(value):
    """Equal only with the same types: 5 is not 5.0, nor True 1."""
    return json.dumps(value)


@pytest.mark.skipif(not CASES, reason="toolcalls/xml_call_cases.json is not in the data folder")
def test_every_policy_is_decided():
    """D1: each case that leaves a choice has its row here."""
    assert sorted(POLICY) == sorted(case["id"] for case in CASES if case["level"] == "policy")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_cases(case):
    """D1: the recorded cases, at every cut; calls, types and content (D4, D8)."""
    calls, content, _, _ = every(case["text"], case["tools"])
    whole = [(name, json.loads(arguments)) for name, arguments, complete in calls if complete]
    wanted = [(call["name"], call["arguments"]) for call in case["calls"]]
    if case["id"] == "int_float":
        wanted = [("pick", {"n": 5})]
    assert typed(whole) == typed(wanted)
    assert content == case["content"]


# D1: the lenient form


def call(name, complete=True, **arguments):
    return (name, json.dumps(arguments, ensure_ascii=False), complete)


A = call("read", path="/a")
VALUE = "<parameter=path>\n/a\n</parameter>\n"
LENIENT = {
    "stray spaces": "<tool_call> < function= read >\n <parameter =path>/a</ parameter >\n </function >\n</tool_call>",
    "on one line": "<tool_call><function=read><parameter=path>/a</parameter></function></tool_call>",
    "no </function>": f"<tool_call>\n<function=read>\n{VALUE}</tool_call>",
    "no </parameter>": "<tool_call>\n<function=read>\n<parameter=path>\n/a\n</function>\n</tool_call>",
    "only </tool_call>": "<tool_call>\n<function=read>\n<parameter=path>\n/a\n</tool_call>",
    "only </function>": "<function=read>\n<parameter=path>\n/a\n</function>",
    "<tool_call> twice": f"<tool_call>\n<tool_call>\n<function=read>\n{VALUE}</function>\n</tool_call>",
    "blanks around": f"\n\n<tool_call>\n<function=read>\n{VALUE}</function>\n</tool_call>\n ",
    "text between the tags": f"<tool_call>\n<function=read>\npath:\n{VALUE}</function>\n</tool_call>",
    "a parameter twice": f"<function=read>\n{VALUE}<parameter=path>\n/b\n</parameter>\n</function>",
    "JSON, bare": '{"name": "read", "arguments": {"path": "/a"}}',
    "JSON, fenced": '```json\n{ "name":"read", "arguments":"{\\"path\\": \\"/a\\"}" }\n```\n',
    "JSON, no close": '<tool_call>{"arguments": {"path": "/a"}, "name": "read"}',
}


@pytest.mark.parametrize("text", LENIENT.values(), ids=LENIENT)
def test_lenient_forms(text):
    """D1: one call, and nothing of its writing is content."""
    assert every(text) == ([A], "", [], False)


@pytest.mark.parametrize("text", [LENIENT["no </function>"], LENIENT["only </tool_call>"], LENIENT["JSON, bare"]])
def test_calls_in_a_row(text):
    """D1: a call begins where the one before left out its closes."""
    second = text.replace("/a", "/b")
    assert every(f"{text}\n{second}") == ([A, call("read", path="/b")], "", [], False)


UNREAD = {
    "<tool_call></tool_call>": "no name",
    "<tool_call>\n<parameter=path>\n/a\n</parameter>\n</tool_call>": "no name",
    "<tool_call>\n<function={{ name }}>\n<parameter=path>\n</function>\n</tool_call>": "no name",
    "<tool_call>\n<function=>\n</function>\n</tool_call>": "no name",
    '<tool_call>{"arguments": {}}</tool_call>': "no name",
    '<tool_call>{"name": "read", "arguments": [1]}</tool_call>': "broken JSON",
    '<tool_call>{"name": "read", "arguments": {"path": NaN}}</tool_call>': "broken JSON",
    '<tool_call>{"name": "read", "arguments": {"limit": 1e999}}</tool_call>': "broken JSON",
    '<tool_call>{"name": "read", "arguments": "{"}</tool_call>': "broken JSON",
    '{"name": "read", "arguments": {path}}': "broken JSON",
    '<tool_call>{"name": "read"\n</tool_call>': "broken JSON",
}


@pytest.mark.parametrize("text", UNREAD)
def test_a_call_that_cannot_be_read_is_dropped_and_counted(text):
    """D1: what is before and after stays, and so does the next call."""
    after = "\n<function=read>\n<parameter=path>\n/a\n</parameter>\n</function>\n."
    assert every(f"Now:\n{text}{after}") == ([A], "Now:\n\n.", [UNREAD[text]], False)


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> and then <function=read>, as in `<tool_call>`.",
        '{"name": "Ada", "arguments": {}}',
        '{"name": "read", "path": "/a"}',
        'It is {"name": "read", "arguments": {}} here',
        "```xml\nAn example:\n<tool_call>\n<function=read>\n</function>\n</tool_call>\n```\n",
        "```xml\n<tool_call>\n<function=read>\n</function>\n</tool_call>\n```js\nand so on\n```",
        "```\n<function=read>\n</function>\n# read nothing\n<function=ping>\n</function>\n````\n",
        "```\n```\n",
        "```py",
        " \n\n",
        "<function={{ name }}>",
    ],
)
def test_text_that_only_looks_like_a_call_is_content(text):
    """D1, D8: an explanation of the form calls nothing, and no character of it is lost."""
    assert every(text) == ([], text, [], False)


def test_after_a_fence_that_is_text_calls_are_read_again():
    """D1: a fence ends with its own ticks."""
    fence = "````\n<function=read>\n</function>\n```\nx\n````\n"
    assert every(fence + LENIENT["on one line"]) == ([A], fence, [], False)


# D3, D8: values


def xml(name, arguments, tight=False):
    """A call as the chapter's form writes it."""
    edge = "" if tight else "\n"
    values = [f"<parameter={key}>{edge}{text}{edge}</parameter>\n" for key, text in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def as_text(value):
    return value if isinstance(value, str) else json.dumps(value)


nested = xml("write", {"path": "v", "content": "</parameter>"})
pieces_of_values = [
    "</parameter>.",
    "</function>;",
    "</tool_call>!",
    "<tool_call> ",
    "<function=",
    "<parameter=new>",
    nested,
]
pieces_of_values += ["<![CDATA[", "\n", " ", "<", "a", '"', "\\", "é", "😀", "```\n", '{"name": "read", "arguments": ']
pieces_of_values += ["\r\n", "</param"]
hazards = st.sampled_from(pieces_of_values)
# A value that spells the end of a call and the begin of the next one reads, in the lenient form, as just that (D1).
END_AND_BEGIN = re.compile(r"</tool_call>\s*<tool_call>")
values = st.lists(hazards, max_size=8).map("".join).filter(lambda value: not END_AND_BEGIN.search(value))
numbers = st.integers(-(10**20), 10**20)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)
KEYS = {
    "s": values,
    "t": values,
    "n": numbers,
    "b": st.booleans(),
    "o": st.dictionaries(st.text(max_size=3), anything, max_size=3),
}
MANY = tool("many", s=TEXT, t=TEXT, n=NUMBER, b={"type": "boolean"}, o={"type": "object"})
some = st.fixed_dictionaries({}, optional=KEYS)


@given(st.lists(some, max_size=4), st.randoms(use_true_random=False), st.sampled_from(["xml", "json", "tagged"]))
@settings(deadline=None)
def test_a_rendered_call_reads_back(calls, rng, form):
    """D3: whatever the values hold, at random cuts; the pieces joined are JSON."""
    texts = []
    for arguments in calls:
        text = json.dumps({"name": "many", "arguments": arguments})
        if form == "xml":
            text = xml("many", {key: as_text(value) for key, value in arguments.items()})
        texts.append(f"<tool_call>\n{text}\n</tool_call>" if form == "tagged" else text)
    text = "\n".join(texts)
    wanted = [one for one, before in zip(calls, [None, *calls], strict=False) if typed(one) != typed(before)]
    ends = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 20)))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    got, content, dropped, still = read([MANY], pieces)
    assert [typed(json.loads(arguments)) for _, arguments, _ in got] == [typed(one) for one in wanted]
    assert (content, len(dropped), still) == ("", len(calls) - len(wanted), False)
    assert read([MANY], list(text)) == (got, content, dropped, still)


marks = [
    "<tool_call>",
    "</tool_call>",
    "<function=read>",
    "<function=x>",
    "</function>",
    "<parameter=path>",
    "</parameter>",
]
marks += [
    "<parameter=limit>",
    "<parameter=u>",
    "\n",
    "\n",
    " ",
    "<",
    "a",
    "1",
    "```",
    "`",
    "{",
    "}",
    '"',
    "<function=",
    ">",
]
marks += ['{"name": "read", "arguments": {', '"path": "', "\\", "< tool_call >", "</func"]
soups = st.lists(st.sampled_from(marks), max_size=30).map("".join)


@given(soups, st.randoms(use_true_random=False), st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_text_gives_one_result_at_every_cut(text, rng, parallel):
    """D3: the result depends on the text only, never on how it came; a complete call's arguments are JSON."""
    whole = read([READ], [text], parallel)
    assert read([READ], list(text), parallel) == whole
    at = rng.randint(0, len(text))
    assert read([READ], [text[:at], text[at:]], parallel) == whole
    assert all(isinstance(json.loads(arguments), dict) for _, arguments, complete in whole[0] if complete)


words = [
    "a",
    " ",
    "\n",
    "<",
    "<tool",
    "<tool_call> is",
    "</tool_call>",
    "`",
    "```",
    "```xml\n",
    "{",
    '{"name": "read"',
    "<parameter=path>",
]


@given(st.lists(st.sampled_from(words), max_size=20).map("".join))
@settings(deadline=None)
def test_no_character_of_text_is_lost(text):
    """D8: content is as written, before a call and after it."""
    assert read(TOOLS, list(text)) == ([], text, [], False)
    before, after = f"x{text}.\n\n", f"\n.{text}"
    got, content, _, _ = read(TOOLS, list("x\n" + xml("read", {"path": "/a"}) + after))
    assert (got, content) == ([A], "x\n" + after)
    if "`" not in text:
        got, content, _, _ = read(TOOLS, list(before + xml("read", {"path": "/a"})))
        assert (got, content) == ([A], before)


def test_a_call_in_a_value_is_counted():
    """D8: two deep, and beside a mention that opens nothing."""
    inner = "see <function=x>:\n" + xml("write", {"path": "p", "content": xml("read", {"path": "/a"})}) + "\nend"
    assert every(xml("write", {"path": "f", "content": inner})) == (
        [call("write", path="f", content=inner)],
        "",
        [],
        False,
    )


def test_a_tool_without_declared_parameters_knows_them_all():
    """D8: where nothing is declared any parameter ends the one before."""
    text = xml("other", {"a": "1", "b": "x\n</parameter>\ny"})
    assert every(text)[0] == [call("other", a="1", b="x\n</parameter>\ny")]


def sent(text, tools=TOOLS, parallel=True):
    """By character, what a client has after each."""
    reader, out, total = CallReader(tools, parallel), [], ""
    for char in text:
        for delta in reader.push(char):
            total += {Content: "text", Arguments: "piece", CallOpened: "name"}.get(type(delta), "") and (
                getattr(delta, "text", "") or getattr(delta, "piece", "") or f"[{getattr(delta, 'name', '')}]"
            )
        out.append(total)
    return out


def test_names_go_first_and_text_follows_as_it_is_written():
    """D3: the name when its tag is whole, and each character of a string at once; only a newline waits for the next."""
    text = "<tool_call>\n<function=write>\n<parameter=path>\nab\ncd"
    out = sent(text)
    at = text.index("write>") + len("write>")
    assert out[at - 2] == "" and out[at - 1] == "[write]{"
    assert [step[len('[write]{"path": ') :] for step in out[-5:]] == ['"a', '"ab', '"ab', '"ab\\nc', '"ab\\ncd']


def test_typed_values_wait_until_complete():
    """D4: an integer goes out whole, and a value without a type as soon as it is no object."""
    assert sent("<function=read>\n<parameter=limit>\n12")[-1] == '[read]{"limit": '
    assert sent("<function=read>\n<parameter=limit>\n12\n</parameter>\n</function>")[-1] == '[read]{"limit": 12}'
    free = [tool("free", x={})]
    assert sent("<function=free>\n<parameter=x>\n [1", free)[-1] == '[free]{"x": '
    assert sent("<function=free>\n<parameter=x>\n a", free)[-1] == '[free]{"x": " a'


@pytest.mark.parametrize(
    "text", ["a < b", "<tool x", "`code` {a}", "``` x", '{"name": "x', "<function x", "x <function=read>"]
)
def test_text_is_held_no_longer_than_it_may_become_a_mark(text):
    """D8: the last character of each decides, and all of it is out."""
    assert sent(text + ("\n." if text.startswith("```") else ""))[-1].startswith(text.rstrip())


# D6, D10


def test_one_call_without_parallel():
    """D6: the first call is kept, the others are counted; text stays."""
    two = xml("ping", {}) + "\n" + xml("read", {"path": "/a"}) + "\nok"
    assert every(two, parallel=False) == ([call("ping")], "\nok", ["parallel"], False)
    assert every(two[:-25], parallel=False) == ([call("ping")], "", ["parallel"], False)


def test_a_call_identical_to_the_one_before_is_dropped():
    """D6: held while it is a prefix, released at the first difference; the next but one may repeat."""
    a, b = xml("read", {"path": "/abc"}), xml("read", {"path": "/abd"})
    first, second = call("read", path="/abc"), call("read", path="/abd")
    assert every(f"{a}\n{a}\n{b}\n{a}") == ([first, second, first], "", ["repeated"], False)
    out = sent(f"{a}\n{b}")
    assert out[len(a) + b.index("abd") + 2] == out[len(a)]
    assert out[len(a) + b.index("abd") + 3] == out[len(a)] + '[read]{"path": "/abd'
    assert every(f"{a}\n{b[:-50]}") == ([first], "", ["cut"], True)


@pytest.mark.parametrize(
    ("text", "complete", "still"),
    [
        (xml("ping", {}), 1, False),
        (xml("ping", {}) + "\n<tool_call>", 1, True),
        (xml("ping", {}) + "\n<tool_call>\n<function=re", 1, True),
        ("<tool_call>\n<function=ping", 0, True),
        ("<tool_call>\n<function=read>\n<parameter=path>\n/a\n</parameter>", 0, True),
        ("<tool_call>\n<function=read>\n<parameter=path>\n/a\n</parameter>\n</function>", 1, False),
        ('<tool_call>{"name": "read", "argum', 0, True),
        ("```xml\n<function=read>\n<parameter=path>\n/a", 0, True),
        ("text", 0, False),
    ],
)
def test_the_facts_at_the_end(text, complete, still):
    """D10: how many calls are complete, and whether the text ended inside one."""
    calls, _, _, is_open = every(text)
    assert (sum(whole for *_, whole in calls), is_open) == (complete, still)


@pytest.mark.parametrize(
    ("text", "char", "inside"),
    [
        ("", "<", False),
        ("a <tool_call", ">", False),
        ("<tool_call>", "\n", True),
        ("<tool_call>\n", "<", True),
        ("<tool_call>\n", "{", True),
        ("<tool_call> ", "i", False),
        ("<tool_call>\n<function", "=", True),
        ("<function=", "r", True),
        ("a <function=", "r", False),
        ("<function=read>", "\n", True),
        ("<function=read>\n<parameter=path>\n/a</function>", "x", True),
        ("<function=ping></function>", "\n", False),
        ("<function=ping></function>\n</tool_", "c", False),
        ("<tool_call>\n<function=>", "x", True),
        ('{"name"', ":", False),
        ('{"name":', " ", True),
        ('{"name": "read", "arguments": {}', "}", True),
        ('{"name": "read", "arguments": {}}', "\n", False),
        ("```\n<function=ping>", "\n", True),
    ],
)
def test_whether_the_next_character_stands_in_a_call(text, char, inside):
    """B6: however the text came; behind a mark that may begin a call it does."""
    whole, bits = CallReader(TOOLS), CallReader(TOOLS)
    whole.push(text)
    for bit in text:
        bits.push(bit)
    assert whole.inside(char) == bits.inside(char) == inside


@pytest.mark.parametrize(
    "text", ["", "a", "\n ", "a <tool", "<function=read>\n<parameter=path>\nab\n", "```x\n", "```\n"]
)
def test_what_is_held_is_what_was_not_said(text):
    """F7: beside the text that went out, the characters held are all there are."""
    held = {"\n ": 2, "a <tool": 5, "<function=read>\n<parameter=path>\nab\n": 1, "```x\n": 5, "```\n": 4}
    reader = CallReader(TOOLS)
    reader.push(text)
    assert reader.held == held.get(text, 0)
    reader.finish()


def test_a_long_value_costs_what_it_is_long():
    """D3: a file of many small pieces is read in one walk."""
    content = "let x = a < b; // <p>\n" * 5000
    text = xml("write", {"path": "f", "content": content})
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    assert read(TOOLS, pieces)[0] == [call("write", path="f", content=content)]
    assert read(TOOLS, [text])[0] == read(TOOLS, pieces)[0]


@pytest.mark.parametrize("end", ["", "\n</function>\n</tool_call>"])
def test_a_row_of_closes_is_walked_once(monkeypatch, end):
    """D8: a model that writes an undeclared parameter for ever costs no more than its text, at any cut."""
    looks, tag_at = [], calltags.tag_at
    monkeypatch.setattr(calltags, "tag_at", lambda *given: looks.append(1) or tag_at(*given))
    row = "\n</parameter>\n<parameter=foo>\nbar" * 400
    text = f"<tool_call>\n<function=read>\n<parameter=path>\n/a{row}\n</parameter>{end}"
    for pieces in ([text[at : at + 4] for at in range(0, len(text), 4)], [text]):
        looks.clear()
        calls, content, _, still = read(TOOLS, pieces)
        assert (len(calls), content, still) == (1, "", not end)
        assert len(looks) < 3 * len(pieces) + 5 * 400
    values = json.loads(calls[0][1]) if end else {}
    assert values == ({"path": "/a", "foo": "bar"} if end else {})


@pytest.mark.parametrize(
    ("before", "blank", "after"),
    [
        ("<tool_call>", " ", "<function=ping>\n</function>"),
        ("<function=read>\n<parameter=path>\n/a</parameter>", "\n", "</function>"),
        ('{"name"', " ", ': "ping", "arguments": {}}'),
        ("```", "`", "\nx"),
    ],
)
def test_marks_end_where_nobody_writes_on(before, blank, after):
    """D8: what waits for the rest of a mark waits for no more than is ever written; how it came changes nothing."""
    reader = CallReader(TOOLS)
    for _ in range(6000):
        reader.push(blank)
    for char in before + blank * 5000:
        reader.push(char)
    assert reader.held <= 1 or blank != "`"
    for count in (3, 4095, 4096, 4097, 6000):
        text = before + blank * count + after
        assert (
            read(TOOLS, list(text)) == read(TOOLS, [text]) == read(TOOLS, [text[:4000], text[4000:4200], text[4200:]])
        )


@pytest.mark.parametrize("name", ["say it", "a=b", "it's", 'say "x"', "über/alles:1.0", "{{ name }}"])
def test_an_offered_tool_is_called_whatever_its_name(name):
    """D1, D5: names stay as written: one that is offered can be called, so a forced call is never dropped."""
    tools = [tool(name, path=TEXT)]
    as_json = json.dumps({"name": name, "arguments": {"path": "/a"}}, ensure_ascii=False)
    for text in (xml(name, {"path": "/a"}), as_json, f"<tool_call>\n{as_json}\n</tool_call>"):
        assert every(text, tools) == ([call(name, path="/a")], "", [], False)
    if "{" in name:
        assert every(f"<tool_call>\n{as_json}\n</tool_call>") == ([], "", ["no name"], False)


@given(soups, st.booleans())
@settings(deadline=None, max_examples=300)
def test_a_long_text_is_read_in_windows(text, parallel):
    """D3: however small a window is, the result is that of the whole."""
    whole = read([READ], [text], parallel)
    with pytest.MonkeyPatch.context() as patch:
        for size in (1, 3, 16):
            patch.setattr(toolcall, "_WINDOW", size)
            assert read([READ], [text], parallel) == whole
