"""How the next token is chosen from the logits: a pure function of logits, ``Start`` and the answer's tokens so far.

Order: what changes single logits first, in ``Adjustments``: the repetition penalty (Keskar et al., "CTRL", 2019, as
Hugging Face has it), presence and frequency penalties (OpenAI's), the bias, and stop ids that may not come yet. Greedy
sees those too. Then ``choose``: temperature; then ``top_k``, ``top_p`` and ``min_p``, each on what the one before left,
on the distribution after temperature (the order of Hugging Face's warpers). Where logits tie, the lower id comes first,
so ``top_k`` keeps exactly k tokens.

Sampling is the Gumbel-max trick, written as its equal, the exponential race: the token with the largest
``exp(logit / temperature) / e`` wins, with e independent and exponential (Gumbel 1954; Maddison et al., "A* Sampling",
2014). The noise of a token depends on (seed, choice, position in the answer, token id) alone and is drawn by counter
(Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). So nothing drawn before, no
batch and no other run moves it, and a filter that leaves the winner in leaves the token as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from engine.protocol import Sampling, Start

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

_WORD = (1 << 64) - 1
_COLDEST = 1e-30  # below it a division could leave the range of float32
_SORTED_FIRST = (1e-2, 1e-5, 0.0)  # of the best token's weight
_LARGEST = float(np.finfo(np.float32).max)
_PRIME, _BASE = (1 << 61) - 1, 1_000_003_000_017  # of a hash: so many tokens' n-grams do not meet by chance


class LogitsNotFinite(Exception):
    """The best logit is no number, or infinite: the forward pass went wrong."""


class Adjustments:
    """What the fields of one run do to single logits, from the tokens of its prompt and of its answer so far.

    * ``repetition_penalty`` r, for every token of the prompt or the answer: a logit above 0 is divided by r, another
      multiplied;
    * then ``presence_penalty`` p and ``frequency_penalty`` f, for a token the *answer* holds c times, c above 0: the
      logit less p + f * c;
    * then ``logit_bias`` is added;
    * then, while the answer has fewer than ``min_tokens`` tokens, stop ids are at -inf: never chosen;
    * then the ``banned`` tokens are (see ``Repeats``), unless that would leave none.

    Counting a token costs the same however long the answer is; applying costs one copy of the logits and work on the
    touched ids alone. A run that asks for nothing counts nothing and gets back the very array it gave.
    """

    def __init__(self, start: Start) -> None:
        how = start.sampling
        self._repetition, self._presence, self._frequency = (
            how.repetition_penalty, how.presence_penalty, how.frequency_penalty,
        )  # fmt: skip
        self._repeats = self._repetition != 1
        self._penal = self._repeats or self._presence != 0 or self._frequency != 0
        self._bias_ids = np.array(list(how.logit_bias), dtype=np.intp)
        self._bias = np.array(list(how.logit_bias.values()), dtype=np.float32)
        self._min_tokens = start.min_tokens
        self._stop_ids = np.array(start.stop_ids if start.min_tokens > 0 else [], dtype=np.intp)
        self._place: dict[int, int] = {}  # of an id in the two arrays below, which have room to grow
        self._ids = np.empty(16, dtype=np.intp)
        self._counts = np.zeros(16, dtype=np.float64)  # in the answer; 0: in the prompt alone
        for token in start.tokens if self._repeats else []:
            self._seat(token)

    def count(self, tokens: Items[int]) -> None:
        """These tokens came next in the answer; each is counted before the one behind it is chosen."""
        if self._penal:
            for token in tokens:
                place = self._seat(token)  # first: it may put a larger array in the place of this one
                self._counts[place] += 1

    def apply(self, logits: Logits, position: int, banned: Items[int] = ()) -> Logits:
        """The logits to choose from at ``position`` of the answer. Those given stay as they are: logprobs are of them.

        Raises ``LogitsNotFinite`` for what the forward pass did wrong.
        """
        masked = position < self._min_tokens and len(self._stop_ids) > 0
        if not (self._place or len(self._bias_ids) or masked or banned):
            return logits
        highest(logits)  # before a penalty could hide what is no number
        logits = logits.copy()
        if self._place:
            self._penalise(logits)
        logits[self._bias_ids] += self._bias
        if masked:
            logits[self._stop_ids[self._stop_ids < len(logits)]] = -np.inf
        if banned:
            _ban(logits, np.array(banned, dtype=np.intp))
        return logits

    def _penalise(self, logits: Logits) -> None:
        ids, counts = self._ids[: len(self._place)], self._counts[: len(self._place)]
        values = logits[ids].astype(np.float64)
        if self._repeats:
            with np.errstate(over="ignore"):  # any penalty above 0 may be asked for: the clip below bounds it
                values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._presence * (counts > 0) + self._frequency * counts
        logits[ids] = np.clip(values, -_LARGEST, _LARGEST)

    def _seat(self, token: int) -> int:
        """The place of an id, a new one at the end."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place


class Repeats:
    """Which tokens would complete an n-gram that is already there (``no_repeat_ngram_size`` n, as Hugging Face has it).

    Fed with the tokens of the thinking alone. Each costs the same however long that and n are: an n-gram's first n - 1
    tokens are known by a polynomial hash that is rolled on (Karp and Rabin, 1987).
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._tokens: list[int] = []
        self._hash = 0  # of the last n - 1
        self._lead = pow(_BASE, n - 2, _PRIME) if n > 1 else 0
        self._after: dict[int, dict[int, None]] = {}  # by that hash: the tokens that followed, each once

    def tell(self, token: int) -> None:
        """The next token of the thinking."""
        if self._n == 0:
            return
        tokens, size = self._tokens, self._n - 1
        if len(tokens) >= size:
            self._after.setdefault(self._hash, {})[token] = None
            if size:
                self._hash -= (tokens[-size] + 1) * self._lead
        tokens.append(token)
        if size:
            self._hash = (self._hash * _BASE + token + 1) % _PRIME

    def banned(self) -> list[int]:
        """The tokens that may not come next."""
        return list(self._after.get(self._hash, ())) if len(self._tokens) >= self._n - 1 else []


def _ban(logits: Logits, ids: Ids) -> None:
    ids = ids[ids < len(logits)]
    before = logits[ids]
    logits[ids] = -np.inf
    if np.isneginf(logits.max()):
        logits[ids] = before


def highest(logits: Logits) -> int:
    """The lowest id among the best. Raises ``LogitsNotFinite`` when the best is no number, or infinite."""
    best = int(logits.argmax())  # a NaN is the maximum to numpy, so one check finds it wherever it is
    if not math.isfinite(logits[best]):
        raise LogitsNotFinite
    return best


def choose(logits: Logits, sampling: Sampling, choice: int, position: int) -> int:
    """The id of the next token, from float32 logits ``[vocab]`` for ``position`` of the answer.

    Greedy at ``temperature`` 0 or ``top_p`` 0: the lowest id among the best. Raises ``LogitsNotFinite``, and
    ``ValueError`` for a temperature below 0.
    """
    best = highest(logits)
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
