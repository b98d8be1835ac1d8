"""engine/weights/grouped.py, cuda4.py: codes in groups, kept exactly, and every form that multiplies them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from engine.native import build
from engine.weights import cuda4, grouped, int4, quants
from engine.weights import linear as forms
from engine.weights.cuda4 import Cuda4
from engine.weights.int4 import FEW_ROWS, Int4
from engine.weights.int8 import Planes
from engine.weights.linear import Blocks, Linear, linear
from engine.weights.stored import Stored, stack

CPU = torch.device("cpu")
GROUPED = [*quants.FOURS, *quants.EIGHTS]


def random_parts(kind: str, rows: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of a matrix: every code and zero equally likely."""
    made = torch.Generator().manual_seed(seed)
    group = quants.KINDS[kind].elements
    low, high = (0, 16) if kind in quants.FOURS else (-128, 128)
    codes = torch.randint(low, high, (rows, groups, group), generator=made)
    scale = (torch.rand(rows, groups, generator=made) * 0.02 + 1e-3).half()
    return (
        codes.to(torch.uint8 if low == 0 else torch.int8),
        scale,
        torch.randint(0, 16, (rows, groups), generator=made),
    )


def stored(kind: str, rows: int = 128, cols: int = 256, seed: int = 0) -> Stored:
    codes, scale, zero = random_parts(kind, rows, cols // quants.KINDS[kind].elements, seed)
    return grouped.four(codes, scale, zero.to(torch.uint8)) if kind in quants.FOURS else grouped.eight(codes, scale)


def weights(codes: Tensor, scale: Tensor, zero: Tensor | int) -> Tensor:
    """The matrix in float64, where every product is exact."""
    zero = zero[..., None].double() if isinstance(zero, Tensor) else zero
    return (scale.double()[..., None] * (codes.double() - zero)).flatten(1)


def off(form: Linear, matrix: Stored, n: int) -> float:
    """Relative error of a product against float64."""
    x = torch.randn(n, matrix.cols, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ quants.decode_stored(matrix).double().t()
    return float((form(x.to(form.dtype)).double() - expected).norm() / expected.norm())


@given(st.sampled_from(GROUPED), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_weights_are_kept_exactly(kind: str, rows: int, groups: int, seed: int) -> None:
    """N3: codes, scales and zeros come back as they were, and a weight is scale * (code - zero) to the last bit."""
    codes, scale, zero = random_parts(kind, rows, groups, seed)
    four = kind in quants.FOURS
    zero[0, 0] = 7  # not all in the middle
    made = grouped.four(codes, scale, zero.to(torch.uint8)) if four else grouped.eight(codes, scale)
    assert (made.kind, made.rows, made.cols) == (kind, rows, codes[0].numel())
    parts = quants.split(made.kind, made.data)
    assert torch.equal(parts.q, codes) and torch.equal(parts.scale, scale.float())
    expected = weights(codes, scale, zero if four else 0)
    # One rounding of the product and one of the sum are what float32 adds.
    assert torch.allclose(quants.decode_stored(made).double(), expected, rtol=1e-6, atol=1e-6 * float(scale.max()))
    if four:
        assert parts.offset is not None
        assert torch.equal(parts.offset.double(), -scale.double() * zero)


@given(st.sampled_from([*quants.FOURS]), st.integers(0, 2**32 - 1))
def test_codes_about_the_middle_are_ggmls(kind: str, seed: int) -> None:
    """N3: a symmetric matrix becomes Q4_0, with the very same weights, whatever its groups."""
    codes, scale, _ = random_parts(kind, 3, 2, seed)
    made = grouped.four(codes, scale, torch.full(scale.shape, 8, dtype=torch.uint8))
    assert made.kind == "Q4_0"
    assert torch.allclose(quants.decode_stored(made).double(), weights(codes, scale, 8), rtol=1e-6, atol=1e-8)


@given(st.sampled_from(GROUPED), st.permutations(range(4)))
def test_rows_are_picked_and_stacked(kind: str, order: list[int]) -> None:
    """N3: a row's bytes stay together."""
    whole = stored(kind, rows=4)
    both = stack([whole.pick(torch.tensor(order)), whole])
    decoded = quants.decode_stored(whole)
    assert torch.equal(quants.decode_stored(both), torch.cat([decoded[order], decoded]))


@given(st.sampled_from(GROUPED), st.integers(0, 99))
def test_shorter_groups_are_the_same_weights(kind: str, seed: int) -> None:
    """N3: what a kernel of groups of 32 is given."""
    data = stored(kind, rows=2, seed=seed).data
    parts = quants.regrouped(quants.split(kind, data), 32)
    assert parts.q.shape[-1] == 32
    again = parts.q.float() * parts.scale[..., None]
    if parts.offset is not None:
        again += parts.offset[..., None]
    assert torch.equal(again.flatten(1), quants.decode(kind, data))


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", GROUPED)
def test_every_kind_multiplies(kind: str, native: bool, table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: in the native form and in torch's, a few rows and many; rows looked up are those that were stored."""
    if native and build.library() is None:
        pytest.skip(build.why())
    if not native:
        monkeypatch.setattr(forms, "matrix", lambda *_: None)
    matrix = stored(kind)
    form = linear(matrix, CPU, table=table)
    assert off(form, matrix, 1) < 0.012 and off(form, matrix, FEW_ROWS + 1) < 0.012
    ids = torch.tensor([5, 0, 127, 5])
    rows = quants.decode_stored(matrix)[ids]
    if native or isinstance(form, Blocks):
        assert torch.equal(form.gather(ids), rows)
    else:
        assert float((form.gather(ids) - rows).norm() / rows.norm()) < 0.004


@pytest.mark.skipif(build.library() is None, reason=build.why())
@pytest.mark.parametrize("kind", GROUPED)
def test_native_rows_come_out_alike(kind: str) -> None:
    """N3: a row's product is the same bits alone, among others, and on two threads."""
    form = linear(stored(kind), CPU)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3))
    whole = form(x)
    for first, last in ((0, 1), (8, 9), (2, 5), (1, 9)):
        assert torch.equal(form(x[first:last]), whole[first:last])
    form.threads = 2  # type: ignore[attr-defined]
    assert torch.equal(form(x), whole)


@pytest.mark.skipif(int4.tile() == 0, reason="torch packs four bits in another way on this CPU")
def test_forms_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: four bits packed, eight bits as planes where it is a head; a shape that does not fit keeps its bytes."""
    monkeypatch.setattr(forms, "matrix", lambda *_: None)
    assert all(isinstance(linear(stored(kind), CPU), Int4) for kind in quants.FOURS)
    assert all(isinstance(linear(stored(kind), CPU, table=True), Planes) for kind in quants.EIGHTS)
    assert all(isinstance(linear(stored(kind), CPU), Blocks) for kind in quants.EIGHTS)
    assert isinstance(linear(stored("I4_64", rows=100), CPU), Blocks)


@given(st.sampled_from([kind for kind in cuda4.KINDS if kind in quants.FOURS]), st.integers(0, 99))
def test_what_is_packed_for_cuda(kind: str, seed: int) -> None:
    """N3: an even column's code above the next one's; scale * (code - 8) + zero is the weight but for bfloat16."""
    matrix = stored(kind, rows=8, seed=seed)
    octets, pairs = cuda4.arranged(quants.split(kind, matrix.data))
    group = quants.KINDS[kind].elements
    codes = torch.stack([octets >> 4, octets & 15], -1).flatten(1)
    scale, zero = (pairs[..., i].t().float().repeat_interleave(group, -1) for i in (0, 1))
    weight = scale * (codes.float() - 8) + zero
    expected = quants.decode_stored(matrix)
    assert octets.shape == (8, 128) and pairs.shape == (256 // group, 8, 2)
    assert float((weight - expected).norm() / expected.norm()) < 0.004


@pytest.mark.parametrize("kind", [*quants.FOURS])
def test_shapes_are_those_that_the_cuda_kernel_takes(kind: str) -> None:
    """N3: judged by torch's own description of it, which needs no device."""
    matrix = stored(kind, rows=64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        form = Cuda4(replace(matrix, data=mode.from_tensor(matrix.data)), CPU)
        product = form(torch.empty(3, 256))
    assert product.shape == (3, 64) and product.dtype == torch.bfloat16
    assert form.nbytes == 64 * 256 // 2 + form.pairs.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", GROUPED)
def test_products_on_cuda(kind: str) -> None:
    """N3: torch's packed four bits there, decoded bytes for the rest."""
    matrix, device = stored(kind, rows=64), torch.device("cuda")
    form = linear(matrix, device)
    assert isinstance(form, Cuda4 if kind in quants.FOURS else Blocks)
    for n in (1, 33):
        x = torch.randn(n, 256, generator=torch.Generator().manual_seed(1))
        expected = x.double() @ quants.decode_stored(matrix).double().t()
        got = form(x.to(device, form.dtype)).double().cpu()
        assert float((got - expected).norm() / expected.norm()) < 0.012


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_does_not_fit_on_cuda_keeps_its_bytes() -> None:
    """N3: a shape that the kernel does not take, and a table, whose rows are looked up."""
    device = torch.device("cuda")
    assert isinstance(linear(stored("I4_32", rows=64, cols=96), device), Blocks)
    assert isinstance(linear(stored("I4_32", rows=60), device), Blocks)
    assert isinstance(linear(stored("I4_32", rows=64), device, table=True), Blocks)
