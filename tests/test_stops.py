"""Stop strings alone, and where in an answer they act."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.calls import CallOpened, Content, Reasoning
from stages.stops import Stops
from stages.text import Reading
from tests.split import CLOSE, Answer, Said, deltas, said

words = st.text(alphabet="ab", min_size=1, max_size=4)
READ: dict[str, Any] = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
VALUE = "<parameter=path>\n/a\n</parameter>\n"
CALL = f"<tool_call>\n<function=read>\n{VALUE}</function>\n</tool_call>"
SENT = (0, "read", '{"path": "/a"}')


@given(st.text(alphabet="abc", max_size=30), st.lists(words, max_size=4))
def test_each_character(text: str, stops: list[str]) -> None:
    """A1: by the definition: the longest stop the text ends with; what is held is the longest begin of one."""
    walk = Stops(stops)
    for end, char in enumerate(text, 1):
        if not stops:
            assert not walk
            return
        seen = text[:end]
        complete = max((len(stop) for stop in stops if seen.endswith(stop)), default=0)
        assert walk.take(char) == complete
        if complete:
            return
        begins = [size for stop in stops for size in range(len(stop) + 1) if seen.endswith(stop[:size])]
        assert walk.matched == max(begins)


def test_forgotten() -> None:
    """B6: what was written before is part of no stop."""
    walk = Stops(["aab", "ab"])
    assert (walk.take("a"), walk.matched) == (0, 1)
    walk.forget()
    assert (walk.matched, walk.take("b"), walk.matched) == (0, 0, 0)


def stopped(text: str, *stops: str, shape: str = "reasoning_content", **more: Any) -> Said:
    return said(text, Reading(stops=list(stops), shape=shape, state=more.pop("state", "open"), **more))


def test_under_a_plan_in_the_answer_only() -> None:
    """B6: never inside the reasoning, of no tag, and no match starts in the blank lines before the answer."""
    text = "a\n\nQuestion: b\n</think>\n\nx Question: y"
    assert stopped(text, "Question:", plan=True) == ("x ", "a\n\nQuestion: b", [])
    assert stopped("a\n\nb\n</think>\n\nx\n\ny", "\n\n", plan=True) == ("x", "a\n\nb", [])
    assert stopped("a\n</think>\n\nx\n\ny", "\n\n", plan=True, shape="tags")[0] == "<think>\na\n</think>\n\nx"
    assert stopped("a</think>\nx", "\nx", "</think>", plan=True) == ("x", "a", [])
    assert stopped("a</think>x", "x", plan=True) == ("", "a", [])


@pytest.mark.parametrize("state", ["off", "may"])
def test_under_a_plan_without_thinking(state: str) -> None:
    """B6: the answer begins at its first character that is no newline; a first text that is no tag may stop."""
    assert stopped("\n\nx\n\ny", "\n\n", plan=True, state=state)[0] == "\n\nx"
    assert stopped("<table>", "<ta", plan=True, state=state)[0] == ""
    assert stopped("<thx", "<thx", plan=True, state=state)[0] == ""
    assert stopped("<th", "<th", plan=True, state=state)[0] == ""


def test_under_a_plan_not_in_the_model_s_own_tag() -> None:
    """B6: nor in the blanks before it."""
    for shape, wanted in {"reasoning_content": ("y", "x", []), "tags": ("<think>\nx</think>y", "", [])}.items():
        for text in (" <think>x</think>yz", "<think>x</think>yz"):
            assert stopped(text, "<", " ", "think", "z", plan=True, state="may", shape=shape) == wanted


def test_on_the_raw_path_everywhere() -> None:
    """B6: in the thinking, in the tags and in the blank lines."""
    assert stopped("a Question: b</think>x", "Question:") == ("", "a ", [])
    assert stopped("a\n</think>\n\nx", "\n\n") == ("", "a", [])
    assert stopped("a</think>b", "</think>") == ("", "a", [])
    assert stopped("a</think>\nb", "k>\n", shape="tags")[0] == "<think>\na</thin"
    assert stopped("a</think>\nbc", "k>\nc", shape="tags")[0] == "<think>\na</think>\nbc"
    assert stopped("a</think>bc", "a</think>c", "c") == ("b", "a", [])
    assert stopped("x", "x", shape="tags")[0] == "<think>\n"
    assert stopped("<think>x", "<", state="may") == ("", "", [])
    assert stopped("<think>x", "<think>", state="may") == ("", "", [])
    assert stopped("<thinner", "<thinn", state="may") == ("", "", [])


@pytest.mark.parametrize("plan", [False, True])
def test_never_inside_an_open_call(plan: bool) -> None:
    """B6: neither in its tags nor in its values; before it, behind it and between two it acts."""

    def answer(text: str, *stops: str) -> Said:
        return stopped(text, *stops, tools=[READ], plan=plan, state="off")

    for stop in ("\n", "/a", "<parameter", "read", "</function>", '"'):
        assert answer(CALL, stop)[2] == [SENT]
    assert answer(f"ok\n{CALL}\nmore END x", "END") == ("ok\n\nmore ", "", [SENT])
    assert answer(f"a END\n{CALL}", "END") == ("a ", "", [])
    assert answer(f"{CALL}\n{CALL.replace('/a', '/b')}", "</tool_call>") == (None, "", [SENT])
    assert answer(CALL, "<tool_call>") == ("", "", [])
    json = '{"name": "read", "arguments": {"path": "/a"}}'
    assert answer(json, '"path"', "}") == (None, "", [SENT])
    assert answer(f"<tool_call>\n{json}\n</tool_call>", "\n", ":") == (None, "", [SENT])
    assert answer(f"<function=read>\n{VALUE}</function>\n.", "\n") == (None, "", [SENT])


def test_no_stop_reaches_across_a_special_tag() -> None:
    """B6: it writes no bytes, yet what stands before and behind it is not one text."""
    for text in ("a", "a</thi"):
        answer = Answer([text, CLOSE, "b"])
        pieces = answer.pushed(Reading(stops=["ab", "ib", "b!"], shape="reasoning_content", state="open"))
        assert (deltas(pieces), pieces[-1].stopped) == ([Reasoning(text), Content("b")], False)


def test_inside_what_nobody_reads() -> None:
    """B6: where calls are not read there is no open call."""
    assert stopped(CALL, "/a", state="off")[0] == CALL[: CALL.index("/a")]
    assert stopped(CALL, "/a", state="off", tools=[])[0] == CALL[: CALL.index("/a")]
    assert stopped(f"x {CALL} y END", "/a", "END", state="off", tools=[], plan=True) == ("x  y ", "", [])


def test_a_stop_in_the_round_that_closes() -> None:
    """B6: the place of the close is kept with the text that a stop holds; n and keep are as ever."""
    answer = Answer(["a</th", "ink>", "\nb", "c"])
    for sizes in ([], [1, 1, 1], [2, 2]):
        last = answer.pushed(Reading(stops=["\nbc"], shape="tags", state="open"), sizes)[-1]
        assert (last.n, last.keep, last.stopped, last.reasoning) == (4, 2, True, 2)
    pieces = answer.pushed(Reading(stops=["</think>\nbx"], state="open"), [3])
    assert (pieces[0].closed, pieces[0].closed_at) == ("model", 1)
    assert not any(isinstance(delta, CallOpened) for delta in deltas(pieces))


def test_the_stop_ends_what_was_held() -> None:
    """A1, D10: the push that finds a stop holds all there is; one behind a call's mark cuts inside a call."""
    push, _, last = Answer(["a\n<function END"], "off").pushed(Reading(stops=["END"], tools=[READ]), [1])
    assert (push.stopped, push.parts, last.parts) == (True, [[Content("a\n<function ")]], [])
    push, _, last = Answer(["a <tool_call> END"], "off").pushed(Reading(stops=["END"], tools=[READ]), [1])
    assert (push.parts, push.open_call, last.open_call, push.dropped_calls) == ([[Content("a ")]], True, True, 1)
