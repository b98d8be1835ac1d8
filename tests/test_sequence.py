"""engine/sequence.py: the rules of a run, without a model, a clock or a process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.failpoints import Failpoints
from engine.protocol import Cancel, Chunk, Declined, Ended, FromEngine, Sampling, Seen, Start, Tokens
from engine.sequence import Sequence, Slots, Step


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
    assert ended == Ended(1, 1, "length", kept=6, generated=2, prefill_ms=2.0, decode_ms=4.0)  # token 2 has no row yet


def test_a_stop_id_ends_it_and_is_not_sent() -> None:
    run = prefilled(start(stop_ids=[9]))
    settled(run, [1])
    assert settled(run, [9]) == [Ended(1, 1, "stop", 6, 1, 2.0, 4.0)]
    assert run.step is Step.OVER and run.settle() == []


def test_a_stop_at_once_answers_nothing() -> None:
    run = prefilled(start(stop_ids=[9]))
    assert settled(run, [9]) == [Ended(1, 1, "stop", 5, 0, 2.0, 2.0)]


def test_a_stop_inside_a_longer_round_keeps_what_came_before() -> None:
    run = prefilled(start(max_tokens=9, stop_ids=[9]))
    assert settled(run, [1, 2, 9, 3]) == [Tokens(1, 1, 0, [1, 2], 2.0), Ended(1, 1, "stop", 5, 2, 2.0, 2.0)]


def test_a_text_stop_found_late_comes_before_a_stop_id() -> None:
    """G5: Cancel(keep) inside the round under way says which rows stay, even if that round is a stop id."""
    run = prefilled(start(max_tokens=9, stop_ids=[9]))
    settled(run, [1])
    settled(run, [2], ack=False)
    run.propose([9], 2.0)
    assert run.settle() == []
    run.cancel(Cancel(1, 1, keep=1))
    assert run.settle() == [Ended(1, 1, "cancelled", 6, 2, 2.0, 6.0)]


def test_the_window_ends_a_run_as_its_limit_does() -> None:
    run = prefilled(start(prompt=5, max_tokens=100), window=7)
    assert run.limit == 2
    settled(run, [1])
    assert settled(run, [2])[-1] == Ended(1, 1, "length", 6, 2, 2.0, 4.0)


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
        assert run.settle() == [Ended(1, 1, "cancelled", kept, 2, 2.0, 6.0)]


def test_a_fault_trusts_no_row() -> None:
    run = prefilled(start())
    settled(run, [1])
    assert run.fault("SomeError") == Ended(1, 1, "fault", 0, 1, 2.0, 2.0, "SomeError")


def slots(count: int = 1, window: int = 64, **points: int) -> Slots:
    return Slots(1, count, window, Failpoints(points))


def test_a_start_is_declined_when_its_slot_is_taken_or_it_does_not_fit() -> None:
    desk = slots(window=6)
    assert desk.handle(start(prompt=6, run=1)) == [Declined(1, 1, "memory")]
    assert desk.handle(start(prompt=5, run=2)) == []
    assert desk.handle(start(prompt=1, run=3)) == [Declined(1, 3, "busy")]
    assert desk.handle(start(prompt=1, run=4, slot=1)) == [Declined(1, 4, "busy")]


def test_other_epochs_and_unknown_runs_are_ignored() -> None:
    desk = slots()
    assert desk.handle(Start(2, 1, 0, [1], Sampling(), 1, [])) == []
    assert desk.turn() is None
    desk.handle(start(run=1))
    for message in (Cancel(2, 1), Cancel(1, 7), Seen(1, 7, 1)):
        assert desk.handle(message) == []
    assert desk.settle() == []
    assert desk.handle(Cancel(1, 1)) == [] and desk.settle() == [Ended(1, 1, "cancelled", 0, 0)]
    assert desk.turn() is None and desk.handle(start(run=2)) == []


def test_slots_take_turns() -> None:
    desk = slots(count=3)
    for slot in (0, 2):
        desk.handle(start(run=slot, slot=slot, prompt=40))
    order = []
    for _ in range(4):
        turn = desk.turn()
        assert turn is not None
        order.append(turn[0])
    assert order == [0, 2, 0, 2]


def test_a_failpoint_declines_the_nth_start() -> None:
    desk = slots(decline_start=2)
    assert desk.handle(start(run=1)) == []
    desk.handle(Cancel(1, 1))
    desk.settle()
    assert desk.handle(start(run=2)) == [Declined(1, 2, "memory")]
    assert desk.handle(start(run=3)) == []


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
