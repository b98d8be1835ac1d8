"""The engine's messages from a script instead of a model: for tests, simulations and demonstrations.

``ScriptedEngine`` has no thread, sleep or clock: time is an argument, so a test can run it in virtual time. The process
(``python -m engine.scripted CONFIG_JSON``) wraps it with real time. The rules of a run are the real engine's
(``engine/sequence.py``, ``slots.py``), the closing of its thinking too: a forced token comes before the script's next,
and is that one where they are the same. Only the other tokens and what a step costs come from the script, a JSON file::

    {"load_ms": 0, "answers": [
        {"text": "Hello", "prefill_ms_per_row": 0.1, "decode_ms": 5, "round": 1, "then": "stop"},
        {"ids": [5, 6, 7], "then": "die"}
    ]}

The answers are used in order, one a ``Start`` or ``Guest`` that is not declined, as they get to their first step; the
last one repeats. A run that reaches its ``max_tokens`` ends there, before ``then``.

What chooses tokens from logits has no meaning here: sampling, an n-gram ban and a *grammar* are taken and do nothing. A
script that says no document is answered as it stands, and one that does is ended by its ``then``. So a test of this
engine says nothing of a constraint but that it was carried this far; the real loop's are in ``tests/test_grammar.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import numpy as np

from engine.failpoints import EXIT_CODE, Failpoints
from engine.link import Died
from engine.pieces import vocabulary
from engine.pipe import Pipe, complain, open_pipe
from engine.protocol import (
    Cancel,
    Collect,
    Config,
    Described,
    FromEngine,
    GiveBack,
    Guest,
    Loading,
    Measure,
    OwnWork,
    Ready,
    Seen,
    Start,
    Stop,
    ToEngine,
    TokenLogprob,
    windows,
)
from engine.scripted_memory import ScriptedMemory
from engine.sequence import Sequence, Step
from engine.slots import Keeper, Slots
from engine.weights.errors import CheckpointError

Timed = tuple[float, FromEngine | Died]
"""A message and the second it is said at."""

SAFE_ROWS = 256
KV_BYTES_PER_ROW = 1 << 10
WEIGHTS_BYTES = 1 << 20
NO_LOGITS = np.empty(0, np.float32)
"""What is kept of a prompt's end: a script chooses its tokens without."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run says: ``ids``, or ``text`` to be encoded, ``round`` tokens a round, each for ``decode_ms``.

    ``then``, once all were committed: an end by stop, by length or by a fault, the death of the process, or silence of
    the whole engine.
    """

    ids: list[int] = []
    text: str = ""
    prefill_ms_per_row: float = 0.0
    decode_ms: float = 0.0
    round: int = 1
    then: Literal["stop", "length", "fault", "die", "silent"] = "stop"


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A script file. ``load_ms`` is what starting takes. The rest is as in ``Ready`` and ``Memory``.

    ``warm_up_ms``: work of its own once it is loaded, in which it does nothing else.
    ``levels``: bytes that levels of memory hold at the start; of the allocator's ``stuck`` stay, whoever asks.
    ``free`` 0: never said, and nothing is short.
    """

    answers: list[Answer] = msgspec.field(default_factory=lambda: [Answer()])
    load_ms: float = 0.0
    warm_up_ms: float = 0.0
    prefill_rate: float = 1000.0
    decode_rate: float = 100.0
    levels: list[tuple[str, int]] = []
    stuck: int = 0
    free: int = 0
    workspace_per_row: int = KV_BYTES_PER_ROW
    ceiling: int = 0
    peak_limit: int = 0
    slack: int = 0
    workspaces: list[tuple[int, int]] = []
    most_rows: int = 0


class Teller:
    """What one run says next. A round that is cut where a token is forced is told on from there."""

    def __init__(self, run: Sequence, answer: Answer) -> None:
        self.run, self.answer = run, answer
        self._told = self._written = 0  # of the script's tokens, of the run's

    def next(self) -> list[int]:
        """The tokens of the next round: a forced one alone, or the script's."""
        if self.run.forced is not None:
            return [self.run.forced]
        ids = self.answer.ids
        for token in self.run.answer[self._written :]:  # one that was forced is the script's where it says the same
            self._told += ids[self._told : self._told + 1] == [token]
        self._written = len(self.run.answer)
        return ids[self._told : self._told + self.answer.round]


class ScriptedFault(Exception):
    """What a scripted fault is called."""


def encoded(script: Script, encode: Callable[[str], list[int]]) -> Script:
    """The script with every text turned into ids. Raises ``ValueError`` for a script without answers."""
    if not script.answers:
        raise ValueError("a script needs an answer")
    answers = [msgspec.structs.replace(a, ids=encode(a.text), text="") if a.text else a for a in script.answers]
    return msgspec.structs.replace(script, answers=answers)


class ScriptedEngine:
    """An engine in virtual time: one step at a time, the slots in turn, messages read at safe points.

    Drive it with ``start`` once, ``handle`` for each message and ``advance`` at ``due()``; each returns what was said,
    with its times, in order. After ``Died`` it says nothing. ``script`` must hold ids, not text (see ``encoded``).
    ``keeper`` None: no prompt is resident when its run begins.
    """

    def __init__(self, config: Config, described: Described, script: Script, keeper: Keeper | None = None) -> None:
        self._config, self._described, self._script = config, described, script
        self._failpoints = Failpoints(config.failpoints)
        known = vocabulary(described.tokenizer, described.vocab)
        self._windows = windows(described.window, config.parallel, config.side_max_len)
        taken = WEIGHTS_BYTES + sum(self._windows) * KV_BYTES_PER_ROW
        self._memory = ScriptedMemory(
            taken, script.levels, script.free, script.peak_limit, script.workspace_per_row, KV_BYTES_PER_ROW,
            script.stuck,
        )  # fmt: skip
        self._slots = Slots(config.epoch, self._windows, self._failpoints, known, keeper=keeper, lender=self._memory)
        self._safe_rows = config.safe_rows or SAFE_ROWS
        self._inbox: list[Start | Guest | Seen | Cancel | Measure | GiveBack | Collect] = []
        self._tellers: dict[int, Teller] = {}  # by slot, a guest's -1
        self._begun = 0
        self._loaded_at: float | None = None
        self._warm_at: float | None = None
        self._work: tuple[int, Sequence] | None = None
        self._done_at = 0.0
        self._mute = False

    @property
    def silent(self) -> bool:
        """It says nothing any more: it has died, was stopped, or stands still."""
        return self._mute

    @property
    def live(self) -> bool:
        """It has a run."""
        return self._slots.live

    def start(self, now: float) -> list[Timed]:
        """Begin to load: ``Described`` at once, ``Ready`` after the script's ``load_ms``."""
        said: list[Timed] = [(now, self._described)]
        if self._failpoints.fires("die_at_load"):
            self._suffer("die", now, said)
            return said
        if self._failpoints.fires("stall_load"):
            self._mute = True
            return said
        said.append((now, Loading(self._config.epoch, "script", 0, 1)))
        self._loaded_at = now + self._script.load_ms / 1000
        return said + self.advance(now)

    def due(self) -> float | None:
        """When it next has something to do, None while it waits for a message."""
        if self._mute:
            return None
        if self._loaded_at is not None:
            return self._loaded_at
        if self._warm_at is not None:
            return self._warm_at
        return self._done_at if self._work is not None else None

    def handle(self, message: ToEngine, now: float) -> list[Timed]:
        """Take a message in at ``now``; everything said until then."""
        said = self.advance(now)
        if isinstance(message, Stop):
            if message.epoch == self._config.epoch and not self._mute:
                self._mute = True
                said.append((now, Died(self._config.epoch, 0)))
            return said
        self._inbox.append(message)
        return said + self.advance(now)

    def advance(self, now: float) -> list[Timed]:
        """Everything said up to ``now``."""
        said: list[Timed] = []
        while not self._mute:
            at = self.due()
            if at is not None and at > now:
                break
            if self._loaded_at is not None:
                said += self._load(self._loaded_at)
                if self._warm_at is not None:
                    continue
            elif self._warm_at is not None:
                said.append((self._warm_at, OwnWork(self._config.epoch, "warm-up", False)))
                self._warm_at = None
            if self._work is not None:
                self._finish(*self._work, self._done_at, said)
            if self._mute or not self._safe_point(now if at is None else at, said):
                break
        return said

    def _load(self, at: float) -> list[Timed]:
        self._loaded_at = None
        config, script, kv = self._config, self._script, sum(self._windows) * KV_BYTES_PER_ROW
        ready = Ready(
            config.epoch,
            load_s=script.load_ms / 1000,
            safe_rows=self._safe_rows,
            selfcheck_ms=0.0,
            prefill_rate=script.prefill_rate,
            decode_rate=script.decode_rate,
            file_bytes=WEIGHTS_BYTES,
            weights_bytes=WEIGHTS_BYTES,
            kv_bytes=kv,
            rss_bytes=WEIGHTS_BYTES + kv,
            device="script",
            threads=1,
            ceiling=script.ceiling,
            peak_limit=script.peak_limit,
            slack=script.slack,
            workspaces=script.workspaces,
            most_rows=script.most_rows,
        )
        said: list[Timed] = [(at, Loading(config.epoch, "script", 1, 1))]
        if script.warm_up_ms:
            self._warm_at = at + script.warm_up_ms / 1000
            said.append((at, OwnWork(config.epoch, "warm-up", True)))
        return [*said, (at, ready)]

    def _safe_point(self, at: float, said: list[Timed]) -> bool:
        """Read the inbox, commit, begin the next step; whether one began."""
        for message in self._inbox:
            if isinstance(message, Measure | GiveBack | Collect):
                said += [(at, self._memory.answer(message))] if message.epoch == self._config.epoch else []
            else:
                said += [(at, answer) for answer in self._slots.handle(message)]
        self._inbox.clear()
        said += [(at, message) for message in self._slots.settle()]
        self._work = next(iter(self._slots.turn()), None)
        if self._work is not None:
            self._done_at = at + self._cost(*self._work)
        return self._work is not None

    def _teller(self, slot: int, run: Sequence) -> Teller:
        """Who tells the answer of the run in a slot; the next of the script for a run that is new."""
        slot = -1 if run.guest else slot  # its holder's answer goes on behind it
        held = self._tellers.get(slot)
        if held is None or held.run is not run:
            answers = self._script.answers
            held = self._tellers[slot] = Teller(run, answers[min(self._begun, len(answers) - 1)])
            self._begun += 1
        return held

    def _cost(self, slot: int, run: Sequence) -> float:
        """Seconds of the step a run needs next."""
        teller = self._teller(slot, run)
        if run.step is Step.PREFILL:
            rows = min(run.prompt - run.rows, self._safe_rows)
            return rows * teller.answer.prefill_ms_per_row / 1000
        if not run.answer:  # it began at a prompt's end, whose first token needs no step
            return 0.0
        return max(len(teller.next()), 1) * teller.answer.decode_ms / 1000

    def _finish(self, slot: int, run: Sequence, at: float, said: list[Timed]) -> None:
        """The step under way is over: what it said, and its round."""
        teller, ms = self._teller(slot, run), self._cost(slot, run) * 1000
        self._work = None
        try:
            if run.step is Step.PREFILL:
                self._read(run, at, ms, said)
                ms = 0.0  # the first round comes with the prompt's last row
            if run.step is Step.ROUND and run.limit > 0 and not self._mute:
                self._decide(run, teller, at, ms, said)
        except Exception as error:
            said.append((at, self._slots.fault(run, type(error).__name__)))

    def _read(self, run: Sequence, at: float, ms: float, said: list[Timed]) -> None:
        _, stop = run.chunk(self._safe_rows)
        harm = self._failpoints.harm("chunk", [run.chunks + 1])
        if harm:
            self._suffer(harm, at, said)
        else:
            said.append((at, run.read(stop, ms, NO_LOGITS)))

    def _decide(self, run: Sequence, teller: Teller, at: float, ms: float, said: list[Timed]) -> None:
        """Propose the next round; past the script's end, do what it says then."""
        first, answer = len(run.answer), teller.answer
        ids = teller.next()
        harm = self._failpoints.harm("token", range(first + 1, first + max(len(ids), 1) + 1))
        if harm:
            self._suffer(harm, at, said)
        elif ids:
            run.propose(ids, ms, logprobs=_certain(ids, run.start.logprobs))
        elif answer.then in ("stop", "length"):
            run.propose([], ms, ending=answer.then)
        else:
            self._suffer(answer.then, at, said)

    def _suffer(self, harm: str, at: float, said: list[Timed]) -> None:
        if harm == "fault":
            raise ScriptedFault
        self._mute = True
        if harm == "die":
            said.append((at, Died(self._config.epoch, EXIT_CODE)))


def _certain(ids: list[int], alternatives: int) -> list[TokenLogprob]:
    """A script is sure of its tokens: each has all of the probability, and there is no alternative but itself."""
    return [TokenLogprob(0.0, [i][:alternatives], [0.0][:alternatives]) for i in ids] if alternatives >= 0 else []


class Clocked:
    """A ``ScriptedEngine`` in real time over a pipe: the loop of the process."""

    def __init__(self, engine: ScriptedEngine, pipe: Pipe, clock: Callable[[], float]) -> None:
        self._engine, self._pipe, self._clock = engine, pipe, clock

    def run(self) -> NoReturn:
        """Run until the process ends."""
        self._say(self._engine.start(self._clock()))
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for a message or for the next thing to do."""
        due = self._engine.due()
        for message in self._pipe.take(None if due is None else max(due - self._clock(), 0.0)):
            self._say(self._engine.handle(message, self._clock()))
        self._say(self._engine.advance(self._clock()))

    def _say(self, said: list[Timed]) -> None:
        for _, message in said:
            if isinstance(message, Died):
                self._pipe.leave(message.code)
            self._pipe.post(message)


def open_script(config: Config) -> tuple[Described, Script]:
    """What the checkpoint at ``config.model`` says of itself, and the script in its ids. Raises ``CheckpointError``,
    and ``msgspec.MsgspecError`` for a file that is no script.
    """
    from tokenizers import Tokenizer  # here: who uses the class alone needs neither this nor torch

    from engine.load import describe
    from engine.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(Path(config.model))
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    script = msgspec.json.decode(Path(config.script).read_bytes(), type=Script)
    window = config.max_len or checkpoint.config.window

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    pieces = vocabulary(checkpoint.tokenizer_json, checkpoint.config.vocab).pieces
    return describe(config, checkpoint, "scripted", window, pieces), encoded(script, encode)


def main(arguments: list[str]) -> NoReturn:
    """The process."""
    config = msgspec.json.decode(arguments[0], type=Config)
    pipe = open_pipe()
    try:
        engine = ScriptedEngine(config, *open_script(config))
    except (CheckpointError, msgspec.MsgspecError, OSError, ValueError) as error:
        complain(f"The scripted engine cannot start: {error}")
        pipe.leave(2)
    Clocked(engine, pipe, time.monotonic).run()


if __name__ == "__main__":
    main(sys.argv[1:])
