"""engine/models/cache.py: room for the whole window, there from the start."""

from __future__ import annotations

import torch

from engine.models.cache import KV


def test_it_is_allocated_and_written_at_once() -> None:
    cache = KV(3, 2, 50, 8, torch.float16, torch.device("cpu"))
    assert len(cache.layers) == 3 and cache.layers[0].shape == (4, 50, 8)
    assert cache.nbytes == 3 * 4 * 50 * 8 * 2 and cache.rows == 50
    assert not bool(torch.stack(cache.layers).any())
