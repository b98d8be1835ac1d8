"""What a step of a hybrid decoder takes beside weights and cache, counted as :mod:`engine.models.workspace` does.

Of a chunk of a prompt. Each function follows the one whose tensors it counts: what stands while a matrix is multiplied,
and where the most stands together.
"""

from __future__ import annotations

from typing import Protocol

from engine.models import delta, workspace
from engine.models.elementwise import WHOLE
from engine.models.experts import Experts, Feed, Gated
from engine.models.gated import Attention, Delta
from engine.models.mtp import Guess
from engine.models.workspace import made, taken, width
from engine.weights.hybrid import HybridConfig
from engine.weights.linear import Linear

UNEVEN = 2
"""The busiest expert has so many times the rows of an even share: how a prompt is routed is not known beforehand."""


class Layer(Protocol):
    """One layer of :mod:`engine.models.hybrid`."""

    @property
    def mixer(self) -> Attention | Delta: ...  # noqa: D102
    @property
    def feed(self) -> Feed: ...  # noqa: D102


class Weights(Protocol):
    """Those of :mod:`engine.models.hybrid`."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...  # noqa: D102
    @property
    def head(self) -> Linear: ...  # noqa: D102
    @property
    def guess(self) -> Guess | None: ...  # noqa: D102


def of_step(config: HybridConfig, weights: Weights, n: int, start: int, size: int, *, native: bool) -> int:
    """Bytes for ``n`` rows behind ``start``; the cache's numbers are of ``size`` bytes. Logits are of one row.

    ``native``: the step goes by the native library's blocks.
    """
    row = n * config.hidden * 4
    turns = n * (config.rotary or config.head_dim) * 4
    stand, most = n * 4 + turns, 0
    for layer in weights.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention) and not native:  # the first makes the mask, which stays
            stand = n * 4 + turns + workspace.masks(config, n, start, size)[0]
        if isinstance(mixer, Delta):
            mixed = of_delta(mixer, config.hidden, n, native=native)
        else:
            mixed = of_attention(mixer, n, start, native=native)
        # A mixer's input stands until the next one's does.
        most = max(most, stand + row + mixed, stand + 2 * row + of_feed(layer.feed, config, n))
    if weights.guess is not None:
        most = max(most, stand + row + of_guess(weights.guess, config.hidden, n))
    head = config.hidden * 6 + _product(weights.head, config.hidden, 1)
    return row + n * 4 + max(most, row + head, config.vocab * 12)


def of_delta(mixer: Delta, hidden: int, n: int, *, native: bool) -> int:
    """A recurrent layer's, its input not among it."""
    sizes, channels = mixer.sizes, mixer.conv.shape[1]
    heads = sizes.value_heads
    wide, keys = heads * sizes.value_dim, heads * sizes.key_dim
    few = sizes.key_heads * sizes.key_dim
    inputs = made(mixer.mix, n) if width(mixer.mix) == 4 else n * mixer.mix.rows * 4
    # Rates and decays; row by row they are filled up to whole vectors, and the kernel takes copies without that.
    small = 8 * n * (heads + -(-heads // WHOLE) * WHOLE) if native else 12 * n * heads
    seen = (n + mixer.conv.shape[0] - 1) * channels * 4
    mixed = n * channels * 4
    spread = 2 * n * keys * 4  # queries and keys a head of values
    out = n * wide * 4
    recalled = 2 * out + (4 * keys * sizes.value_dim if native else 0)
    if not native:
        recalled = max(recalled, 4 * wide * max(0, n - delta.CHUNK) + _chunk(mixer, n))
    most = max(
        _multiplied(mixer.mix, hidden, n),
        inputs + 2 * small,
        inputs + small + seen + mixed * (1 if native else 2),  # the convolution, before and behind silu
        inputs + small + seen + mixed + max(3 * n * few * 4, 2 * n * few * 4 + spread),
        inputs + small + seen + mixed + spread + recalled,
        inputs + small + 2 * out,  # one part's, put together with no other
        inputs + small + 3 * out,  # opened by a gate
    )
    held = n * wide * mixer.out.dtype.itemsize
    stand = inputs + small + out + held
    return max(most, stand + (out if held < out else 0), stand + _product(mixer.out, wide, n))


def _chunk(mixer: Delta, n: int) -> int:
    """:func:`engine.models.delta.chunk` of few rows: its products beside what is put together of them."""
    sizes, rows = mixer.sizes, min(n, delta.CHUNK)
    square, key, value = rows * rows, rows * sizes.key_dim, rows * sizes.value_dim
    state = sizes.key_dim * sizes.value_dim
    stand = 2 * (square + key + value) + 2 * value + (state if n > rows else 0)
    return 4 * (sizes.value_heads * (stand + max(2 * square, square + value, key + 3 * state))) + rows * rows


def of_attention(mixer: Attention, n: int, start: int, *, native: bool) -> int:
    """An attending layer's, its input and the mask not among it."""
    config, size = mixer.config, mixer.dtype.itemsize
    wide = config.heads * config.head_dim
    queries = n * wide * 4
    heads = n * mixer.mix.rows * 4
    held = n * wide * mixer.out.dtype.itemsize
    attended = 2 * queries
    if not native:
        turned = n * wide * size if size < 4 else 0
        attended = turned + max(workspace.attending(n, start + n, wide, config.head_dim, size), n * wide * 4)
    stand = heads + 2 * queries  # what is seen and what opens it
    return max(
        _multiplied(mixer.mix, config.hidden, n),
        heads + queries * (2 if native else 1),  # for a head's norm
        heads + attended,
        stand + queries * (2 if native else 1),
        stand + (queries if held < queries else 0) + held,
        stand + held + _product(mixer.out, wide, n),
    )


def of_feed(feed: Feed, config: HybridConfig, n: int) -> int:
    """A feed-forward layer's, its input not among it."""
    if isinstance(feed, Gated):
        return _gated(feed, config.hidden, n)
    assert isinstance(feed, Experts)
    stand = n * config.hidden * 4  # the sum
    scores = n * (feed.router.rows * 4 + feed.active * 12)
    share = -(-n * feed.active * UNEVEN // len(feed.experts))
    busy, row = min(n, share), config.hidden * 4
    shared = max(_gated(feed.shared, config.hidden, n), 2 * n * row)
    expert = busy * row + max(_gated(feed.experts[0], config.hidden, busy), 2 * busy * row)
    return stand + scores + n * feed.active + max(shared, expert)


def _gated(feed: Gated, hidden: int, n: int) -> int:
    both, size = made(feed.gate_up, n), width(feed.gate_up)
    gated = n * feed.ff * size
    cast = n * feed.ff * feed.down.dtype.itemsize if size != feed.down.dtype.itemsize else 0
    return max(
        _cast(feed.gate_up, n * hidden) + taken(feed.gate_up, hidden, n),
        both + max(2 * gated, gated + cast),
        both + (cast or gated) + _product(feed.down, feed.ff, n),
    )


def of_guess(guess: Guess, hidden: int, n: int) -> int:
    """What the guessing layer takes to write its rows, the model's own hidden rows and their copies among it."""
    row, size = n * hidden * 4, guess.fc.dtype.itemsize
    attention = guess.attention
    heads = n * attention.mix.rows * 4
    squares = n * attention.config.heads * attention.config.head_dim * 4
    normed = n * hidden * size
    return 3 * row + max(
        normed + 3 * row,
        2 * normed + 2 * normed,
        2 * normed + 2 * normed + taken(guess.fc, 2 * hidden, n),
        4 * row,
        row + _multiplied(attention.mix, hidden, n),
        row + heads + squares,
    )


def _cast(linear: Linear, numbers: int) -> int:
    """Float32 activations as ``linear`` takes them."""
    return numbers * linear.dtype.itemsize if linear.dtype.itemsize < 4 else 0


def _multiplied(linear: Linear, cols: int, n: int) -> int:
    """A product of float32 activations, made float32."""
    return max(_cast(linear, n * cols) + taken(linear, cols, n), _product(linear, cols, n))


def _product(linear: Linear, cols: int, n: int) -> int:
    """A product, made float32."""
    return max(taken(linear, cols, n), made(linear, n) + n * linear.rows * 4 if width(linear) < 4 else 0)
