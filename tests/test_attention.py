"""engine/models/attention.py: each row sees its prefix, its ancestors and itself, whatever lies beside them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.models.attention import Place, paths
from engine.models.batch import Rows
from engine.models.cache import KV

HEADS, SHARED, WIDTH = 4, 2, 8


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """Rows before, parents of the new ones, a window."""
    n = draw(st.integers(1, 9))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    if draw(st.booleans()):
        parents = list(range(-1, n - 1))
    return draw(st.integers(0, 9)), parents, draw(st.sampled_from([0, 0, 1, 3, 40]))


def cache(rows: int) -> KV:
    kv = KV(1, SHARED, rows, WIDTH, torch.float32, torch.device("cpu"))
    kv.all.copy_(torch.randn(kv.all.shape))
    return kv


def plain(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row over all given keys, ``[shared, rows, width]``."""
    spread = HEADS // SHARED
    keys, values = keys.repeat_interleave(spread, 0), values.repeat_interleave(spread, 0)
    weights = (keys @ q[:, :, None] / math.sqrt(WIDTH)).softmax(1)
    return (weights * values).sum(1).reshape(-1)


@given(parts())
def test_a_row_sees_its_prefix_and_its_ancestors(part: tuple[int, list[int], int]) -> None:
    """K4, N4: both ways against the plain formula, of a window the last rows of the path; rows lie where they came."""
    start, parents, window = part
    n = len(parents)
    q, new = torch.randn(n, HEADS, WIDTH), torch.randn(2 * SHARED, n, WIDTH)
    before = cache(start + n + 2)
    place = Place(Rows(before, [0] * n, start, parents))
    expected = []
    for row, path in enumerate(paths(parents)):
        seen = torch.cat([before.layers[0][:, :start], new[:, path]], 1)[:, -window:]
        expected.append(plain(q[row], seen[:SHARED], seen[SHARED:]))
        assert place.positions[row] == start + len(path) - 1
    for way in (Place.together, Place.each):
        kv = before.all.clone()[0]
        assert torch.allclose(way(place, q, new, kv, window), torch.stack(expected), atol=1e-5)
        assert torch.equal(kv[:, start : start + n], new)
        assert torch.equal(kv[:, :start], before.layers[0][:, :start])
        assert torch.equal(kv[:, start + n :], before.layers[0][:, start + n :])


@given(parts())
def test_a_row_of_a_round_is_that_of_rounds_of_one(part: tuple[int, list[int], int]) -> None:
    """N4: bit for bit, whatever else was drafted: as if the row's path had been decoded a row at a time."""
    start, parents, window = part
    n = len(parents)
    q, new = torch.randn(n, HEADS, WIDTH), torch.randn(2 * SHARED, n, WIDTH)
    before = cache(start + n)
    rows = Place(Rows(before, [0] * n, start, parents, draft=True))
    got = rows.each(q, new, before.all.clone()[0], window)
    for row, path in enumerate(paths(parents)):
        kv = before.all.clone()[0]
        for depth, at in enumerate(path):
            one = Place(Rows(before, [0], start + depth))
            last = one.each(q[at : at + 1], new[:, at : at + 1], kv, window)
        assert torch.equal(last[0], got[row])


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1, 0, 2]])
def test_a_row_follows_an_earlier_one(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot follow"):
        Place(Rows(cache(9), [0] * len(parents), 0, parents))


def test_every_row_has_a_parent() -> None:
    with pytest.raises(ValueError, match="1 parents for 2 rows"):
        Place(Rows(cache(9), [0, 0], 0, [-1]))
