"""What holds of the server whatever happens to it: after every event, and at the end of a run.

The laws keep what they need of the past themselves, from events and effects alone, and compare the core's memory with
it. A law that is broken is an ``AssertionError``, raised where it happened.
"""

from __future__ import annotations

from typing import Any

from pipeline import effects as do
from pipeline import events as ev
from pipeline.firing import is_member, root
from pipeline.forecast import margin
from pipeline.request import Request, due
from pipeline.states import EngineState, RequestState, SlotState
from pipeline.table import BEFORE_SLOT, ENDED, TOLD
from stages.slots import OWN_WAIT_S, YIELDING
from tests.box import Box, Store
from tests.world import Client, rerun

HOLDING = (RequestState.admitted, RequestState.prefilling, RequestState.decoding)
SOON = 1e-6
"""Seconds that two sums of the same times may differ by."""
OVER = ("ended", "declined", "returned", "epoch")
"""Triggers of a slot whose run, or a guest's in it, is over."""
TOLD_ROWS = ("waiting_line", "waits_silently")


class Watched(Box):
    """A server in virtual time, with the laws looked at after every event."""

    def __init__(self, *args: Any, store: Store | None = None, **kwargs: Any) -> None:
        self._occupied: dict[int, int] = {}  # slot -> the run the engine has in it
        self._out: int | None = None  # the guest the engine has, or was offered
        self._letting_go: dict[int, float] = {}  # runs whose clients left -> when the step under way is over
        self._told_at: dict[int, float] = {}
        self._back: dict[int, float] = {}  # who came back to the queue, with its clock -> when
        self._ended: dict[int, float] = {}  # requests -> when
        super().__init__(store or Store(), *args, **kwargs)

    def _handle(self, event: ev.Event) -> None:
        memory, steps, effects = self.core.memory, len(self.steps), len(self.effects)
        left = memory.requests.get(event.request) if isinstance(event, ev.HungUp) else None
        held = None if left is None else (left.slot, left.run, memory.slots[left.slot].state)
        super()._handle(event)
        self._follow(event, steps, effects)
        if held is not None and held[0] >= 0:
            self._freeing(*held)
        self._check()

    # -- what the engine has ---------------------------------------------------------------------------------------

    def _follow(self, event: ev.Event, steps: int, effects: int) -> None:
        """Keep what the laws need of this event."""
        if isinstance(event, ev.RunEnded | ev.RunDeclined):
            self._occupied = {slot: run for slot, run in self._occupied.items() if run != event.run}
            self._letting_go.pop(event.run, None)
            self._out = None if self._out == event.run else self._out
        for step in self.steps[steps:]:
            if step.row == "new_epoch":
                self._occupied.pop(step.id, None)
                self._letting_go, self._out = {}, None
            elif step.row in TOLD_ROWS:
                self._told_at[step.id] = step.time
            elif step.dest == "queued" and step.source in ("admitted", "guest"):
                self._back[step.id] = step.time
            elif step.row.startswith("admitted"):
                self._in_order(step.id)
        self._memory_waits(steps)
        for time, effect in self.effects[effects:]:
            id = getattr(effect, "request", None)
            assert id not in self._ended, "something is said of a request that is over"
            match effect:
                case do.StartRun():
                    assert effect.slot not in self._occupied, "two runs in one slot"
                    self._occupied[effect.slot] = effect.run
                case do.StartGuest():
                    assert self._out is None, "two guests"
                    assert self._occupied[0] == effect.holder
                    self._out = effect.run
                case do.Finish() | do.Forget():
                    self._ended[effect.request] = time

    def _memory_waits(self, steps: int) -> None:
        """J3: who waits for a run to end waits no longer once one has."""
        over, again = False, set[int]()
        for step in self.steps[steps:]:
            if step.life == "slot" and step.trigger in OVER:
                over, again = True, set()
            elif step.row == "waits_for_memory":
                again.add(step.id)
        if over:
            waiting = [id for id in self.core.memory.queue if self.core.memory.requests[id].waits_memory]
            assert set(waiting) <= again, "one waits for the end of a run that has ended"

    def _freeing(self, slot: int, run: int, state: SlotState) -> None:
        """Its client left: the slot is free behind the step under way, or behind the guest inside."""
        if self._occupied.get(slot) != run or state is SlotState.lent or self._engine is None:
            return
        if self.core.memory.slots[slot].state is SlotState.lent or (slot == 0 and self._out is not None):
            return
        over = self._engine.due()
        self._letting_go[run] = self.now if over is None else max(self.now, over)

    def _in_order(self, id: int) -> None:
        """Whoever of the queue came before it could not have had its slot, or waits for something else."""
        core, one = self.core, self.core.memory.requests.get(id)
        if one is None or one.state not in HOLDING:
            return
        for other in (core.memory.requests[i] for i in core.memory.queue):
            if other.place > one.place or other.offered or other.waits_memory or other.why in ("memory", "own"):
                continue
            alike = not (other.images or one.images or core._continues(other) or core._continues(one))
            smaller = self._rows(other) + margin(other, core.policy) <= self._rows(one) + margin(one, core.policy)
            assert not (alike and smaller), "passed by one of its kind"

    def _rows(self, request: Request) -> int:
        """Rows of a request with its whole answer."""
        asked = request.asked_tokens or self.policy.default_max_tokens
        return min(request.prompt_tokens + asked, self.core.memory.engine.window)

    # -- the laws --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._slots()
        self._guest()
        self._queue()
        self._clocks()
        for request in self.core.memory.requests.values():
            self._request(request)

    def _slots(self) -> None:
        """One holder a slot; a slot is free only when the engine said so; at the gate is who has none started."""
        memory = self.core.memory
        waiting = False
        for slot in memory.slots:
            run = self._occupied.get(slot.id)
            if slot.state is SlotState.free:
                assert run is None, "free though the engine has a run in it"
                continue
            if slot.state is SlotState.busy or (slot.state is SlotState.lent and not slot.let_go):
                request = memory.requests[slot.request]
                assert (request.slot, request.run) == (slot.id, slot.run)
                waiting = waiting or request.state is RequestState.admitted
            else:
                request = memory.requests.get(slot.request)
                assert request is None or request.slot != slot.id
            assert run == (slot.run if slot.started else None)
        assert (memory.gate >= 0) == waiting, "somebody stands before the gate for nobody"
        if memory.gate >= 0:
            assert [s.started for s in memory.slots if s.state is SlotState.busy and s.run == memory.gate] == [False]
        if self._engine is None or self._engine.silent:
            self._letting_go = {}
        for run, time in self._letting_go.items():
            assert self.now <= time + SOON, f"run {run} goes on though its client has left"

    def _guest(self) -> None:
        """K2, K8: a guest implies its slot is lent; one at a time; nothing of it is sent before its end."""
        memory = self.core.memory
        guest = memory.guest
        assert self._out == (None if guest is None else guest.run)
        inside = guest is not None and guest.begun_at is not None
        assert [s.id for s in memory.slots if s.state is SlotState.lent] == [0] * inside
        for request in memory.requests.values():
            if request.state is RequestState.guest:
                assert inside and guest is not None and guest.request == request.id
                assert self.clients[request.id].pieces == 0
            elif request.held:
                raise AssertionError("text is held of one who is no guest")
            if request.offered:
                assert guest is not None and guest.request == request.id and not inside

    def _queue(self) -> None:
        """R3: it holds who is queued, in the order they came; nobody waits for a slot that is free for him."""
        memory, policy = self.core.memory, self.policy
        places = [memory.requests[id].place for id in memory.queue]
        assert places == sorted(places)
        if memory.engine.state is not EngineState.ready or not memory.queue:
            return
        free = [slot.id for slot in memory.slots if slot.state is SlotState.free]
        if not free:
            return
        side = min(policy.side_max_len, memory.engine.window)
        for request in (memory.requests[id] for id in memory.queue):
            if request.offered:  # its answer comes first
                continue
            if request.why == "memory":
                assert len(free) < len(memory.slots), "one that is alone waits for memory"
                continue
            if 0 in free:
                assert request.why == "own", "slot 0 is free and one waits for it"
                assert any(what not in YIELDING for what in memory.engine.own_work)
                waited = request.own_wait_s + (0.0 if request.own_since is None else self.now - request.own_since)
                assert waited <= OWN_WAIT_S + SOON
            elif not request.images and self._rows(request) + margin(request, policy) <= side:
                assert request.why == "slot0", "a side slot is free and one waits for it"
                assert due(request.slot0_since) + policy.side_slot0_wait + SOON >= self.now

    def _clocks(self) -> None:
        """What is due is done: nothing lies in the past, and the core is woken for the first of it."""
        memory = self.core.memory
        back = self.now in self._back.values()  # its time may be over already: it is told next
        assert memory.wake is None or memory.wake >= self.now - SOON or back
        assert sorted(memory.behind_own) == sorted(r.id for r in memory.requests.values() if r.own_since is not None)

    def _request(self, request: Request) -> None:
        """R1: it is where its state says, its figures are sums, and its client hears of it in time (row L1)."""
        memory, client = self.core.memory, self.clients[request.id]
        assert request.state not in ENDED
        assert client.ends == 0
        assert (request.id in memory.queue) == (request.state is RequestState.queued)
        assert (request.slot >= 0) == (request.state in HOLDING)
        over = due(request.deadline_at) < self.now - SOON
        assert not over or self._back.get(request.id) == self.now, "its time is over"
        assert request.completion_tokens == sum(request.choice_tokens)
        assert request.reasoning_tokens == sum(request.choice_reasoning) <= request.completion_tokens
        assert request.closed_calls <= request.opened_calls <= request.closed_calls + 1
        if is_member(request):
            self._member(request)
        elif request.state is RequestState.queued:
            assert request.stream or request.deadline_at is not None
        if request.stream and request.state in TOLD and not is_member(request):
            last = max(request.received_at, self._told_at.get(request.id, 0.0))
            assert request.line_at is not None
            assert self.now - SOON <= request.line_at <= last + self.policy.line_every_s + SOON

    def _member(self, request: Request) -> None:
        """A13: what one of a list opened is open for all; who waits for another has no deadline."""
        family = [r for r in self.core.memory.requests.values() if root(r) == root(request)]
        assert len({member.opened for member in family}) == 1
        held = any(member.slot >= 0 for member in family)
        if request.state in BEFORE_SLOT[1:] and held:  # the clock of one that is being read is set when it was
            assert request.deadline_at is None
        if request.state is RequestState.queued and not request.stream and not held:
            assert request.deadline_at is not None
        parent = self.clients[root(request)]
        if parent.end is not None and request.id != root(request):
            assert parent.end.code == "" or parent.end.opened or parent.end.status == 200

    # -- at the end ------------------------------------------------------------------------------------------------

    def over(self) -> None:
        """Everybody had an end and nothing is held; the facts alone give the same steps, effects and memory again."""
        memory = self.core.memory
        assert not memory.requests and not memory.queue, "something never ended"
        assert all(client.ends == 1 for client in self.clients.values() if client.received)
        assert [slot.state for slot in memory.slots] == [SlotState.free] * len(memory.slots)
        assert (memory.guest, memory.gate, memory.behind_own) == (None, -1, [])
        assert self._engine is None or self._engine.silent or not self._engine.live, "the engine has a run left"
        counts = memory.counts
        ends = counts.served + counts.refused + counts.errors + counts.timeouts + counts.abandoned
        assert ends == sum(client.received for client in self.clients.values())
        for client in self.clients.values():
            self._choices(client)
        self._moves()
        again = rerun(self)
        assert again.memory == memory
        assert again.steps == self.steps
        assert again.effects == self.effects

    def _choices(self, client: Client) -> None:
        """F11: each starts once, after the one before it has its own finish; nothing starts for who is over."""
        starts, n = [choice for choice, _ in client.starts], client.plan.choices
        ended = [choice for choice, _ in client.choices]
        assert starts == list(range(len(starts)))
        assert client.starts == [(choice, choice + 1 < n) for choice in starts]
        assert ended == list(range(len(ended)))
        assert len(starts) - 1 <= len(ended) or not starts
        assert len(ended) <= len(starts) <= n
        inside = client.guest > 0 and not starts
        if client.end is not None and not client.end.code and not inside:
            assert (len(starts), len(ended)) == (n, n - 1)

    def _moves(self) -> None:
        """R1: records move by rows alone, none behind its end; calls begin and end in turn."""
        moved: dict[tuple[str, int], str] = {}
        told: dict[int, str] = {}
        for step in self.steps:
            key = (step.life, step.id)
            if step.row in ("call_opened", "call_closed", "choice_ended", "outgrown"):
                before, told[step.id] = told.get(step.id, ""), step.row
                assert (step.row == "call_closed") <= (before == "call_opened"), "a call ended that did not begin"
                assert (step.row, before) != ("call_opened", "call_opened"), "a call began inside another"
            assert moved.setdefault(key, step.source) == step.source, "a record moved without a row"
            assert moved[key] not in ("finished", "abandoned"), "an ended request moved"
            moved[key] = step.dest
