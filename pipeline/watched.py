"""A core seen from outside, by its facts and effects alone: how requests ended, what its engine is about."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pipeline import effects as do
from pipeline import events as ev
from pipeline.core import Core
from pipeline.journal import Step
from pipeline.measured import Choice
from pipeline.request import GuestRun, Request, Slot, due
from pipeline.states import RequestState, SlotState

ASKS = (
    do.Measure, do.StartRun, do.StartGuest, do.GiveBack, do.Collect, do.CancelRun, do.Spawn, do.Kill,
)  # fmt: skip
"""Effects the engine hears of: two cores that differ in one have decided differently, if no row says so."""
OVER = (RequestState.finished.value, RequestState.abandoned.value)


class End(msgspec.Struct, frozen=True):
    """How a request ended: by which row and trigger; seconds in the queue and to its first token, of one served."""

    row: str
    trigger: str
    queue: float = 0.0
    ttft: float = 0.0
    served: bool = False
    modelled: bool = False


class Told(NamedTuple):
    """What a core made of one event: when it wanted to be woken before it, its steps, what the engine hears."""

    wake: float
    steps: tuple[Step, ...]
    asks: tuple[do.Effect, ...]


class Live(msgspec.Struct):
    """A run the engine was given, as its messages tell it. Not ``inside``: a guest that is only offered."""

    start: do.StartRun | do.StartGuest
    inside: bool
    rows: int = 0
    written: int = 0
    over: bool = False


class Watched:
    """A core, and what can be seen of it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.steps: list[Step] = []
        self.ends: dict[int, End] = {}
        self.received: dict[int, ev.Received] = {}
        self.checked: dict[int, ev.Checked] = {}
        self.prepared: dict[int, ev.Prepared] = {}
        self.spread: dict[int, bool] = {}  # lists of prompts that became requests of their own
        self.runs: dict[int, Choice] = {}
        self.live: dict[int, Live] = {}
        self.measures: dict[int, do.Effect] = {}  # by run
        self.readings: dict[int, do.Effect] = {}  # by run: what is still to be answered
        self.since = 0.0  # when the engine's step began, as far as it was heard
        self.modelled = False
        self._row: dict[int, Step] = {}
        self._begin()

    def _begin(self) -> None:
        """What a snapshot tells of those who were inside already."""
        memory, epoch = self.core.memory, self.core.memory.engine.epoch
        for one in memory.requests.values():
            self.received[one.id] = ev.Received(
                one.id, one.name, one.route, one.body_bytes, one.seed, one.wall, one.parent
            )
            self.checked[one.id] = ev.Checked(
                one.id, body_bytes=one.body_bytes, stream=one.stream, messages=one.messages,
                max_tokens=one.asked_tokens, choices=one.choices, progress=one.progress,
            )  # fmt: skip
            self.prepared[one.id] = ev.Prepared(
                one.id, one.prompt_tokens, prompts=one.prompts, longest=one.longest, hashes=one.hashes
            )
            self.spread |= {one.parent: True} if one.parent >= 0 else {}
            if one.state is RequestState.admitted and one.run == memory.gate:
                measure = do.Measure(epoch, one.run, one.prompt_tokens)
                self.measures[one.run] = self.readings[one.run] = measure
        for slot in memory.slots:
            if slot.started and slot.state is not SlotState.free:
                self._begun(slot, memory.requests.get(slot.request))
        if memory.guest is not None:
            self._inside(memory.guest, memory.requests.get(memory.guest.request))

    def _begun(self, slot: Slot, one: Request | None) -> None:
        """A run in its slot; ``one`` is None when its request is over and the engine has not said so."""
        epoch, of = self.core.memory.engine.epoch, slot.request
        start = do.StartRun(epoch, slot.run, of, slot.id, one.max_tokens if one else 1, one.choice if one else 0)
        self.live[slot.run] = Live(start, inside=True, over=one is None or one.run != slot.run)
        if one is not None and one.run == slot.run:
            written = one.choice_tokens[one.choice] if one.choice < len(one.choice_tokens) else 0
            self.live[slot.run].rows, self.live[slot.run].written = one.rows_done, written
        self.runs[slot.run] = of, start.choice
        self.prepared.setdefault(of, ev.Prepared(of, prompt_tokens=1))

    def _inside(self, guest: GuestRun, one: Request | None) -> None:
        """The one outstanding guest."""
        most = one.max_tokens if one is not None else 1
        start = do.StartGuest(self.core.memory.engine.epoch, guest.run, guest.request, guest.holder, most)
        live = self.live[guest.run] = Live(start, guest.begun_at is not None, over=one is None)
        if one is not None:
            live.rows, live.written = one.rows_done, one.completion_tokens
        self.runs[guest.run] = guest.request, 0
        self.prepared.setdefault(guest.request, ev.Prepared(guest.request, prompt_tokens=1))

    def take(self, event: ev.Event, now: float) -> tuple[Told, list[do.Effect]]:
        """One event through the core."""
        wake = due(self.core.memory.wake)
        self._heard(event, now)
        effects = self.core.handle(event, now)
        steps = tuple(self.core.take_steps())
        self.steps += steps
        for step in steps:
            if step.life == "request" and step.dest in OVER:
                self._row[step.id] = step
        for effect in effects:
            self._said(effect, now)
        return Told(wake, steps, tuple(effect for effect in effects if isinstance(effect, ASKS))), effects

    def _heard(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.Received():
                self.received[event.request] = event
            case ev.Checked():
                self.checked[event.request] = event
            case ev.Prepared():
                self.prepared[event.request] = event
            case ev.MemoryRead():
                self.readings.pop(event.run, None)
            case ev.RunEnded() | ev.RunDeclined():
                self.live.pop(event.run, None)
                self.since = now
            case ev.EngineDied():
                self.live, self.readings = {}, {}
            case ev.GuestStarted() | ev.RunResumed() | ev.ChunkDone() | ev.Progress():
                if event.run in self.live:
                    self.since = now
                    self._went_on(self.live[event.run], event)
            case _:
                pass

    def _went_on(self, live: Live, event: ev.Event) -> None:
        live.inside = True
        match event:
            case ev.RunResumed():
                live.rows = event.rows
            case ev.ChunkDone():
                live.rows = event.done
            case ev.Progress():
                live.written = event.n
            case _:
                pass

    def _said(self, effect: do.Effect, now: float) -> None:
        match effect:
            case do.Measure() | do.GiveBack() | do.Collect():
                self.readings[effect.run] = effect
                if isinstance(effect, do.Measure):
                    self.measures[effect.run] = effect
            case do.StartRun() | do.StartGuest():
                whole = isinstance(effect, do.StartRun)
                self.runs[effect.run] = effect.request, effect.choice if isinstance(effect, do.StartRun) else 0
                self.live[effect.run] = Live(effect, whole)
                self.since = now
            case do.CancelRun():
                if effect.run in self.live:
                    self.live[effect.run].over = True
            case do.Spread():
                self.spread[effect.request] = True
            case do.Finish():
                self._end(effect.request, effect.queue_ms / 1_000, effect.ttft_ms / 1_000, served=not effect.code)
            case do.Forget():
                self._end(effect.request, 0.0, 0.0, served=False)
            case _:
                pass

    def _end(self, request: int, queue: float, ttft: float, *, served: bool) -> None:
        step = self._row.pop(request)
        self.ends[request] = End(step.row, step.trigger, queue, ttft, served, self.modelled)
