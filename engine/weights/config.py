"""What every dense decoder says of its own shape, whatever file it came in."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from engine.weights.errors import CheckpointError

LONGEST, DEEPEST = 1 << 24, 1 << 10
"""A window in rows and a number of layers that no model reaches."""


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

    def check(self) -> None:
        """Raise CheckpointError unless these can be a model's sizes.

        Asked before anything is made by them: a damaged file must not decide how much memory is taken.
        """
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.ff, self.vocab, self.window)
        if min(sizes) < 1 or self.layers > DEEPEST or self.window > LONGEST:
            raise CheckpointError(
                f"The configuration's sizes cannot be: {self.layers} layers, {self.hidden} wide, {self.heads} and "
                f"{self.kv_heads} heads of {self.head_dim}, {self.ff} inside, {self.vocab} tokens, a window of "
                f"{self.window}."
            )
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise CheckpointError(
                f"{self.heads} heads of {self.head_dim} over {self.kv_heads} of keys are not supported: "
                "heads must share keys evenly and turn in pairs."
            )
        numbers = (self.eps, self.rope_base, *((self.rope_scaling.factor,) if self.rope_scaling else ()))
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise CheckpointError("The configuration's eps, rotary base or scaling factor is not a number above 0.")
