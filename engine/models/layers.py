"""The pieces that decoders share: norm, rotary angles, attention. Written for few operations a step.

A step of a small model on the CPU is bound by the count of torch calls as much as by bytes read, so each piece is put
into as few calls as give the same numbers. The residual stream is float32 throughout.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.weights.config import Config, RopeScaling
from engine.weights.errors import CheckpointError

GRAIN = 32768
"""Up to so many elements torch gives to one thread."""


class Stream:
    """The residual stream of ``n`` rows: ``x`` float32 ``[n, hidden]``, a view that layers add to.

    Behind each row lies one constant element, ``sqrt(hidden * eps)``: the length of the longer row is then
    ``sqrt(sum(x²) + hidden * eps)``, which is what RMS norm divides by, in one call and with eps exact.
    """

    def __init__(self, start: Tensor, eps: float) -> None:
        n, hidden = start.shape
        self.eps = hidden * eps
        self._long = torch.empty(n, hidden + 1, dtype=torch.float32, device=start.device)
        self.x = self._long[:, :hidden]
        self.x.copy_(start)
        self._long[:, hidden] = math.sqrt(hidden * eps)

    def normed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``x / rms(x) * weight`` as ``dtype`` ``[n, hidden]``; ``weight`` comes from :func:`norm_weight`."""
        scaled: Tensor = self.x / torch.linalg.vector_norm(self._long, dim=-1, keepdim=True)
        return scaled.mul_(weight).to(dtype)

    def pick(self, rows: slice | Tensor) -> None:
        """Keep ``rows`` only, in their order."""
        self._long = self._long[rows]
        self.x = self._long[:, :-1]


def norm_weight(weight: Tensor) -> Tensor:
    """A norm's weight, float32 ``[hidden]``, times ``sqrt(hidden)``: the length stands in for the root of the mean."""
    return weight * math.sqrt(weight.numel())


def norm_heads(heads: Tensor, weight: Tensor, eps: float) -> None:
    """RMS norm in place of each head of ``heads``, float32 ``[n, heads, head_dim]``; ``weight`` as for a stream."""
    squares = heads.square().sum(-1, keepdim=True)
    heads.div_(squares.add_(heads.shape[-1] * eps).sqrt_()).mul_(weight)


def frequencies(config: Config, factors: Tensor | None) -> Tensor:
    """Angle a row of each rotated pair, in radians, float32 ``[pairs]``. ``factors``: the file's own divisors.

    Scaled as in transformers (``modeling_rope_utils.py``), which is what the models were trained with.
    """
    turned = config.rotary or config.head_dim
    exponents = torch.arange(0, turned, 2, dtype=torch.int64).float() / turned
    base = 1.0 / (config.rope_base**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(base, scaling)
    if scaling.kind == "yarn":
        return _yarn(base, scaling, config.rope_base)
    if factors is None or factors.numel() != base.numel():
        raise CheckpointError("The file's rope_freqs.weight does not fit its heads; convert the model anew.")
    return base / factors


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_window * base / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return base / scaling.factor * (1 - ramp) + base * ramp


def _yarn(base: Tensor, scaling: RopeScaling, rope_base: float) -> Tensor:
    """Pairs that turn often over the original window as they are, pairs that turn seldom slowed, a ramp between."""
    pairs = base.numel()

    def turning(times: float) -> float:
        """The pair, not a whole number, that turns so many times."""
        return pairs * math.log(scaling.original_window / (times * 2 * math.pi)) / math.log(rope_base)

    low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    slowed = ((torch.arange(pairs).float() - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return base / scaling.factor * slowed + base * (1 - slowed)


def rotations(frequency: Tensor, rows: int, device: torch.device, size: float = 1.0) -> Tensor:
    """``size * exp(i * angle)`` for each row and pair, complex64 ``[rows, 1, pairs]``."""
    angles = torch.outer(torch.arange(rows).float(), frequency)
    return torch.polar(torch.full_like(angles, size), angles)[:, None].to(device)


def rotate(heads: Tensor, turn: Tensor) -> None:
    """Turn ``heads`` float32 ``[n, heads, head_dim]`` in place by ``turn`` complex64 ``[n, 1, pairs]``.

    The two of a pair are neighbours, so a pair is one complex number. A head's elements behind the pairs stay.
    """
    pairs = torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
    pairs[..., : turn.shape[-1]].mul_(turn)


def causal_mask(n: int, start: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What new row ``start + i`` may not see: ``[n, start + n]`` of 0 and -inf, added to scores.

    None where there is no need: one row sees all, and from row 0 on torch's own causal rule is right.
    """
    if n == 1 or start == 0:
        return None
    mask = torch.full((n, start + n), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(start + 1)


def attend(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """``q`` ``[n, heads, head_dim]`` over ``kv`` ``[2 * kv_heads, rows, head_dim]``: ``[n, heads * head_dim]``.

    Several heads share keys. One row: those heads are put as rows of one head, so keys are read once. More rows: keys
    are spread by a view. (``enable_gqa`` takes 5 times as long here for one row.)
    """
    n, heads, width = q.shape
    kv_heads, rows = kv.shape[0] // 2, kv.shape[1]
    keys, values = kv[:kv_heads], kv[kv_heads:]
    if n == 1:
        out = F.scaled_dot_product_attention(q.view(1, kv_heads, -1, width), keys[None], values[None])
        return out.reshape(1, -1)
    share = heads // kv_heads
    spread = (kv_heads, share, rows, width)
    out = F.scaled_dot_product_attention(
        q.view(n, kv_heads, share, width).permute(1, 2, 0, 3),
        keys[:, None].expand(spread),
        values[:, None].expand(spread),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(n, -1)
