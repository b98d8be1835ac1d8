"""engine/weights/linear.py: which form a matrix takes, and that each multiplies."""

from __future__ import annotations

import pytest
import torch

from engine.native import lib
from engine.native.matrix import Matrix
from engine.weights import int4, quants
from engine.weights.int4 import Int4
from engine.weights.int8 import Planes
from engine.weights.linear import Blocks, Dense, Linear, Side, linear
from engine.weights.stored import Stored
from tests.checkpoints import KINDS, blocks

CPU = torch.device("cpu")


def stored(kind: str, rows: int = 128, cols: int = 256) -> Stored:
    if kind in quants.PLAIN:
        values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(quants.PLAIN[kind])
        return Stored(kind, rows, cols, values.view(torch.uint8))
    return Stored(kind, rows, cols, torch.from_numpy(blocks(kind, rows, cols)))


def off(form: Linear, matrix: Stored, n: int) -> float:
    """Relative error of a product against float64."""
    x = torch.randn(n, matrix.cols, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ quants.decode_stored(matrix).double().t()
    return float((form(x.to(form.dtype)).double() - expected).norm() / expected.norm())


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the native library cannot be had."""
    monkeypatch.setattr(lib, "kernels", lambda: None)


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("kind", [*KINDS, *quants.PLAIN])
@pytest.mark.parametrize("table", [False, True])
def test_every_kind_multiplies_and_stays_small(kind: str, table: bool) -> None:
    """N3: quantised weights stay quantised; a product is right within bfloat16 for one row and for many."""
    matrix = stored(kind)
    form = linear(matrix, CPU, table=table)
    assert form.rows == 128
    assert form.nbytes <= 1.2 * matrix.data.nbytes
    assert off(form, matrix, 1) < 0.012 and off(form, matrix, 64) < 0.012
    ids = torch.tensor([5, 0, 127, 5])
    rows = quants.decode_stored(matrix)[ids]
    assert float((form.gather(ids) - rows).norm() / rows.norm()) < 0.004


@pytest.mark.parametrize("kind", [*KINDS, *quants.PLAIN])
def test_exact_is_float32(kind: str) -> None:
    form = linear(stored(kind), CPU, exact=True)
    assert form.dtype == torch.float32 and off(form, stored(kind), 3) < 1e-6


@pytest.mark.usefixtures("torch_only")
@pytest.mark.skipif(int4.tile() == 0, reason="torch packs four bits in another way on this CPU")
def test_the_table_of_forms() -> None:
    """N3: the kind alone decides, and a shape that cannot be packed keeps the file's bytes."""
    assert all(isinstance(linear(stored(kind), CPU), Int4) for kind in ("Q4_0", "Q4_1", "Q4_K"))
    assert isinstance(linear(stored("Q8_0"), CPU, table=True), Planes)
    assert all(isinstance(linear(stored(kind), CPU), Blocks) for kind in ("Q8_0", "Q5_K", "Q6_K"))
    assert isinstance(linear(stored("BF16"), CPU), Dense)
    assert isinstance(linear(stored("Q4_1", rows=100), CPU), Blocks)


@pytest.mark.skipif(lib.kernels() is None, reason="no native library")
@pytest.mark.parametrize("kind", [*KINDS, *quants.PLAIN])
def test_natively_every_kind_has_one_form(kind: str) -> None:
    """N3: with the native library a matrix on the CPU is packed for it, in 4 or 8 bits where it is quantised."""
    matrix = stored(kind)
    form = linear(matrix, CPU)
    assert isinstance(form, Matrix)
    assert form.nbytes <= 40 / 32 * matrix.rows * matrix.cols or kind in quants.PLAIN
    assert off(form, matrix, 3) < 0.012


def test_side_by_side_is_a_stack() -> None:
    """Parts of different kinds with one input: outputs in order, bytes added."""
    parts = [stored("Q4_1"), stored("Q6_K")]
    forms = [linear(p, CPU) for p in parts]
    both = Side(forms)
    x = torch.randn(2, 256)
    assert both.rows == 256 and both.nbytes == sum(f.nbytes for f in forms)
    assert torch.equal(both(x.to(both.dtype))[:, 128:], forms[1](x.to(forms[1].dtype)))
    with pytest.raises(TypeError):
        both.gather(torch.tensor([0]))
