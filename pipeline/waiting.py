"""Waiting: the queue, its clock and its lines, and who gets a free slot.

Order is entry into ``queued``; one that comes back keeps its place. Line times count from the waiter's arrival.

The prompts of one list wait for one another: while one of them holds a slot the others' clock stands still, and begins
anew when it is over; one that waited in vain leaves it as it is. Their client is told of one place alone, that of the
first who is left.
"""

from __future__ import annotations

from pipeline import effects as do
from pipeline.firing import Firing, is_member, root
from pipeline.request import Request
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from pipeline.table import BEFORE_SLOT
from stages.shared import shared
from stages.wait import next_line_at, waiting_line

WAITS = (RequestState.queued, RequestState.admitted)
"""States in which a stream is told its place."""


class Waiting(Firing):
    """The queue and the way out of it."""

    def _start_waiting_clock(self, request: Request) -> None:
        """From its arrival: a stream may wait as long as it may run, a whole answer the queue's time-out."""
        policy, start = self.policy, request.waits_from
        siblings = self._siblings(request)
        told = request.stream and all(sibling.id > request.id for sibling in siblings)
        request.line_at = request.received_at + policy.line_every_s if told else None
        if any(sibling.slot >= 0 for sibling in siblings):
            request.deadline_at = None
        elif request.stream:
            request.deadline_at = start + policy.request_timeout if policy.request_timeout else None
        else:
            request.deadline_at = start + policy.queue_timeout

    def _siblings(self, request: Request) -> list[Request]:
        """The other live prompts of its list."""
        return [r for r in self._family(root(request)) if r is not request] if is_member(request) else []

    def _stop(self, requests: list[Request], trigger: Trigger, now: float, why: str = "") -> None:
        """End live requests from outside their runs: out of the queue all, then out of their slots, then over."""
        memory = self.memory
        ids = [request.id for request in requests]
        memory.queue = [id for id in memory.queue if id not in ids]
        for request in requests:
            request.end_reason = why
            self._leave_slot(request, now, None)
            self._fire(request, trigger, now)

    def _settle(self, now: float) -> None:
        """What the end of one prompt of a list means for the others: a refusal is all's, else they wait on."""
        refused, self._refused = self._refused, []
        for parent in refused:
            self._stop(self._family(parent), Trigger.hang_up, now, "sibling")
        left, self._left = self._left, []
        ran, self._ran = self._ran, []
        for parent in left:
            members = self._family(parent)
            if any(member.slot >= 0 for member in members):
                continue
            for member in members:
                member.waits_from = now if parent in ran else member.waits_from
                self._start_waiting_clock(member)
                if member.line_at is not None:
                    member.line_at = next_line_at(member.received_at, now, self.policy.line_every_s)

    def _queue(self, request: Request) -> None:
        """Into the queue at its place: order is entry into ``queued``, and one that comes back keeps its place."""
        memory = self.memory
        memory.queue.append(request.id)
        memory.queue.sort(key=lambda id: memory.requests[id].place)

    def _offer(self, request: Request, now: float) -> bool:
        """Offer a queued request a slot; True when it was admitted."""
        memory, policy = self.memory, self.policy
        at = self._next_slot(request)
        if self._fire(request, Trigger.offer, now).dest is not RequestState.admitted:
            return False
        memory.queue.remove(request.id)
        slot = memory.slots[at]
        slot.request, slot.run, slot.started = request.id, memory.next_run, False
        request.served_by = slot.id
        request.slot, request.run, memory.next_run = slot.id, memory.next_run, memory.next_run + 1
        memory.max_running = max(memory.max_running, sum(r.slot >= 0 for r in memory.requests.values()))
        request.admitted_at = now
        request.shared_rows = max((shared(request.hashes, held.hashes) for held in memory.residents), default=0)
        request.deadline_at = now + policy.request_timeout if policy.request_timeout else None
        for sibling in self._siblings(request):
            if sibling.state in BEFORE_SLOT:
                sibling.deadline_at = None
        memory.engine.heard_at = max(memory.engine.heard_at, now)
        self._fire(slot, Trigger.take, now)
        if policy.slots > 1:
            why = "it is busy" if slot.id else "it is free"
            self._effects.append(do.Log(f"[parallel] {request.name} slot={slot.id} slot 0: {why}"))
        self._effects.append(do.Measure(memory.engine.epoch, request.run, request.prompt_tokens))
        return True

    def _offer_waiting(self, now: float) -> None:
        """Offer free slots to those they are for, in order."""
        self._settle(now)
        memory = self.memory
        if memory.engine.state is not EngineState.ready:
            return
        for id in list(memory.queue):
            if not any(slot.state is SlotState.free for slot in memory.slots):
                return
            request = memory.requests[id]
            if self._next_slot(request) >= 0:
                self._offer(request, now)

    def _waiting_line(self, request: Request, now: float) -> None:
        waited = now - request.received_at
        loading = self.memory.engine.state is EngineState.starting
        text = waiting_line(self._position(request), waited, loading)
        self._fire(request, Trigger.tick, now, text)
        request.line_at = next_line_at(request.received_at, now, self.policy.line_every_s)
