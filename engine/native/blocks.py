"""Pieces of the native library that models other than the dense ones are built from, on float32 tensors.

A row's numbers are the same bits in any batch, chain or tree, on any number of threads. All of them need
``lib.kernels()``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from engine.models.batch import Rows
from engine.native import lib
from engine.native.step import describe


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of ``[n, cols]``: ``x / sqrt(sum(x²) + eps) * weight``; both carry the count of columns."""
    x, out = x.contiguous(), torch.empty(x.shape)
    _library().tandem_norm(x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, out.data_ptr())
    return out


def attend(q: Tensor, kv: Tensor, part: Rows, scale: float, window: int = 0) -> Tensor:
    """The rows of ``part``, queries ``[n, heads, width]``, over ``kv``: ``[n, heads * width]``.

    ``kv``: ``[2 * kv_heads, rows, width]``, float16 or float32, with the rows of ``part`` in it. ``window``: rows a row
    sees, itself among them, 0 for all.
    """
    n, heads, width = q.shape
    if kv.dtype not in (torch.float16, torch.float32) or kv.stride()[1:] != (width, 1):
        raise ValueError("keys and values are rows of float16 or float32")
    if n != len(part.tokens) or not 0 <= part.start <= part.start + n <= kv.shape[1] or heads % (kv.shape[0] // 2):
        raise ValueError(f"{n} queries of {heads} heads behind row {part.start} do not fit keys {tuple(kv.shape)}")
    q, out = q.contiguous(), torch.empty(n, heads * width)
    numbers, ancestors = array("q"), array("q")
    describe(part, 0, numbers, ancestors)
    _library().tandem_attend(
        q.data_ptr(),
        numbers.buffer_info()[0],
        n,
        ancestors.buffer_info()[0],
        kv.data_ptr(),
        int(kv.dtype == torch.float16),
        kv.stride(0) * kv.element_size(),
        heads,
        kv.shape[0] // 2,
        width,
        scale,
        window,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def conv(inputs: Tensor, seen: Tensor | None, weight: Tensor) -> Tensor:
    """:func:`engine.models.delta.conv`."""
    width, channels = weight.shape
    n = inputs.shape[0] - width + 1 if seen is None else seen.shape[0]
    inputs, weight, out = inputs.contiguous(), weight.contiguous(), torch.empty(n, channels)
    seen = None if seen is None else seen.contiguous()
    _library().tandem_convolve(
        inputs.data_ptr(),
        None if seen is None else seen.data_ptr(),
        weight.data_ptr(),
        n,
        width,
        channels,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def recall(
    state: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    beta: Tensor,
    parents: Items[int] | None = None,
    *,
    seen: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over ``rows``, q, k ``[n, heads, keys]`` and v ``[n, heads, values]``: out, last state.

    ``parents`` None: a chain. ``seen`` False: only the state is wanted, out is empty. ``state`` stays as it is.
    """
    q, k, v = (x.contiguous() for x in rows)
    n, heads, keys = q.shape
    state, decay, beta = state.contiguous(), decay.contiguous(), beta.contiguous()
    out, last = torch.empty(v.shape if seen else 0), torch.empty(state.shape)
    _library().tandem_recall(
        state.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        None if parents is None else (ctypes.c_int64 * n)(*parents),
        n,
        heads,
        keys,
        v.shape[2],
        out.data_ptr() if seen else None,
        last.data_ptr(),
        torch.get_num_threads(),
    )
    return out, last


def _library() -> ctypes.CDLL:
    library = lib.kernels()
    assert library is not None
    return library
