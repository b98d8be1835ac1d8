"""A closing tag alone on a line of the answer, as the text stage lets it through."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.stray import Stray
from stages.text import Reading
from tests.split import Answer, said

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "w", "parameters": {"properties": {"x": {"type": "string"}}}}}
]
CUT = {
    "b\n</think>\nc": "b\nc",
    "b\n</think>": "b\n",
    "b\n</think> \r\n": "b\n",
    "</think>\nc": "c",
    "</think>\n</think>\n\nc": "\nc",
    "<think>x</think>\n</think>\nc": "<think>x</think>\nc",
    "```\na\n```\n</think>\nc": "```\na\n```\nc",
    "```\na\n~~~\n````\n</think>\nc": "```\na\n~~~\n````\nc",
}
KEPT = [
    "use `</think>` here",
    "b </think>\nc",
    " </think>\nc",
    "</think> c",
    "</think>c\n",
    "</thin\n",
    "<think>\nx\n</think>\nc",
    "a <think> b\n</think>\nc",
    "<think>\n<think>\n</think>\n</think>\nc",
    "```\n</think>\n```\nc",
    "~~~~ py\n```\n~~~\n</think>\n~~~~\nc",
]


@pytest.mark.parametrize("state", ["off", "open"])
@pytest.mark.parametrize(("text", "wanted"), [*CUT.items(), *[(text, text) for text in KEPT]])
def test_alone_on_a_line(text: str, wanted: str, state: str) -> None:
    """B7: not sent under a plan, its line break goes with it; kept in a sentence, in code and in a block of its own."""
    before = "why</think>" if state == "open" else ""
    for stops in ([], ["no such"]):
        for tools in (None, TOOLS, []):
            reading = Reading(shape="reasoning_content", state=state, plan=True, stops=stops, tools=tools)
            assert (said(before + text, reading)[0] or "") == wanted
    assert (said(before + text, Reading(shape="reasoning_content", state=state))[0] or "") == text


def test_kept_inside_a_call() -> None:
    """B7: a value may hold it."""
    call = "<tool_call>\n<function=w>\n<parameter=x>\na\n</think>\nb\n</parameter>\n</function>\n</tool_call>"
    text = f"{call}\n</think>\nok"
    assert said(text, Reading(plan=True, tools=TOOLS)) == ("\nok", "", [(0, "w", '{"x": "a\\n</think>\\nb"}')])


def test_no_more_is_held_than_may_be_the_line() -> None:
    """B7: each character decides: the line goes on with the first that is no part of a lone tag."""
    sent = [len(piece.parts) for piece in Answer(list("<a\n</thing"), "off").pushed(Reading(plan=True), [1] * 10)]
    assert sent == [0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]


@given(st.lists(st.sampled_from(["</think>", "<think>", "\n", "a", " ", "```", "~~~"]), max_size=14), st.data())
def test_any_cut(parts: list[str], data: st.DataObject) -> None:
    """B7: how the text is cut changes nothing, and no more than lone tags goes."""

    def through(pieces: list[str]) -> str:
        stray, out = Stray(lambda _: False), ""
        for piece in pieces:
            out += "".join(stray.push(piece))
        return out + stray.finish()

    text = "".join(parts)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *places, len(text)]
    whole = through([text])
    assert through([text[a:b] for a, b in itertools.pairwise(bounds)]) == whole == through(list(text))
    left = [line for line in text.split("\n") if line.rstrip(" ") != "</think>"]
    assert [line for line in whole.split("\n") if line.rstrip(" ") != "</think>" and line] == [x for x in left if x]


def test_blanks_behind_it_that_never_end() -> None:
    """B7: a line of more blanks than anyone writes is no lone tag's, and is not kept waiting."""
    for count in (200, 201, 5000):
        text = "</think>" + " " * count
        stray = Stray(lambda _: False)
        out = "".join(part for char in text for part in stray.push(char))
        assert (stray.held > 0) == (count <= 200)
        assert out + stray.finish() == ("" if count <= 200 else text)
        assert "".join(Stray(lambda _: False).push(text + "\n")) == ("" if count <= 200 else text + "\n")
