"""Thinking and answer: the recorded cases at every cut, and each shape of row B1 to B10."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.protocol import Turn
from stages.calls import CallOpened, Content, Delta, Reasoning
from stages.reasoning import Split, tag_begin
from stages.text import Reading, TextStage
from tests.captures import DATA
from tests.split import CLOSE, OPEN, Answer, deltas, message, said

CASES_FILE = DATA / "toolcalls" / "reasoning_cases.json"
CASES: list[dict[str, Any]] = json.loads(CASES_FILE.read_text()) if CASES_FILE.exists() else []
# What the `policy` cases leave to us. The case's own answer is the raw path's; where a plan's is another, it is here.
POLICY = {
    "call_without_close": "D1: a call in a block that never closed is reasoning",
    "second_close_alone": "B7: the raw path drops nothing; under a plan the line goes",
}
UNDER_A_PLAN = {"second_close_alone": "b\nc"}
READ: dict[str, Any] = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
CALL = "<tool_call>\n<function=read>\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.skipif(not CASES, reason="toolcalls/reasoning_cases.json is not in the data folder")
def test_every_policy_is_decided() -> None:
    """B7: each case that leaves a choice has its row here."""
    assert sorted(POLICY) == sorted(case["id"] for case in CASES if case["level"] == "policy")


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_cases(case: dict[str, Any], plan: bool) -> None:
    """B2: the recorded cases: whole, by character, in every two pieces, in random ones."""
    stops = ["\n\n"] if plan and case["id"] == "stop_in_thinking" else []
    state = "open" if case["block_opened_in_prompt"] else "may"
    reading = Reading(shape="reasoning_content", state=state, tools=[READ], plan=plan, stops=stops)
    content, reasoning, calls = said(case["raw"], reading)
    wanted = UNDER_A_PLAN.get(case["id"], case["content"]) if plan else case["content"]
    assert (content or "", reasoning) == (wanted, case["reasoning"])
    assert [{"name": name, "arguments": json.loads(arguments)} for _, name, arguments in calls] == case["calls"]


def both(text: str, shape: str, **more: Any) -> tuple[str | None, str]:
    return said(text, Reading(shape=shape, state=more.pop("state", "open"), **more))[:2]


def test_tags() -> None:
    """B1: the opener, the thinking, the tag, the blank lines and the answer, all in content."""
    assert both("why\n</think>\n\nx", "tags") == ("<think>\nwhy\n</think>\n\nx", "")
    assert both("</think>x", "tags") == ("<think>\n</think>x", "")
    assert both("why", "tags") == ("<think>\nwhy", "")


def test_tags_hold_nothing_back() -> None:
    """B1: what a tag may begin with goes out at once, and the opener goes in front of the first text."""
    stage = TextStage([b"", b"a\n", b"</", b"think>"], Reading(state="open"))
    pushes: list[tuple[list[int], list[Turn]]] = [([0], []), ([1], []), ([2], []), ([3], [Turn("closed", 3, 8, 0)])]
    parts = [stage.push(ids, turns).parts for ids, turns in pushes]
    assert parts == [[], [[Content("<think>\na\n")]], [[Content("</")]], [[Content("think>")]]]


def test_no_text_at_all() -> None:
    """B1, B3: the opener goes out once, before the finish; the shapes without tags have none."""
    for shape, parts in {"tags": ["<think>\n"], "both": ["<think>\n"], "reasoning_content": [], "hidden": []}.items():
        for ids in ([], [0]):
            stage = TextStage([b"\xe2"], Reading(shape=shape, state="open"))
            assert stage.push(ids).parts == []
            assert stage.finish().parts == [[Content(part)] for part in parts]
            assert stage.finish().parts == []


def test_the_model_opens_the_block() -> None:
    """B1: its own tag and newline, with blanks in front, become the one opener."""
    for text in ("<think>why</think>x", "<think>\nwhy</think>x", "\n <think>\nwhy</think>x"):
        assert both(text, "tags", state="may") == ("<think>\nwhy</think>x", "")
        assert both(text, "reasoning_content", state="may") == ("x", "why")
    assert both("<think>\n\nwhy", "tags", state="may") == ("<think>\n\nwhy", "")
    assert both("<think>", "tags", state="may") == ("<think>\n", "")
    assert both("<think></think>", "both", state="may") == ("<think>\n</think>", "")
    assert message([" ", OPEN, "\n", "why", CLOSE, "x"], Reading(state="may"))[0] == "<think>\nwhy</think>x"


@pytest.mark.parametrize("shape", ["tags", "reasoning_content", "both", "hidden"])
@pytest.mark.parametrize("text", ["\n\nx", "<table>", "<thi", "\n ", "x <think>y</think>", "</think>x"])
def test_it_does_not_think(text: str, shape: str) -> None:
    """B5: plain content in every shape where thinking is off, and where the model opened no block."""
    assert both(text, shape, state="off") == both(text, shape, state="may") == (text, "")


def test_reasoning_content() -> None:
    """B2: thinking apart, tags dropped, and newlines after the close until the first other character."""
    assert both("a\nb\n\n</think>\n\n x\n", "reasoning_content") == (" x\n", "a\nb")
    assert both("why\n", "reasoning_content") == ("", "why\n")
    assert both("</think>", "reasoning_content") == ("", "")


def test_a_tag_is_not_reasoning() -> None:
    """B2: what may still be the closing tag, or the newline in front of it, waits; and no more than that."""
    stage = TextStage([b"a\n", b"</thi", b"s", b"nk>"], Reading(shape="reasoning_content", state="open"))
    assert [stage.push([token]).parts for token in (0, 1, 2)] == [
        [[Reasoning("a")]], [], [[Reasoning("\n</this")]],
    ]  # fmt: skip
    assert [tag_begin(text) for text in ("", "a", "<", "a\n\n</", "</think", "</think>", "</ ")] == [
        0,
        0,
        1,
        4,
        7,
        0,
        0,
    ]


def test_both() -> None:
    """B3: as tags in content, and apart as well."""
    assert both("why\n</think>\n\nx", "both") == ("<think>\nwhy\n</think>\n\nx", "why")


def test_hidden() -> None:
    """B10: the thinking is counted and not sent."""
    answer = Answer(["a", "b\n", "</think>", "\n\n", "x"])
    pieces = answer.pushed(Reading(shape="hidden", state="open"))
    assert deltas(pieces) == [Content("x")]
    assert pieces[-1].reasoning == answer.count == 3


def test_the_tag_as_a_special_token() -> None:
    """C6: it writes no bytes; beside the tags it is written all the same, and a half-written one before it is text."""
    parts = ["why", CLOSE, "\n\n", "x"]
    assert message(parts, Reading(state="open"))[0] == "<think>\nwhy</think>\n\nx"
    assert message(parts, Reading(shape="both", state="open")) == ("<think>\nwhy</think>\n\nx", "why", [])
    assert message(["</thi", CLOSE, "x"], Reading(shape="reasoning_content", state="open")) == ("x", "</thi", [])
    assert message([CLOSE, "x"], Reading(state="open"))[0] == "<think>\n</think>x"


def test_a_tag_inside_a_token() -> None:
    """C6: bytes before it are thinking, those behind are answer; two turns in one token are told apart."""
    assert message(["a</think>b"], Reading(shape="reasoning_content", state="open")) == ("b", "a", [])
    assert message([" <think>a</think>b"], Reading(shape="reasoning_content", state="may")) == ("b", "a", [])


def test_no_character_reaches_across_a_tag() -> None:
    """F2: bytes left open where a forced tag closes the block are none of the answer's."""
    parts = [b"a\xe2\x82", CLOSE, b"\xac", "x"]
    assert message(parts, Reading(shape="reasoning_content", state="open")) == ("x", "a", [])


def test_where_it_closed_is_told_once() -> None:
    """C6: with the push of the token that closed it, and its reason; reasoning counts through it."""
    answer = Answer(["a", "</", "think>", "\n\nx", "</think>"])
    told = [(piece.closed, piece.closed_at, piece.reasoning) for piece in answer.pushed(Reading(state="open"), [1] * 5)]
    assert told == [("", -1, 1), ("", -1, 2), ("model", 2, 3), ("", -1, 3), ("", -1, 3), ("", -1, 3), ("", -1, 3)]
    forced = TextStage([b"a", b""], Reading(state="open"))
    piece = forced.push([0, 0, 1, 0], [Turn("closed", 2, 0, 0, "budget")])
    assert (piece.closed, piece.closed_at, piece.reasoning) == ("budget", 2, 3)


def test_reasoning_counts_from_the_opening_tag() -> None:
    """B0: through the tokens of both tags; without a block it is none."""
    answer = Answer(["\n", "<th", "ink>", "a", "</think>", "b"], "may")
    assert answer.pushed(Reading(state="may"))[-1].reasoning == answer.count == 3
    assert Answer(["a", "b"], "may").pushed(Reading(state="may"))[-1].reasoning == 0


def test_blank_lines_at_once() -> None:
    """B9: one content delta when the reasoning closes, also when a call follows; the model's own are dropped."""
    reading = Reading(shape="reasoning_content", state="open", blank_line=True, tools=[READ])
    for blanks in ("\n\n", "\n", ""):
        pieces = Answer(["why", CLOSE, blanks, CALL]).pushed(reading, [1, 1])
        assert pieces[1].parts == [[Content("\n\n")]]
        first: list[Delta] = pieces[2].parts[0]
        assert isinstance(first[0], CallOpened)
    assert said("why</think>\nx", reading) == ("\n\nx", "why", [])
    tags = Reading(shape="tags", state="open", blank_line=True)
    assert said("why</think>\nx", tags)[0] == "<think>\nwhy</think>\nx"


def test_the_split_alone() -> None:
    """B2: it searches for nothing: a closing tag without the engine's word is text."""
    split = Split("reasoning_content", "open")
    assert split.push("a</think>b") == [("reasoning", "a</think>b")]
    assert split.turn("c</think>", "closed", 8) == [("reasoning", "c")]
    assert split.push("\n") == [] and split.push("\nx") == [("answer", "x")]


@pytest.mark.parametrize("shape", ["tags", "reasoning_content", "both", "hidden"])
def test_newlines_in_the_thinking(shape: str) -> None:
    """B2: those that are none of the close's are thinking, in their number and place; the last are dropped."""
    text = "\n\na\n\n</thi\n\n\n<</\n\nb\n\n\n</think>\n\nx"
    thinking = text.partition("\n\n\n</think>")[0]
    reading = Reading(shape=shape, state="open")
    content, reasoning, _ = said(text, reading)
    assert reasoning == (thinking if shape in ("reasoning_content", "both") else "")
    assert content == ("<think>\n" + text if shape in ("tags", "both") else "x")
    cut = said(text[: text.index("think>", 9)], reading)
    assert cut[1] == (text[: text.index("think>", 9)] if reasoning else "")


def test_what_waits_does_not_grow_what_a_token_costs() -> None:
    """B0, B2: blanks for ever in front of an answer, and newlines in the thinking, are counted and not read again."""
    for state, where in (("may", "content"), ("open", "reasoning")):
        split = Split("reasoning_content", state)
        assert all(split.push("\n\n") == [] for _ in range(1000))
        assert split.held == 2000
        assert split.push("x") == [("answer" if where == "content" else where, "\n" * 2000 + "x")]
        assert split.held == 0
