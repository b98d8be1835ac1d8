"""Four-bit weights in torch's own packed form for the CPU, in groups of 32.

``_weight_int4pack_mm_for_cpu`` is fast for a few rows and slow for many (512 rows: half to a fifteenth of bfloat16's
speed, by CPU), so many rows decode the matrix to bfloat16 and multiply. The choice depends on the number of rows alone:
the same tokens in the same chunks give the same bits.

Lossless: the four-bit codes. Rounded: scale and zero, to bfloat16, because the kernel takes no other.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.weights.quants import Parts

GROUP = 32
"""Columns that share a scale."""

FEW_ROWS = 40
"""Up to so many rows the packed kernel is faster than decoding the matrix (measured: even between 40 and 60)."""

CODES = torch.ops.aten._convert_weight_to_int4pack_for_cpu
MULTIPLY = torch.ops.aten._weight_int4pack_mm_for_cpu


@cache
def tile() -> int:
    """Rows that torch interleaves in its packed form on this CPU: 64 or 32; 0 when it is neither.

    Asked of torch, not assumed: it depends on the vector width torch was built for and runs with. A byte holds a row's
    code below and, above it, that of the row half a tile further.
    """
    codes = torch.arange(128 * GROUP, dtype=torch.int32).view(128, GROUP).mul(7).remainder(13)
    packed = CODES(codes, 1)
    for rows in (64, 32):
        if torch.equal(_codes(packed, rows).int(), codes):
            return rows
    return 0


@cache
def fast_bfloat16() -> bool:
    """Whether this CPU multiplies two bfloat16 matrices no slower than float32: with AVX2 alone it takes 40 times as
    long (measured), a prompt of 64 rows 12 s.
    """
    return torch.backends.cpu.get_cpu_capability() != "AVX2"


def _codes(packed: Tensor, rows: int) -> Tensor:
    """All codes, uint8 ``[rows, cols]``, for a tile of ``rows``."""
    tiles = packed.view(packed.shape[0] // rows, -1, rows // 2)
    return torch.cat([tiles & 15, tiles >> 4], -1).transpose(1, 2).reshape(packed.shape[0], -1)


def fits(rows: int, cols: int) -> bool:
    """Whether a matrix of this shape can be packed."""
    return tile() > 0 and rows % tile() == 0 and cols % GROUP == 0


class Int4:
    """A matrix ``[rows, cols]``: ``packed`` uint8 ``[rows, cols / 2]``, ``scales`` bfloat16 ``[cols / 32, rows, 2]``.

    A weight is ``scale * (code - 8) + zero``, with the pair (scale, zero) in the last dimension of ``scales``.
    """

    dtype = torch.bfloat16

    def __init__(self, rows: int, cols: int) -> None:
        """Room for the matrix; :meth:`fill` gives it its weights."""
        self.rows, self.cols = rows, cols
        self.packed = torch.empty(rows, cols // 2, dtype=torch.uint8)
        self.scales = torch.empty(cols // GROUP, rows, 2, dtype=torch.bfloat16)

    def fill(self, start: int, parts: Parts) -> None:
        """Give the rows from ``start`` on (a multiple of the tile) their codes 0…15, scales and offsets."""
        codes, scale, offset = parts
        zero = scale * 8 if offset is None else scale * 8 + offset
        end = start + codes.shape[0]
        self.packed[start:end] = CODES(codes.flatten(1).to(torch.int32), 1)
        self.scales[:, start:end, 0] = scale.t()
        self.scales[:, start:end, 1] = zero.t()

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return self.packed.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` bfloat16 ``[n, cols]`` times the matrix, bfloat16 ``[n, rows]``."""
        if x.shape[0] <= FEW_ROWS:
            product: Tensor = MULTIPLY(x, self.packed, GROUP, self.scales)
            return product
        matrix = self.transposed()
        return x @ matrix if fast_bfloat16() else (x.float() @ matrix.float()).bfloat16()

    def transposed(self) -> Tensor:
        """The matrix decoded to bfloat16 and turned, ``[cols, rows]``; 1.1 ms a million weights on one core."""
        step = tile()
        tiles, groups = self.rows // step, self.cols // GROUP
        # Flipping bit 3 makes a code the two's complement of code - 8; arithmetic shifts then extend its sign.
        signed = (self.packed.view(tiles, self.cols, step // 2) ^ 0x88).view(torch.int8)
        codes = torch.empty(tiles, self.cols, step, dtype=torch.bfloat16)
        codes[..., : step // 2] = (signed << 4) >> 4
        codes[..., step // 2 :] = signed >> 4
        scale, zero = (
            self.scales[..., i].contiguous().view(groups, 1, tiles, step).permute(2, 0, 1, 3) for i in (0, 1)
        )
        turned = torch.empty(self.cols, self.rows, dtype=torch.bfloat16)
        out = turned.view(groups, GROUP, tiles, step).permute(2, 0, 1, 3)
        torch.addcmul(zero, codes.view(tiles, groups, GROUP, step), scale, out=out)
        return turned

    def codes(self, ids: Tensor) -> Tensor:
        """The codes of the rows ``ids`` (int64 ``[n]``), uint8 ``[n, cols]``."""
        half = tile() // 2
        tiles = self.packed.view(-1, self.cols, half)
        place = ids % tile()
        both = tiles[ids // tile(), :, place % half]
        return torch.where(place[:, None] < half, both & 15, both >> 4)

    def gather(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` (int64 ``[n]``), float32 ``[n, cols]``."""
        pair = self.scales[:, ids].float().transpose(0, 1)[:, :, None]
        codes = self.codes(ids).view(ids.shape[0], -1, GROUP).float() - 8
        return (codes * pair[..., 0] + pair[..., 1]).flatten(1)
