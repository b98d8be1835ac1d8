"""Matrices whose products come out bit for bit the same for a row, whatever rows are multiplied beside it.

Torch's kernels sum in an order of their own choice, and some choose by the number of rows. Speculation and joint
rounds stand on a row's bits being its own, so each kernel is tried, on the weights it is used with, and where it fails
its rows are multiplied one by one (on the CPU: as dear as so many steps) or filled up to a fixed number (elsewhere: a
few rows cost what one does). The choice depends on the machine and the weights' shape alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.weights.linear import Linear, Side

MOST = 32
"""Rows of a step that are made to come out alike."""

COUNTS = (1, 2, 7, 16)
"""Numbers of rows that are tried against ``MOST``: few, for a head's product is slow, and unlike in what is left over
of a kernel's blocks of 4, 8 or 16.
"""


class Each:
    """``linear`` a row at a time."""

    def __init__(self, linear: Linear) -> None:
        self._linear, self.rows, self.dtype = linear, linear.rows, linear.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that stay resident."""
        return self._linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` → ``[n, rows]``."""
        if x.shape[0] == 1:
            return self._linear(x)
        return torch.cat([self._linear(row) for row in torch.split(x, 1)])

    def gather(self, ids: Tensor) -> Tensor:
        """The rows ``ids`` as float32."""
        return self._linear.gather(ids)


class Filled(Each):
    """``linear`` of always ``MOST`` rows, those beyond ``x``'s own of zeros."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[n, cols]`` → ``[n, rows]``."""
        n = x.shape[0]
        return self._linear(F.pad(x, (0, 0, 0, MOST - n)))[:n]


def same(linear: Linear, cols: int, device: torch.device) -> bool:
    """Whether a row's product is the same bits in any of ``COUNTS`` rows and in ``MOST``."""
    made = torch.Generator().manual_seed(cols)
    x = torch.randn(MOST, cols, generator=made).to(device, linear.dtype)
    whole = linear(x)
    return all(torch.equal(linear(x[MOST - n :]), whole[MOST - n :]) for n in COUNTS)


class Choice:
    """Picks the form of each matrix; asks a kernel once for each shape it is used with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: dict[tuple[object, ...], bool] = {}

    def of(self, linear: Linear, cols: int) -> Linear:
        """``linear`` itself where it does, else what makes it do."""
        if isinstance(linear, Side):
            return Side([self.of(part, cols) for part in linear.parts])
        key = (type(linear), getattr(linear, "kind", ""), linear.dtype, linear.rows, cols)
        if key not in self._asked:
            self._asked[key] = same(linear, cols, self._device)
        if self._asked[key]:
            return linear
        return Each(linear) if self._device.type == "cpu" else Filled(linear)
