"""engine/native/blocks.py: the native pieces against torch's, and each row alike in every arrangement."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models import delta
from engine.models.batch import Rows
from engine.models.cache import KV
from engine.models.delta import Mixed
from engine.native import blocks, build, lib

pytestmark = pytest.mark.skipif(lib.kernels() is None, reason=f"no native library: {build.why()}")
CPU = torch.device("cpu")

trees = st.lists(st.integers(0, 1 << 16), max_size=11).map(
    lambda draws: [-1, *(draw % (i + 2) - 1 for i, draw in enumerate(draws))]
)
"""Parents, each smaller than its own index."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recalled(n: int, heads: int, keys: int, values: int, seed: int) -> tuple[Tensor, Mixed, Tensor, Tensor]:
    """A state, rows, and their decays and rates."""
    q, k = (torch.nn.functional.normalize(random(n, heads, keys, seed=seed + i), dim=-1) for i in range(2))
    decay, beta = (torch.sigmoid(random(n, heads, seed=seed + i)) for i in (2, 3))
    return random(heads, keys, values, seed=seed + 4), Mixed(q, k, random(n, heads, values, seed=seed + 5)), decay, beta


def path_of(row: int, parents: list[int]) -> list[int]:
    return [*path_of(parents[row], parents), row] if row >= 0 else []


@settings(max_examples=30)
@given(trees, st.sampled_from([(1, 8, 16), (3, 16, 40), (2, 128, 128)]), st.integers(0, 1 << 20))
def test_the_delta_rule_follows_parents(parents: list[int], sizes: tuple[int, int, int], seed: int) -> None:
    """N7: a tree's rows are those of torch's rule, and bit for bit those of a chain over each path."""
    n = len(parents)
    state, rows, decay, beta = recalled(n, *sizes, seed)
    before = state.clone()
    out, last = blocks.recall(state, rows, decay, beta, parents)
    expected, end = delta.rows(state, rows, decay, beta, parents)
    assert torch.allclose(out, expected, atol=1e-4) and torch.allclose(last, end, atol=1e-4)
    assert torch.equal(state, before)
    for row in range(n):
        path = path_of(row, parents)
        chain = Mixed(*(x[path] for x in rows))
        alone, kept = blocks.recall(state, chain, decay[path], beta[path])
        assert torch.equal(alone[-1], out[row])
        assert torch.equal(blocks.recall(state, chain, decay[path], beta[path], seen=False)[1], kept)
    assert torch.equal(last, kept)


def test_the_delta_rule_by_chunks() -> None:
    """N7: cut anywhere, on one thread or two, the same bits."""
    state, rows, decay, beta = recalled(100, 2, 32, 48, 1)
    out, last = blocks.recall(state, rows, decay, beta)
    got = []
    for first in range(0, 100, 13):
        here = slice(first, first + 13)
        part, state = blocks.recall(state, Mixed(*(x[here] for x in rows)), decay[here], beta[here])
        got.append(part)
    assert torch.equal(torch.cat(got), out) and torch.equal(state, last)


@pytest.mark.parametrize(("width", "channels"), [(4, 64), (2, 40), (8, 16)])
def test_convolution(width: int, channels: int) -> None:
    """N7: torch's convolution; a row that sees the same inputs comes out the same in a tree."""
    inputs, weight = random(width - 1 + 9, channels), random(width, channels, seed=1)
    whole = blocks.conv(inputs, None, weight)
    assert torch.allclose(whole, delta.conv(inputs, None, weight), atol=1e-5)
    paths = [path_of(row, list(range(-1, 8))) for row in range(9)]
    seen = torch.tensor(delta.taps([paths[5], paths[2], paths[8]], width))
    assert torch.equal(blocks.conv(inputs, seen, weight), whole[[5, 2, 8]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "window"), [(6, 2, 64, 0), (8, 1, 256, 0), (2, 2, 20, 30)])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, width: int, window: int) -> None:
    """N7: torch's attention; a row alone has the bits it has among 20."""
    kv = random(2 * kv_heads, 150, width).to(dtype)
    q, cache = random(20, heads, width, seed=1), KV(1, kv_heads, 150, width, dtype, CPU)
    out = blocks.attend(q, kv, Rows(cache, [0] * 20, 130), width**-0.5, window)
    row, key = torch.arange(130, 150)[:, None], torch.arange(150)
    mask = (key <= row) & ((key > row - window) if window else (key >= 0))
    spread = [x.float().repeat_interleave(heads // kv_heads, 0) for x in (kv[:kv_heads], kv[kv_heads:])]
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *spread, attn_mask=mask)
    assert torch.allclose(out, expected.transpose(0, 1).reshape(20, -1), atol=1e-5)
    alone = [blocks.attend(q[i : i + 1], kv, Rows(cache, [0], 130 + i), width**-0.5, window) for i in range(20)]
    assert torch.equal(torch.cat(alone), out)


def test_norm() -> None:
    x, weight = random(5, 40), random(40, seed=1)
    expected = x / (x.square().sum(-1, keepdim=True) + 0.5).sqrt() * weight
    assert torch.allclose(blocks.norm(x, weight, 0.5), expected, atol=1e-6)


def test_what_attention_cannot_read_is_refused() -> None:
    cache = KV(1, 1, 4, 16, torch.float32, CPU)
    with pytest.raises(ValueError, match="float16 or float32"):
        blocks.attend(random(1, 1, 16), random(2, 4, 16).bfloat16(), Rows(cache, [0], 0), 1.0)
    for heads, tokens, start in ((1, 1, 4), (1, 2, 3), (1, 1, -1), (1, 2, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            n = 1 if (tokens, start) == (2, 0) else tokens
            blocks.attend(random(n, heads, 16), random(2, 4, 16), Rows(cache, [0] * tokens, start), 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        blocks.attend(random(1, 3, 16), random(4, 4, 16), Rows(cache, [0], 0), 1.0)
