"""engine/models/alike.py and the steps that stand on it: a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models import alike
from engine.models.batch import Rows
from engine.models.registry import Model
from engine.native import lib
from engine.weights.checkpoint import open_checkpoint
from engine.weights.linear import Dense, Side
from tests.checkpoints import alone, build, write_gguf

TREES: list[tuple[int, list[int]]] = [
    (40, [-1]),
    (17, [-1, 0, 1, 2]),
    (33, [-1, 0, 1, 0, 3, 3, -1, 6]),
    (0, [-1, -1, 1]),
    (50, list(range(-1, 14))),
]
"""Rows before, and the new rows' parents: several sequences of one step, 31 rows together."""

MIXES = {"four bits, eight in the head": {"": "Q4_1", "token_embd": "Q8_0"}, "bfloat16": {"": "BF16"}, "float32": {}}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the worker runs; the number of threads is put back."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


class Uneven(Dense):
    """A kernel that sums in another order from eight rows on."""

    def __call__(self, x: Tensor) -> Tensor:
        product = super().__call__(x)
        return product * (1 + 1e-6) if x.shape[0] >= 8 else product


class Counted(Dense):
    """Says how many rows it was given."""

    def __call__(self, x: Tensor) -> Tensor:
        self.asked = [*getattr(self, "asked", []), x.shape[0]]
        return super().__call__(x)


def test_a_kernel_that_is_uneven_is_found_out() -> None:
    """N4: its rows are then multiplied one by one, and come out as they do alone."""
    torch.manual_seed(0)
    linear, x = Uneven(torch.randn(24, 40)), torch.randn(9, 40)
    assert not alike.same(linear, 40, torch.device("cpu"))
    made = alike.Choice(torch.device("cpu")).of(linear, 40)
    assert isinstance(made, alike.Each) and made.nbytes == linear.nbytes and made.rows == 24
    assert torch.equal(made(x), torch.cat([linear(row[None]) for row in x]))
    assert torch.equal(made.gather(torch.tensor([3])), linear.weight[3:4])


def test_elsewhere_rows_are_filled_up() -> None:
    """N4: off the CPU a kernel always gets the same number of rows."""
    linear, x = Counted(torch.randn(24, 40)), torch.randn(9, 40)
    got = alike.Filled(linear)(x)
    assert linear.asked == [alike.MOST] and got.shape == (9, 24)
    assert torch.allclose(got, x @ linear.weight.t(), atol=1e-5)


def test_parts_that_lie_side_by_side_are_chosen_apart() -> None:
    side = Side([Uneven(torch.randn(8, 16)), Uneven(torch.randn(4, 16))])
    made = alike.Choice(torch.device("cpu")).of(side, 16)
    assert isinstance(made, Side) and all(isinstance(part, alike.Each) for part in made.parts)


CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture(params=[*MIXES, "exact", "native", CUDA])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model whose steps torch computes, in several forms, and one that the native library computes."""
    if request.param == "native":
        if lib.kernels() is None:
            pytest.skip("no native library here")
    else:
        monkeypatch.setattr(lib, "kernels", lambda: None)
    path = write_gguf(tmp_path / "tiny.gguf", MIXES.get(request.param, {"": "Q4_1", "token_embd": "Q8_0"}))
    device = "cuda" if request.param == "cuda" else "cpu"
    return build(open_checkpoint(path), exact=request.param == "exact", device=device)


def test_rows_of_rounds_come_out_as_alone(model: Model) -> None:
    """N4: trees and chains of several sequences in one step, each row bit for bit a step of one row's."""
    assert model.alike >= sum(len(parents) for _, parents in TREES)
    made = torch.Generator().manual_seed(1)
    joint, expected = [], []
    for start, parents in TREES:
        prompt = torch.randint(0, model.vocab, (start,), generator=made)
        tokens = torch.randint(0, model.vocab, (len(parents),), generator=made).tolist()
        cache, plain = model.new_cache(90), model.new_cache(90)
        for filled in (cache, plain) if start else ():
            alone(model, prompt, filled, 0)
        lines: list[list[int]] = []
        for row, parent in enumerate(parents):
            lines.append([*(lines[parent] if parent >= 0 else []), row])
            for depth, at in enumerate(lines[row]):
                last = model.forward([Rows(plain, [tokens[at]], start + depth)])
            expected.append(last)
        joint.append(Rows(cache, tokens, start, parents, len(parents), draft=True))
    assert torch.equal(model.forward(joint), torch.cat(expected))


def test_a_kept_path_goes_on_as_if_it_had_been_decoded(model: Model) -> None:
    """N4: of a tree one branch stays, and the next row's logits are those of plain steps, bit for bit."""
    prompt, tokens = torch.arange(30, 60), [5, 6, 7, 8, 9]
    cache, plain = model.new_cache(64), model.new_cache(64)
    for filled in (cache, plain):
        alone(model, prompt, filled, 0)
    model.forward([Rows(cache, tokens, 30, [-1, 0, 0, 2, 3], 5, draft=True)])
    cache.keep(30, [0, 2, 3])
    for i, at in enumerate((0, 2, 3)):
        model.forward([Rows(plain, [tokens[at]], 30 + i, draft=True)])
    got, expected = (model.forward([Rows(of, [11], 33, draft=True)]) for of in (cache, plain))
    assert torch.equal(got, expected)


def test_a_chunk_beside_rounds_is_the_chunk_alone(model: Model) -> None:
    """Bit for bit, and so are the rounds; logits come part by part, of the rows that were asked for."""
    chunk, row = torch.arange(20), torch.arange(9)
    caches = [model.new_cache(64) for _ in range(4)]
    for filled in caches[2:]:
        alone(model, row, filled, 0)
    together = model.forward([Rows(caches[0], chunk.tolist(), 0, wanted=3), Rows(caches[2], [4], 9, draft=True)])
    apart = [model.forward([Rows(caches[1], chunk.tolist(), 0, wanted=3)])]
    apart.append(model.forward([Rows(caches[3], [4], 9)]))
    assert together.shape == (4, model.vocab) and torch.equal(together, torch.cat(apart))
    assert model.forward([Rows(caches[0], [1, 2], 20, wanted=0)]).shape == (0, model.vocab)
