"""What fields do to single logits: ``Adjustments`` alone, in a ``Sequence`` and in a run, against a plain reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.protocol import Cancel, Ended, Sampling, Start
from engine.sampling import Adjustments, LogitsNotFinite, choose
from engine.sequence import Sequence, Step
from tests.fake_engine import FakeModel
from tests.test_worker import Bench
from tests.test_worker import start as worker_start

SIZE = 40  # over the room there is at first
ids = st.integers(0, SIZE - 1)
values = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=SIZE, max_size=SIZE)
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 3.0]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=4),
)
tokens = st.lists(ids, max_size=60)
starts = st.builds(
    Start, st.just(1), st.just(1), st.just(0), tokens, samplings, st.just(99), st.lists(ids, max_size=3),
    min_tokens=st.integers(0, 20),
)  # fmt: skip


def start(prompt: list[int], stop_ids: list[int] | None = None, min_tokens: int = 0, **how: Any) -> Start:
    return Start(1, 1, 0, prompt, Sampling(temperature=0, **how), 99, stop_ids or [], min_tokens=min_tokens)


def plain(logits: list[float], asked: Start, answer: list[int]) -> list[float]:
    """The definitions written out, one token at a time."""
    out, how = [], asked.sampling
    for token, logit in enumerate(logits):
        value = logit
        if token in asked.tokens or token in answer:
            value = value / how.repetition_penalty if value > 0 else value * how.repetition_penalty
        count = answer.count(token)
        value -= how.presence_penalty * (count > 0) + how.frequency_penalty * count
        value += how.logit_bias.get(token, 0.0)
        early = len(answer) < asked.min_tokens and token in asked.stop_ids
        out.append(-math.inf if early else value)
    return out


def adjusted(logits: list[float], asked: Start, answer: list[int]) -> list[float]:
    adjustments = Adjustments(asked)
    for token in answer:
        adjustments.count([token])
    return [float(x) for x in adjustments.apply(np.array(logits, np.float32), len(answer))]


@given(values, starts, tokens)
def test_all_fields_are_what_their_definitions_say(logits: list[float], asked: Start, answer: list[int]) -> None:
    """A4: repetition, then presence and frequency, then bias, then the stop ids; greedy takes the best of that (A1)."""
    expected = plain(logits, asked, answer)
    got = adjusted(logits, asked, answer)
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-4)
    best = sorted(expected)
    assume(best[-1] - best[-2] > 1e-3)
    assert choose(np.array(got, np.float32), asked.sampling, 0, 0) == expected.index(best[-1])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"presence_penalty": 0.5}, [2.0, -2.0, 0.5, -1.5]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 0.0, -1.5]),
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, -2.0]),
        ({"logit_bias": {1: 4.0, 3: -100.0}}, [2.0, 2.0, 1.0, -101.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {3: 4.0}}, [1.0, -2.0, -0.5, 1.0]),
        ({"min_tokens": 4, "stop_ids": [0]}, [-math.inf, -2.0, 1.0, -1.0]),
        ({"min_tokens": 3, "stop_ids": [0]}, [2.0, -2.0, 1.0, -1.0]),
    ],
)
def test_one_field_by_hand(how: dict[str, Any], expected: list[float]) -> None:
    """A1: token 0 is in the prompt, 2 twice and 3 once in the answer, 1 nowhere (A4)."""
    assert adjusted([2.0, -2.0, 1.0, -1.0], start([0], **how), [2, 2, 3]) == expected


@given(values, tokens, tokens)
def test_neutral_values_give_back_the_very_array(logits: list[float], prompt: list[int], answer: list[int]) -> None:
    """A1: a run that asks for nothing pays nothing, and gets the same bits."""
    adjustments = Adjustments(start(prompt, stop_ids=[1]))
    adjustments.count(answer)
    given_logits = np.array(logits, np.float32)
    assert adjustments.apply(given_logits, len(answer)) is given_logits
    least = Adjustments(start(prompt, stop_ids=[1], min_tokens=2))
    assert least.apply(given_logits, 2) is given_logits


def test_the_logits_given_stay_as_they_are() -> None:
    """F7: log-probabilities are of the raw logits."""
    raw = np.ones(4, np.float32)
    Adjustments(start([1], [2], 1, repetition_penalty=2.0, logit_bias={0: 5.0})).apply(raw, 0)
    assert raw.tolist() == [1.0] * 4


@pytest.mark.parametrize("repetition", [5e-324, 1e-300, 1e300, 1.7e308])
def test_any_penalty_above_zero_leaves_numbers(repetition: float) -> None:
    """A6a: over 0 is all that is asked of a repetition penalty."""
    got = adjusted([3.0, -3.0, 0.0, 1.0], start([0, 1, 2], repetition_penalty=repetition), [])
    assert all(math.isfinite(x) for x in got)
    assert choose(np.array(got, np.float32), Sampling(seed=1), 0, 0) in (0, 1, 2, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_penalty_hides_logits_that_are_no_numbers(bad: float) -> None:
    """F6: a forward pass that went wrong is still a fault."""
    with pytest.raises(LogitsNotFinite):
        adjusted([0.0, bad, 1.0], start([1], [1], 1, repetition_penalty=2.0), [])


# -- in a sequence ---------------------------------------------------------------------------------------------------


def frequency(run: Sequence, size: int = 10) -> list[float]:
    """How often the run counts each token."""
    return [-x for x in run.adjustments.apply(np.zeros(size, np.float32), len(run.answer)).tolist()]


def test_a_token_counts_before_the_next_one_of_its_round_is_chosen() -> None:
    """A1, F8: at once, and once: what is drafted and accepted is chosen as it would be a round at a time."""
    run = Sequence(start([1, 2], stop_ids=[9], frequency_penalty=1.0), 64)
    run.read(run.chunk(8)[1], 1.0)
    assert run.take(5) and frequency(run) == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert run.take(5) and run.take(6) and frequency(run)[5:] == [2, 1, 0, 0, 0]
    run.close(1.0)
    run.settle()
    assert run.answer == [5, 5, 6] and frequency(run)[5:] == [2, 1, 0, 0, 0]
    run.propose([7], 1.0)
    run.settle()  # nothing is acknowledged: nothing is committed
    assert run.step is Step.WAIT and frequency(run)[5:] == [2, 1, 1, 0, 0]
    run.cancel(Cancel(1, 1))
    run.settle()
    assert run.answer == [5, 5, 6] and run.step is Step.OVER


def test_what_a_round_is_cut_of_does_not_count() -> None:
    """A1: neither the stop id nor what stands behind it."""
    run = Sequence(start([1, 2], stop_ids=[9], frequency_penalty=1.0), 64)
    run.read(run.chunk(8)[1], 1.0)
    run.propose([5, 6, 9, 7], 1.0)
    run.settle()
    assert frequency(run)[5:] == [1, 1, 0, 0, 0]


def test_no_stop_id_ends_an_answer_before_min_tokens() -> None:
    """A4: whatever proposes the tokens, an answer has at least so many."""
    run = Sequence(start([1, 2], stop_ids=[9], min_tokens=2), 64)
    run.read(run.chunk(8)[1], 1.0)
    run.propose([5, 9, 9, 7], 1.0)
    ended = run.settle()[-1]
    assert isinstance(ended, Ended) and (ended.reason, ended.generated, run.answer) == ("stop", 2, [5, 9])


# -- in a run of the worker's loop -------------------------------------------------------------------------------------


def written(asked: Start) -> list[int]:
    """The greedy answer of the fake model by the plain reference, without a cache that is kept."""
    model, answer = FakeModel(), list[int]()
    while len(answer) < asked.max_tokens:
        logits = plain(model.logits(asked.tokens + answer).tolist(), asked, answer)
        token = logits.index(max(logits))
        if token in asked.stop_ids:
            break
        answer.append(token)
    return answer


WISHES: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.8},
    {"logit_bias": {7: 2.5, 11: -100.0}},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "logit_bias": {7: 1.0}},
]


@pytest.mark.parametrize("how", WISHES)
def test_a_run_writes_what_the_reference_writes(how: dict[str, Any]) -> None:
    """A4: each penalty end to end in the engine's loop (A1)."""
    asked = worker_start(max_tokens=25, sampling=Sampling(temperature=0, **how))
    answer = Bench().answer(asked)
    assert answer == written(asked)
    assert answer != Bench().answer(worker_start(max_tokens=25))


def test_a_forced_token_and_a_stop_id_that_has_to_wait() -> None:
    """A4: a bias of 100 forces a token; as a stop id it comes as soon as it may."""
    force = Sampling(logit_bias={7: 100.0})
    assert Bench().answer(worker_start(sampling=force)) == [7] * 5
    assert Bench().answer(worker_start(sampling=force, stop_ids=[7])) == []
    late = Bench().answer(worker_start(sampling=force, stop_ids=[7], max_tokens=20, min_tokens=6))
    assert len(late) == 6 and 7 not in late
    assert len(Bench().answer(worker_start(sampling=force, stop_ids=[7], min_tokens=60))) == 5  # the limit comes first
