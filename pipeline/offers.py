"""Offers: who of the queue gets which slot, and when (rows M1 to M5, M7, L6).

The rule is ``stages/slots.py``; here are the facts it reads. A conversation that goes on with what slot 0, the park or
the disk holds waits for slot 0 for a while, as a side slot would read it all again: what slot 0 last read is remembered
as the client's messages render it, in blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from pipeline import effects as do
from pipeline.forecast import margin
from pipeline.request import Held, Request, Slot
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from pipeline.table import BEFORE_SLOT, Row
from pipeline.waiting import Waiting
from stages.continuing import Opening, alike, continued, in_head
from stages.hashes import BLOCK
from stages.shared import shared
from stages.slots import YIELDING, Claim, Route, routed, rows_needed, side_slot

OPENINGS = 64
"""Beginnings of conversations that are remembered."""
PATIENCE_S = 15.0
"""Seconds after which one that memory holds up is passed by nobody behind it."""
WAITS_FOR = {
    "waits_engine": "engine",
    "waits_memory": "memory",
    "waits_slot0": "slot0",
    "waits_own": "own",
    "must_wait": "slots",
}
"""What a waiter waits for, by the row that said so."""


class Offers(Waiting):
    """The way out of the queue."""

    @abstractmethod
    def _at_gate(self, request: Request) -> None:
        """It has a slot: whether its prompt fits in memory is decided next (``gate.py``)."""

    @abstractmethod
    def _holds_floor(self, request: Request) -> bool:
        """Whether enough memory stays available when it is admitted beside the others (``gate.py``)."""

    # -- offering ----------------------------------------------------------------------------------------------------

    def _offer(self, request: Request, now: float) -> bool:
        """Offer a queued request a slot; True when it was admitted."""
        memory, policy = self.memory, self.policy
        at = self._route(request, now).slot
        row = self._fire(request, Trigger.offer, now)
        request.offer_at, request.continues = None, self._continues(request)
        if row.dest is not RequestState.admitted:
            self._waits_on(request, row, now)
            return False
        memory.queue.remove(request.id)
        slot = memory.slots[at]
        slot.request, slot.run, slot.started = request.id, memory.next_run, False
        slot.hashes, slot.first = (request.hashes, request.first) if slot.id == 0 else ([], b"")
        request.served_by, request.why = slot.id, ""
        request.slot, request.run, memory.next_run = slot.id, memory.next_run, memory.next_run + 1
        memory.slot0_gave_up += row.name == "admitted_gave_up"
        self._count_running()
        request.admitted_at = now
        request.shared_rows = max((shared(request.hashes, held.hashes) for held in memory.residents), default=0)
        request.deadline_at = now + policy.request_timeout if policy.request_timeout else None
        for sibling in self._siblings(request):
            if sibling.state in BEFORE_SLOT:
                sibling.deadline_at = None
        memory.engine.heard_at = max(memory.engine.heard_at, now)
        self._fire(slot, Trigger.take, now)
        if policy.slots > 1:
            self._effects.append(do.Log(f"[parallel] {request.name} slot={slot.id} {row.says}{self._spilled(request)}"))
        self._at_gate(request)
        return True

    def _waits_on(self, request: Request, row: Row, now: float) -> None:
        """It was not admitted: what it waits for, and when waiting for that has been long enough."""
        memory = self.memory
        request.why = WAITS_FOR.get(row.name, request.why)
        if row.name == "waits_slot0":
            if request.slot0_since is None:
                request.slot0_since = now
                memory.spill_waits += request.continues != "slot"
            request.offer_at = request.slot0_since + self.policy.side_slot0_wait
        elif row.name == "waits_own":
            request.offer_at = self._own_until(request, now)
        if request.why != "engine" and self._running_now() == memory.max_running:
            memory.max_running_why = request.why

    def _offer_waiting(self, now: float) -> None:
        """Offer free slots to those they are for, in order; who waits for something else now is told so."""
        self._settle(now)
        while self.memory.engine.state is EngineState.ready and self._offer_round(now):
            pass

    def _offer_round(self, now: float) -> bool:
        """Until one is admitted: then where the others go, and what memory holds up, is to be said anew."""
        memory = self.memory
        waiting = [memory.requests[id] for id in memory.queue]
        for request, route in zip(waiting, self._routes(waiting, now), strict=True):
            told = route.slot < 0 and route.why == request.why
            if not request.offered and not told and self._offer(request, now):
                return True
        return False

    # -- who is next for which slot --------------------------------------------------------------------------------

    def _route(self, request: Request, now: float) -> Route:
        """The free slot that is its own once those in front have theirs. Who is not queued stands last.

        One that is not queued yet is told of a side slot that it would have in the end: it is not refused for it.
        """
        memory = self.memory
        queued = request.id in memory.queue
        front = memory.queue[: memory.queue.index(request.id)] if queued else memory.queue
        return self._routes([*(memory.requests[id] for id in front), request], now)[-1]

    def _routes(self, waiting: list[Request], now: float) -> list[Route]:
        rows = self._windows()
        free = [(slot.id, rows[slot.id]) for slot in self.memory.slots if slot.state is SlotState.free]
        if not free:
            return [Route(-1, "memory") if request.waits_memory else Route() for request in waiting]
        claims = [self._claim(request, now, alone=len(free) == len(rows)) for request in waiting]
        own = any(what not in YIELDING for what in self.memory.engine.own_work)
        return routed(claims, free, now, own)

    def _claim(self, request: Request, now: float, alone: bool) -> Claim:
        """What it may take. ``alone``: no other has a slot, so memory does not hold it."""
        since = now if request.slot0_since is None else request.slot0_since
        queued = request.state is RequestState.queued
        held = not alone and (request.waits_memory or (request.prompt_tokens > 0 and not self._holds_floor(request)))
        waited = request.mem_wait_s + (0.0 if request.mem_since is None else now - request.mem_since)
        return Claim(
            rows=self._rows(request),
            aside=self._rows(request) + margin(request, self.policy),
            alone_in_0=request.images > 0,
            continues=self._continues(request),
            short=self._is_short_guest(request),
            slot0_until=since + self.policy.side_slot0_wait if queued else now,
            own_until=self._own_until(request, now),
            held=held,
            last_to_pass=held and waited >= PATIENCE_S,
            offered=request.offered,
        )

    def _rows(self, request: Request) -> int:
        """Rows it takes with its whole answer; 0 before its prompt is known."""
        if not request.prompt_tokens:
            return 0
        asked, default = request.asked_tokens, self.policy.default_max_tokens
        return rows_needed(request.prompt_tokens, asked, default, self.memory.engine.window)

    def _side_slot_free(self, request: Request) -> bool:
        """Whether a side slot that would serve it is free."""
        rows = self._windows()
        free = [(slot.id, rows[slot.id]) for slot in self.memory.slots if slot.state is SlotState.free]
        need = self._rows(request)
        claim = Claim(rows=need, aside=need + margin(request, self.policy), alone_in_0=request.images > 0)
        return side_slot(claim, free) >= 0

    # -- what is held (rows M3, M5, M11) ---------------------------------------------------------------------------

    def _continues(self, request: Request) -> str:
        """Where the conversation is held that it goes on with. With one slot it makes no difference."""
        if len(self.memory.slots) == 1 or not request.hashes:
            return ""
        known = request.first != b"" and request.first in self.memory.openings
        opening = Opening(request.head, request.opening, known)
        return continued(request.hashes, self._conversations(), opening, self.policy.prefix_chunk)

    def _conversations(self) -> Iterator[tuple[str, list[bytes]]]:
        """Slot 0's last prompt, then what is parked, then what is in files."""
        yield "slot", self.memory.last_prompt
        for where in ("park", "disk"):
            yield from ((where, held.hashes) for held in self.memory.residents if held.where == where)

    def _spilled(self, request: Request) -> str:
        """What the log says of one in a side slot whose head alone is in files."""
        if not request.slot or request.continues:
            return ""
        files = (held.hashes for held in self.memory.residents if held.where == "disk")
        rows = in_head(request.hashes, files, request.head)
        return f" spill_head={rows}" if rows else ""

    def _is_short_guest(self, request: Request) -> bool:
        """Whether it would push out of slot 0 a conversation that is far longer, and not its own."""
        policy, rows = self.policy, request.prompt_tokens
        if len(self.memory.slots) == 1 or not policy.side_guests or not 0 < rows <= policy.resident_guest_max:
            return False
        held = self._in_slot0()
        if held is None or held.rows < 2 * policy.prefix_chunk or 4 * rows >= held.rows:
            return False
        return alike(request.hashes, held.hashes) * BLOCK < policy.prefix_chunk

    def _in_slot0(self) -> Held | None:
        return next((held for held in self.memory.residents if held.where == "slot" and held.slot == 0), None)

    def _rows_stay(self, slot: Slot, kept: int) -> None:
        """A run ended and left so many rows. Of slot 0 that is the conversation that may be gone on with."""
        if slot.id:
            return
        memory = self.memory
        memory.last_prompt = slot.hashes[: kept // BLOCK]
        if slot.first and memory.last_prompt == slot.hashes:
            others = [first for first in memory.openings if first != slot.first]
            memory.openings = [*others, slot.first][-OPENINGS:]

    def _slot0_holds(self, rows: int) -> None:
        """Slot 0 holds so many rows: what was behind them of its last prompt is there no more."""
        self.memory.last_prompt = self.memory.last_prompt[: rows // BLOCK]

    # -- counting (row M8) -----------------------------------------------------------------------------------------

    def _running_now(self) -> int:
        return sum(request.slot >= 0 for request in self.memory.requests.values())

    def _count_running(self) -> None:
        memory, running = self.memory, self._running_now()
        if running > memory.max_running:
            memory.max_running = running
            memory.max_running_why = "slots" if running == len(memory.slots) else "arrivals"

    def _overlaps(self, request: Request) -> bool:
        """Whether another answer is being written now."""
        memory = self.memory
        if len(memory.slots) == 1:
            return False
        others = [memory.requests.get(slot.request) for slot in memory.slots if slot.id != request.slot]
        return any(r is not None and r.slot >= 0 and r.state is RequestState.decoding for r in others)
