"""Weights in groups with a scale each, as quantisers other than ggml's leave them, put into a stored form.

====================  ==========================================================  ====================
kind                  a block                                                     bytes of a group
====================  ==========================================================  ====================
I4_32, _64, _128      codes, low nibbles of all bytes then high ones; float16     20, 36, 68
                      scale; the code that means 0; a byte of nothing
I8_32, _64, _128      codes; float16 scale                                        34, 66, 130
====================  ==========================================================  ====================

A weight is ``scale * (code - zero)``, of eight bits ``scale * code``. Codes, scales and zeros are kept exactly; a
row's blocks follow one another, so rows can be picked and stacked. ``engine/weights/quants.py`` reads the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.quants import GROUPS
from engine.weights.stored import Stored

CENTRE = 8
"""The code that means 0 in Q4_0."""


def widest(group: int) -> int:
    """The widest group there is a kind for that divides ``group``; 0: none."""
    return next((ours for ours in sorted(GROUPS, reverse=True) if group and group % ours == 0), 0)


def four(codes: Tensor, scale: Tensor, zero: Tensor) -> Stored:
    """Codes 0 … 15, uint8 ``[rows, groups, group]``; ``scale`` float16 and ``zero`` uint8, ``[rows, groups]``.

    Where every zero is the same middle code it is ggml's Q4_0 in another order: stored so, it stays smaller in memory.
    """
    if bool((zero == CENTRE).all()):
        repeats = codes.shape[-1] // 32
        scale = scale.repeat_interleave(repeats, -1)
        codes = codes.reshape(codes.shape[0], -1, 32)
        return _stored("Q4_0", codes, [_bytes(scale), _paired(codes)])
    rest = torch.stack([zero, torch.zeros_like(zero)], -1)
    return _stored(f"I4_{codes.shape[-1]}", codes, [_paired(codes), _bytes(scale), rest])


def eight(codes: Tensor, scale: Tensor) -> Stored:
    """Codes int8 ``[rows, groups, group]`` with their ``scale``, float16 ``[rows, groups]``."""
    return _stored(f"I8_{codes.shape[-1]}", codes, [codes.view(torch.uint8), _bytes(scale)])


def _paired(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def _bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float16)[..., None].contiguous().view(torch.uint8)


def _stored(kind: str, codes: Tensor, parts: list[Tensor]) -> Stored:
    rows, groups, group = codes.shape
    return Stored(kind, rows, groups * group, torch.cat(parts, -1).view(rows, -1))
