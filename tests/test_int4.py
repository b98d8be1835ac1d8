"""engine/weights/int4.py: the packed four-bit form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.weights import int4, quants
from engine.weights.int4 import FEW_ROWS, GROUP, Int4
from engine.weights.quants import Parts
from tests.checkpoints import blocks

pytestmark = pytest.mark.skipif(int4.tile() == 0, reason="torch packs four bits in another way on this CPU")


def made(kind: str, rows: int, cols: int, seed: int = 0) -> tuple[Int4, Parts]:
    parts = quants.split(kind, torch.from_numpy(blocks(kind, rows, cols, seed)))
    form = Int4(rows, cols)
    form.fill(0, parts)
    return form, parts


@given(st.sampled_from(["Q4_0", "Q4_1", "Q4_K"]), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_codes_are_kept_exactly(kind: str, tiles: int, wide: int, seed: int) -> None:
    """N3: packing loses no code, and scale and zero no more than bfloat16 takes."""
    form, parts = made(kind, 64 * tiles, 256 * wide, seed)
    ids = torch.arange(form.rows)
    assert torch.equal(form.codes(ids), parts.q.flatten(1))
    offset = parts.offset if parts.offset is not None else torch.zeros_like(parts.scale)
    assert torch.equal(form.scales[..., 0].t(), parts.scale.bfloat16())
    assert torch.equal(form.scales[..., 1].t(), (parts.scale * 8 + offset).bfloat16())


def test_a_matrix_filled_in_strips_is_the_same() -> None:
    """A vocabulary is packed strip by strip; the strips do not show."""
    whole, parts = made("Q4_1", 192, 64)
    strips = Int4(192, 64)
    for start in (0, 64, 128):
        strips.fill(start, Parts(*(p[start : start + 64] for p in parts if p is not None)))
    assert torch.equal(whole.packed, strips.packed) and torch.equal(whole.scales, strips.scales)


def test_rows_and_the_turned_matrix_agree() -> None:
    """A row looked up, the decoded matrix and the kernel's own product with a unit vector are the same numbers."""
    form, _ = made("Q4_1", 128, 96)
    rows = form.gather(torch.arange(128))
    assert torch.equal(form.transposed().float().t(), rows.bfloat16().float())
    unit = torch.eye(96, dtype=torch.bfloat16)[:FEW_ROWS]
    assert torch.equal(form(unit).float(), rows.bfloat16().float().t()[:FEW_ROWS])


@pytest.mark.parametrize("n", [1, 3, FEW_ROWS, FEW_ROWS + 1, 100])
def test_few_and_many_rows_give_the_product(n: int) -> None:
    """Both paths multiply, within what bfloat16 rounds; and each gives the same bits again."""
    form, _ = made("Q4_0", 128, 512)
    x = torch.randn(n, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ form.gather(torch.arange(128)).double().t()
    got = form(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, form(x))
    assert float((got.double() - expected).norm() / expected.norm()) < 0.006


def test_it_takes_no_more_bytes_than_the_file() -> None:
    """N3: five bits a weight, as Q4_1 has in the file."""
    form, _ = made("Q4_1", 64, 256)
    assert form.nbytes == 64 * 256 * 20 // GROUP


def test_other_shapes_do_not_fit() -> None:
    assert int4.fits(128, 32)
    assert not int4.fits(127, 32)
    assert not int4.fits(128, 48)
