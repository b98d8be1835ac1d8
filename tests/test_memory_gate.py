"""The memory gate's decision as a pure function: what it admits, gives back, collects and refuses, and the floor."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import LEVELS
from stages.memory_gate import (
    ALLOCATOR,
    Snapshot,
    Verdict,
    decide,
    default_floor,
    floor_held,
    held,
    missing,
    workspace_at,
)

SIZE = st.integers(0, 100)
BOUND = st.integers(0, 150)
ENTRY = 7
"""What one entry of a cache takes in the engine below."""


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any reading, of a process or of a device's allocator."""
    levels = [(name, draw(st.integers(0, 30))) for name in LEVELS]
    device, allocated = draw(st.booleans()), draw(SIZE)
    return Snapshot(
        allocated=allocated,
        reserved=allocated + levels[0][1] + draw(st.integers(0, 5)) if device else draw(SIZE),
        free=draw(BOUND),
        workspace=draw(SIZE),
        ceiling=draw(BOUND),
        peak=draw(BOUND),
        levels=levels,
        device=device,
        others=draw(st.booleans()),
    )


def given_back(read: Snapshot, level: str, nbytes: int) -> Snapshot:
    """An engine that gives back whole entries: a process to the machine, a device into its allocator's free blocks."""
    sizes = dict(read.levels)
    if level == ALLOCATOR:
        whole = min(sizes[level], nbytes)
        back = {"reserved": read.reserved - whole, "free": read.free + whole if read.free else 0}
    else:
        whole = min(sizes[level], -(-nbytes // ENTRY) * ENTRY, read.allocated)
        back = {"allocated": read.allocated - whole}
        if read.device:
            sizes[ALLOCATOR] += whole
        else:
            back["free"] = read.free + whole if read.free else 0
    sizes[level] -= whole
    return msgspec.structs.replace(read, levels=list(sizes.items()), asked=[*read.asked, level], **back)


def gated(read: Snapshot) -> tuple[list[Verdict], Snapshot]:
    """Every verdict up to the last one, and the reading it was about."""
    verdicts = [decide(read)]
    while verdicts[-1].action in ("give_back", "collect"):
        assert len(verdicts) <= 2 * len(LEVELS) + 2
        if verdicts[-1].action == "collect":
            read = msgspec.structs.replace(read, collected=True)
        else:
            read = given_back(read, verdicts[-1].level, verdicts[-1].nbytes)
        verdicts.append(decide(read))
    return verdicts, read


@given(snapshots())
def test_never_admitted_above_the_peak(read: Snapshot) -> None:
    """J1, J2: who is admitted fits under the peak and in the machine, or in what the allocator holds free."""
    verdicts, last = gated(read)
    if verdicts[-1].action == "fits":
        assert missing(last) <= 0
        assert not last.peak or held(last) + last.workspace <= last.peak
        assert not last.free or last.workspace <= last.free
    if verdicts[-1].action == "fits_reserve":
        assert last.workspace <= dict(last.levels)[ALLOCATOR]
        assert not last.peak or held(last) <= last.peak
    if verdicts[-1].action in ("wait", "refuse"):
        assert missing(last) > 0
        assert (verdicts[-1].action == "wait") == last.others


@given(snapshots())
def test_no_more_than_needed(read: Snapshot) -> None:
    """J2: the cheapest level first, each at most what is still needed and what it has."""
    verdicts, _ = gated(read)
    for verdict in verdicts:
        if verdict.action == "give_back":
            over = held(read) - read.ceiling if read.ceiling else 0
            assert 0 < verdict.nbytes <= min(max(missing(read), over), dict(read.levels)[verdict.level])
            before = [name for name, size in read.levels[: LEVELS.index(verdict.level)] if size > 0]
            assert all(name in read.asked for name in before)
            read = given_back(read, verdict.level, verdict.nbytes)


@given(snapshots())
def test_of_a_process_the_sum_is_what_was_needed(read: Snapshot) -> None:
    """J2: all that was given back is at most what was needed and one entry more."""
    read = msgspec.structs.replace(read, device=False, allocated=read.allocated + sum(n for _, n in read.levels))
    needed = max(missing(read), held(read) - read.ceiling if read.ceiling else 0)
    verdicts, last = gated(read)
    given = sum(size for _, size in read.levels) - sum(size for _, size in last.levels)
    assert given <= max(needed, 0) + ENTRY
    if missing(read) > 0 and given:
        assert verdicts[-1].action == "fits"


@given(snapshots())
def test_nothing_is_taken_in_vain(read: Snapshot) -> None:
    """J2: where all levels together would not be enough none gives anything back."""
    if missing(read) > sum(size for _, size in read.levels):
        verdicts, last = gated(read)
        assert [verdict.action for verdict in verdicts[:-1]] == ["collect"]
        assert last.levels == read.levels


@given(snapshots())
def test_an_engine_that_gives_nothing_back(read: Snapshot) -> None:
    """J2: a level that was asked is not asked for ever: the gate comes to an end."""
    asked: list[str] = []
    verdict = decide(read)
    while verdict.action in ("give_back", "collect"):
        asked += [verdict.level] if verdict.level else []
        assert len(asked) <= 2 * len(LEVELS)
        read = msgspec.structs.replace(read, asked=asked, collected=read.collected or verdict.action == "collect")
        verdict = decide(read)
    assert [name for name in asked if name != ALLOCATOR] == [n for n in LEVELS if n in asked and n != ALLOCATOR]


@given(snapshots(), st.integers(1, 50))
def test_less_need_is_never_worse(read: Snapshot, by: int) -> None:
    """J5: who fits at once fits at once with a smaller prompt, or under a higher peak."""
    if decide(read).action == "fits":
        smaller = msgspec.structs.replace(read, workspace=max(read.workspace - by, 0))
        higher = msgspec.structs.replace(read, peak=read.peak + by if read.peak else 0)
        assert decide(smaller).action == decide(higher).action == "fits"


def test_nothing_known_asks_for_nothing() -> None:
    """J1: an engine that says neither bounds nor what is free holds up nobody."""
    assert decide(Snapshot(allocated=10, reserved=20, workspace=10**12)).action == "fits"


def test_what_counts_as_held() -> None:
    """J1: a device's reserve counts whole; of a process's memory what the engine accounts for."""
    levels = [(ALLOCATOR, 5)]
    assert held(Snapshot(allocated=50, reserved=60, levels=levels, device=True)) == 60
    assert held(Snapshot(allocated=50, reserved=90)) == 50
    assert held(Snapshot(allocated=50, reserved=20)) == 50


def test_back_under_the_ceiling_first() -> None:
    """J2: a prompt that fits under the peak still brings memory back under the ceiling; one level after the other."""
    read = Snapshot(allocated=100, workspace=5, ceiling=70, peak=200, levels=[("images", 10), ("park", 40)])
    assert decide(read) == Verdict("give_back", "images", 10)
    read = msgspec.structs.replace(read, allocated=90, levels=[("images", 0), ("park", 40)], asked=["images"])
    assert decide(read) == Verdict("give_back", "park", 20)
    read = msgspec.structs.replace(read, allocated=70, levels=[("images", 0), ("park", 20)], asked=["images", "park"])
    assert decide(read).action == "fits"


def test_a_ceiling_under_the_weights() -> None:
    """J1: where no cache helps against the ceiling the peak alone decides."""
    read = Snapshot(allocated=100, workspace=5, ceiling=70, peak=105, levels=[("park", 10)])
    assert decide(read).action == "fits"
    assert decide(msgspec.structs.replace(read, workspace=6)) == Verdict("give_back", "park", 1)


def test_the_allocators_own_reserve() -> None:
    """J3: what the allocator could not let go of still serves a prompt that it holds enough for."""
    read = Snapshot(
        allocated=50, reserved=70, workspace=15, peak=70, levels=[(ALLOCATOR, 20)], device=True, asked=[ALLOCATOR],
        collected=True,
    )  # fmt: skip
    assert decide(read).action == "fits_reserve"
    assert decide(msgspec.structs.replace(read, workspace=21)).action == "refuse"


# -- the floor ---------------------------------------------------------------------------------------------------------


def kept(own: int, others: int, growth: int, available: int, floor: int, room: int | None, alone: bool = False) -> bool:
    return floor_held(own, others, growth, available, floor, room, alone)


def test_the_floor_beside_others() -> None:
    """M7: its own workspace, the others' and the caches' growth leave the floor; the room to the peak bounds them."""
    assert kept(5, 5, 10, 35, 15, None)
    assert not kept(5, 5, 10, 34, 15, None)
    assert kept(5, 5, 10, 34, 15, 19)
    assert kept(5, 5, 10, 15, 15, -3)


@given(SIZE, SIZE, SIZE, SIZE, SIZE, st.none() | st.integers(-50, 150))
def test_alone_is_never_held(own: int, others: int, growth: int, available: int, floor: int, room: int | None) -> None:
    """M7: a request alone is never held by the floor; who is not held stays so with less of its own."""
    assert kept(own, others, growth, available, floor, room, alone=True)
    if kept(own, others, growth, available, floor, room):
        assert kept(own // 2, others, growth, available, floor, room)
        assert available - own - others - growth >= floor or (room is not None and available - max(room, 0) >= floor)


def test_the_default_floor() -> None:
    """M7: 15 GB or 12 % of memory, the smaller; memory is what the default ceiling is four fifths of."""
    assert default_floor(int(0.8 * 128e9)) == 15 * 10**9
    assert abs(default_floor(int(0.8 * 16e9)) - 0.12 * 16e9) < 10
    assert default_floor(0) == 0


def test_a_workspace_between_two_measured_ones() -> None:
    """M7, J4: never under what a prompt takes: the next longer one's."""
    measured = [(1, 10), (64, 20), (256, 50)]
    assert [workspace_at(measured, rows) for rows in (1, 2, 64, 65, 256, 999)] == [10, 20, 20, 50, 50, 50]
    assert workspace_at([], 5) == 0
