"""Reads a checkpoint's tensors into a model, one at a time, and keeps count of what stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.native import build, packed
from engine.native.matrix import Take, fresh
from engine.native.packed import Packed
from engine.weights import linear, quants
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.linear import Linear, Side
from engine.weights.stored import Stored, stack

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``, in bytes of the file."""


class Loader:
    """``nbytes``: bytes of every weight handed out so far, each counted once."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, exact: bool, progress: Progress) -> None:
        self._checkpoint, self._device, self._exact, self._progress = checkpoint, device, exact, progress
        self._names = checkpoint.names()
        self._done = 0
        self.nbytes = 0
        self.packed = _packed(checkpoint, progress) if device.type == "cpu" and not exact else None
        """Where packed matrices are kept between starts; None where nothing is packed."""

    def expect(self, names: set[str], ignored: set[str]) -> None:
        """Raise CheckpointError unless the file has exactly ``names``, and perhaps ``ignored`` ones.

        A tensor that the builder does not use (a bias, an expert) means another model than the one it would build.
        """
        if unknown := sorted(self._names - names - ignored):
            raise CheckpointError(
                f"The checkpoint has a tensor {unknown[0]}, which this architecture does not use here."
            )
        if missing := sorted(names - self._names):
            raise CheckpointError(f"The checkpoint has no tensor {missing[0]}; it is incomplete.")

    def read(self, name: str, rows: int, cols: int) -> Stored:
        """One tensor, checked against the shape that the configuration promises."""
        stored = self._checkpoint.read(name)
        quants.require_kind(stored.kind, name)
        if (stored.rows, stored.cols) != (rows, cols):
            raise CheckpointError(
                f"Tensor {name} is {stored.rows} × {stored.cols}, and the configuration says {rows} × {cols}; "
                "the checkpoint does not fit together."
            )
        self._done += stored.data.nbytes
        self._progress("weights", min(self._done, self._checkpoint.file_bytes), self._checkpoint.file_bytes)
        return stored

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight or the like, float32 ``[size]``."""
        vector = quants.decode_stored(self.read(name, 1, size)).view(-1).to(self._device)
        self.nbytes += vector.nbytes
        return vector

    def table(self, name: str, rows: int, cols: int) -> Linear:
        """A token embedding or an output head."""
        return self._keep(self._linear(self.read(name, rows, cols), table=True))

    def beside(self, parts: list[Stored]) -> Linear:
        """Matrices with a common input as one: stacked where they are of one kind, else side by side."""
        if len({p.kind for p in parts}) == 1:
            return self._keep(self._linear(stack(parts)))
        return self._keep(Side([self._linear(part) for part in parts]))

    def done(self) -> None:
        """Every tensor is read: what was packed now is kept for the next start."""
        if self.packed is not None:
            self.packed.done()

    def _linear(self, stored: Stored, *, table: bool = False) -> Linear:
        return linear.linear(stored, self._device, exact=self._exact, table=table, take=self._room(stored))

    def _room(self, stored: Stored) -> Take:
        """Room for a packed matrix. Float weights are packed faster than a kept file of them is checked."""
        if self.packed is None or stored.kind in quants.PLAIN:
            return fresh
        return partial(self.packed.take, packed.name_of(stored))

    def _keep(self, made: Linear) -> Linear:
        self.nbytes += made.nbytes
        return made


def _packed(checkpoint: Checkpoint, progress: Progress) -> Packed | None:
    if build.library() is None:
        return None
    try:
        return Packed.open(packed.identity_of(checkpoint.files, packed.layout()), progress)
    except OSError:  # reading on will say what is wrong with the files
        return None
