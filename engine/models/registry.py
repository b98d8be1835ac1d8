"""Which builder serves which architecture. The only place that knows their names (N1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.models import llama
from engine.models.cache import Cache
from engine.models.loading import Loader, Progress, give_back
from engine.weights.checkpoint import Checkpoint, CheckpointError


class Model(Protocol):
    """What the worker runs; :class:`engine.models.llama.Llama` documents each part."""

    window: int
    vocab: int
    weights_bytes: int
    kv_bytes_per_row: int

    def new_cache(self, rows: int) -> Cache: ...  # noqa: D102
    def workspace(self, rows: int, start: int) -> int: ...  # noqa: D102
    def forward(self, tokens: Tensor, cache: Cache, start: int, *, all_rows: bool = False) -> Tensor: ...  # noqa: D102


class Builder(Protocol):
    """Makes a model of one architecture, its weights read through ``loader``."""

    def __call__(  # noqa: D102
        self, checkpoint: Checkpoint, loader: Loader, *, device: torch.device, rows: int, exact: bool
    ) -> Model: ...


BUILDERS: dict[str, Builder] = {"llama": llama.build}
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
    loader = Loader(checkpoint, device, exact, progress)
    model = make(checkpoint, loader, device=device, rows=rows, exact=exact)
    give_back()
    return model


__all__ = ["BUILDERS", "Builder", "Model", "Progress", "build", "builder"]
