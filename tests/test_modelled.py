"""The modelled engine by itself: what it keeps, and what a message in mid-answer does."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import effects as do
from pipeline import events as ev
from pipeline.modelled import Costs, ModelledEngine, Run, Store, Wanted
from pipeline.request import Held

COSTS = Costs(prefill=1_000.0, decode=100.0, held=0)


def engine(*wanted: Wanted, costs: Costs = COSTS) -> ModelledEngine:
    return ModelledEngine(costs, lambda request, _choice: wanted[request])


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


@pytest.mark.parametrize(("slot", "held", "hashes", "kept"), [
    (0, 0, [], 25), (1, 0, [b"a"], 0), (1, 1, [], 0), (1, 1, [b"a"], 25),
])  # fmt: skip
def test_an_end_says_what_stays(slot: int, held: int, hashes: list[bytes], kept: int) -> None:
    """G2, R4: a side slot's rows where conversations are put aside and it is one, slot 0's always; a guest's never."""
    one = engine(Wanted(20, 5, hashes), Wanted(20, 5, [b"b"]), costs=msgspec.structs.replace(COSTS, held=held))
    said = one.take(do.StartRun(1, 0, 0, slot, 500), 0.0)
    said += one.take(do.StartGuest(1, 1, 1, 0, 500), 0.0) if slot == 0 else []
    ends = {e.run: e.kept for _, e in said + until_idle(one) if isinstance(e, ev.RunEnded)}
    assert ends == {0: kept, **({1: 0} if slot == 0 else {})}


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


def events(said: list[tuple[float, ev.Event]], *kinds: type) -> list[ev.Event]:
    return [event for _, event in said if isinstance(event, kinds)]


def test_a_guest_is_served_inside_its_holder() -> None:
    """K2, K3: from the next safe point on the guest reads and writes, its holder stands still, then goes on."""
    one = engine(Wanted(2_000, 100, []), Wanted(100, 20, []), costs=msgspec.structs.replace(COSTS, row_bytes=7))
    one.take(do.StartRun(1, 0, 0, 0, 900), 0.0)
    assert one.take(do.StartGuest(1, 1, 1, 0, 64), 0.2) == []
    said = until_idle(one)
    assert events(said, ev.GuestStarted) == [ev.GuestStarted(1, 1, 0, 164, 7 * 164)]
    begun, ended = (next(at for at, e in said if isinstance(e, k)) for k in (ev.GuestStarted, ev.RunEnded))
    assert begun == pytest.approx(0.5)
    assert ended == pytest.approx(0.5 + 100 / 1_000 + 19 / 100)
    between = [e.run for at, e in said if begun < at <= ended and isinstance(e, ev.ChunkDone | ev.Progress)]
    assert set(between) == {1}
    ends = events(said, ev.RunEnded)
    assert [(e.run, e.reason, e.n) for e in ends if isinstance(e, ev.RunEnded)] == [(1, "stop", 20), (0, "stop", 100)]
    assert said[-1][0] == pytest.approx(2.0 + 99 / 100 + (ended - begun))


def test_a_guest_beside_a_side_slot() -> None:
    """K2: while a guest is inside, the runs of side slots have their rounds in turn with it, none of them joint."""
    one = engine(Wanted(1, 400, []), Wanted(1, 50, []), Wanted(1, 10, []))
    said = one.take(do.StartRun(1, 0, 0, 0, 900), 0.0) + one.take(do.StartRun(1, 1, 1, 1, 900), 0.0)
    said += one.take(do.StartGuest(1, 2, 2, 0, 64), 0.0) + until_idle(one)
    inside = [e for e in events(said, ev.Progress) if isinstance(e, ev.Progress)]
    first = next(i for i, e in enumerate(inside) if e.run == 2)
    last = max(i for i, e in enumerate(inside) if e.run == 2)
    runs = [(e.run, e.shared) for e in inside[first + 1 : last + 1]]
    assert runs[:6] == [(1, 1), (2, 1)] * 3
    assert (0, 1) not in runs


def test_a_guest_is_declined_by_the_rules() -> None:
    """K2: one at a time; none without a holder, none in another one's run, none longer than the window."""
    long = Wanted(300_000, 5, [])
    one = engine(Wanted(1_000, 5, []), Wanted(10, 5, []), long)
    said = one.take(do.StartGuest(1, 9, 1, 0, 64), 0.0)
    assert said == [(0.0, ev.RunDeclined(1, 9, "no_holder"))]
    one.take(do.StartRun(1, 0, 0, 0, 900), 0.0)
    for run, request, holder in ((3, 1, 7), (4, 2, 0), (5, 1, 0), (6, 1, 0)):
        one.take(do.StartGuest(1, run, request, holder, 64), 0.1)
    said = until_idle(one)
    declined = [(e.run, e.reason) for e in events(said, ev.RunDeclined) if isinstance(e, ev.RunDeclined)]
    assert declined == [(3, "late"), (4, "memory"), (6, "busy")]
    assert len(events(said, ev.GuestStarted)) == 1


def test_a_holder_that_is_cancelled_ends_behind_its_guest() -> None:
    """K5: the engine says the holder's end when the guest is out; a guest that is cancelled ends alone."""
    for cancelled, ends in ((0, [(1, "stop"), (0, "cancelled")]), (1, [(1, "cancelled"), (0, "stop")])):
        one = engine(Wanted(1_000, 5, []), Wanted(100, 9, []))
        one.take(do.StartRun(1, 0, 0, 0, 900), 0.0)
        one.take(do.StartGuest(1, 1, 1, 0, 64), 0.1)
        said = one.advance(one.due())
        one.take(do.CancelRun(1, cancelled), one.due() - 0.01)
        said += until_idle(one)
        assert [(e.run, e.reason) for e in events(said, ev.RunEnded) if isinstance(e, ev.RunEnded)] == ends


@given(st.lists(st.tuples(st.floats(0, 8), st.integers(1, 400), st.integers(1, 90)), max_size=8))
def test_each_guest_has_one_end(guests: list[tuple[float, int, int]]) -> None:
    """K2: whenever guests come, each is declined or started and ended once, and the holder loses exactly their time."""
    wanted = [Wanted(2_000, 300, []), *(Wanted(prompt, written, []) for _, prompt, written in guests)]
    one = engine(*wanted)
    said = one.take(do.StartRun(1, 0, 0, 0, 900), 0.0)
    for run, (at, _, _) in sorted(enumerate(guests, 1), key=lambda guest: guest[1][0]):
        while one.due() <= at:
            said += one.advance(one.due())
        said += one.take(do.StartGuest(1, run, run, 0, 64), at)
    said += until_idle(one)
    started = [e.run for e in events(said, ev.GuestStarted) if isinstance(e, ev.GuestStarted)]
    declined = [e.run for e in events(said, ev.RunDeclined) if isinstance(e, ev.RunDeclined)]
    ended = [e.run for e in events(said, ev.RunEnded) if isinstance(e, ev.RunEnded)]
    assert sorted(started + declined) == list(range(1, len(guests) + 1))
    assert sorted(ended) == [0, *sorted(started)]
    took = sum(wanted[run].prompt / 1_000 + (min(wanted[run].written, 64) - 1) / 100 for run in started)
    last = max(at for at, e in said if isinstance(e, ev.RunEnded) and e.run == 0)
    assert last == pytest.approx(2.0 + 299 / 100 + took)


def test_memory_is_what_there_is() -> None:
    """J2: a reading tells the levels; what a level gives back is gone from it, and a workspace grows with its rows."""
    levels = (("allocator", 50), ("park", 300))
    store = Store(
        allocated=1_000, reserved=1_050, free=10, levels=levels, ceiling=9, workspaces=((1, 100), (101, 1_100))
    )
    one = engine(Wanted(10, 1, []), costs=msgspec.structs.replace(COSTS, store=store, load_s=2.0, safe_rows=64))
    described, ready = one.start(1, 5.0)
    assert described == (5.0, ev.EngineDescribed(1, 262_144))
    assert ready == (7.0, ev.EngineReady(1, 2.0, 64, 1_000.0, 100.0, 9, 0, 0, [(1, 100), (101, 1_100)], 0, ""))
    readings = [
        one.take(do.Measure(1, 4, 51), 0.0),
        one.take(do.GiveBack(1, 4, "park", 120), 0.0),
        one.take(do.GiveBack(1, 4, "park", 999), 0.0),
        one.take(do.Collect(1, 4), 0.0),
    ]
    told = [(e.workspace, e.allocated, e.reserved, e.free, e.levels) for ((_, e),) in readings]
    assert told == [
        (600, 1_000, 1_050, 10, [("allocator", 50), ("park", 300)]),
        (600, 880, 930, 130, [("allocator", 50), ("park", 180)]),
        (600, 700, 750, 310, [("allocator", 50), ("park", 0)]),
        (600, 700, 700, 360, [("allocator", 0), ("park", 0)]),
    ]


def test_a_level_that_is_given_back_is_no_longer_held() -> None:
    """J2: giving back half of what is put aside takes the oldest half of the conversations, and says so."""
    blocks = [[bytes([at + n]) * 8 for n in range(10)] for at in (0, 50, 100)]
    store = Store(levels=(("park", 900),))
    one = engine(*(Wanted(640, 1, own) for own in blocks), costs=msgspec.structs.replace(COSTS, store=store, held=4))
    for run in range(3):
        one.take(do.StartRun(1, run, run, 0, 9), 10.0 * run)
        until_idle(one)
    said = one.take(do.GiveBack(1, 9, "park", 450), 40.0)
    assert [(e.slot, e.rows) for e in events(said, ev.Resident) if isinstance(e, ev.Resident)] == [(1, 0), (2, 0)]
    resumed = []
    for run in range(3):
        said = one.take(do.StartRun(1, 10 + run, run, 0, 9), 50.0 + 10 * run) + until_idle(one)
        resumed += [e.run for e in events(said, ev.RunResumed) if isinstance(e, ev.RunResumed)]
    assert resumed == [12]


def test_a_side_slot_keeps_nothing() -> None:
    """M12: with no memory to put conversations aside in, that of a side slot is gone, and slot 0's stays."""
    blocks, other = ([bytes([at + n]) * 8 for n in range(10)] for at in (0, 100))
    one = engine(Wanted(640, 1, blocks), Wanted(640, 1, other), Wanted(640, 1, other), Wanted(640, 1, blocks))
    resumed = []
    for run, slot in enumerate((0, 1, 1, 0)):
        said = one.take(do.StartRun(1, run, run, slot, 9), 100.0 * run) + until_idle(one)
        resumed += [e.run for e in events(said, ev.RunResumed) if isinstance(e, ev.RunResumed)]
    assert resumed == [3]


def test_it_takes_over_from_another_engine() -> None:
    """R6: runs go on from what they had read and written; one that was cancelled ends, one not begun resumes."""
    blocks = [bytes([n]) * 8 for n in range(10)]
    one = engine(Wanted(640, 3, blocks))
    runs = [
        Run(0, 1, 0, Wanted(100, 50, []), 900, rows=100, written=48),
        Run(1, 2, 1, Wanted(100, 50, []), 900, rows=100, written=9, over=True),
        Run(2, 3, 2, Wanted(640, 3, blocks), 900),
    ]
    held = [Held(where="disk", slot=4, rows=640, hashes=blocks)]
    said = one.take_over(1, runs, held, 10.0, 10.2) + until_idle(one)
    first = [(type(e).__name__, getattr(e, "run", -1)) for _, e in said[:2]]
    assert first == [("RunResumed", 3), ("RunEnded", 2)]
    ends = [(e.run, e.reason, e.n) for e in events(said, ev.RunEnded) if isinstance(e, ev.RunEnded)]
    assert ends == [(2, "cancelled", 9), (1, "stop", 50), (3, "stop", 3)]


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
