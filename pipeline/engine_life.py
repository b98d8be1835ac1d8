"""The engine's life: what its start, its silence and its death mean for those who wait and run.

What ran when the engine was lost ends and is never run again; what waits stays, and the engine starts again.
"""

from __future__ import annotations

from math import inf

from pipeline import effects as do
from pipeline import events as ev
from pipeline.firing import FAILURE_WINDOW_S
from pipeline.lane import Lane
from pipeline.request import Engine, Held, Request, due
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from pipeline.table import ENDED

LOAD_STALL_S = 60.0
"""Seconds a load may stand still: one large tensor from a slow disk is no fault."""
UNUSABLE = (2, 3, 4)
"""Exit statuses of an engine that says why it cannot serve (settings, memory, self-check): a restart would not help."""


class EngineLife(Lane):
    """Facts about the engine process itself."""

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
        engine.prefill_rate, engine.decode_rate = event.prefill_rate, event.decode_rate
        engine.ceiling, engine.peak_limit, engine.slack = event.ceiling, event.peak_limit, event.slack
        engine.workspaces, engine.most_rows, engine.device = event.workspaces, event.most_rows, event.device
        engine.load_done = engine.load_total
        self._fire(engine, Trigger.ready, now)
        self._effects.append(do.Log(f"[engine] ready in {event.load_s:.1f} s"))
        self._offer_waiting(now)

    def _resident(self, event: ev.Resident, now: float) -> None:
        """The engine's newest word on a place stands."""
        if self._hear(event.epoch, now) is None:
            return
        others = [held for held in self.memory.residents if (held.where, held.slot) != (event.where, event.slot)]
        held = Held(where=event.where, slot=event.slot, rows=event.rows, hashes=event.hashes, nbytes=event.nbytes)
        self.memory.residents = [*others, held] if event.rows else others
        if (event.where, event.slot) == ("slot", 0):
            self._slot0_holds(event.rows)
        self._offer_waiting(now)  # who waited for what is gone waits no longer

    def _own_work(self, event: ev.OwnWork, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is not None:
            others = [what for what in engine.own_work if what != event.what]
            engine.own_work = [*others, event.what] if event.begun else others
            if not event.begun:
                self._offer_waiting(now)

    def _died(self, event: ev.EngineDied, now: float) -> None:
        engine = self.memory.engine
        if event.epoch != engine.epoch or engine.state in (EngineState.lost, EngineState.failed):
            return
        engine.exit_code = event.code
        starting = engine.state is EngineState.starting
        if starting:
            self._failed_start(now)
        self._fire(engine, Trigger.died, now)
        self._effects.append(do.Log(f"[engine] lost: exit status {event.code}"))
        if starting and event.code in UNUSABLE:
            self._end_all(now)
            self._exit(1)
        else:
            self._lost(now)

    def _failed_start(self, now: float) -> None:
        """Remember a failed start for as long as it counts."""
        engine = self.memory.engine
        engine.failures = [*(t for t in engine.failures if now - t <= FAILURE_WINDOW_S), now]

    def _lost(self, now: float) -> None:
        """The process is gone: slots are free, it starts again, and every live request is told."""
        memory = self.memory
        memory.engine.silent_at = None
        memory.engine.own_work, memory.residents = [], []
        memory.last_prompt, memory.openings = [], []
        self._lose_guest()
        for slot in memory.slots:
            self._fire(slot, Trigger.epoch, now)
        self._restart(now)
        for request in list(memory.requests.values()):
            if request.state in ENDED:
                continue
            admitted = request.state is RequestState.admitted
            request.slot = request.run = -1
            if request.id in memory.queue and memory.engine.state is EngineState.failed:
                memory.queue.remove(request.id)
            self._fire(request, Trigger.engine_lost, now)
            if admitted:
                self._requeue(request, now)
            if request.state is RequestState.queued:
                request.why = "engine"

    def _requeue(self, request: Request, now: float) -> None:
        """An admitted request waits again; with a failed engine there is nothing to wait for."""
        if self.memory.engine.state is EngineState.failed:
            request.admitted_at = None
            self._fire(request, Trigger.engine_lost, now)
            return
        self._wait_again(request)

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
            self._failed_start(now)
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

    def _end_all(self, now: float) -> None:
        """End every live request: the time of the drain is over. The queue first, so that nobody is admitted now."""
        memory = self.memory
        memory.queue.clear()
        for request in list(memory.requests.values()):
            if request.state not in ENDED:
                self._leave_slot(request, now, None)
                self._fire(request, Trigger.shutdown, now)
