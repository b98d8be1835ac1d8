"""Keys and values of one sequence, for the whole window at once."""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """``layers[i]`` is ``[2 * kv_heads, rows, head_dim]``: the keys of all heads, then the values.

    bfloat16, or float32 for an exact model. (float16 was tried: for the embedded model a KL of 7.3e-4 a token against
    7.6e-4, and attention over many rows takes 2.5 times as long on the CPU.) Allocated and written once here: a
    sequence that was let in never runs out of memory halfway.
    """

    def __init__(self, layers: int, kv_heads: int, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.rows = rows
        # Not torch.zeros: its pages are promised, not given, until they are written.
        self._all = torch.empty(layers, 2 * kv_heads, rows, head_dim, dtype=dtype, device=device).fill_(0)
        self.layers: list[Tensor] = list(self._all.unbind(0))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return self._all.nbytes
