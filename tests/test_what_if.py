"""What-if: a recorded run with a flag changed: as recorded to the first other decision, modelled from there on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engine.scripted import Answer as Scripted
from engine.scripted import Script
from pipeline import events as ev
from pipeline.__main__ import main
from pipeline.changes import BOUNDS, FLAGS_OF_FACTS, WHY_NOT, Change, Changes, NoChange, changed
from pipeline.core import Core
from pipeline.replay import replay
from pipeline.request import Memory, Slot
from pipeline.settings import FLAGS, Policy
from pipeline.states import SlotState
from pipeline.trace import Header, Recorder
from pipeline.watched import Watched
from pipeline.what_if import Result, what_if
from pipeline.what_if_print import journal, printed
from tests.world import Plan, World

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = sorted((ROOT / "fixtures" / "traces").glob("*.jsonl"))
QUEUE = ROOT / "fixtures" / "traces" / "queue.jsonl"
READING, WRITING = 1.0, 50.0
"""Milliseconds of a row and of a token."""


def world(answers: int = 40, **policy: object) -> World:
    answer = Scripted(ids=[1] * answers, prefill_ms_per_row=READING, decode_ms=WRITING)
    return World(Script(answers=[answer]), **policy)


def recorded(played: World, folder: Path, rotate_every: int = 0) -> list[Path]:
    """A world's run as trace files, through the real recorder."""
    recorder = Recorder(folder, Header(tandem="0", engine="scripted", policy=played.policy), 1 << 30)
    core = Core(played.policy)
    core.begin(0.0)
    core.take_steps()
    for number, (time, event) in enumerate(played.events, 1):
        core.handle(event, time)
        recorder.event(event, time, core.take_steps())
        if rotate_every and number % rotate_every == 0:
            recorder.rotate(core.memory)
    recorder.close()
    return sorted(folder.iterdir(), key=lambda path: int(path.stem.rsplit("-", 1)[1]))


def rows(result: Result) -> dict[int, str]:
    return {id: end.row for id, end in sorted(result.changed.items())}


def clients(seven: int = 7, **policy: object) -> World:
    """Seven of them, half a second apart, each with two seconds of answer: one leaves, two send whole answers."""
    played = world(**policy)
    for i in range(seven):
        played.arrive(Plan(prompt=300 + i, stream=i % 3 != 1), at=1.0 + i * 0.5)
    played.hang_up(4, at=4.0)
    played.run_until(120.0)
    return played


# -- as recorded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_recorded_value_is_a_plain_replay(path: Path) -> None:
    """R6: with the value it was recorded with nothing differs, nothing is modelled, and the rows are replay's."""
    header = replay(path, compare=False).header
    result = what_if(path, [f"max_queue={header.policy.max_queue}", f"--parallel={header.policy.slots}"])
    assert result.parting is None
    assert result.changed == result.recorded
    assert result.steps == replay(path, compare=False).steps
    assert "modelled" not in printed(result) + journal(result)


def test_a_flag_that_never_mattered_changes_nothing(tmp_path: Path) -> None:
    """R6: another value that no decision hangs on is told as that."""
    [path] = recorded(clients(max_queue=8), tmp_path)
    assert what_if(path, ["max_queue=30"]).parting is None
    told = CliRunner().invoke(main, ["replay", str(path), "--what-if", "max_queue=30"])
    assert "--max-queue 30 in place of 8" in told.output
    assert "every decision is the same" in told.output


# -- beside the same clients played with the other policy ----------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "change", "now"),
    [
        ({"max_queue": 2}, "max_queue=5", {"max_queue": 5}),
        ({"max_queue": 5}, "max_queue=0", {"max_queue": 0}),
        ({"queue_timeout": 3.0}, "queue_timeout=30", {"queue_timeout": 30.0}),
        ({"queue_timeout": 30.0}, "queue_timeout=3", {"queue_timeout": 3.0}),
        ({"request_timeout": 60.0}, "request_timeout=1.5", {"request_timeout": 1.5}),
    ],
)
def test_it_is_what_would_have_been(was: dict[str, float], change: str, now: dict[str, float], tmp_path: Path) -> None:
    """R6: where every answer is as long as another, the modelled run ends each request as the real one does."""
    [path] = recorded(clients(**was), tmp_path)
    result, truth = what_if(path, [change]), clients(**now)
    assert result.parting is not None
    assert rows(result) != {id: end.row for id, end in result.recorded.items()}
    ended = {step.id: (step.row, step.time) for step in truth.steps if step.dest in ("finished", "abandoned")}
    assert rows(result) == {id: row for id, (row, _) in sorted(ended.items())}
    mine = {step.id: step.time for step in result.steps if step.dest in ("finished", "abandoned")}
    assert mine == {id: pytest.approx(time, abs=0.4) for id, (_, time) in ended.items()}


def test_more_slots(tmp_path: Path) -> None:
    """R6: with another slot the second request does not wait; what several at once write is told as an assumption."""
    [path] = recorded(clients(), tmp_path)
    result = what_if(path, ["parallel=3"])
    assert result.parting is not None
    assert result.parting.of == "request 2"
    assert "must_wait" in result.parting.recorded
    assert max(end.queue for end in result.changed.values()) < max(end.queue for end in result.recorded.values())
    assert any("at once" in sentence for sentence in result.assumed)


def test_a_lane_that_is_shut(tmp_path: Path) -> None:
    """R6, K1: without the side lane a short request waits until the long one is over."""
    played = world(200)
    played.arrive(Plan(prompt=300), at=1.0)
    played.arrive(Plan(prompt=20, max_tokens=8, lane="raw"), at=3.0)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    result = what_if(path, ["side_lane=off"])
    assert result.recorded[2].row.startswith("guest_")
    assert not result.changed[2].row.startswith("guest_")
    assert result.changed[2].ttft > result.recorded[2].ttft + 5.0
    assert result.changed[2].modelled


def test_a_lane_that_is_opened(tmp_path: Path) -> None:
    """R6, K2: the modelled engine serves guests too."""
    played = world(200, side_lane="off")
    played.arrive(Plan(prompt=300), at=1.0)
    played.arrive(Plan(prompt=20, max_tokens=8, lane="raw"), at=3.0)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    result = what_if(path, ["side_lane=on"])
    assert result.parting is not None
    assert "offered_to_lane" in result.parting.changed
    assert result.changed[2].row == "guest_at_limit"
    assert result.changed[2].ttft < 2.0


def test_a_decision_without_a_row(tmp_path: Path) -> None:
    """R6, K8: what the engine is asked is a decision too: a lower cap in the lane, and then a guest outgrows it."""
    played = world(40)
    played.arrive(Plan(prompt=300), at=1.0)
    played.arrive(Plan(prompt=20, lane="side"), at=1.5)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    result = what_if(path, ["side_lane_side_tokens=4"])
    assert result.parting is not None
    assert result.parting.of == "the engine"
    assert ("max_tokens=192" in result.parting.recorded, "max_tokens=4" in result.parting.changed) == (True, True)
    assert "outgrown" in [step.row for step in result.steps if step.id == 2]
    assert rows(result) == {1: "stopped", 2: "stopped"}


def test_less_memory(tmp_path: Path) -> None:
    """R6, J2, J3: under a lower peak the gate gives back what helps, and refuses what nothing helps."""
    answer = Scripted(ids=[1] * 20, prefill_ms_per_row=READING, decode_ms=WRITING)
    mib = 1 << 20
    script = Script(
        answers=[answer],
        levels=[("park", 4 * mib)],
        workspace_per_row=mib // 100,
        ceiling=90 * mib,
        peak_limit=99 * mib,
    )
    played = World(script)
    for at, prompt in enumerate((100, 300, 900)):
        played.arrive(Plan(prompt=prompt), at=1.0 + 5 * at)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    result = what_if(path, [f"mem_peak_gib={7 / 1_024}"])
    assert result.parting is not None
    assert [end.row for end in result.recorded.values()] == ["stopped"] * 3
    assert rows(result) == {1: "stopped", 2: "stopped", 3: "refused_memory"}
    assert "level_given" in [step.row for step in result.steps]


def test_a_list_of_prompts_that_was_refused(tmp_path: Path) -> None:
    """R6, A3: nobody recorded the further prompts of a list that found no place; let in, each is as its first."""
    played = world(max_queue=1)
    played.arrive(Plan(prompt=300), at=1.0)
    played.arrive(Plan(prompt=50, others=(60, 70), body_s=0.3), at=1.5)
    played.arrive(Plan(prompt=50), at=1.6)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    result = what_if(path, ["max_queue=4"])
    assert {id: end.row for id, end in result.recorded.items()} == {1: "stopped", 2: "queue_filled", 3: "stopped"}
    assert set(rows(result)) == {1, 2, 3, 4, 5}
    assert result.open == (0, 0)
    assert all(end.served for end in result.changed.values())


def test_a_list_of_prompts_that_was_served(tmp_path: Path) -> None:
    """R6, A3: the recorded prompts of a list come with it, once; they do not when it is refused now."""
    played = world()
    played.arrive(Plan(prompt=300), at=1.0)
    played.arrive(Plan(prompt=50, others=(60, 70)), at=1.5)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    assert rows(what_if(path, ["parallel=2"])).keys() == {1, 2, 3, 4}
    assert rows(what_if(path, ["max_queue=0"])) == {1: "stopped", 2: "refused_queue_full"}


def test_choices_and_calls(tmp_path: Path) -> None:
    """R6, E6: choices follow one another in the modelled engine; an answer that called still does."""
    played = world(10, max_queue=1)
    played.arrive(Plan(prompt=300, choices=2), at=1.0)
    played.arrive(Plan(prompt=30, calls=1, choices=2), at=1.2)
    played.arrive(Plan(prompt=30), at=1.4)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    result = what_if(path, ["max_queue=2"])
    assert {id: end.row for id, end in result.recorded.items()}[2] == "called"
    assert rows(result) == {1: "stopped", 2: "called", 3: "stopped"}


def test_after_an_engine_that_was_lost(tmp_path: Path) -> None:
    """R6: a modelled engine is never lost, and starts again where the recorded one was on its way."""
    played = world(queue_timeout=0.5)
    played.arrive(Plan(prompt=300), at=1.0)
    played.kill(at=2.0)
    played.arrive(Plan(prompt=300, stream=False), at=1.1)
    played.arrive(Plan(prompt=300), at=3.0)
    played.run_until(60.0)
    [path] = recorded(played, tmp_path)
    result = what_if(path, ["queue_timeout=50"])
    assert result.recorded[1].row == "engine_lost"
    assert rows(result) == {1: "stopped", 2: "stopped", 3: "stopped"}


def test_a_file_that_opens_with_a_guest_inside() -> None:
    """R6, K2: what it has read and written is known from the snapshot, and is not done again."""
    answers = [Scripted(ids=[1] * 200, decode_ms=WRITING), Scripted(ids=[2] * 20, decode_ms=WRITING)]
    played = World(Script(answers=answers))
    played.arrive(Plan())
    played.arrive(Plan(prompt=7, lane="raw", max_tokens=20), at=1.0)
    played.run_until(1.6)
    memory = played.core.memory
    assert memory.guest is not None and memory.requests[2].completion_tokens > 0
    live = Watched(Core(played.policy, memory)).live[memory.guest.run]
    assert (live.inside, live.rows, live.written) == (True, 7, memory.requests[2].completion_tokens)


def test_from_a_rotated_file(tmp_path: Path) -> None:
    """R6: a file that opens with a snapshot goes on from it; slots in use there cannot be taken away."""
    files = recorded(clients(max_queue=8, slots=2), tmp_path, rotate_every=60)
    assert len(files) > 2
    result = what_if(files[1], ["queue_timeout=0.1", "parallel=3"])
    assert result.header.snapshot is not None
    assert result.open[1] == 0
    assert set(result.changed) >= set(result.recorded)
    same = what_if(files[1], ["max_queue=8"])
    assert same.parting is None
    assert same.steps == replay(files[1], compare=False).steps
    with pytest.raises(NoChange, match="more slots in use"):
        what_if(files[1], ["parallel=1"])


@given(
    st.lists(st.tuples(st.floats(0.5, 6), st.integers(1, 600), st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(
        ["max_queue=0", "max_queue=3", "queue_timeout=0.7", "request_timeout=1", "parallel=2", "side_lane=off"]
    ),
)
def test_every_request_ends_once(
    tmp_path_factory: pytest.TempPathFactory, sent: list[tuple[float, int, bool, bool]], change: str
) -> None:
    """R6: whatever is changed, each request that came has one end, in time order, with the recorded rows before it."""
    played = world(12, max_queue=1)
    for at, prompt, stream, side in sent:
        lane = "raw" if side else ""
        played.arrive(Plan(prompt=prompt, stream=stream, lane=lane, max_tokens=8 if side else 0), at=at)
    played.run_until(100.0)
    [path] = recorded(played, tmp_path_factory.mktemp("t"))
    result = what_if(path, [change])
    assert result.open == (0, 0)
    assert sorted(result.changed) == sorted(result.recorded)
    ends = [step.id for step in result.steps if step.life == "request" and step.dest in ("finished", "abandoned")]
    assert sorted(ends) == sorted(result.changed)
    assert [step.number for step in result.steps] == list(range(1, len(result.steps) + 1))
    assert [step.time for step in result.steps] == sorted(step.time for step in result.steps)
    alike = len(result.steps) if result.parting is None else int(result.modelled)
    assert result.steps[:alike] == played.steps[:alike]


# -- what is printed -----------------------------------------------------------------------------------------------


def test_a_longer_queue_in_a_recorded_trace() -> None:
    """R6: the first other decision with its request's history, both runs side by side, what is assumed."""
    result = what_if(QUEUE, ["max_queue=2"])
    assert result.parting is not None
    assert "refused_queue_full" in result.parting.recorded
    assert "arrived" in result.parting.changed
    refused = int(result.parting.of.split()[1])
    assert result.recorded[refused].row == "refused_queue_full"
    assert result.changed[refused].row != "refused_queue_full"
    told = printed(result)
    assert "first differing decision" in told
    assert f"request {refused}: refused_queue_full → {result.changed[refused].row}  [modelled]" in told
    assert "1 body was never read" in told
    marked = [line for line in journal(result).splitlines() if line.endswith("[modelled]")]
    assert len(marked) == len(result.steps) - int(result.modelled) > 0


def test_a_time_out_of_its_own() -> None:
    """R6: a shorter time-out comes at a time the recorded core never woke at."""
    result = what_if(QUEUE, ["queue_timeout=1"])
    assert result.parting is not None
    assert (result.parting.recorded, "waited_out" in result.parting.changed) == ("no such row", True)
    assert "queued" in printed(result)
    longer = what_if(QUEUE, ["queue_timeout=30"])
    assert longer.parting is not None
    assert ("waited_out" in longer.parting.recorded, longer.parting.changed) == (True, "no such row")


def test_the_same_in_another_process() -> None:
    """R3: another process under another hash seed prints the same bytes."""
    command = [sys.executable, "-m", "pipeline", "replay", str(QUEUE), "--what-if", "parallel=2", "--what-if"]
    told = [
        subprocess.run(
            [*command, "max-queue=0", *also], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            check=True, cwd=ROOT,
        ).stdout
        for also in ([], ["--journal"]) for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1] != told[2] == told[3]


def test_a_trace_without_an_answer(tmp_path: Path) -> None:
    """R6: where no engine can be modelled, the decision is told and that it ends there."""
    played = world(max_queue=0)
    played.arrive(Plan(prompt=300))
    played.arrive(Plan(prompt=300))
    played.run_until(0.01)
    [path] = recorded(played, tmp_path)
    result = what_if(path, ["max_live=1"])
    assert result.costs is None
    told = printed(result)
    assert "refused_live_full" in told
    assert "Nothing beyond it can be modelled" in told


def test_a_trace_of_another_version(tmp_path: Path) -> None:
    """R6: rows that do not come again from their facts are told, and the run beside is what comes now."""
    [path] = recorded(clients(), tmp_path / "t")
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text().replace('"row":"must_wait"', '"row":"waited"'))
    assert what_if(other, ["max_queue=0"]).drifted
    assert "see the plain replay" in printed(what_if(other, ["max_queue=8"]))
    assert "plain replay" not in printed(what_if(path, ["max_queue=8"]))


def test_a_recording_that_broke_off(tmp_path: Path) -> None:
    """R6: facts up to the gap are taken, and the gap is told."""
    played = clients()
    folder = tmp_path / "t"
    [path] = recorded(played, folder)
    lines = path.read_text().splitlines()
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join([*lines[:90], '{"lost":3}', *lines[90:]]) + "\n")
    result = what_if(short, ["max_queue=0"])
    assert not result.complete
    assert "dropped lines" in printed(result)
    assert result.open[1] == 0


# -- which flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("argloop=on", "--argloop acts on text"),
        ("think-budget=5", "--think-budget acts on text"),
        ("reasoning_format=tags", "acts on text"),
        ("speculate=off", "the engine's own work"),
        ("safe_rows=64", "the engine's own work"),
        ("host=::1", "changes no decision"),
        ("quiet_s=3", "silent or lost"),
        ("nonsense=1", "no such flag"),
        ("max_queue", "FLAG=VALUE"),
        ("max_queue=-1", "--max-queue"),
        ("side_lane=perhaps", "--side-lane"),
        ("mem_ceiling_gib=0", "unchanged"),
    ],
)
def test_what_cannot_be_changed(change: str, why: str) -> None:
    """R6: flags that act on text, or on the engine's own work, are refused with a sentence that says why."""
    if why == "unchanged":
        assert what_if(QUEUE, [change]).parting is None
        return
    told = CliRunner().invoke(main, ["replay", str(QUEUE), "--what-if", change])
    assert told.exit_code == 2
    assert why in told.output


def test_every_flag_has_an_answer() -> None:
    """R6: each flag of the core's policy may be changed or is refused with its own reason; no word is in two lists."""
    refused = [flag for flags in WHY_NOT.values() for flag in flags]
    named = [*FLAGS_OF_FACTS, *BOUNDS, *refused]
    assert len(named) == len(dict.fromkeys(named))
    known = [flag.name for flag in FLAGS]
    assert [flag for flag in [*FLAGS_OF_FACTS, *BOUNDS] if flag not in known] == []
    assert [field for field in FLAGS_OF_FACTS.values() if field not in Policy.__struct_fields__] == []
    header = Header(tandem="0", engine="x", policy=Policy())
    changes = changed(header, ["bodies-mb=3", "side_guests=off", "mem_ceiling_gib=2"])
    assert (changes.policy.bodies, changes.policy.side_guests) == (3 << 20, False)
    assert changes.bounds == {"ceiling": 2 << 30}
    assert str(changes.each[0]) == f"--bodies-mb 3 in place of {1_024 << 20}"


def test_bounds_of_memory() -> None:
    """R6, J1: another ceiling is another fact of the engine's start; a peak nobody asked for stays as far above it."""
    changes = Changes((Change("mem_ceiling_gib", 0, 1.0),), Policy(), {"ceiling": 1_000})
    ready = ev.EngineReady(1, 0.0, 64, ceiling=5_000, peak_limit=5_700, slack=9, most_rows=77)
    told = changes.bounded(ready)
    assert isinstance(told, ev.EngineReady)
    assert (told.ceiling, told.peak_limit, told.slack, told.most_rows) == (1_000, 1_700, 9, 0)
    other = ev.Tick()
    assert changes.bounded(other) is other
    assert Changes((), Policy()).bounded(ready) is ready
    memory = Memory(slots=[Slot(id=0), Slot(id=1, state=SlotState.busy)])
    memory.engine.peak_limit = 2_000
    Changes((), Policy(slots=3), {"peak_limit": 1_500}).applied(memory)
    assert (memory.engine.peak_limit, [slot.id for slot in memory.slots]) == (1_500, [0, 1, 2])
