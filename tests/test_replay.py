"""Replay: the journal comes out of the facts again, in another process, under another hash seed, from a snapshot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engine.scripted import Answer, Script
from pipeline.__main__ import main
from pipeline.replay import replay
from pipeline.table import TABLES
from pipeline.trace import Header, Recorder, TraceError, read
from tests.record import SCENES
from tests.world import Plan, World, replayed

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = sorted((ROOT / "fixtures" / "traces").glob("*.jsonl"))


def recorded(world: World, folder: Path, rotate_at: int = 1 << 30) -> list[Path]:
    """Write a world's run as trace files, through the real recorder."""
    header = Header(tandem="0", engine="scripted", policy=world.policy)
    recorder = Recorder(folder, header, rotate_at)
    from pipeline.core import Core

    core = Core(world.policy)
    core.begin(0.0)
    for number, (time, event) in enumerate(world.events):
        core.handle(event, time)
        recorder.event(event, time, core.take_steps())
        if rotate_at < 1 << 30 and number % 40 == 39:
            recorder.rotate(core.memory)
    recorder.close()
    return sorted(folder.iterdir(), key=lambda p: int(p.stem.rsplit("-", 1)[1]))


def busy_world() -> World:
    """A run with a bit of everything."""
    world = World(Script(answers=[Answer(ids=[1] * 40, decode_ms=100.0, prefill_ms_per_row=5.0)]), max_queue=3)
    for i in range(6):
        world.arrive(Plan(prompt=300 + i, stream=i % 2 == 0, code="invalid_type" if i == 3 else ""), at=i * 0.7)
    world.hang_up(2, at=3.0)
    world.kill(at=9.0)
    world.run_until(60.0)
    return world


def edited(source: Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
    """A copy of a trace with lines changed or (None) left out."""
    lines = [change(json.loads(line)) for line in source.read_text().splitlines()]
    target.write_text("\n".join(json.dumps(line) for line in lines if line is not None) + "\n")
    return target


def test_replay_is_the_same(tmp_path: Path) -> None:
    """R6: recorded facts through a fresh core give the journal row for row; the file is 0600."""
    world = busy_world()
    [path] = recorded(world, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    report = replay(path)
    assert report.difference is None
    assert report.steps == world.steps == replayed(world)
    result = CliRunner().invoke(main, ["replay", str(path)])
    assert result.exit_code == 0
    assert f"{len(world.steps)} rows: the same" in result.output


def test_replay_reads_a_trace_without_its_rows(tmp_path: Path) -> None:
    """R6: the facts alone give the journal."""
    world = busy_world()
    [path] = recorded(world, tmp_path / "a")
    bare = edited(path, tmp_path / "bare.jsonl", lambda line: None if "step" in line else line)
    assert replay(bare, compare=False).steps == world.steps
    result = CliRunner().invoke(main, ["replay", "--journal", str(bare)])
    assert result.output.count("\n") == len(world.steps)


def test_a_later_chunk_differs(tmp_path: Path) -> None:
    """R6: one fact changed is reported as the first differing row, with the request's history."""
    world = World(Script(answers=[Answer(ids=[1] * 5, prefill_ms_per_row=10.0)]))
    world.arrive(Plan(prompt=999))
    world.run_until(30.0)
    [path] = recorded(world, tmp_path / "a")
    done = [False]

    def later(line: dict[str, Any]) -> dict[str, Any]:
        if line.get("event", {}).get("type") == "ChunkDone" and not done[0]:
            done[0] = True
            line["t"] += 3.0
        return line

    changed = edited(path, tmp_path / "later.jsonl", later)
    difference = replay(changed).difference
    assert difference is not None
    assert difference.recorded is not None
    assert (difference.recorded.row, difference.recorded.life) == ("chunk_done", "request")
    assert "queued" in str(difference)
    result = CliRunner().invoke(main, ["replay", str(changed)])
    assert result.exit_code == 1
    assert "first difference" in result.output


def test_a_missing_hang_up_differs(tmp_path: Path) -> None:
    """R6: a fact left out is found."""
    world = busy_world()
    [path] = recorded(world, tmp_path / "a")
    changed = edited(
        path, tmp_path / "b.jsonl", lambda line: None if line.get("event", {}).get("type") == "HungUp" else line
    )
    difference = replay(changed).difference
    assert difference is not None


def test_rotation_opens_with_a_snapshot(tmp_path: Path) -> None:
    """R5: a rotated file opens with a snapshot of the core and replays alone."""
    world = busy_world()
    paths = recorded(world, tmp_path, rotate_at=1)
    assert len(paths) > 2
    steps = []
    for number, path in enumerate(paths):
        header = next(iter(read(path))).header
        assert header is not None
        assert header.number == number
        assert (header.snapshot is None) == (number == 0)
        report = replay(path)
        assert report.difference is None
        steps += report.steps
    assert steps == world.steps


def test_a_gap_says_how_far_it_replays(tmp_path: Path) -> None:
    """R5: where the writer could not keep up the file is marked, and replays to that point."""
    world = busy_world()
    [path] = recorded(world, tmp_path / "a")
    lines = path.read_text().splitlines()
    half = len(lines) // 2
    cut = tmp_path / "gap.jsonl"
    cut.write_text("\n".join([*lines[:half], '{"lost":12}', *lines[half + 12 :]]) + "\n")
    report = replay(cut)
    assert not report.complete
    assert report.difference is None
    result = CliRunner().invoke(main, ["replay", str(cut)])
    assert f"replays to event {report.events}" in result.output


def test_a_gap_anywhere_is_no_difference(tmp_path: Path) -> None:
    """R5: rows may be missing before a mark, or where a crash cut a line: what is there replays, and no row differs."""
    world = World(Script(answers=[Answer(ids=[1] * 3)]))
    world.arrive(Plan(stream=False))
    world.run_until(9.0)
    [path] = recorded(world, tmp_path / "a")
    lines = path.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    for count in range(1, len(lines)):
        for tail in ('{"lost":1}\n', lines[count][:-1], lines[count][:-9]):
            cut.write_text("".join([*lines[:count], tail]))
            report = replay(cut)
            assert report.difference is None, str(report.difference)
            assert not report.complete


def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R5, P1: the server goes on and stops in order; the log names the fault and no path."""
    from pipeline import trace
    from pipeline.events import Tick

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/a/path")

    monkeypatch.setattr(trace, "BACKLOG", 3)
    monkeypatch.setattr(trace.Recorder, "_write_line", full)
    recorder = Recorder(tmp_path, Header(tandem="0", engine="scripted", policy=World().policy), 1 << 30)
    for i in range(50):
        recorder.event(Tick(), float(i), [])
    recorder.close()
    assert not recorder._thread.is_alive()
    assert "[trace] the recording ends here: ENOSPC" in caplog.text
    assert "/a/path" not in caplog.text


def test_the_last_mark_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: what was dropped just before the end is marked as well."""
    import threading

    from pipeline import trace
    from pipeline.events import Tick

    go, write = threading.Event(), trace.Recorder._write_line
    monkeypatch.setattr(trace, "BACKLOG", 3)
    monkeypatch.setattr(trace.Recorder, "_write_line", lambda self, line: go.wait(10) and write(self, line))
    recorder = Recorder(tmp_path, Header(tandem="0", engine="scripted", policy=World().policy), 1 << 30)
    for i in range(9):
        recorder.event(Tick(), float(i), [])
    lost = recorder.lost
    go.set()
    recorder.close()
    [path] = tmp_path.iterdir()
    assert [line.lost for line in read(path)][-1] == lost > 0


def test_a_slow_writer_drops_and_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: a writer that cannot keep up drops events and marks it; it never blocks."""
    from pipeline import trace
    from pipeline.events import Tick

    monkeypatch.setattr(trace, "BACKLOG", 3)
    monkeypatch.setattr(trace.Recorder, "_write", lambda self: None)
    recorder = Recorder(tmp_path, Header(tandem="0", engine="scripted", policy=World().policy), 1 << 30)
    for i in range(5):
        recorder.event(Tick(), float(i), [])
    assert recorder.lost == 2
    recorder._lines.get(), recorder._lines.get()
    recorder.event(Tick(), 9.0, [])
    recorder._file.close()
    kinds = [recorder._lines.get_nowait() for _ in range(3)]
    assert [(line.t, line.lost) for line in kinds if line] == [(2.0, 0), (0.0, 2), (9.0, 0)]


def test_another_process_and_hash_seed(tmp_path: Path) -> None:
    """R3: the same events give the same journal in another process under another hash seed."""
    world = busy_world()
    [path] = recorded(world, tmp_path)
    for seed in ("0", "4711"):
        run = subprocess.run(
            [sys.executable, "-m", "pipeline", "replay", str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        assert ": the same" in run.stdout


@given(raw=st.binary(max_size=200))
def test_a_broken_file_is_named(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """R6: a file that is no trace is a clear error, never a crash."""
    path = tmp_path_factory.mktemp("t") / "x.jsonl"
    path.write_bytes(raw)
    with pytest.raises(TraceError):
        replay(path)


def test_no_text_at_facts(tmp_path: Path) -> None:
    """P1, R5: an event has no field that could hold text of a request: names, codes and masked paths only."""
    from pipeline import events

    texts = {
        kind.__name__: [f.name for f in msgspec.structs.fields(kind) if f.type in ("str", str)]
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events._Event) and kind is not events._Event
    }
    assert {name: fields for name, fields in texts.items() if fields} == {
        "Received": ["name", "route"],
        "Checked": ["code", "param"],
        "Prepared": ["code", "param", "lane"],
        "EngineReady": ["device"],
        "HungUp": ["why"],
        "Faulted": ["where", "error"],
        "Progress": ["closed"],
        "RunResumed": ["source"],
        "RunEnded": ["reason", "why", "closed"],
        "RunDeclined": ["reason"],
        "Resident": ["where"],
        "OwnWork": ["what"],
    }
    raw = [
        f.name
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events._Event)
        for f in msgspec.structs.fields(kind)
        if "bytes" in str(f.type)
    ]
    assert raw == ["hashes", "first", "hashes"], "salted hashes"


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_fixture_traces_replay(path: Path) -> None:
    """R6: every recorded trace of the real server replays row for row."""
    report = replay(path)
    assert report.difference is None, str(report.difference)
    assert report.recorded > 0
    assert report.header.engine == ("scripted" if "--script" in SCENES[path.stem][0] else "torch")
    assert report.header.tandem
    assert report.header.torch
    assert report.header.recorded_by.startswith("python -m tests.record ")


def test_fixtures_hit_every_row() -> None:
    """R1: together the recorded traces hit every row of the three tables."""
    hit = {(s.life, s.row) for path in FIXTURES for s in replay(path).steps}
    assert not [(life, row.name) for life, rows in TABLES.items() for row in rows if (life, row.name) not in hit]
