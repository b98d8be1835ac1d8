"""A stored matrix as something that multiplies. One rule decides in what form a matrix stays in memory.

====================  ==========================================  =============================================
stored                on the CPU                                  elsewhere (cuda)
====================  ==========================================  =============================================
F32, F16, BF16        as stored                                   as stored
Q4_0, Q4_1, Q4_K, I4  torch's packed four bits                    torch's packed four bits (a table or head: the
                                                                  file's bytes, decoded at each use)
Q8_0, I8 head         two packed four-bit planes                  the file's bytes, decoded at each use
Q8_0, I8, Q5_K, Q6_K  the file's bytes, decoded at each use       the file's bytes, decoded at each use
====================  ==========================================  =============================================

On a CPU that the native library was built for it is that library's packed form instead, of every kind
(``engine/native/matrix.py``).

``exact`` keeps everything as float32 instead: for tests and measurements only.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.native.matrix import Take, fresh, matrix
from engine.weights import cuda4, int4, quants
from engine.weights.cuda4 import Cuda4
from engine.weights.int4 import GROUP, Int4
from engine.weights.int8 import STRIP, Planes
from engine.weights.stored import Stored


class Linear(Protocol):
    """A matrix ``[rows, cols]`` that multiplies rows of activations and hands out rows of itself."""

    rows: int
    dtype: torch.dtype
    """What ``__call__`` wants its activations in."""

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` → ``[n, rows]``, in a float type of the form's own choice."""
        ...

    def gather(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` (int64 ``[n]``) as float32 ``[n, cols]``."""
        ...


class Dense:
    """A matrix kept in a float type, multiplied in that type."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.rows = weight.shape[0]
        self.dtype = weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` → ``[n, rows]`` of the weight's type."""
        return F.linear(x.to(self.dtype), self.weight)

    def gather(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` as float32."""
        return self.weight[ids].float()


class Blocks:
    """A quantised matrix kept as the file's own bytes and decoded to bfloat16 at each use, on any device.

    Plain and slow for single rows: the whole matrix is decoded for each. On cuda this is the path of most quantised
    kinds; it was written without such a device at hand and is not tuned for one.
    """

    dtype = torch.bfloat16

    def __init__(self, stored: Stored) -> None:
        self.kind, self.data, self.rows = stored.kind, stored.data, stored.rows

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return self.data.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` → bfloat16 ``[n, rows]``."""
        x = x.to(self.dtype)
        strips = [F.linear(x, quants.decode(self.kind, rows).to(self.dtype)) for rows in torch.split(self.data, STRIP)]
        return strips[0] if len(strips) == 1 else torch.cat(strips, -1)

    def gather(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` as float32."""
        return quants.decode(self.kind, self.data[ids])


class Side:
    """Matrices of different forms that share their input: their outputs side by side."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts
        self.rows = sum(p.rows for p in parts)
        self.dtype = parts[0].dtype if len({p.dtype for p in parts}) == 1 else torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return sum(p.nbytes for p in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` → ``[n, rows]``."""
        return torch.cat([p(x.to(p.dtype)) for p in self.parts], -1)

    def gather(self, ids: Tensor) -> Tensor:  # noqa: ARG002
        """Not a table: nothing looks rows up here."""
        raise TypeError("matrices side by side have no common rows")


Form = TypeVar("Form", Int4, Planes)

PACKED = ("Q4_0", "Q4_1", "Q4_K", *quants.FOURS)
PLANES = ("Q8_0", *quants.EIGHTS)


def linear(
    stored: Stored, device: torch.device, *, exact: bool = False, table: bool = False, take: Take = fresh
) -> Linear:
    """The form ``stored`` is multiplied in. ``table``: a token embedding or an output head. ``take``: room for it."""
    if exact:
        return Dense(quants.decode_stored(stored).to(device))
    native = matrix(stored, take) if device.type == "cpu" else None
    if native is not None:
        return native
    if stored.kind in quants.PLAIN:
        return Dense(stored.data.view(quants.PLAIN[stored.kind]).to(device))
    if device.type == "cpu" and int4.fits(stored.rows, stored.cols):
        if stored.kind in PACKED:
            return _filled(Int4(stored.rows, stored.cols), stored)
        if stored.kind in PLANES and table:
            return _filled(Planes(stored.rows, stored.cols), stored)
    if device.type == "cuda" and not table and cuda4.fits(stored, device):
        return Cuda4(stored, device)
    return Blocks(Stored(stored.kind, stored.rows, stored.cols, stored.data.to(device)))


def _filled(form: Form, stored: Stored) -> Form:
    """``form`` with the weights of ``stored``, in strips: what a vocabulary takes unpacked would triple the peak."""
    for start in range(0, stored.rows, STRIP):
        form.fill(start, quants.regrouped(quants.split(stored.kind, stored.data[start : start + STRIP]), GROUP))
    return form
