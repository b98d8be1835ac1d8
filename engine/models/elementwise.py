"""Functions of single elements whose bits are a row's own, whatever rows stand beside it.

Torch computes as many elements at once as a vector holds, and what is left over one at a time, with another exp. Where
the rest falls depends on the number of elements and, in a large call, on where it is cut between threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.models.layers import GRAIN

WHOLE = 32
"""Elements that leave no rest, in every instruction set torch is compiled for."""


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of each element of ``x`` ``[n, cols]``: no call has a rest or is cut."""
    cols = x.shape[1]
    x = F.pad(x, (0, -cols % WHOLE))
    rows = max(1, GRAIN // x.shape[1])
    made = [function(some.contiguous()) for some in torch.split(x, rows)]
    return (made[0] if len(made) == 1 else torch.cat(made))[:, :cols]
