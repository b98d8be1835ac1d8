"""A matrix as it lies in a file: its kind, its shape, its bytes. Reads nothing and decodes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """``data`` is uint8 ``[rows, bytes of a row]``; a vector has one row. ``kind`` is ggml's name ("F32", "Q4_1", …).

    Every kind keeps a row's bytes together, so rows can be picked and stacked without decoding.
    """

    kind: str
    rows: int
    cols: int
    data: Tensor

    def pick(self, rows: Tensor) -> Stored:
        """The rows of the int64 index ``rows``, in its order."""
        return Stored(self.kind, int(rows.numel()), self.cols, self.data[rows])


def stack(parts: list[Stored]) -> Stored:
    """The rows of all ``parts``, one below the other. They must share kind and cols."""
    first = parts[0]
    return Stored(first.kind, sum(p.rows for p in parts), first.cols, torch.cat([p.data for p in parts]))


class Source(Protocol):
    """Where a checkpoint's tensors are read from, one at a time and only when asked."""

    def names(self) -> set[str]:
        """Canonical names: those of GGUF ("token_embd.weight", "blk.0.attn_q.weight", …) for every format."""
        ...

    def read(self, name: str) -> Stored:
        """The tensor's bytes, copied out of the file into memory of their own."""
        ...
