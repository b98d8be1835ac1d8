"""The core: ``handle(event, now) -> effects``. Sans-IO: no clock, socket, thread, chance or engine call in here.

It is the single writer: it alone fires triggers. A handler turns one posted fact into facts on a record, fires, and the
row that fired decides what is to be done. Facts that name an ended request, an old run or an old epoch change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import msgspec

from pipeline import effects as do
from pipeline import events as ev
from pipeline.effects import Effect
from pipeline.engine_life import EngineLife
from pipeline.firing import root
from pipeline.journal import Step
from pipeline.outcomes import finish_word
from pipeline.request import Drafts, Memory, Request, due
from pipeline.settings import Policy
from pipeline.states import EngineState, RequestState, Trigger
from pipeline.table import ENDED, TOLD
from stages.side_lane import ROUNDS
from stages.wait import prefill_line


class Core(EngineLife):
    """The state machine's driver. ``memory`` is everything it remembers; ``steps`` collects the journal."""

    def __init__(self, policy: Policy, memory: Memory | None = None) -> None:
        super().__init__(policy, memory)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.Received: self._received,
            ev.BodyGrew: self._body_grew,
            ev.Checked: self._checked,
            ev.Fetched: self._fetched,
            ev.Prepared: self._prepared,
            ev.Progress: self._progress,
            ev.HungUp: self._hung_up,
            ev.Faulted: self._faulted,
            ev.EngineLoading: self._loading,
            ev.EngineDescribed: self._described,
            ev.EngineReady: self._ready,
            ev.EngineDied: self._died,
            ev.MemoryRead: self._memory_read,
            ev.GuestStarted: self._guest_started,
            ev.RunResumed: self._resumed,
            ev.ChunkDone: self._chunk_done,
            ev.RunEnded: self._run_ended,
            ev.RunDeclined: self._run_declined,
            ev.Resident: self._resident,
            ev.OwnWork: self._own_work,
            ev.Tick: self._tick,
            ev.Draining: self._draining,
            ev.Shutdown: self._shutdown,
        }

    # -- the two ways in -----------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Effect]:
        """The first effects of a fresh core: start the engine."""
        engine = self.memory.engine
        engine.started_at = engine.heard_at = now
        self._effects.append(do.Spawn(engine.epoch))
        return self._done(now)

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one fact at one time (seconds, never backwards) and say what is to be done."""
        self._handlers[type(event)](event, now)
        return self._done(now)

    def take_steps(self) -> list[Step]:
        """The journal since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def _done(self, now: float) -> list[Effect]:
        if self._refused:  # the others of its list are over too: what they held is free
            self._offer_waiting(now)
        self._settle(now)
        self._next_at_gate()
        memory = self.memory
        if memory.engine.own_work or memory.behind_own:
            self._own_clocks(now)
        if memory.draining and not memory.requests and not memory.exiting:
            self._exit(0)
        wake = self._next_wake()
        if wake != memory.wake:
            memory.wake = wake
            self._effects.append(do.WakeAt(inf if wake is None else wake))
        effects, self._effects = self._effects, []
        return effects

    # -- before the queue ----------------------------------------------------------------------------------------

    def _received(self, event: ev.Received, now: float) -> None:
        memory = self.memory
        request = Request(
            id=event.request, name=event.name, route=event.route, seed=event.seed, wall=event.wall,
            received_at=now, waits_from=now, body_bytes=event.body_bytes, parent=event.parent,
            deadline_at=now + self.policy.queue_timeout,
        )  # fmt: skip
        memory.requests[request.id] = request
        siblings = self._siblings(request)
        for sibling in siblings:
            request.opened, request.waits_from = sibling.opened, min(request.waits_from, sibling.waits_from)
        if memory.engine.state is EngineState.failed and not memory.draining:
            self._restart(now)
        if self._fire(request, Trigger.arrive, now).dest is None:
            self._effects.append(do.ReadBody(request.id))
            if request.parent >= 0 and not siblings:  # the list is over already, and this was still on its way
                self._stop([request], Trigger.hang_up, now, "sibling")

    def _body_grew(self, event: ev.BodyGrew, now: float) -> None:
        request = self._live(event.request, RequestState.received)
        if request is not None:
            request.body_bytes = max(request.body_bytes, event.body_bytes)
            self._fire(request, Trigger.grow, now)

    def _checked(self, event: ev.Checked, now: float) -> None:
        request = self._live(event.request, RequestState.received)
        if request is None:
            return
        request.code, request.param, request.stream = event.code, event.param, event.stream
        request.messages, request.asked_tokens = event.messages, event.max_tokens
        request.choices, request.progress = event.choices, event.progress
        request.body_bytes = max(request.body_bytes, event.body_bytes)
        self._start_waiting_clock(request)
        if self._fire(request, Trigger.check, now).dest is RequestState.validated:
            self._effects.append(do.Fetch(request.id))

    def _fetched(self, event: ev.Fetched, now: float) -> None:
        request = self._live(event.request, RequestState.validated)
        if request is None:
            return
        request.images, request.left_out = event.images, event.left_out
        self._fire(request, Trigger.fetch, now)
        self._effects.append(do.Prepare(request.id))

    def _prepared(self, event: ev.Prepared, now: float) -> None:
        request = self._live(event.request, RequestState.image_fetched)
        if request is None:
            return
        request.prompt_tokens, request.code, request.param = event.prompt_tokens, event.code, event.param
        request.prompts, request.longest, request.hashes = event.prompts, event.longest, event.hashes
        request.thinks, request.planned, request.lane = event.thinks, event.planned, event.lane
        request.head, request.opening, request.first = event.head, event.opening, event.first
        if self._fire(request, Trigger.enqueue, now).dest is not RequestState.queued:
            return
        request.queued_at = now
        request.place, self.memory.next_place = self.memory.next_place, self.memory.next_place + 1
        self._queue(request)
        if request.prompts > 1:
            self._effects.append(do.Spread(request.id))
        self._offer(request, now)
        self._offer_waiting(now)  # of those in front somebody may fit by now: memory is read again all the time

    # -- the run -------------------------------------------------------------------------------------------------

    def _resumed(self, event: ev.RunResumed, now: float) -> None:
        request = self._running(event.run) if self._hear(event.epoch, now) is not None else None
        if request is not None and request.choice == 0:  # later choices take the prompt this one has read
            request.cached_tokens = request.rows_done = event.rows
            request.source = event.source if event.rows else ""

    def _chunk_done(self, event: ev.ChunkDone, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is None:
            return
        engine.step_s = event.ms / 1_000
        request = self._running(event.run)
        if request is None or request.state not in (RequestState.prefilling, RequestState.guest):
            return
        request.rows_done = event.done
        request.read_ms += event.ms
        if request.state is RequestState.guest:
            return
        line = do.Line(request.id, prefill_line(event.done, event.total))
        if request.progress:
            line = msgspec.structs.replace(line, done=event.done, total=event.total)
        row = self._fire(request, Trigger.chunk, now, line)
        if row.name == "prefill_line":
            request.line_at = now + 1.0
        self._holder_ran(request, ROUNDS, now)

    def _progress(self, event: ev.Progress, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is None:
            return
        engine.step_s = event.ms / 1_000
        request = self._running(event.run)
        if request is None or request.choice_over:
            return
        has_read = request.state is RequestState.prefilling
        request.last_token_at = now
        request.write_ms += event.ms
        self.memory.joint_rounds += event.shared > 1
        self.memory.overlap_rounds += self._overlaps(request)
        self._drafted(request, event)
        self._said(request, event, now)
        if not event.stopped:
            self._effects.append(do.Acknowledge(event.epoch, event.run, event.n))
            self._holder_ran(request, 1, now)
            if has_read:
                self._offer_floor(now)
            return
        request.end_reason = "stop"
        if request.choice + 1 < request.choices:
            self._effects.append(do.CancelRun(event.epoch, event.run, event.keep))
            self._end_choice(request, now)
        else:
            self._leave_slot(request, now, event.keep)
            self._fire(request, Trigger.end, now)

    def _drafted(self, request: Request, event: ev.Progress | ev.RunEnded) -> None:
        """Count a round; at the run's end its own totals stand, where the engine gives them."""
        at = request.choice
        before = request.choice_drafts[at] if at < len(request.choice_drafts) else Drafts()
        if isinstance(event, ev.Progress):
            drafted, accepted = before.drafted + event.drafted, before.accepted + event.accepted
            counted = Drafts(before.rounds + 1, drafted, accepted)
        else:
            counted = Drafts(event.rounds, event.drafted, event.accepted) if event.rounds else before
        request.choice_drafts = [*request.choice_drafts[:at], counted]

    def _said(self, request: Request, event: ev.Progress | ev.RunEnded, now: float) -> None:
        """Facts of what a choice says so far, what is new of them as rows, then the text itself."""
        self._first_token(request, now)
        at = request.choice
        request.choice_tokens = [*request.choice_tokens[:at], event.n]
        request.choice_reasoning = [*request.choice_reasoning[:at], event.reasoning]
        request.completion_tokens = sum(request.choice_tokens)
        request.reasoning_tokens = sum(request.choice_reasoning)
        if event.closed and not request.closed:
            request.closed, request.closed_at = event.closed, event.closed_at
            self._fire(request, Trigger.closed, now)
        self._calls(request, event, now)
        request.open_call = event.open_call
        if event.characters and request.state is RequestState.guest:
            request.held = [*request.held, event.handle]
        elif event.characters:
            if request.stream and not request.opened:
                self._open(request)
            self._effects.append(do.Send(request.id, event.handle))
            request.sent_at = now if request.stream else request.sent_at

    def _calls(self, request: Request, event: ev.Progress | ev.RunEnded, now: float) -> None:
        """A row for every call that began and for every one that is whole since the last facts, in their order."""
        while True:
            if request.closed_calls < min(event.closed_calls, request.opened_calls):
                request.closed_calls += 1
                request.calls += 1
            elif request.opened_calls < event.opened_calls:
                request.opened_calls += 1
            else:
                return
            self._fire(request, Trigger.call, now)

    def _end_choice(self, request: Request, now: float) -> None:
        """A choice is complete and others follow: its own finish, by the rule of the rows that end a request."""
        request.choice_over = True
        self._fire(request, Trigger.choice_end, now)
        self._effects.append(do.EndChoice(request.id, request.choice, finish_word(request)))

    def _next_choice(self, request: Request) -> None:
        """The next choice begins in the same slot, with a run of its own."""
        memory = self.memory
        slot = memory.slots[request.slot]
        request.choice += 1
        request.choice_over, request.end_reason, request.closed, request.closed_at = False, "", "", -1
        request.opened_calls, request.closed_calls, request.open_call = 0, 0, False
        request.run = slot.run = memory.next_run
        memory.next_run += 1
        self._start(request)

    def _first_token(self, request: Request, now: float) -> None:
        if request.state is RequestState.prefilling:
            request.first_token_at, request.line_at = now, None
            self._fire(request, Trigger.first_token, now)
        elif request.state is RequestState.guest and request.first_token_at is None:
            request.first_token_at = now

    def _run_ended(self, event: ev.RunEnded, now: float) -> None:
        if self._hear(event.epoch, now) is None or self._guest_ended(event, now):
            return
        slot = self._slot(event.run)
        if slot is None:
            return
        request = self._running(event.run)
        good = ("stop", "length", "cancelled") if request is not None and request.choice_over else ("stop", "length")
        well = event.reason in good
        slot.more = request is not None and well and request.choice + 1 < request.choices
        slot.kept = event.kept
        self._fire(slot, Trigger.ended, now)
        self._rows_stay(slot, event.kept)
        if request is not None:
            self._ended_run(request, event, well, now)
        self._offer_waiting(now)

    def _ended_run(self, request: Request, event: ev.RunEnded, well: bool, now: float) -> None:
        """What the end of its run means for a live request: its end, or that of a choice and the next one."""
        more = request.choice + 1 < request.choices
        if not (well and more):
            request.run = request.slot = -1
        if not well:
            self._fire(request, Trigger.fault, now)
            return
        if not request.choice_over:
            request.end_reason = event.reason
            self._drafted(request, event)
            self._said(request, event, now)
        if not more:
            self._fire(request, Trigger.end, now)
            return
        if not request.choice_over:
            self._end_choice(request, now)
        self._next_choice(request)

    def _run_declined(self, event: ev.RunDeclined, now: float) -> None:
        if self._hear(event.epoch, now) is None or self._guest_declined(event, now):
            return
        slot = self._slot(event.run)
        if slot is None:
            return
        request = self._running(event.run)
        self._fire(slot, Trigger.declined, now)
        if request is not None:
            request.run = request.slot = -1
            self._fire(request, Trigger.fault, now)
        self._offer_waiting(now)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _hung_up(self, event: ev.HungUp, now: float) -> None:
        """One client sent all prompts of a list: whichever is named, all of them are over."""
        request = self.memory.requests.get(event.request)
        members = self._family(event.request if request is None else root(request))
        if members:
            self._stop(members, Trigger.hang_up, now, event.why)
            self._offer_waiting(now)

    def _faulted(self, event: ev.Faulted, now: float) -> None:
        request = self.memory.requests.get(event.request)
        if request is not None:
            self._effects.append(do.Log(f"[fault] {request.name} in {event.where}: {event.error}"))
            self._stop([request], Trigger.fault, now)
            self._offer_waiting(now)

    # -- time ----------------------------------------------------------------------------------------------------

    def _tick(self, _event: ev.Tick, now: float) -> None:
        """Whatever is due at ``now``, in a fixed order: the engine, then requests by arrival, then the drain."""
        memory = self.memory
        memory.wake = self._told = None
        self._engine_due(now)
        for request in list(memory.requests.values()):
            if request.state in ENDED:
                continue
            if now >= due(request.deadline_at):
                self._stop([request], Trigger.deadline, now)
                self._offer_waiting(now)
                continue
            if request.state is RequestState.queued and now >= min(due(request.offer_at), due(request.lane_at)):
                request.offer_at = None if now >= due(request.offer_at) else request.offer_at
                request.lane_at = None if now >= due(request.lane_at) else request.lane_at
                self._offer_waiting(now)
            if request.state in TOLD and now >= due(request.line_at):
                self._waiting_line(request, now)
            if now >= due(request.beat_at):
                self._beat(request, now)
        if now >= due(memory.drain_until):
            memory.drain_until = None
            self._end_all(now)

    def _next_wake(self) -> float | None:
        """The earliest due time. Times are compared as they are, so a tick at its own time finds it due."""
        memory = self.memory
        wake = min(self._engine_due_at(), due(memory.drain_until))
        for request in memory.requests.values():
            wake = min(wake, due(request.deadline_at), due(request.beat_at))
            if request.state in TOLD:
                wake = min(wake, due(request.line_at))
            if request.state is RequestState.queued:
                wake = min(wake, due(request.offer_at), due(request.lane_at))
        return None if wake == inf else wake

    # -- the end of the server -------------------------------------------------------------------------------------

    def _draining(self, _event: ev.Draining, now: float) -> None:
        memory = self.memory
        if not memory.draining:
            memory.draining = True
            memory.drain_until = now + self.policy.drain_timeout
            self._effects.append(do.Log(f"[server] draining: {len(memory.requests)} inside"))

    def _shutdown(self, _event: ev.Shutdown, now: float) -> None:
        self.memory.draining = True
        self.memory.drain_until = None
        self._end_all(now)
