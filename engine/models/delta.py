"""The gated delta rule: a state that forgets, and is corrected by each row towards what that row's key should recall.

For one head, with key ``k``, value ``v``, query ``q``, a decay and a rate ``beta`` between 0 and 1::

    state = decay * state
    state = state + k (beta * (v - kᵀ state))ᵀ
    out   = qᵀ state

before it a causal convolution over few rows. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), and
transformers' ``modeling_qwen3_5.py``, which the tests compare with.

A row at a time (:func:`rows`, :func:`fold`) each row's numbers come from operations of one shape on its own state
alone, so they are the same bits in any batch, chain or tree, and folded in later or at once. :func:`chunk` is the same
for many rows in few matrix products; its bits are those of its cut. The native library's take the
place of ``conv``, ``rows`` and ``fold`` in ``ways.NATIVE``.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.models.elementwise import rowwise

CHUNK = 64
"""Rows that :func:`chunk` takes at once, counted from the step's first."""

EPS = 1e-6
"""Added to the squares of a query or key before they are brought to one length."""


class Sizes(NamedTuple):
    """Heads of keys and of values, and how wide they are.

    A head of keys serves the heads of values that follow one another; ``in_turn``: head i of values is served by head
    i modulo ``key_heads``.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    in_turn: bool = False


class Mixed(NamedTuple):
    """Rows behind the convolution: ``q``, ``k`` ``[n, value_heads, key_dim]``, ``v`` ``[n, value_heads, value_dim]``.

    ``k`` has length 1, ``q`` that of attention's scale; each head of keys serves several of values.
    """

    q: Tensor
    k: Tensor
    v: Tensor


def taps(paths: Items[Items[int]], width: int) -> list[list[int]]:
    """Which inputs each row's convolution sees, by index into the ``width - 1`` rows before and then the step's own.

    ``paths``: of each row those from the step's first down to itself.
    """
    before = list(range(width - 1))
    return [[*before, *(width - 1 + at for at in path)][-width:] for path in paths]


def conv(inputs: Tensor, seen: Tensor | None, weight: Tensor) -> Tensor:
    """Causal convolution a channel at a time, then silu: ``[n, channels]``.

    ``inputs``: ``[width - 1 + n, channels]``, rows before and the step's own. ``weight``: ``[width, channels]``.
    ``seen``: :func:`taps`, int64 ``[n, width]``; None: each row follows the one before it.
    """
    width, n = weight.shape[0], inputs.shape[0] - weight.shape[0] + 1
    parts = [inputs[at : at + n] if seen is None else inputs[seen[:, at]] for at in range(width)]
    total = parts[0] * weight[0]
    for part, tap in zip(parts[1:], weight[1:], strict=True):
        total.addcmul_(part, tap)
    return F.silu(total) if seen is None else rowwise(F.silu, total)


def unit(x: Tensor, size: float) -> Tensor:
    """Each of ``x`` ``[n, heads, width]`` with the length ``size``."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) * size


def split(mixed: Tensor, sizes: Sizes, unit: Callable[[Tensor, float], Tensor] = unit) -> Mixed:
    """Queries, keys and values out of the convolution's channels."""
    n, share = mixed.shape[0], sizes.value_heads // sizes.key_heads
    wide = sizes.key_heads * sizes.key_dim
    q = unit(mixed[:, :wide].reshape(n, sizes.key_heads, sizes.key_dim), sizes.key_dim**-0.5)
    k = unit(mixed[:, wide : 2 * wide].reshape(n, sizes.key_heads, sizes.key_dim), 1.0)
    v = mixed[:, 2 * wide :].reshape(n, sizes.value_heads, sizes.value_dim)
    if sizes.in_turn:
        return Mixed(q.repeat(1, share, 1), k.repeat(1, share, 1), v)
    return Mixed(q.repeat_interleave(share, 1), k.repeat_interleave(share, 1), v)


def rows(state: Tensor, mixed: Mixed, decay: Tensor, beta: Tensor, parents: Items[int]) -> tuple[Tensor, Tensor]:
    """Each row from its parent's state, -1: from ``state``. Gives ``[n, value_heads, value_dim]`` and the last's state.

    ``state`` float32 ``[value_heads, key_dim, value_dim]`` stays as it is. A row's state is let go behind its last
    child.
    """
    out = torch.empty_like(mixed.v)
    children = [sum(parent == row for parent in parents) for row in range(len(parents))]
    states: dict[int, Tensor] = {}
    last = state
    for row, parent in enumerate(parents):
        last = _advanced(state if parent < 0 else states[parent], mixed.k[row], mixed.v[row], decay[row], beta[row])
        out[row] = (last * mixed.q[row][:, :, None]).sum(1)
        if children[row]:
            states[row] = last
        if parent >= 0:
            children[parent] -= 1
            if not children[parent]:
                del states[parent]
    return out, last


def fold(state: Tensor, mixed: Mixed, decay: Tensor, beta: Tensor, count: int) -> Tensor:
    """The state behind the first ``count`` rows of a chain, bit for bit that of :func:`rows`."""
    for row in range(count):
        state = _advanced(state, mixed.k[row], mixed.v[row], decay[row], beta[row])
    return state


def _advanced(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Sums over a dimension, not matrix products: those choose their order by where a row happens to lie in memory."""
    state = state * decay[:, None, None]
    wrong = (v - (state * k[:, :, None]).sum(1)).mul_(beta[:, None])
    return state.addcmul_(k[:, :, None], wrong[:, None, :])


def chunk(state: Tensor, mixed: Mixed, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """A chain of many rows, ``CHUNK`` at a time. ``log_decay``, ``beta``: ``[n, value_heads]``."""
    out = [torch.empty_like(mixed.v[:0])]
    for first in range(0, mixed.v.shape[0], CHUNK):
        here = slice(first, first + CHUNK)
        part, state = _chunk(state, Mixed(*(x[here].transpose(0, 1) for x in mixed)), log_decay[here].T, beta[here].T)
        out.append(part.transpose(0, 1))
    return torch.cat(out), state


def _chunk(state: Tensor, mixed: Mixed, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """All by heads: ``[heads, rows, …]``.

    What each row corrects depends on what the rows before it in the chunk corrected: a triangular system, solved once
    for the values and once for what the chunk's first state already recalls.
    """
    q, k, v = mixed
    since = log_decay.cumsum(-1)
    between = since[:, :, None] - since[:, None, :]
    later = torch.ones_like(between[0], dtype=torch.bool).triu_(1)
    between = between.masked_fill(later, float("-inf")).exp()
    system = (k * beta[:, :, None]) @ k.transpose(1, 2) * between
    faded = since.exp()[:, :, None]
    wanted = torch.cat([v * beta[:, :, None], k * (beta[:, :, None] * faded)], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    fixed = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state
    out = (q * faded) @ state + (q @ k.transpose(1, 2) * between) @ fixed
    left = (since[:, -1:] - since).exp()[:, :, None]
    return out, state * faded[:, -1:] + (k * left).transpose(1, 2) @ fixed
