"""Guests in virtual time, where somebody leaves: the holder, the guest, the engine, the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scripted import Answer, Script
from pipeline import effects as do
from pipeline import events as ev
from pipeline.states import RequestState, SlotState
from tests.test_lane import RAW, READS, SIDE, WRITES, Lent, Untold, check, held
from tests.world import Plan


def test_the_holder_leaves_while_a_guest_is_inside() -> None:
    """K5: it ends for its client at once, its slot behind the guest, who is served to its end."""
    world = held(Answer(ids=[2] * 5, decode_ms=300.0))
    id = world.arrive(RAW)
    world.run_until(2.0)
    assert world.of(id).state is RequestState.guest
    world.hang_up(1)
    assert world.clients[1].ends == 1
    world.run_until(2.0)
    check(world)
    assert world.clients[id].end.completion_tokens == 5
    assert world.rows(0, "slot") == ["taken", "lent", "lets_go_later", "ends_after_guest", "wound_down"]


def test_the_holder_leaves_before_the_guest_is_inside() -> None:
    """K5: the engine may have taken it already: the slot is lent all the same, and ends behind it."""
    world = held(world=Untold)
    id = world.arrive(RAW)
    world.run_until(1.5)
    holder, guest = world.core.memory.slots[0].run, world.core.memory.guest.run
    world._engine = None
    world.hang_up(1)
    assert world.core.memory.slots[0].state is SlotState.ending
    world.say(ev.GuestStarted, holder, 15, 99)
    assert world.of(id).state is RequestState.guest
    world.post(ev.RunEnded(1, guest, "stop", 0, 3))
    assert world.clients[id].end.finish == "stop"
    world.post(ev.RunEnded(1, holder, "cancelled", 0, 0))
    assert world.rows(0, "slot")[-3:] == ["lent", "ends_after_guest", "wound_down"]


@pytest.mark.parametrize("answer", ["started", "declined", "ended"])
def test_a_guest_leaves_before_the_engine_has_answered(answer: str) -> None:
    """K5: whatever the engine says of it then, the lane is free again and the holder was not touched."""
    world = held(world=Untold)
    id = world.arrive(RAW)
    world.run_until(1.5)
    run, holder = world.core.memory.guest.run, world.core.memory.slots[0].run
    world.hang_up(id)
    assert (world.now, do.CancelRun(1, run, None)) in world.effects
    late = world.arrive(RAW)
    world.run_until(2.0)
    assert world.core.memory.guest.run == run, "one at a time, though its client is gone"
    if answer == "started":
        world.say(ev.GuestStarted, holder, 15, 99)
        assert world.core.memory.slots[0].state is SlotState.lent
    world.say(ev.RunDeclined, "late") if answer == "declined" else world.say(ev.RunEnded, "cancelled", 0, 0)
    assert world.core.memory.slots[0].state is SlotState.busy
    world.run_until(4.0)
    assert world.core.memory.guest.request == late
    assert world.of(1).state is RequestState.decoding


def test_a_run_that_ends_before_it_began() -> None:
    """K5: its request waits on and is served."""
    world = held(world=Untold)
    id = world.arrive(RAW)
    world.run_until(1.5)
    world.say(ev.RunEnded, "fault", 0, 0)
    assert "lane_declined" in world.rows(id) and world.of(id).state is RequestState.queued
    world.run_until(4.0)
    world.say(ev.RunDeclined, "late")
    check(world)


def test_a_guest_that_faults_ends_alone() -> None:
    """K5: 500 for it, the holder goes on."""
    world = held(Answer(ids=[2] * 2, then="fault"))
    id = world.arrive(RAW)
    check(world)
    assert world.rows(id)[-1] == "faulted" and world.clients[id].end.code == "internal_error"
    assert world.clients[1].end.completion_tokens == 200


def test_the_engine_is_lost_with_a_guest_inside() -> None:
    """K5, I11: the guest ends like a run, one that was only offered keeps its place and is served."""
    world = held(Answer(ids=[2] * 5, decode_ms=300.0))
    id = world.arrive(RAW)
    world.run_until(2.0)
    world.kill()
    assert world.rows(id)[-1] == "engine_lost" and world.clients[id].end.code == "engine_restarting"
    check(world)
    world = held(world=Untold)
    id = world.arrive(RAW)
    world.run_until(1.5)
    world.kill()
    assert world.of(id).state is RequestState.queued and not world.of(id).offered
    check(world)
    assert world.clients[id].end.finish in ("stop", "length")


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_lost_guest_wrote_is_not_sent(stream: bool) -> None:
    """I11, K8: its headers had not left, so it is told to come again, and gets no half of an answer."""
    world = held(Answer(ids=[2] * 5, decode_ms=300.0))
    id = world.arrive(Plan(lane="raw", max_tokens=5, stream=stream))
    world.run_until(2.0)
    assert world.of(id).held
    world.kill()
    end = world.clients[id].end
    assert (end.status, end.code, end.opened) == (503, "engine_restarting", False) and end.retry_after
    assert not world.did(do.Send, id)
    assert world.of(id).held == []
    check(world)


def test_what_a_guest_wrote_stands_where_its_stream_was_open() -> None:
    """F5, F10: behind its waiting line the error rides on the end, and the text so far stands."""
    world = held(Answer(ids=[2] * 60, decode_ms=300.0), side_lane_tokens=64)
    id = world.arrive(Plan(lane="raw", max_tokens=60))
    world.run_until(13.0)
    assert world.of(id).opened and world.of(id).held
    world.kill()
    assert (world.clients[id].end.status, world.clients[id].end.finish) == (200, "error")
    assert len(world.did(do.Send, id)) > 5
    check(world)


def test_the_server_stops_with_a_guest_inside() -> None:
    """I7: everyone inside is told; nothing is offered any more."""
    world = held(Answer(ids=[2] * 5, decode_ms=300.0))
    id, waits = world.arrive(RAW), world.arrive(RAW)
    world.run_until(2.0)
    world.post(ev.Shutdown())
    assert [world.rows(i)[-1] for i in (1, id, waits)] == ["shut_down"] * 3
    check(world)


moments = st.floats(0.0, 12.0, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(
    guests=st.lists(
        st.tuples(moments, st.sampled_from([RAW, SIDE, Plan(lane="side", stop_at=2), Plan(lane="raw", stream=False)])),
        min_size=1, max_size=5,
    ),
    leavers=st.lists(st.tuples(moments, st.integers(1, 6)), max_size=4),
    reads=st.booleans(),
    choices=st.integers(1, 3),
    stop_at=st.sampled_from([0, 0, 15]),
    slow=st.sampled_from([1.0, 40.0, 500.0]),
    slots=st.integers(1, 2),
    trouble=st.sampled_from(["", "", "", "kill", "stop", "late"]),
    when=moments,
)  # fmt: skip
def test_anyone_may_leave_at_any_moment(
    guests: list[tuple[float, Plan]], leavers: list[tuple[float, int]], reads: bool, choices: int, stop_at: int,
    slow: float, slots: int, trouble: str, when: float,
) -> None:  # fmt: skip
    """K5, R3: a guest implies a lent slot, each guest's run ends once, everyone ends once, and the replay agrees."""
    script = Script(answers=[READS if reads else WRITES, Answer(ids=[2] * 25, decode_ms=slow)])
    policy: dict[str, Any] = {"request_timeout": 8.0} if trouble == "late" else {}
    world = Lent(script, slots=slots, side_lane_side_tokens=20, max_queue=16, default_max_tokens=90, **policy)
    world.arrive(Plan(prompt=900 if reads else 10, choices=choices, stop_at=stop_at))
    for at, plan in guests:
        world.arrive(plan, at)
    for at, id in leavers:
        world.hang_up(id, at)
    if trouble == "kill":
        world.kill(when)
    elif trouble == "stop":
        world.post(ev.Shutdown(), when)
    check(world)
    asked = [e.run for _, e in world.effects if isinstance(e, do.StartGuest)]
    told = [e.run for _, e in world.events if isinstance(e, ev.RunEnded | ev.RunDeclined) and e.run in asked]
    assert len(told) == len(set(told)) and (trouble in ("kill", "stop") or sorted(told) == sorted(asked))
