"""engine/weights/int8.py: eight bits as two planes of four."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.weights import int4, quants
from engine.weights.int4 import FEW_ROWS
from engine.weights.int8 import Planes
from tests.checkpoints import blocks

pytestmark = pytest.mark.skipif(int4.tile() == 0, reason="torch packs four bits in another way on this CPU")


def made(rows: int, cols: int, seed: int = 0) -> tuple[Planes, quants.Parts]:
    parts = quants.split("Q8_0", torch.from_numpy(blocks("Q8_0", rows, cols, seed)))
    form = Planes(rows, cols)
    form.fill(0, parts)
    return form, parts


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_codes_are_kept_exactly(tiles: int, groups: int, seed: int) -> None:
    """N3: a row looked up is code times the scale rounded to bfloat16, for all 256 codes."""
    form, parts = made(64 * tiles, 32 * groups, seed)
    expected = parts.q.float() * parts.scale.bfloat16().float()[..., None]
    assert torch.equal(form.gather(torch.arange(form.rows)), expected.flatten(1))


@pytest.mark.parametrize("n", [1, FEW_ROWS, FEW_ROWS + 1])
def test_few_and_many_rows_give_the_product(n: int) -> None:
    """Both paths multiply, in float32 to the outside; and each gives the same bits again."""
    form, _ = made(128, 512)
    x = torch.randn(n, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ form.gather(torch.arange(128)).double().t()
    got = form(x)
    assert got.dtype == torch.float32 and torch.equal(got, form(x))
    assert float((got.double() - expected).norm() / expected.norm()) < 0.006


def test_it_takes_a_sixth_more_than_the_file() -> None:
    """N3: 40 bytes for each 34; only heads are kept so."""
    form, _ = made(64, 256)
    assert form.nbytes == 64 * 256 * 40 // 32
