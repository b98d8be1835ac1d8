"""A whole server in virtual time: the core, a scripted engine and clients, with no thread, socket or clock.

It plays the runner's part: it carries out effects, turns the engine's messages into facts, and records both, so that
every run can be replayed. ``run_until`` jumps from one due time to the next.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Any

import msgspec

from engine import protocol as wire
from engine.link import Died
from engine.scripted import Script, ScriptedEngine
from pipeline import effects as do
from pipeline import events as ev
from pipeline.core import Core
from pipeline.journal import Step
from pipeline.settings import Policy

DESCRIBED = wire.Described(
    epoch=1, model="script", architecture="script", engine="scripted", tokenizer="{}", template="", special={},
    end_ids=[0], add_bos=False, bos_id=None, window=1_000, vocab=100,
)  # fmt: skip


class Plan(msgspec.Struct, kw_only=True):
    """What one client sends and does. ``stop_at`` n: a stop string is found in the n-th token."""

    prompt: int = 10
    max_tokens: int = 0
    stream: bool = True
    code: str = ""
    stop_at: int = 0
    body_s: float = 0.001
    prepare_s: float = 0.002


class Client(msgspec.Struct):
    """What one client got."""

    plan: Plan
    lines: list[tuple[float, str]] = []
    pieces: int = 0
    end: do.Finish | None = None
    forgotten: str = ""
    ends: int = 0


class World:
    """One run. ``failpoints`` gives each epoch's, the last repeats."""

    def __init__(self, script: Script | None = None, failpoints: list[dict[str, int]] | None = None, **policy: Any):
        self.policy = Policy(**policy)
        self.core = Core(self.policy)
        self.script, self.failpoints = script or Script(), failpoints or [{}]
        self.now = 0.0
        self.events: list[tuple[float, ev.Event]] = []
        self.steps: list[Step] = []
        self.effects: list[tuple[float, do.Effect]] = []
        self.clients: dict[int, Client] = {}
        self.logs: list[str] = []
        self.exited: int | None = None
        self._heap: list[tuple[float, int, ev.Event]] = []
        self._count = 0
        self._wake = inf
        self._engine: ScriptedEngine | None = None
        self._runs: dict[int, int] = {}
        self._judged: dict[int, int] = {}
        self._carry_out(self.core.begin(0.0))

    # -- what a test does ------------------------------------------------------------------------------------------

    def arrive(self, plan: Plan | None = None, at: float | None = None) -> int:
        """A client sends a request now, or at a time."""
        id = len(self.clients) + 1
        self.clients[id] = Client(plan or Plan())
        event = ev.Received(id, f"{id:024x}", "chat", 100, id * 7, 1e9 + self.now)
        self._at(at, event)
        return id

    def hang_up(self, id: int, at: float | None = None) -> None:
        """A client leaves."""
        self._at(at, ev.HungUp(id))

    def post(self, event: ev.Event, at: float | None = None) -> None:
        """Post any fact."""
        self._at(at, event)

    def kill(self, at: float | None = None, code: int = -9) -> None:
        """The engine process dies."""
        self._at(at, ev.EngineDied(self.core.memory.engine.epoch, code))

    def freeze(self) -> None:
        """The engine says nothing any more."""
        self._engine = None

    def run_until(self, time: float) -> None:
        """Let virtual time pass."""
        while True:
            due = self._engine.due() if self._engine is not None else None
            first = min(self._heap[0][0] if self._heap else inf, self._wake, inf if due is None else due)
            if first > time:
                break
            self.now = max(self.now, first)
            if due is not None and due <= first:
                assert self._engine is not None
                self._hear(self._engine.advance(self.now))
            elif self._heap and self._heap[0][0] <= first:
                self._handle(heapq.heappop(self._heap)[2])
            else:
                self._wake = inf
                self._handle(ev.Tick())
        self.now = max(self.now, time)

    # -- the runner's part -----------------------------------------------------------------------------------------

    def _at(self, time: float | None, event: ev.Event) -> None:
        if time is None or time <= self.now:
            self._handle(event)
        else:
            self._push(time, event)

    def _push(self, time: float, event: ev.Event) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, event))

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.EngineDied) and event.epoch == self.core.memory.engine.epoch:
            self._engine = None
        self.events.append((self.now, event))
        effects = self.core.handle(event, self.now)
        self.steps.extend(self.core.take_steps())
        self._carry_out(effects)

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            self.effects.append((self.now, effect))
            self._one(effect)

    def _one(self, effect: do.Effect) -> None:
        match effect:
            case do.ReadBody(id):
                plan = self.clients[id].plan
                checked = ev.Checked(id, plan.code, "", 100, plan.stream, 1, plan.max_tokens)
                self._push(self.now + plan.body_s, checked)
            case do.Fetch(id):
                self._push(self.now, ev.Fetched(id))
            case do.Prepare(id):
                plan = self.clients[id].plan
                self._push(self.now + plan.prepare_s, ev.Prepared(id, plan.prompt))
            case do.Measure(epoch, run, rows):
                self._tell(wire.Measure(epoch, run, rows))
            case do.StartRun(epoch, run, id, slot, max_tokens):
                self._runs[run], self._judged[run] = id, 0
                prompt = [1] * self.clients[id].plan.prompt
                self._tell(wire.Start(epoch, run, slot, prompt, wire.Sampling(), max_tokens, [0]))
            case do.Acknowledge(epoch, run, n):
                self._tell(wire.Seen(epoch, run, n))
            case do.CancelRun(epoch, run, keep):
                self._tell(wire.Cancel(epoch, run, keep))
            case do.Send(id):
                self.clients[id].pieces += 1
            case do.Line(id, text):
                self.clients[id].lines.append((self.now, text))
            case do.Finish():
                self.clients[effect.request].end = effect
                self.clients[effect.request].ends += 1
            case do.Forget(id, why):
                self.clients[id].forgotten = why
                self.clients[id].ends += 1
            case do.Spawn(epoch):
                self._spawn(epoch)
            case do.Kill(epoch):
                self._engine = None
                self._push(self.now + 0.01, ev.EngineDied(epoch, -9))
            case do.WakeAt(time):
                self._wake = time
            case do.Log(text):
                self.logs.append(text)
            case do.Exit(status):
                self.exited = status

    def _spawn(self, epoch: int) -> None:
        points = self.failpoints[min(epoch, len(self.failpoints)) - 1]
        config = wire.Config(epoch=epoch, model="", failpoints=points)
        described = msgspec.structs.replace(DESCRIBED, epoch=epoch)
        self._engine = ScriptedEngine(config, described, self.script)
        self._hear(self._engine.start(self.now))

    def _tell(self, message: wire.ToEngine) -> None:
        if self._engine is not None:
            self._hear(self._engine.handle(message, self.now))

    def _hear(self, said: list[tuple[float, Any]]) -> None:
        for time, message in said:
            event = self._fact(message)
            if event is not None:
                self._push(time, event)

    def _fact(self, message: Any) -> ev.Event | None:
        """One message of the engine as the fact the runner would post."""
        match message:
            case wire.Loading(epoch, _, done, total):
                return ev.EngineLoading(epoch, done, total)
            case wire.Described():
                return ev.EngineDescribed(message.epoch, message.window)
            case wire.Ready():
                return ev.EngineReady(message.epoch, message.load_s, message.safe_rows)
            case wire.Memory():
                return ev.MemoryRead(*msgspec.structs.astuple(message))
            case wire.Chunk(epoch, run, done, total, ms):
                return ev.ChunkDone(epoch, run, done, total, ms)
            case wire.Tokens():
                return self._progress(message)
            case wire.Ended(epoch, run, reason, kept):
                return ev.RunEnded(epoch, run, reason, kept, self._judged.get(run, 0), why=message.why)
            case wire.Declined(epoch, run, reason):
                return ev.RunDeclined(epoch, run, reason)
            case Died(epoch, code):
                return ev.EngineDied(epoch, code)
        raise AssertionError(message)

    def _progress(self, message: wire.Tokens) -> ev.Event:
        id = self._runs[message.run]
        n = self._judged[message.run] = message.start + len(message.ids)
        stop = self.clients[id].plan.stop_at
        stopped = bool(stop) and n >= stop
        return ev.Progress(
            id, message.epoch, message.run, stop if stopped else n, n, len(message.ids), stopped, max(0, stop - 1),
            message.ms,
        )  # fmt: skip


def replayed(world: World) -> list[Step]:
    """The journal of a fresh core over the world's facts, after a trip through JSON."""
    kinds = msgspec.json.Decoder(ev.Event)
    core = Core(world.policy)
    core.begin(0.0)
    for time, event in world.events:
        core.handle(kinds.decode(msgspec.json.encode(event)), time)
    return core.take_steps()
