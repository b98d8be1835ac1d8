"""What a model keeps of one sequence: keys and values of its rows, and where it has recurrent layers their state."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint of what is not kept row by row: recurrent states and convolution tails after ``rows`` rows."""

    rows: int
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Loan:
    """A copy of all that a guest of ``rows`` rows can write, to be put back behind it."""

    rows: int
    tensors: dict[str, Tensor]
    state: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Cache(Protocol):
    """One sequence's. ``rows`` it has room for; what is in it is its owner's to know.

    A model without recurrent layers keeps everything row by row: for it ``mark`` gives None, ``rewind`` any row.
    """

    rows: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        ...

    def keep(self, start: int, path: Items[int]) -> None:
        """Of the draft rows that the last step put behind row ``start`` those of ``path`` stay, as rows ``start`` ….

        ``path``: indices into that step's tokens, each the parent of the next, the first one's parent -1. Recurrent
        layers fold the path in at the next step, from what they noted of its rows.
        """
        ...

    def rewind(self, rows: int) -> int:
        """Forget what is behind ``rows``; how many rows can be gone on from: ``rows`` where the state can be there.

        A recurrent state can go back by what the last two steps were, else to nothing: then 0, and ``go_back`` to a
        mark says where it stands.
        """
        ...

    def mark(self) -> Mark | None:
        """A checkpoint of the recurrent layers where they stand now; None where there are none."""
        ...

    def go_back(self, mark: Mark | None) -> None:
        """Put the recurrent layers where ``mark`` was made; None: before the first row."""
        ...

    def copy(self, first: int, stop: int) -> dict[str, Tensor]:
        """Copies of the keys and values of rows ``first`` … ``stop - 1``, rows first: ``[rows, …]`` each."""
        ...

    def put(self, first: int, rows: dict[str, Tensor]) -> None:
        """Write what ``copy`` gave to the rows from ``first`` on."""
        ...

    def lend(self, rows: int) -> Loan:
        """Copy all that a guest of at most ``rows`` rows can write, and make the cache a fresh one for it."""
        ...

    def take_back(self, loan: Loan) -> None:
        """Put everything back, bit for bit: an uninterrupted run's."""
        ...


class KV:
    """Of a model whose every layer attends. A :class:`Cache`.

    ``layers[i]`` is ``[2 * kv_heads, rows, head_dim]``: the keys of all heads, then the values. bfloat16, float16 for
    the native step, float32 for an exact model. (float16 was tried in torch: for the embedded model a KL of 7.3e-4 a
    token against 7.6e-4, and attention over many rows takes 2.5 times as long on the CPU.) Allocated and written once
    here: a sequence that was let in never runs out of memory halfway.
    """

    def __init__(self, layers: int, kv_heads: int, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.rows = rows
        # Not torch.zeros: its pages are promised, not given, until they are written.
        self.all = torch.empty(layers, 2 * kv_heads, rows, head_dim, dtype=dtype, device=device).fill_(0)
        self.layers: list[Tensor] = list(self.all.unbind(0))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self.all.nbytes

    def keep(self, start: int, path: Items[int]) -> None:
        """Move the rows of ``path`` together."""
        moved = [(to, at) for to, at in enumerate(path) if to != at]
        if moved:
            here = torch.tensor([start + at for _, at in moved], device=self.all.device)
            there = torch.tensor([start + to for to, _ in moved], device=self.all.device)
            self.all[:, :, there] = self.all[:, :, here]

    def rewind(self, rows: int) -> int:
        """Any row can be gone on from."""
        return rows

    def mark(self) -> Mark | None:
        """Nothing to keep."""
        return None

    def go_back(self, mark: Mark | None) -> None:
        """Nothing to go back to."""

    def copy(self, first: int, stop: int) -> dict[str, Tensor]:
        """``{"kv": [rows, layers, 2 * kv_heads, head_dim]}``."""
        return {"kv": self.all[:, :, first:stop].permute(2, 0, 1, 3).contiguous()}

    def put(self, first: int, rows: dict[str, Tensor]) -> None:
        """Write them back."""
        kv = rows["kv"]
        self.all[:, :, first : first + kv.shape[0]] = kv.permute(1, 2, 0, 3).to(self.all.device)

    def lend(self, rows: int) -> Loan:
        """The first ``rows`` rows are what a guest can write."""
        rows = min(rows, self.rows)
        return Loan(rows, {"kv": self.all[:, :, :rows].clone()})  # as they lie: quicker than ``copy``

    def take_back(self, loan: Loan) -> None:
        """The rows as they were."""
        self.all[:, :, : loan.rows] = loan.tensors["kv"]
