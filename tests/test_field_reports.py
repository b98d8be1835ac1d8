"""What users of other servers suffered (field reports 12 to 17), as far as an answer's text decides it.

Reports 10, 11, 18 and 22 stand with the engine, the constraint and the window. Every text here is read whole, by
character, in every two pieces and in random ones (``tests/split.py: said``).
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from stages.calls import Arguments, CallOpened
from stages.judge import Judged, Rules, judge
from stages.message import assembled
from stages.run import Caller, constraint, reading
from stages.schema import ChatRequest
from stages.text import Reading
from stages.toolcall import CallReader
from tests.split import Answer, message, said


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def xml(name: str, **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


TEXT = {"type": "string"}
WRITE = tool("write", path=TEXT, content=TEXT)
CALL = xml("write", path="/a", content="x")
SENT = (0, "write", '{"path": "/a", "content": "x"}')


def apart(**more: Any) -> Reading:
    return Reading(**{"shape": "reasoning_content", "state": "open", "tools": [WRITE], "plan": True, **more})


# 12: stop strings fire inside the thinking


def test_stops_do_not_fire_in_the_thinking() -> None:
    """B6: field report 12: neither in the thinking nor in the blank lines before the answer; in the answer they do."""
    text = "Question: why?\n\nQuestion: so.\n</think>\n\nIt is 4.\n\nQuestion: next"
    assert said(text, apart(stops=["\n\n"]))[:2] == ("It is 4.", "Question: why?\n\nQuestion: so.")
    assert said(text, apart(stops=["Question:"]))[:2] == ("It is 4.\n\n", "Question: why?\n\nQuestion: so.")
    pieces = Answer(list(text), "open").pushed(apart(stops=["Question:"]))
    assert pieces[-1].stopped and pieces[-1].n == text.rindex(" next")


@pytest.mark.parametrize("blank", ["\n \n", " \n\t\n\n", "\r\n\r\n", "\n\n \n"])
def test_no_stop_begins_in_a_blank_line_with_blanks(blank: str) -> None:
    """B6: field report 12: a line of blanks before the answer is a blank line too."""
    for stop in ("\n\n", "\n \n", "\t\n", "\r\n"):
        content, _, _ = said(f"hm</think>{blank}It is 4.{stop}more", apart(stops=[stop], tools=None))
        assert (content or "").lstrip() == "It is 4."
    assert said("hm</think>\n\n  It", apart(stops=[" It"]))[0] == " "


def test_a_stop_over_three_tokens_is_cut_cleanly() -> None:
    """B6: field report 12: nothing of it goes out, and what only looked like it does."""
    for tools in (None, [WRITE]):
        parts = ["hm", "</think>", "ok ", "#", "EN", "x #", "EN", "D more"]
        assert message(parts, apart(stops=["#END"], tools=tools))[0] == "ok #ENx "


def test_a_stop_inside_the_arguments_of_a_call() -> None:
    """B6: field report 12: decided: inside an open call no stop acts, in front of it and behind it each does."""
    text = f"a\n{xml('write', path='/a', content='one STOP two')}\nb STOP c"
    for plan in (True, False):
        wanted = [(0, "write", '{"path": "/a", "content": "one STOP two"}')]
        assert said(text, apart(stops=["STOP"], plan=plan, state="off")) == ("a\n\nb ", "", wanted)
    assert said("STOP" + text, apart(stops=["STOP"], state="off")) == ("", "", [])
    assert said(text, apart(stops=["STOP"], state="off", tools=None))[0] == text[: text.index("STOP")]


# 13, 14: calls that come late, or all at once


def test_a_file_write_streams_from_its_first_token() -> None:
    """D3: field report 13: name, first piece and every other one with their tokens; joined they are the whole's."""
    body = ["\tline <b> of text;\n"] * 1000
    parts = ["<tool_call>\n", "<function=write>\n", "<parameter=path>\n", "/a", "\n</parameter>\n"]
    parts += ["<parameter=content>\n", *body, "</parameter>\n", "</function>\n", "</tool_call>"]
    pieces = Answer(parts, "off").pushed(Reading(tools=[WRITE], plan=True), [1] * len(parts))
    assert isinstance(pieces[1].parts[0][0], CallOpened)
    first = next(at for at, piece in enumerate(pieces) if any("line" in str(delta) for p in piece.parts for delta in p))
    assert first - parts.index(body[0]) <= 2
    assert all(piece.parts for piece in pieces[first : first + len(body) - 1])
    whole = Answer(parts, "off").pushed(Reading(tools=[WRITE], plan=True))
    (_, _, streamed), (_, _, at_once) = (
        assembled(d for piece in x for p in piece.parts for d in p) for x in (pieces, whole)
    )
    assert streamed == at_once and json.loads(streamed[0][2]) == {"path": "/a", "content": "".join(body)[:-1]}


def test_one_call_cut_at_every_pair_of_places() -> None:
    """D3: field report 14: three pieces, one, or a character each: the same calls and content."""
    text = f"So: {xml('f', n='[1, 2]', s='<a>')}!"
    tools = [tool("f", n={"type": "array"}, s=TEXT)]

    def read(*pieces: str) -> Any:
        reader = CallReader(tools)
        return assembled([delta for piece in pieces for delta in reader.push(piece)] + reader.finish())

    wanted = ("So: !", "", [(0, "f", '{"n": [1, 2], "s": "<a>"}')])
    assert read(text) == read(*text) == wanted
    for a, b in combinations(range(len(text) + 1), 2):
        assert read(text[:a], text[a:b], text[b:]) == wanted, (a, b)


# 15: types wrong in both directions

TYPES = [
    ({"type": "integer"}, "150", 150),
    ({"type": "integer"}, "abc", "abc"),
    ({"type": "integer"}, "230.0", 230),
    ({"type": "string"}, "00123", "00123"),
    ({"type": "string"}, "null", "null"),
    ({"enum": ["none", "all"]}, "none", "none"),
    ({"type": "string", "enum": ["null", "x"]}, "null", "null"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"type": "array"}, "[1,2]", [1, 2]),
    ({"type": "boolean"}, "True", True),
    (None, "[1,2]", "[1,2]"),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPES)
def test_the_type_of_an_argument(schema: Any, text: str, value: Any) -> None:
    """D4: field report 15: a schema's type, or the text as it is; the call goes out in any case, streamed and not."""
    for tools in ([tool("f", x=schema)] if schema else [tool("f"), {"type": "function", "function": {"name": "f"}}],):
        for one in tools:
            _, _, calls = said(xml("f", x=text), Reading(tools=[one]))
            assert [(name, json.dumps(json.loads(arguments))) for _, name, arguments in calls] == [
                ("f", json.dumps({"x": value}))
            ]


# 16: tool_choice quietly ignored


def verdict(**fields: Any) -> Judged:
    body = {"messages": [{"role": "user", "content": "Hello, how are you?"}], **fields}
    return judge("chat", json.dumps(body).encode(), Rules())


def test_a_choice_is_a_constraint_or_a_refusal() -> None:
    """D5: field report 16: `required` and a named function bind the answer; what cannot be enforced is a 400."""
    two = [WRITE, tool("wipe", path=TEXT)]
    named = {"type": "function", "function": {"name": "wipe"}}
    for choice, only in (("required", None), (named, "wipe")):
        request = verdict(tools=two, tool_choice=choice).request
        assert isinstance(request, ChatRequest)
        bound = constraint(request)
        assert (bound.kind, bound.only, bound.parallel) == ("call", only, False)  # type: ignore[union-attr]
    for choice in ("auto", "none"):
        request = verdict(tools=two, tool_choice=choice).request
        assert request is not None and constraint(request) is None
    for fields in (
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [WRITE], "tool_choice": named},
    ):
        refusal = verdict(**fields).refusal
        assert refusal is not None and (refusal.param or "").startswith("tool_choice")


# 17: calls read out of the thinking, or made with no tools offered


def test_a_call_inside_a_block_that_never_closed() -> None:
    """D1: field report 17: decided: it is reasoning, no call, and it is counted."""
    for shape, wanted in {
        "reasoning_content": ("", CALL), "tags": (f"<think>\n{CALL}", ""),
        "both": (f"<think>\n{CALL}", CALL), "hidden": ("", ""),
    }.items():  # fmt: skip
        assert said(CALL, apart(shape=shape)) == (*wanted, [])
        last = Answer([*CALL]).pushed(apart(shape=shape))[-1]
        assert (last.lost_calls, last.opened_calls, last.open_call, last.dropped_calls) == (1, 0, False, 0)
    last = Answer([CALL[:-30]]).pushed(apart())[-1]
    assert (last.lost_calls, last.open_call) == (0, False)
    assert said(f"{CALL}\n</think>\n\n{CALL}", apart()) == (None, CALL, [SENT])


def test_an_explanation_of_the_form_calls_nothing() -> None:
    """D1: field report 17: prose about call syntax, in the thinking and in the answer."""
    prose = "A call is `<tool_call>` and then `<function=write>`, closed by </function>."
    assert said(f"{prose}</think>{prose}", apart()) == (prose, prose, [])


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WRITE], "tool_choice": "none"}])
def test_forced_call_text_with_no_tools_offered(fields: dict[str, Any]) -> None:
    """D7: field report 17: the content is clean, and nothing says that there was a call."""
    request = verdict(**fields).request
    assert isinstance(request, ChatRequest)
    read = reading(request, "off", Rules(), Caller())
    assert said(f"Fine.\n{CALL}", read) == ("Fine.\n", "", [])
    last = Answer([f"Fine.\n{CALL}"], "off").pushed(read)[-1]
    assert (last.opened_calls, last.closed_calls, last.open_call, last.dropped_calls) == (0, 0, False, 1)


def test_one_call_only_is_kept() -> None:
    """D6: field report 17: `parallel_tool_calls: false` keeps one, also where the text ends inside the next."""
    second = xml("write", path="/b", content="y")
    as_json = '<tool_call>\n{"name": "write", "arguments": {"path": "/b"}}\n</tool_call>'
    for more in (second, as_json):
        for size in range(1, len(more) + 1):
            pieces = Answer([f"{CALL}\n{more[:size]}"], "off").pushed(apart(state="off", parallel=False))
            said_calls = assembled(d for piece in pieces for part in piece.parts for d in part)[2]
            assert said_calls == [SENT]
            if size > len("<tool_call>"):
                assert (pieces[-1].opened_calls, pieces[-1].closed_calls, pieces[-1].open_call) == (1, 1, False), size


def test_no_call_has_an_empty_list_beside_it() -> None:
    """D2: field report 15, 16: a call that cannot be read is no call: none is told, so the finish is ``stop``."""
    for broken in (
        "<tool_call></tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        "<tool_call>\n<function=>\n</tool_call>",
    ):
        pieces = Answer([broken], "off").pushed(apart(state="off"))
        assert not any(isinstance(d, CallOpened | Arguments) for piece in pieces for part in piece.parts for d in part)
        assert (pieces[-1].opened_calls, pieces[-1].dropped_calls) == (0, 1)
