"""engine/weights/stored.py: rows are moved, never decoded."""

from __future__ import annotations

import torch

from engine.weights import quants
from engine.weights.stored import Stored, stack
from tests.checkpoints import blocks


def test_rows_are_picked_and_stacked_as_bytes() -> None:
    a = Stored("Q5_K", 6, 256, torch.from_numpy(blocks("Q5_K", 6, 256, 1)))
    b = Stored("Q5_K", 4, 256, torch.from_numpy(blocks("Q5_K", 4, 256, 2)))
    both = stack([a.pick(torch.tensor([5, 0])), b])
    assert (both.kind, both.rows, both.cols) == ("Q5_K", 6, 256)
    expected = torch.cat([quants.decode_stored(a)[[5, 0]], quants.decode_stored(b)])
    assert torch.equal(quants.decode_stored(both), expected)
