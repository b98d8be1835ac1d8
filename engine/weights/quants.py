"""ggml's block formats and our own of groups, decoded with torch on any device.

Every quantised kind here comes down to ``w = scale * q + offset`` with one scale (and perhaps one offset) a group of
neighbouring weights, so each has one function that splits raw blocks into those parts; decoding and repacking both
start from the parts. Source of ggml's layouts: ggml-quants.c and ``gguf.quants``, which the tests compare with, bit for
bit; ours are made by ``engine/weights/grouped.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.weights.errors import CheckpointError
from engine.weights.stored import Stored


class Parts(NamedTuple):
    """``q`` uint8 or int8 ``[rows, groups, group]``; ``scale`` and ``offset`` float32 ``[rows, groups]``, exact."""

    q: Tensor
    scale: Tensor
    offset: Tensor | None


def _half(block: Tensor) -> Tensor:
    """The two bytes of a float16 in the last dimension, as float32 without that dimension."""
    return block.contiguous().view(torch.float16).float().squeeze(-1)


def _nibbles(qs: Tensor) -> Tensor:
    """Low nibbles of all bytes of the last dimension, then the high ones, as ggml orders them."""
    return torch.cat([qs & 15, qs >> 4], -1)


def _q4_0(blocks: Tensor) -> Parts:
    d = _half(blocks[..., :2])
    return Parts(_nibbles(blocks[..., 2:]), d, d * -8)


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks[..., :2]), None)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and minima of each Q4_K or Q5_K block, times its float16 pair: ``[rows, blocks, 8]``."""
    low, high, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat([low & 63, (mixed & 15) | ((low >> 2) & 48)], -1)
    minimum = torch.cat([high & 63, (mixed >> 4) | ((high >> 2) & 48)], -1)
    return (
        _half(blocks[..., 0:2])[..., None] * scale.float(),
        _half(blocks[..., 2:4])[..., None] * minimum.float(),
    )


def _pairs(qs: Tensor) -> Tensor:
    """128 bytes are four runs of 32; each holds the low nibbles of one group and the high nibbles of the next."""
    runs = qs.reshape(*qs.shape[:-1], 4, 32)
    return torch.stack([runs & 15, runs >> 4], -2).flatten(-3, -2)


def _grouped(q: Tensor, scale: Tensor, offset: Tensor | None) -> Parts:
    """From ``[rows, blocks, groups of a block, …]`` to ``[rows, groups, …]``."""
    return Parts(q.flatten(1, 2), scale.flatten(1, 2), None if offset is None else offset.flatten(1, 2))


def _q4_k(blocks: Tensor) -> Parts:
    scale, minimum = _k_scales(blocks)
    return _grouped(_pairs(blocks[..., 16:]), scale, -minimum)


def _q5_k(blocks: Tensor) -> Parts:
    scale, minimum = _k_scales(blocks)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[..., None, 16:48] >> shifts) & 1
    return _grouped(_pairs(blocks[..., 48:]) | (fifth << 4), scale, -minimum)


def _q6_k(blocks: Tensor) -> Parts:
    outer = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*outer, 2, 64)
    low = torch.stack([low & 15, low >> 4], -2).view(*outer, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., 128:192].reshape(*outer, 2, 1, 32) >> shifts) & 3).flatten(-3, -2)
    q = (low | (high << 4)).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _grouped(q.view(*outer, 16, 16), _half(blocks[..., 208:210])[..., None] * scales, None)


def _i4(blocks: Tensor) -> Parts:
    """Four-bit codes, float16 scale, the code that means 0, a byte of nothing."""
    codes = blocks.shape[-1] - 4
    scale = _half(blocks[..., codes : codes + 2])
    return Parts(_nibbles(blocks[..., :codes]), scale, scale * -blocks[..., codes + 2].float())


def _i8(blocks: Tensor) -> Parts:
    """Eight-bit codes, float16 scale."""
    return Parts(blocks[..., :-2].contiguous().view(torch.int8), _half(blocks[..., -2:]), None)


class Kind(NamedTuple):
    """``elements`` of a block lie in ``size`` bytes."""

    elements: int
    size: int
    split: Callable[[Tensor], Parts]


GGML = {
    "Q4_0": Kind(32, 18, _q4_0),
    "Q4_1": Kind(32, 20, _q4_1),
    "Q8_0": Kind(32, 34, _q8_0),
    "Q4_K": Kind(256, 144, _q4_k),
    "Q5_K": Kind(256, 176, _q5_k),
    "Q6_K": Kind(256, 210, _q6_k),
}

GROUPS = (32, 64, 128)
"""Columns that may share a scale in our own kinds."""

FOURS = {f"I4_{group}": Kind(group, group // 2 + 4, _i4) for group in GROUPS}
EIGHTS = {f"I8_{group}": Kind(group, group + 2, _i8) for group in GROUPS}

KINDS = GGML | FOURS | EIGHTS

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def require_kind(kind: str, name: str) -> None:
    """Raise CheckpointError when ``kind`` (the type of tensor ``name``) cannot be read."""
    if kind not in KINDS and kind not in PLAIN:
        known = ", ".join([*PLAIN, *GGML])
        raise CheckpointError(f"Tensor {name} is stored as {kind}, which is not supported; use one of {known}.")


def split(kind: str, data: Tensor) -> Parts:
    """The parts of quantised rows. ``data`` uint8 ``[rows, bytes of a row]``; lossless."""
    form = KINDS[kind]
    return form.split(data.view(data.shape[0], -1, form.size))


def regrouped(parts: Parts, group: int) -> Parts:
    """The same weights in groups of ``group``, which must divide theirs: scales and offsets repeat."""
    q, scale, offset = parts
    repeats = q.shape[-1] // group
    if repeats == 1:
        return parts
    if offset is not None:
        offset = offset.repeat_interleave(repeats, -1)
    return Parts(q.reshape(q.shape[0], -1, group), scale.repeat_interleave(repeats, -1), offset)


def decode(kind: str, data: Tensor) -> Tensor:
    """Rows as float32 ``[rows, cols]``, equal to ``gguf.quants.dequantize``. ``data`` uint8 ``[rows, row bytes]``."""
    if kind in PLAIN:
        return data.view(PLAIN[kind]).float()
    q, scale, offset = split(kind, data)
    weights = q.float().mul_(scale[..., None])
    if offset is not None:
        weights.add_(offset[..., None])
    return weights.flatten(1)


def decode_stored(stored: Stored) -> Tensor:
    """All of ``stored`` as float32 ``[rows, cols]``."""
    return decode(stored.kind, stored.data)
