"""The modelled engine by itself: what it keeps, and what a message in mid-answer does."""

from __future__ import annotations

from math import inf

import pytest

from pipeline import effects as do
from pipeline import events as ev
from pipeline.modelled import Costs, ModelledEngine, Wanted

COSTS = Costs(prefill=1_000.0, decode=100.0, held=0)


def engine(*wanted: Wanted, costs: Costs = COSTS) -> ModelledEngine:
    return ModelledEngine(costs, lambda request: wanted[request])


def until_idle(one: ModelledEngine) -> list[tuple[float, ev.Event]]:
    said = []
    while one.due() < inf:
        said += one.advance(one.due())
    return said


def test_a_run() -> None:
    """R4: chunks on the grid of its safe step, the first token with the last row, then rounds, then one end."""
    one = engine(Wanted(1_200, 60, []))
    assert one.take(do.Measure(1, 0, 1_200), 0.0) == [(0.0, ev.MemoryRead(1, 0, 0, 0, 0, 0))]
    said = one.take(do.StartRun(1, 0, 0, 0, 500), 0.0) + until_idle(one)
    chunks = [(at, event.done) for at, event in said if isinstance(event, ev.ChunkDone)]
    assert chunks == [(0.5, 500), (1.0, 1_000), (pytest.approx(1.2), 1_200)]
    rounds = [event.n for _, event in said if isinstance(event, ev.Progress)]
    assert rounds[0] == 1
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == 60
    ends = [(at, event.reason, event.n) for at, event in said if isinstance(event, ev.RunEnded)]
    assert ends == [(pytest.approx(1.2 + 59 / 100), "stop", 60)]


def test_its_limit_ends_a_run() -> None:
    """A8: an answer that would be longer than its limit ends there, by length."""
    one = engine(Wanted(10, 600, []))
    said = one.take(do.StartRun(1, 0, 0, 0, 50), 0.0) + until_idle(one)
    assert [(e.reason, e.n) for _, e in said if isinstance(e, ev.RunEnded)] == [("length", 50)]


def test_a_message_is_read_at_the_next_round() -> None:
    """R7: rounds that are told together are cut where a message comes: the next run begins a round later."""
    one = engine(Wanted(1, 600, []), Wanted(100, 1, []))
    one.take(do.StartRun(1, 0, 0, 0, 900), 0.0)
    one.advance(one.due())
    begun = one.due() - 0.25  # a quarter of a second of rounds is under way
    assert one.take(do.StartRun(1, 1, 1, 1, 900), begun + 0.032) == []
    assert one.due() == pytest.approx(begun + 0.04)
    said = one.advance(one.due()) + one.advance(one.due())
    (read,) = [at for at, event in said if isinstance(event, ev.ChunkDone)]
    assert read == pytest.approx(begun + 0.04 + 0.1)


def test_a_cancelled_run_ends_once() -> None:
    """R4: a run that is cancelled ends at the next safe point, and says nothing more."""
    one = engine(Wanted(1_000, 600, []))
    one.take(do.StartRun(1, 0, 0, 0, 900), 0.0)
    one.take(do.CancelRun(1, 0), 0.2)
    said = until_idle(one)
    assert [event.reason for _, event in said if isinstance(event, ev.RunEnded)] == ["cancelled"]
    assert one.due() == inf


def test_what_is_held() -> None:
    """G2: the newest conversation is held; one that goes on takes its own place, another one the oldest's."""
    blocks = [bytes([n]) * 8 for n in range(20)]
    other = [bytes([n]) * 8 for n in range(100, 110)]
    one = engine(
        Wanted(640, 1, blocks[:10]), Wanted(1_280, 1, blocks), Wanted(640, 1, other), Wanted(640, 1, blocks[:10])
    )
    resumed, held = [], []
    for run in range(4):
        said = one.take(do.StartRun(1, run, run, 0, 9), 100.0 * run) + until_idle(one)
        resumed += [(run, event.rows) for _, event in said if isinstance(event, ev.RunResumed)]
        held.append([(event.slot, event.rows) for _, event in said if isinstance(event, ev.Resident)])
    assert resumed == [(1, 640)]
    assert held == [[(1, 640)], [(1, 0), (2, 1_280)], [(2, 0), (3, 640)], [(3, 0), (4, 640)]]
