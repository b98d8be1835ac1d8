"""Thinking and the kept end of a prompt in the engine's own loop: a tiny random checkpoint, the embedded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.failpoints import Failpoints
from engine.load import load
from engine.models import registry
from engine.pieces import Vocabulary
from engine.protocol import (
    Cancel,
    Chunk,
    Config,
    Ended,
    FromEngine,
    Resumed,
    Sampling,
    Seen,
    Start,
    Thinking,
    TokenLogprob,
    Tokens,
    Turn,
)
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model
from engine.worker import Engine
from tests.checkpoints import write_gguf
from tests.test_worker import Line

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(seed=5)


class Loop:
    """The loop over a checkpoint, with every round acknowledged."""

    def __init__(self, path: Path, window: int = 0, vocabulary: Vocabulary | None = None) -> None:
        self.line, failpoints = Line(), Failpoints({})
        config = Config(
            1, str(path), device="cpu", threads=1, prefix_chunk=64, safe_rows=16, max_len=window, park_bytes=0,
            speculate=False,
        )  # fmt: skip
        loaded = load(config, open_checkpoint(path), registry.build, self.line, failpoints)
        self.vocabulary = vocabulary or loaded.vocabulary
        self.engine = Engine(config, dataclasses.replace(loaded, vocabulary=self.vocabulary), self.line, failpoints)

    def said(self, message: Start) -> list[FromEngine]:
        """All that is said until the run ends."""
        first = len(self.line.said)
        self.line.inbox.append(message)
        while not isinstance(self.line.said[-1], Ended) or len(self.line.said) == first:
            at = len(self.line.said)
            self.engine.turn()
            self.line.inbox += [Seen(1, m.run, m.start + len(m.ids)) for m in self.line.said[at:] if type(m) is Tokens]
        return self.line.said[first:]

    def answer(self, message: Start) -> tuple[list[int], list[Turn], Ended]:
        said = self.said(message)
        ended = said[-1]
        assert isinstance(ended, Ended)
        tokens = [m for m in said if isinstance(m, Tokens)]
        return [i for m in tokens for i in m.ids], [turn for m in tokens for turn in m.turns], ended


def start(*how: Any, run: int = 1, max_tokens: int = 60, ngram: int = 0, **more: Any) -> Start:
    thinking = msgspec.structs.replace(Thinking(*how), ngram=ngram)
    sampling = more.pop("sampling", SAMPLED)
    return Start(1, run, 0, [20 + i % 90 for i in range(40)], sampling, max_tokens, [], thinking=thinking, **more)


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return Loop(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", {}))


@pytest.fixture(scope="module")
def embedded() -> Iterator[Loop]:
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model is not installed")
    yield Loop(path, 512)


def check_budget(loop: Loop, cap: int) -> None:
    """The model's own tokens up to the cap, then the tag; then what it writes had the prompt held all that."""
    close, asked = list(loop.vocabulary.close), start("open", cap, max_tokens=30, sampling=GREEDY)
    free, none, _ = loop.answer(msgspec.structs.replace(asked, thinking=Thinking("open")))
    answer, turns, ended = loop.answer(asked)
    whole = cap + len(close)
    assert not none and len(answer) == 30 and ended.reason == "length"
    assert answer[:whole] == free[:cap] + close
    assert turns == [Turn("closed", whole - 1, 8, 0, "budget")]
    after = Start(1, 2, 0, asked.tokens + answer[:whole], GREEDY, 1, [])
    assert loop.answer(after)[0] == answer[whole : whole + 1]


def test_a_budget_closes_what_the_prompt_opened(tiny: Loop) -> None:
    """C3: field report 10: exact reasoning, and the forced tokens go through the model: the next follows from them."""
    for cap in (0, 1, 13):
        check_budget(tiny, cap)


@pytest.mark.e2e
def test_a_budget_closes_it_with_a_real_model(embedded: Loop) -> None:
    """C3: the same with the embedded model."""
    check_budget(embedded, 13)


def test_forced_tokens_have_their_raw_log_probability(tiny: Loop) -> None:
    """F7, C3: of the raw logits, as a sampled one's; the likeliest beside it are no different for the force."""
    said = tiny.said(start("open", 4, logprobs=3))
    forced = [m for m in said if isinstance(m, Tokens) and 4 <= m.start < 12]
    assert len(forced) == 8
    for message in forced:
        entry = message.logprobs[0]
        assert entry.logprob <= entry.top_logprobs[0] <= 0 and len(set(entry.top_ids)) == 3


def test_without_a_wish_nothing_changes(tiny: Loop) -> None:
    """C5: token for token; a state alone forces nothing, nor a budget or a reserve that is never reached."""
    plain = tiny.answer(start())[0]
    for how in (("open",), ("may",), ("open", 60), ("may", 3, -1, True), ("off", 3, -1, True)):
        assert tiny.answer(start(*how))[0] == plain


def test_the_reserve_is_left(tiny: Loop) -> None:
    """C4: field report 11: a quarter of the limit, also when the window is what limits."""
    answer, turns, _ = tiny.answer(start("open", -1, -1))
    assert len(answer) == 60 and turns == [Turn("closed", 44, 8, 0, "reserve")]
    answer, turns, _ = tiny.answer(start("open", -1, -1, max_tokens=9999))
    assert len(answer) == 88 and turns == [Turn("closed", 65, 8, 0, "reserve")]
    answer, turns, _ = tiny.answer(start("open", max_tokens=20))
    assert len(answer) == 20 and turns == []


def test_a_stall_is_closed(tiny: Loop) -> None:
    """C8: a token that a bias makes the only one is closed after the fourth, and goes on in the answer."""
    token = tiny.vocabulary.pieces.index(b"x")
    stuck = Sampling(temperature=0, logit_bias={token: 100.0})
    answer, turns, _ = tiny.answer(start("open", -1, 0, True, sampling=stuck))
    assert answer == [token] * 4 + list(tiny.vocabulary.close) + [token] * 48
    assert turns == [Turn("closed", 11, 8, 0, "stall")]
    assert tiny.answer(start("open", sampling=stuck))[0] == [token] * 60


def test_the_models_own_tag_closes_and_opens(tiny: Loop) -> None:
    """C6, B0: spelled in ordinary tokens by the model itself, or as the token of that name; caps count from the tag."""
    letters = {bytes([byte]): tiny.vocabulary.pieces.index(bytes([byte])) for byte in b"</think>"}
    once = Sampling(temperature=0, logit_bias={i: 100.0 - n for n, i in enumerate(letters.values())})
    # every token of the tag in its order, once: the bias is the order, and an n-gram of one token comes only once
    answer, turns, _ = tiny.answer(start("open", ngram=1, sampling=once))
    assert answer[:8] == [letters[bytes([byte])] for byte in b"</think>"]
    assert turns == [Turn("closed", 7, 8, 0, "model")]


def test_special_tokens_open_and_close(tiny: Loop, tmp_path: Path) -> None:
    """C6, B0: the added tokens of that name, which write no byte; a bias stands for a model that likes them."""
    pieces = [b"" if token in (270, 271) else piece for token, piece in enumerate(tiny.vocabulary.pieces)]
    vocabulary = Vocabulary(pieces, frozenset({270}), frozenset({271}), (271,))
    loop = Loop(write_gguf(tmp_path / "tiny.gguf", {}), vocabulary=vocabulary)
    likes = Sampling(temperature=0, logit_bias={270: 100.0})
    answer, turns, _ = loop.answer(start("may", 5, sampling=likes))
    assert answer == [270] * 5 + [271] + [270] * 54
    assert turns == [Turn("opened", 0, 0, 0), Turn("closed", 5, 0, 0, "budget")]
    likes = Sampling(temperature=0, logit_bias={271: 100.0})
    answer, turns, _ = loop.answer(start("open", 5, sampling=likes, ngram=1))
    assert answer[0] == 271 and turns == [Turn("closed", 0, 0, 0, "model")]
    assert loop.answer(start("may", 5, sampling=likes))[1] == []


def test_no_ngram_twice_in_the_thinking(tiny: Loop) -> None:
    """A4: with 2, no two tokens follow each other twice while it thinks; in the answer they may."""
    token = tiny.vocabulary.pieces.index(b"x")
    stuck = Sampling(temperature=0, logit_bias={token: 8.0})
    answer, _, _ = tiny.answer(start("open", 40, ngram=2, sampling=stuck))
    pairs = list(pairwise(answer[:40]))
    assert len(set(pairs)) == len(pairs)
    assert answer[48:] == [token] * 12 and tiny.answer(start(ngram=2, sampling=stuck))[0] == [token] * 60


# -- the kept end ------------------------------------------------------------------------------------------------------


def tokens_of(said: list[FromEngine]) -> list[tuple[int, TokenLogprob]]:
    """The answer's tokens, with their log-probabilities."""
    rounds = [m for m in said if isinstance(m, Tokens)]
    return [pair for m in rounds for pair in zip(m.ids, m.logprobs, strict=True)]


def check_kept_end(loop: Loop) -> None:
    """Choices with and without a kept end are the same tokens, and only the first reads the prompt."""
    asked = start(max_tokens=12, logprobs=1)
    plain = [tokens_of(loop.said(msgspec.structs.replace(asked, choice=i))) for i in range(3)]
    assert plain[1] != plain[2]
    loop.said(msgspec.structs.replace(asked, tokens=[5, 6]))  # nothing of the prompt is resident
    for i in range(3):
        said = loop.said(msgspec.structs.replace(asked, run=10 + i, choice=i, keep_end=i < 2))
        resumed = [m for m in said if isinstance(m, Resumed)]
        assert resumed == ([Resumed(1, 10 + i, 40, "end")] if i else [])
        assert [m.done for m in said if isinstance(m, Chunk)] == ([40] if i else [16, 32, 40])
        assert tokens_of(said) == plain[i]


def test_choices_from_a_kept_end_are_the_same(tiny: Loop) -> None:
    """F11, F8: bit for bit, whatever n is."""
    check_kept_end(tiny)


@pytest.mark.e2e
def test_choices_from_a_kept_end_are_the_same_with_a_real_model(embedded: Loop) -> None:
    """F11, F8: the same with the embedded model."""
    check_kept_end(embedded)


def test_a_choice_that_is_cancelled_leaves_the_next_as_it_is(tiny: Loop) -> None:
    """F11, G5: a stop text found in choice 0 cancels it; choice 1 begins at the same end, whatever rows were kept.

    A cancel that names no rows is a client's that left: no choice follows it.
    """
    asked = start(max_tokens=12, logprobs=1)
    plain = tokens_of(tiny.said(msgspec.structs.replace(asked, choice=1)))
    for run, keep in ((20, 0), (30, 2)):
        line, first = tiny.line, len(tiny.line.said)
        line.inbox.append(msgspec.structs.replace(asked, run=run, keep_end=True))
        while sum(isinstance(m, Tokens) for m in line.said[first:]) < 3:
            at = len(line.said)
            tiny.engine.turn()
            line.inbox += [Seen(1, m.run, m.start + len(m.ids)) for m in line.said[at:] if isinstance(m, Tokens)]
        line.inbox.append(Cancel(1, run, keep))
        tiny.engine.turn()
        ended = line.said[-1]
        assert isinstance(ended, Ended) and (ended.reason, ended.kept) == ("cancelled", 40 + keep)
        said = tiny.said(msgspec.structs.replace(asked, run=run + 1, choice=1))
        assert [m.rows for m in said if isinstance(m, Resumed)] == [40] and tokens_of(said) == plain


def test_another_prompt_in_the_slot_drops_the_end(tiny: Loop) -> None:
    """F11: its rows are written over."""
    asked = start(run=1, keep_end=True)
    first = tiny.answer(asked)[0]
    tiny.answer(msgspec.structs.replace(asked, run=2, tokens=[30, 31], keep_end=False))
    said = tiny.said(msgspec.structs.replace(asked, run=3))
    assert not any(m.source == "end" for m in said if isinstance(m, Resumed))
    assert [t for m in said if isinstance(m, Tokens) for t in m.ids] == first
