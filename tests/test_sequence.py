"""engine/sequence.py: the rules of a run, without a model, a clock or a process."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pieces import Vocabulary
from engine.protocol import (
    Cancel,
    Chunk,
    Ended,
    FromEngine,
    Sampling,
    Start,
    Thinking,
    TokenLogprob,
    Tokens,
    Turn,
)
from engine.sequence import Sequence, Step


def start(
    prompt: int = 5, max_tokens: int = 4, run: int = 1, slot: int = 0, stop_ids: list[int] | None = None
) -> Start:
    return Start(1, run, slot, list(range(100, 100 + prompt)), Sampling(), max_tokens, stop_ids or [])


def prefilled(message: Start, window: int = 64) -> Sequence:
    run = Sequence(message, window)
    while run.step is Step.PREFILL:
        run.read(run.chunk(4)[1], 1.0)
    return run


def settled(run: Sequence, ids: list[int], ack: bool = True) -> list[FromEngine]:
    """One round, computed and at its safe point, acknowledged after."""
    run.propose(ids, 2.0)
    said = run.settle()
    if ack:
        run.seen(len(run.answer))
    return said


def test_prefill_steps_end_on_the_grid_and_at_the_prompts_end() -> None:
    run = Sequence(start(prompt=11), 64)
    steps: list[Chunk] = []
    while run.step is Step.PREFILL:
        steps.append(run.read(run.chunk(4)[1], 1.5))
    assert [(c.done, c.total, c.ms) for c in steps] == [(4, 11, 1.5), (8, 11, 1.5), (11, 11, 1.5)]


def test_a_second_round_waits_for_seen() -> None:
    run = prefilled(start())
    assert settled(run, [1], ack=False) == [Tokens(1, 1, 0, [1], 2.0)]
    assert run.step is Step.ROUND
    run.propose([2], 2.0)
    assert run.settle() == [] and run.step is Step.WAIT
    run.seen(1)
    assert run.settle() == [Tokens(1, 1, 1, [2], 2.0)]


def test_the_limit_ends_a_run_right_after_its_last_tokens() -> None:
    run = prefilled(start(max_tokens=2))
    settled(run, [1])
    tokens, ended = settled(run, [2])
    assert tokens == Tokens(1, 1, 1, [2], 2.0)
    assert ended == Ended(1, 1, "length", kept=6, generated=2, prefill_ms=2.0, decode_ms=4.0, rounds=2)  # 2 has no row


def test_a_stop_id_ends_it_and_is_not_sent() -> None:
    run = prefilled(start(stop_ids=[9]))
    settled(run, [1])
    assert settled(run, [9]) == [Ended(1, 1, "stop", 6, 1, 2.0, 4.0, rounds=2)]
    assert run.step is Step.OVER and run.settle() == []


def test_a_stop_at_once_answers_nothing() -> None:
    run = prefilled(start(stop_ids=[9]))
    assert settled(run, [9]) == [Ended(1, 1, "stop", 5, 0, 2.0, 2.0, rounds=1)]


def test_a_stop_inside_a_longer_round_keeps_what_came_before() -> None:
    run = prefilled(start(max_tokens=9, stop_ids=[9]))
    ended = Ended(1, 1, "stop", 5, 2, 2.0, 2.0, rounds=1)
    assert settled(run, [1, 2, 9, 3]) == [Tokens(1, 1, 0, [1, 2], 2.0), ended]


def test_rows_of_accepted_tokens_are_resident() -> None:
    """F8, G5: a drafted token that was accepted has its row in the very round, the one behind it in the next."""
    run = prefilled(start(max_tokens=9, stop_ids=[9]))
    settled(run, [1])
    assert run.rows == 5
    assert run.take(2) and run.take(3) and run.take(4) and run.goes_on and run.position == 4
    run.close(2.0, drafted=6, accepted=2)
    assert run.rows == 8 and run.settle() == [Tokens(1, 1, 1, [2, 3, 4], 2.0, drafted=6, accepted=2)]
    run.seen(4)
    assert run.take(5) and not run.take(9) and not run.goes_on
    run.close(2.0, drafted=1, accepted=1)
    tokens, ended = run.settle()
    assert tokens == Tokens(1, 1, 4, [5], 2.0, drafted=1, accepted=1)
    assert ended == Ended(1, 1, "stop", 10, 5, 2.0, 6.0, rounds=3, drafted=7, accepted=3)


def test_a_cancel_leaves_no_row_of_a_round_that_is_not_committed() -> None:
    """G5: whatever of it was drafted and accepted."""
    for keep, kept in ((None, 6), (0, 5), (1, 6), (9, 6)):
        run = prefilled(start(max_tokens=9))
        settled(run, [1])
        assert run.take(2) and run.take(3)
        run.close(2.0, drafted=2, accepted=1)
        run.cancel(Cancel(1, 1, keep))
        assert run.settle() == [Ended(1, 1, "cancelled", kept, 1, 2.0, 4.0, rounds=1)]


def test_a_round_stops_at_the_limit() -> None:
    """A1: one more token is not taken, however many rows were computed."""
    run = prefilled(start(max_tokens=2))
    assert run.take(1) and run.goes_on and run.take(2) and not run.goes_on
    run.close(2.0, drafted=2, accepted=2)
    assert run.settle()[-1] == Ended(1, 1, "length", 7, 2, 2.0, 2.0, rounds=1, drafted=2, accepted=2)


def test_a_text_stop_found_late_comes_before_a_stop_id() -> None:
    """G5: Cancel(keep) inside the round under way says which rows stay, even if that round is a stop id."""
    run = prefilled(start(max_tokens=9, stop_ids=[9]))
    settled(run, [1])
    settled(run, [2], ack=False)
    run.propose([9], 2.0)
    assert run.settle() == []
    run.cancel(Cancel(1, 1, keep=1))
    assert run.settle() == [Ended(1, 1, "cancelled", 6, 2, 2.0, 6.0, rounds=2)]


def test_the_window_ends_a_run_as_its_limit_does() -> None:
    run = prefilled(start(prompt=5, max_tokens=100), window=7)
    assert run.limit == 2
    settled(run, [1])
    assert settled(run, [2])[-1] == Ended(1, 1, "length", 6, 2, 2.0, 4.0, rounds=2)


def test_nothing_asked_for_is_nothing_written() -> None:
    run = prefilled(start(max_tokens=0))
    assert run.settle() == [Ended(1, 1, "length", 5, 0, 2.0, 0.0)]


def test_a_cancel_during_prefill_keeps_the_rows_read() -> None:
    """G1: a run is left between two prefill steps."""
    run = Sequence(start(prompt=11), 64)
    run.read(run.chunk(4)[1], 1.0)
    run.cancel(Cancel(1, 1))
    assert run.settle() == [Ended(1, 1, "cancelled", 4, 0, 1.0, 0.0)]


def test_a_cancel_keeps_what_was_acknowledged_or_what_it_says() -> None:
    """G5: rows stay up to the last token the client was given."""
    for keep, kept in [(None, 6), (0, 5), (1, 6), (2, 7), (99, 7), (-1, 5)]:
        run = prefilled(start())
        settled(run, [1])
        settled(run, [2], ack=False)
        run.propose([3], 2.0)
        run.cancel(Cancel(1, 1, keep))
        assert run.settle() == [Ended(1, 1, "cancelled", kept, 2, 2.0, 6.0, rounds=2)]


def test_a_fault_trusts_no_row() -> None:
    run = prefilled(start())
    settled(run, [1])
    assert run.fault("SomeError") == Ended(1, 1, "fault", 0, 1, 2.0, 2.0, "SomeError", rounds=1)


@st.composite
def walks(draw: st.DrawFn) -> tuple[Start, int, list[str]]:
    message = start(prompt=draw(st.integers(1, 9)), max_tokens=draw(st.integers(0, 5)), stop_ids=[0])
    return message, draw(st.integers(1, 4)), draw(st.lists(st.sampled_from(["go", "seen", "cancel"]), max_size=40))


@given(walks(), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=40, max_size=40))
def test_whatever_comes_a_run_ends_once_and_is_never_two_rounds_ahead(
    walk: tuple[Start, int, list[str]], rounds: list[list[int]]
) -> None:
    """G1, G5: the invariants of a run under any order of messages."""
    message, safe_rows, moves = walk
    run = Sequence(message, 64)
    said: list[FromEngine] = []
    unjudged = 0
    for move in [*moves, "cancel", "go"]:
        if move == "seen":
            run.seen(len(run.answer))
            unjudged = 0
        elif move == "cancel":
            run.cancel(Cancel(1, 1))
        said += (now := run.settle())
        unjudged += sum(isinstance(m, Tokens) for m in now)
        assert unjudged <= 1
        if run.step is Step.PREFILL:
            said.append(run.read(run.chunk(safe_rows)[1], 1.0))
        elif run.step is Step.ROUND and run.limit > 0:
            run.propose(rounds.pop(), 1.0)
    ended = [m for m in said if isinstance(m, Ended)]
    tokens = [t for m in said if isinstance(m, Tokens) for t in m.ids]
    assert len(ended) == 1 and said[-1] is ended[0]
    assert tokens == run.answer and len(tokens) <= message.max_tokens and 0 not in tokens
    assert ended[0].generated == len(tokens)
    assert ended[0].kept <= len(message.tokens) + len(tokens)


# -- thinking ----------------------------------------------------------------------------------------------------------

TAGS = Vocabulary([b"a", b"b", b"", b"", b"</", b"think", b">"], frozenset({2}), frozenset({3}), (4, 5, 6))


def thinking(state: str = "open", *how: Any, max_tokens: int = 30, ngram: int = 0, **more: Any) -> Start:
    asked = start(max_tokens=max_tokens, **more)
    return msgspec.structs.replace(asked, thinking=msgspec.structs.replace(Thinking(state, *how), ngram=ngram))


def run_of(asked: Start, script: list[int], sizes: list[int]) -> tuple[list[int], list[Turn], Ended]:
    """What a run says whose engine writes ``script`` in rounds of these sizes, and what is forced in rounds of one."""
    run = Sequence(asked, 64, TAGS)
    run.read(run.chunk(64)[1], 1.0)
    said: list[FromEngine] = []
    rounds, done = list(sizes), 0
    while run.step is not Step.OVER:
        size = rounds.pop(0) if rounds else 1
        ids = [run.forced] if run.forced is not None else script[done : done + size]
        run.propose(ids, 1.0, "" if ids else "stop", [TokenLogprob(-float(i), [], []) for i in ids])
        said += (now := run.settle())
        written = [token for m in now if isinstance(m, Tokens) for token in m.ids]
        for token in written:  # what is forced is the script's where it says the same
            done += script[done : done + 1] == [token]
        run.seen(len(run.answer))
    for m in said:
        if isinstance(m, Tokens):
            assert [entry.logprob for entry in m.logprobs] == [-float(i) for i in m.ids]
            assert all(m.start <= turn.at < m.start + len(m.ids) for turn in m.turns)
    ended = said[-1]
    assert isinstance(ended, Ended)
    tokens = [m for m in said if isinstance(m, Tokens)]
    return [i for m in tokens for i in m.ids], [turn for m in tokens for turn in m.turns], ended


thinkings = st.builds(
    Thinking, st.sampled_from(["open", "may", "off"]), st.integers(-1, 12), st.integers(-1, 12), st.booleans()
)


@given(
    thinkings,
    st.lists(st.integers(0, 7), max_size=30),
    st.lists(st.integers(1, 5), max_size=40),
    st.integers(0, 25),
    st.sampled_from([[], [3], [1]]),
)
def test_nothing_hangs_on_how_tokens_fall_into_rounds(
    how: Thinking, script: list[int], sizes: list[int], max_tokens: int, stop_ids: list[int]
) -> None:
    """C3, C6: a round of several tokens is cut where the closing must be forced; text, turns and end are the same."""
    asked = msgspec.structs.replace(start(max_tokens=max_tokens, stop_ids=stop_ids), thinking=how, logprobs=0)
    if max_tokens == 0:
        return
    ids, turns, ended = run_of(asked, script, [])
    got_ids, got_turns, got = run_of(asked, script, sizes)
    assert (got_ids, got_turns, got.reason, got.generated) == (ids, turns, ended.reason, ended.generated)


def test_a_round_is_cut_where_the_closing_must_come() -> None:
    """C3: what was drafted behind that place is not written, and a script's end with it is none."""
    run = Sequence(thinking("open", 2), 64, TAGS)
    run.read(run.chunk(64)[1], 1.0)
    run.propose([0, 1, 0, 1], 1.0, "stop")
    assert run.settle() == [Tokens(1, 1, 0, [0, 1], 1.0)] and run.forced == 4
    run.seen(2)
    run.propose([4, 5, 6, 1], 1.0)
    assert run.settle() == [Tokens(1, 1, 2, [4, 5, 6, 1], 1.0, [], [Turn("closed", 4, 8, 0, "budget")])]
    assert run.forced is None and run.reasoning.count == 5


def test_what_is_forced_cannot_be_left_out() -> None:
    """C3: an engine that chooses where it may not is at fault."""
    run = Sequence(thinking("open", 0), 64, TAGS)
    run.read(run.chunk(64)[1], 1.0)
    with pytest.raises(ValueError, match="forced"):
        run.propose([0], 1.0)


def test_a_stop_id_inside_the_thinking_ends_the_run() -> None:
    """A1, C3: as everywhere, before the budget, and also where the forced token is one."""
    assert run_of(thinking("open", 9, stop_ids=[1]), [0, 1, 0], [])[0] == [0]
    ids, turns, ended = run_of(thinking("open", 1, stop_ids=[4]), [0, 0], [])
    assert (ids, turns, ended.reason) == ([0], [], "stop")


def test_a_cancel_leaves_out_the_closing_that_is_under_way() -> None:
    """G5, C3: forced tokens of a round that is not committed are as any others: not counted, no row stays of them."""
    for keep, kept in ((None, 7), (1, 6), (9, 7)):
        run = Sequence(thinking("open", 2), 64, TAGS)
        run.read(run.chunk(64)[1], 1.0)
        run.propose([0, 1], 1.0)
        run.settle()
        run.seen(2)
        run.propose([4, 5], 1.0)
        run.cancel(Cancel(1, 1, keep))
        assert run.settle() == [Ended(1, 1, "cancelled", kept, 2, 1.0, 2.0, rounds=1)] and run.answer == [0, 1]


def test_the_limit_may_fall_into_the_closing() -> None:
    """C3: then the block never closes."""
    ids, turns, ended = run_of(thinking("open", 4, max_tokens=5), [0, 1, 0, 1, 0], [3])
    assert (ids, turns, ended.reason) == ([0, 1, 0, 1, 4], [], "length")


def test_no_ngram_twice_in_the_thinking_alone() -> None:
    """A4: its tokens count from the opening tag to the closing one, and what closes it is never banned."""
    run = Sequence(thinking("open", ngram=1), 64, TAGS)
    run.read(run.chunk(64)[1], 1.0)
    banned = []
    for token in (0, 4, 5, 3, 0, 4):
        run.propose([token], 1.0)
        run.settle()
        run.seen(len(run.answer))
        masked = run.adjusted(np.zeros(8, np.float32))
        banned.append([i for i, logit in enumerate(masked.tolist()) if logit < 0])
    assert banned == [[0], [0, 4], [0, 4, 5], [], [], []]


def test_the_closing_tag_stays_open_to_an_ngram_ban() -> None:
    """A4, C6: the token that begins or goes on with the tag is spared, and the added token always."""
    run = Sequence(thinking("open", ngram=1), 64, TAGS)
    run.read(run.chunk(64)[1], 1.0)
    run.propose([4, 6, 5, 0], 1.0)
    run.settle()
    masked = run.adjusted(np.zeros(8, np.float32)).tolist()
    assert [i for i, logit in enumerate(masked) if logit < 0] == [0, 5, 6]
