"""An engine that is a cost model: it takes the core's effects and posts the facts the runner would, in virtual time.

It keeps the real engine's order (``engine/slots.py``): one step at a time; behind a prefill step every run that writes
has a round before the next prefill step. Rounds that nothing interrupts are told together, ``TOLD_S`` of them at most,
and cut at the next round when a message comes: so an hour costs thousands of events, not millions.

A guest (rows K2, K3) stands in slot 0's place from the next safe point on: the holder waits, side slots go on in turn
with it. Its copy is made in no time. Memory: everything fits, unless ``Costs.store`` says what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from pipeline import effects as do
from pipeline import events as ev
from pipeline.request import Held
from stages.shared import shared

TOLD_S = 0.25
STEP_S = 0.5
"""A prefill step takes no longer (row G1)."""

PARK = "park"
"""The level of memory that conversations are put aside in."""

Posted = list[tuple[float, ev.Event]]


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """What memory there is, in bytes, as ``MemoryRead`` and ``EngineReady`` have it; the default never refuses.

    Of bounds, and of what is free, 0 is not known.
    """

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    free: int = 0
    levels: tuple[tuple[str, int], ...] = ()
    growth: int = -1
    ceiling: int = 0
    peak_limit: int = 0
    slack: int = 0
    workspaces: tuple[tuple[int, int], ...] = ()
    most_rows: int = 0
    device: str = ""

    def workspace(self, rows: int) -> int:
        """What a prefill of so many rows takes: between two known sizes, and beyond them, in proportion."""
        before = (0, 0)
        for at in self.workspaces:
            if rows <= at[0]:
                return before[1] + (at[1] - before[1]) * (rows - before[0]) // (at[0] - before[0])
            before = at
        return before[1] * rows // (before[0] or 1)

    def given(self, level: str, nbytes: int) -> Store:
        """After that level gave back so much, or all it had."""
        back = min(nbytes, dict(self.levels).get(level, 0))
        left = tuple((name, size - back if name == level else size) for name, size in self.levels)
        allocated = self.allocated if level == "allocator" else max(0, self.allocated - back)
        reserved, free = max(0, self.reserved - back), self.free + back if self.free else 0
        return msgspec.structs.replace(self, levels=left, allocated=allocated, reserved=reserved, free=free)

    def collected(self) -> Store:
        """After the allocator was emptied."""
        return self.given("allocator", dict(self.levels).get("allocator", 0))


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What work costs: rows/s of a prompt, tokens/s of an answer alone, and all tokens of joint rounds, of one's.

    ``joint`` is by how many write, from 1; more than it has write at its last. ``held``: conversations put aside beside
    that of slot 0. ``safe_rows`` of a prefill step, 0: by its rate. ``row_bytes`` of one copied for a guest. Rounds are
    told together for ``told_s``; the side lane's pace is counted in messages: where it matters each is told, with 0.
    """

    prefill: float = 2_000.0
    decode: float = 60.0
    joint: tuple[float, ...] = (1.0, 1.7, 2.1, 2.5)
    held: int = 4
    window: int = 262_144
    load_s: float = 0.0
    safe_rows: int = 0
    row_bytes: int = 0
    told_s: float = TOLD_S
    store: Store = Store()

    def round_s(self, writing: int) -> float:
        """Seconds of a round in which so many write a token each."""
        return writing / (self.decode * self.joint[min(writing, len(self.joint)) - 1])


class Wanted(msgspec.Struct, frozen=True):
    """What a run is about: rows of its prompt, tokens it will write, its blocks as hashes, calls in its answer."""

    prompt: int
    written: int
    hashes: list[bytes]
    calls: int = 0


class Run(msgspec.Struct):
    """A run under way: ``rows`` of its prompt are read, so many tokens ``written``. A guest has its holder's slot."""

    request: int
    run: int
    slot: int
    wanted: Wanted
    most: int
    rows: int = 0
    written: int = 0
    guest: bool = False
    over: bool = False  # cancelled, the engine has not said its end yet

    @property
    def left(self) -> int:
        """Tokens it still writes; one at least, as every run does."""
        return max(1, min(self.wanted.written, self.most)) - self.written

    @property
    def reads(self) -> bool:
        """Whether its prompt is not wholly read."""
        return self.rows < self.wanted.prompt


class _Step(msgspec.Struct):
    """The step under way: a prefill step of ``rows``, or ``rounds`` of all ``runs``."""

    begun: float
    each: float
    runs: list[Run]
    rows: int = 0
    rounds: int = 1

    @property
    def over(self) -> float:
        return self.begun + self.each * self.rounds


class ModelledEngine:
    """Drive it with ``start``, ``take`` and ``advance`` at ``due``. ``wanted``: what a request's choice is about."""

    def __init__(self, costs: Costs, wanted: Callable[[int, int], Wanted]) -> None:
        self.costs, self._wanted, self._store = costs, wanted, costs.store
        self._safe_rows = costs.safe_rows or max(1, math.floor(costs.prefill * STEP_S))
        self._epoch = 1
        self._runs: list[Run] = []
        self._inbox: list[do.StartRun | do.CancelRun | do.StartGuest] = []
        self._step: _Step | None = None
        self._reads_next = True
        self._guest_next = True
        self._held: list[Held] = []  # the oldest first
        self._places = 0
        self._asked_rows = 0

    def start(self, epoch: int, now: float) -> Posted:
        """It knows its checkpoint at once, and is loaded ``load_s`` later."""
        self._epoch = epoch
        self._runs, self._inbox, self._step, self._held = [], [], None, []
        costs, store = self.costs, self._store
        ready = ev.EngineReady(
            epoch, costs.load_s, self._safe_rows, costs.prefill, costs.decode, store.ceiling, store.peak_limit,
            store.slack, list(store.workspaces), store.most_rows, store.device,
        )  # fmt: skip
        return [(now, ev.EngineDescribed(epoch, costs.window)), (now + costs.load_s, ready)]

    def take_over(self, epoch: int, runs: list[Run], held: list[Held], since: float, now: float) -> Posted:
        """Go on in place of another engine: with its runs, in what it holds, its step under way begun at ``since``."""
        self._epoch, self._runs, self._held = epoch, list(runs), list(held)
        self._places = max((place.slot for place in held), default=0)
        said = [event for run in runs if not (run.rows or run.over or run.guest) for event in self._resume(run, now)]
        said += [event for run in runs if run.over for event in self._cancel(run, now)]
        self._step = self._next(since)
        return said

    def due(self) -> float:
        """When its step is over; ``inf`` while nothing runs."""
        return math.inf if self._step is None else self._step.over

    def take(self, effect: do.Effect, now: float) -> Posted:
        """An effect that is for the engine; the others it does not know."""
        match effect:
            case do.Measure(epoch, run, rows):
                self._asked_rows = rows
                return [(now, self._reading(epoch, run))]
            case do.GiveBack(epoch, run, level, nbytes):
                gone = self._dropped(nbytes) if level == PARK else []
                self._store = self._store.given(level, nbytes)
                return [*((now, event) for event in gone), (now, self._reading(epoch, run))]
            case do.Collect(epoch, run):
                self._store = self._store.collected()
                return [(now, self._reading(epoch, run))]
            case do.Kill(epoch):
                self._runs, self._inbox, self._step = [], [], None
                return [(now, ev.EngineDied(epoch, -9))]
            case do.StartRun() | do.CancelRun() | do.StartGuest():
                self._inbox.append(effect)
            case _:
                return []
        step = self._step
        if step is None:
            return self._safe_point(now)
        if not step.rows:
            step.rounds = max(1, min(step.rounds, math.floor((now - step.begun) / step.each) + 1))
        return []

    def advance(self, now: float) -> Posted:
        """The step that is over by now, and the next one begun."""
        step, self._step = self._step, None
        if step is None:
            return []
        said = self._read(step, now) if step.rows else self._write(step, now)
        return said + self._safe_point(now)

    def _reading(self, epoch: int, run: int) -> ev.MemoryRead:
        store = self._store
        return ev.MemoryRead(
            epoch, run, store.allocated, store.reserved, store.peak, store.workspace(self._asked_rows), store.free,
            list(store.levels), store.growth,
        )  # fmt: skip

    def _dropped(self, nbytes: int) -> list[ev.Event]:
        """The oldest of what is put aside, as many as so many bytes are of all of them."""
        size = dict(self._store.levels).get(PARK, 0)
        number = math.ceil(len(self._held) * min(1.0, nbytes / size)) if size else 0
        gone, self._held = self._held[:number], self._held[number:]
        return [ev.Resident(self._epoch, held.where, held.slot, 0) for held in gone]

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

    def _progress(self, run: Run, step: _Step, n: int) -> ev.Event:
        ms, shared_by = step.each * n * 1_000, len(step.runs)
        return ev.Progress(
            run.request, self._epoch, run.run, run.written, characters=1, handle=run.written, ms=ms, shared=shared_by
        )

    def _end(self, run: Run, reason: str, now: float) -> Posted:
        self._runs.remove(run)
        rows = run.rows + run.written if not run.guest and (run.slot == 0 or self._stays(run)) else 0
        calls = run.wanted.calls if reason != "cancelled" else 0
        end = ev.RunEnded(
            self._epoch, run.run, reason, rows, run.written, opened_calls=calls, closed_calls=calls
        )  # fmt: skip
        if not run.guest:
            return [(now, end), *self._keep(run, now)]
        left = [holder for holder in self._runs if holder.slot == 0 and holder.over]
        return [(now, end), *(event for holder in left for event in self._end(holder, "cancelled", now))]

    def _cancel(self, run: Run, now: float) -> Posted:
        """It ends now; a holder that has a guest inside, behind it."""
        run.over = True
        return [] if run.slot == 0 and not run.guest and self._guest() else self._end(run, "cancelled", now)

    def _guest(self) -> Run | None:
        return next((run for run in self._runs if run.guest), None)

    def _safe_point(self, now: float) -> Posted:
        said: Posted = []
        inbox, self._inbox = self._inbox, []
        for effect in inbox:
            match effect:
                case do.StartRun():
                    said += self._begin(effect, now)
                case do.StartGuest():
                    said += self._let_in(effect, now)
                case do.CancelRun():
                    said += [e for run in self._runs if run.run == effect.run for e in self._cancel(run, now)]
        self._step = self._next(now)
        return said

    def _next(self, now: float) -> _Step | None:
        guest = self._guest()
        if guest is None:
            return self._turn(self._runs, now)
        others = [run for run in self._runs if run.slot]
        self._guest_next = not self._guest_next or not others
        return self._turn([guest] if self._guest_next else others, now, alone=not others)

    def _turn(self, runs: list[Run], now: float, *, alone: bool = True) -> _Step | None:
        """The next step of these. Not ``alone``: somebody else's step comes behind it, so it is one round at most."""
        reading = [run for run in runs if run.reads]
        writing = [run for run in runs if not run.reads]
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
        most = 1 if reading or not alone else max(1, math.floor(self.costs.told_s / each))
        return _Step(now, each, writing, 0, max(1, min(most, *(run.left for run in writing))))

    # -- who comes, and what is held ---------------------------------------------------------------------------------

    def _begin(self, start: do.StartRun, now: float) -> Posted:
        wanted = self._wanted(start.request, start.choice)
        run = Run(start.request, start.run, start.slot, wanted, start.max_tokens)
        self._runs.append(run)
        if start.choice:  # its prompt was read for the first
            run.rows = wanted.prompt - 1
            return []
        return self._resume(run, now)

    def _resume(self, run: Run, now: float) -> Posted:
        hashes, prompt = run.wanted.hashes, run.wanted.prompt
        run.rows = min(max((shared(hashes, held.hashes) for held in self._held), default=0), prompt - 1)
        return [(now, ev.RunResumed(self._epoch, run.run, run.rows, "park"))] if run.rows > 0 else []

    def _let_in(self, start: do.StartGuest, now: float) -> Posted:
        """A guest, or why not, by the protocol's rules."""
        holder = next((run for run in self._runs if run.slot == 0 and not run.guest), None)
        wanted = self._wanted(start.request, 0)
        if self._guest() is not None:
            reason = "busy"
        elif holder is None:
            reason = "no_holder"
        elif holder.run != start.holder:
            reason = "late"
        elif wanted.prompt + 1 > self.costs.window:
            reason = "memory"
        else:
            self._runs.append(Run(start.request, start.run, 0, wanted, start.max_tokens, guest=True))
            rows = min(self.costs.window, wanted.prompt + start.max_tokens)
            nbytes = rows * self.costs.row_bytes
            return [(now, ev.GuestStarted(start.epoch, start.run, start.holder, rows, nbytes))]
        return [(now, ev.RunDeclined(start.epoch, start.run, reason))]

    def _stays(self, run: Run) -> bool:
        """Whether its prompt can be gone on from."""
        return bool(run.wanted.hashes) and not run.reads and (run.slot == 0 or self.costs.held > 0)

    def _keep(self, run: Run, now: float) -> Posted:
        """Its prompt stays, in place of what it began with; the oldest that is too many goes.

        A side slot keeps nothing of its own (row M12): where none are put aside, its conversation is gone.
        """
        hashes = run.wanted.hashes
        if not self._stays(run):
            return []
        same = [held for held in self._held if shared(hashes, held.hashes) * 2 > held.rows]
        gone = same[:1] or (self._held[:1] if len(self._held) > self.costs.held else [])
        self._held = [held for held in self._held if held not in gone]
        self._places += 1
        self._held.append(Held(where="park", slot=self._places, rows=run.wanted.prompt, hashes=hashes))
        said: Posted = [(now, ev.Resident(self._epoch, held.where, held.slot, 0)) for held in gone]
        return [*said, (now, ev.Resident(self._epoch, "park", self._places, run.wanted.prompt, hashes))]
