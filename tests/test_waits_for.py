"""What a request waits for beside a slot, in virtual time: own work, memory, the engine; and what is counted of it."""

from __future__ import annotations

import pytest

from engine.scripted import Answer, Script
from pipeline import events as ev
from tests.box import Box, Store
from tests.test_turns import rows, served, world
from tests.world import Plan, World, replayed


def test_own_work_is_waited_for_and_sends_nobody_aside() -> None:
    """L6: slot 0 is free but for it: the request waits for its end; a write that yields by itself holds nobody."""
    one = world()
    one.run_until(0.1)
    one.post(ev.OwnWork(1, "warm-up", True))
    waiter = one.arrive(Plan(max_tokens=2))
    one.run_until(5.0)
    assert rows(one, waiter) == ["waits_own"] and one.core.memory.requests[waiter].why == "own"
    one.post(ev.OwnWork(1, "warm-up", False))
    one.run_until(6.0)
    assert served(one) == {waiter: 0}
    one.post(ev.OwnWork(1, "disk write", True))
    next_one = one.arrive(Plan(max_tokens=2))
    one.run_until(7.0)
    assert rows(one, next_one) == ["admitted"]


def test_a_warm_up_is_waited_for() -> None:
    """L6: the scripted engine's own, once it is loaded: who waited for the engine waits for that now."""
    one = World(Script(load_ms=1_000.0, warm_up_ms=3_000.0, answers=[Answer(ids=[1])]), slots=2)
    one.run_until(0.5)
    waiter = one.arrive()
    one.run_until(20.0)
    assert rows(one, waiter) == ["waits_engine", "waits_own", "admitted"]
    assert one.core.memory.recent[0].admitted_at == 4.0 and one.core.memory.engine.own_work == []


def test_own_work_is_waited_for_fifteen_seconds() -> None:
    """L6: then the request has slot 0 all the same."""
    one = world()
    one.run_until(1.0)
    one.post(ev.OwnWork(1, "warm-up", True))
    waiter = one.arrive(Plan(max_tokens=2))
    one.run_until(40.0)
    assert rows(one, waiter) == ["waits_own", "admitted"] and served(one) == {waiter: 0}
    assert one.core.memory.recent[0].admitted_at == pytest.approx(16.003)


def test_own_work_of_several_kinds_in_turn_is_waited_for_fifteen_seconds() -> None:
    """L6: one after the other, they hold nobody longer than one would: the request is woken for it by itself."""
    one = world()
    one.run_until(1.0)
    one.post(ev.OwnWork(1, "warm-up", True))
    waiter = one.arrive(Plan(max_tokens=2))
    one.post(ev.OwnWork(1, "graph capture", True), at=8.0)
    one.post(ev.OwnWork(1, "warm-up", False), at=9.0)
    one.run_until(40.0)
    assert rows(one, waiter) == ["waits_own", "admitted"] and served(one) == {waiter: 0}
    assert one.core.memory.recent[0].admitted_at == pytest.approx(16.003)
    assert one.core.memory.recent[0].own_wait_s == pytest.approx(15.0, abs=0.01)


def test_memory_is_asked_where_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """M7: one that memory holds waits for it, may be passed for a while, then is not; alone nobody is held."""
    one = world(decode_ms=1_000.0, slots=3)
    monkeypatch.setattr(one.core, "_holds_floor", lambda request: request.prompt_tokens < 100)
    alone, held, small = one.arrive(Plan(prompt=200)), one.arrive(Plan(prompt=200)), one.arrive(Plan(max_tokens=3))
    one.run_until(5.0)
    assert served(one) == {alone: 0, small: 1} and rows(one, held) == ["waits_memory"]
    assert one.core.memory.requests[held].why == "memory"
    one.run_until(20.0)
    late = one.arrive(Plan(max_tokens=3))
    one.run_until(25.0)
    assert rows(one, late) == ["waits_memory"], "it was passed long enough"
    one.run_until(120.0)
    assert served(one)[held] == 0 and served(one)[late] >= 0


def test_what_memory_holds_up_is_said_anew_behind_each_who_gets_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """M7: two slots are free at once. Beside the first the second is held, so the third has the other slot at once."""
    one = Box(Store(), slots=2)
    monkeypatch.setattr(one.core, "_holds_floor", lambda request: request.prompt_tokens < 100)
    both = one.arrive(Plan(others=(10,)))
    waiters = [one.arrive(Plan(prompt=prompt), at=0.0005) for prompt in (200, 200, 10)]
    one.run_until(0.0038)
    assert [rows(one, waiter) for waiter in waiters] == [["must_wait"]] * 3, "a list is at the gate, in both slots"
    one.hang_up(both)
    assert [one.core.memory.requests[waiter].slot for waiter in waiters] == [0, -1, 1]


def test_the_engine_is_waited_for() -> None:
    """L4: while the model loads a request waits for the engine, not for a slot."""
    one = World(Script(load_ms=2_000.0), slots=2)
    one.run_until(0.5)
    waiter = one.arrive()
    one.run_until(1.0)
    assert rows(one, waiter) == ["waits_engine"] and one.core.memory.requests[waiter].why == "engine"
    one.run_until(30.0)
    assert served(one) == {waiter: 0}


def test_the_prompts_of_a_list_wait_for_memory_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A13, M7: what one of them waits for ends none of the others, and all are answered."""
    one = world(decode_ms=10.0, slots=3)
    monkeypatch.setattr(one.core, "_holds_floor", lambda request: False)
    one.arrive(Plan(others=(20, 30), stream=False, max_tokens=3))
    one.run_until(30.0)
    assert [client.end.finish for client in one.clients.values()] == ["length"] * 3  # type: ignore[union-attr]
    assert set(served(one).values()) == {0} and one.core.memory.max_running == 1


def test_a_prompt_of_a_list_that_waits_for_memory_leaves_the_clock_of_one_that_runs() -> None:
    """I3, J3: they wait by one clock, each runs by its own; one that goes back to the queue ends nobody."""
    one = Box(Store(peak=400, a_run=10), slots=2, request_timeout=12.0)
    first = one.arrive(Plan(prompt=20, others=(350,)))
    one.run_until(0.5)
    assert "waits_for_memory" in [step.row for step in one.steps if step.id == first + 1]
    running = one.core.memory.requests[first]
    assert running.admitted_at is not None
    assert running.deadline_at == running.admitted_at + 12.0
    assert one.core.memory.requests[first + 1].deadline_at is None


def test_what_a_refused_list_held_is_the_next_ones() -> None:
    """A13, R3: one prompt of a list is refused while another is at the gate: who waits has the slot in that event."""
    one = Box(Store())
    first, waiter = one.arrive(Plan(others=(0,))), one.arrive()
    one.run_until(0.0035)
    assert first not in one.core.memory.requests
    assert one.core.memory.requests[waiter].slot == 0
    assert replayed(one) == one.steps


# -- counting ----------------------------------------------------------------------------------------------------------


def test_why_not_more_ran_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """M8: no more came, all slots were busy, or what the next one waited for."""
    one = world(slots=3)
    assert one.core.memory.max_running_why == ""
    one.arrive()
    one.run_until(0.5)
    assert one.core.memory.max_running_why == "arrivals"
    monkeypatch.setattr(one.core, "_holds_floor", lambda request: False)
    one.arrive()
    one.run_until(1.0)
    assert (one.core.memory.max_running, one.core.memory.max_running_why) == (1, "memory")
    monkeypatch.undo()
    for _ in range(3):
        one.arrive()
    one.run_until(1.5)
    assert (one.core.memory.max_running, one.core.memory.max_running_why) == (3, "slots")


def test_rounds_beside_another_answer_are_counted() -> None:
    """M8, M10: what could have been joint: rounds while another answer was being written."""
    one = world()
    one.arrive(Plan(max_tokens=10))
    one.run_until(5.0)
    assert one.core.memory.overlap_rounds == 0
    one.arrive(Plan(max_tokens=10))
    one.arrive(Plan(max_tokens=10))
    one.run_until(20.0)
    assert one.core.memory.overlap_rounds in range(10, 21)
