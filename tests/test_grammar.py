"""engine/grammar.py and engine/binding.py: masks against bytes, ends, and what of a run a grammar binds."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.binding import Binding
from engine.failpoints import Failpoints
from engine.grammar import (
    BYTES,
    KEPT,
    MAX_BYTES,
    GrammarRefused,
    Masks,
    Matcher,
    NothingAllowed,
    compile_grammar,
)
from engine.load import load
from engine.pieces import CLOSING, OPENING, Vocabulary, vocabulary
from engine.protocol import (
    Config,
    Ended,
    FromEngine,
    Grammar,
    Ready,
    Resident,
    Sampling,
    Seen,
    Start,
    Thinking,
    ToEngine,
    Tokens,
)
from engine.reasoning import Reasoning
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model
from engine.worker import Engine
from stages.constraint import Constraint, forced, judged
from tests.engine_client import Client
from tests.fake_engine import FakeModel, checkpoint

END, OTHER_END, SPECIAL, OPEN, CLOSE, GLUED = range(256, 262)
PIECES = [*BYTES, b"<eos>", b"", b"", b"", b"", b'>{"']
MASKS = Masks(PIECES, [END, OTHER_END], 270)


def text(kind: str, value: Any = None) -> str:
    found = judged(Constraint(kind=kind, param=kind, value=value), compile_grammar)
    assert isinstance(found, str), found
    return found


def matcher(kind: str, value: Any = None, stops: tuple[int, ...] = (END,), masks: Masks = MASKS) -> Matcher:
    return masks.matcher(Grammar(text(kind, value)), stops)


def flat(size: int = 270) -> np.ndarray[Any, Any]:
    return np.zeros(size, dtype=np.float32)


def open_ids(logits: np.ndarray[Any, Any]) -> list[int]:
    return np.flatnonzero(~np.isneginf(logits)).tolist()


def assert_unbound(binding: Binding) -> None:
    """Inside a block: every token may come but an end, for the answer is still to be written."""
    logits = flat()
    masked = binding.mask(logits)
    assert [at for at in range(len(logits)) if np.isneginf(masked[at])] == [END]
    assert not np.isneginf(logits).any()


def write(binding: Matcher | Binding, data: bytes) -> None:
    for byte in data:
        assert not np.isneginf(binding.mask(flat())[byte]), bytes([byte])
        if isinstance(binding, Matcher):
            binding.commit(byte)
        else:
            TELL(binding, byte)


# -- masks ---------------------------------------------------------------------------------------------------------


def test_a_mask_leaves_what_the_grammar_allows_and_the_logits_as_they_were() -> None:
    """E2: everything else is at -inf, ids beyond the vocabulary too; what is allowed keeps its logit."""
    logits = np.arange(270, dtype=np.float32)
    masked = matcher("choice", ["ab", "ad", "c"]).mask(logits)
    assert open_ids(masked) == [ord("a"), ord("c")]
    assert masked[ord("c")] == ord("c")
    assert logits.tolist() == list(range(270))


def test_an_end_may_come_exactly_when_the_answer_is_complete() -> None:
    """E2: stop ids that write nothing, and those alone that this run stops at."""
    found = matcher("choice", ["a", "ab"], (END, SPECIAL, ord("b")))
    assert open_ids(found.mask(flat())) == [ord("a")]
    found.commit(ord("a"))
    assert found.complete
    assert not found.finished
    assert open_ids(found.mask(flat())) == [ord("b"), END, SPECIAL]
    assert open_ids(matcher("choice", ["a"], ()).mask(flat())) == [ord("a")]


def test_an_answer_that_can_only_end_is_finished() -> None:
    """E2: it needs no stop id to end, so ``ignore_eos`` and ``min_tokens`` cannot keep it running."""
    for stops in ((), (END,)):
        found = matcher("choice", ["a", "ab"], stops)
        write(found, b"a")
        assert not found.finished
        write(found, b"b")
        assert found.finished
    assert matcher("regex", "").finished
    assert not matcher("regex", "a*").finished


def test_a_token_may_end_halfway_through_a_character() -> None:
    """E2: masks are of bytes: é is two tokens here, and its first byte leaves only what completes a letter."""
    found = matcher("regex", "[éè]")
    assert open_ids(found.mask(flat())) == ["é".encode()[0]]
    write(found, "é".encode()[:1])
    assert not found.complete
    assert open_ids(found.mask(flat())) == sorted([letter.encode()[1] for letter in "éè"])


def test_tokens_that_write_nothing_are_never_allowed() -> None:
    """E2: neither special tokens nor an end whose name is text."""
    assert open_ids(matcher("regex", "(?s:.)*", ()).mask(flat())) == [
        at for at in range(256) if at < 0x80 or 0xC2 <= at < 0xF5
    ] + [GLUED]


def test_a_wrong_token_is_our_fault() -> None:
    """E2: a token the mask did not allow never reaches the library, which would be in error for good."""
    found = matcher("choice", ["ab"])
    with pytest.raises(NothingAllowed):
        found.commit(ord("b"))
    write(found, b"ab")


def test_a_state_without_a_token_is_a_fault() -> None:
    """E2: a vocabulary that cannot write what the grammar wants."""
    found = Masks([b"a", b""], [1], 2).matcher(Grammar(text("choice", ["b"])), [1])
    with pytest.raises(GrammarRefused):
        found.mask(flat(2))
    with pytest.raises(NothingAllowed):
        matcher("choice", ["b"]).mask(np.full(270, -np.inf, dtype=np.float32))


def test_a_grammar_that_is_none_is_a_fault_and_the_next_one_works() -> None:
    """E5: the engine builds its own matcher, and says so when that fails."""
    with pytest.raises(GrammarRefused):
        MASKS.matcher(Grammar('{"grammars": [{"lark_grammar": "start: /(/"}]}'))
    with pytest.raises(GrammarRefused):
        MASKS.matcher(Grammar("no JSON"))
    assert not matcher("choice", ["a"]).finished


def test_a_grammar_is_compiled_once_and_few_are_kept() -> None:
    """E6: answers of one grammar stand in it on their own; old grammars give way."""
    masks = Masks(BYTES, [256], 270)
    one, other = (masks.matcher(Grammar(text("choice", ["ab"]))) for _ in range(2))
    write(one, b"a")
    assert other.allowed().tolist() != one.allowed().tolist()
    for n in range(KEPT + 3):
        masks.matcher(Grammar(text("choice", [str(n)])))
    assert len(masks._kept) == KEPT
    write(one, b"b")


def test_judging_says_what_is_wrong() -> None:
    """E5: "" for a grammar that matchers are made of; a text beyond all bounds is not even looked at."""
    assert compile_grammar(text("json")) == ""
    assert compile_grammar("{}") != ""
    assert compile_grammar(" " * (MAX_BYTES + 1)) == "too large"


DOCUMENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "when": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "größe"]}},
        "n": {"type": "number"},
    },
    "required": ["name", "when", "tags", "n"],
    "additionalProperties": False,
}


@cache
def embedded() -> tuple[Masks, Vocabulary, Masks]:
    checkpoint = open_checkpoint(embedded_model())
    known = vocabulary(checkpoint.tokenizer_json, checkpoint.config.vocab)
    return Masks(known.pieces, checkpoint.end_ids, checkpoint.config.vocab), known, Masks(BYTES, [256], 257)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_the_mask_of_a_real_vocabulary_is_that_of_its_bytes(data: st.DataObject) -> None:
    """E2: a token is allowed exactly when its bytes, one by one, keep the document completable: no other is, and none
    is missing because the library would rather have another."""
    masks, known, plain = embedded()
    grammar = Grammar(text("schema", DOCUMENT))
    found, bytewise = masks.matcher(grammar), plain.matcher(grammar)
    for _ in range(data.draw(st.integers(0, 25))):
        if found.finished:
            break
        token = data.draw(st.sampled_from(np.flatnonzero(found.allowed()).tolist()))
        found.commit(token)
        for byte in known.pieces[token]:
            bytewise.commit(byte)
    allowed = found.allowed()
    sample = data.draw(st.lists(st.integers(0, len(known.pieces) - 1), min_size=100, max_size=100))
    for token in [*sample, *np.flatnonzero(allowed)[:100].tolist()]:
        piece = known.pieces[token]
        whole = bytewise._matcher.deep_copy()
        fits = bool(piece) and token not in masks.ends and whole.try_consume_tokens(list(piece)) == len(piece)
        assert fits == allowed[token], piece


# -- what of a run is bound ------------------------------------------------------------------------------------------

KNOWN = Vocabulary(PIECES, frozenset({OPEN}), frozenset({CLOSE}), (CLOSE,))
SPELLED = Vocabulary(PIECES, frozenset(), frozenset(), tuple(CLOSING))


def bind(state: str, known: Vocabulary = KNOWN, kind: str = "schema", value: Any = None) -> Binding:
    value = {"type": "object", "properties": {"a": {"type": "integer"}}} if kind == "schema" else value
    thinking = Thinking(state=state)
    start = Start(1, 1, 0, [1], Sampling(), 100, [END], thinking=thinking, grammar=Grammar(text(kind, value)))
    return Binding(start, MASKS, known, Reasoning(thinking, known, 100))


def TELL(binding: Binding, token: int) -> None:  # noqa: N802 - as the sequence does it
    binding.tell(token, binding._reasoning.feed(token))


def test_without_thinking_the_first_token_is_bound() -> None:
    """E4: and the answer ends with its document."""
    found = bind("off")
    assert open_ids(found.mask(flat())) == [ord("{")]
    write(found, b'{"a": 1}')
    assert found.finished


def test_thinking_is_not_bound_and_the_answer_behind_it_is() -> None:
    """E4: both closings: the added token, and the tag spelled out."""
    for known, closing in ((KNOWN, [CLOSE]), (SPELLED, list(CLOSING))):
        found = bind("open", known)
        for token in b"any text, { or [":
            assert_unbound(found)
            TELL(found, token)
        assert not found.finished
        for token in closing:
            assert not np.isneginf(found.mask(flat())[token])
            TELL(found, token)
        assert open_ids(found.mask(flat())) == [ord("{")]
        write(found, b"{}")
        assert found.finished


def test_no_token_closes_a_block_and_begins_the_answer() -> None:
    """E4: what a token writes behind the tag would be bound by nothing."""
    found = bind("open", SPELLED)
    for token in CLOSING[:-1]:
        assert not np.isneginf(found.mask(flat())[GLUED]) or token == CLOSING[-2]
        TELL(found, token)
    assert np.isneginf(found.mask(flat())[GLUED])
    assert not np.isneginf(found.mask(flat())[ord(">")])


def test_nor_does_one_that_holds_the_whole_tag() -> None:
    """E4: as above, wherever in the token the tag stands; blanks behind it and text before it are fine."""
    whole = [b"</think>{", b"a</think>\n{", b"</think>\n\n", b"b>c</think>", b"><"]
    pieces = [*BYTES, *whole]
    known, masks = Vocabulary(pieces, frozenset(), frozenset(), tuple(CLOSING)), Masks(pieces, [], 270)
    start = Start(1, 1, 0, [1], Sampling(), 9, [], thinking=Thinking("open"), grammar=Grammar(text("choice", ["{"])))
    for written in (b"", b"x", b"<", b"</think"):
        found = Binding(start, masks, known, Reasoning(start.thinking, known, 100))
        write_raw(found, written)
        left = open_ids(found.mask(flat()))
        assert [at - 256 for at in range(256, 261) if at not in left] == [0, 1, *[4] * (written == b"</think")], written


def test_a_model_that_may_think_may_open_a_block_or_answer() -> None:
    """E4: at the first token the opening tag stands beside the grammar; after it, one of them is left."""
    found = bind("may")
    assert open_ids(found.mask(flat())) == [ord("<"), ord("{"), OPEN]
    write(found, b"{")
    assert OPEN not in open_ids(found.mask(flat()))
    assert ord("<") not in open_ids(found.mask(flat()))
    write(found, b"}")
    assert found.finished

    found = bind("may")
    TELL(found, OPEN)
    assert_unbound(found)
    write_raw(found, b"hm")
    TELL(found, CLOSE)
    assert open_ids(found.mask(flat())) == [ord("{")]


def write_raw(binding: Binding, data: bytes) -> None:
    for byte in data:
        TELL(binding, byte)


def test_a_tag_that_is_begun_is_gone_through_with() -> None:
    """E4: where only the tag fits what was written, only its rest may come; where a call fits as well, both may."""
    found = bind("may", SPELLED)
    for at, byte in enumerate(OPENING):
        assert byte in open_ids(found.mask(flat()))
        assert at == 0 or open_ids(found.mask(flat())) == [byte]
        TELL(found, byte)
    assert_unbound(found)

    found = bind("may", SPELLED, "choice", ["<tool>"])
    write(found, b"<t")
    assert open_ids(found.mask(flat())) == sorted(b"oh")
    write(found, b"ool>")
    assert found.finished


def test_a_forced_call_comes_after_the_thinking() -> None:
    """D5: a required call binds the answer only."""
    grammar = judged(forced([{"type": "function", "function": {"name": "now"}}]), compile_grammar)
    assert isinstance(grammar, str)
    thinking = Thinking(state="open")
    start = Start(1, 1, 0, [1], Sampling(), 100, [END], thinking=thinking, grammar=Grammar(grammar))
    found = Binding(start, MASKS, KNOWN, Reasoning(thinking, KNOWN, 100))
    TELL(found, CLOSE)
    write(found, b'<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert found.finished


# -- the loop ----------------------------------------------------------------------------------------------------------


class Wide(FakeModel):
    """The fake model with logits for this file's vocabulary."""

    vocab = 270


class Line:
    """The pipe's place: messages wait for the next safe point, and every round is acknowledged at once."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.said: list[FromEngine] = []

    def post(self, message: FromEngine) -> None:
        if isinstance(message, Resident):
            return
        self.said.append(message)
        if isinstance(message, Tokens):
            self.inbox.append(Seen(1, message.run, message.start + len(message.ids)))

    def sent_by(self, run: int) -> list[int]:
        """The tokens a run has sent."""
        return [token for m in self.said if isinstance(m, Tokens) and m.run == run for token in m.ids]

    def until(self, engine: Engine, ends: int) -> None:
        """Until so many runs have ended."""
        while sum(isinstance(m, Ended) for m in self.said) < ends:
            engine.turn()

    def take(self, timeout: float | None) -> list[ToEngine]:
        taken, self.inbox = self.inbox, []
        return taken

    def leave(self, code: int) -> Any:
        raise AssertionError(code)


def made(parallel: int = 1, known: Vocabulary = KNOWN) -> tuple[Engine, Line]:
    """An engine of the fake model, with masks."""
    line, points = Line(), Failpoints({})
    config = Config(
        1, "fake", device="cpu", threads=1, prefix_chunk=64, safe_rows=8, parallel=parallel, speculate=False
    )
    loaded = load(config, checkpoint(), lambda *_, **__: Wide(), line, points)  # type: ignore[arg-type]
    return Engine(config, dataclasses.replace(loaded, vocabulary=known, masks=MASKS), line, points), line  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Any:
    """What a run of such an engine answers, and how it ends."""
    before = torch.get_num_threads()
    made_engine, line = made()

    def answer(grammar: str, *, max_tokens: int = 60, stop_ids: tuple[int, ...] = (END,), **more: Any) -> Any:
        line.said.clear()
        sampling = Sampling(temperature=1.0, seed=more.pop("seed", 5))
        start = Start(1, 1, 0, [1, 2, 3], sampling, max_tokens, list(stop_ids), grammar=Grammar(grammar), **more)
        line.inbox.append(start)
        while not (line.said and isinstance(line.said[-1], Ended)):
            made_engine.turn()
        rounds = [message for message in line.said if isinstance(message, Tokens)]
        return [token for message in rounds for token in message.ids], rounds, line.said[-1]

    yield answer
    torch.set_num_threads(before)


def said(ids: list[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode()


BOUNDED = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "b": {"enum": [1, True, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_a_run_writes_its_document_and_ends(engine: Any) -> None:
    """E1: a model of noise writes documents that a strict validator takes, and ends ``stop`` without a stop id."""
    stopped = 0
    for seed in range(12):  # one that writes blanks to the limit is cut
        ids, _, ended = engine(text("schema", BOUNDED), max_tokens=90, seed=seed, stop_ids=())
        if ended.reason == "stop":
            jsonschema.validate(json.loads(said(ids)), BOUNDED)
            stopped += 1
    assert stopped > 2


def test_a_finished_grammar_ends_whatever_was_asked_for(engine: Any) -> None:
    """E2: with no stop ids and with ``min_tokens`` beyond the document."""
    for more in ({"stop_ids": ()}, {"min_tokens": 50}):
        ids, _, ended = engine(text("choice", ["abc"]), **more)
        assert (said(ids), ended.reason, ended.generated) == ("abc", "stop", 3)


def test_an_empty_pattern_is_an_empty_answer(engine: Any) -> None:
    """E2: nothing is written where nothing may be."""
    ids, _, ended = engine(text("regex", ""))
    assert (ids, ended.reason) == ([], "stop")


def test_the_limit_ends_an_open_document(engine: Any) -> None:
    """E1: finish ``length``, with what was written so far."""
    ids, _, ended = engine(text("choice", ["abcdef"]), max_tokens=4)
    assert (said(ids), ended.reason) == ("abcd", "length")


def test_a_grammar_the_engine_does_not_take_is_a_fault_of_that_run_alone(engine: Any) -> None:
    """E5: told by its class; the next run is served."""
    _, _, ended = engine('{"grammars": [{"lark_grammar": "start: /(/"}]}')
    assert (ended.reason, ended.why) == ("fault", "GrammarRefused")
    assert engine(text("choice", ["ok"]))[2].reason == "stop"


@pytest.mark.parametrize("error", [GrammarRefused, NothingAllowed, RuntimeError])
def test_a_matcher_that_fails_on_the_way_is_a_fault_of_its_run_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2, F6: what was sent stays, the run beside it goes on, and the same grammar serves the next run."""
    threads = torch.get_num_threads()
    engine, line = made(parallel=2)
    commit = Matcher.commit

    def fails_at_c(matcher: Matcher, token: int) -> None:
        if token == ord("c"):
            raise error("the grammar said: xyzzy")
        commit(matcher, token)

    monkeypatch.setattr(Matcher, "commit", fails_at_c)
    for run in (1, 2):
        words = "abcdef" if run == 1 else "uvwxyz"
        bound = Grammar(text("choice", [words]))
        line.inbox.append(Start(1, run, run - 1, [1, 2, 3], Sampling(), 60, [END], grammar=bound))
    line.until(engine, 2)
    monkeypatch.setattr(Matcher, "commit", commit)
    line.inbox.append(Start(1, 3, 0, [1, 2, 3], Sampling(), 60, [END], grammar=Grammar(text("choice", ["abcdef"]))))
    line.until(engine, 3)
    ends = {m.run: (m.reason, m.why, m.kept) for m in line.said if isinstance(m, Ended)}
    assert ends[1] == ("fault", error.__name__, 0) and len(ends) == 3
    assert (ends[2][0], ends[3][0]) == ("stop", "stop")
    assert [said(line.sent_by(run)) for run in (1, 2, 3)] == ["ab", "uvwxyz", "abcdef"]
    assert "xyzzy" not in repr(line.said)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("cap", [-1, 0])
def test_no_mask_and_no_force_hides_logits_that_are_no_numbers(
    engine: Any, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: a forward pass that went wrong is a fault, whatever a grammar forbids or a budget forces."""
    forward = Wide.forward

    def broken(*given: Any, **more: Any) -> torch.Tensor:
        logits = forward(*given, **more)
        logits[-1, SPECIAL] = torch.nan
        return logits

    monkeypatch.setattr(Wide, "forward", broken)
    thinking = Thinking("open", cap) if cap >= 0 else Thinking()
    ids, _, ended = engine(text("choice", ["abc"]), thinking=thinking, logprobs=0)
    assert (ids, ended.reason, ended.why) == ([], "fault", "LogitsNotFinite")


def test_thinking_runs_free_and_its_forced_closing_binds_what_follows(engine: Any) -> None:
    """E4: a budget closes the block by force; the answer behind it is the document and nothing else."""
    ids, rounds, ended = engine(text("choice", ["abc"]), thinking=Thinking(state="open", cap=7), stop_ids=())
    closed = [turn for message in rounds for turn in message.turns]
    assert [(turn.kind, turn.reason) for turn in closed] == [("closed", "budget")]
    assert said(ids[closed[0].at + 1 :]) == "abc"
    assert ended.reason == "stop"


def test_no_alternative_is_listed_that_the_mask_forbids(engine: Any) -> None:
    """F7: log-probabilities are of the raw logits, the alternatives of what could be chosen."""
    _, rounds, _ = engine(text("choice", ["ab", "ac"]), logprobs=5, stop_ids=())
    entries = [entry for message in rounds for entry in message.logprobs]
    assert entries[0].top_ids == [ord("a")]
    assert sorted(entries[1].top_ids) == [ord("b"), ord("c")]
    assert entries[0].logprob < -1.0


def test_nor_beside_a_forced_token(engine: Any) -> None:
    """F7, C3: the closing's alternatives are those of any other token of the thinking: its end is none of them."""
    ids, rounds, _ = engine(text("choice", ["ab"]), thinking=Thinking("open", 2), logprobs=270)
    entries = [entry for message in rounds for entry in message.logprobs]
    assert ids[2] == CLOSE and [END in entry.top_ids for entry in entries] == [False] * 5
    assert [len(entry.top_ids) for entry in entries[:3]] == [269] * 3


needs_model = pytest.mark.skipif(embedded_model() is None, reason="the embedded model is not installed")


@needs_model
def test_the_embedded_model_fills_a_form() -> None:
    """E1: the real process, the real vocabulary: the document validates, and the seed decides it."""
    masks, known, _ = embedded()
    client = Client(Config(1, str(embedded_model()), device="cpu", threads=1, max_len=512))
    try:
        assert isinstance(client.ready(), Ready)
        answers = []
        for run in (1, 2):
            prompt = [at for at, piece in enumerate(known.pieces) if piece][100:120]
            sampling = Sampling(temperature=1.0, seed=3)
            ids, ended = client.answer(
                Start(1, run, 0, prompt, sampling, 300, sorted(masks.ends), grammar=Grammar(text("schema", BOUNDED)))
            )
            assert ended.reason == "stop"
            answers.append(b"".join(known.pieces[token] for token in ids).decode())
        jsonschema.validate(json.loads(answers[0]), BOUNDED)
        assert answers[0] == answers[1]
    finally:
        client.close()
