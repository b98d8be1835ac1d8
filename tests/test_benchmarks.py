"""benchmarks/: what the measurements of speed read and judge, and that each of them runs. No figure is asserted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import bench, busy, continued, copying, decode, parallel, rows, side_lane, speed
from benchmarks.bench import Answer, Mark, Place, Setting
from engine.weights.embedded import embedded_model
from pipeline.settings import Settings
from tests.checkpoints import write_gguf

UNSURE = ("joint rounds", "served inside")
"""Marks that come to nothing beside a script."""
TEXTS = st.text(alphabet="ab", max_size=8)


def setting(model: str = "", *flags: str, rounds: int = 1) -> Setting:
    return Setting(model, 1, rounds, Console(file=StringIO(), width=118), flags)


def shown(setting: Setting) -> str:
    assert isinstance(setting.console.file, StringIO)
    return setting.console.file.getvalue()


def chunk(text: str = "", finish: str | None = None, **rest: Any) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish}], **rest})


# -- what an answer is -----------------------------------------------------------------------------------------------


def test_the_rate_counts_tokens_not_chunks() -> None:
    """N5: a chunk may hold a whole round of tokens; empty ones at either end are no text."""
    usage = {"prompt_tokens": 7, "completion_tokens": 9}
    lines = [(2.0, chunk()), (3.0, chunk("a")), (4.0, chunk("b c d")), (7.0, chunk("e")), (9.0, chunk("", "length"))]
    got = bench.answer(1.0, [*lines, (9.0, json.dumps({"choices": [], "usage": usage}))], 9)
    assert (got.first_s, got.rest_s, got.text, got.times) == (2.0, 4.0, "ab c de", (3.0, 4.0, 7.0))
    assert got.rate == 2.0  # 8 tokens after the first, in 4 s
    assert got.usage == usage


def test_a_chats_answer_is_read_too() -> None:
    """N5: the conversation is measured by the chat route; a delta without content is no text."""
    deltas = [({"role": "assistant"}, None), ({"content": "a"}, None), ({"content": "b"}, None), ({}, "length")]
    lines = [
        (float(at), json.dumps({"choices": [{"delta": delta, "finish_reason": end}]}))
        for at, (delta, end) in enumerate(deltas)
    ]
    got = bench.answer(0.0, lines, 2)
    assert (got.first_s, got.text) == (1.0, "ab")


@pytest.mark.parametrize("finish", ["stop", "timeout", None])
def test_an_answer_that_ended_early_is_no_measurement(finish: str | None) -> None:
    """N5: fewer tokens than asked for would make a rate of nothing."""
    with pytest.raises(SystemExit, match="ended early"):
        bench.answer(0.0, [(1.0, chunk("a", finish))], 9)


# -- marks -----------------------------------------------------------------------------------------------------------


def test_a_mark_is_judged_by_the_median() -> None:
    """N5: one slow round misses no mark, and one fast round reaches none."""
    assert Mark("", [0.1, 2.0, 2.1], 2.0).held
    assert not Mark("", [1.9, 1.9, 9.0], 2.0).held
    assert Mark("", [1.4, 1.2, 5.0], 1.4, most=True).held
    assert not Mark("", [1.5, 1.5, 0.1], 1.4, most=True).held


def test_a_missed_mark_is_the_exit_status() -> None:
    """N5: all marks are told, then the status says whether one was missed."""
    one = setting()
    bench.report(one, marks=[Mark("reached", [2.0], 2.0)])
    with pytest.raises(SystemExit) as error:
        bench.report(one, marks=[Mark("short", [1.0], 2.0), Mark("reached", [2.0], 2.0)])
    assert error.value.code == 1
    assert [word for word in ("held", "missed") if word in shown(one)] == ["held", "missed"]


def test_sides_take_turns_and_the_first_try_does_not_count() -> None:
    """N5: a busy machine slows all sides of a round alike."""
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    got = bench.interleaved(setting(rounds=2), {"a": lambda: side("a"), "b": lambda: side("b")})
    assert order == ["a", "b"] * 3
    assert got == {"a": [3, 5], "b": [4, 6]}


def test_an_interrupt_leaves_the_whole_rounds() -> None:
    """N5: what was measured is printed; a round that was cut short has no ratio."""
    tries = iter([1.0, 1.0, 2.0, 2.0, 3.0])

    def side() -> float:
        with contextlib.suppress(StopIteration):
            return next(tries)
        raise KeyboardInterrupt

    assert bench.interleaved(setting(rounds=5), {"a": side, "b": side}) == {"a": [2.0], "b": [2.0]}


def test_the_fallback_and_the_peer_have_marks_of_their_own() -> None:
    """N5: decode and prefill beside llama.cpp's server; without it nothing is judged."""
    samples = {decode.OURS: [(20.0, 90.0, 1.0, 1.0)], decode.FALLBACK: [(9.0, 9.0, 1.0, 1.0)]}
    assert decode.marks(samples) == []
    found = decode.marks({**samples, decode.PEER: [(10.0, 10.0, 1.0, 1.0)]})
    assert [(one.mark, one.values, one.held) for one in found] == [
        (2.0, [2.0], True),
        (4.5, [9.0], True),
        (0.95, [0.9], False),
    ]


# -- what is asked, and what came of it ------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "joint", "share"), [(40, 36, 0.9), (40, 0, 0.0), (0, 0, 1.0)])
def test_rounds_that_could_be_joint(overlap: int, joint: int, share: float) -> None:
    """M10: of the rounds since the measurement began; where none came beside another answer nothing is missing."""
    before = parallel.Rounds(7, 5)
    assert parallel.share(before, parallel.Rounds(7 + overlap, 5 + joint)) == share


def test_how_near_a_tie_was() -> None:
    """M10: in nats, between the two likeliest tokens, in whatever order they are told."""
    assert parallel.gap([{"logprob": -2.5}, {"logprob": -0.5}]) == 2.0
    assert parallel.gap([{"logprob": 0.0}]) == float("inf")


@given(TEXTS, TEXTS)
def test_where_texts_part(one: str, other: str) -> None:
    """M10, K4: nowhere when they are equal; else both have the same before it, and not the same there."""
    tokens = [[parallel.Token(text, 0.0) for text in each] for each in (one, other)]
    at = side_lane.first_difference(one, other)
    assert parallel.parted(*tokens) == at
    if at is None:
        assert one == other
    else:
        assert one[:at] == other[:at] and one[at : at + 1] != other[at : at + 1]


def test_each_text_that_parts_is_told() -> None:
    """M10: with its token and gap; one is enough to miss the mark."""
    one = setting()
    found = {2: [parallel.Apart(3, 17, 0.0625)], 4: []}
    assert [mark.held for mark in parallel.same(one, found, 8)] == [False, True]
    assert "prompt 4" in shown(one) and "token 17" in shown(one) and "0.062 nats" in shown(one)


# -- the side lane ---------------------------------------------------------------------------------------------------


def turn(text: str, took_s: float, *guests: side_lane.Guest) -> side_lane.Turn:
    answer = Answer(1.0, 2.0, 3, text, {}, 0.0, (1.0, 2.0, 3.0))
    return side_lane.Turn(answer, 10.0, 10.0 + took_s, list(guests), dict.fromkeys(side_lane.LANE, 1))


def guests(took_s: float, inside: int) -> list[side_lane.Guest]:
    return [side_lane.Guest(n, "", 10.0 + n, 10.0 + n + took_s, "a", n < inside) for n in range(10)]


def test_those_behind_the_long_one_are_not_judged() -> None:
    """K7: nor the one that may not be served inside; when all came later, what they took is all there is."""
    late = [one._replace(sent_s=30.0, done_s=30.5) for one in guests(0, 0)[3:]]
    assert turn("a", 5.0, *guests(2.0, 0)[:3], *late).waits == [2.0] * 3
    assert turn("a", 20.0, *guests(2.0, 9)).waits == [2.0] * 9
    assert turn("a", 5.0, *late).waits == [0.5] * 6


@given(st.sampled_from(side_lane.PACES), st.floats(0.1, 100))
def test_when_the_short_ones_come(pace: str, alone_s: float) -> None:
    """K7: within what the long one takes alone, in order."""
    times = side_lane.arrivals(pace, alone_s)
    assert len(times) == len(side_lane.SHORT) and times == sorted(times)
    assert 0 < times[0] <= times[-1] < alone_s
    assert (len(set(times)) == 1) == (pace == "once")


def test_one_of_ten_is_over_the_lanes_limit() -> None:
    """K7, K1: nine ask for at most 64 tokens, as the lane's limit is without a flag."""
    limit = Settings().side_lane_tokens
    assert [tokens <= limit for _, tokens in side_lane.SHORT] == [True] * side_lane.ELIGIBLE + [False]


def test_served_inside_by_the_servers_word() -> None:
    """K7, K8: one that outgrew the lane was a guest, and was not served inside."""
    [one] = guests(1.0, 0)[:1]
    record = {"inside": True, "outgrown": False, "slot": 0, "row": "guest_stopped"}
    assert side_lane.known(one, {"": record}) == one._replace(inside=True, slot=0, row="guest_stopped")
    assert not side_lane.known(one, {"": record | {"outgrown": True}}).inside


@given(st.lists(st.floats(0, 50), min_size=1, max_size=30).map(sorted), st.integers(1, 20))
def test_when_the_long_one_wrote(times: list[float], bins: int) -> None:
    """K7: a cell for each span; a blank one had nothing, the fullest one is full."""
    line = side_lane.drawn(tuple(times), bins)
    assert len(line) == bins and line[0] != " " and side_lane.BARS[-1] in line
    assert sum(cell != " " for cell in line) <= len(times)


def test_what_the_lane_is_judged_by() -> None:
    """K7, K4: all nine inside, soon, at little cost to the long one, and its text as alone in every round."""
    rounds = {
        side_lane.ALONE: [turn("abc", 10.0)] * 2,
        side_lane.ON: [turn("abc", 11.0, *guests(0.5, 9))] * 2,
        side_lane.DECODE: [turn("abc", 11.0, *guests(0.5, 9))] * 2,
        side_lane.OFF: [turn("abc", 10.0, *guests(5.0, 0))] * 2,
    }
    assert all(mark.held for mark in side_lane.marks(rounds))
    assert len(side_lane.marks(rounds, timed=False)) == 2
    assert side_lane.table(rounds).row_count == 4
    short = [guest._replace(text="b") if guest.number == 4 else guest for guest in guests(0.5, 8)]
    rounds[side_lane.DECODE] = [turn("abc", 11.0, *guests(0.5, 9)), turn("abd", 11.0, *short)]
    assert [mark.what for mark in side_lane.marks(rounds) if not mark.held] == [
        "long texts as alone, of the rounds of each lane"
    ]
    one = setting()
    side_lane.tell(one, side_lane.DECODE, rounds)
    assert "round 2: the long text parts from its text alone at character 2" in shown(one)
    assert "lane off: 5" in shown(one) and "number 9 " in shown(one) and "number 10 " in shown(one)


# -- more of what is asked -------------------------------------------------------------------------------------------


@given(st.integers(0, 30))
def test_what_was_copied(right: int) -> None:
    """F8: the share of an answer that is the passage gone on with."""
    passage = "the quick brown fox jumps over the lazy dog"
    answer = passage[9 : 9 + right] + "#" * (30 - right)
    assert copying.copied(f"{passage}\n\n{passage}\n\n{passage[:9]}", answer) == right / 30


def test_no_peer_without_an_interpreter() -> None:
    """N5: a wrong path is said at once."""
    one = Setting("model.gguf", 1, 1, Console(file=StringIO()), peer="no-such-python")
    with pytest.raises(SystemExit, match="interpreter"), bench.peer_server(one):
        pass


# -- each of them runs -----------------------------------------------------------------------------------------------


def test_steps_by_their_rows(tmp_path: Path) -> None:
    """K4: on a tiny model, in this process, with the times of one thread."""
    before = torch.get_num_threads()
    one = setting(str(write_gguf(tmp_path / "tiny.gguf", {"": "Q4_1"})))
    try:
        table, _ = rows.measure(one, rows.loaded(one), 4)
    finally:
        torch.set_num_threads(before)
    assert table.row_count >= 1
    assert "path " in shown(one)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if embedded_model() is None:
        pytest.skip("the embedded model's package is not installed")
    script = tmp_path_factory.mktemp("benchmarks") / "script.json"
    script.write_text(json.dumps({"answers": [{"text": "a b c d e f g h i j k l", "decode_ms": 2}]}))
    with bench.serving(setting(str(embedded_model()), "--script", str(script), "--parallel", "4")) as place:
        yield place


@pytest.mark.e2e
@pytest.mark.parametrize("module", [decode, busy, continued, parallel, copying, side_lane], ids=lambda m: m.__name__)
def test_it_runs(module: Any, scripted: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """N5: each measurement through HTTP, by a script's answers: it comes to a table, and its marks to figures."""
    settings = {
        decode: {"tokens": 6, "prompt": 20, "fallback": True},
        busy: {"tokens": 6, "count": 0},
        continued: {"prompt": 40},
        parallel: {"tokens": 6, "drafts": False, "prompts": 4},
        copying: {"tokens": 6},
        side_lane: {"prompt": 40, "tokens": 6, "pace": "even"},
    }
    monkeypatch.setattr(module, "serving", lambda *_, **__: contextlib.nullcontext(scripted))
    monkeypatch.setattr(continued, "ANSWER", 6)
    one = setting(str(embedded_model()), "--scripted")
    table, marks = module.measure(one, **settings[module])
    assert table.row_count >= 2
    assert all(len(mark.values) == one.rounds for mark in marks)
    assert all(mark.median > 0 for mark in marks if not any(word in mark.what for word in UNSURE))


def test_all_of_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """N5: one command runs every measurement and tells all marks at the end."""
    ran: list[str] = []
    for name in list(speed.PARTS):

        def part(_: Setting, name: str = name) -> Any:
            ran.append(name)
            return bench.Table(title=name), [Mark(name, [1.0], 1.0)]

        monkeypatch.setitem(speed.PARTS, name, part)
    one = setting()
    speed.run(one)
    assert ran == list(speed.PARTS)
    assert all(name in shown(one) for name in ran)
