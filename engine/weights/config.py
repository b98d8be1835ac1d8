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
    left, a ramp between (``low_freq_factor``, ``high_freq_factor``, ``original_window`` in rows). ``yarn``: the same
    with a ramp from ``beta_fast`` to ``beta_slow`` turns over the original window (``truncate``: its ends rounded
    outward to whole pairs), and turned queries and keys times ``attention``. ``factors``: the file has one divisor a
    frequency in the tensor ``rope_freqs.weight`` (how GGUF carries llama3 scaling).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_window: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True


def stretched(window: int, scaling: RopeScaling | None) -> int:
    """The rows a model can have: yarn is often added to a configuration that keeps the window of before."""
    if scaling is None or scaling.kind != "yarn":
        return window
    return max(window, int(scaling.factor * scaling.original_window))


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """What yarn's authors found: by how much turned queries and keys grow when a window is stretched by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class Config(msgspec.Struct, frozen=True):
    """Sizes in elements, ``window`` in rows. ``tied``: the output head is the token embedding.

    ``rotary``: how many of a head's first elements are turned, 0 for all. ``qkv_bias``, ``qk_norm``: whether queries,
    keys and values have a bias, and whether queries and keys are normed a head at a time. ``windows``: how many rows
    each layer sees, a row itself among them, 0 for all; empty where every layer sees all.
    """

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
    rotary: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()

    def seen(self, layer: int) -> int:
        """How many rows ``layer`` sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

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
        if self.rotary < 0 or self.rotary > self.head_dim or self.rotary % 2:
            raise CheckpointError(f"{self.rotary} of a head's {self.head_dim} elements cannot be turned in pairs.")
        if self.windows and (len(self.windows) != self.layers or min(self.windows) < 0):
            raise CheckpointError("The configuration's sliding windows do not fit its layers.")
        scaling = self.rope_scaling
        numbers = (self.eps, self.rope_base, *((scaling.factor, scaling.attention) if scaling else ()))
        if scaling is not None and scaling.kind == "yarn":
            numbers += (scaling.beta_fast, scaling.beta_slow, float(scaling.original_window))
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise CheckpointError("The configuration's eps, rotary base or scaling factor is not a number above 0.")
