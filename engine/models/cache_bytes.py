"""What a sequence takes in a cache, by a model's configuration alone: known before a weight is read. Sizes in bytes."""

from __future__ import annotations

import torch

from engine.models.hybrid_cache import HybridCache
from engine.weights.config import Config
from engine.weights.hybrid import HybridConfig

HALF = 2
"""Bytes of an element of KV, in either way its rows are computed."""


def row(config: Config) -> int:
    """A row of KV."""
    attend = sum(config.attends) + config.mtp if isinstance(config, HybridConfig) else config.layers
    return attend * 2 * config.kv_heads * config.head_dim * HALF


def state(config: Config) -> int:
    """Both recurrent states of a sequence, 0 without recurrent layers."""
    if not isinstance(config, HybridConfig):
        return 0
    return HybridCache(config, 0, torch.float16, torch.device("meta")).nbytes
