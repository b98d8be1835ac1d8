"""engine/slots.py: which run computes next, and what begins at a prompt's kept end."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.failpoints import Failpoints
from engine.protocol import (
    Cancel,
    Chunk,
    Declined,
    Ended,
    FromEngine,
    Guest,
    GuestStarted,
    Resumed,
    Sampling,
    Seen,
    Start,
    Tokens,
)
from engine.sequence import Sequence, Step
from engine.slots import Slots
from tests.test_sequence import start


def slots(count: int = 1, window: int = 64, **points: int) -> Slots:
    return Slots(1, [window] * count, Failpoints(points))


def test_a_start_is_declined_when_its_slot_is_taken_or_it_does_not_fit() -> None:
    desk = slots(window=6)
    assert desk.handle(start(prompt=6, run=1)) == [Declined(1, 1, "memory")]
    assert desk.handle(start(prompt=5, run=2)) == []
    assert desk.handle(start(prompt=1, run=3)) == [Declined(1, 3, "busy")]
    assert desk.handle(start(prompt=1, run=4, slot=1)) == [Declined(1, 4, "busy")]


def test_each_slot_has_a_window_of_its_own() -> None:
    """M1: a run in a side slot is bounded by that slot's rows, in its prompt and in its answer."""
    desk = Slots(1, [64, 8], Failpoints({}))
    assert desk.handle(start(prompt=8, run=1, slot=1)) == [Declined(1, 1, "memory")]
    assert desk.handle(start(prompt=6, run=2, slot=1, max_tokens=50)) == []
    assert desk.handle(start(prompt=6, run=3, slot=0, max_tokens=50)) == []
    assert {run.start.run: run.limit for run in desk._runs if run is not None} == {2: 2, 3: 50}


def test_other_epochs_and_unknown_runs_are_ignored() -> None:
    desk = slots()
    assert desk.handle(Start(2, 1, 0, [1], Sampling(), 1, [])) == []
    assert desk.turn() == []
    desk.handle(start(run=1))
    for message in (Cancel(2, 1), Cancel(1, 7), Seen(1, 7, 1)):
        assert desk.handle(message) == []
    assert desk.settle() == []
    assert desk.handle(Cancel(1, 1)) == [] and desk.settle() == [Ended(1, 1, "cancelled", 0, 0)]
    assert desk.turn() == [] and desk.handle(start(run=2)) == []


def test_slots_take_turns() -> None:
    desk = slots(count=3)
    for slot in (0, 2):
        desk.handle(start(run=slot, slot=slot, prompt=40))
    order = []
    for _ in range(4):
        [(slot, _)] = desk.turn()
        order.append(slot)
    assert order == [0, 2, 0, 2]


def test_a_failpoint_declines_the_nth_start() -> None:
    desk = slots(decline_start=2)
    assert desk.handle(start(run=1)) == []
    desk.handle(Cancel(1, 1))
    desk.settle()
    assert desk.handle(start(run=2)) == [Declined(1, 2, "memory")]
    assert desk.handle(start(run=3)) == []


# -- the kept end ------------------------------------------------------------------------------------------------------

LOGITS = np.arange(4, dtype=np.float32)


def ended_after(desk: Slots, asked: Start, tokens: int = 1) -> list[FromEngine]:
    """Start a run, read its prompt where that is needed, write so many tokens and cancel it; what was said."""
    said = desk.handle(asked)
    [(_, run)] = desk.turn()
    while run.step is Step.PREFILL:
        said.append(run.read(run.chunk(4)[1], 1.0, LOGITS))
    for _ in range(tokens):
        run.propose([1], 1.0)
        said += desk.settle()
        run.seen(len(run.answer))
    desk.handle(Cancel(1, asked.run, tokens))
    return said + desk.settle()


def keeping(run: int, keep_end: bool = True, **more: Any) -> Start:
    return msgspec.structs.replace(start(run=run, **more), keep_end=keep_end)


def test_another_choice_begins_at_the_prompts_end() -> None:
    """F11: the prompt is read once; each choice after the first says so, and the last leaves nothing behind."""
    desk = slots()
    assert [m.done for m in ended_after(desk, keeping(1)) if isinstance(m, Chunk)] == [4, 5]
    for run, keep in ((2, True), (3, False)):
        said = ended_after(desk, keeping(run, keep))
        assert said[:2] == [Resumed(1, run, 5, "end"), Chunk(1, run, 5, 5, 0.0)]
        assert said[2] == Tokens(1, run, 0, [1], 1.0)
        assert said[3] == Ended(1, run, "cancelled", 5, 1, 0.0, 1.0, rounds=1)  # the one token has no row yet
    assert not any(isinstance(m, Resumed) for m in ended_after(desk, keeping(4)))


def test_the_logits_that_are_kept_are_a_copy() -> None:
    """F8: a model may write its next logits into the same place."""
    desk, mine = slots(), LOGITS.copy()
    desk.handle(keeping(1))
    [(_, run)] = desk.turn()
    run.read(5, 1.0, mine)
    mine[:] = 0
    assert run.end is not None and run.end.tolist() == LOGITS.tolist()


def test_any_other_start_drops_what_is_kept() -> None:
    """F11: also one of the same tokens later; another slot has nothing of it."""
    desk = slots(count=2)
    ended_after(desk, keeping(1))
    assert desk.handle(keeping(2, slot=1)) == [] and desk.handle(Cancel(1, 2)) == []
    desk.settle()
    assert desk.handle(start(run=3, prompt=64)) == [Declined(1, 3, "memory")]  # takes no row: nothing is lost
    assert isinstance(desk.handle(keeping(4))[0], Resumed)
    desk.handle(Cancel(1, 4))
    assert desk.settle() == [Ended(1, 4, "cancelled", 5, 0)]
    assert not any(isinstance(m, Resumed) for m in ended_after(desk, start(run=5, prompt=3)))
    assert not any(isinstance(m, Resumed) for m in ended_after(desk, keeping(6)))


def test_nothing_is_kept_of_a_prompt_half_read_or_of_a_fault() -> None:
    """F11: there is no end to begin at, or no row to trust."""
    desk = slots()
    desk.handle(keeping(1, prompt=11))
    [(_, run)] = desk.turn()
    run.read(4, 1.0, LOGITS)
    desk.handle(Cancel(1, 1))
    desk.settle()
    assert desk.handle(keeping(2, prompt=11)) == []
    [(_, run)] = desk.turn()
    run.read(11, 1.0, LOGITS)
    desk.fault(run, "SomeError")
    assert desk.handle(keeping(3, prompt=11)) == []


def test_nothing_is_kept_for_a_client_that_left() -> None:
    """F11, G2: a hang-up ends all choices: nothing waits for one that never comes, and a side slot's rows are lost."""
    desk = slots(count=2)
    for slot in (0, 1):
        desk.handle(keeping(1 + slot, slot=slot))
        for _, run in desk.turn():
            run.read(5, 1.0, LOGITS)
        desk.handle(Cancel(1, 1 + slot))
        assert desk.settle() == [Ended(1, 1 + slot, "cancelled", 0 if slot else 5, 0, 1.0)]
    assert desk.kept_ends() == [] and desk.handle(keeping(3)) == []


def test_a_prompt_that_leaves_one_row_has_its_choices_too() -> None:
    """F11, A8: at the window's end each choice is one token, and none needs a step."""
    desk = slots(window=6)
    for run, keep in ((1, True), (2, True), (3, False)):
        said = desk.handle(keeping(run, keep))
        [(_, one)] = desk.turn()
        while one.step is Step.PREFILL:
            said.append(one.read(one.chunk(4)[1], 1.0, LOGITS))
        one.propose([run], 1.0)
        said += desk.settle()
        assert [m.rows for m in said if isinstance(m, Resumed)] == [5] * (run > 1)
        assert said[-2] == Tokens(1, run, 0, [run], 1.0)
        assert isinstance(said[-1], Ended) and (said[-1].reason, said[-1].kept) == ("length", 5)
    assert desk.handle(keeping(4)) == []


def test_a_choice_that_may_write_nothing_keeps_the_end_too() -> None:
    """F11, A6a: max_tokens 0 is an answer of no token, each time."""
    desk = slots()
    assert ended_after(desk, keeping(1, max_tokens=0), tokens=0)[-1] == Ended(1, 1, "cancelled", 5, 0, 2.0)
    assert isinstance(desk.handle(keeping(2, max_tokens=0))[0], Resumed)
    assert desk.settle() == [Ended(1, 2, "length", 5, 0)]


# -- what stays ----


class Parks:
    """A keeper that parks no more than so many rows."""

    def __init__(self, most: int) -> None:
        self.most = most

    def begin(self, slot: int, start: Start, at_end: bool) -> tuple[int, str]:
        return 0, "none"

    def end(self, slot: int, run: Sequence) -> int:
        return run.rows if run.rows <= self.most else 0


@pytest.mark.parametrize(("most", "kept"), [(4, [0, 0]), (5, [5, 5])])
def test_an_end_says_how_many_rows_stay(most: int, kept: list[int]) -> None:
    """G2: what the keeper says of a slot's rows, each run's own, whichever ends in the same safe point."""
    desk = Slots(1, [64, 64], Failpoints({}), keeper=Parks(most))
    for slot in (0, 1):
        desk.handle(start(run=7 + slot, slot=slot, max_tokens=1))
    for _, run in [*desk.turn(), *desk.turn()]:
        run.read(5, 1.0)
        run.propose([1], 1.0)
    ends = {m.run: m.kept for m in desk.settle() if isinstance(m, Ended)}
    assert ends == {7: kept[0], 8: kept[1]}


def test_without_a_keeper_a_side_slot_keeps_nothing_but_for_its_next_choice() -> None:
    """G2, F11: there is no park to offer its rows to."""
    for slot, keep_end, kept in ((0, False, 5), (1, False, 0), (1, True, 5)):
        ended = ended_after(slots(2), keeping(1, keep_end, slot=slot), tokens=1)[-1]
        assert isinstance(ended, Ended) and ended.kept == kept


# -- taking turns ------------------------------------------------------------------------------------------------------


def stepped(turn: list[tuple[int, Sequence]]) -> None:
    for _, run in turn:
        if run.step is Step.PREFILL:
            run.read(run.chunk(4)[1], 1.0)
        else:
            run.propose([1], 1.0)


def test_rounds_are_one_step_and_prefill_steps_alternate_with_them() -> None:
    """M6, G1: what decodes does so together; neither a long prompt nor an answer stands still."""
    desk = slots(count=4)
    for slot, prompt in enumerate((4, 4, 30, 30)):
        desk.handle(start(run=slot, slot=slot, prompt=prompt, max_tokens=30))
    order = []
    for _ in range(8):
        turn = desk.turn(4)
        order.append([slot for slot, _ in turn])
        stepped(turn)
        desk.settle()
        for run in range(4):
            desk.handle(Seen(1, run, 30))
    assert order == [[0], [0], [1], [0, 1], [2], [0, 1], [3], [0, 1]]


def test_no_more_rounds_together_than_may_be() -> None:
    """M6: where a step holds fewer, all have theirs before any has a second."""
    desk = slots(count=3)
    for slot in range(3):
        desk.handle(start(run=slot, slot=slot, prompt=4, max_tokens=9))
    for run in desk._runs:
        assert run is not None
        run.read(4, 1.0)
    order = []
    for _ in range(4):
        turn = desk.turn(2)
        order.append([slot for slot, _ in turn])
        stepped(turn)
        desk.settle()
        for run in range(3):
            desk.handle(Seen(1, run, 9))
    assert order == [[0, 1], [0, 2], [0, 1], [0, 2]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_nobody_waits_for_more_than_a_round_of_all_others(prompts: list[int], most: int, data: st.DataObject) -> None:
    """M6, G1: between two steps of a run no other has more than two, whatever is acknowledged when."""
    desk = slots(count=4)
    for slot, prompt in enumerate(prompts):
        desk.handle(start(run=slot, slot=slot, prompt=prompt, max_tokens=20))
    since: dict[int, dict[int, int]] = {slot: {} for slot in range(4)}
    for _ in range(40):
        ready = [slot for slot, run in enumerate(desk._runs) if run and run.step in (Step.PREFILL, Step.ROUND)]
        turn = desk.turn(most)
        assert bool(turn) == bool(ready) and len(turn) <= most
        assert len(turn) == 1 or all(run.step is Step.ROUND for _, run in turn)
        for slot, _ in turn:
            since[slot] = {}
            for other in ready:
                if other not in [s for s, _ in turn]:
                    since[other][slot] = since[other].get(slot, 0) + 1
                    assert since[other][slot] <= 2 * len(prompts)
        for slot in range(4):
            if slot not in ready:
                since[slot] = {}
        stepped(turn)
        desk.settle()
        for run in range(len(prompts)):
            if data.draw(st.booleans()):
                desk.handle(Seen(1, run, 20))


@given(st.lists(st.integers(1, 30), max_size=3), st.integers(1, 20), st.integers(1, 4), st.data())
def test_a_guest_and_the_side_slots_take_turns(sides: list[int], prompt: int, most: int, data: st.DataObject) -> None:
    """K2, G1: its holder has none; its rounds are its own, and it waits for a few of the others' steps at most."""
    desk = slots(count=4)
    desk.handle(start(run=0, prompt=9))
    for slot, rows in enumerate(sides, 1):
        desk.handle(start(run=slot, slot=slot, prompt=rows, max_tokens=20))
    desk.handle(Guest(1, start(run=9, prompt=prompt, max_tokens=20), 0))
    assert desk.settle() == [GuestStarted(1, 9, 0, prompt + 20, 0)]
    since = dict.fromkeys(range(1, 4), 0)
    over = False
    while not over:
        turn = desk.turn(most)
        runs = [run.start.run for _, run in turn]
        assert 0 not in runs and (runs == [9] or 9 not in runs) and len(runs) <= most
        for slot in since:
            since[slot] = 0 if runs == [9] else since[slot] + (slot in runs)
        assert max(since.values()) <= 2 * (1 + len(sides))
        stepped(turn)
        said = desk.settle()
        over = any(isinstance(m, Ended) and m.run == 9 for m in said)
        for run in (*range(1, 4), 9):
            if run == 9 or data.draw(st.booleans()):
                desk.handle(Seen(1, run, 20))
    left = [run.start.run for _, run in desk.turn(4)]
    assert left and 9 not in left
