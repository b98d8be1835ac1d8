"""The runner: the one place with a clock, threads and the engine's pipe. It posts facts and carries out effects.

Everything here runs on one event loop. A fact that comes from elsewhere (the engine's reader thread, the pool) is
posted through ``call_soon_threadsafe``. Posting while effects are carried out queues the fact behind them, so the core
sees one fact at a time. No text of a request leaves this module but to its own client.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import msgspec

from engine import protocol as wire
from engine.link import Died, EngineLink
from pipeline import closing, data_dir, view
from pipeline import effects as do
from pipeline import events as ev
from pipeline.call import Call
from pipeline.core import Core
from pipeline.engine_life import UNUSABLE
from pipeline.faults import told, unhandled
from pipeline.outbox import Beat, Blank, Comment
from pipeline.pools import Raised
from pipeline.prepare import Preparation
from pipeline.recording import capabilities, recorder
from pipeline.rules import rulebook
from pipeline.settings import Settings, policy
from pipeline.starting import engine_config
from pipeline.summary import refused

log = logging.getLogger("tandem")


class Runner:
    """Drives one core. ``model`` is the served model's id, ``path`` where its checkpoint lies."""

    def __init__(self, settings: Settings, path: str, model: str) -> None:
        self.settings, self.path, self.model = settings, path, model
        self.core = Core(policy(settings))
        self.exiting = asyncio.Event()
        self.exit_status = 0
        self.described: wire.Described | None = None
        self.loaded: wire.Ready | None = None
        self.lag_ms = 0.0
        self.counters = {"dropped_calls": 0, "lost_calls": 0}
        self._said_loading = 0.0
        self._loop = asyncio.get_running_loop()
        self._zero = time.monotonic()
        self._calls: dict[int, Call] = {}
        self._runs: dict[int, Call] = {}
        self._link: EngineLink | None = None
        self._inbox: deque[ev.Event] = deque()
        self._busy = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._next = 1
        salt = data_dir.salt(settings)
        self._preparation = Preparation(rulebook(settings, model), salt, settings.parallel > 1)
        self._recorder = recorder(settings, salt, self.core.memory.history)
        self._tasks: set[asyncio.Future[Any]] = set()
        self._do: dict[type, Callable[[Any], None]] = {
            do.ReadBody: self._read_body,
            do.Fetch: lambda e: self.post(ev.Fetched(e.request)),
            do.Prepare: self._start_to_prepare,
            do.Spread: self._spread,
            do.Measure: lambda e: self._tell(wire.Measure(e.epoch, e.run, e.rows)),
            do.GiveBack: lambda e: self._tell(wire.GiveBack(e.epoch, e.run, e.level, e.nbytes)),
            do.Collect: lambda e: self._tell(wire.Collect(e.epoch, e.run)),
            do.StartRun: self._start_run,
            do.StartGuest: self._start_guest,
            do.Recall: lambda e: self._calls[e.request].recall(),
            do.Acknowledge: lambda e: self._tell(wire.Seen(e.epoch, e.run, e.n)),
            do.CancelRun: self._cancel_run,
            do.Send: self._send,
            do.Line: self._line,
            do.Beat: lambda e: self._sign(e.request, Beat()),
            do.Blank: lambda e: self._sign(e.request, Blank()),
            do.EndChoice: self._end_choice,
            do.Finish: self._finish,
            do.Forget: self._forget,
            do.Log: lambda e: log.info(e.text),
            do.Spawn: self._spawn_engine,
            do.Kill: self._kill_engine,
            do.WakeAt: self._wake_at,
            do.Exit: self._exit,
        }

    # -- the loop: facts in, effects out ---------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the start, on the core's clock."""
        return time.monotonic() - self._zero

    def begin(self) -> None:
        """Start the engine and the loop's own watch."""
        self._zero = time.monotonic()
        self._loop.set_exception_handler(unhandled)
        self._carry_out(self.core.begin(0.0))
        self._spawn(self._watch())

    def post(self, event: ev.Event) -> None:
        """Post a fact; its effects are carried out before this returns, unless others are being carried out."""
        if self._closed:
            return
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, event: ev.Event) -> None:
        now = self.now()
        effects = self.core.handle(event, now)
        steps = self.core.take_steps()
        if self._recorder is not None:
            self._recorder.event(event, now, steps)
            if self._recorder.wants_rotation():
                self._recorder.rotate(self.core.memory)
        self._carry_out(effects)

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            self._do[type(effect)](effect)

    def _wake_at(self, effect: do.WakeAt) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if effect.time != inf:
            self._timer = self._loop.call_at(self._zero + effect.time, self._tick)

    def _tick(self) -> None:
        """The loop may wake a hair early: the core's time has to have come."""
        wake = self.core.memory.wake
        if wake is not None and self.now() < wake:
            self._timer = self._loop.call_at(self._zero + wake + 0.001, self._tick)
        else:
            self.post(ev.Tick())

    def _spawn(self, work: Any, call: Call | None = None, stage: str = "runner") -> None:
        """Run ``work``. Whatever it raises, a tokenizer's panic as well, ends the request it was for, and only that.

        When the request is over first, its work is dropped.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        if call is not None:
            call.work = task
        task.add_done_callback(lambda done: self._worked(done, call, stage))

    def _worked(self, task: asyncio.Future[Any], call: Call | None, stage: str) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and call is not None:
            self._failed(call, stage, error.name if isinstance(error, Raised) else type(error).__name__)
        elif error is not None:
            log.error("[fault] in %s: %s", stage, told(error))

    async def _watch(self) -> None:
        """Measure the loop's lag, and end clients that do not read."""
        while True:
            due = self._loop.time() + 0.5
            await asyncio.sleep(0.5)
            self.lag_ms = max(0.0, (self._loop.time() - due) * 1_000)
            now = self.now()
            for call in dict.fromkeys(c.head for c in self._calls.values() if c.outbox.stalled(now)):
                self._stalled(call)

    # -- what HTTP calls -------------------------------------------------------------------------------------------

    def receive(self, route: str, body_bytes: int, headers: Mapping[str, str] | None = None) -> Call:
        """A request's route matched and its key passed. Ids, seed and calendar enter here and in ``_spread``."""
        request, self._next = self._next, self._next + 1
        wall = time.time()
        call = Call(request, secrets.token_hex(12), route, int(wall), secrets.randbits(63))
        call.headers = headers or {}
        self._calls[request] = call
        self.post(ev.Received(request, call.name, route, body_bytes, call.seed, wall))
        return call

    def reading(self, call: Call, size: int) -> None:
        """So much of a body is here, more than was known of."""
        self.post(ev.BodyGrew(call.request, size))

    def body(self, call: Call, body: bytes) -> None:
        """The body came whole: judge it in the pool, unless its request is over."""
        if not self._live(call):
            return
        if self._recorder is not None and self._recorder.full:
            self._recorder.text({"request": call.request, "body": body.decode("utf-8", "replace")})
        self._spawn(self._judge(call, body), call, "judge")

    def cut(self, call: Call, code: str) -> None:
        """The body was too large, or never came whole: HTTP has answered."""
        self.left(call, f"cut: {code}")

    def left(self, call: Call, why: str = "closed") -> None:
        """The client is gone. Nothing happens when its request is over."""
        if self._live(call):
            self.post(ev.HungUp(call.request, why))

    def fault(self, call: Call, where: str, error: str) -> None:
        """A handler of ours raised: nobody is there for any prompt of its body."""
        for member in self._live(call):
            self._failed(member, where, error)

    def _failed(self, call: Call, where: str, error: str) -> None:
        """A stage raised for one request."""
        if call.request in self._calls:
            self.post(ev.Faulted(call.request, where, error))

    def _live(self, call: Call) -> list[Call]:
        """What is still live of the requests of one body."""
        return [member for member in call.members if member.request in self._calls]

    @property
    def window(self) -> int:
        """Rows; 0 until the checkpoint is known."""
        return self.core.memory.engine.window

    @property
    def engine_state(self) -> str:
        """The engine's state as a word."""
        return self.core.memory.engine.state.value

    @property
    def draining(self) -> bool:
        """Whether the server was asked to stop."""
        return self.core.memory.draining

    def view(self) -> dict[str, Any]:
        """The live state, for /health and the Dev view."""
        return view.view(self)

    # -- preparation -----------------------------------------------------------------------------------------------

    def _read_body(self, effect: do.ReadBody) -> None:
        call = self._calls[effect.request]
        if call.head is call:
            call.decide(True)
        elif call.head.checked is not None:  # it came in a body that was judged, and its size counted there
            self.post(msgspec.structs.replace(call.head.checked, request=call.request, body_bytes=0))

    async def _judge(self, call: Call, body: bytes) -> None:
        call.checked = await self._preparation.judge(call, body)
        self.post(call.checked)

    def _start_to_prepare(self, effect: do.Prepare) -> None:
        call = self._calls[effect.request]
        if call.head is call:
            self._spawn(self._prepare(call), call, "prompt")
        else:
            self.post(ev.Prepared(call.request, len(call.tokens), hashes=call.hashes, thinks=call.head.thinks))

    def _spread(self, effect: do.Spread) -> None:
        """The other prompts of a body, each a request of its own with chance of its own."""
        head = self._calls[effect.request]
        wall = self.core.memory.requests[effect.request].wall
        for index in range(1, len(head.prompts)):
            request, self._next = self._next, self._next + 1
            self._calls[request] = call = head.further(request, index, secrets.randbits(63))
            self.post(ev.Received(request, call.name, call.route, 0, call.seed, wall, head.request))

    async def _prepare(self, call: Call) -> None:
        fact = await self._preparation.prepare(call)
        call.thinks = fact.thinks
        self.post(fact)

    # -- effects on the engine ---------------------------------------------------------------------------------------

    def _spawn_engine(self, effect: do.Spawn) -> None:
        self._runs.clear()
        self._link = EngineLink(engine_config(self.settings, effect.epoch, self.path), self._from_thread)
        self._link.start()

    def _kill_engine(self, effect: do.Kill) -> None:
        if self._link is not None:
            log.debug("killing the engine of epoch %d", effect.epoch)
            self._link.kill()

    def _from_thread(self, message: wire.FromEngine | Died) -> None:
        """Called by the link's reader thread."""
        try:
            self._loop.call_soon_threadsafe(self._from_engine, message)
        except RuntimeError:
            log.debug("the loop is closed")

    def _tell(self, message: wire.ToEngine) -> None:
        if self._link is not None:
            self._link.send(message)

    def _start_run(self, effect: do.StartRun) -> None:
        self._tell(self._start(effect, effect.slot, effect.choice, effect.more))

    def _start_guest(self, effect: do.StartGuest) -> None:
        self._tell(wire.Guest(effect.epoch, self._start(effect, 0, 0, False), effect.holder))

    def _start(self, effect: do.StartRun | do.StartGuest, slot: int, choice: int, more: bool) -> wire.Start:
        """The next choice of a request begins: all that the engine is told of it."""
        call = self._calls[effect.request]
        assert self.described is not None
        run = call.new_choice(choice)
        self._runs[effect.run] = call
        if self._recorder is not None and choice == 0:
            self._recorder.text({"request": effect.request, "prompt": call.tokens})
        return wire.Start(
            effect.epoch, effect.run, slot, call.tokens, run.sampling, effect.max_tokens,
            run.ending.all_ids(self.described.end_ids), choice, run.ending.min_tokens, run.alternatives,
            run.thinking, run.grammar, more, call.hashes,
        )  # fmt: skip

    def _cancel_run(self, effect: do.CancelRun) -> None:
        """What the engine still says of this run's text is nobody's any more."""
        self._runs.pop(effect.run, None)
        self._tell(wire.Cancel(effect.epoch, effect.run, effect.keep))

    # -- facts from the engine -----------------------------------------------------------------------------------------

    def _from_engine(self, message: wire.FromEngine | Died) -> None:
        match message:
            case wire.Tokens():
                self._tokens(message)
            case wire.Resumed():
                self.post(ev.RunResumed(message.epoch, message.run, message.rows, message.source))
            case wire.Chunk():
                self.post(ev.ChunkDone(message.epoch, message.run, message.done, message.total, message.ms))
            case wire.Ended():
                self._ended(message)
            case wire.Declined():
                self._runs.pop(message.run, None)
                self.post(ev.RunDeclined(message.epoch, message.run, message.reason))
            case wire.Resident():
                self.post(ev.Resident(*msgspec.structs.astuple(message)))
            case wire.OwnWork():
                self.post(ev.OwnWork(message.epoch, message.what, message.begun))
            case wire.GuestStarted():
                self.post(ev.GuestStarted(*msgspec.structs.astuple(message)))
            case wire.Memory():
                self.post(ev.MemoryRead(*msgspec.structs.astuple(message)))
            case wire.Loading():
                self._say_loading(message)
                self.post(ev.EngineLoading(message.epoch, message.done, message.total))
            case wire.Described():
                self._spawn(self._describe(message))
            case wire.Ready():
                self.loaded = message
                self._spawn(self._ready(message))
            case Died():
                self.post(ev.EngineDied(message.epoch, message.code))

    def _say_loading(self, message: wire.Loading) -> None:
        """Progress for whoever watches the log: every two seconds of a load that takes longer."""
        now = self.now()
        if now - self._said_loading >= 2.0:
            self._said_loading = now
            log.info("[engine] loading %s: %d %%", message.what, 100 * message.done // max(message.total, 1))

    async def _describe(self, message: wire.Described) -> None:
        """Build the renderer off the loop, once for each checkpoint."""
        self.described = message
        try:
            await self._preparation.describe(message)
        except Exception as error:
            self._cannot_render(message.epoch, error)
            return
        self.post(ev.EngineDescribed(message.epoch, message.window))

    def _cannot_render(self, epoch: int, error: Exception) -> None:
        """Nothing can be served with this checkpoint: an engine for it is of no use, and starting it again neither."""
        log.error("[engine] the checkpoint's tokenizer cannot be used: %s", type(error).__name__)
        if self._link is not None and epoch == self.core.memory.engine.epoch:
            self._link.kill()
            self.post(ev.EngineDied(epoch, UNUSABLE[0]))

    async def _ready(self, message: wire.Ready) -> None:
        await self._preparation.renderer()
        if self._recorder is not None:
            self._recorder.know(capabilities(self.described, message))
        self.post(
            ev.EngineReady(
                message.epoch, message.load_s, message.safe_rows, message.prefill_rate, message.decode_rate,
                message.ceiling, message.peak_limit, message.slack, message.workspaces, message.most_rows,
                message.device,
            )
        )  # fmt: skip

    def _tokens(self, message: wire.Tokens) -> None:
        """Through the text stage; the core answers with what to send and how far the engine may go."""
        call = self._runs.get(message.run)
        if call is None or call.text is None or message.epoch != self.core.memory.engine.epoch:
            return
        if self._recorder is not None:
            self._recorder.text({"run": message.run, "ids": message.ids})
        try:
            fact = call.read(message, self.counters)
        except Exception as error:
            self._broke(call, error)
            return
        self.post(fact)

    def _ended(self, message: wire.Ended) -> None:
        call = self._runs.pop(message.run, None)
        fact = ev.RunEnded(
            message.epoch, message.run, message.reason, message.kept, message.generated, why=message.why,
            rounds=message.rounds, drafted=message.drafted, accepted=message.accepted,
        )  # fmt: skip
        if call is not None and call.text is not None and message.reason in ("stop", "length"):
            try:
                fact = call.read_end(fact, self.counters)
            except Exception as error:
                self._broke(call, error)
        self.post(fact)

    def _broke(self, call: Call, error: Exception) -> None:
        """The text stage raised: what it still holds is not to be trusted."""
        call.text = None
        self._failed(call, "text", type(error).__name__)

    # -- effects on a client -------------------------------------------------------------------------------------

    def _send(self, effect: do.Send) -> None:
        call = self._calls[effect.request]
        if not call.outbox.put(call.release(effect.handle), self.now()):
            self._stalled(call)

    def _stalled(self, call: Call) -> None:
        self.post(ev.HungUp(call.head.request, "stalled"))
        call.abort()

    def _line(self, effect: do.Line) -> None:
        call = self._calls[effect.request]
        call.outbox.put(Comment(effect.text, call.head.shows_lines, closing.progress(effect)), self.now())

    def _sign(self, request: int, item: Beat | Blank) -> None:
        """A sign of life that says nothing."""
        self._calls[request].outbox.put(item, self.now())

    def _end_choice(self, effect: do.EndChoice) -> None:
        call = self._calls[effect.request]
        call.outbox.put(closing.choice_ended(call, effect.choice, effect.finish), self.now())

    def _finish(self, effect: do.Finish) -> None:
        call = self._calls.pop(effect.request)
        if effect.code and not refused(effect):
            self._let_go(call)
        for item in closing.finished(call, effect, self.window, self.core.memory.engine.most_rows):
            call.outbox.put(item, self.now())

    def _let_go(self, call: Call) -> None:
        """An error or a time-out ends an answer in the middle: its text so far stands, what was held of it too."""
        try:
            text = call.read_cut(self.counters)
        except Exception as error:
            log.error("[fault] in text: %s", told(error))
            return
        if text is not None:
            call.outbox.put(text, self.now())

    def _forget(self, effect: do.Forget) -> None:
        call = self._calls.pop(effect.request)
        for item in closing.forgotten(call):
            call.outbox.put(item, self.now())

    # -- start and stop ------------------------------------------------------------------------------------------

    def _exit(self, effect: do.Exit) -> None:
        self.exit_status = effect.status
        self.exiting.set()

    async def close(self) -> None:
        """Stop the engine and the recording. Nothing is a fact any more: the engine's end is not its loss."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close(5.0)
        if self._recorder is not None:
            self._recorder.close()
        await self._preparation.close()
