"""engine/weights/quants.py: ggml's blocks, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from engine.weights import quants
from engine.weights.errors import CheckpointError
from tests.checkpoints import KINDS, blocks


@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32 - 1), st.floats(1e-4, 500))
def test_every_kind_decodes_like_gguf(kind: str, rows: int, wide: int, seed: int, size: float) -> None:
    """N3: each block format gives exactly the numbers of the reference decoder."""
    data = blocks(kind, rows, wide * 256, seed, size)
    expected = gguf.quants.dequantize(data, GGMLQuantizationType[kind])
    assert np.array_equal(quants.decode(kind, torch.from_numpy(data)).numpy(), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_kinds_decode_like_gguf(kind: str) -> None:
    """N3: float tensors are read as they are."""
    values = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    expected = values if kind == "F32" else gguf.quants.dequantize(data, GGMLQuantizationType[kind])
    if kind == "F16":
        expected = values.astype(np.float16).astype(np.float32)
    assert np.array_equal(quants.decode(kind, torch.from_numpy(data)).numpy(), expected)


@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_parts_are_codes_and_scales(kind: str, seed: int) -> None:
    """Codes stay in their bits, and with their scales they are the whole weight."""
    data = torch.from_numpy(blocks(kind, 3, 512, seed))
    parts = quants.split(kind, data)
    low, high = {"Q8_0": (-128, 127), "Q5_K": (0, 31), "Q6_K": (-32, 31)}.get(kind, (0, 15))
    assert int(parts.q.min()) >= low and int(parts.q.max()) <= high
    weights = parts.q.float() * parts.scale[..., None]
    if parts.offset is not None:
        weights = weights + parts.offset[..., None]
    assert torch.equal(weights.flatten(1), quants.decode(kind, data))


def test_other_kinds_are_refused_by_name() -> None:
    """N3: a type that cannot be read is named, with its tensor and what to use instead."""
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight is stored as IQ2_XS.*Q4_K"):
        quants.require_kind("IQ2_XS", "blk.0.attn_q.weight")
