"""Which builder serves which architecture. The only place that knows their names (N1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext
from ctypes import CDLL
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine import memory
from engine.models import dense, hybrid_loading
from engine.models.batch import Rows
from engine.models.cache import Cache
from engine.models.loading import Loader, Progress
from engine.native import build as native
from engine.pipe import complain
from engine.weights.checkpoint import Checkpoint, CheckpointError


class Model(Protocol):
    """What the worker runs."""

    window: int
    """Rows a sequence may have."""
    vocab: int
    """Token ids there are."""
    weights_bytes: int
    """Bytes of all weights that stay in memory; a tied head counts once."""
    kv_bytes_per_row: int
    """Bytes a row takes in a cache."""
    state_bytes: int
    """Bytes of recurrent states and convolution tails in a cache, whatever its rows; 0 without recurrent layers."""
    alike: int
    """Up to so many rows of a step, of all its parts together, come out bit for bit as they would alone."""
    path: str
    """How steps are computed, a word or two for people: what ``tandem doctor`` and ``/health`` show."""

    def new_cache(self, rows: int) -> Cache:
        """Room for ``rows`` rows, allocated and touched now."""
        ...

    def workspace(self, rows: int, start: int) -> int:
        """About how many bytes a step of ``rows`` new rows behind ``start`` takes beside weights and cache."""
        ...

    def forward(self, parts: Items[Rows]) -> Tensor:
        """One step. Logits, float32 ``[sum of wanted, vocab]``, part by part, on the model's device.

        The same rows in the same steps give the same bits; up to ``alike`` rows, whatever else the step holds. Raises
        ValueError when a part's rows do not fit into its cache.
        """
        ...

    def use(self, threads: int) -> None:
        """Processors for the steps from here on."""
        ...


class Builder(Protocol):
    """Makes a model of one architecture, its weights read through ``loader``."""

    def __call__(  # noqa: D102
        self, checkpoint: Checkpoint, loader: Loader, *, device: torch.device, rows: int, exact: bool
    ) -> Model: ...


BUILDERS: dict[str, Builder] = {
    "llama": partial(dense.build, neighbours=True),
    "mistral": dense.build,
    "qwen2": dense.build,
    "qwen3": dense.build,
    "qwen35": hybrid_loading.build,
    "qwen35moe": hybrid_loading.build,
    "qwen3_5": hybrid_loading.build,
    "qwen3_5_text": hybrid_loading.build,
    "qwen3_5_moe": hybrid_loading.build,
    "qwen3_5_moe_text": hybrid_loading.build,
}
"""By :attr:`~engine.weights.checkpoint.Checkpoint.architecture`."""


def builder(architecture: str) -> Builder:
    """The builder of ``architecture``. Raises CheckpointError that names it and those known."""
    if architecture not in BUILDERS:
        known = ", ".join(sorted(BUILDERS))
        raise CheckpointError(f"The architecture {architecture} is not supported; supported are {known}.")
    return BUILDERS[architecture]


def build(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    threads: int,
    rows: int,
    progress: Callable[[str, int, int], None],
    exact: bool = False,
) -> Model:
    """Read the weights and put the model together.

    ``threads``: torch's threads from here on, 0 leaves them. ``rows``: the longest sequence to serve, 0 for the
    checkpoint's window. ``progress(what, done, total)`` is called after each tensor, in bytes. ``exact``: weights and
    arithmetic in float32, for tests. Raises CheckpointError for what cannot be served.
    """
    make: Builder = builder(checkpoint.architecture)
    if threads:
        torch.set_num_threads(threads)
    wanted = device.type == "cpu" and not exact
    packs = wanted and _library_with(progress) is not None
    if wanted and not packs:
        complain(f"Steps run in torch, not in the native library: {native.why()}")
    loader = Loader(checkpoint, device, exact, progress)
    with _one_thread() if packs else nullcontext():
        model = make(checkpoint, loader, device=device, rows=rows, exact=exact)
    loader.done()
    memory.trim()
    return model


def _library_with(progress: Progress) -> CDLL | None:
    """The native library, said to be built while it is."""
    return native.opened(lambda: progress("native step", 0, 1)).library


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch with one thread. Packing is many short operations: two threads of them wait for each other's turn on a
    busy machine (measured: 26 s for two, 2 s for one).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


__all__ = ["BUILDERS", "Builder", "Model", "Progress", "build", "builder"]
