"""From a config to an engine that can run: open, describe, read the weights, allocate, check, measure.

Knows the order of a load and what is said during it. How a checkpoint is read and a model computes is behind
``Checkpoint`` and ``Model``, both given by the caller.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from engine import memory, sizes
from engine.failpoints import EXIT_CODE, Failpoints
from engine.grammar import Masks
from engine.models.batch import Rows
from engine.models.cache import Cache
from engine.models.registry import Model
from engine.pieces import Vocabulary, vocabulary
from engine.pipe import complain
from engine.prefix import MARKS
from engine.protocol import Config, Described, FromEngine, Loading, Ready, ToEngine, windows
from engine.steps import CHECK_ROWS, Steps, measured
from engine.weights.checkpoint import Checkpoint

Progress = Callable[[str, int, int], None]
Post = Callable[[FromEngine], None]

_DECODE_STEPS = 8
ROUND_ROWS = 32
"""The most rows of a round, of all its runs together."""
_CHECK_STEPS = 50
_BEAT_S = 0.25


class LoadFailed(Exception):
    """The engine cannot start; the text is a sentence for people, ``code`` what the process exits with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Line(Protocol):
    """The engine's end of the pipe, as far as the loop needs it."""

    def post(self, message: FromEngine) -> None:
        """Send."""

    def take(self, timeout: float | None) -> list[ToEngine]:
        """What has arrived; while there is nothing wait for ``timeout`` seconds, None: for ever."""

    def leave(self, code: int) -> NoReturn:
        """Send what was posted and exit."""


@dataclass(frozen=True)
class Loaded:
    """An engine ready to run: one cache a slot, of so many rows as ``windows`` says; the first has the whole window.

    ``one_s``: see ``one_thread``. ``costs``: of rounds, ms by their rows; more than one row only where drafts may be.
    """

    model: Model
    caches: list[Cache]
    windows: list[int]
    steps: Steps
    device: str
    one_s: float
    costs: dict[int, float]
    ready: Ready
    vocabulary: Vocabulary
    masks: Masks

    @property
    def window(self) -> int:
        """Rows of the longest run."""
        return self.windows[0]


def describe(config: Config, checkpoint: Checkpoint, engine: str, window: int, pieces: list[bytes]) -> Described:
    """What the checkpoint says of itself, with the window this engine gives it."""
    return Described(
        epoch=config.epoch,
        model=checkpoint.name,
        architecture=checkpoint.architecture,
        engine=engine,
        tokenizer=checkpoint.tokenizer_json,
        template=checkpoint.template,
        special=checkpoint.special,
        end_ids=list(checkpoint.end_ids),
        add_bos=checkpoint.add_bos,
        bos_id=checkpoint.bos_id,
        window=window,
        vocab=checkpoint.config.vocab,
        pieces=pieces,
    )


def load(
    config: Config, checkpoint: Checkpoint, build: Callable[..., Model], line: Line, failpoints: Failpoints
) -> Loaded:
    """Load the model of an opened checkpoint, saying how far it is. Raises ``LoadFailed`` with a sentence.

    ``Described`` goes out before the weights are read. It goes out a second time, with the window cut, if the
    checkpoint's own window turns out not to fit the memory.
    """
    began = time.perf_counter()
    device, threads = device_for(config), config.threads or processors()
    whole = memory.whole(device)
    torch.set_num_threads(threads)  # of what loads; the model's steps are told below
    native = checkpoint.config.window
    _refuse_bad(config, native)
    known = vocabulary(checkpoint.tokenizer_json, checkpoint.config.vocab)
    line.post(describe(config, checkpoint, "torch", config.max_len or native, known.pieces))
    _fail_here(failpoints, line)
    progress = throttled(config.epoch, line.post, time.monotonic)
    progress("weights", 0, checkpoint.file_bytes)
    model = build(
        checkpoint, device=torch.device(device), threads=threads, rows=config.max_len or native, progress=progress
    )
    model.use(threads)
    window = _window(config, native, model, device, memory.ceiling_of(whole, config.mem_ceiling))
    if window != (config.max_len or native):
        line.post(describe(config, checkpoint, "torch", window, known.pieces))
    rows = windows(window, config.parallel, config.side_max_len)
    caches = _allocate(model, rows)
    bench = Bench(model, caches[0], window, device, progress)
    check_s = self_check(bench)
    grid = config.prefix_chunk
    steps = Steps(grid, (config.safe_rows,)) if config.safe_rows else measured(grid, window, bench.step, bench.known)
    one_s = one_thread(bench, threads, device)
    costs = bench.rounds(ROUND_ROWS if config.speculate else 1)
    kv_bytes, prefill = _cache_bytes(model, rows), prefill_bytes(steps, model)
    bounds = memory.bounds(whole, prefill(window), config.mem_ceiling, config.mem_peak, config.slack)
    most = _most_rows(window, bounds.peak, model.weights_bytes + kv_bytes, prefill)
    ready = Ready(
        config.epoch,
        load_s=time.perf_counter() - began,
        safe_rows=steps.most,
        selfcheck_ms=check_s * 1000,
        prefill_rate=bench.prefill_rate(min(steps.most, window)),
        decode_rate=bench.decode_rate(),
        file_bytes=checkpoint.file_bytes,
        weights_bytes=model.weights_bytes,
        kv_bytes=kv_bytes,
        rss_bytes=memory.resident(),
        device=device,
        threads=threads,
        path=model.path,
        alike=model.alike,
        state_bytes=model.state_bytes,
        ceiling=bounds.ceiling,
        peak_limit=bounds.peak,
        slack=bounds.slack,
        workspaces=memory.heights(window, prefill),
        most_rows=most,
    )
    masks = Masks(known.pieces, checkpoint.end_ids, checkpoint.config.vocab)
    return Loaded(model, caches, rows, steps, device, one_s, costs, ready, known, masks)


def device_for(config: Config) -> str:
    """``cuda`` or ``cpu``. Raises ``LoadFailed`` for a device that is not there."""
    there = torch.cuda.is_available()
    if config.device == "auto":
        return "cuda" if there else "cpu"
    if config.device not in ("cpu", "cuda") or (config.device == "cuda" and not there):
        raise LoadFailed(f"There is no device {config.device!r} here.", 2)
    return config.device


def processors(group: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processors this process may use: those it may run on, and no more than a container's share of time.

    More threads than that share would wait for one another while the kernel holds some of them back.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *_share(group)]))


def _share(group: Path) -> Iterator[int]:
    """The control group's limit in processors, versions 2 and 1; where there is none it is no number, or -1."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        paths = [group / name for name in files]
        if all(path.exists() for path in paths):
            quota, period = " ".join(path.read_text() for path in paths).split()[:2]
            if quota.isdigit() and int(period) > 0:
                yield math.ceil(int(quota) / int(period))


def throttled(epoch: int, post: Post, clock: Callable[[], float]) -> Progress:
    """A progress callback that posts ``Loading`` at most four times a second, and each part's begin and end."""
    last = ("", 0.0)

    def progress(what: str, done: int, total: int) -> None:
        nonlocal last
        now = clock()
        if what != last[0] or done >= total or now - last[1] >= _BEAT_S:
            last = (what, now)
            post(Loading(epoch, what, done, total))

    return progress


class Bench:
    """Timed steps of a model over one cache; what they leave in it is written over by the first run.

    Each step is said, so that a slow machine's load is not taken for one that stands still.
    """

    def __init__(self, model: Model, cache: Cache, window: int, device: str, progress: Progress) -> None:
        self._model, self._cache, self._window, self._device = model, cache, window, device
        self._progress, self._steps = progress, 0
        self.rows = min(CHECK_ROWS, window)
        self.known: dict[int, float] = {}
        """The least seconds so far of steps at the window's begin, by their rows."""

    def logits(self, rows: int, start: int, draft: bool = False) -> Tensor:
        """Float32 logits ``[vocab]`` after ``rows`` rows of a fixed prompt put at ``start``, on the CPU.

        ``draft``: as rows of a round, of all of which logits are wanted.
        """
        self._progress("check", self._steps, _CHECK_STEPS)
        self._steps = min(self._steps + 1, _CHECK_STEPS - 1)  # how many it takes is not known beforehand
        tokens = ((torch.arange(rows) * 7919 + 13) % self._model.vocab).tolist()
        self._cache.go_back(None)  # a recurrent state begins anew, so that the same rows give the same logits
        with torch.inference_mode():
            part = Rows(self._cache, tokens, start, wanted=rows if draft else 1, draft=draft)
            logits = self._model.forward([part]).float().cpu()[-1]
        if draft:
            self._cache.keep(start, [0])
        return logits

    def use(self, threads: int) -> None:
        """Processors for the steps from here on."""
        self._model.use(threads)

    def timed(self, rows: int, start: int, draft: bool = False) -> tuple[Tensor, float]:
        """What ``logits`` gives, and the seconds it took."""
        began = time.perf_counter()
        logits = self.logits(rows, start, draft)
        seconds = max(time.perf_counter() - began, 1e-9)
        if not start and not draft:
            self.known[rows] = min(seconds, self.known.get(rows, seconds))
        return logits, seconds

    def step(self, rows: int, start: int, draft: bool = False) -> float:
        """Seconds of a step."""
        return self.timed(rows, start, draft)[1]

    def decoded(self) -> list[Tensor]:
        """Float32 logits ``[vocab]`` of a large round and of decode steps near the window's begin, middle and end.

        The round comes first and at row 0: so each reads the same rows whenever this is called.
        """
        joint = self.logits(self._most(ROUND_ROWS), 0, True)
        return [joint, *(self.logits(1, start) for start in (0, self._window // 2, self._window - 1))]

    def prefill_rate(self, rows: int) -> float:
        """Rows a second in steps of so many at the window's begin: the best of two tries or of more before."""
        tries = 1 if rows in self.known else 2
        return rows / min([self.step(rows, 0) for _ in range(tries)] + [self.known[rows]])

    def decode_rate(self) -> float:
        """Rows a second, one at a time."""
        start = min(self.rows, self._window - 1)
        return 1.0 / statistics.median(self.step(1, start) for _ in range(_DECODE_STEPS))

    def rounds(self, most: int) -> dict[int, float]:
        """Milliseconds of rounds by their rows: 1, 2, 4, … up to ``most``, and to what come out alike (``Model``).

        The better of two tries each, near the window's begin: attention, which grows, is the same for all of them.
        """
        room = self._most(most)
        start = min(self.rows, self._window - room)
        sizes = [1 << n for n in range(room.bit_length()) if 1 << n <= room]
        return {rows: 1000 * min(self.step(rows, start, True) for _ in range(2)) for rows in sizes}

    def _most(self, most: int) -> int:
        """Rows of the largest round, where ``most`` are wanted."""
        return max(1, min(most, self._model.alike, self._window))


def self_check(bench: Bench) -> float:
    """Seconds of the second of two passes over a fixed prompt. Raises ``LoadFailed``: not finite, or not equal."""
    first = bench.logits(bench.rows, 0)
    second, seconds = bench.timed(bench.rows, 0)
    if not bool(torch.isfinite(first).all()):
        raise LoadFailed("The self-check failed: the model's logits are not finite.", 4)
    if not torch.equal(first, second):
        raise LoadFailed("The self-check failed: the same prompt gave other logits the second time.", 4)
    return seconds


def one_thread(bench: Bench, threads: int, device: str) -> float:
    """Seconds of a decode step with one thread; 0 when it must not be taken: nothing to choose, or other bits (F8)."""
    if device != "cpu" or threads == 1:
        return 0.0
    all_threads = bench.decoded()
    bench.use(1)
    try:
        same = all(torch.equal(a, b) for a, b in zip(all_threads, bench.decoded(), strict=True))
        return 1.0 / bench.decode_rate() if same else 0.0
    finally:
        bench.use(threads)


def _refuse_bad(config: Config, native: int) -> None:
    if config.safe_rows and config.prefix_chunk % config.safe_rows:
        raise LoadFailed(f"--safe-rows {config.safe_rows} does not divide --prefix-chunk {config.prefix_chunk}.", 2)
    if config.max_len:  # what can be known before the weights are read is said before
        _fitting(config.max_len, native, 0, 0)


def _fail_here(failpoints: Failpoints, line: Line) -> None:
    if failpoints.fires("die_at_load"):
        line.leave(EXIT_CODE)
    if failpoints.fires("stall_load"):
        stand_still()


def stand_still() -> None:
    """Do nothing, for ever: what a hung engine does."""
    while True:
        time.sleep(3600)


def prefill_bytes(steps: Steps, model: Model) -> Callable[[int], int]:
    """What the prefill of a prompt takes, by its rows."""
    return lambda rows: memory.of_prefill(rows, steps.grid, steps.at, model.workspace)


def _most_rows(window: int, peak: int, held: int, prefill: Callable[[int], int]) -> int:
    """The longest prompt that may be read with weights and caches alone ``held``. Raises ``LoadFailed``: none may."""
    most = memory.longest(window, peak - held, prefill)
    if not most:
        needed = memory.gib(held + prefill(1))
        raise LoadFailed(f"--mem-peak-gib allows {memory.gib(peak)}: a prompt of one token needs {needed}.", 3)
    return most


def _window(config: Config, native: int, model: Model, device: str, ceiling: int) -> int:
    taken = max(memory.reserved(device) - memory.loose(device), model.weights_bytes)
    room = memory.room(memory.free(device), ceiling - taken)
    bound = f" --mem-ceiling-gib allows {memory.gib(ceiling)} in all." if room == ceiling - taken else ""
    room -= (model.state_bytes + marks_bytes(model.state_bytes)) * config.parallel
    sides = config.parallel - 1, config.side_max_len
    window, cut = _fitting(config.max_len, native, model.kv_bytes_per_row, room, sides, bound)
    if cut:
        complain(cut + bound)
    return window


def _fitting(
    asked: int, native: int, per_row: int, room: int, sides: tuple[int, int] = (0, 0), bound: str = ""
) -> tuple[int, str]:
    """As ``memory.fit``. ``bound``: a sentence of what bounds the ``room``."""
    try:
        return memory.fit(asked, native, per_row, room, *sides)
    except memory.DoesNotFit as error:
        raise LoadFailed(f"{error}{bound}", 3) from None


def marks_bytes(state: int) -> int:
    """Bytes that the checkpoints of one slot can come to. Each is one of the two states that take ``state``."""
    return MARKS * state // 2


def windows_line(config: Config, loaded: Loaded, native: int) -> str:
    """What the window that was taken, half and double of it take and leave, for the log (row I8)."""
    model, ready = loaded.model, loaded.ready
    held = sizes.Model(
        model.weights_bytes, model.kv_bytes_per_row, model.state_bytes, marks_bytes(model.state_bytes)
    )  # fmt: skip
    every = sizes.around(held, loaded.window, config.parallel, config.side_max_len)
    free = memory.free(loaded.device) + every[0].together
    beside = max(memory.reserved(loaded.device) - every[0].together, 0)
    return f"[engine] {sizes.line(every, sizes.Machine(free, ready.ceiling - beside), native)}"


def _cache_bytes(model: Model, rows: list[int]) -> int:
    """Bytes of the caches of sequences with so many rows each."""
    return sum(rows) * model.kv_bytes_per_row + len(rows) * model.state_bytes


def _allocate(model: Model, rows: list[int]) -> list[Cache]:
    try:
        return [model.new_cache(count) for count in rows]
    except (MemoryError, RuntimeError):  # torch says RuntimeError on the CPU, a subclass of it on cuda
        size = memory.gib(_cache_bytes(model, rows))
        text = f"{size} of memory for the KV rows of {sum(rows)} tokens could not be allocated."
        raise LoadFailed(text, 3) from None
