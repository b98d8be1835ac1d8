"""Guests of slot 0 in virtual time: who is served inside whom, what its client gets, and who may leave when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from engine import protocol as wire
from engine.scripted import Answer, Script
from pipeline import effects as do
from pipeline import events as ev
from pipeline.request import Request
from pipeline.settings import Policy
from pipeline.states import RequestState, SlotState
from pipeline.view import lane, parallel
from stages.side_lane import PATIENCE_S, ROUNDS
from tests.world import Plan, World, replayed

WRITES = Answer(ids=[1] * 200, decode_ms=50.0)
"""A holder that writes for ten seconds."""
READS = Answer(ids=[1] * 20, prefill_ms_per_row=10.0, decode_ms=50.0)
"""A holder whose prompt of 900 rows takes nine seconds, in four steps."""
SHORT = Answer(ids=[2] * 5, decode_ms=10.0)
RAW = Plan(lane="raw", max_tokens=5)
SIDE = Plan(lane="side")


class Lent(World):
    """A world that holds the lane's invariants after every fact."""

    def _handle(self, event: ev.Event) -> None:
        super()._handle(event)
        memory = self.core.memory
        inside = memory.guest is not None and memory.guest.begun_at is not None
        assert (memory.slots[0].state is SlotState.lent) == inside, "a guest implies its slot is lent"
        assert memory.slots[0].let_go <= inside
        for request in memory.requests.values():
            guest = request.state is RequestState.guest
            assert guest <= (memory.guest is not None)
            assert request.held == [] or guest
            if guest or request.offered:
                assert memory.guest is not None and memory.guest.request in (request.id, -1)

    def of(self, id: int) -> Request:
        """A request, live or over."""
        memory = self.core.memory
        return next(r for r in [*memory.requests.values(), *memory.recent] if r.id == id)

    def rows(self, id: int, life: str = "request") -> list[str]:
        """The rows it walked, lines and tokens aside."""
        return [s.row for s in self.steps if (s.life, s.id) == (life, id)]

    def did(self, kind: type, id: int) -> list[tuple[float, Any]]:
        """Effects of one kind on a request, with their times."""
        return [(time, e) for time, e in self.effects if isinstance(e, kind) and getattr(e, "request", 0) == id]


class Untold(Lent):
    """The engine does not hear of guests: the test says what it answers."""

    def _tell(self, message: wire.ToEngine) -> None:
        if not isinstance(message, wire.Guest):
            super()._tell(message)

    def say(self, kind: Callable[..., ev.Event], *rest: Any) -> None:
        guest = self.core.memory.guest
        assert guest is not None
        self.post(kind(self.core.memory.engine.epoch, guest.run, *rest))


def held(*guests: Answer, holder: Answer = WRITES, prompt: int = 10, world: type[Lent] = Lent, **policy: Any) -> Any:
    """A world with one request in slot 0, a second old."""
    made = world(Script(answers=[holder, *(guests or (SHORT,))]), **policy)
    made.arrive(Plan(prompt=prompt))
    made.run_until(1.0)
    return made


def check(world: World) -> None:
    """Everything comes to its end, each once, and the journal is what a replay writes."""
    world.run_until(world.now + 2_000)
    assert not world.core.memory.requests
    assert world.core.memory.guest is None
    assert all(client.ends == 1 for client in world.clients.values() if client.received)
    assert all(slot.state is SlotState.free for slot in world.core.memory.slots)
    assert replayed(world) == world.steps


# -- inside ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("holder", "prompt", "state"), [(WRITES, 10, "decoding"), (READS, 900, "prefilling")])
def test_a_guest_is_served_inside(holder: Answer, prompt: int, state: str) -> None:
    """K2: between two rounds or two prefill steps of the holder, which goes on behind it; the journal says both."""
    world = held(holder=holder, prompt=prompt)
    id = world.arrive(RAW)
    world.run_until(5.0)
    assert world.clients[id].end.finish == "length"
    assert world.rows(id)[-3:] == ["offered_to_lane", "guest_started", "guest_at_limit"]
    assert world.of(1).state.value == state
    assert [row for row in world.rows(1) if row in ("lent", "back_from_guest")] == ["lent", "back_from_guest"]
    assert world.rows(0, "slot") == ["taken", "lent", "returned"]
    assert world.of(id).served_by == 0 and any("slot=0 lane=guest" in line for line in world.logs)
    told = lane(world.core.memory)
    assert (told["offered"], told["served"], told["declined"], told["guest"]) == (1, 1, 0, -1)
    assert told["copied_rows"] == 15 and told["copied_bytes"] == 15 * told["bytes_a_row"]
    check(world)
    assert world.clients[1].end.completion_tokens == len(holder.ids)


def test_nine_of_ten_short_requests_are_served_inside_a_long_turn() -> None:
    """K7: ten short requests into a long turn, nine of them eligible: those nine inside, the tenth behind it."""
    world = held(holder=Answer(ids=[1] * 300, prefill_ms_per_row=2.0, decode_ms=30.0), prompt=600, max_queue=16)
    plans = [RAW] * 4 + [Plan(max_tokens=5)] + [SIDE] * 5
    ids = [world.arrive(plan, 1.0 + 0.5 * i) for i, plan in enumerate(plans)]
    world.run_until(9.0)
    assert world.of(1).state is RequestState.decoding
    inside = [id for id in ids if world.of(id).inside and world.clients[id].end is not None]
    assert inside == [id for id, plan in zip(ids, plans, strict=True) if plan.lane]
    check(world)
    assert not world.of(ids[4]).inside and world.clients[ids[4]].end.finish in ("stop", "length")
    assert world.core.memory.lane.served == 9


def test_the_order_is_that_of_the_queue() -> None:
    """K2: one guest at a time, in the order they wait."""
    world = held(max_queue=16)
    ids = [world.arrive(RAW) for _ in range(4)]
    world.run_until(9.0)
    assert [e.request for _, e in world.effects if isinstance(e, do.StartGuest)] == ids
    check(world)


def test_the_holder_runs_between_two_guests() -> None:
    """K2: at least 8 rounds of it, or one of its prefill steps."""
    world = held(max_queue=16)
    for _ in range(4):
        world.arrive(RAW)
    world.run_until(9.0)
    runs, rounds = {e.run for _, e in world.effects if isinstance(e, do.StartGuest)}, []
    for _, event in world.events:
        if isinstance(event, ev.GuestStarted):
            rounds.append(0)
        elif isinstance(event, ev.Progress) and event.run not in runs and rounds:
            rounds[-1] += 1
    assert len(rounds) == 4 and all(count >= ROUNDS for count in rounds[:-1])
    check(world)


def test_guests_take_a_quarter_of_the_time_unless_one_has_waited() -> None:
    """K2: at most a quarter of any 20 s, waived for one that has waited 5 s."""
    slow = Answer(ids=[2] * 5, decode_ms=1_400.0)
    world = held(slow, SHORT, holder=Answer(ids=[1] * 900, decode_ms=50.0))
    world.arrive(RAW)
    second = world.arrive(RAW, 8.5)
    check(world)
    first_end = next(t for t, e in world.effects if isinstance(e, do.Finish) and e.request == 2)
    asked, (at, _) = world.of(second).queued_at, world.did(do.StartGuest, second)[0]
    assert first_end < asked, "it came when the first was gone"
    assert at - asked >= PATIENCE_S


@pytest.mark.parametrize("mode", ["on", "decode", "off"])
def test_the_flag(mode: str) -> None:
    """K2: decode: none inside a prefill; off: none at all. Everyone is served all the same."""
    world = held(holder=READS, prompt=900, side_lane=mode)
    id = world.arrive(RAW)
    check(world)
    states = [s.source for s in world.steps if s.row == "lent" and s.life == "request"]
    assert states == {"on": ["prefilling"], "decode": ["decoding"], "off": []}[mode]
    assert world.clients[id].end.finish == "length"


def test_the_first_guest_need_not_wait_for_the_holder_to_come_on() -> None:
    """K2: it is offered when the run begins that takes it; with the flag decode, at the answer's first round."""
    world = Lent(Script(answers=[READS, SHORT]))
    for plan in (Plan(prompt=900), RAW):
        world.arrive(plan)
    world.run_until(1.0)
    assert world.did(do.StartGuest, 2) and not [e for _, e in world.events if isinstance(e, ev.ChunkDone)]
    check(world)
    world = held(holder=READS, prompt=900, side_lane="decode")
    id = world.arrive(RAW)
    check(world)
    at, _ = world.did(do.StartGuest, id)[0]
    assert at == world.of(1).first_token_at


def test_who_is_not_taken() -> None:
    """K1: several answers, a long prompt, a large limit of a raw one, no kind; a side slot that is free comes first."""
    world = held(side_lane_prompt=50, max_queue=16)
    several = (Plan(lane="side", choices=2), Plan(lane="side", others=(10,)))
    sizes = (Plan(lane="raw", max_tokens=65), Plan(lane="raw"), Plan(lane="side", prompt=51), Plan(max_tokens=5))
    for plan in (*several, *sizes):
        world.arrive(plan)
    world.run_until(5.0)
    assert not [e for _, e in world.effects if isinstance(e, do.StartGuest)]
    check(world)
    world = held(slots=2)
    id = world.arrive(RAW)
    world.run_until(2.0)
    assert world.of(id).served_by == 1 and not world.did(do.StartGuest, id)
    check(world)


# -- what its client gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_guest_gets_nothing_before_its_end(stream: bool) -> None:
    """K8: it is held whole until its end, then all of it is sent before the end."""
    world = held(Answer(ids=[2] * 5, decode_ms=300.0))
    id = world.arrive(Plan(lane="raw", max_tokens=5, stream=stream))
    check(world)
    sent, (end, finish) = world.did(do.Send, id), world.did(do.Finish, id)[0]
    assert len(sent) == 5 and {time for time, _ in sent} == {end}
    assert finish.opened is stream and finish.completion_tokens == 5


def test_a_guest_waits_for_nothing_and_has_no_slot() -> None:
    """L4, M8: its lines say no more what it waited for before; what runs in slots is counted without it."""
    world = held(Answer(ids=[2] * 60, decode_ms=300.0))
    id = world.arrive(Plan(lane="raw", max_tokens=60))
    request = world.core.memory.requests[id]
    while request.state is not RequestState.guest:
        request.why = "memory" if request.state is RequestState.queued else request.why
        world.run_until(world.now + 0.01)
    assert request.why == "" and parallel(world.core.memory)["running"] == 1
    world.run_until(13.0)
    assert [line for _, line in world.clients[id].lines] == ["waiting, position 1, 10 s so far"]
    world.run_until(2_000.0)
    assert world.clients[id].ends == 1


def test_a_stop_string_and_calls_end_a_guest_as_anyone() -> None:
    """K3: its stops are its own: the run is cancelled, the slot lent until the engine says so; calls are calls."""
    world = held(Answer(ids=[2] * 9, decode_ms=10.0), max_queue=16)
    stopped = world.arrive(Plan(lane="side", stop_at=3))
    called = world.arrive(Plan(lane="side", calls=2))
    check(world)
    assert world.rows(stopped)[-1] == "guest_stopped" and world.clients[stopped].end.finish == "stop"
    assert world.clients[stopped].end.completion_tokens == 3
    assert world.rows(called)[-1] == "guest_called" and world.clients[called].end.finish == "tool_calls"
    assert world.rows(called).count("call_opened") == 2


def test_one_who_outgrows_the_lane_is_served_whole() -> None:
    """K8: nothing was sent, its place and clock stay, no full queue refuses it, the lane is not offered again."""
    long = Answer(ids=[2] * 50, decode_ms=30.0)
    world = held(long, max_queue=1, side_lane_side_tokens=20)
    id = world.arrive(SIDE)
    world.run_until(1.3)
    assert world.of(id).state is RequestState.guest
    behind = world.arrive(Plan(max_tokens=3))
    world.run_until(3.0)
    request = world.of(id)
    assert world.core.memory.queue == [id, behind], "in front of one who came later, though one place is all there is"
    assert request.outgrown and request.completion_tokens == 0 and not world.did(do.Send, id)
    assert request.deadline_at == request.waits_from + world.policy.request_timeout
    check(world)
    assert world.rows(id).count("offered_to_lane") == 1 and "outgrown" in world.rows(id)
    assert world.clients[id].recalled == 1
    assert world.clients[id].end.completion_tokens == 50 == len(world.did(do.Send, id))
    assert world.core.memory.lane.outgrown == 1 and world.core.memory.lane.served == 0


def test_an_outgrown_one_loses_little() -> None:
    """K8: behind a turn of twenty seconds it is served within 1.1 of the time it takes with the lane off."""
    total = {}
    for mode in ("on", "off"):
        world = held(
            Answer(ids=[2] * 300, decode_ms=10.0), holder=Answer(ids=[1] * 400, decode_ms=50.0), side_lane=mode
        )
        id = world.arrive(SIDE)
        check(world)
        assert ("outgrown" in world.rows(id)) == (mode == "on")
        total[mode] = world.clients[id].end.total_ms
    assert total["off"] < total["on"] <= 1.1 * total["off"]


def test_what_an_outgrown_one_wrote_is_forgotten() -> None:
    """K8, L1: its calls count anew, and its lines go on at their pace."""
    world = held(Answer(ids=[2] * 30, decode_ms=700.0), side_lane_side_tokens=20)
    id = world.arrive(Plan(lane="side", calls=1))
    check(world)
    assert "outgrown" in world.rows(id) and world.rows(id).count("call_opened") == 2
    assert (world.of(id).calls, world.of(id).completion_tokens) == (1, 30)
    lines = [time for time, _ in world.clients[id].lines if time < world.of(id).admitted_at]
    assert lines and all(later - sooner >= 9.9 for sooner, later in pairwise(lines))


def test_its_own_limit_is_no_outgrowing() -> None:
    """K8: one that wrote all it asked for ended; a raw one always does."""
    long = Answer(ids=[2] * 50, decode_ms=1.0)
    world = held(long, side_lane_side_tokens=20, max_queue=16)
    ids = [world.arrive(Plan(lane=kind, max_tokens=20)) for kind in ("side", "raw")]
    check(world)
    assert [world.rows(id)[-1] for id in ids] == ["guest_at_limit"] * 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_guest_that_runs_out_of_time(stream: bool) -> None:
    """K8, I3: what was written stands; the slot is lent until the engine is done."""
    world = held(
        Answer(ids=[2] * 20, decode_ms=400.0), holder=Answer(ids=[1] * 700, decode_ms=50.0), request_timeout=4.0
    )
    id = world.arrive(Plan(lane="side", stream=stream))
    check(world)
    assert world.rows(id)[-1] == "ran_out"
    assert 0 < len(world.did(do.Send, id)) < 20
    assert world.clients[id].end.finish == "timeout" and world.clients[id].end.opened is stream


# -- declined ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["memory", "busy"])
def test_no_room_now(reason: str) -> None:
    """K5: it waits on, and is offered again a second later; another one may be taken meanwhile."""
    world = held(world=Untold)
    id, other = world.arrive(RAW), world.arrive(RAW)
    world.run_until(1.5)
    world.say(ev.RunDeclined, reason)
    assert "lane_declined" in world.rows(id) and world.core.memory.guest.request == other
    world.say(ev.RunDeclined, reason)
    world.run_until(4.0)
    assert world.rows(id).count("offered_to_lane") == 2
    assert world.did(do.StartGuest, id)[1][0] >= 1.5 + 1.0


@pytest.mark.parametrize("reason", ["late", "no_holder"])
def test_the_holder_is_about_to_end(reason: str) -> None:
    """K5: it is not offered to that run again; the slot is its own when it is free."""
    world = held(world=Untold)
    id = world.arrive(RAW)
    world.run_until(1.5)
    world.say(ev.RunDeclined, reason)
    check(world)
    assert world.rows(id).count("offered_to_lane") == 1
    assert world.of(id).served_by == 0 and not world.of(id).inside
    assert world.core.memory.lane.declined == 1


def test_the_engine_declines() -> None:
    """K5: the scripted engine's own no: it is served at a later safe point."""
    world = held(world=lambda script, **policy: Lent(script, [{"decline_guest": 1}], **policy))
    id = world.arrive(RAW)
    check(world)
    assert world.rows(id).count("lane_declined") == 1 and world.of(id).inside


def test_the_policy_is_the_flags() -> None:
    """K2: the defaults the tests above rely on."""
    assert (Policy().side_lane, Policy().side_lane_tokens, Policy().side_lane_side_tokens) == ("on", 64, 192)
