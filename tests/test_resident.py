"""engine/resident.py and engine/prefix.py: what a run can begin with, and that it is really there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.disk import Disk
from engine.models.cache import Mark
from engine.prefix import Prefix, blocks, shared, superfluous, with_mark
from engine.protocol import OwnWork, Resident
from engine.resident import Begin, Residency
from tests.fake_engine import FakeCache
from tests.keeping import GRID, holds, make, write

LONG = 1 << 20


class Slot:
    """A slot as the worker drives it: prefill on the grid with marks, then rounds of one token."""

    def __init__(self, keeps: Residency, slot: int, cache: FakeCache) -> None:
        self.keeps, self.slot, self.cache = keeps, slot, cache
        self.tokens: list[int] = []
        self.rows = self.prompt = 0

    def begin(self, tokens: list[int]) -> Begin:
        begun = self.keeps.begin(self.slot, self.cache, tokens, [])
        assert begun.rows < len(tokens) and holds(self.cache, tokens[: begun.rows])
        assert self.slot == 0 or begun.source != "slot", "a side slot keeps no conversation"
        self.tokens, self.rows, self.prompt = list(tokens), begun.rows, len(tokens)
        return begun

    def read(self, rows: int = LONG) -> None:
        """The prompt, as far as row ``rows``."""
        while self.rows < min(rows, self.prompt):
            stop = min((self.rows // GRID + 1) * GRID, self.prompt)
            write(self.cache, self.rows, self.tokens[self.rows : stop])
            self.rows = stop
            if stop % GRID == 0 or stop == self.prompt:
                self.keeps.mark(self.slot, self.cache.mark())

    def answer(self, tokens: list[int]) -> None:
        self.read()
        for token in tokens:
            write(self.cache, self.rows, [token])
            self.tokens.append(token)
            self.rows += 1

    def end(self, rows: int = LONG) -> None:
        """Over: at most ``rows`` rows stay."""
        self.keeps.end(self.slot, self.tokens[: min(rows, self.rows)], [])

    def run(self, tokens: list[int], answer: list[int] | None = None) -> Begin:
        begun = self.begin(tokens)
        self.answer(answer or [])
        self.end()
        return begun


def engine(recurrent: bool, slots: int = 1, park: int = LONG, disk: Disk | None = None) -> list[Slot]:
    keeps = Residency(7, slots, GRID, park, disk, recurrent=recurrent)
    return [Slot(keeps, slot, make(recurrent)) for slot in range(slots)]


both = pytest.mark.parametrize("recurrent", [False, True], ids=["dense", "recurrent"])


@both
def test_the_next_turn_goes_on_where_the_answer_ended(recurrent: bool) -> None:
    """G5: dense and hybrid alike, the next turn of a conversation begins behind the last row of its answer."""
    (slot,) = engine(recurrent)
    assert slot.run(list(range(10)), [20, 21, 22]) == (0, "none")
    assert slot.run([*range(10), 20, 21, 22, 30, 31]) == (13, "slot")


@both
def test_an_answer_cut_by_a_round_is_gone_on_from_there(recurrent: bool) -> None:
    """G5: a stop found in the text one round late leaves what was sent, also of a recurrent state."""
    (slot,) = engine(recurrent)
    slot.begin(list(range(10)))
    slot.answer([20, 21, 22])
    slot.end(rows=12)
    assert slot.run([*range(10), 20, 21, 30, 31, 32]) == (12, "slot")


@both
def test_a_prefill_that_was_left_goes_on_where_it_stopped(recurrent: bool) -> None:
    """G2: a client left inside a prefill; the retry has all rows that were read."""
    (slot,) = engine(recurrent)
    slot.begin(list(range(30)))
    slot.read(20)
    slot.end()
    assert slot.run(list(range(30))) == (20, "slot")


def test_the_same_prompt_again() -> None:
    """G2: one row is computed for logits: dense all but one are there, a recurrent state is at its last checkpoint."""
    dense, recurrent = engine(False)[0], engine(True)[0]
    for slot, rows in ((dense, 9), (recurrent, 8)):
        slot.run(list(range(10)), [20, 21])
        assert slot.run(list(range(10)), [20, 21]) == (rows, "slot")


@both
def test_nothing_is_trusted_behind_a_fault(recurrent: bool) -> None:
    """G5: after a fault of ours the slot begins anew."""
    (slot,) = engine(recurrent)
    slot.run(list(range(10)), [20])
    slot.begin([*range(10), 20, 21])
    slot.keeps.drop(0)
    assert slot.run(list(range(10))) == (0, "none")


@both
def test_two_conversations_take_turns(recurrent: bool) -> None:
    """G2: what is pushed out of a slot is parked and put back whole, its state too."""
    (slot,) = engine(recurrent)
    first, second = list(range(20)), [0, 1, *range(30, 50)]
    slot.run(first, [20, 21])
    slot.run(second, [22, 23, 24])
    assert slot.run([*first, 20, 21, 5, 6]) == (22, "park")
    assert slot.run([*second, 22, 23, 24, 6, 7]) == (25, "park")
    assert slot.run([*first, 20, 21, 5, 6, 8]) == (24, "park")


@both
def test_a_parked_conversation_can_go_to_another_slot(recurrent: bool) -> None:
    """G2: the park is everyone's."""
    one, two = engine(recurrent, slots=2)
    one.run(list(range(20)))
    one.run(list(range(30, 50)))
    assert two.run([*range(20), 7, 8]) == (20, "park")


@both
def test_a_side_slot_keeps_no_conversation(recurrent: bool) -> None:
    """M12, G2: behind its run what a side slot held is parked, or lost where there is no park; slot 0 keeps its own."""
    one, two = engine(recurrent, slots=2)
    one.run(list(range(30, 50)))
    assert two.run(list(range(20)), [60]) == (0, "none")
    told = [m for m in one.keeps.messages() if isinstance(m, Resident)]
    assert [(m.where, m.slot, m.rows) for m in told] == [("slot", 0, 20), ("park", 0, 21)]
    assert two.run([*range(20), 60, 7]) == (21, "park")
    assert one.run([*range(30, 50), 8]) == (20, "slot")
    one, two = engine(recurrent, slots=2, park=0)
    for _ in range(2):
        assert two.run(list(range(20))) == (0, "none")
    assert not [m for m in one.keeps.messages() if isinstance(m, Resident)]


@both
def test_a_side_slots_choices_begin_in_its_rows(recurrent: bool) -> None:
    """M12, F11: between two choices of a request nothing is parked; what its client left of one is not gone on from."""
    one, two = engine(recurrent, slots=2)
    two.begin(list(range(20)))
    two.read()
    mark = two.cache.mark()
    two.answer([60, 61])
    two.keeps.end(1, two.tokens[: two.rows], [], more=True)
    assert not list(one.keeps._park)
    two.cache.go_back(mark)
    two.keeps.stay(1, 20)
    two.rows = two.prompt = 20
    two.tokens = list(range(20))
    two.answer([70])
    two.end()
    assert two.run([*range(20), 70, 8]) == (21, "park")
    two.begin(list(range(40, 60)))
    two.read()
    two.keeps.end(1, two.tokens, [], more=True)
    assert two.begin([*range(40, 60), 8]).rows == 0


@both
def test_a_side_slot_reads_slot_0s_files_and_writes_none(recurrent: bool, tmp_path: Path) -> None:
    """M9: what slot 0 wrote begins a side slot's run; what a side slot read is not written."""
    disk = Disk(tmp_path, 1 << 20, "m", GRID, make(recurrent), lambda _: None)
    one, two = engine(recurrent, slots=2, park=0, disk=disk)
    one.run(list(range(20)), [60])
    while one.keeps.work():
        pass
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files and two.run([*range(20), 7, 8]) == (20, "disk")
    two.run(list(range(40, 60)))
    assert not two.keeps.busy
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == files


@both
def test_what_the_park_has_no_room_for_is_lost(recurrent: bool) -> None:
    """G2: bounded by bytes, the least used first; a conversation too large for it alone is not parked at all."""
    limit = 8 * (2 * 25 + 15 if recurrent else 2 * 20 + 12)  # two of the three, with checkpoints, and a short one
    (slot,) = engine(recurrent, park=limit)
    talks = [[number, *range(number, number + 19)] for number in (10, 20, 30)]
    for talk in talks:
        slot.run(talk)
    slot.run([4] * 12)  # pushes the third out, which takes the room of the first
    assert slot.begin([*talks[0], 1]).source == "none"
    assert slot.run([*talks[1], 1]) == (20, "park")
    assert engine(recurrent, park=8)[0].run(talks[0]).source == "none"


def test_a_short_rest_is_not_parked() -> None:
    """G2: losing less than a chunk costs less than a copy: the slot is overwritten."""
    (slot,) = engine(False)
    slot.run(list(range(20)))
    slot.run([*range(17), 40, 41, 42])
    assert slot.begin(list(range(20))) == (17, "slot") and slot.keeps.nbytes() == 0


def test_hashes_alone_are_never_enough() -> None:
    """G2: two prompts of the same hashes and other tokens share what their tokens share."""
    (slot,) = engine(False)
    said = [b"12345678"]
    slot.keeps.begin(0, slot.cache, list(range(70)), said)
    write(slot.cache, 0, list(range(70)))
    slot.keeps.end(0, list(range(70)), said)
    assert slot.keeps.begin(0, slot.cache, [*range(30), *range(40)], said) == (30, "slot")


@both
def test_what_is_held_is_told_by_hashes(recurrent: bool) -> None:
    """G2: each place is told when it changed, with hashes of whole blocks; one that holds nothing has no rows."""
    (slot,) = engine(recurrent)
    tokens, hashes = [n % 7 for n in range(80)], [b"a" * 8, b"b" * 8]
    slot.keeps.begin(0, slot.cache, tokens, hashes)
    write(slot.cache, 0, tokens)
    slot.keeps.end(0, tokens, hashes)
    assert slot.keeps.messages() == [Resident(7, "slot", 0, 80, [b"a" * 8])]
    assert slot.keeps.messages() == []
    slot.begin([9] * 5)
    said = slot.keeps.messages()
    assert [(m.what, m.begun) for m in said if isinstance(m, OwnWork)] == [("park copy", True), ("park copy", False)]
    held = [(m.where, m.slot, m.rows, m.hashes) for m in said if isinstance(m, Resident)]
    assert held == [("slot", 0, 0, []), ("park", 0, 80, [b"a" * 8])]


@both
def test_a_choice_begins_at_its_prompts_end(recurrent: bool) -> None:
    """F11: where the owner put the slot back itself, what was behind is forgotten, and checkpoints before it stay."""
    (slot,) = engine(recurrent)
    slot.begin(list(range(10)))
    slot.read()
    at_end = slot.cache.mark()
    slot.answer([20, 21, 22])
    slot.end()
    slot.cache.go_back(at_end)
    slot.keeps.stay(0, 10)
    slot.tokens, slot.rows = list(range(10)), 10
    slot.answer([30, 31])
    slot.end()
    assert slot.run([*range(10), 30, 31, 5]) == (12, "slot")
    assert slot.begin([*range(9), 40]).rows == (8 if recurrent else 9)


def test_a_run_may_begin_only_where_the_owner_allows() -> None:
    """G2: where rows do not come out alike whatever their step, a run begins on the steps' grid."""
    for recurrent in (False, True):
        keeps = Residency(7, 1, GRID, 0, recurrent=recurrent, whole=lambda rows: rows // GRID * GRID)
        slot = Slot(keeps, 0, make(recurrent))
        slot.run(list(range(10)), [20, 21, 22])
        assert slot.run([*range(10), 20, 21, 22, 23]) == (8 if recurrent else 12, "slot")


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_shared_is_what_both_begin_with(one: list[int], other: list[int]) -> None:
    """G2: by halves, the same as token by token."""
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert shared(one, other) == expected
    assert shared([*one, 5], [*one, *other]) >= len(one)


@given(st.lists(st.integers(1, 60).map(lambda n: n * GRID), min_size=1, max_size=60))
def test_checkpoints_are_few_and_far_between(rows: list[int]) -> None:
    """G2: at most so many, in order, the newest among them; none leaves whose gap is not the smallest."""
    marks: list[Mark] = []
    for n in rows:
        before = sorted({*(mark.rows for mark in marks), n})
        marks = with_mark(marks, Mark(n, {}), most=5)
        kept = [mark.rows for mark in marks]
        assert len(kept) == min(5, len(before)) and kept == sorted(kept) and kept[-1] == before[-1]
        gone = [one for one in before if one not in kept]
        gaps = {b: after - a for a, b, after in zip([0, *before], before, before[1:], strict=False)}
        assert all(gaps[one] == min(gaps.values()) for one in gone)


def test_one_checkpoint_alone_may_go() -> None:
    """G2: of one there is no gap to be smallest."""
    assert superfluous([8]) == 0 and with_mark([], Mark(8, {}), most=0) == []


def test_blocks_are_whole_ones_inside_the_rows() -> None:
    """G2: a hash is kept while all of its block is."""
    prefix = Prefix([1] * 200, [b"a", b"b", b"c"])
    assert [blocks(prefix.hashes, prefix.tokens, n) for n in (63, 64, 191, 500)] == [0, 1, 2, 3]
    prefix.cut(130)
    assert prefix.hashes == [b"a", b"b"] and len(prefix.tokens) == 130


slots, bools, answers = st.integers(0, 1), st.booleans(), st.lists(st.integers(5, 9), max_size=6)
parts = st.sampled_from([60, 60, 60, 30, 17, 12, 8, 5, 0])
"""Rows of a prompt that are shared or read: mostly all."""


class Life(RuleBasedStateMachine):
    """Runs on two slots, in any order, over prompts that share parts, with a small park and small files."""

    recurrent = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.reports: list[str] = []
        size = 700 if self.recurrent else 600
        self.disk = Disk(self.folder, 12 * size, "m", GRID, make(self.recurrent), self.reports.append)
        self.slots = engine(self.recurrent, slots=2, park=8 * 60, disk=self.disk)
        self.live = [False, False]
        self.talks: list[list[int]] = [[n % 5 for n in range(start, start + 20)] for start in range(4)]
        self.harmed = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(slot=slots, talk=st.integers(0, 9), at=parts, more=st.integers(1, 9), read=parts, answer=answers, idle=bools)
    def runs(self, slot: int, talk: int, at: int, more: int, read: int, answer: list[int], idle: bool) -> None:
        """A whole run; one that is in the slot ends first."""
        self.ends(slot, read, answer)
        self.begins(slot, talk, at, more)
        self.ends(slot, read, answer)
        self.works(200 if idle else 0)

    @rule(slot=slots, talk=st.integers(0, 9), at=parts, more=st.integers(1, 9))
    def begins(self, slot: int, talk: int, at: int, more: int) -> None:
        """A prompt that begins as one of the last did."""
        if not self.live[slot]:
            known = self.talks[talk % len(self.talks)]
            self.slots[slot].begin(([*known[:at]] + [(at + more + i) % 5 for i in range(more)])[:60])
            self.live[slot] = True

    @rule(slot=slots, read=parts, answer=answers)
    def ends(self, slot: int, read: int, answer: list[int]) -> None:
        """Left inside its prefill, or behind an answer; then the last round may be forgotten."""
        run = self.slots[slot]
        if self.live[slot]:
            run.read(read)
            if run.rows == run.prompt:
                run.answer(answer)
            run.end(run.rows - (len(answer) % 2 if answer and run.rows > run.prompt else 0))
            self.talks = [*self.talks, run.tokens][-10:]
            self.live[slot] = False

    @rule(slot=slots, read=parts)
    def fails(self, slot: int, read: int) -> None:
        if self.live[slot]:
            self.slots[slot].read(read)
            self.slots[slot].cache.tokens.fill_(-1)
            self.slots[slot].keeps.drop(slot)
            self.live[slot] = False

    @rule(pieces=st.integers(1, 40))
    def works(self, pieces: int) -> None:
        while pieces and self.slots[0].keeps.work():
            pieces -= 1

    @precondition(lambda self: any(self.folder.iterdir()))
    @rule(which=st.integers(0, 20), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def is_damaged(self, which: int, at: float, bit: int) -> None:
        files = sorted(self.folder.glob("*.safetensors"))
        if files:
            path = files[which % len(files)]
            data = bytearray(path.read_bytes())
            data[int(at * len(data))] ^= 1 << bit
            path.write_bytes(data)
            self.harmed += 1

    @rule()
    def is_told(self) -> None:
        for message in self.slots[0].keeps.messages():
            assert isinstance(message, OwnWork | Resident)
            if isinstance(message, Resident):
                assert message.rows or not message.nbytes
                assert message.where != "slot" or message.slot == 0

    @invariant()
    def is_bounded(self) -> None:
        assert self.slots[0].keeps._park.nbytes <= 8 * 60
        assert sum(path.stat().st_size for path in self.folder.glob("*.safetensors")) <= self.disk._limit
        assert len(self.reports) <= self.harmed


class RecurrentLife(Life):
    recurrent = True


for life in (Life, RecurrentLife):
    life.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestDense = Life.TestCase
TestRecurrent = RecurrentLife.TestCase


def test_the_fake_is_no_help() -> None:
    """G2: the check of these tests sees rows and states that are not there."""
    for recurrent in (False, True):
        cache = make(recurrent)
        write(cache, 0, [1, 2, 3])
        assert holds(cache, [1, 2, 3]) and not holds(cache, [1, 2, 4])
        cache.tokens[1] = 7
        assert not holds(cache, [1, 2, 3])
    assert torch.equal(cache.mark().tensors["state"], cache.state)  # type: ignore[union-attr]


def test_a_copy_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """N4, G2: what is said to have begun is said to be over, also where memory for it is not there."""
    (slot,) = engine(False)
    slot.run(list(range(20)))

    def full(*_: int) -> dict[str, torch.Tensor]:
        raise RuntimeError

    real = slot.cache.copy
    monkeypatch.setattr(slot.cache, "copy", lambda first, stop: full() if stop > 1 else real(first, stop))
    with pytest.raises(RuntimeError):
        slot.begin(list(range(30, 40)))
    assert [m.begun for m in slot.keeps.messages() if isinstance(m, OwnWork)] == [True, False]
