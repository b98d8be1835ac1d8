"""Four-bit weights in torch's packed form for CUDA.

``_weight_int4pack_mm`` multiplies bfloat16 activations and accumulates in float32. A weight is
``scale * (code - 8) + zero``; scale and zero are rounded to bfloat16, codes are kept. Written without such a device at
hand: the tests that use one are marked ``gpu``, and what is packed is tested without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights import quants
from engine.weights.quants import Parts
from engine.weights.stored import Stored

KINDS = ("Q4_0", "Q4_1", "Q4_K", *quants.FOURS)
TILE, TILES = 8, 8
"""Rows of a tile, and the tiles of 16 columns that the kernel takes at a time."""
STRIP = 4096
"""Rows arranged at a time."""

CODES = torch.ops.aten._convert_weight_to_int4pack
MULTIPLY = torch.ops.aten._weight_int4pack_mm


def fits(stored: Stored, device: torch.device) -> bool:
    """Whether the kernel takes this matrix there: it needs an Ampere device or a later one."""
    if stored.kind not in KINDS or stored.rows % TILE or stored.cols % (16 * TILES) or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def arranged(parts: Parts) -> tuple[Tensor, Tensor]:
    """What the kernel's packing takes: codes uint8 ``[rows, cols / 2]``, and pairs bfloat16 ``[groups, rows, 2]``.

    A byte holds an even column's code above that of the next.
    """
    codes = parts.q.flatten(1)
    zero = parts.scale * 8 if parts.offset is None else parts.scale * 8 + parts.offset
    pairs = torch.stack([parts.scale.t(), zero.t()], -1)
    return (codes[:, ::2] << 4) | codes[:, 1::2], pairs.to(torch.bfloat16).contiguous()


class Cuda4:
    """A matrix ``[rows, cols]`` on a CUDA device. No table: rows cannot be looked up in the packed form."""

    dtype = torch.bfloat16

    def __init__(self, stored: Stored, device: torch.device) -> None:
        self.rows, self.group = stored.rows, quants.split(stored.kind, stored.data[:1]).q.shape[-1]
        packed, pairs = [], []
        for data in torch.split(stored.data, STRIP):
            codes, pair = arranged(quants.split(stored.kind, data.to(device)))
            packed.append(CODES(codes, TILES))
            pairs.append(pair)
        self.packed, self.pairs = torch.cat(packed), torch.cat(pairs, 1)

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return self.packed.nbytes + self.pairs.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` times the matrix, bfloat16 ``[n, rows]``."""
        product: Tensor = MULTIPLY(x.to(self.dtype).contiguous(), self.packed, self.group, self.pairs)
        return product

    def gather(self, ids: Tensor) -> Tensor:  # noqa: ARG002
        """Not a table: nothing looks rows up here."""
        raise TypeError("rows of a matrix packed for CUDA cannot be looked up")
