"""What config.json says of rotary angles. A way to stretch a window that is not understood is refused by name.

Source: transformers' ``modeling_rope_utils.py``. transformers 5 writes everything into ``rope_parameters``, 4 some of
it beside ``rope_scaling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.weights.config import RopeScaling, yarn_attention
from engine.weights.errors import CheckpointError


def _said(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError("config.json turns heads in another way in each type of layer, which is not supported.")
    return rope


def turned(settings: Mapping[str, Any], head_dim: int) -> int:
    """How many of a head's first elements are turned; 0: all."""
    part = float(_said(settings).get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0)
    return 0 if part == 1.0 else int(head_dim * part)


def stretch(settings: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base of the angles, and how they are scaled."""
    rope = _said(settings)
    base = float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return base, RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        return base, _yarn(rope, int(settings["max_position_embeddings"]))
    raise CheckpointError(f"The model stretches its window by {kind} scaling, which is not supported.")


def _yarn(rope: Mapping[str, Any], window: int) -> RopeScaling:
    original = int(rope.get("original_max_position_embeddings") or window)
    factor = float(rope.get("factor") or window / original)
    attention, mscale, all_dims = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention is None and mscale and all_dims:
        attention = yarn_attention(factor, float(mscale)) / yarn_attention(factor, float(all_dims))
    return RopeScaling(
        "yarn",
        factor,
        original_window=original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention=float(yarn_attention(factor) if attention is None else attention),
        truncate=bool(rope.get("truncate", True)),
    )
