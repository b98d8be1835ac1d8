"""What the engine is started with, and what lies in the data folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline import data_dir
from pipeline.core import Core
from pipeline.recording import recorder
from pipeline.settings import Settings, policy
from pipeline.starting import engine_config
from stages.wait import History


def test_flags_in_the_engines_terms(tmp_path: Path) -> None:
    """F8: --speculate, --draft-shape, --parallel-cut, the park and the disk tier reach the engine, in bytes."""
    plain = engine_config(Settings(), 3, "model")
    assert (plain.epoch, plain.model, plain.speculate, plain.draft_shape) == (3, "model", True, "learned")
    assert (plain.park_bytes, plain.disk_cache_bytes, plain.data_dir, plain.parallel_cut) == (-1, 0, "", "share")
    given = Settings(
        speculate="off", draft_shape="fixed", park_gb=0.5, disk_cache_gb=2.0, data_dir=str(tmp_path),
        parallel_cut="joint",
    )  # fmt: skip
    config = engine_config(given, 1, "model")
    assert (config.speculate, config.draft_shape, config.parallel_cut) == (False, "fixed", "joint")
    assert (config.park_bytes, config.disk_cache_bytes) == (500_000_000, 2_000_000_000)
    assert config.data_dir == str(tmp_path)
    assert engine_config(Settings(park_gb=0.0), 1, "model").park_bytes == 0


def test_bounds_of_memory_in_the_engines_terms() -> None:
    """J1: given in GiB, told in bytes; 0 and -1 leave them to the device."""
    plain = engine_config(Settings(), 1, "m")
    assert (plain.mem_ceiling, plain.mem_peak, plain.slack) == (0, 0, -1)
    given = engine_config(Settings(mem_ceiling_gib=70, mem_peak_gib=77.5, reserve_slack_gib=0), 1, "m")
    assert (given.mem_ceiling, given.mem_peak, given.slack) == (70 << 30, 155 << 29, 0)


def test_slots_in_the_engines_terms_and_the_cores() -> None:
    """M1: --parallel and --side-max-len reach both the engine, which allocates, and the core, which admits."""
    plain, given = Settings(), Settings(parallel=3, side_max_len=500)
    assert (engine_config(plain, 1, "m").parallel, engine_config(plain, 1, "m").side_max_len) == (1, 65_536)
    assert (engine_config(given, 1, "m").parallel, engine_config(given, 1, "m").side_max_len) == (3, 500)
    assert (policy(given).slots, policy(given).side_max_len) == (3, 500)
    assert [slot.id for slot in Core(policy(given)).memory.slots] == [0, 1, 2]


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: the user's data folder, where no other is named; never a relative one."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_dir.folder(Settings()) == tmp_path / "tandemllm"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert data_dir.folder(Settings()) == Path.home() / ".local" / "share" / "tandemllm"
    assert data_dir.folder(Settings(data_dir="~/kept")) == Path.home() / "kept"


def test_the_salt_stays_where_files_are_found_by_it(tmp_path: Path) -> None:
    """G2, R5: with the disk tier the salt outlives the server, 0600 in a 0700 folder; else each start has its own."""
    kept = Settings(data_dir=str(tmp_path / "data"), disk_cache_gb=1.0)
    first = data_dir.salt(kept)
    assert len(first) == data_dir.SALT_BYTES
    assert data_dir.salt(kept) == first
    [file] = (tmp_path / "data").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert data_dir.salt(Settings()) != data_dir.salt(Settings())
    file.write_bytes(b"short")
    assert len(data_dir.salt(kept)) == data_dir.SALT_BYTES


@pytest.mark.parametrize("level", ["facts", "full"])
def test_the_salt_is_in_a_full_trace_alone(level: str, tmp_path: Path) -> None:
    """R5: a trace at facts holds salted hashes and not the salt; no trace names the data folder."""
    settings = Settings(trace=str(tmp_path), trace_level=level, data_dir="/secret")
    recording = recorder(settings, b"\xab" * 16, History())
    assert recording is not None
    recording.close()
    [path] = tmp_path.glob("*.jsonl")
    header = json.loads(path.read_text().splitlines()[0])["header"]
    assert header["salt"] == ("ab" * 16 if level == "full" else "")
    assert "/secret" not in path.read_text()
