"""A round in fixed shapes: always ``MOST`` rows, and attention whose every call has one shape, for ``graphs``.

A row's numbers must be its own (F8): the same in a chain, a tree, a round of one row, beside other sequences, over a
cache of any length. So they are computed in an order of the row's own position. Keys are cut where its position alone
says, at ``cut(position)``, never behind the round's first row. What lies before is shared by the rows of a sequence and
is taken in blocks of ``BLOCK``, each of one shape, summed one behind another; a block of which a row sees nothing adds
zeros. The rest, at most ``TAIL`` keys, is gathered for each row in the order of positions, its ancestors without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.models.alike import MOST
from engine.models.attention import paths
from engine.models.batch import Rows
from engine.models.cache import KV

BLOCK = 1024
"""Shared keys of a call."""
STEP = 64
"""Cuts are multiples of it."""
TAIL = STEP + MOST
"""Keys of a row's own: a cut is at most ``STEP - 1`` rows before the earliest begin its round can have."""

OWN, OF_PART = 3 + TAIL, 3
"""Columns of a table for each row, and for each row and part."""


def cut(position: int) -> int:
    """How many keys a row takes from what is shared: they lie before any round that can hold it."""
    return max(0, position - MOST + 1) // STEP * STEP


def bucket(keys: int) -> int:
    """Blocks that are computed for so many shared keys: a power of two, so that there are few shapes."""
    return 1 << (max(1, -(-keys // BLOCK)) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Plan:
    """A round as numbers. ``table``: ``MOST`` rows of ``OWN + OF_PART * parts`` columns, as :class:`Given` reads them.

    ``wanted``: which rows' logits are asked for. Rows that fill up stand at position 0 and see one key.
    """

    table: list[list[int]]
    caches: tuple[KV, ...]
    blocks: int
    wanted: list[int]


def plan(parts: Items[Rows]) -> Plan:
    """Lay out a round of at most ``MOST`` rows, each part over a cache of rows alone."""
    table: list[list[int]] = []
    wanted: list[int] = []
    owned: list[tuple[int, int, int]] = []
    for part in parts:
        first, n = len(table), len(part.tokens)
        owned.append((first, n, part.start))
        parents = range(-1, n - 1) if part.parents is None else part.parents
        for token, path in zip(part.tokens, paths(parents), strict=True):
            position = part.start + len(path) - 1
            shared = cut(position)
            tail = [*range(shared, part.start), *(part.start + at for at in path)]
            table.append([token, position, shared, *tail, *repeat(0, TAIL - len(tail))])
        wanted.extend(range(first + n - part.wanted, first + n))
    keys = max(row[2] for row in table)
    table.extend([0] * OWN for _ in range(MOST - len(table)))
    for first, n, start in owned:
        for index, row in enumerate(table):
            mine = first <= index < first + n
            # Others write the part's first row over again: what they write is what it holds.
            row.extend((1, index, start + index - first) if mine else (0, first, start))
    return Plan(table, tuple(part.cache for part in parts if isinstance(part.cache, KV)), bucket(keys), wanted)


class Given:
    """A table on the device, int64, read by columns; with the masks made of it, anew for each step."""

    def __init__(self, table: Tensor, blocks: int) -> None:
        self.tokens, self.positions, self._cut = table[:, :3].unbind(1)
        self.tail, self.blocks = table[:, 3:OWN], blocks
        self._parts = table[:, OWN:].view(table.shape[0], -1, OF_PART)
        self._hidden: dict[int, tuple[Tensor, Tensor]] = {}

    def mine(self, part: int) -> Tensor:
        """Which rows are the part's."""
        return self._parts[:, part, 0] != 0

    def moved(self, part: int) -> tuple[Tensor, Tensor]:
        """Which rows' keys and values are written, and to which rows of the part's cache."""
        return self._parts[:, part, 1], self._parts[:, part, 2]

    def hidden(self, window: int) -> tuple[Tensor, Tensor]:
        """What a row does not see, of the shared keys ``[MOST, blocks * BLOCK]`` and of its own ``[MOST, TAIL]``."""
        if window not in self._hidden:
            cuts, at = self._cut[:, None], self.positions[:, None]
            before = torch.arange(self.blocks * BLOCK, device=at.device)[None]
            own = cuts + torch.arange(TAIL, device=at.device)
            shared, tail = before >= cuts, own > at
            if window:
                shared, tail = shared | (before <= at - window), tail | (own <= at - window)
            self._hidden[window] = shared, tail
        return self._hidden[window]


def attend(q: Tensor, new: Tensor, kvs: Items[Tensor], given: Given, window: int) -> Tensor:
    """Queries ``[MOST, heads, head_dim]``, each over its own part's cache: ``[MOST, heads * head_dim]``, float32.

    ``new``, ``[2 * kv_heads, MOST, head_dim]``, are the rows' own keys and values, written to ``kvs`` here.
    """
    seen: Tensor | None = None
    for part, kv in enumerate(kvs):
        source, to = given.moved(part)
        kv.index_copy_(1, to, new[:, source].to(kv.dtype))
        own = over(q, kv, given, window)
        seen = own if seen is None else torch.where(given.mine(part)[:, None], own, seen)
    assert seen is not None
    return seen


def over(q: Tensor, kv: Tensor, given: Given, window: int) -> Tensor:
    """Attention of all rows over one cache; of rows that are not its own the numbers are finite and mean nothing."""
    n, heads, width = q.shape
    kv_heads = kv.shape[0] // 2
    blocks = min(given.blocks, -(-kv.shape[1] // BLOCK))
    few = q.view(n, kv_heads, -1, width).transpose(0, 1)  # [kv_heads, n, share, width]
    many = few.reshape(kv_heads, -1, width)
    shared, tail = given.hidden(window)
    shared = shared[:, None, : blocks * BLOCK].expand(-1, heads // kv_heads, -1).flatten(0, 1)
    # [2 * kv_heads, n, TAIL, width]; other parts' rows may lie further than this cache reaches.
    near = kv[:, given.tail.clamp(max=kv.shape[1] - 1)]
    keys, values = near[:kv_heads].flatten(0, 1), near[kv_heads:].flatten(0, 1)
    close = _product(few.flatten(0, 1), keys.transpose(1, 2)).mul_(width**-0.5)
    close = close.view(kv_heads, n, -1, TAIL).masked_fill_(tail[:, None], float("-inf"))
    far = [_product(many, _block(kv[:kv_heads], at).transpose(1, 2)) for at in range(blocks)]
    scores = torch.cat(far, -1).mul_(width**-0.5).masked_fill_(shared, float("-inf"))
    # A row sees itself, so the highest is finite. A highest is the same in any order.
    highest = torch.maximum(scores.amax(-1, keepdim=True), close.flatten(1, 2).amax(-1, keepdim=True))
    shares, own = scores.sub_(highest).exp_(), close.flatten(1, 2).sub(highest).exp_()
    total = torch.zeros_like(highest)
    out = torch.zeros(many.shape, device=q.device)
    for at, some in enumerate(torch.split(shares, BLOCK, -1)):
        total = total + some.sum(-1, keepdim=True)
        out = out + _product(some.to(kv.dtype), _block(kv[kv_heads:], at))
    total = total + own.sum(-1, keepdim=True)
    last = _product(own.to(kv.dtype).view(kv_heads * n, -1, TAIL), values)
    out = (out + last.view(out.shape)) / total
    return out.view(kv_heads, n, -1, width).transpose(0, 1).reshape(n, -1)


def _block(rows: Tensor, at: int) -> Tensor:
    """The block of keys or values, filled up where the cache ends in it."""
    block = rows[:, at * BLOCK : (at + 1) * BLOCK]
    return block if block.shape[1] == BLOCK else F.pad(block, (0, 0, 0, BLOCK - block.shape[1]))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Products of matrices, three dimensions each, in float32: scores in half the bits would not do."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        product: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
        return product
    return torch.bmm(a.float(), b.float())
