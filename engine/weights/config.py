"""What every dense decoder says of its own shape, whatever file it came in."""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeScaling(msgspec.Struct, frozen=True):
    """How a checkpoint stretches its rotary angles over a longer window than it was trained on.

    ``linear``: every frequency divided by ``factor``. ``llama3``: low frequencies divided by ``factor``, high ones
    left, a ramp between (``low_freq_factor``, ``high_freq_factor``, ``original_window`` in rows). ``factors``: the file
    has one divisor a frequency in the tensor ``rope_freqs.weight`` (how GGUF carries llama3 scaling).
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_window: int = 0


class Config(msgspec.Struct, frozen=True):
    """Sizes in elements, ``window`` in rows. ``tied``: the output head is the token embedding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    eps: float
    rope_base: float
    window: int
    tied: bool
    rope_scaling: RopeScaling | None = None
