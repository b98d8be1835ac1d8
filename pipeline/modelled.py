"""An engine that is a cost model: it takes the core's effects and posts the facts the runner would, in virtual time.

It keeps the real engine's order (``engine/slots.py``): one step at a time; behind a prefill step every run that writes
has a round before the next prefill step. Rounds that nothing interrupts are told together, ``TOLD_S`` of them at most,
and cut at the next round when a message comes: so an hour costs thousands of events, not millions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from pipeline import effects as do
from pipeline import events as ev
from stages.shared import shared

TOLD_S = 0.25
STEP_S = 0.5
"""A prefill step takes no longer (row G1)."""

Posted = list[tuple[float, ev.Event]]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What work costs: rows/s of a prompt, tokens/s of an answer alone, and all tokens of joint rounds, of one's.

    ``joint`` is by how many write, from 1; more than it has write at its last. ``held``: conversations put aside beside
    that of slot 0.
    """

    prefill: float = 2_000.0
    decode: float = 60.0
    joint: tuple[float, ...] = (1.0, 1.7, 2.1, 2.5)
    held: int = 4
    window: int = 262_144

    def round_s(self, writing: int) -> float:
        """Seconds of a round in which so many write a token each."""
        return writing / (self.decode * self.joint[min(writing, len(self.joint)) - 1])


class Wanted(msgspec.Struct, frozen=True):
    """What a run is about: rows of its prompt, tokens it will write, its blocks as hashes."""

    prompt: int
    written: int
    hashes: list[bytes]


class _Run(msgspec.Struct):
    request: int
    run: int
    slot: int
    wanted: Wanted
    most: int
    rows: int = 0
    written: int = 0

    @property
    def left(self) -> int:
        return max(1, min(self.wanted.written, self.most)) - self.written

    @property
    def reads(self) -> bool:
        return self.rows < self.wanted.prompt


class _Step(msgspec.Struct):
    """The step under way: a prefill step of ``rows``, or ``rounds`` of all ``runs``."""

    begun: float
    each: float
    runs: list[_Run]
    rows: int = 0
    rounds: int = 1

    @property
    def over(self) -> float:
        return self.begun + self.each * self.rounds


class ModelledEngine:
    """``wanted`` says what a request's run is about. Drive it with ``start``, ``take`` and ``advance`` at ``due``."""

    def __init__(self, costs: Costs, wanted: Callable[[int], Wanted]) -> None:
        self.costs, self._wanted = costs, wanted
        self._safe_rows = max(1, math.floor(costs.prefill * STEP_S))
        self._epoch = 1
        self._runs: list[_Run] = []
        self._inbox: list[do.StartRun | do.CancelRun] = []
        self._step: _Step | None = None
        self._reads_next = True
        self._held: list[tuple[int, int, list[bytes]]] = []  # place, rows, hashes; the oldest first
        self._places = 0

    def start(self, epoch: int, now: float) -> Posted:
        """It is loaded at once."""
        self._epoch = epoch
        return [
            (now, ev.EngineDescribed(epoch, self.costs.window)),
            (now, ev.EngineReady(epoch, 0.0, self._safe_rows)),
        ]

    def due(self) -> float:
        """When its step is over; ``inf`` while nothing runs."""
        return math.inf if self._step is None else self._step.over

    def take(self, effect: do.Effect, now: float) -> Posted:
        """An effect that is for the engine; the others it does not know."""
        if isinstance(effect, do.Measure):
            return [(now, ev.MemoryRead(effect.epoch, effect.run, 0, 0, 0, 0))]
        if not isinstance(effect, do.StartRun | do.CancelRun):
            return []
        self._inbox.append(effect)
        step = self._step
        if step is None:
            return self._safe_point(now)
        if not step.rows:
            step.rounds = min(step.rounds, math.floor((now - step.begun) / step.each) + 1)
        return []

    def advance(self, now: float) -> Posted:
        """The step that is over by now, and the next one begun."""
        step, self._step = self._step, None
        if step is None:
            return []
        said = self._read(step, now) if step.rows else self._write(step, now)
        return said + self._safe_point(now)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _read(self, step: _Step, now: float) -> Posted:
        run, ms = step.runs[0], step.each * 1_000
        run.rows += step.rows
        said: Posted = [(now, ev.ChunkDone(self._epoch, run.run, run.rows, run.wanted.prompt, ms))]
        if run.reads:
            return said
        return said + self._write(_Step(now, 0.0, [run]), now)  # the last row's step gives the first token

    def _write(self, step: _Step, now: float) -> Posted:
        said: Posted = []
        for run in step.runs:
            n = min(step.rounds, run.left)
            run.written += n
            said.append((now, self._progress(run, step, n)))
            if run.left <= 0:
                said += self._end(run, "length" if run.written >= run.most else "stop", now)
        return said

    def _progress(self, run: _Run, step: _Step, n: int) -> ev.Event:
        ms, shared_by = step.each * n * 1_000, len(step.runs)
        return ev.Progress(
            run.request, self._epoch, run.run, run.written, characters=1, handle=run.written, ms=ms, shared=shared_by
        )

    def _end(self, run: _Run, reason: str, now: float) -> Posted:
        self._runs.remove(run)
        rows = run.rows + run.written
        said: Posted = [(now, ev.RunEnded(self._epoch, run.run, reason, rows, run.written))]
        return said + self._keep(run, now)

    def _safe_point(self, now: float) -> Posted:
        said: Posted = []
        inbox, self._inbox = self._inbox, []
        for effect in inbox:
            if isinstance(effect, do.StartRun):
                said += self._begin(effect, now)
            else:
                said += [e for run in self._runs if run.run == effect.run for e in self._end(run, "cancelled", now)]
        self._step = self._next(now)
        return said

    def _next(self, now: float) -> _Step | None:
        reading = [run for run in self._runs if run.reads]
        writing = [run for run in self._runs if not run.reads]
        if reading and (self._reads_next or not writing):
            self._reads_next = False
            run = reading[0]
            self._runs.remove(run)  # who has read stands behind the others that read
            self._runs.append(run)
            rows = min(run.wanted.prompt, (run.rows // self._safe_rows + 1) * self._safe_rows) - run.rows
            return _Step(now, rows / self.costs.prefill, [run], rows)
        self._reads_next = True
        if not writing:
            return None
        each = self.costs.round_s(len(writing))
        most = 1 if reading else max(1, math.floor(TOLD_S / each))
        return _Step(now, each, writing, 0, min(most, *(run.left for run in writing)))

    # -- what is held ------------------------------------------------------------------------------------------------

    def _begin(self, start: do.StartRun, now: float) -> Posted:
        wanted = self._wanted(start.request)
        run = _Run(start.request, start.run, start.slot, wanted, start.max_tokens)
        best = max(((shared(wanted.hashes, held[2]), held[0]) for held in self._held), default=(0, -1))
        run.rows = min(best[0], wanted.prompt - 1)
        self._runs.append(run)
        return [(now, ev.RunResumed(self._epoch, run.run, run.rows, "park"))] if run.rows > 0 else []

    def _keep(self, run: _Run, now: float) -> Posted:
        """Its prompt stays, in place of what it began with; the oldest that is too many goes."""
        hashes = run.wanted.hashes
        if not hashes or run.reads:
            return []
        same = [held for held in self._held if shared(hashes, held[2]) * 2 > held[1]]
        gone = same[:1] or (self._held[:1] if len(self._held) > self.costs.held else [])
        self._held = [held for held in self._held if held not in gone]
        self._places += 1
        self._held.append((self._places, run.wanted.prompt, hashes))
        said: Posted = [(now, ev.Resident(self._epoch, "park", place, 0)) for place, _, _ in gone]
        return [*said, (now, ev.Resident(self._epoch, "park", self._places, run.wanted.prompt, hashes))]
