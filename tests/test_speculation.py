"""Drafts change when a token comes, never which: the loop with drafts that are forced on it, right and wrong ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting import Drafting
from engine.load import Loaded
from engine.pieces import Vocabulary
from engine.protocol import Ended, FromEngine, Grammar, Sampling, Seen, Start, Thinking, TokenLogprob, Tokens, Turn
from engine.speculate.draft import Draft, from_branches
from engine.speculate.shape import Shapes
from tests.fake_engine import FakeModel, build
from tests.test_grammar import END, KNOWN, MASKS, Wide, text
from tests.test_worker import FAKE, GREEDY, Bench

PLAIN = msgspec.structs.replace(FAKE, speculate=False)
TAGS = Vocabulary([b""] * 47 + [b"</think>", b"x"], frozenset(), frozenset({47}), (47, 48))


class Told:
    """A drafter that knows the answer. At random it goes on rightly, breaks off, errs, and adds wrong branches."""

    def __init__(self, truth: Sequence[int], prompt: int, seed: int) -> None:
        self._truth, self._prompt, self._told, self._random = list(truth), prompt, 0, random.Random(seed)

    def tell(self, tokens: Sequence[int]) -> None:
        self._told += len(tokens)

    def draft(self, most: int) -> Draft:
        rest = self._truth[self._told - self._prompt :][: self._random.randint(0, 6)]
        wrong = [[self._random.randrange(3, 45) for _ in range(self._random.randint(1, 3))] for _ in range(2)]
        cut = self._random.randint(0, len(rest))
        branches = [(rest, 3.0), (rest[:cut] + wrong[0], 2.0), (wrong[1], 1.0)]
        return from_branches([(branch, weight) for branch, weight in branches if branch], most)


class Loop(Bench):
    """The fake model's loop, with a plain answer as what its drafters know."""

    def __init__(self, known: Vocabulary | None = None, masks: Any = None, made: Any = build, config: Any = FAKE):
        self.truth: list[int] = []
        self.seed = self.prompt = 0

        def drafting(loaded: Loaded) -> Drafting:
            shapes = Shapes({1: 1.0}, learned=False, always=True)
            return Drafting(shapes, 32, lambda *_: Told(self.truth, self.prompt, self.seed))

        super().__init__(config=config, made=made, drafting=None if config is PLAIN else drafting)
        if known is not None:
            self.engine._slots._vocabulary, self.engine._slots._masks = known, masks

    def run(self, message: Start, truth: Sequence[int] = (), seed: int = 0) -> list[FromEngine]:
        """All that is said of a run, every round acknowledged."""
        self.truth, self.prompt, self.seed = list(truth), len(message.tokens), seed
        first = len(self.said)
        self.line.inbox.append(message)
        while not any(isinstance(m, Ended) for m in self.said[first:]):
            at = len(self.said)
            self.engine.turn()
            self.line.inbox += [Seen(1, m.run, m.start + len(m.ids)) for m in self.said[at:] if isinstance(m, Tokens)]
        return self.said[first:]


def told(said: list[FromEngine]) -> tuple[list[int], list[TokenLogprob], list[Turn], str, int]:
    """What reaches a client: tokens, log-probabilities, turns, the end."""
    rounds = [m for m in said if isinstance(m, Tokens)]
    ended = said[-1]
    assert isinstance(ended, Ended)
    return (
        [token for m in rounds for token in m.ids],
        [entry for m in rounds for entry in m.logprobs],
        [turn for m in rounds for turn in m.turns],
        ended.reason,
        ended.generated,
    )


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loops() -> tuple[Loop, Loop]:
    """Without drafts and with them; tags of two tokens."""
    return Loop(TAGS, config=PLAIN), Loop(TAGS)


def check(loops: tuple[Loop, Loop], asked: Start, seed: int) -> Ended:
    plain, drafted = loops
    expected = told(plain.run(asked))
    said = drafted.run(asked, expected[0], seed)
    assert told(said) == expected
    ended, rounds = said[-1], [m for m in said if isinstance(m, Tokens)]
    assert isinstance(ended, Ended)
    assert ended.rounds >= len(rounds) and ended.accepted >= sum(m.accepted for m in rounds)
    whole = len(asked.tokens) + ended.generated
    assert whole - 1 <= ended.kept <= whole
    tokens = [*asked.tokens, *expected[0]][: ended.kept]
    cache: Any = drafted.loaded.caches[0]
    assert cache.tokens[: ended.kept].tolist() == tokens  # the rows that stay are those of what was written
    return ended


samplings = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.7, 1.3]),
    st.sampled_from([0, 5]),
    st.sampled_from([1.0, 0.8]),
    st.just(0.0),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.0, 0.6]),
    st.sampled_from([1.0, 1.4]),
)
thinkings = st.builds(
    Thinking,
    st.sampled_from(["open", "off"]),
    st.integers(-1, 9),
    st.sampled_from([0, -1, 5]),
    st.booleans(),
    st.integers(0, 2),
)


@settings(max_examples=60)
@given(
    samplings,
    thinkings,
    st.lists(st.integers(3, 45), min_size=1, max_size=12),
    st.integers(1, 30),
    st.lists(st.integers(3, 45), max_size=4),
    st.integers(0, 6),
    st.integers(-1, 2),
    st.integers(0, 2),
    st.integers(0, 999),
)
def test_a_drafted_answer_is_the_plain_one(
    loops: tuple[Loop, Loop],
    sampling: Sampling,
    thinking: Thinking,
    prompt: list[int],
    limit: int,
    stops: list[int],
    least: int,
    logprobs: int,
    choice: int,
    seed: int,
) -> None:
    """F8, F7, A1, A4, C3: tokens, log-probabilities, turns and the end, whatever is asked for and drafted."""
    asked = Start(
        1, 1, 0, prompt, sampling, limit, stops, choice, min(least, limit), logprobs, thinking
    )  # fmt: skip
    check(loops, asked, seed)


def test_drafts_are_verified_many_at_once(loops: tuple[Loop, Loop]) -> None:
    """F8: that was not for want of drafts: rows accepted and refused, trees of several branches, few rounds."""
    rounds = accepted = refused = 0
    for seed in range(6):
        asked = Start(1, 1, 0, [5, 6, 7], Sampling(seed=seed), 40, [])
        ended = check(loops, asked, seed)
        rounds += ended.rounds
        accepted += ended.accepted
        refused += ended.drafted - ended.accepted
    assert accepted > 60 and refused > 60 and rounds + accepted == 6 * 40
    model: Any = loops[1].loaded.model
    assert max(rows for rows, _ in model.steps[-20:]) > 5


def test_a_window_that_ends_ends_drafts_too(loops: tuple[Loop, Loop]) -> None:
    """A8: no row is computed behind the window's end, and the last token is the plain one."""
    for seed in range(8):
        asked = Start(1, 1, 0, [3 + i % 40 for i in range(80)], GREEDY, 99, [])
        assert check(loops, asked, seed).generated == 16
    model: Any = loops[1].loaded.model
    assert max(rows + start for rows, start in model.steps) <= 96


BOUNDED = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "b": {"enum": [1, True, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_a_bound_answer_is_the_same_with_drafts() -> None:
    """E3: each verified row has its own mask."""
    loops = Loop(KNOWN, MASKS, lambda *_, **__: Wide(), PLAIN), Loop(KNOWN, MASKS, lambda *_, **__: Wide())
    accepted = 0
    for seed in range(8):
        grammar = Grammar(text("schema", BOUNDED))
        asked = Start(1, 1, 0, [1, 2, 3], Sampling(seed=seed), 60, [END], grammar=grammar, logprobs=1)
        expected = told(loops[0].run(asked))
        said = loops[1].run(asked, expected[0], seed)
        if expected[3] != "fault":  # the fake model's poison is a token of this vocabulary
            assert told(said) == expected
            ended = said[-1]
            assert isinstance(ended, Ended)
            accepted += ended.accepted
    assert accepted > 20


def test_what_does_not_pay_is_not_drafted() -> None:
    """F8: by default a draft is cut to what it is worth; where rows cost as much as steps there is none."""
    asked = Start(1, 1, 0, [5, 6, 7] * 6, Sampling(temperature=0, logit_bias={5: 99.0}), 30, [])
    dear, cheap = (Bench() for _ in range(2))
    for bench, price in ((dear, 5.0), (cheap, 0.01)):
        costs = {rows: 1 + price * (rows - 1) for rows in (1, 2, 4, 8, 16, 32)}
        bench.engine._drafting._shapes = Shapes(costs, learned=False)
    answers = [bench.answer(asked) for bench in (dear, cheap)]
    totals = [next(m for m in bench.said if isinstance(m, Ended)) for bench in (dear, cheap)]
    assert answers[0] == answers[1] == [5] * 30
    assert (totals[0].drafted, totals[0].rounds) == (0, 30) and totals[1].accepted > 15 and totals[1].rounds < 15


def test_a_drafter_that_fails_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    """F6: nobody drafts from then on; only the class is told."""

    class Broken:
        def tell(self, tokens: Sequence[int]) -> None:
            raise RuntimeError("xyzzy")

    bench = Bench(drafting=lambda loaded: Drafting(Shapes(loaded.costs), 32, lambda *_: Broken()))  # type: ignore[arg-type,return-value]
    asked = Start(1, 1, 0, [5, 6, 7], GREEDY, 9, [])
    assert bench.answer(asked) == Bench(config=PLAIN).answer(asked)
    heard = capsys.readouterr().err
    assert heard.count("no more drafts: RuntimeError") == 1 and "xyzzy" not in heard


def test_without_rows_alike_nothing_is_drafted() -> None:
    """F8: where several rows of a step are not what each is alone, none has company."""

    class Unlike(FakeModel):
        alike = 1

    bench = Bench(parallel=2, made=lambda *_, **__: Unlike())
    bench.line.inbox.append(Start(1, 2, 1, [9, 9, 9, 9], GREEDY, 9, []))
    bench.answer(Start(1, 1, 0, [5] * 9, GREEDY, 9, []))
    model: Any = bench.loaded.model
    assert bench.loaded.costs.keys() == {1}
    assert {rows for rows, start in model.steps if start > 9} == {1}
