"""engine/logprobs.py against a plain reference: alone, in a ``Sequence`` and in a run of the worker's loop."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.logprobs import token_logprob
from engine.protocol import Cancel, Sampling, Start, TokenLogprob, Tokens, frame, from_engine
from engine.scripted import Answer
from engine.sequence import Sequence
from tests.fake_engine import FakeModel
from tests.test_scripted import Driver
from tests.test_worker import Bench
from tests.test_worker import start as worker_start

SIZE = 12
finite = st.lists(st.integers(-80, 80).map(lambda n: n / 4), min_size=SIZE, max_size=SIZE)
GREEDY = Sampling(temperature=0)


def plain(raw: list[float], token: int, n: int, masked: set[int]) -> tuple[float, list[int], list[float]]:
    """The definition: logit less log-sum-exp, in double precision; best first, ties by id, none that was masked."""
    top = max(raw)
    whole = top + math.log(sum(math.exp(value - top) for value in raw))
    ids = sorted((i for i in range(len(raw)) if i not in masked), key=lambda i: (-raw[i], i))[:n]
    return raw[token] - whole, ids, [raw[i] - whole for i in ids]


def near(told: TokenLogprob, expected: tuple[float, list[int], list[float]]) -> bool:
    return told.top_ids == expected[1] and [told.logprob, *told.top_logprobs] == pytest.approx(
        [expected[0], *expected[2]], abs=1e-5
    )


@given(finite, st.integers(0, SIZE - 1), st.integers(0, 20), st.sets(st.integers(0, SIZE - 1), max_size=SIZE - 1))
def test_it_is_the_log_softmax_of_the_raw_logits(raw: list[float], token: int, n: int, masked: set[int]) -> None:
    """F7: values of the raw logits, sorted, ties by id; what a mask forbids is not listed and moves no value."""
    logits = np.array(raw, dtype=np.float32)
    adjusted = logits * 3 - 1
    adjusted[list(masked)] = -np.inf
    assert near(token_logprob(logits, adjusted, token, n), plain(raw, token, n, masked))


@given(finite, st.integers(0, 20))
def test_the_greedy_token_is_the_first_alternative(raw: list[float], n: int) -> None:
    """F7: the chosen value and its own alternative are the same number, at most 0."""
    logits = np.array(raw, dtype=np.float32)
    told = token_logprob(logits, logits, int(logits.argmax()), n)
    assert told.logprob <= 0
    assert n == 0 or (told.top_ids[0], told.top_logprobs[0]) == (int(logits.argmax()), told.logprob)


def test_what_cannot_come() -> None:
    """F7: a logit of -inf stays -inf on the pipe, also when the token was forced, and is listed last."""
    raw = np.array([0.0, -np.inf, 0.0], dtype=np.float32)
    told = token_logprob(raw, np.array([0, 100, 0], dtype=np.float32), 1, 3)
    assert (told.logprob, told.top_ids, told.top_logprobs[2]) == (-math.inf, [0, 2, 1], -math.inf)
    message = Tokens(1, 1, 0, [1], 1.0, [told])
    assert from_engine.decode(frame(message)[4:]) == message


def entry(token: int) -> TokenLogprob:
    return TokenLogprob(-float(token), [token], [-float(token)])


def test_they_are_committed_with_their_tokens() -> None:
    """F7: a round computed ahead keeps its own; one cut at a stop id or at the limit keeps those of its tokens."""
    run = Sequence(Start(1, 1, 0, [1], GREEDY, 4, [9], logprobs=1), 64)
    run.read(1, 1.0)
    run.propose([5], 1.0, logprobs=[entry(5)])
    assert run.settle() == [Tokens(1, 1, 0, [5], 1.0, [entry(5)])]
    run.propose([6, 7], 1.0, logprobs=[entry(6), entry(7)])
    assert run.settle() == []  # one round ahead
    run.seen(1)
    assert run.settle() == [Tokens(1, 1, 1, [6, 7], 1.0, [entry(6), entry(7)])]
    run.seen(3)
    run.propose([8, 9], 1.0, logprobs=[entry(8), entry(9)])
    assert run.settle()[0] == Tokens(1, 1, 3, [8], 1.0, [entry(8)])


def in_a_run(asked: Start) -> list[tuple[int, TokenLogprob]]:
    said = [message for message in Bench().turns(60, asked, ack=True) if isinstance(message, Tokens)]
    return [pair for message in said for pair in zip(message.ids, message.logprobs, strict=True)]


def raw_logits(asked: Start, answer: list[int]) -> list[float]:
    values: list[float] = FakeModel().logits(asked.tokens + answer).tolist()
    return values


HOW: list[dict[str, Any]] = [
    {"sampling": GREEDY},
    {"sampling": Sampling(temperature=1.7, top_k=5, seed=3)},
    {"sampling": Sampling(temperature=0, presence_penalty=2, repetition_penalty=1.5, logit_bias={7: 30.0, 8: -100.0})},
]


@pytest.mark.parametrize("how", HOW)
def test_a_run_tells_what_the_reference_tells(how: dict[str, Any]) -> None:
    """F7: whatever chose the tokens, the values are those of the raw logits; stop ids that may not come are no
    alternative."""
    asked = worker_start(max_tokens=12, stop_ids=[4, 5], min_tokens=6, logprobs=20, **how)
    told = in_a_run(asked)
    assert len(told) >= 6
    for position, (token, value) in enumerate(told):
        before = [token for token, _ in told[:position]]
        assert near(value, plain(raw_logits(asked, before), token, 20, {4, 5} if position < 6 else set()))


def test_asking_changes_no_token() -> None:
    """F7: the answer is the same with and without; without, nothing is computed or sent."""
    asked = worker_start(max_tokens=12, sampling=Sampling(seed=5), logprobs=0)
    told = in_a_run(asked)
    assert [token for token, _ in told] == Bench().answer(msgspec.structs.replace(asked, logprobs=-1))
    assert all(value.top_ids == [] for _, value in told)
    said = Bench().turns(60, worker_start(), ack=True)
    assert all(message.logprobs == [] for message in said if isinstance(message, Tokens))


def test_a_cancelled_round_is_not_told() -> None:
    """F7: the round under way when a run is left goes nowhere, its values neither."""
    run = Sequence(Start(1, 1, 0, [1], GREEDY, 4, [], logprobs=0), 64)
    run.read(1, 1.0)
    run.propose([5], 1.0, logprobs=[entry(5)])
    run.cancel(Cancel(1, 1))
    assert not [message for message in run.settle() if isinstance(message, Tokens)]


def test_a_script_is_sure() -> None:
    """F7: the scripted engine tells of the tokens it commits, and lists no other."""
    driver = Driver(Answer(ids=[11, 12, 13], round=2))
    driver.send(Start(1, 1, 0, [1], GREEDY, 9, [], logprobs=3))
    driver.run()
    told = [value for message in driver.of(Tokens) for value in message.logprobs]
    assert told == [TokenLogprob(0.0, [token], [0.0]) for token in (11, 12, 13)]
