"""Where the rows of one part of a step stand, and attention over what each of them sees.

A chunk of a prompt is attended at once, under a mask. The rows of a round are attended one by one, each through the
call that a round of one row makes, so that a row's bits do not depend on what else was drafted beside it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from engine.models import layers
from engine.models.batch import Rows


def paths(parents: Items[int]) -> list[list[int]]:
    """Of each row the rows from the first one behind the prefix down to itself."""
    found: list[list[int]] = []
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise ValueError(f"row {row} cannot follow row {parent}")
        found.append([*(found[parent] if parent >= 0 else []), row])
    return found


class Place:
    """One part: ``n`` rows behind ``start``. ``positions``: where each stands, in rows from the sequence's begin."""

    def __init__(self, part: Rows) -> None:
        self.part, self.start, self.n = part, part.start, len(part.tokens)
        self.stop = self.start + self.n
        parents = list(range(-1, self.n - 1)) if part.parents is None else list(part.parents)
        if len(parents) != self.n:
            raise ValueError(f"{len(parents)} parents for {self.n} rows")
        self.chain = parents == list(range(-1, self.n - 1))
        self._paths = [] if self.chain else paths(parents)
        depths = range(self.n) if self.chain else [len(path) - 1 for path in self._paths]
        self.positions = [self.start + depth for depth in depths]
        self._masks: dict[int, Tensor | None] = {}

    def together(self, q: Tensor, new: Tensor, kv: Tensor, window: int) -> Tensor:
        """Queries ``[n, heads, head_dim]`` over the part's cache, all at once: ``[n, heads * head_dim]``.

        ``new``, ``[2 * kv_heads, n, head_dim]``, are the rows' own keys and values, written to ``kv`` here.
        ``window``: how many rows a row sees, itself among them; 0: all.
        """
        kv[:, self.start : self.stop].copy_(new)
        first = self._first(self.start, window)
        if window not in self._masks:
            self._masks[window] = self._mask(window, first, q.dtype, q.device)
        return layers.attend(q, kv[:, first : self.stop], self._masks[window])

    def each(self, q: Tensor, new: Tensor, kv: Tensor, window: int) -> Tensor:
        """The same a row at a time, each as if it alone were new: its ancestors lie before it without a gap.

        For that a branch's rows are put where they would be had they been chosen. Behind the last row all rows lie
        where ``together`` leaves them.
        """
        own, seen = slice(self.start, self.stop), []
        kv[:, own].copy_(new)
        placed = list(range(self.n))
        rows = kv[:, own].clone() if not self.chain else kv
        for row, position in enumerate(self.positions):
            for depth, at in enumerate([] if self.chain else self._paths[row]):
                if placed[depth] != at:
                    kv[:, self.start + depth] = rows[:, at]
                    placed[depth] = at
            seen.append(layers.attend(q[row : row + 1], kv[:, self._first(position, window) : position + 1], None))
        if not self.chain:
            kv[:, own] = rows
        return seen[0] if self.n == 1 else torch.cat(seen)

    def _first(self, position: int, window: int) -> int:
        return max(0, position + 1 - window) if window else 0

    def _mask(self, window: int, first: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What is not seen, added to scores: ``[n, stop - first]``; None where :func:`layers.attend` needs none."""
        narrow = window and self.stop - first > window
        if self.n == 1 or (self.chain and not narrow and (first == 0 or self.start == first)):
            return layers.causal_mask(self.n, self.start - first, dtype, device)
        at = torch.tensor(self.positions, device=device)
        keys = torch.cat([torch.arange(first, self.start, device=device), at])
        hidden = torch.ones(self.n, self.stop - first, dtype=torch.bool, device=device)
        hidden[:, : self.start - first] = False
        if self.chain:
            hidden[:, self.start - first :].triu_(1)
        for row, path in enumerate(self._paths):
            hidden[row, [self.start - first + seen for seen in path]] = False
        if narrow:
            hidden |= keys[None] <= at[:, None] - window
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
