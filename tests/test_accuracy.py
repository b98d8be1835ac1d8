"""benchmarks/accuracy.py: the loss of what is served, held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import accuracy
from benchmarks.accuracy import Distance
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_served_model_stays_near_float32() -> None:
    """N3: mean KL a token over 512 positions of real text at most 6e-3, in prefill and in decode.

    Decode by four rows a step: the kernels of one row, in a quarter of the time. The benchmark takes one.
    """
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    found = list(accuracy.measure(open_checkpoint(path), accuracy.TEXT.read_text(encoding="utf-8"), 512, 1, 4))
    assert [d.path for d in found] == ["prefill", "decode"]
    for distance in found:
        assert distance.mean <= accuracy.LIMIT, distance
        assert distance.same > 0.95, distance


def test_the_measure_itself() -> None:
    """Zero for the same logits however shifted, known for a known pair."""
    logits = torch.randn(4, 50)
    assert Distance.of("x", logits + 3, logits).mean == pytest.approx(0, abs=1e-6)
    sure, even = torch.tensor([[0.0, -1e9]]), torch.tensor([[0.0, 0.0]])
    assert Distance.of("x", even, sure).mean == pytest.approx(0.6931, abs=1e-4)
    assert Distance.of("x", sure, sure.flip(-1)).same == 0.0
