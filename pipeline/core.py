"""The core: ``handle(event, now) -> effects``. Sans-IO: no clock, socket, thread, chance or engine call in here.

It is the single writer: it alone fires triggers. A handler turns one posted fact into facts on a record, fires, and the
row that fired decides what is to be done. Facts that name an ended request, an old run or an old epoch change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from pipeline import effects as do
from pipeline import events as ev
from pipeline import outcomes, summary
from pipeline.effects import Effect
from pipeline.journal import Step
from pipeline.machine import LIFE, Record, fire
from pipeline.request import RECENT, Engine, Facts, Memory, Request, Slot, due
from pipeline.settings import Policy
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from pipeline.table import BEFORE_SLOT, ENDED, Row
from stages.wait import next_line_at, prefill_line, waiting_line

FAILURE_WINDOW_S = 60.0
LOAD_STALL_S = 60.0
"""Seconds a load may stand still: one large tensor from a slow disk is no fault."""
UNUSABLE = (2, 3, 4)
"""Exit statuses of an engine that says why it cannot serve (settings, memory, self-check): a restart would not help."""
WAITING = (RequestState.queued, RequestState.admitted)


class Core:
    """The state machine's driver. ``memory`` is everything it remembers; ``steps`` collects the journal."""

    def __init__(self, policy: Policy, memory: Memory | None = None) -> None:
        self.policy = policy
        self.memory = memory or Memory(slots=[Slot(id=i) for i in range(policy.slots)])
        self.steps: list[Step] = []
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.Received: self._received,
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
            ev.ChunkDone: self._chunk_done,
            ev.RunEnded: self._run_ended,
            ev.RunDeclined: self._run_declined,
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
        return self._done()

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one fact at one time (seconds, never backwards) and say what is to be done."""
        self._handlers[type(event)](event, now)
        return self._done()

    def take_steps(self) -> list[Step]:
        """The journal since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def _done(self) -> list[Effect]:
        memory = self.memory
        if memory.draining and not memory.requests and not memory.exiting:
            self._exit(0)
        wake = self._next_wake()
        if wake != memory.wake:
            memory.wake = wake
            self._effects.append(do.WakeAt(inf if wake is None else wake))
        effects, self._effects = self._effects, []
        return effects

    # -- firing --------------------------------------------------------------------------------------------------

    def _fire(self, record: Record, trigger: Trigger, now: float, line: str = "") -> Row:
        """Fire, write the journal step, and carry out what follows from the row."""
        source = record.state
        row = fire(record, trigger, self._facts(record, now))
        self.memory.steps += 1
        said = line if row.name in ("waiting_line", "prefill_line") else ""
        self.steps.append(
            Step(
                self.memory.steps, now, LIFE[type(record)], record.id, trigger.value, row.name,
                source.value, record.state.value, said,
            )
        )  # fmt: skip
        if isinstance(record, Request):
            if said:
                record.opened, record.line = True, said
                self._effects.append(do.Line(record.id, said))
            if record.state in ENDED:
                self._end(record, row, now)
        return row

    def _facts(self, record: Record, now: float) -> Facts:
        """What guards may read, computed before the firing."""
        memory, policy, engine = self.memory, self.policy, self.memory.engine
        before = [r for r in memory.requests.values() if r.state in BEFORE_SLOT and r.state is not RequestState.queued]
        return Facts(
            now=now,
            draining=memory.draining,
            before_queue=len(before),
            bodies=sum(r.body_bytes for r in before),
            waiting=len(memory.queue),
            position=self._position(record),
            free_slots=sum(s.state is SlotState.free for s in memory.slots),
            engine=engine.state,
            window=engine.window,
            advancing=self._advancing(now),
            failures=sum(now - t <= FAILURE_WINDOW_S for t in engine.failures),
            since_start=now - engine.started_at,
            max_live=policy.max_live,
            max_bodies=policy.bodies,
            max_queue=policy.max_queue,
            retry_after=policy.retry_failed_s,
        )

    def _position(self, record: Record) -> int:
        """A waiter's place, from 1; an admitted one stands first; 0 for everything else."""
        if not isinstance(record, Request):
            return 0
        if record.state is RequestState.admitted:
            return 1
        return self.memory.queue.index(record.id) + 1 if record.id in self.memory.queue else 0

    def _limit(self) -> float:
        """Seconds without a message after which a working engine counts as silent."""
        return max(self.policy.quiet_s, 3 * self.memory.engine.step_s)

    def _advancing(self, now: float) -> bool:
        """Whether status lines would be true: the engine was heard in time, or it is starting."""
        engine = self.memory.engine
        if engine.state is EngineState.starting:
            return True
        return engine.state is EngineState.ready and now - engine.heard_at <= self._limit()

    # -- before the queue ----------------------------------------------------------------------------------------

    def _received(self, event: ev.Received, now: float) -> None:
        memory = self.memory
        request = Request(
            id=event.request, name=event.name, route=event.route, seed=event.seed, wall=event.wall,
            received_at=now, body_bytes=event.body_bytes, deadline_at=now + self.policy.queue_timeout,
        )  # fmt: skip
        memory.requests[request.id] = request
        if memory.engine.state is EngineState.failed and not memory.draining:
            self._restart(now)
        if self._fire(request, Trigger.arrive, now).dest is None:
            self._effects.append(do.ReadBody(request.id))

    def _checked(self, event: ev.Checked, now: float) -> None:
        request = self._live(event.request, RequestState.received)
        if request is None:
            return
        request.code, request.param, request.stream = event.code, event.param, event.stream
        request.messages, request.asked_tokens = event.messages, event.max_tokens
        request.body_bytes = max(request.body_bytes, event.body_bytes)
        self._start_waiting_clock(request)
        if self._fire(request, Trigger.check, now).dest is RequestState.validated:
            self._effects.append(do.Fetch(request.id))

    def _start_waiting_clock(self, request: Request) -> None:
        """From its arrival: a stream may wait as long as it may run, a whole answer the queue's time-out."""
        policy, start = self.policy, request.received_at
        if request.stream:
            request.deadline_at = start + policy.request_timeout if policy.request_timeout else None
            request.line_at = start + policy.line_every_s
        else:
            request.deadline_at = start + policy.queue_timeout
            request.line_at = None

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
        request.prompt_tokens, request.code = event.prompt_tokens, event.code
        if self._fire(request, Trigger.enqueue, now).dest is not RequestState.queued:
            return
        request.queued_at = now
        request.place, self.memory.next_place = self.memory.next_place, self.memory.next_place + 1
        self._queue(request)
        self._offer(request, now)

    # -- the queue -----------------------------------------------------------------------------------------------

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
        slot.request, slot.run, slot.started, slot.acknowledged = request.id, memory.next_run, False, 0
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

    # -- the run -------------------------------------------------------------------------------------------------

    def _memory_read(self, event: ev.MemoryRead, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is None:
            return
        engine.allocated, engine.reserved, engine.peak = event.allocated, event.reserved, event.peak
        request = self._running(event.run)
        if request is None or request.state is not RequestState.admitted:
            return
        self._fire(request, Trigger.gate, now)
        policy = self.policy
        room = engine.window - request.prompt_tokens
        request.max_tokens = min(request.asked_tokens or policy.default_max_tokens, room)
        request.prefill_at = now
        heartbeat = policy.prefill_heartbeat_s
        request.line_at = now + heartbeat if request.stream and heartbeat else None
        self.memory.slots[request.slot].started = True
        self._effects.append(do.StartRun(engine.epoch, request.run, request.id, request.slot, request.max_tokens))

    def _chunk_done(self, event: ev.ChunkDone, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is None:
            return
        engine.step_s = event.ms / 1_000
        request = self._running(event.run)
        if request is None or request.state is not RequestState.prefilling:
            return
        request.rows_done = event.done
        row = self._fire(request, Trigger.chunk, now, prefill_line(event.done, event.total))
        if row.name == "prefill_line":
            request.line_at = now + 1.0

    def _progress(self, event: ev.Progress, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is None:
            return
        engine.step_s = event.ms / 1_000
        request = self._running(event.run)
        if request is None:
            return
        self._first_token(request, now)
        request.completion_tokens = event.n
        self._send(request, event.handle, event.characters)
        if event.stopped:
            request.end_reason = "stop"
            self._leave_slot(request, now, event.keep)
            self._fire(request, Trigger.end, now)
        else:
            self.memory.slots[request.slot].acknowledged = event.n
            self._effects.append(do.Acknowledge(event.epoch, event.run, event.n))

    def _first_token(self, request: Request, now: float) -> None:
        if request.state is RequestState.prefilling:
            request.first_token_at, request.line_at = now, None
            self._fire(request, Trigger.first_token, now)

    def _send(self, request: Request, handle: int, characters: int) -> None:
        if characters:
            request.opened = request.opened or request.stream
            self._effects.append(do.Send(request.id, handle))

    def _run_ended(self, event: ev.RunEnded, now: float) -> None:
        if self._hear(event.epoch, now) is None:
            return
        slot = self._slot(event.run)
        if slot is None:
            return
        request = self._running(event.run)
        self._fire(slot, Trigger.ended, now)
        if request is not None:
            request.run = request.slot = -1
            if event.reason in ("stop", "length"):
                self._first_token(request, now)
                request.completion_tokens, request.end_reason = event.n, event.reason
                self._send(request, event.handle, event.characters)
                self._fire(request, Trigger.end, now)
            else:
                self._fire(request, Trigger.fault, now)
        self._offer_waiting(now)

    def _run_declined(self, event: ev.RunDeclined, now: float) -> None:
        if self._hear(event.epoch, now) is None:
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
        request = self.memory.requests.get(event.request)
        if request is not None:
            self._stop(request, Trigger.hang_up, now, event.why)

    def _faulted(self, event: ev.Faulted, now: float) -> None:
        request = self.memory.requests.get(event.request)
        if request is not None:
            self._effects.append(do.Log(f"[fault] {request.name} in {event.where}: {event.error}"))
            self._stop(request, Trigger.fault, now)

    def _stop(self, request: Request, trigger: Trigger, now: float, why: str = "") -> None:
        """End a live request from outside its run: out of the queue or its slot first, then over."""
        request.end_reason = why
        if request.id in self.memory.queue:
            self.memory.queue.remove(request.id)
        self._leave_slot(request, now, None)
        self._fire(request, trigger, now)
        self._offer_waiting(now)

    def _leave_slot(self, request: Request, now: float, keep: int | None) -> None:
        """Let go of the slot; the engine is told if it had started."""
        if request.slot < 0:
            return
        slot = self.memory.slots[request.slot]
        if slot.started:
            self._effects.append(do.CancelRun(self.memory.engine.epoch, slot.run, keep))
        self._fire(slot, Trigger.let_go, now)
        request.slot = request.run = -1

    def _end(self, request: Request, row: Row, now: float) -> None:
        """The request is over: count it, tell its client, log it, forget it."""
        memory = self.memory
        del memory.requests[request.id]
        memory.recent = [request, *memory.recent[: RECENT - 1]]
        request.ended_at = now
        if request.state is RequestState.abandoned:
            request.outcome = "abandoned"
            memory.counts.abandoned += 1
            self._effects.append(do.Forget(request.id, request.end_reason))
            self._effects.append(do.Log(summary.log_line(request, now)))
            return
        outcome = outcomes.of(row.name, request.opened, request.code)
        request.outcome = outcome.code or outcome.finish
        summary.count(memory.counts, request, outcome)
        self._effects.append(summary.finish(request, outcome, now))
        self._effects.append(do.Log(summary.log_line(request, now)))

    # -- the engine ----------------------------------------------------------------------------------------------

    def _hear(self, epoch: int, now: float) -> Engine | None:
        """Note a sign of life of the current engine; None for a message of an older one."""
        engine = self.memory.engine
        if epoch != engine.epoch or engine.state in (EngineState.lost, EngineState.failed):
            return None
        engine.heard_at = now
        if engine.state is EngineState.silent:
            engine.silent_at = None
            self._fire(engine, Trigger.heard, now)
            self._offer_waiting(now)
        return engine

    def _loading(self, event: ev.EngineLoading, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is not None:
            engine.load_done, engine.load_total = event.done, event.total

    def _described(self, event: ev.EngineDescribed, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is not None:
            engine.window = event.window

    def _ready(self, event: ev.EngineReady, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is None or engine.state is not EngineState.starting:
            return
        engine.load_s, engine.safe_rows, engine.step_s = event.load_s, event.safe_rows, 0.0
        self._fire(engine, Trigger.ready, now)
        self._effects.append(do.Log(f"[engine] ready in {event.load_s:.1f} s"))
        self._offer_waiting(now)

    def _died(self, event: ev.EngineDied, now: float) -> None:
        engine = self.memory.engine
        if event.epoch != engine.epoch or engine.state in (EngineState.lost, EngineState.failed):
            return
        engine.exit_code = event.code
        starting = engine.state is EngineState.starting
        if starting:
            engine.failures.append(now)
        self._fire(engine, Trigger.died, now)
        self._effects.append(do.Log(f"[engine] lost: exit status {event.code}"))
        if starting and event.code in UNUSABLE:
            self._end_all(now)
            self._exit(1)
        else:
            self._lost(now)

    def _lost(self, now: float) -> None:
        """The process is gone: slots are free, it starts again, and every live request is told."""
        memory = self.memory
        memory.engine.silent_at = None
        for slot in memory.slots:
            self._fire(slot, Trigger.epoch, now)
        self._restart(now)
        for request in list(memory.requests.values()):
            admitted = request.state is RequestState.admitted
            request.slot = request.run = -1
            if request.id in memory.queue and memory.engine.state is EngineState.failed:
                memory.queue.remove(request.id)
            self._fire(request, Trigger.engine_lost, now)
            if admitted:
                self._requeue(request, now)

    def _requeue(self, request: Request, now: float) -> None:
        """An admitted request waits again; with a failed engine there is nothing to wait for."""
        request.admitted_at = None
        if self.memory.engine.state is EngineState.failed:
            self._fire(request, Trigger.engine_lost, now)
            return
        line_at = request.line_at
        self._start_waiting_clock(request)
        request.line_at = line_at
        self._queue(request)

    def _restart(self, now: float) -> None:
        """Start the engine again, unless it failed too often or was tried only just now."""
        engine = self.memory.engine
        row = self._fire(engine, Trigger.restart, now)
        if row.dest is EngineState.starting:
            engine.epoch += 1
            engine.started_at = engine.heard_at = now
            engine.load_done = engine.load_total = 0
            self._effects.append(do.Spawn(engine.epoch))
        elif row.dest is EngineState.failed:
            self._effects.append(do.Log("[engine] failed to start three times in a minute"))

    # -- time ----------------------------------------------------------------------------------------------------

    def _tick(self, _event: ev.Tick, now: float) -> None:
        """Whatever is due at ``now``, in a fixed order: the engine, then requests by arrival, then the drain."""
        memory = self.memory
        memory.wake = None
        self._engine_due(now)
        for request in list(memory.requests.values()):
            if request.state in ENDED:
                continue
            if now >= due(request.deadline_at):
                self._stop(request, Trigger.deadline, now)
            elif request.state in WAITING and now >= due(request.line_at):
                self._waiting_line(request, now)
        if now >= due(memory.drain_until):
            memory.drain_until = None
            self._end_all(now)

    def _waiting_line(self, request: Request, now: float) -> None:
        waited = now - request.received_at
        loading = self.memory.engine.state is EngineState.starting
        text = waiting_line(self._position(request), waited, loading)
        self._fire(request, Trigger.tick, now, text)
        request.line_at = next_line_at(request.received_at, now, self.policy.line_every_s)

    def _engine_due(self, now: float) -> None:
        if now < self._engine_due_at():
            return
        engine = self.memory.engine
        if engine.state is EngineState.ready:
            engine.silent_at = now
            self._fire(engine, Trigger.quiet, now)
            self._effects.append(do.Log("[engine] silent"))
            return
        if engine.state is EngineState.starting:
            engine.failures.append(now)
        self._effects.append(do.Kill(engine.epoch))
        self._fire(engine, Trigger.give_up, now)
        self._effects.append(do.Log("[engine] given up"))
        self._lost(now)

    def _engine_due_at(self) -> float:
        """When the engine's silence becomes a fact; ``inf`` while nothing is expected of it."""
        engine = self.memory.engine
        if engine.state is EngineState.starting:
            return engine.heard_at + LOAD_STALL_S
        if engine.state is EngineState.silent:
            return due(engine.silent_at) + self.policy.give_up_s
        live = any(slot.state is not SlotState.free for slot in self.memory.slots)
        return engine.heard_at + self._limit() if engine.state is EngineState.ready and live else inf

    def _next_wake(self) -> float | None:
        """The earliest due time. Times are compared as they are, so a tick at its own time finds it due."""
        memory = self.memory
        wake = min(self._engine_due_at(), due(memory.drain_until))
        for request in memory.requests.values():
            wake = min(wake, due(request.deadline_at))
            if request.state in WAITING:
                wake = min(wake, due(request.line_at))
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

    def _end_all(self, now: float) -> None:
        """End every live request: the time of the drain is over. The queue first, so that nobody is admitted now."""
        memory = self.memory
        memory.queue.clear()
        for request in list(memory.requests.values()):
            self._leave_slot(request, now, None)
            self._fire(request, Trigger.shutdown, now)

    def _exit(self, status: int) -> None:
        if not self.memory.exiting:
            self.memory.exiting = True
            self._effects.append(do.Exit(status))

    # -- looking things up -----------------------------------------------------------------------------------------

    def _live(self, id: int, state: RequestState) -> Request | None:
        """The live request in that state; None when it is over or elsewhere (the fact came too late)."""
        request = self.memory.requests.get(id)
        return request if request is not None and request.state is state else None

    def _slot(self, run: int) -> Slot | None:
        """The slot that holds a run."""
        return next((s for s in self.memory.slots if s.run == run and s.state is not SlotState.free), None)

    def _running(self, run: int) -> Request | None:
        """The live request of a run; None when it is over."""
        slot = self._slot(run)
        request = self.memory.requests.get(slot.request) if slot is not None else None
        return request if request is not None and request.run == run else None
