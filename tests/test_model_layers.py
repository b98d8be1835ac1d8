"""engine/models/layers.py: each piece against its plain formula. (test_layers.py reads imports.)"""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models import layers
from engine.weights.checkpoint import CheckpointError
from engine.weights.config import Config, RopeScaling

CONFIG = Config(1, 96, 4, 2, 32, 64, 300, 1e-5, 10000.0, 128, False)


@given(st.integers(1, 5), st.integers(1, 700), st.sampled_from([1e-6, 1e-5, 0.1]), st.floats(0.0, 30.0))
def test_the_norm_is_rms_norm_with_its_eps(n: int, hidden: int, eps: float, size: float) -> None:
    """Also where eps matters: rows near zero."""
    x, weight = torch.randn(n, hidden) * size, torch.randn(hidden)
    stream = layers.Stream(x, eps)
    got = stream.normed(layers.norm_weight(weight), torch.float32)
    expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert stream.normed(weight, torch.bfloat16).dtype == torch.bfloat16


def test_layers_add_to_the_stream_and_the_last_row_stays() -> None:
    stream = layers.Stream(torch.ones(3, 4), 1e-5)
    stream.x.add_(torch.arange(3)[:, None])
    stream.pick(slice(2, None))
    assert torch.equal(stream.x, torch.full((1, 4), 3.0))
    assert torch.allclose(stream.normed(layers.norm_weight(torch.ones(4)), torch.float32), torch.ones(1, 4))


def test_rotation_turns_neighbours_by_their_angle() -> None:
    """Row r turns pair p by r * base^(-2p/d), and lengths stay."""
    frequency = layers.frequencies(CONFIG, None)
    assert torch.allclose(frequency, 10000.0 ** -(torch.arange(16).double() * 2 / 32).float())
    turns = layers.rotations(frequency, 8, torch.device("cpu"))
    heads = torch.randn(8, 3, 32)
    before = heads.clone()
    layers.rotate(heads, turns)
    assert torch.equal(heads[0], before[0])
    angle = 5 * float(frequency[3])
    a, b = before[5, 1, 6:8].tolist()
    expected = [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    assert heads[5, 1, 6:8].tolist() == pytest.approx(expected, abs=1e-5)


def test_scalings_divide_frequencies() -> None:
    """N3: by one factor, by the file's own divisors, or by a ramp."""
    plain = layers.frequencies(CONFIG, None)
    scaled = Config(1, 96, 4, 2, 32, 64, 300, 1e-5, 10000.0, 128, False, RopeScaling("linear", 4.0))
    assert torch.equal(layers.frequencies(scaled, None), plain / 4)
    divided = Config(1, 96, 4, 2, 32, 64, 300, 1e-5, 10000.0, 128, False, RopeScaling("factors"))
    factors = torch.arange(1, 17).float()
    assert torch.equal(layers.frequencies(divided, factors), plain / factors)
    for wrong in (None, torch.ones(3)):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            layers.frequencies(divided, wrong)
    ramp = Config(1, 96, 4, 2, 32, 64, 300, 1e-5, 10000.0, 128, False, RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
    ratio = plain / layers.frequencies(ramp, None)
    assert float(ratio[0]) == pytest.approx(1) and float(ratio[-1]) == pytest.approx(8)
    assert bool((ratio.diff() >= -1e-5).all())


def test_yarn_slows_pairs_that_turn_seldom() -> None:
    """N3: from beta_fast turns over the original window on a pair stays, under beta_slow it is slowed by the factor."""
    plain = layers.frequencies(CONFIG, None)
    scaling = RopeScaling("yarn", 4.0, original_window=64, beta_fast=4.0, beta_slow=0.1, truncate=False)
    config = msgspec.structs.replace(CONFIG, rope_scaling=scaling)
    ratio = plain / layers.frequencies(config, None)
    turns = 64 * plain / (2 * math.pi)
    assert torch.allclose(ratio[turns > 4], torch.ones(1)) and bool((turns > 4).any())
    assert torch.allclose(ratio[turns < 0.1], torch.full((1,), 4.0)) and bool((turns < 0.1).any())
    between = ratio[(turns < 4) & (turns > 0.1)]
    assert len(between) > 1 and bool(((between > 1) & (between < 4)).all())
    turned = layers.rotations(plain, 4, torch.device("cpu"), 1.25)
    assert torch.allclose(turned.abs(), torch.full((1,), 1.25))


def test_only_a_part_of_a_head_is_turned() -> None:
    """N3: the angles are those of a head as wide as the part; the rest stays as it is."""
    config = msgspec.structs.replace(CONFIG, rotary=8)
    frequency = layers.frequencies(config, None)
    assert torch.equal(frequency, layers.frequencies(msgspec.structs.replace(CONFIG, head_dim=8), None))
    heads = torch.randn(5, 3, 32)
    part = heads[..., :8].clone()
    turn, rest = layers.rotations(frequency, 5, torch.device("cpu")), heads[..., 8:].clone()
    layers.rotate(heads, turn)
    layers.rotate(part, turn)
    assert torch.equal(heads[..., :8], part) and torch.equal(heads[..., 8:], rest)


@given(st.integers(1, 4), st.sampled_from([2, 16, 64]), st.sampled_from([1e-6, 0.1]))
def test_heads_are_normed_one_by_one(n: int, width: int, eps: float) -> None:
    """N3: RMS norm over a head's own elements, in place, also of a part of a larger tensor."""
    both, weight = torch.randn(n, 5, width), torch.randn(width)
    heads, others = both[:, :3], both[:, 3:].clone()
    expected = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    layers.norm_heads(heads, layers.norm_weight(weight), eps)
    assert torch.allclose(both[:, :3], expected, rtol=1e-4, atol=1e-6) and torch.equal(both[:, 3:], others)


@given(st.integers(1, 6), st.integers(0, 9), st.sampled_from([(4, 4), (4, 2), (6, 1)]))
def test_attention_is_the_plain_formula(n: int, start: int, heads: tuple[int, int]) -> None:
    """One row or many, from row 0 or behind others, heads sharing keys or not."""
    many, few = heads
    q, kv = torch.randn(n, many, 8), torch.randn(2 * few, start + n, 8)
    mask = layers.causal_mask(n, start, torch.float32, q.device)
    keys, values = (part.repeat_interleave(many // few, 0) for part in (kv[:few], kv[few:]))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(8)
    hidden = torch.arange(start + n)[None] > torch.arange(start, start + n)[:, None]
    expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values
    got = layers.attend(q, kv, mask)
    assert torch.allclose(got, expected.transpose(0, 1).reshape(n, -1), atol=1e-5)
