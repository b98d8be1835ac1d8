"""Eight-bit weights in groups of 32 as two packed four-bit matrices, for the CPU.

torch has no fast eight-bit kernel with a scale a group: its own takes one scale a row, which loses accuracy in a head.
But ``q = 16 * (high - 8) + low`` with two codes 0…15 is exact, so the four-bit kernel run twice gives the same product,
in the time of the eight-bit one. Costs 40 bytes for each 34 of the file.

Tried and left: the high plane alone for all rows and both for the likeliest 256. A tenth faster decode, but the tail's
error makes a KL of 1.2e-2 a token against 7e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.int4 import FEW_ROWS, GROUP, Int4
from engine.weights.quants import Parts

STRIP = 4096
"""Rows of a matrix decoded at a time: bounds what lies decoded beside the weights of a whole vocabulary."""


class Planes:
    """A matrix ``[rows, cols]`` of Q8_0. Lossless: the codes; the scale is rounded to bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, rows: int, cols: int) -> None:
        """Room for the matrix; :meth:`fill` gives it its weights."""
        self.rows, self.cols = rows, cols
        self.high, self.low = Int4(rows, cols), Int4(rows, cols)

    def fill(self, start: int, parts: Parts) -> None:
        """Give the rows from ``start`` on their int8 codes and scales."""
        code = parts.q.to(torch.int16) + 128
        self.high.fill(start, Parts((code >> 4).to(torch.uint8), parts.scale * 16, parts.scale * -128))
        self.low.fill(start, Parts((code & 15).to(torch.uint8), parts.scale, torch.zeros_like(parts.scale)))

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return self.high.nbytes + self.low.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` times the matrix, float32 ``[n, rows]``."""
        if x.shape[0] > FEW_ROWS:
            return self._many(x.float())
        x = x.to(torch.bfloat16)
        return self.high(x).float().add_(self.low(x))

    def _many(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self.rows)
        for start in range(0, self.rows, STRIP):
            ids = torch.arange(start, min(start + STRIP, self.rows))
            out[:, start : start + STRIP] = x @ self.gather(ids).t()
        return out

    def gather(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` (int64 ``[n]``), float32 ``[n, cols]``."""
        code = (self.high.codes(ids).to(torch.int16) << 4) + self.low.codes(ids) - 128
        scale = self.low.scales[:, ids, 0].float().t()
        return (code.view(ids.shape[0], -1, GROUP).float() * scale[..., None]).flatten(1)
