"""Rounds on cuda, each recorded once as a CUDA graph and then played: one launch in place of hundreds.

The round is ``fixed``'s: its shapes are the same whatever is in it, so one recording serves every round over the same
caches up to the same bucket of keys. Every round goes this way, recorded or not, of one sequence or several: what
cannot be recorded any more runs the same calls one by one and gives the same bits. So ``alike`` stands on one trial, at
load, before any answer (:func:`tried`); where that fails, for whatever reason, rounds are what they are without graphs.

Written without a CUDA device at hand: planning, attention, bookkeeping and the trial are tested on the CPU with a
recorder that only calls. :class:`Cuda`, and whether its kernels pass the trial, is not; its tests are marked ``gpu``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.models import fixed
from engine.models.alike import MOST
from engine.models.attention import paths
from engine.models.batch import Rows
from engine.models.cache import KV
from engine.models.fixed import Given
from engine.pipe import complain

GRAPHS = 24
"""Recordings that are kept: of each set of caches that decode together, one for each bucket in use."""

Play = Callable[[], None]
Key = tuple[tuple[KV, ...], int]
"""Caches, which are told apart by being the same, and the bucket of keys."""
Step = Callable[[Given, Items[KV]], Tensor]
"""Logits ``[MOST, vocab]``, float32, of a round in fixed shapes."""
Eager = Callable[[Items[Rows]], Tensor]


class Recorder(Protocol):
    """Makes something that can be played of something that can be run."""

    nbytes: int
    """Bytes that recordings hold."""

    def record(self, run: Play) -> Play:
        """``run`` recorded. It has run at least once when this returns, or not at all."""
        ...

    def free(self) -> None:
        """Give memory back; every recording must have been let go of."""
        ...


class Cuda:
    """CUDA graphs that share one pool of memory: they are played one behind another and keep nothing in it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.nbytes = device, 0
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def record(self, run: Play) -> Play:
        """Run on a side stream, so that kernels are chosen and loaded; then record there."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            run()
        here.wait_stream(self._stream)
        torch.cuda.empty_cache()  # recording does so itself, and the bytes below must not be less for it
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        play: Play = graph.replay
        return play

    def free(self) -> None:
        """The pool goes with its last graph."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool, self.nbytes = torch.cuda.graph_pool_handle(), 0


class Graphs:
    """The recordings of one model's rounds; the least recently played is let go of first.

    ``serves``: caches whose rounds are recorded, None: all (``--side-graphs off`` leaves the first slot's). ``told`` is
    called with True before a recording and with False behind it.
    """

    def __init__(
        self,
        step: Step,
        vocab: int,
        device: torch.device,
        recorder: Recorder,
        *,
        most: int = GRAPHS,
        serves: Container[KV] | None = None,
    ) -> None:
        self._step, self._device, self._recorder, self._most = step, device, recorder, most
        self.serves, self.vocab = serves, vocab
        self.told: Callable[[bool], None] = lambda _: None
        self.recording = True
        """False: nothing is recorded any more."""
        self._kept: OrderedDict[Key, Play] = OrderedDict()
        self._tables: dict[int, Tensor] = {}
        self._logits = torch.empty(MOST, vocab, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        """Recordings there are."""
        return len(self._kept)

    @property
    def graph_bytes(self) -> int:
        """Bytes of recordings and of what goes in and out. One let go of leaves its bytes to the others' pool."""
        still = [self._logits, *self._tables.values()]
        return self._recorder.nbytes + sum(tensor.nbytes for tensor in still)

    @property
    def recorded_bytes(self) -> int:
        """Bytes that letting go of all recordings gives back."""
        return self._recorder.nbytes

    def free(self) -> int:
        """Let go of all recordings; how many bytes that gave back. The next round is recorded anew."""
        freed = self._recorder.nbytes
        self._kept.clear()
        self._recorder.free()
        return freed

    def forward(self, parts: Items[Rows], blocks: int = 0) -> Tensor:
        """The round's logits ``[sum of wanted, vocab]``. ``blocks``: at least so many of shared keys, for the trial."""
        plan = fixed.plan(parts)
        count, blocks = len(parts), max(plan.blocks, blocks)
        if count not in self._tables:
            columns = fixed.OWN + fixed.OF_PART * count
            self._tables[count] = torch.zeros(MOST, columns, dtype=torch.int64, device=self._device)
        self._tables[count].copy_(torch.tensor(plan.table))
        self._play(plan.caches, blocks)
        return self._logits[torch.tensor(plan.wanted, dtype=torch.int64, device=self._device)]

    def _play(self, caches: tuple[KV, ...], blocks: int) -> None:
        key, run = (caches, blocks), partial(self._run, caches, blocks)
        if key not in self._kept and self.recording and self._wanted(caches):
            self._record(key, run)
        if key in self._kept:
            self._kept.move_to_end(key)
        self._kept.get(key, run)()

    def _wanted(self, caches: tuple[KV, ...]) -> bool:
        return self.serves is None or all(cache in self.serves for cache in caches)

    def _record(self, key: Key, run: Play) -> None:
        while len(self._kept) >= self._most:
            self._kept.popitem(last=False)
        self.told(True)
        try:
            self._kept[key] = self._recorder.record(run)
        except Exception as error:
            self.recording = False
            complain(f"no more rounds are recorded as graphs: {type(error).__name__}")
        finally:
            self.told(False)

    def _run(self, caches: Items[KV], blocks: int) -> None:
        self._logits.copy_(self._step(Given(self._tables[len(caches)], blocks), caches))


TREES = ([-1, 0, 1, 0, 3, -1], [-1, 0, 1], [-1, 0, 0, 2, 2])
"""What the trial puts into one round."""


def tried(graphs: Graphs, eager: Eager, new_cache: Callable[[int], KV], window: int, near: float) -> Graphs | None:
    """``graphs`` where they may serve: recorded rounds are what their calls give, and near what ``eager`` gives.

    ``near``: the relative error that is allowed there. And rows come out alike, see :func:`_alike`. Else None, which
    one sentence tells.
    """
    try:
        why = _refused(graphs, eager, new_cache, window, near)
        graphs.free()
    except Exception as error:
        why = type(error).__name__
    if why:
        complain(f"rounds run without graphs: {why}")
    return None if why else graphs


def _refused(graphs: Graphs, eager: Eager, new_cache: Callable[[int], KV], window: int, near: float) -> str:
    before, rows = min(window, 256) - MOST, min(window, 256)
    if before < MOST:
        return "the window is too short"
    made = torch.Generator().manual_seed(before)
    caches = [new_cache(rows) for _ in TREES]
    for cache in caches:
        cache.all.copy_(torch.randn(cache.all.shape, generator=made))
    vocab = graphs.vocab
    parts = [
        Rows(cache, torch.randint(0, vocab, (len(tree),), generator=made).tolist(), before, tree, len(tree), True)
        for cache, tree in zip(caches, TREES, strict=True)
    ]
    expected = eager(parts)
    first, again = graphs.forward(parts), graphs.forward(parts)
    if not graphs.recording:
        return "a round could not be recorded"
    graphs.recording = False
    graphs.free()
    plain = graphs.forward(parts)
    graphs.recording = True
    if not (torch.equal(first, plain) and torch.equal(again, plain)):
        return "a recorded round gave other numbers"
    if not bool((plain - expected).norm(dim=-1).le(near * expected.norm(dim=-1)).all()):
        return "the numbers are not those of other steps"
    return (
        ""
        if _alike(graphs, parts, plain, new_cache(min(window, 3 * fixed.BLOCK)))
        else "a row's numbers depend on its round"
    )


def _alike(graphs: Graphs, parts: list[Rows], joint: Tensor, cache: KV) -> bool:
    """Whether ``joint``, the trees' rows, are those of rounds of one row over a longer ``cache``, in any bucket."""
    expected = iter(joint)
    for part in parts:
        assert isinstance(part.cache, KV)
        for path in paths(part.parents or ()):
            cache.all[:, :, : part.cache.rows].copy_(part.cache.all)
            for depth, row in enumerate(path):
                one = [Rows(cache, part.tokens[row : row + 1], part.start + depth, draft=True)]
                last = graphs.forward(one)
            more = [graphs.forward(one, blocks) for blocks in (2, 4)]
            row_expected = next(expected)
            if not all(torch.equal(got[0], row_expected) for got in (last, *more)):
                return False
    return True
