"""The side lane: short requests served inside the run of slot 0, at its safe points (rows K1 to K8).

One guest is out at the engine at a time. From the offer to the engine's last word on it the lane is taken, whatever
becomes of its client: until then ``GuestRun.request`` is -1. A guest's text is held whole until its end, so that one
who has outgrown the lane can be served anew.
"""

from __future__ import annotations

from abc import abstractmethod

from pipeline import effects as do
from pipeline import events as ev
from pipeline.firing import is_member
from pipeline.gate import Gate
from pipeline.request import GuestRun, Memory, Request
from pipeline.settings import Policy
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from pipeline.table import RUNNING
from stages.side_lane import ROUNDS, Bounds, Moment, cap, paced, recent, short, taken

AGAIN_S = 1.0
"""After which one is offered again that the engine had no room for."""


class Lane(Gate):
    """Guests: offered, started, declined, returned, outgrown."""

    def __init__(self, policy: Policy, memory: Memory | None = None) -> None:
        super().__init__(policy, memory)
        self._bounds = Bounds(
            policy.side_lane, policy.side_lane_prompt, policy.side_lane_tokens, policy.side_lane_side_tokens
        )

    @abstractmethod
    def _said(self, request: Request, event: ev.Progress | ev.RunEnded, now: float) -> None:
        """What a choice says so far (``core.py``)."""

    @abstractmethod
    def _drafted(self, request: Request, event: ev.Progress | ev.RunEnded) -> None:
        """How it was decoded (``core.py``)."""

    # -- who may be a guest, and when ------------------------------------------------------------------------------

    def _lane_open(self, request: Request, now: float) -> bool:
        """Whether the run of slot 0 takes it as a guest; that no slot is free for it is for the rows before to say."""
        memory = self.memory
        if not request.lane or request.state is not RequestState.queued or request.outgrown:
            return False
        if memory.guest is not None or memory.engine.state is not EngineState.ready:
            return False
        if request.choices > 1 or request.images or is_member(request):
            return False
        if request.lane_at is not None and now < request.lane_at:
            return False
        if not short(request.lane, request.prompt_tokens, request.asked_tokens, self._bounds):
            return False
        waited = 0.0 if request.queued_at is None else now - request.queued_at
        moment = Moment(self._holding(), memory.lane_since, taken(memory.lane_spans, now), waited)
        return paced(moment, self._bounds) and not self._waits_slot0(request, now)

    def _waits_slot0(self, request: Request, now: float) -> bool:
        """Whether a side slot is free for it, and it waits for slot 0 all the same (row M3)."""
        aside = any(slot.state is SlotState.free for slot in self.memory.slots[1:])
        return aside and self._route(request, now).why == "slot0"

    def _holding(self) -> str:
        """What the run of slot 0 does: prefilling, decoding, or "" where there is none that takes guests."""
        slot = self.memory.slots[0]
        if slot.state is not SlotState.busy or not slot.started or slot.run == self.memory.lane_shut:
            return ""
        holder = self._running(slot.run)
        return holder.state.value if holder is not None and holder.state in RUNNING and not holder.choice_over else ""

    # -- offers ----------------------------------------------------------------------------------------------------

    def _offer(self, request: Request, now: float) -> bool:
        admitted = super()._offer(request, now)
        if admitted and request.slot == 0:
            self.memory.lane_since = ROUNDS  # no guest was inside this run
        elif request.row == "offered_to_lane" and not request.offered:
            self._lend(request)
        return admitted

    def _lend(self, request: Request) -> None:
        """Offer it to the engine as a guest of slot 0. It stays queued until the engine has answered."""
        memory, policy = self.memory, self.policy
        holder = memory.slots[0].run
        guest = memory.guest = GuestRun(request=request.id, run=memory.next_run, holder=holder)
        memory.next_run += 1
        memory.lane.offered += 1
        request.offered, request.lane_at = True, None
        room = self._windows()[0] - request.prompt_tokens
        request.max_tokens = min(request.asked_tokens or policy.default_max_tokens, room)
        most = cap(request.lane, request.max_tokens, self._bounds)
        self._effects.append(do.StartGuest(memory.engine.epoch, guest.run, request.id, holder, most))

    def _offer_waiting(self, now: float) -> None:
        super()._offer_waiting(now)
        self._offer_lane(now)

    def _offer_lane(self, now: float) -> None:
        """Offer the lane to the first in the queue that it is open for."""
        memory = self.memory
        if memory.guest is not None:
            return
        for id in memory.queue:
            if self._lane_open(memory.requests[id], now):
                self._offer(memory.requests[id], now)
                return

    def _holder_ran(self, request: Request, rounds: int, now: float) -> None:
        """The run of slot 0 came on by so many rounds: at the lane's pace the next guest is offered.

        At an answer's first round too: there may be guests inside answers alone.
        """
        memory = self.memory
        if request.slot != 0:
            return
        before, memory.lane_since = memory.lane_since, memory.lane_since + rounds
        turn = memory.lane_since // ROUNDS > before // ROUNDS or request.first_token_at == now
        if turn and memory.queue and memory.guest is None:
            self._offer_lane(now)

    def _memory_read(self, event: ev.MemoryRead, now: float) -> None:
        super()._memory_read(event, now)
        self._offer_lane(now)  # a run may have begun that takes guests

    # -- the engine's answers --------------------------------------------------------------------------------------

    def _guest_started(self, event: ev.GuestStarted, now: float) -> None:
        memory = self.memory
        guest = memory.guest
        if self._hear(event.epoch, now) is None or guest is None or guest.run != event.run:
            return
        guest.begun_at = now
        memory.lane.copied_rows, memory.lane.copied_bytes = event.rows, event.nbytes
        slot = memory.slots[0]
        holder = self._running(slot.run)
        slot.let_go = slot.state is SlotState.ending  # it was cancelled while the guest was on its way
        self._fire(slot, Trigger.lend, now)
        if holder is not None:
            self._fire(holder, Trigger.lend, now)
        request = memory.requests.get(guest.request)
        if request is not None:
            self._come_inside(request, guest, now)

    def _come_inside(self, request: Request, guest: GuestRun, now: float) -> None:
        """It is served now: its running clock begins."""
        timeout = self.policy.request_timeout
        self._fire(request, Trigger.guest_started, now)
        self.memory.queue.remove(request.id)
        request.offered, request.inside, request.served_by, request.run = False, True, 0, guest.run
        request.why = ""
        request.admitted_at = request.prefill_at = now
        request.deadline_at = now + timeout if timeout else None

    def _guest_ended(self, event: ev.RunEnded, now: float) -> bool:
        """The end of a guest's run; False when the run is no guest's."""
        guest = self.memory.guest
        if guest is None or guest.run != event.run:
            return False
        request = self.memory.requests.get(guest.request)
        if request is not None and request.state is RequestState.guest:
            self._ended_inside(request, event, now)
        elif request is not None:
            self._not_now(request, now)
        self._returned(guest, now)
        return True

    def _ended_inside(self, request: Request, event: ev.RunEnded, now: float) -> None:
        """A guest wrote all it may: it is over, or has outgrown the lane."""
        request.run = -1
        if event.reason not in ("stop", "length"):
            self._fire(request, Trigger.fault, now)
            return
        request.end_reason = event.reason
        self._drafted(request, event)
        self._said(request, event, now)
        if self._fire(request, Trigger.end, now).dest is RequestState.queued:
            self._outgrew(request)

    def _guest_declined(self, event: ev.RunDeclined, now: float) -> bool:
        """The engine does not take the guest; False when the run is no guest's.

        A run that is about to end takes no other one either: its slot is free soon.
        """
        memory = self.memory
        guest = memory.guest
        if guest is None or guest.run != event.run:
            return False
        memory.lane.declined += 1
        request = memory.requests.get(guest.request)
        if request is not None:  # else it was withdrawn, which says nothing of the run
            ends = event.reason in ("no_holder", "late")
            memory.lane_shut = guest.holder if ends else memory.lane_shut
            self._not_now(request, now, 0.0 if ends else AGAIN_S)
        self._returned(guest, now)
        return True

    def _not_now(self, request: Request, now: float, after: float = AGAIN_S) -> None:
        """It waits on, and is not offered to the lane for so long."""
        request.offered, request.lane_at = False, now + after if after else None
        self._fire(request, Trigger.declined, now)

    def _returned(self, guest: GuestRun, now: float) -> None:
        """The engine is done with a guest: the run it was inside goes on, or ends if its client has left."""
        memory = self.memory
        memory.guest = None
        if guest.begun_at is not None:
            memory.lane_since = 0
            memory.lane.guest_s += now - guest.begun_at
            memory.lane_spans = recent([*memory.lane_spans, (guest.begun_at, now)], now)
        slot = memory.slots[0]
        if slot.state is SlotState.lent:
            self._fire(slot, Trigger.returned, now)
            slot.let_go = False
            holder = self._running(slot.run)
            if holder is not None:
                self._fire(holder, Trigger.returned, now)
        self._offer_waiting(now)

    # -- ends ------------------------------------------------------------------------------------------------------

    def _leave_slot(self, request: Request, now: float, keep: int | None) -> None:
        """Let go of the lane too. A slot that is lent ends after its guest."""
        memory = self.memory
        guest = memory.guest
        if guest is not None and guest.request == request.id:
            self._effects.append(do.CancelRun(memory.engine.epoch, guest.run, keep))
            guest.request = request.run = -1
            request.offered = False
        lent = request.slot >= 0 and memory.slots[request.slot].state is SlotState.lent
        super()._leave_slot(request, now, keep)
        if lent:
            memory.slots[0].let_go = True

    def _outgrew(self, request: Request) -> None:
        """Nothing was sent of it: it waits again at its place, with its clock, and is served whole (row K8)."""
        self.memory.lane.outgrown += 1
        self._effects.append(do.Recall(request.id))
        self._effects.append(do.Log(f"[lane] {request.name} has outgrown the side lane: served whole"))
        request.outgrown, request.inside, request.held = True, False, []
        request.served_by, request.max_tokens, request.rows_done, request.end_reason = -1, 0, 0, ""
        request.completion_tokens = request.reasoning_tokens = request.calls = 0
        request.choice_tokens, request.choice_reasoning, request.choice_drafts = [], [], []
        request.opened_calls, request.closed_calls, request.open_call = 0, 0, False
        request.closed, request.closed_at = "", -1
        request.read_ms = request.write_ms = 0.0
        request.admitted_at = request.prefill_at = request.first_token_at = request.last_token_at = None
        line_at = request.line_at
        self._start_waiting_clock(request)
        request.line_at = line_at
        self._queue(request)

    def _lose_guest(self) -> None:
        """The engine is lost: whoever was out at it is no guest any more."""
        memory = self.memory
        request = memory.requests.get(memory.guest.request) if memory.guest is not None else None
        if request is not None:
            request.offered, request.lane_at = False, None
        memory.guest, memory.slots[0].let_go = None, False
