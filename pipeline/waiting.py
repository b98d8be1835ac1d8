"""Waiting: the queue, its clock and its lines.

Order is entry into ``queued``; one that comes back keeps its place. Line times count from the waiter's arrival.

The prompts of one list wait for one another: while one of them holds a slot the others' clock stands still, and begins
anew when it is over; one that waited in vain leaves it as it is. Their client is told of one place alone, that of the
first who is left.
"""

from __future__ import annotations

from math import inf

import msgspec

from pipeline import effects as do
from pipeline.firing import Firing, is_member, root
from pipeline.forecast import Said, first_end, said
from pipeline.request import Request
from pipeline.states import EngineState, RequestState, Trigger
from pipeline.table import RUNNING
from stages.slots import OWN_WAIT_S
from stages.wait import next_line_at, own_left, waiting_line

BLANK_S = 30.0
"""Seconds between two blanks of a whole answer whose headers left early (row I6b)."""


class Waiting(Firing):
    """The queue. Nothing of it is remembered here but what was last worked out for its lines."""

    _told: tuple[float, list[int], Said] | None = None

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

    def _waiting_line(self, request: Request, now: float) -> None:
        memory, waited, position = self.memory, now - request.received_at, self._position(request)
        loading = memory.engine.state is EngineState.starting
        estimate = None if loading else self._estimate(request, now)
        own = "" if loading else (request.own_what if request.own_since is not None else _last(memory.engine.own_work))
        line = do.Line(
            request.id,
            waiting_line(position, waited, loading, estimate, memory=request.why == "memory", own=own),
        )
        if request.progress:
            shown = None if estimate is None else round(estimate, 1)
            line = msgspec.structs.replace(line, position=position, estimate_s=shown, waited_s=round(waited, 1))
        self._fire(request, Trigger.tick, now, line)
        request.line_at = next_line_at(request.received_at, now, self.policy.line_every_s)

    def _estimate(self, request: Request, now: float) -> float | None:
        """Seconds until it has what it waits for: a slot, memory or the end of the engine's own work."""
        memory = self.memory
        if request.own_since is not None:
            return own_left(memory.own_waits.get(request.own_what, []), now - request.own_since)
        if request.state is not RequestState.queued:
            return None
        if request.why == "memory":
            return first_end(memory, now)
        return dict(zip(memory.queue, self._said_to(now).waits, strict=True))[request.id]

    def _said_to(self, now: float) -> Said:
        """What everybody in the queue could be told: worked out once for all whose line is due now."""
        if self._told is None or self._told[:2] != (now, self.memory.queue):
            self._told = now, list(self.memory.queue), said(self.memory, self.policy, now)
        return self._told[2]

    # -- signs of life (rows L1, I6b) ------------------------------------------------------------------------------

    def _beat(self, request: Request, now: float) -> None:
        """An empty chunk on a stream, a blank of a whole answer, unless its client got something meanwhile.

        Of a list of prompts one prompt gives them: of a stream the first that is left, of a whole answer the first that
        runs.
        """
        family = self._family(root(request)) if is_member(request) else [request]
        every = self.policy.keepalive_s if request.stream else BLANK_S
        sent = max(-inf if r.sent_at is None else r.sent_at for r in family)
        first = all(r.id >= request.id for r in family if request.stream or r.state in RUNNING)
        if now < sent + every or not first:
            request.beat_at = sent + every if now < sent + every else now + every
            return
        row = self._fire(request, Trigger.tick, now)
        request.beat_at = now + every
        if row.name in ("headers_due", "beat_due"):
            self._open(request)
            self._effects.append(do.Beat(request.id) if request.stream else do.Blank(request.id))
            for member in family:
                member.sent_at = now

    # -- the engine's own work (row L6) ----------------------------------------------------------------------------

    def _own_clocks(self, now: float) -> None:
        """Who waits behind the engine's own work has a clock that runs: in front of it, nothing else in the way."""
        memory = self.memory
        work = _last(memory.engine.own_work)
        for id in list(memory.behind_own):
            request = memory.requests[id]
            if not work or not _behind_own(request) or request.own_what not in memory.engine.own_work:
                self._own_over(request, now)
        if not work:
            return
        for request in memory.requests.values():
            if request.own_since is None and _behind_own(request):
                request.own_since, request.own_what = now, work
                memory.behind_own = [*memory.behind_own, request.id]
                if request.state is RequestState.queued:
                    request.offer_at = self._own_until(request, now)

    def _own_until(self, request: Request, now: float) -> float:
        """When it has waited long enough behind the engine's own work, be it of one kind or several in turn."""
        since = now if request.own_since is None else request.own_since
        return since + OWN_WAIT_S - request.own_wait_s


def _behind_own(request: Request) -> bool:
    """Whether nothing but the engine's own work holds it up."""
    held = request.state is RequestState.queued and request.why == "own"
    return held or request.state is RequestState.admitted


def _last(work: list[str]) -> str:
    """What was begun last; "" for nothing."""
    return work[-1] if work else ""
