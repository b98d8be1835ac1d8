"""The engine process: ``python -m engine.worker CONFIG_JSON``.

The main thread computes; two threads of ``pipe`` read and write frames. Tokens in, tokens out: it knows no text, no
HTTP and no states, and what it prints holds neither token ids nor an exception's text.

It exits with 0 when told to, or when its parent is gone; 1 by a fault of the engine itself; 2 when the model or the
device cannot be used; 3 when the window does not fit the memory; 4 when the self-check fails.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from engine import sampling
from engine.drafting import Drafting, drafters
from engine.failpoints import EXIT_CODE, FailpointFault, Failpoints
from engine.keeper import keeper_for
from engine.lending import Lending
from engine.levels import Levels
from engine.load import ROUND_ROWS, Line, Loaded, LoadFailed, load, stand_still, windows_line
from engine.models import registry
from engine.models.batch import Rows
from engine.models.cache import KV
from engine.models.graphs import Graphs
from engine.pipe import complain, open_pipe
from engine.protocol import Collect, Config, FromEngine, GiveBack, Measure, OwnWork, Stop, ToEngine
from engine.rounds import Part, walk
from engine.sequence import Sequence, Step
from engine.slots import Slots, Turn
from engine.speculate.draft import NOTHING, Draft
from engine.speculate.shape import Shapes
from engine.threads import Threads
from engine.weights.checkpoint import Checkpoint, open_checkpoint
from engine.weights.errors import CheckpointError

SOON_S = 0.005
"""Seconds in which the text of a round is judged, mostly: so long the engine waits before it does other things."""


class Engine:
    """The loop over safe points: read what arrived, commit what may be, compute one step.

    ``drafting``: who drafts, where a test says so.
    """

    def __init__(
        self, config: Config, loaded: Loaded, line: Line, failpoints: Failpoints, drafting: Drafting | None = None
    ) -> None:
        self._epoch, self._loaded, self._line, self._failpoints = config.epoch, loaded, line, failpoints
        self._keeper = keeper_for(config, loaded)
        self._lending = Lending(loaded, self._keeper)
        self._slots = Slots(
            config.epoch, loaded.windows, failpoints, loaded.vocabulary, loaded.masks, self._keeper, self._lending
        )
        self._levels, self._ran = Levels(loaded, self._keeper, self._slots, self._lending), False
        self._most = max(1, min(ROUND_ROWS, loaded.model.alike))
        self._drafting = drafting or drafting_for(config, loaded, self._most)
        self._threads = Threads(loaded.ready.threads, loaded.one_s)
        self._using = loaded.ready.threads
        self._wait: float | None = 0.0  # how long the next safe point waits for a message; None: for ever
        graphs = tell_of_graphs(loaded.model, config.epoch, line)
        if graphs is not None and not config.side_graphs:
            graphs.serves = [cache for cache in loaded.caches[:1] if isinstance(cache, KV)]

    def run(self) -> NoReturn:
        """Run until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One safe point and at most one step."""
        messages = self._line.take(self._wait)
        with torch.inference_mode():
            for message in messages:
                self._take_in(message)
            self._say(self._slots.settle())
            self._rest()
            turn = self._slots.turn(self._most)
            self._wait = 0.0 if turn else self._idle()
            self._say(self._keeper.messages())
            if turn and turn[0][1].step is Step.PREFILL:
                self._read(*turn[0])
            elif turn:
                self._round(turn)

    def _rest(self) -> None:
        """Behind the last run, where no further choice of its prompt is to come."""
        ran, self._ran = self._ran, self._slots.live
        if ran and not self._ran and not self._slots.kept_ends():
            self._levels.rest()

    def _idle(self) -> float | None:
        """Nothing is to be computed: write a piece, but not where a run's next message is about to come."""
        if not self._keeper.busy:
            return None
        if self._slots.live and self._wait != SOON_S:
            return SOON_S
        return 0.0 if self._keeper.work() else None

    def _take_in(self, message: ToEngine) -> None:
        if isinstance(message, Measure | GiveBack | Collect):
            if message.epoch == self._epoch:
                self._line.post(self._levels.answer(message))
        elif not isinstance(message, Stop):  # a stop never comes this far: the pipe's reader ends the process
            self._say(self._slots.handle(message))

    def _say(self, messages: Iterable[FromEngine]) -> None:
        for message in messages:
            self._line.post(message)

    def _fault(self, run: Sequence, error: Exception) -> None:
        """An exception ends its run alone, told by its class: its text could hold a prompt."""
        why = type(error).__name__
        complain(f"run {run.start.run} in slot {run.start.slot} ended by a fault: {why}")
        self._line.post(self._slots.fault(run, why))
        self._check_device()

    def _check_device(self) -> None:
        """Leave, to be started again, when the device itself is lost: every later run would end by a fault too."""
        try:
            torch.ones(1, device=self._loaded.device).add_(1).item()
        except Exception as error:
            complain(f"the device is lost: {type(error).__name__}")
            self._line.leave(1)

    def _read(self, slot: int, run: Sequence) -> None:
        """One step of the prompt; the last one's logits choose the first token."""
        began = time.perf_counter()
        try:
            self._suffer(self._failpoints.harm("chunk", [run.chunks + 1]))
            first, stop = run.chunk(self._loaded.steps.at(run.rows))
            part = Rows(self._loaded.caches[slot], run.start.tokens[first:stop], first)
            logits = self._forward([part], self._loaded.ready.threads)
            self._line.post(run.read(stop, _ms_since(began), logits[0]))
            if not run.guest:
                self._keeper.read(slot, run)
            if run.step is Step.ROUND and run.limit > 0:
                began = time.perf_counter()
                self._choose(Part(slot, run), logits, began)
        except Exception as error:
            self._fault(run, error)

    def _round(self, turn: Turn) -> None:
        """The next round of each run, in one step; the first token of one that began at its prompt's kept end."""
        began = time.perf_counter()
        drafts = self._drafts(turn)
        parts = [Part(slot, run, draft) for (slot, run), draft in zip(turn, drafts, strict=True)]
        for part in (part for part in parts if not part.run.answer):
            assert part.run.end is not None  # a prompt that is read here has its first token chosen in the same step
            self._taken(part, part.run.end[None], began)
        self._verify([part for part in parts if part.run.answer], began)

    def _drafts(self, turn: Turn) -> list[Draft]:
        """What is drafted. A drafter that fails ends no run: from then on nobody drafts."""
        if turn[0][1].guest:  # its holder's drafter is told nothing of it
            return [NOTHING]
        try:
            return self._drafting.drafts(turn)
        except Exception as error:
            complain(f"no more drafts: {type(error).__name__}")
            self._drafting.stop()
            return [NOTHING] * len(turn)

    def _verify(self, parts: list[Part], began: float) -> None:
        """One forward pass for all ``parts``. Where it fails each is tried alone, so that only the faulty run ends."""
        if not parts:
            return
        try:
            rows = [part.rows(self._loaded.caches[part.slot]) for part in parts]
            logits = self._forward(rows, self._threads.count)
        except Exception as error:
            if len(parts) == 1:
                self._fault(parts[0].run, error)
            for part in parts if len(parts) > 1 else ():
                self._verify([part], time.perf_counter())
            return
        count = len(logits)
        if not parts[0].run.guest:  # its steps are no sample of what rounds cost (K6)
            self._threads.took((time.perf_counter() - began) / self._drafting.dearer(count))
            self._drafting.took(count, _ms_since(began))
        first = 0
        for part, part_rows in zip(parts, rows, strict=True):
            self._taken(part, logits[first : first + part_rows.wanted], began, len(parts))
            first += part_rows.wanted

    def _taken(self, part: Part, logits: sampling.Logits, began: float, shared: int = 1) -> None:
        try:
            self._choose(part, logits, began, shared)
        except Exception as error:
            self._fault(part.run, error)

    def _choose(self, part: Part, logits: sampling.Logits, began: float, shared: int = 1) -> None:
        """What a run takes of a step that so many runs ``shared``; the rows it took stay."""
        run, draft = part.run, part.draft
        path = walk(run, logits, draft, self._before)
        if run.answer:
            self._loaded.caches[part.slot].keep(part.start, path)
            if not run.guest:
                self._keeper.wrote(part.slot, part.start, part.start + len(path))
        self._drafting.came(draft, run.written)
        ending = "stop" if run.finished else ""
        run.close(_ms_since(began), ending, drafted=len(draft), accepted=len(path) - 1, shared=shared)

    def _before(self, run: Sequence) -> None:
        """Where a test makes the choice of a token fail."""
        self._suffer(self._failpoints.harm("token", [run.position + 1]))

    def _forward(self, parts: list[Rows], threads: int) -> sampling.Logits:
        """Float32 logits ``[wanted, vocab]`` of all ``parts``, on the host: copying them waits for the device."""
        if threads != self._using:
            self._loaded.model.use(threads)
            self._using = threads
        logits: sampling.Logits = self._loaded.model.forward(parts).float().cpu().numpy()
        return logits

    def _suffer(self, harm: str) -> None:
        if harm == "die":
            self._line.leave(EXIT_CODE)
        if harm == "fault":
            raise FailpointFault
        if harm == "silent":
            stand_still()


def drafting_for(config: Config, loaded: Loaded, most: int) -> Drafting:
    """Who drafts with these settings: nobody where several rows are not what each is alone, or where that is off."""
    learned = config.draft_shape == "learned"
    shapes = Shapes(loaded.costs, learned) if config.speculate and most > 1 else None
    return Drafting(shapes, most, drafters(loaded.model, loaded.caches, learned), config.parallel_cut == "share")


def tell_of_graphs(model: registry.Model, epoch: int, line: Line) -> Graphs | None:
    """Have a model that records its rounds say when it does (see ``models/graphs.py``): by these, where it has any."""
    graphs: Graphs | None = getattr(model, "graphs", None)
    if graphs is not None:
        graphs.told = lambda begun: line.post(OwnWork(epoch, "graph capture", begun))
    return graphs


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def main(
    arguments: list[str], open_model: Callable[[Path], Checkpoint], build: Callable[..., registry.Model]
) -> NoReturn:
    """The process. ``open_model`` opens a checkpoint, ``build`` makes a model of it (see ``load``)."""
    config = msgspec.json.decode(arguments[0], type=Config)
    pipe = open_pipe()
    code = 1
    try:
        failpoints = Failpoints(config.failpoints)
        checkpoint = open_model(Path(config.model))
        loaded = load(config, checkpoint, build, pipe, failpoints)
        complain(windows_line(config, loaded, checkpoint.config.window))
        pipe.post(loaded.ready)
        Engine(config, loaded, pipe, failpoints).run()
    except (LoadFailed, CheckpointError) as error:
        complain(str(error))
        code = error.code if isinstance(error, LoadFailed) else 2
    except Exception as error:
        traceback.print_tb(error.__traceback__)  # places in the code, not the exception's text
        complain(f"the engine failed: {type(error).__name__}")
    pipe.leave(code)


def open_known(path: Path) -> Checkpoint:
    """Open a checkpoint of an architecture there is a builder for: that is said first, whatever else it holds."""
    checkpoint = open_checkpoint(path)
    registry.builder(checkpoint.architecture)
    return checkpoint


if __name__ == "__main__":
    main(sys.argv[1:], open_known, registry.build)
