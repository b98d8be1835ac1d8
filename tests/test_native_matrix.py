"""engine/native/matrix.py: packed matrices, against the file's weights and against themselves in other batches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native import build, lib, matrix
from engine.native.matrix import LAYOUTS, Matrix
from engine.weights import quants
from engine.weights.quants import Parts
from engine.weights.stored import Stored
from tests.checkpoints import KINDS, blocks

pytestmark = pytest.mark.skipif(lib.kernels() is None, reason=f"no native library: {build.why()}")
ALL = [*KINDS, *quants.PLAIN]


def stored(kind: str, rows: int = 100, cols: int = 512, seed: int = 0) -> Stored:
    if kind in quants.PLAIN:
        values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(quants.PLAIN[kind])
        return Stored(kind, rows, cols, values.view(torch.uint8))
    return Stored(kind, rows, cols, torch.from_numpy(blocks(kind, rows, cols, seed)))


def made(kind: str, rows: int = 100, cols: int = 512, seed: int = 0) -> Matrix:
    form = matrix.matrix(stored(kind, rows, cols, seed))
    assert form is not None
    return form


def activations(n: int, cols: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, cols, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ALL)
def test_rows_come_out_as_the_file_decodes(kind: str) -> None:
    """N3: codes and scales are kept without loss, also where the last strip is not whole."""
    ids = torch.tensor([0, 99, 17, 17, 64])
    assert torch.equal(made(kind).gather(ids), quants.decode_stored(stored(kind))[ids])


@pytest.mark.parametrize("kind", ALL)
def test_a_product_is_right(kind: str) -> None:
    """N3: quantised weights differ by the rounding of activations to eight bits, plain ones by float32's alone."""
    x, form = activations(70, 512), made(kind)
    expected = x.double() @ quants.decode_stored(stored(kind)).double().t()
    off = float((form(x).double() - expected).norm() / expected.norm())
    assert off < (1e-6 if kind in quants.PLAIN else 8e-3)
    assert form(x).dtype == torch.float32 == form.dtype


@pytest.mark.parametrize("kind", ALL)
def test_a_row_is_alike_in_every_batch(kind: str) -> None:
    """D4: bit for bit, for 1 to 70 rows, on one thread and on two."""
    x, form = activations(70, 512), made(kind)
    form.threads = 1
    whole = form(x)
    for n in (1, 2, 3, 4, 5, 6, 7, 9, 32, 64, 65):
        assert torch.equal(form(x[:n]), whole[:n]), n
        assert torch.equal(form(x[70 - n :]), whole[70 - n :]), n
    form.threads = 2
    assert torch.equal(form(x), whole) and torch.equal(form(x[:3]), whole[:3])


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.integers(1, 70), st.integers(1, 4), st.integers(1, 9), st.integers(0, 1 << 30))
def test_any_shape(kind: str, rows: int, wide: int, n: int, seed: int) -> None:
    """N3: any number of rows; what a product gives is the sum that the rounded activations give, in float32."""
    cols = wide * 256
    form, x = made(kind, rows, cols, seed), activations(n, cols, seed)
    groups = x.view(n, -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / scale).round() * scale).view(n, cols)
    expected = rounded.double() @ quants.decode_stored(stored(kind, rows, cols, seed)).double().t()
    # A value half-way between two codes may go either way: a code in a column.
    assert torch.allclose(form(x).double(), expected, rtol=1e-3, atol=float(expected.abs().max()) * 2e-3)


def test_long_groups_repeat_their_scale() -> None:
    """N3: codes in groups of 128, as AWQ and GPTQ have them."""
    random = torch.Generator().manual_seed(3)
    q = torch.randint(0, 16, (48, 2, 128), generator=random, dtype=torch.uint8)
    scale, offset = torch.rand(48, 2, generator=random), torch.rand(48, 2, generator=random)
    form = matrix.quantised(48, 256, LAYOUTS["Q4_K"], lambda _: Parts(q, scale, offset))
    assert form is not None
    expected = (q.float() * scale[..., None] + offset[..., None]).flatten(1)
    assert torch.equal(form.gather(torch.arange(48)), expected)


def test_extreme_activations() -> None:
    """N3: zeros, one huge value, and codes of -128 neither overflow nor disturb other groups."""
    data = torch.from_numpy(blocks("Q8_0", 16, 256)).clone()
    data.view(16, 8, 34)[:, :, 2:] = 128
    form = matrix.matrix(Stored("Q8_0", 16, 256, data))
    assert form is not None
    x = torch.zeros(3, 256)
    x[1], x[2, 40] = 127.0, 1e30
    expected = x.double() @ quants.decode("Q8_0", data).double().t()
    assert torch.allclose(form(x).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_so(kind: str, bad: float) -> None:
    """F8: a row with one such activation has no finite product, wherever it stands; the rows beside it keep theirs."""
    x, form = activations(5, 512), made(kind)
    expected = form(x)
    for col in (0, 17, 31, 511):
        spoiled = x.clone()
        spoiled[2, col] = bad
        got = form(spoiled)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_what_lies_outside_is_refused() -> None:
    """N3: rows that there are not, and activations of another width, are never read from memory."""
    form = made("Q4_1")
    for ids in ([100], [0, -1], [1 << 40]):
        with pytest.raises(IndexError, match="row"):
            form.gather(torch.tensor(ids))
    assert form.gather(torch.tensor([], dtype=torch.int64)).shape == (0, 512)
    for shape in ((2, 480), (2, 544), (512,)):
        with pytest.raises(ValueError, match="512 columns"):
            form(torch.zeros(shape))


def test_what_does_not_fit_is_left_to_torch() -> None:
    """N3: columns that are no multiple of 32."""
    assert matrix.matrix(Stored("F32", 4, 40, torch.zeros(4, 160, dtype=torch.uint8))) is None


def test_a_part_is_a_matrix_over_the_same_bytes() -> None:
    form = made("Q4_1", 64)
    struct = form.part(32, 16)
    whole = form.gather(torch.arange(32, 48))
    assert torch.equal(Matrix(struct, form._data).gather(torch.arange(16)), whole)
    with pytest.raises(ValueError, match="whole strips"):
        form.part(8, 16)


def test_room_that_is_filled_is_not_packed_again() -> None:
    """N6: a packed matrix taken from elsewhere is used as it is."""
    form = made("Q4_1", 64)
    again = matrix.matrix(stored("Q4_1", 64, seed=5), lambda _: (form._data, True))
    assert again is not None and torch.equal(again.gather(torch.arange(64)), form.gather(torch.arange(64)))


def test_the_wide_form_compiles() -> None:
    """N3: the AVX-512 code is checked by the compiler where the CPU has only AVX2."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    wide = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")]
    source = Path(build.SOURCES) / "kernels.cpp"
    command = [compiler, "-std=c++17", "-mavx2", "-mfma", "-mf16c", *wide, "-fopenmp", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[:2000]
