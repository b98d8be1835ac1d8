"""engine/scripted.py: guests, and memory that can be short and be given back, in virtual time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import (
    Cancel,
    Chunk,
    Collect,
    Declined,
    Ended,
    GiveBack,
    Guest,
    GuestStarted,
    Measure,
    Memory,
    Ready,
    Seen,
    Tokens,
)
from engine.scripted import KV_BYTES_PER_ROW, WEIGHTS_BYTES, Answer, Script
from tests.test_scripted import ABC, DESCRIBED, Driver, start

QUICK = Answer(ids=[21, 22], prefill_ms_per_row=10, decode_ms=100)
TAKEN = WEIGHTS_BYTES + DESCRIBED.window * KV_BYTES_PER_ROW


def guest(run: int = 50, holder: int = 1, prompt: int = 6, max_tokens: int = 8) -> Guest:
    return Guest(1, start(run, prompt, max_tokens), holder)


def test_a_guest_is_served_inside_with_its_own_answer() -> None:
    """K2: at the next safe point; it takes the next answer and its own time, then the holder's goes on where it was."""
    driver = Driver(ABC, QUICK)
    driver.send(start())
    driver.send(guest(), at=1.6)  # in the round that ends at 2
    driver.run()
    said = [(t, m) for t, m in driver.said if isinstance(m, GuestStarted | Ended | Tokens)]
    assert said[1:] == [
        (pytest.approx(2.0), Tokens(1, 1, 1, [12], 1000)),
        (pytest.approx(2.0), GuestStarted(1, 50, 1, 14, 14 * KV_BYTES_PER_ROW)),
        (pytest.approx(2.06), Tokens(1, 50, 0, [21], 0.0)),
        (pytest.approx(2.16), Tokens(1, 50, 1, [22], 100)),
        (pytest.approx(2.26), Ended(1, 50, "stop", 0, 2, pytest.approx(60), 200, rounds=3)),
        (pytest.approx(3.26), Tokens(1, 1, 2, [13], 1000)),
        (pytest.approx(4.26), Ended(1, 1, "stop", 13, 3, pytest.approx(1000), 3000, rounds=4)),
    ]
    assert [m.done for m in driver.of(Chunk) if m.run == 50] == [4, 6]


def test_a_guest_between_two_steps_of_a_prompt() -> None:
    """K2: the holder's next step comes behind it."""
    driver = Driver(ABC, QUICK)
    driver.send(start(), at=0.0)
    driver.send(guest(max_tokens=1), at=0.1)
    driver.run()
    chunks = [(m.run, m.done) for m in driver.of(Chunk)]
    assert chunks == [(1, 4), (50, 4), (50, 6), (1, 8), (1, 10)]
    assert [m.reason for m in driver.of(Ended)] == ["length", "stop"]


def test_a_guest_is_declined_by_the_engines_rules() -> None:
    """K5: none to be inside of, another run, a second one, too long, no memory."""
    driver = Driver(ABC, QUICK, decline_guest=5)
    driver.send(guest(50))
    driver.send(start())
    for ask in (guest(51, holder=7), guest(52)):  # while the first step of the holder is computed
        driver.send(ask)
    driver.run(1.5)
    for run, prompt in ((53, 64), (54, 6)):
        driver.send(guest(run, prompt=prompt))
        driver.run(driver.now + 1)
    assert driver.of(Declined) == [
        Declined(1, 50, "no_holder"),
        Declined(1, 52, "busy"),
        Declined(1, 51, "late"),
        Declined(1, 53, "memory"),
        Declined(1, 54, "memory"),
    ]


def test_a_script_that_ends_a_guest_ends_it_alone() -> None:
    """F6: by a fault; the holder's answer is whole."""
    driver = Driver(ABC, Answer(ids=[9], then="fault"))
    driver.send(start())
    driver.send(guest(), at=1.6)
    driver.run()
    assert [(m.run, m.reason, m.kept) for m in driver.of(Ended)] == [(50, "fault", 0), (1, "stop", 13)]
    assert [m.ids for m in driver.of(Tokens) if m.run == 1] == [[11], [12], [13]]


def test_a_holder_that_is_left_ends_behind_its_guest() -> None:
    """K5: as in the real engine."""
    driver = Driver(ABC, QUICK)
    driver.send(start())
    driver.send(guest(), at=1.6)
    driver.send(Cancel(1, 1), at=2.6)
    driver.run()
    assert [(m.run, m.reason) for m in driver.of(Ended)] == [(50, "stop"), (1, "cancelled")]


def box(**script: Any) -> Driver:
    """An engine whose script says what memory it has."""
    driver = Driver()
    engine = type(driver.engine)(
        driver.engine._config, DESCRIBED, msgspec.structs.replace(Script([ABC, QUICK]), **script)
    )
    driver.engine, driver.said = engine, []
    driver._note(engine.start(0.0))
    return driver


def test_memory_is_given_back_level_by_level() -> None:
    """J2: each message is answered by a reading; a level gives what is asked for, or all it has."""
    driver = box(levels=[("park", 500), ("allocator", 70)], free=100, workspace_per_row=3)
    driver.send(Measure(1, 1, 10))
    driver.send(GiveBack(1, 2, "park", 200))
    driver.send(Collect(1, 3))
    driver.send(GiveBack(1, 4, "park", 9_999))
    driver.send(GiveBack(1, 5, "images", 9))
    driver.send(GiveBack(2, 6, "park", 9))
    driver.run()
    full = TAKEN + 570
    assert driver.of(Memory) == [
        Memory(1, 1, TAKEN + 500, full, full, 30, 100, [("allocator", 70), ("park", 500)]),
        Memory(1, 2, TAKEN + 300, full - 200, full, 30, 300, [("allocator", 70), ("park", 300)]),
        Memory(1, 3, TAKEN + 300, TAKEN + 300, full, 30, 370, [("allocator", 0), ("park", 300)]),
        Memory(1, 4, TAKEN, TAKEN, full, 30, 670, [("allocator", 0), ("park", 0)]),
        Memory(1, 5, TAKEN, TAKEN, full, 30, 670, [("allocator", 0), ("park", 0)]),
    ]


def test_a_script_says_its_bounds_and_by_default_none() -> None:
    """J1, J3: as in ``Ready``; a script that says nothing is short of nothing."""
    bounds = {"ceiling": 5, "peak_limit": 7, "slack": 1, "workspaces": [(1, 2)], "most_rows": 9, "decode_rate": 3.0}
    told = msgspec.structs.asdict(box(**bounds).of(Ready)[0])
    assert {name: told[name] for name in bounds} == bounds
    plain = box().of(Ready)[0]
    assert (plain.ceiling, plain.peak_limit, plain.most_rows, plain.workspaces) == (0, 0, 0, [])
    with pytest.raises(ValueError, match="cellar"):
        box(levels=[("cellar", 1)])


@pytest.mark.parametrize(("short", "enters"), [(1, False), (0, True)])
@pytest.mark.parametrize("bound", ["free", "peak_limit"])
def test_a_copy_takes_memory_while_it_is_there(bound: str, short: int, enters: bool) -> None:
    """K5: where it would not fit the guest is declined; afterwards it is free again."""
    copy = 14 * KV_BYTES_PER_ROW
    needed = copy + 6 * 3
    room = {"free": needed - short} if bound == "free" else {"peak_limit": TAKEN + needed - short}
    driver = box(workspace_per_row=3, **room)
    driver.send(start())
    driver.send(guest())
    driver.send(Measure(1, 9, 0))
    driver.run(0.401)
    assert bool(driver.of(GuestStarted)) == enters and bool(driver.of(Declined)) != enters
    driver.send(Measure(1, 10, 0))
    driver.run()
    driver.send(Measure(1, 11, 0))
    inside, after = driver.of(Memory)[-2:]
    assert inside.allocated == TAKEN + (copy if enters else 0) and after.allocated == TAKEN
    assert after.free == room.get("free", 0)


moves = st.lists(
    st.tuples(st.floats(0, 2), st.sampled_from(["start", "guest", "cancel", "seen"]), st.integers(1, 6)), max_size=30
)


@given(moves, st.sampled_from(["stop", "length", "fault"]))
def test_every_start_and_guest_is_answered_once_whatever_comes(walk: list[tuple[float, str, int]], then: str) -> None:
    """K2, K5: one Ended or Declined each; a guest's time lies inside its holder's, and no two are inside at once."""
    driver = Driver(Answer([1, 2, 3, 4, 5], "", 50, 100, 1, then), ack=False, parallel=2)  # type: ignore[arg-type]
    asked, now = 0, 0.0
    for wait, move, n in walk:
        now += wait
        if move in ("start", "guest"):
            asked += 1
            new = start(asked, prompt=n * 3, slot=n % 2)
            driver.send(new if move == "start" else Guest(1, new, max(1, asked - n)), at=now)
        else:
            driver.send(Cancel(1, n) if move == "cancel" else Seen(1, n, 5), at=now)
    for run in range(1, asked + 1):
        driver.send(Cancel(1, run), at=now)
    driver.run()
    over = sorted(m.run for m in [*driver.of(Ended), *driver.of(Declined)])
    assert over == list(range(1, asked + 1))
    inside: tuple[int, int] | None = None
    for _, message in driver.said:
        if isinstance(message, GuestStarted):
            assert inside is None
            inside = message.run, message.holder
        elif isinstance(message, Ended) and inside is not None:
            assert message.run != inside[1]
            inside = None if message.run == inside[0] else inside
        elif isinstance(message, Chunk) and inside is not None:
            assert message.run != inside[1]
    assert inside is None
