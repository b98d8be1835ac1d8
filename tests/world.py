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
from engine.slots import Keeper
from pipeline import effects as do
from pipeline import events as ev
from pipeline.core import Core
from pipeline.journal import Step
from pipeline.request import Memory
from pipeline.settings import Policy

DESCRIBED = wire.Described(
    epoch=1, model="script", architecture="script", engine="scripted", tokenizer="{}", template="", special={},
    end_ids=[0], add_bos=False, bos_id=None, window=1_000, vocab=100,
)  # fmt: skip


class Plan(msgspec.Struct, kw_only=True):
    """What one client sends and does, and how each answer to it reads.

    ``stop_at`` n: a stop string is found in the n-th token; ``closes_at`` n: that token closes the thinking. ``calls``
    of two tokens each stand from token ``call_at`` on. ``others``: the sizes of further prompts in the same body.
    """

    prompt: int = 10
    others: tuple[int, ...] = ()
    choices: int = 1
    closes_at: int = 0
    calls: int = 0
    call_at: int = 1
    max_tokens: int = 0
    stream: bool = True
    progress: bool = False
    code: str = ""
    prompt_code: str = ""
    lane: str = ""
    images: int = 0
    planned: bool = False
    hashes: tuple[bytes, ...] = ()
    head: int = 0
    opening: int = 0
    first: bytes = b""
    stop_at: int = 0
    body_s: float = 0.001
    prepare_s: float = 0.002


class Client(msgspec.Struct):
    """What one client got."""

    plan: Plan
    lines: list[tuple[float, str]] = []
    figures: list[do.Line] = []
    signs: list[tuple[float, str]] = []
    pieces: int = 0
    end: do.Finish | None = None
    forgotten: str = ""
    recalled: int = 0
    guest: int = 0
    ends: int = 0
    parent: int = -1
    received: bool = False
    choices: list[tuple[int, str]] = []
    starts: list[tuple[int, bool]] = []


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
        if isinstance(event, ev.Received):
            self.clients[event.request].received = True
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
                plan, size = self.clients[id].plan, 100 if self.clients[id].parent < 0 else 0
                checked = ev.Checked(
                    id, plan.code, "", size, plan.stream, 1, plan.max_tokens, plan.choices, plan.progress
                )  # fmt: skip
                self._push(self.now + plan.body_s, checked)
            case do.Fetch(id):
                self._push(self.now, ev.Fetched(id, self.clients[id].plan.images))
            case do.Prepare(id):
                plan = self.clients[id].plan
                longest = max((0, *plan.others))
                prepared = ev.Prepared(
                    id, plan.prompt, plan.prompt_code, "", 1 + len(plan.others), longest, list(plan.hashes),
                    planned=plan.planned, lane=plan.lane, head=plan.head, opening=plan.opening, first=plan.first,
                )  # fmt: skip
                self._push(self.now + plan.prepare_s, prepared)
            case do.Spread(id):
                self._spread(id)
            case do.Measure(epoch, run, rows):
                self._tell(wire.Measure(epoch, run, rows))
            case do.GiveBack(epoch, run, level, nbytes):
                self._tell(wire.GiveBack(epoch, run, level, nbytes))
            case do.Collect(epoch, run):
                self._tell(wire.Collect(epoch, run))
            case do.StartRun(epoch, run, id, slot, max_tokens, choice, more):
                self._runs[run], self._judged[run] = id, 0
                self.clients[id].starts.append((choice, more))
                prompt = [1] * self.clients[id].plan.prompt
                start = wire.Start(epoch, run, slot, prompt, wire.Sampling(), max_tokens, [0], choice, keep_end=more)
                self._tell(start)
            case do.StartGuest(epoch, run, id, holder, max_tokens):
                self._runs[run], self._judged[run] = id, 0
                self.clients[id].guest += 1
                prompt = [1] * self.clients[id].plan.prompt
                start = wire.Start(epoch, run, 0, prompt, wire.Sampling(), max_tokens, [0])
                self._tell(wire.Guest(epoch, start, holder))
            case do.Recall(id):
                self.clients[id].recalled += 1
            case do.Acknowledge(epoch, run, n):
                self._tell(wire.Seen(epoch, run, n))
            case do.CancelRun(epoch, run, keep):
                self._tell(wire.Cancel(epoch, run, keep))
            case do.Send(id):
                self.clients[id].pieces += 1
            case do.Line(id, text):
                self.clients[id].lines.append((self.now, text))
                self.clients[id].figures.append(effect)
            case do.Beat(id) | do.Blank(id):
                self.clients[id].signs.append((self.now, type(effect).__name__))
            case do.EndChoice(id, choice, finish):
                self.clients[id].choices.append((choice, finish))
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

    def _spread(self, parent: int) -> None:
        """The further prompts of a body: requests of their own, there at once."""
        plan = self.clients[parent].plan
        for size in plan.others:
            id = len(self.clients) + 1
            own = msgspec.structs.replace(plan, prompt=size, others=(), body_s=0.0, prepare_s=0.0)
            self.clients[id] = Client(own, parent=parent)
            self._push(self.now, ev.Received(id, f"{id:024x}", "chat", 0, id * 7, 1e9 + self.now, parent))

    def _spawn(self, epoch: int) -> None:
        points = self.failpoints[min(epoch, len(self.failpoints)) - 1]
        sides = {"parallel": self.policy.slots, "side_max_len": self.policy.side_max_len}
        config = wire.Config(epoch=epoch, model="", failpoints=points, **sides)
        described = msgspec.structs.replace(DESCRIBED, epoch=epoch)
        self._engine = ScriptedEngine(config, described, self.script, self._keeper(epoch))
        self._hear(self._engine.start(self.now))

    def _keeper(self, epoch: int) -> Keeper | None:
        """What the engine of an epoch keeps from one run to the next: nothing."""
        return None

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
                return ev.EngineReady(
                    message.epoch, message.load_s, message.safe_rows, message.prefill_rate, message.decode_rate,
                    message.ceiling, message.peak_limit, message.slack, message.workspaces, message.most_rows,
                    message.device,
                )  # fmt: skip
            case wire.GuestStarted():
                return ev.GuestStarted(*msgspec.structs.astuple(message))
            case wire.Memory():
                return ev.MemoryRead(*msgspec.structs.astuple(message))
            case wire.Resumed(epoch, run, rows, source):
                return ev.RunResumed(epoch, run, rows, source)
            case wire.Chunk(epoch, run, done, total, ms):
                return ev.ChunkDone(epoch, run, done, total, ms)
            case wire.Tokens():
                return self._progress(message)
            case wire.Ended(epoch, run, reason, kept):
                n = self._judged.get(run, 0)
                told = self._told(run, n, n) if run in self._runs else {}
                drafts = {"rounds": message.rounds, "drafted": message.drafted, "accepted": message.accepted}
                return ev.RunEnded(epoch, run, reason, kept, n, why=message.why, **told, **drafts)
            case wire.Resident():
                return ev.Resident(*msgspec.structs.astuple(message))
            case wire.OwnWork(epoch, what, begun):
                return ev.OwnWork(epoch, what, begun)
            case wire.Declined(epoch, run, reason):
                return ev.RunDeclined(epoch, run, reason)
            case Died(epoch, code):
                return ev.EngineDied(epoch, code)
        raise AssertionError(message)

    def _progress(self, message: wire.Tokens) -> ev.Event:
        id = self._runs[message.run]
        before = self._judged[message.run]
        n = self._judged[message.run] = message.start + len(message.ids)
        stop = self.clients[id].plan.stop_at
        stopped = bool(stop) and n >= stop
        n = stop if stopped else n
        return ev.Progress(
            id, message.epoch, message.run, n, n, len(message.ids), stopped, max(0, stop - 1), message.ms,
            **self._told(message.run, before, n), drafted=message.drafted, accepted=message.accepted,
            shared=message.shared,
        )  # fmt: skip

    def _told(self, run: int, before: int, n: int) -> dict[str, Any]:
        """What the text stage would say beside the text, of the first ``n`` tokens."""
        plan = self.clients[self._runs[run]].plan
        closes = 0 < plan.closes_at <= n
        opened = sum(plan.call_at + 2 * i <= n for i in range(plan.calls))
        closed = sum(plan.call_at + 2 * i + 1 <= n for i in range(plan.calls))
        return {
            "reasoning": min(n, plan.closes_at),
            "closed": "model" if closes and plan.closes_at > before else "",
            "closed_at": plan.closes_at - 1 if closes and plan.closes_at > before else -1,
            "opened_calls": opened,
            "closed_calls": closed,
            "open_call": opened > closed,
        }


class Again(msgspec.Struct):
    """What a fresh core made of the same facts."""

    memory: Memory
    steps: list[Step]
    effects: list[tuple[float, do.Effect]]


def rerun(world: World) -> Again:
    """A fresh core over the world's facts, after a trip through JSON."""
    kinds = msgspec.json.Decoder(ev.Event)
    core = Core(world.policy)
    effects: list[tuple[float, do.Effect]] = [(0.0, effect) for effect in core.begin(0.0)]
    for time, event in world.events:
        said = core.handle(kinds.decode(msgspec.json.encode(event)), time)
        effects += [(time, effect) for effect in said]
    return Again(core.memory, core.take_steps(), effects)


def replayed(world: World) -> list[Step]:
    """The journal of a fresh core over the world's facts."""
    return rerun(world).steps
