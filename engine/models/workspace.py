"""What a step of a dense decoder takes in torch beside weights and cache: bytes of the largest set of tensors at once.

Counted from what each form of a matrix makes of itself while it multiplies (J4); a test compares with the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from engine.native.matrix import Matrix
from engine.weights.config import Config
from engine.weights.cuda4 import Cuda4
from engine.weights.int4 import FEW_ROWS, Int4, fast_bfloat16
from engine.weights.int8 import STRIP, Planes
from engine.weights.linear import Blocks, Dense, Linear, Side

NATIVE_ROWS = 64
"""Rows whose activations the native library holds at a time, five and a half bytes each number."""


class Weights(Protocol):
    """The matrices of a layer."""

    @property
    def qkv(self) -> Linear: ...  # noqa: D102
    @property
    def out(self) -> Linear: ...  # noqa: D102
    @property
    def gate_up(self) -> Linear: ...  # noqa: D102
    @property
    def down(self) -> Linear: ...  # noqa: D102


def width(linear: Linear) -> int:
    """Bytes of a number of a product."""
    if isinstance(linear, Side):
        return max(width(part) for part in linear.parts)
    return linear.dtype.itemsize if isinstance(linear, Dense | Int4 | Blocks | Cuda4) else 4


def made(linear: Linear, n: int) -> int:
    """Bytes of a product of ``n`` rows."""
    return n * linear.rows * width(linear)


def taken(linear: Linear, cols: int, n: int) -> int:
    """Bytes at most in use while ``n`` rows are multiplied, the product among them."""
    rows, product = linear.rows, made(linear, n)
    if isinstance(linear, Side):
        return _side(linear, cols, n)
    if isinstance(linear, Int4) and n > FEW_ROWS:
        if not fast_bfloat16():
            return 2 * rows * cols + max(n * (cols + rows) * 4 + 4 * rows * cols, n * rows * 6)
        return max(4 * rows * cols, 2 * rows * cols + product)
    if isinstance(linear, Planes):
        return product * 2 if n <= FEW_ROWS else product + 10 * min(STRIP, rows) * cols
    if isinstance(linear, Blocks):
        strip = min(STRIP, rows)
        before = n * ((rows - 1) // STRIP) * STRIP * 2  # the strips before the last
        return max(before + 6 * strip * cols, product * (2 if before else 1) + (0 if before else 2 * strip * cols))
    if isinstance(linear, Matrix):
        return product + min(n, NATIVE_ROWS) * cols * 11 // 2
    return product


def _side(linear: Side, cols: int, n: int) -> int:
    """One part after another, then all put together."""
    before, most = 0, 2 * made(linear, n)
    for part in linear.parts:
        cast = n * cols * part.dtype.itemsize if part.dtype != linear.dtype else 0
        most = max(most, before + cast + taken(part, cols, n))
        before += made(part, n)
    return max(most, before + made(linear, n))


def masks(config: Config, n: int, start: int, size: int) -> tuple[int, int]:
    """Bytes of a chunk's masks, one for each width of a window, and of what the largest is made of."""
    kept, making = 0, 0
    for window in {config.seen(layer) for layer in range(config.layers)} if n > 1 else ():
        first = max(0, start + 1 - window) if window else 0
        keys = start + n - first
        narrow = bool(window) and keys > window
        if narrow or first < start:
            kept += n * keys * size
            making = max(making, n * keys if narrow else 0)
    return kept, making


def attending(n: int, keys: int, queries: int, width: int, size: int) -> int:
    """Bytes of what :func:`engine.models.layers.attend` gives, and of torch's kernel for the CPU, a thread."""
    rows = min(n, 256 if n >= 768 else 64 if n >= 192 else 32)
    scores = min(keys, 512) * (4 if size == 4 else 6)
    sums = 4 * n * queries // width
    return n * queries * size + sums + torch.get_num_threads() * rows * (scores + 4 * width + 8)


def of_step(config: Config, weights: Iterable[Weights], head: Linear, n: int, start: int, size: int) -> int:
    """Bytes for ``n`` rows behind ``start``; the cache's numbers are of ``size`` bytes. Logits are of one row."""
    queries = config.heads * config.head_dim
    wide = queries + 2 * config.kv_heads * config.head_dim
    seen = {config.seen(layer) for layer in range(config.layers)}
    mask, making = masks(config, n, start, size)  # they stay through all layers
    stream = n * 4 * (config.hidden + 1) + mask
    turned = n * queries * size if size < 4 else 0
    keys = start + n if 0 in seen else min(start, max(seen)) + n
    inside = max(making, attending(n, keys, queries, config.head_dim, size))
    most = max(config.vocab * 12, 4 * n * wide + turned + inside)  # the logits, copied to draw a token
    for layer in weights:
        normed = n * config.hidden * layer.qkv.dtype.itemsize
        gated = made(layer.gate_up, n)
        gated += gated // 2 + (n * config.ff * layer.down.dtype.itemsize if _cast(layer) else 0)
        # A product of 16 bits is widened to be added to the stream.
        added = n * config.hidden * 4 if width(layer.down) < 4 else 0
        most = max(
            most,
            n * config.hidden * (4 + layer.qkv.dtype.itemsize % 4),
            normed + taken(layer.qkv, config.hidden, n),
            4 * n * wide + max(made(layer.qkv, n) if width(layer.qkv) < 4 else 0, 4 * n * queries * config.qk_norm),
            4 * n * wide + turned + n * queries * (size + _other(layer.out, size)) + taken(layer.out, queries, n),
            normed + taken(layer.gate_up, config.hidden, n),
            gated + taken(layer.down, config.ff, n),
            gated + made(layer.down, n) + added,
        )
    return stream + max(most, config.hidden * 4 + taken(head, config.hidden, 1))


def _other(linear: Linear, size: int) -> int:
    """Bytes of a number that is cast for ``linear``; none where it is of its type."""
    return linear.dtype.itemsize if linear.dtype.itemsize != size else 0


def _cast(layer: Weights) -> bool:
    """What is gated has another type than its matrix takes."""
    return width(layer.gate_up) != layer.down.dtype.itemsize
