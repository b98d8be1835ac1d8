"""engine/sampling.py against a plain reference, and the shape of its noise."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.protocol import Sampling
from engine.sampling import LogitsNotFinite, candidates, choose, noise, nucleus, scale, top

logit_lists = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=40)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.13, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


def logits_of(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def kept(values: list[float], sampling: Sampling) -> list[int]:
    logits = logits_of(values)
    ids = candidates(logits, scale(logits, logits.max(), sampling.temperature), sampling)
    return list(range(len(values))) if ids is None else [int(i) for i in ids]


def plain(values: list[float], sampling: Sampling) -> tuple[list[int], bool]:
    """The filters written out one after another; and whether rounding could have decided."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp((values[i] - values[order[0]]) / sampling.temperature) for i in order]
    near = False
    if sampling.top_p < 1:
        shares = [share / sum(weights) for share in accumulate(weights)]
        near = any(abs(share - sampling.top_p) < 1e-5 for share in shares)
        n = next((i + 1 for i, share in enumerate(shares) if share >= sampling.top_p), len(order))
        order, weights = order[:n], weights[:n]
    near = near or any(abs(w - sampling.min_p) < 1e-5 for w in weights[1:] if w != weights[0])
    return sorted(i for i, w in zip(order, weights, strict=True) if w >= sampling.min_p), near


@given(logit_lists, samplings)
def test_the_filters_keep_what_the_plain_reference_keeps(values: list[float], sampling: Sampling) -> None:
    expected, near = plain(values, sampling)
    assume(not near)
    assert kept(values, sampling) == expected


@given(logit_lists, samplings, st.integers(0, 3), st.integers(0, 10_000))
def test_the_choice_is_the_winner_of_a_plain_race(
    values: list[float], sampling: Sampling, choice: int, position: int
) -> None:
    ids = kept(values, sampling)
    race = noise(sampling.seed, choice, position, len(values))
    scores = {i: values[i] / sampling.temperature - math.log(race[i]) for i in ids}
    token = choose(logits_of(values), sampling, choice, position)
    assert token in ids
    assert scores[token] == pytest.approx(max(scores.values()), rel=1e-4, abs=1e-4)


@given(logit_lists, st.integers(1, 45))
def test_top_k_keeps_exactly_k_and_the_lower_id_where_logits_tie(values: list[float], k: int) -> None:
    ids = [int(i) for i in top(logits_of(values), k)]
    assert ids == sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])


@given(logit_lists, st.floats(0.001, 1.0))
def test_min_p_keeps_the_best_and_nothing_below_its_share(values: list[float], min_p: float) -> None:
    ids = kept(values, Sampling(min_p=min_p))
    best = max(values)
    assert values.index(best) in ids
    assert all(math.exp(values[i] - best) >= min_p * (1 - 1e-5) for i in ids)


@given(logit_lists, st.floats(0.001, 0.999))
def test_top_p_is_the_smallest_head_that_reaches_the_share(values: list[float], top_p: float) -> None:
    logits = logits_of(values)
    weights = sorted((math.exp(v - max(values)) for v in values), reverse=True)
    n = nucleus(scale(logits, logits.max(), 1.0), top_p)
    assert sum(weights[:n]) >= top_p * sum(weights) - 1e-4
    assert n == 1 or sum(weights[: n - 1]) < top_p * sum(weights) + 1e-4


def test_a_long_flat_tail_is_sorted_too() -> None:
    logits = np.full(5000, -20.0, dtype=np.float32)
    logits[7] = 0.0
    logits[8:4000] = -9.0  # 33 % of the weight lies in a tail that the first sort leaves out
    assert nucleus(scale(logits, logits.max(), 1.0), 0.9) > 1000
    assert nucleus(scale(logits, logits.max(), 1.0), 0.999999) > 3900


@given(logit_lists, st.sampled_from([{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}]))
def test_greedy_takes_the_lowest_id_among_the_best(values: list[float], how: dict[str, float]) -> None:
    assert choose(logits_of(values), Sampling(**how), 0, 0) == values.index(max(values))


def test_same_seed_same_token_and_every_part_of_the_key_counts() -> None:
    """F8: the noise is a function of (seed, choice, position, id) alone."""
    first = noise(7, 0, 3, 100)
    assert np.array_equal(first, noise(7, 0, 3, 100))
    for other in (noise(8, 0, 3, 100), noise(7, 1, 3, 100), noise(7, 0, 4, 100)):
        assert not np.array_equal(first, other)
    assert np.array_equal(first, noise(7, 0, 3, 101)[:100])
    for ids in (np.array([99]), np.arange(0, 100, 7), np.arange(100)):
        assert np.array_equal(first[ids], noise(7, 0, 3, 100, ids))


def test_a_filter_that_leaves_the_winner_in_leaves_the_token() -> None:
    """F8: noise hangs on the token's id, not on its place among the candidates."""
    logits = np.random.default_rng(1).normal(0, 2, 500).astype(np.float32)
    for position in range(50):
        token = choose(logits, Sampling(seed=5), 0, position)
        k = int((logits > logits[token]).sum()) + 1
        assert choose(logits, Sampling(seed=5, top_k=max(k, 2)), 0, position) == token


def test_noise_is_above_zero_and_philox_is_the_published_one() -> None:
    assert all(noise(seed, 0, 0, 1000).min() > 0 for seed in range(50))
    # Random123's known answer for philox4x64-10, counter 0 and key 0; numpy counts up before it draws
    words = np.random.Philox(key=np.zeros(2, np.uint64), counter=np.full(4, 2**64 - 1, np.uint64)).random_raw(4)
    assert [f"{w:016x}" for w in words] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]


def test_the_stream_is_pinned() -> None:
    """F8: a change of this stream changes every sampled answer; it must not come unnoticed."""
    words = np.random.Philox(key=np.array([42, 1], np.uint64), counter=np.array([0, 0, 9, 0], np.uint64)).random_raw(2)
    expected = [-math.log(((int(w) >> shift & 0xFFFFFFFF) + 0.5) / 2**32) for w in words for shift in (0, 32)]
    assert noise(42, 1, 9, 4) == pytest.approx(expected, rel=1e-6)


def test_what_is_drawn_follows_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
    logits = np.log(probabilities).astype(np.float32)
    n = 20_000
    counts = np.bincount([choose(logits, Sampling(seed=s), 0, s % 7) for s in range(n)], minlength=5)
    chi2 = float(((counts - n * probabilities) ** 2 / (n * probabilities)).sum())
    assert chi2 < 18.5  # 4 degrees of freedom, p = 0.001; the seeds are fixed, so it holds always or never


def test_positions_of_one_seed_are_independent_draws() -> None:
    logits = np.zeros(4, dtype=np.float32)
    drawn = [choose(logits, Sampling(seed=3), 0, position) for position in range(8000)]
    pairs = np.bincount([4 * a + b for a, b in pairwise(drawn)], minlength=16)
    assert float(((pairs - 500) ** 2 / 500).sum()) < 37.7  # 15 degrees of freedom, p = 0.001


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e9])
def test_extreme_temperatures_are_no_error(temperature: float) -> None:
    logits = logits_of([1.0, 5.0, -1e30, -math.inf])
    token = choose(logits, Sampling(temperature=temperature), 0, 0)
    assert token == 1 if temperature < 1 else token in (0, 1, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(LogitsNotFinite):
        choose(logits_of([0.0, bad, 1.0]), Sampling(temperature=0), 0, 0)


def test_a_negative_temperature_is_an_error() -> None:
    with pytest.raises(ValueError, match="temperature"):
        choose(logits_of([0.0, 1.0]), Sampling(temperature=-1), 0, 0)
