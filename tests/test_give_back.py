"""engine/levels.py, tally.py: memory by levels, given back no further than needed; what was taken returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from torch import Tensor

from engine import memory
from engine.keeper import park_limit
from engine.load import Loaded
from engine.models.cache import Mark
from engine.models.graphs import Graphs
from engine.prefix import MARKS
from engine.protocol import (
    LEVELS,
    Collect,
    Ended,
    GiveBack,
    Guest,
    GuestStarted,
    Measure,
    Memory,
    Resident,
    Resumed,
    Seen,
    Start,
)
from engine.resident import Residency
from engine.tally import Tally, alone, enough
from engine.worker import Engine
from tests import hybrids
from tests.fake_engine import StateModel, build
from tests.keeping import GRID, make
from tests.test_resident import Life, Slot
from tests.test_worker import FAKE, Bench, start

STATE = 8
"""Bytes of a state of ``keeping``."""


# -- tally ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 200))
def test_a_tensor_held_twice_counts_once(held: list[int], others: list[int], wanted: int) -> None:
    """J2: what is freed is what nobody holds any more, and no more entries go than that takes."""
    tensors = [torch.zeros(n + 1) for n in range(6)]
    marks = [Mark(at, {"state": tensors[n]}) for at, n in enumerate(held)]

    def nbytes(some: Iterable[int]) -> int:
        return sum(tensors[n].nbytes for n in sorted(set(some)))

    tally = Tally(marks)
    assert tally.nbytes == nbytes(held)
    left = alone(marks, [Mark(0, {"state": tensors[n]}) for n in others])
    assert [held[mark.rows] for mark in left] == [n for n in held if n not in others]
    going, freed = enough(marks, wanted)
    assert freed == nbytes(held) - nbytes(held[len(going) :]) >= min(wanted, nbytes(held))
    assert not going or nbytes(held) - nbytes(held[len(going) - 1 :]) < wanted
    for mark in marks:
        tally.drop(mark)
    assert tally.nbytes == 0 and not any(mark in tally for mark in marks)


# -- what stays resident -------------------------------------------------------------------------------------------


def really(keeps: Residency) -> int:
    """Bytes of all tensors that are held, counted here."""
    tensors: dict[int, Tensor] = {}
    for parked in keeps._park:
        tensors |= {id(tensor): tensor for tensor in parked.rows.values()}
    held = [prefix.marks for prefix in [*keeps._slots, *(parked.prefix for parked in keeps._park)]]
    for marks in [*held, *(writing.marks for writing in keeps._writing)]:
        tensors |= {id(tensor): tensor for mark in marks for tensor in mark.tensors.values()}
    return sum(tensor.nbytes for tensor in tensors.values())


talks = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(0, 5)),
    min_size=1,
    max_size=8,
)


def talk(slots: list[Slot], said: list[tuple[int, list[int], int]]) -> None:
    """Conversations that begin alike, branch and take turns in the slots."""
    for slot, turns, answer in said:
        prompt = [token for turn in turns for token in range(10 * turn, 10 * turn + 9)]
        slots[slot].run(prompt, [77] * answer)


@settings(deadline=None)
@given(talks, st.booleans(), st.integers(0, 700), talks)
def test_levels_are_given_back_to_the_byte(
    first: list[tuple[int, list[int], int]], recurrent: bool, asked: int, then: list[tuple[int, list[int], int]]
) -> None:
    """J2: each level gives what it said, least used first, no entry more than needed; rows still go on as they must."""
    keeps = Residency(7, 2, GRID, 1 << 20, recurrent=recurrent)
    slots = [Slot(keeps, slot, make(recurrent)) for slot in range(2)]
    talk(slots, first)
    newest = Tally(mark for held in keeps._slots for mark in held.marks[-1:]).nbytes
    assert keeps.nbytes() == really(keeps) == newest + sum(keeps.spare().values())
    for level in ("snapshots", "park", "checkpoints"):
        for wanted in (asked, 1 << 20):
            there, before, parked = keeps.spare()[level], really(keeps), list(keeps._park)
            freed = keeps.give_back(level, wanted)
            left = list(keeps._park)
            assert freed == before - really(keeps) >= min(wanted, there)
            assert parked[len(parked) - len(left) :] == left and (level == "park" or left == parked)
            if level == "park" and len(left) < len(parked):
                assert freed - parked[len(parked) - len(left) - 1].nbytes < wanted
            elif level != "park":
                assert freed == 0 or freed < wanted + STATE
        assert keeps.spare()[level] == 0
    assert keeps.nbytes() == newest and all(len(held.marks) <= 1 for held in keeps._slots)
    talk(slots, then)  # every row that is gone on from is what it should be: ``Slot.begin`` looks


class Giving(Life):
    """J2: levels given back at any time, in the middle of runs and of files being written; rows are what they were."""

    @rule(level=st.sampled_from(LEVELS), nbytes=st.sampled_from([0, 1, 60, 1000]))
    def gives_back(self, level: str, nbytes: int) -> None:
        keeps = self.slots[0].keeps
        before, newest = really(keeps), [held.marks[-1:] for held in keeps._slots]
        assert keeps.give_back(level, nbytes) == before - really(keeps)
        assert [held.marks[-1:] for held in keeps._slots] == newest

    @invariant()
    def is_counted(self) -> None:
        keeps = self.slots[0].keeps
        pinned = [mark for writing in keeps._writing for mark in writing.marks]
        stays = Tally([*pinned, *(mark for held in keeps._slots for mark in held.marks[-1:])]).nbytes
        assert keeps.nbytes() == really(keeps) == stays + sum(keeps.spare().values())


class RecurrentGiving(Giving):
    recurrent = True


for life in (Giving, RecurrentGiving):
    life.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestGiving = Giving.TestCase
TestRecurrentGiving = RecurrentGiving.TestCase


def test_a_parked_conversation_without_its_checkpoints_goes_on_at_its_end() -> None:
    """J2: stored snapshots are cheaper to lose than the conversation itself."""
    keeps = Residency(7, 1, GRID, 1 << 20, recurrent=True)
    slot = Slot(keeps, 0, make(True))
    slot.run(list(range(20)), [50])
    slot.run(list(range(30, 50)))
    assert keeps.spare()["snapshots"] == 5 * STATE == keeps.give_back("snapshots", 1 << 20)
    assert slot.run([*range(20), 50, 60, 61]) == (21, "park")
    assert keeps.give_back("nothing", 1 << 20) == 0


def test_what_is_given_back_is_told() -> None:
    """J2, M2: the server's own picture of what is resident changes with it."""
    bench = Bench()
    for run in range(1, 4):
        bench.answer(start(run, prompt=64 + run, stop_ids=[run]))
        bench.answer(Start(1, run + 10, 0, [40 - run] * 80, start().sampling, 2, []))
    parked = {m.slot for m in bench.line.resident if isinstance(m, Resident) and m.where == "park" and m.rows}
    gone = {m.slot for m in bench.line.resident if isinstance(m, Resident) and m.where == "park" and not m.rows}
    bench.line.resident.clear()
    bench.turns(1, GiveBack(1, 1, "park", 1))
    [told] = [m for m in bench.line.resident if isinstance(m, Resident)]
    assert (told.where, told.slot, told.rows) == ("park", min(parked - gone), 0)


# -- the engine ----------------------------------------------------------------------------------------------------


def stated(*_: object, **__: object) -> StateModel:
    return StateModel()


def asked(bench: Bench, message: GiveBack | Collect | Measure) -> Memory:
    """The one answer."""
    [said] = [m for m in bench.turns(1, message, ack=True) if isinstance(m, Memory)]
    return said


def level(read: Memory, name: str) -> int:
    return dict(read.levels)[name]


def test_every_level_is_told_in_order() -> None:
    """J2: by name, the cheapest to lose first, in every answer; the workspace is that of the last measured prefill."""
    bench = Bench()
    read = asked(bench, Measure(1, 7, 50))
    assert [name for name, _ in read.levels] == list(LEVELS) and not any(size for _, size in read.levels)
    assert read.free > 0 and read.workspace == 8 * 48
    for message in (GiveBack(1, 7, "park", 1 << 30), GiveBack(1, 7, "nothing", 1), Collect(1, 7)):
        again = asked(bench, message)
        assert (again.run, again.workspace, again.allocated) == (7, 8 * 48, read.allocated)
    assert bench.turns(1, GiveBack(2, 7, "park", 1), Collect(2, 7)) == []


@pytest.mark.parametrize("made", [build, stated], ids=["rows", "state"])
def test_the_end_of_a_prompt_is_kept_memory(made: Any) -> None:
    """J2, F11: it counts, it can be given back between choices alone, and the next choice is the same without it."""
    kept, lost = Bench(made=made), Bench(made=made)
    first = start(1, keep_end=True)
    before = asked(lost, Measure(1, 1, 20)).allocated
    lost.turns(5, first, ack=True)
    assert level(asked(lost, GiveBack(1, 1, "snapshots", 1 << 30)), "snapshots") == 0  # a live run's stays
    lost.turns(60, ack=True)
    kept.answer(first)
    read = asked(lost, Measure(1, 1, 20))
    there = level(read, "snapshots")
    assert there == 50 * 4 <= read.allocated - before
    after = asked(lost, GiveBack(1, 1, "snapshots", 1))
    assert level(after, "snapshots") == 0 and after.allocated == read.allocated - there
    second = start(2, choice=1, max_tokens=9)
    assert kept.answer(second) == lost.answer(second)
    sources = [[m.source for m in bench.said if isinstance(m, Resumed)] for bench in (kept, lost)]
    assert sources[0] == ["end"] and "end" not in sources[1]


def test_a_state_kept_for_a_choice_stays_until_it_is_given_back() -> None:
    """J2, F11: a prompt's end holds its checkpoint too; let go of, that is the slot's like any other."""
    bench = Bench(made=stated)
    bench.answer(start(1, prompt=60, max_tokens=30, keep_end=True))
    read = asked(bench, GiveBack(1, 1, "checkpoints", 1 << 30))
    assert (level(read, "snapshots"), level(read, "checkpoints")) == (50 * 4, 0)
    read = asked(bench, GiveBack(1, 1, "snapshots", 1))
    assert (level(read, "snapshots"), level(read, "checkpoints")) == (0, 96 * 8)
    last = asked(bench, GiveBack(1, 1, "checkpoints", 1))
    assert level(last, "checkpoints") == 0 and last.allocated == read.allocated - 96 * 8


def test_a_guests_copy_counts_while_it_is_inside() -> None:
    """J2, K2: it is freed with its guest, so that level holds nothing."""
    bench = Bench()
    bench.turns(6, start(1, max_tokens=20), ack=True)
    before = asked(bench, Measure(1, 1, 20)).allocated
    said = bench.turns(1, Guest(1, start(2, prompt=9, max_tokens=3), 1), ack=True)
    [begun] = [m for m in said if isinstance(m, GuestStarted)]
    inside = asked(bench, Measure(1, 1, 20))
    assert inside.allocated == before + begun.nbytes and level(inside, "guest_copies") == 0 < begun.nbytes
    said = bench.turns(60, ack=True)
    assert [m.run for m in said if isinstance(m, Ended)][:1] == [2]
    assert asked(bench, Measure(1, 1, 20)).allocated == before


def test_recordings_are_given_back_when_nobody_plays_them() -> None:
    """J2: idle graph sets, all at once as they share a pool; none while a run is in a slot."""

    class Recorder:
        nbytes = 500

        def record(self, run: Any) -> Any:
            return run

        def free(self) -> None:
            self.nbytes = 0

    bench = Bench()
    bench.loaded.model.graphs = Graphs(lambda *_: None, 3, torch.device("cpu"), Recorder())  # type: ignore[attr-defined, arg-type, return-value]
    bench.engine = Engine(FAKE, bench.loaded, bench.line, bench.engine._failpoints)  # type: ignore[arg-type]
    assert level(asked(bench, Measure(1, 1, 1)), "graphs") == 500
    bench.turns(2, start())
    assert level(asked(bench, GiveBack(1, 1, "graphs", 1)), "graphs") == 0
    bench.turns(60, ack=True)
    assert level(asked(bench, GiveBack(1, 1, "graphs", 0)), "graphs") == 500
    assert level(asked(bench, GiveBack(1, 1, "graphs", 1)), "graphs") == 0
    assert bench.loaded.model.graphs.recorded_bytes == 0  # type: ignore[attr-defined]


def test_free_blocks_are_a_level_and_the_rest_over_the_slack_goes_behind_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """J1, J2: never inside a request, another's or one with choices left, and not up to the slack."""
    loose, emptied = [100], []

    def empty(device: str) -> None:
        emptied.append(device)

    monkeypatch.setattr(memory, "loose", lambda device: loose[0])
    monkeypatch.setattr(memory, "empty", empty)
    bench = Bench(parallel=2, config=msgspec.structs.replace(FAKE, slack=99))
    bench.turns(60, start(1, slot=1, max_tokens=9, prompt=60), start(2, keep_end=True), ack=True)
    assert emptied == []
    bench.turns(60, start(3, choice=1))  # it waits for its first round to be judged
    assert emptied == []
    bench.turns(60, Seen(1, 3, 1), ack=True)
    assert emptied == ["cpu"]
    loose[0] = 99
    bench.answer(start(4))
    assert emptied == ["cpu"]
    assert level(asked(bench, GiveBack(1, 1, "allocator", 0)), "allocator") == 99 and emptied == ["cpu"]
    asked(bench, GiveBack(1, 1, "allocator", 1))
    assert emptied == ["cpu", "cpu"]


def test_what_is_parked_elsewhere_takes_none_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1, J2: where the device has a memory of its own, parked copies are no level of it and the ceiling not theirs."""
    reads = []
    for apart in (False, True):
        monkeypatch.setattr(memory, "apart", lambda device, apart=apart: apart)
        bench = Bench(made=stated)
        bench.answer(start(1, prompt=80))
        bench.answer(Start(1, 2, 0, [9] * 80, start().sampling, 2, []))
        reads.append(asked(bench, Measure(1, 1, 1)))
        asked(bench, GiveBack(1, 1, "park", 1 << 30))
        bench.answer(start(3, prompt=81))
        source = [m.source for m in bench.said if isinstance(m, Resumed)][-1:]
        assert source == (["park"] if apart else [])
    here, there = reads
    assert level(here, "park") >= 80 * 8 and level(there, "park") == level(there, "snapshots") == 0
    assert here.allocated - there.allocated == level(here, "park") + level(here, "snapshots")


def test_growth_is_what_checkpoints_and_the_park_may_still_take() -> None:
    """M7: together; of what is there already nothing is counted again."""
    bench = Bench(parallel=2, made=stated, config=msgspec.structs.replace(FAKE, park_bytes=5000))
    marks = 2 * MARKS * 200
    assert asked(bench, Measure(1, 1, 1)).growth == marks + 5000
    bench.answer(start(1, prompt=80))
    held = Tally(bench.engine._keeper._residency._marks).nbytes
    assert held and asked(bench, Measure(1, 1, 1)).growth == marks - held + 5000


def test_what_is_parked_stays_below_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: weights, rows, checkpoints of all slots and what is parked together."""
    monkeypatch.setattr(memory, "reserved", lambda device: 0)
    held = 1000 + 96 * 8

    def limit(apart: bool = False, made: Any = build, **changes: int) -> int:
        config = msgspec.structs.replace(FAKE, **changes)
        loaded: Loaded = Bench(config=config, made=made).loaded
        with monkeypatch.context() as patch:
            patch.setattr(memory, "apart", lambda device: apart)
            return park_limit(config, loaded)

    assert limit(park_bytes=700, mem_ceiling=held + 500) == 500
    assert limit(park_bytes=300, mem_ceiling=held + 500) == 300
    assert limit(park_bytes=300, mem_ceiling=held) == 0
    assert limit(apart=True, park_bytes=700, mem_ceiling=held + 500) == 700
    assert limit(made=stated, park_bytes=700, mem_ceiling=held + 400 + MARKS * 200 + 500) == 500
    assert limit(park_bytes=-1, mem_ceiling=held + 500) == 500


def test_collecting_frees_what_refers_to_itself() -> None:
    """J3: what nobody uses is gone before anything is refused."""

    class Knot:
        def __init__(self) -> None:
            self.me = self

    bench = Bench()
    knot = weakref.ref(Knot())
    asked(bench, Collect(1, 1))
    assert knot() is None


# -- twenty rounds -------------------------------------------------------------------------------------------------

ROUNDS = """
import json, sys
from pathlib import Path
import torch
from engine.failpoints import Failpoints
from engine.load import load
from engine.models import registry
from engine.protocol import LEVELS, Collect, Config, GiveBack, Measure, Memory, Sampling, Seen, Start, Tokens
from engine.weights.checkpoint import open_checkpoint
from engine.worker import Engine

class Line:
    def __init__(self):
        self.inbox, self.said = [], []
    def post(self, message):
        self.said.append(message)
        if isinstance(message, Tokens):
            self.inbox.append(Seen(1, message.run, message.start + len(message.ids)))
    def take(self, timeout):
        taken, self.inbox = self.inbox, []
        return taken

config = Config(1, sys.argv[1], device="cpu", threads=1, prefix_chunk=16, safe_rows=16, park_bytes=1 << 20)
line = Line()
loaded = load(config, open_checkpoint(Path(sys.argv[1])), registry.build, line, Failpoints({}))
engine = Engine(config, loaded, line, Failpoints({}))

def told(message):
    line.said.clear()
    line.inbox.append(message)
    engine.turn()
    return next(m for m in line.said if isinstance(m, Memory))

def run(number, tokens, keep=False):
    line.inbox.append(Start(1, number, 0, tokens, Sampling(temperature=0), 3, [], keep_end=keep))
    engine.turn()
    while engine._slots.live:
        engine.turn()

for number in range(21):
    for talk in range(5):
        head = [3 + (talk * 7 + i * i) % 250 for i in range(460 if talk == 4 else 160)]
        run(number * 100 + talk * 2, head, keep=talk == 4)
    full = told(Measure(1, 1, 500))
    for level in LEVELS:
        told(GiveBack(1, 1, level, 1 << 40))
    run(number * 100 + 50, [9, 8, 7])  # its own checkpoint is the newest there is
    for level in LEVELS:
        told(GiveBack(1, 1, level, 1 << 40))
    done = told(Collect(1, 1))
    print(json.dumps([full.allocated, full.levels, done.allocated, done.reserved, done.levels]))
"""


def test_twenty_rounds_of_filling_leave_nothing(tmp_path: Path) -> None:
    """J2: park and checkpoints full and given back, twenty times: allocated to the byte, resident memory within 1 %."""
    folder = hybrids.save(hybrids.reference(half=True).to(torch.bfloat16), tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", ROUNDS, str(folder)]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    rounds = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(rounds) == 21
    for full, levels, allocated, _, left in rounds:
        held = dict(levels)
        assert held["park"] + held["snapshots"] > 700_000 and held["checkpoints"] > 1 << 19
        assert full - allocated > 1_400_000 and not any(size for _, size in left)
    assert len({allocated for _, _, allocated, _, _ in rounds}) == 1
    first, last = rounds[0][3], rounds[-1][3]
    assert abs(last - first) <= first / 100
