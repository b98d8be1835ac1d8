"""Waiting: the queue, its clock and its lines, and who gets a free slot.

Order is entry into ``queued``; one that comes back keeps its place. Line times count from the waiter's arrival.
"""

from __future__ import annotations

from pipeline import effects as do
from pipeline.firing import Firing
from pipeline.request import Request
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from stages.wait import next_line_at, waiting_line

WAITS = (RequestState.queued, RequestState.admitted)
"""States in which a stream is told its place."""


class Waiting(Firing):
    """The queue and the way out of it."""

    def _start_waiting_clock(self, request: Request) -> None:
        """From its arrival: a stream may wait as long as it may run, a whole answer the queue's time-out."""
        policy, start = self.policy, request.received_at
        if request.stream:
            request.deadline_at = start + policy.request_timeout if policy.request_timeout else None
            request.line_at = start + policy.line_every_s
        else:
            request.deadline_at = start + policy.queue_timeout
            request.line_at = None

    def _queue(self, request: Request) -> None:
        """Into the queue at its place: order is entry into ``queued``, and one that comes back keeps its place."""
        memory = self.memory
        memory.queue.append(request.id)
        memory.queue.sort(key=lambda id: memory.requests[id].place)

    def _offer(self, request: Request, now: float) -> bool:
        """Offer a queued request a slot; True when it was admitted."""
        if self._fire(request, Trigger.offer, now).dest is not RequestState.admitted:
            return False
        memory, policy = self.memory, self.policy
        memory.queue.remove(request.id)
        slot = next(s for s in memory.slots if s.state is SlotState.free)
        slot.request, slot.run, slot.started = request.id, memory.next_run, False
        request.served_by = slot.id
        request.slot, request.run, memory.next_run = slot.id, memory.next_run, memory.next_run + 1
        request.admitted_at = now
        request.deadline_at = now + policy.request_timeout if policy.request_timeout else None
        memory.engine.heard_at = max(memory.engine.heard_at, now)
        self._fire(slot, Trigger.take, now)
        self._effects.append(do.Measure(memory.engine.epoch, request.run, request.prompt_tokens))
        return True

    def _offer_waiting(self, now: float) -> None:
        """Offer free slots to those in front, in order."""
        memory = self.memory
        while (
            memory.queue
            and memory.engine.state is EngineState.ready
            and any(s.state is SlotState.free for s in memory.slots)
        ):
            self._offer(memory.requests[memory.queue[0]], now)

    def _waiting_line(self, request: Request, now: float) -> None:
        waited = now - request.received_at
        loading = self.memory.engine.state is EngineState.starting
        text = waiting_line(self._position(request), waited, loading)
        self._fire(request, Trigger.tick, now, text)
        request.line_at = next_line_at(request.received_at, now, self.policy.line_every_s)
