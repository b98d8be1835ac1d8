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
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from engine import memory, sampling
from engine.failpoints import EXIT_CODE, FailpointFault, Failpoints
from engine.load import Line, Loaded, LoadFailed, load, stand_still
from engine.logprobs import token_logprob
from engine.models import registry
from engine.models.batch import Rows
from engine.pipe import complain, open_pipe
from engine.protocol import Config, FromEngine, Measure, Memory, Stop, ToEngine
from engine.sequence import Sequence, Slots, Step
from engine.threads import Threads
from engine.weights.checkpoint import Checkpoint, open_checkpoint
from engine.weights.errors import CheckpointError


class Engine:
    """The loop over safe points: read what arrived, commit what may be, compute one step."""

    def __init__(self, config: Config, loaded: Loaded, line: Line, failpoints: Failpoints) -> None:
        self._epoch, self._loaded, self._line, self._failpoints = config.epoch, loaded, line, failpoints
        count, known = len(loaded.caches), loaded.vocabulary
        self._slots = Slots(config.epoch, count, loaded.window, failpoints, known, loaded.masks)
        self._threads = Threads(loaded.ready.threads, loaded.one_s)
        self._using = loaded.ready.threads
        self._waiting = True  # nothing to compute: the next safe point waits for a message

    def run(self) -> NoReturn:
        """Run until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One safe point and at most one step."""
        for message in self._line.take(None if self._waiting else 0.0):
            self._take_in(message)
        self._say(self._slots.settle())
        turn = self._slots.turn()
        self._waiting = turn is None
        if turn is not None:
            self._compute(*turn)

    def _take_in(self, message: ToEngine) -> None:
        if isinstance(message, Measure):
            if message.epoch == self._epoch:
                self._line.post(self._measure(message))
        elif not isinstance(message, Stop):  # a stop never comes this far: the pipe's reader ends the process
            self._say(self._slots.handle(message))

    def _say(self, messages: list[FromEngine]) -> None:
        for message in messages:
            self._line.post(message)

    def _compute(self, slot: int, run: Sequence) -> None:
        """The next step of a run. An exception ends the run alone, told by its class: its text could hold a prompt."""
        try:
            with torch.inference_mode():
                if run.step is Step.PREFILL:
                    self._prefill(slot, run)
                else:
                    self._round(slot, run)
        except Exception as error:
            why = type(error).__name__
            complain(f"run {run.start.run} in slot {slot} ended by a fault: {why}")
            self._line.post(self._slots.fault(run, why))
            self._check_device()

    def _check_device(self) -> None:
        """Leave, to be started again, when the device itself is lost: every later run would end by a fault too."""
        try:
            torch.ones(1, device=self._loaded.device).add_(1).item()
        except Exception as error:
            complain(f"the device is lost: {type(error).__name__}")
            self._line.leave(1)

    def _prefill(self, slot: int, run: Sequence) -> None:
        """One step of the prompt; the last one's logits choose the first token."""
        began = time.perf_counter()
        self._suffer(self._failpoints.harm("chunk", [run.chunks + 1]))
        first, stop = run.chunk(self._loaded.steps.at(run.rows))
        logits = self._forward(slot, run.start.tokens[first:stop], first, self._loaded.ready.threads)
        self._line.post(run.read(stop, _ms_since(began), logits))
        if run.step is Step.ROUND and run.limit > 0:
            began = time.perf_counter()
            self._propose(run, logits, began)

    def _round(self, slot: int, run: Sequence) -> None:
        """The next token, one step past the last committed one; the first from the end that was kept of its prompt."""
        began = time.perf_counter()
        if not run.answer:
            assert run.end is not None  # a prompt that is read here has its first token chosen in the same step
            self._propose(run, run.end, began)
            return
        logits = self._forward(slot, run.answer[-1:], run.prompt + len(run.answer) - 1, self._threads.count)
        self._threads.took(time.perf_counter() - began)
        self._propose(run, logits, began)

    def _forward(self, slot: int, tokens: list[int], start: int, threads: int) -> sampling.Logits:
        """Float32 logits ``[vocab]`` of the last of ``tokens``, on the host: copying them waits for the device."""
        loaded = self._loaded
        if threads != self._using:
            torch.set_num_threads(threads)
            self._using = threads
        rows = Rows(loaded.caches[slot], tokens, start)
        logits: sampling.Logits = loaded.model.forward([rows])[-1].float().cpu().numpy()
        return logits

    def _propose(self, run: Sequence, raw: sampling.Logits, began: float) -> None:
        """The token the logits choose, with its log-probability where the run asks for that, as the next round.

        Where the thinking must be closed it is the forced one instead, whatever the logits say; the alternatives beside
        it are those of any token there.
        """
        start, position = run.start, len(run.answer)
        self._suffer(self._failpoints.harm("token", [position + 1]))
        if run.finished:  # the grammar allows nothing at all, as an empty pattern does
            run.propose([], _ms_since(began), ending="stop")
            return
        adjusted, token = run.adjusted(raw), run.forced
        if token is None:
            token = sampling.choose(adjusted, start.sampling, start.choice, position)
        else:
            sampling.highest(raw)  # a forward pass that went wrong is a fault here too
        asked = start.logprobs >= 0
        logprobs = [token_logprob(raw, adjusted, token, start.logprobs)] if asked else []
        run.propose([token], _ms_since(began), logprobs=logprobs)

    def _measure(self, message: Measure) -> Memory:
        """Read the memory. The workspace is that of the last step of a prefill of so many rows, which takes most."""
        loaded, ready = self._loaded, self._loaded.ready
        rows = max(1, min(message.rows, loaded.window))
        step = min(rows, loaded.steps.at(rows - 1))
        return Memory(
            message.epoch,
            message.run,
            allocated=ready.weights_bytes + ready.kv_bytes,
            reserved=memory.reserved(loaded.device),
            peak=memory.high_water(loaded.device),
            workspace=loaded.model.workspace(step, rows - step),
        )

    def _suffer(self, harm: str) -> None:
        if harm == "die":
            self._line.leave(EXIT_CODE)
        if harm == "fault":
            raise FailpointFault
        if harm == "silent":
            stand_still()


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
        loaded = load(config, open_model(Path(config.model)), build, pipe, failpoints)
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
