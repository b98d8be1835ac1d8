"""engine/models/delta.py: a row at a time, in chunks and along a tree it is the same rule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models import delta
from engine.models.attention import paths
from engine.models.delta import Mixed, Sizes
from engine.models.elementwise import rowwise

SIZES = Sizes(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
CHANNELS = 2 * 2 * 8 + 4 * 16


def made(n: int, seed: int) -> tuple[Tensor, Mixed, Tensor, Tensor]:
    """A state, rows, logarithms of decays, rates."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(4, 8, 16, generator=generator)
    mixed = delta.split(torch.randn(n, CHANNELS, generator=generator), SIZES)
    return state, mixed, -torch.rand(n, 4, generator=generator) * 2, torch.rand(n, 4, generator=generator)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The number of threads is put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 140), st.integers(0, 999))
def test_chunks_are_the_rule_row_by_row(n: int, seed: int) -> None:
    """N3: within what float32 can tell, also where the last chunk is not full."""
    state, mixed, log_decay, beta = made(n, seed)
    out, last = delta.chunk(state, mixed, log_decay, beta)
    expected, behind = delta.rows(state, mixed, log_decay.exp(), beta, range(-1, n - 1))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, behind, rtol=1e-4, atol=1e-5)


def test_the_rule_as_it_is_written() -> None:
    """N3: the three lines of the docstring, for one head."""
    state, mixed, log_decay, beta = made(1, 3)
    out, last = delta.rows(state, mixed, log_decay.exp(), beta, [-1])
    for head in range(4):
        faded = state[head] * log_decay[0, head].exp()
        k, v, q = mixed.k[0, head], mixed.v[0, head], mixed.q[0, head]
        expected = faded + torch.outer(k, beta[0, head] * (v - k @ faded))
        torch.testing.assert_close(last[head], expected)
        torch.testing.assert_close(out[0, head], q @ expected)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-1, 9), min_size=1, max_size=10), st.integers(0, 999))
def test_a_row_of_a_tree_is_the_end_of_its_chain(asked: list[int], seed: int) -> None:
    """N3: bit for bit, and so is the state folded in later; the state it began from is not touched."""
    parents = [min(parent, row - 1) for row, parent in enumerate(asked)]
    state, mixed, log_decay, beta = made(len(parents), seed)
    before, decay = state.clone(), log_decay.exp()
    out, _ = delta.rows(state, mixed, decay, beta, parents)
    for row, path in enumerate(paths(parents)):
        at = torch.tensor(path)
        chain = Mixed(*(x[at] for x in mixed))
        alone, last = delta.rows(state, chain, decay[at], beta[at], range(-1, len(path) - 1))
        assert torch.equal(out[row], alone[-1])
        assert torch.equal(delta.fold(state, chain, decay[at], beta[at], len(path)), last)
    assert torch.equal(state, before)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-1, 9), min_size=1, max_size=10), st.integers(1, 5), st.integers(0, 999))
def test_the_convolution_follows_parents(asked: list[int], width: int, seed: int) -> None:
    """N3: a row of a tree sees its ancestors and then the rows before the step, and nothing beside them."""
    parents = [min(parent, row - 1) for row, parent in enumerate(asked)]
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(width - 1 + len(parents), CHANNELS, generator=generator)
    weight = torch.randn(width, CHANNELS, generator=generator)
    got = delta.conv(inputs, torch.tensor(delta.taps(paths(parents), width)), weight)
    for row, path in enumerate(paths(parents)):
        chain = torch.cat([inputs[: width - 1], inputs[[width - 1 + at for at in path]]])
        torch.testing.assert_close(delta.conv(chain, None, weight)[-1], got[row])
        seen = torch.tensor(delta.taps(paths(range(-1, len(path) - 1)), width))
        assert torch.equal(delta.conv(chain, seen, weight)[-1], got[row])


def test_heads_of_keys_serve_several_of_values() -> None:
    """N3: keys have length 1, queries that of attention's scale; each serves neighbours."""
    mixed = delta.split(torch.randn(3, CHANNELS, generator=torch.Generator().manual_seed(1)), SIZES)
    torch.testing.assert_close(mixed.k.norm(dim=-1), torch.ones(3, 4))
    torch.testing.assert_close(mixed.q.norm(dim=-1), torch.full((3, 4), 8**-0.5))
    assert torch.equal(mixed.k[:, 0], mixed.k[:, 1]) and not torch.equal(mixed.k[:, 1], mixed.k[:, 2])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 999))
def test_an_element_does_not_know_how_many_there_are(n: int, cols: int, seed: int) -> None:
    """M6: a row's exp is the same bits alone and beside others."""
    x = torch.randn(n, cols, generator=torch.Generator().manual_seed(seed)) * 4
    whole = rowwise(torch.sigmoid, x)
    assert whole.shape == x.shape
    torch.testing.assert_close(whole, x.sigmoid())
    assert all(
        torch.equal(rowwise(torch.sigmoid, x[row : row + 1]), whole[row : row + 1]) for row in (0, n // 2, n - 1)
    )
