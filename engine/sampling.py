"""How the next token is chosen from the logits: a pure function of logits, ``Sampling``, choice and position.

Order: temperature; then ``top_k``, ``top_p`` and ``min_p``, each on what the one before left, on the distribution
after temperature (the order of Hugging Face's warpers). Where logits tie, the lower id comes first, so ``top_k`` keeps
exactly k tokens.

Sampling is the Gumbel-max trick, written as its equal, the exponential race: the token with the largest
``exp(logit / temperature) / e`` wins, with e independent and exponential (Gumbel 1954; Maddison et al., "A* Sampling",
2014). The noise of a token depends on (seed, choice, position in the answer, token id) alone and is drawn by counter
(Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). So nothing drawn before, no
batch and no other run moves it, and a filter that leaves the winner in leaves the token as it was.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.protocol import Sampling

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

_WORD = (1 << 64) - 1
_COLDEST = 1e-30  # below it a division could leave the range of float32
_SORTED_FIRST = (1e-2, 1e-5, 0.0)  # of the best token's weight


class LogitsNotFinite(Exception):
    """The best logit is no number, or infinite: the forward pass went wrong."""


def choose(logits: Logits, sampling: Sampling, choice: int, position: int) -> int:
    """The id of the next token, from float32 logits ``[vocab]`` for ``position`` of the answer.

    Greedy at ``temperature`` 0 or ``top_p`` 0: the lowest id among the best. Raises ``LogitsNotFinite``, and
    ``ValueError`` for a temperature below 0.
    """
    best = int(logits.argmax())  # a NaN is the maximum to numpy, so one check finds it wherever it is
    if not math.isfinite(logits[best]):
        raise LogitsNotFinite
    if sampling.temperature == 0 or sampling.top_p <= 0 or sampling.top_k == 1:
        return best
    if not sampling.temperature > 0:
        raise ValueError("a temperature below 0")
    scaled = scale(logits, logits[best], sampling.temperature)
    ids = candidates(logits, scaled, sampling)
    race = noise(sampling.seed, choice, position, len(logits), ids)
    if ids is None:
        return int((np.exp(scaled) / race).argmax())
    return int(ids[(np.exp(scaled[ids]) / race).argmax()])


def scale(logits: Logits, best: np.float32, temperature: float) -> Logits:
    """Log-weights, float32 ``[vocab]``: 0 for the best token, less for the others, -inf for what can never win."""
    with np.errstate(over="ignore"):  # a tiny temperature takes the others to -inf
        scaled = logits - best
        scaled /= max(temperature, _COLDEST)
    return scaled


def candidates(logits: Logits, scaled: Logits, sampling: Sampling) -> Ids | None:
    """The ids that may be drawn, ascending, at least one; None when every token may."""
    ids: Ids | None = None
    if 0 < sampling.top_k < len(logits):
        ids = top(logits, sampling.top_k)
    if sampling.top_p < 1:
        kept = logits if ids is None else logits[ids]
        inside = top(kept, nucleus(scaled if ids is None else scaled[ids], sampling.top_p))
        ids = inside if ids is None else ids[inside]
    if sampling.min_p > 0:
        floor = min(math.log(sampling.min_p), 0.0)  # the best token always stays
        inside = np.flatnonzero((scaled if ids is None else scaled[ids]) >= floor)
        ids = inside if ids is None else ids[inside]
    return ids


def top(values: Logits, n: int) -> Ids:
    """The places of the ``n`` largest values, ascending; among equal ones the first."""
    if n >= len(values):
        return np.arange(len(values))
    least = np.partition(values, len(values) - n)[len(values) - n]
    chosen = np.flatnonzero(values >= least)
    surplus = len(chosen) - n
    if surplus:
        last_of_the_least = np.flatnonzero(values[chosen] == least)[-surplus:]
        chosen = np.delete(chosen, last_of_the_least)
    return chosen


def nucleus(scaled: Logits, top_p: float) -> int:
    """How many of the likeliest tokens it takes for their share to reach ``top_p``: at least one."""
    weights = np.exp(scaled)
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for floor in _SORTED_FIRST:  # sorting all is most of the cost, and seldom needed
        head = weights[weights >= floor].astype(np.float64)
        if head.sum() >= wanted:
            break
    shares = np.cumsum(np.sort(head)[::-1])
    return min(int(np.searchsorted(shares, wanted)) + 1, len(head))


def noise(seed: int, choice: int, position: int, vocab: int, ids: Ids | None = None) -> Logits:
    """Exponential noise, float32 ``[vocab]``, every value above 0: the stream of key (seed, choice) at ``position``.

    With ``ids`` only theirs, the same values: few ids that a filter left are worth few logarithms. Each id takes 32
    bits of the stream. The raw bits of a bit generator are stable over numpy's versions (NEP 19); its distributions are
    not, so none is used.
    """
    key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, position & _WORD, 0], dtype=np.uint64)  # numpy counts up from the first word
    words = np.random.Philox(counter=counter, key=key).random_raw((vocab + 1) // 2)
    bits = words.astype("<u8", copy=False).view("<u4")[:vocab]
    uniform = (bits if ids is None else bits[ids]).astype(np.float64)
    uniform += 0.5  # never 0 and never 1
    uniform *= 2.0**-32
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform).astype(np.float32)
