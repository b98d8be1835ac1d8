"""A weight matrix in the native library's form: packed once, multiplied without torch.

====================  =======================================  ==================
stored                codes                                    bytes of 32 weights
====================  =======================================  ==================
Q4_0                  four bits, float16 scale                 18
Q4_1                  four bits, float16 scale and offset      20
Q4_K                  four bits, float32 scale and offset      24
Q8_0                  eight bits, float16 scale                34
Q5_K                  eight bits, float32 scale and offset     40
Q6_K                  eight bits, two float32 scales           40
I4_32, _64, _128      four bits, float32 scale and offset      24
I8_32, _64, _128      eight bits, float16 scale                34
F32, F16, BF16        as stored                                128, 64, 64
====================  =======================================  ==================

Lossless: a row of the table comes out as the file's weights decode. The activations of a quantised matrix are rounded
to eight bits in groups of 32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.native import lib
from engine.native.lib import MatrixStruct
from engine.weights import quants
from engine.weights.quants import Parts
from engine.weights.stored import Stored

STRIP = 16
"""Rows whose weights lie together."""

GROUP = 32
"""Columns whose activations share a scale."""

AT_ONCE = 2048
"""Rows unpacked at a time: bounds what lies unpacked beside the matrix."""

Take = Callable[[int], tuple[Tensor, bool]]
"""Gives room for so many bytes, uint8, aligned, and whether they hold the matrix already."""


class Layout(NamedTuple):
    """How codes and scales are kept. A weight is ``scale * (code - centre)``, plus an offset in an offset's form.

    ``form`` FOUR takes codes 0 … 15, EIGHT -128 … 127. Forms of ``scale`` that say SHORT are for float16 values.
    """

    form: int
    scale: int
    group: int = GROUP
    centre: int = 0


LAYOUTS = {
    "Q4_0": Layout(lib.FOUR, lib.SHORT, centre=8),
    "Q4_1": Layout(lib.FOUR, lib.SHORT_OFFSET),
    "Q4_K": Layout(lib.FOUR, lib.LONG_OFFSET),
    "Q8_0": Layout(lib.EIGHT, lib.SHORT),
    "Q5_K": Layout(lib.EIGHT, lib.LONG_OFFSET),
    "Q6_K": Layout(lib.EIGHT, lib.LONG, group=16),
    **dict.fromkeys(quants.FOURS, Layout(lib.FOUR, lib.LONG_OFFSET)),
    **dict.fromkeys(quants.EIGHTS, Layout(lib.EIGHT, lib.SHORT)),
}
"""By the kinds' names."""

PLAIN = {
    kind: Layout(form, lib.NO_SCALE) for kind, form in (("F32", lib.FLOAT), ("F16", lib.HALF), ("BF16", lib.BRAIN))
}


def fresh(nbytes: int) -> tuple[Tensor, bool]:
    """Room of one's own."""
    room = torch.empty(nbytes + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + nbytes], False


class Matrix:
    """A :class:`~engine.weights.linear.Linear` of the native library. ``threads``: of a product, 0: torch's."""

    dtype = torch.float32

    def __init__(self, struct: MatrixStruct, data: Tensor) -> None:
        self.struct, self._data = struct, data
        self.rows, self.cols = struct.rows, struct.cols
        self.threads = 0

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return self._data.nbytes

    @property
    def pointer(self) -> int:
        """Where the structure lies that the library reads."""
        return ctypes.addressof(self.struct)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` → float32 ``[n, rows]``."""
        if x.dim() != 2 or x.shape[1] != self.cols:
            raise ValueError(f"activations {tuple(x.shape)} for {self.cols} columns")
        x = x.to(self.dtype).contiguous()
        out = torch.empty(x.shape[0], self.rows)
        _library().tandem_matrix_multiply(
            self.pointer, x.data_ptr(), x.shape[0], out.data_ptr(), self.threads or torch.get_num_threads()
        )
        return out

    def gather(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` (int64 ``[n]``) as float32 ``[n, cols]``. Raises IndexError for one there is not."""
        ids = ids.to(torch.int64).contiguous()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.rows:
            raise IndexError(f"a row that is not among {self.rows}")
        out = torch.empty(ids.shape[0], self.cols)
        _library().tandem_matrix_gather(self.pointer, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def part(self, first: int, rows: int) -> MatrixStruct:
        """Rows ``first`` …, both a multiple of the strip: a structure over the same bytes."""
        if first % STRIP or rows % STRIP:
            raise ValueError(f"rows {first} to {first + rows} are not whole strips")
        struct = MatrixStruct.from_buffer_copy(self.struct)
        struct.rows = rows
        struct.data = self._data.data_ptr() + first * (self.nbytes // -(-self.rows // STRIP)) // STRIP
        return struct


def _library() -> ctypes.CDLL:
    library = lib.kernels()
    assert library is not None
    return library


def matrix(stored: Stored, take: Take = fresh) -> Matrix | None:
    """``stored`` packed; None where there is no library or its form does not fit."""
    if lib.kernels() is None or stored.cols % GROUP:
        return None
    if stored.kind in PLAIN:
        return _plain(stored, take)

    def parts(first: int) -> Parts:
        return quants.split(stored.kind, stored.data[first : first + AT_ONCE])

    return quantised(stored.rows, stored.cols, LAYOUTS[stored.kind], parts, take)


def _plain(stored: Stored, take: Take) -> Matrix:
    made, filled = _room(MatrixStruct(*PLAIN[stored.kind], stored.rows, stored.cols), take)
    if not filled:
        data = stored.data.contiguous()
        _library().tandem_matrix_pack_plain(made.pointer, 0, stored.rows, data.data_ptr())
    return made


def quantised(rows: int, cols: int, layout: Layout, parts: Callable[[int], Parts], take: Take = fresh) -> Matrix | None:
    """A matrix of codes: ``parts(first)`` gives those of up to :data:`AT_ONCE` rows, in groups of 16 or of 32 · n.

    None where the columns do not fit. ``layout`` must hold what ``parts`` gives.
    """
    if cols % GROUP or lib.kernels() is None:
        return None
    made, filled = _room(MatrixStruct(*layout, rows, cols), take)
    for start in range(0, 0 if filled else rows, AT_ONCE):
        q, scale, offset = parts(start)
        # Longer groups than ours repeat their scale.
        repeats = max(1, int(q.shape[2]) // GROUP)
        scale = scale.repeat_interleave(repeats, -1).float().contiguous()
        codes = q.contiguous()
        if layout.scale in (lib.SHORT, lib.LONG):
            offset = None
        if offset is not None:
            offset = offset.repeat_interleave(repeats, -1).float().contiguous()
        _library().tandem_matrix_pack(
            made.pointer,
            start,
            q.shape[0],
            codes.data_ptr(),
            scale.data_ptr(),
            None if offset is None else offset.data_ptr(),
        )
    return made


def _room(struct: MatrixStruct, take: Take) -> tuple[Matrix, bool]:
    data, filled = take(_library().tandem_matrix_bytes(ctypes.byref(struct)))
    struct.data = data.data_ptr()
    if not filled:
        data.zero_()  # the last strip may not be whole
    return Matrix(struct, data), filled
