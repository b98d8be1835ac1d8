"""engine/load.py with the fake model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine import memory
from engine.failpoints import EXIT_CODE, Failpoints
from engine.load import LoadFailed, device_for, load, processors, throttled, windows_line
from engine.prefix import MARKS
from engine.protocol import Config, Described, FromEngine, Loading
from tests.checkpoints import tokenizer
from tests.fake_engine import FakeCache, FakeModel, build, checkpoint


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine holds next to nothing when it begins to load; this process ran other tests."""
    monkeypatch.setattr(memory, "reserved", lambda device: 0)


CONFIG = Config(1, "fake", device="cpu", threads=torch.get_num_threads(), prefix_chunk=64)


class Left(Exception):
    pass


class Line:
    def __init__(self) -> None:
        self.said: list[FromEngine] = []

    def post(self, message: FromEngine) -> None:
        self.said.append(message)

    def take(self, timeout: float | None) -> list[Any]:
        return []

    def leave(self, code: int) -> Any:
        raise Left(code)


def loaded(line: Line | None = None, model: Any = build, **changes: Any) -> Any:
    points = Failpoints(changes.pop("points", None))
    return load(msgspec.structs.replace(CONFIG, **changes), checkpoint(), model, line or Line(), points)  # type: ignore[arg-type]


def test_it_describes_before_it_reads_and_measures_after() -> None:
    """N2: a self-check of 64 tokens at load, and the rates that the estimates start from."""
    line = Line()
    got = loaded(line)
    assert isinstance(line.said[0], Described) and line.said[0].window == 96 and line.said[0].engine == "torch"
    assert {m.what for m in line.said[1:] if isinstance(m, Loading)} == {"weights", "check"}
    ready = got.ready
    assert ready.selfcheck_ms > 0 and ready.prefill_rate > 0 and ready.decode_rate > 0 and ready.load_s > 0
    assert ready.kv_bytes == 96 * 8 and ready.weights_bytes == 1000 and ready.rss_bytes > 0 and ready.device == "cpu"
    assert got.model.steps[:3] == [(64, 0), (64, 0), (64, 32)]  # what the check took is not timed again


def test_it_describes_what_each_id_writes(tmp_path: Path) -> None:
    """F2, C6: the bytes of ids are decided once, in the engine, and it finds the thinking's tags in the same ones."""
    point, line = checkpoint(), Line()
    point.tokenizer_json = json.dumps(tokenizer(300))
    got = load(CONFIG, point, build, line, Failpoints(None))  # type: ignore[arg-type]
    described = line.said[0]
    assert isinstance(described, Described) and len(described.pieces) == 300 == len(got.vocabulary.pieces)
    assert described.pieces == got.vocabulary.pieces and described.pieces[0] == b""
    assert b"".join(described.pieces[token] for token in got.vocabulary.close) == b"</think>"
    loaded(line)
    assert line.said[-1] != described and loaded().vocabulary.close == ()


def test_every_slot_gets_the_whole_window() -> None:
    """I6: KV for the whole window is allocated at load."""
    got = loaded(parallel=3, max_len=40)
    assert [cache.rows for cache in got.caches] == [40, 40, 40] and got.ready.kv_bytes == 3 * 40 * 8


def test_side_slots_are_as_long_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """M1, I4: slot 0 has the window, the others --side-max-len rows of it; all are counted, and the window is cut."""
    got = loaded(parallel=3, side_max_len=16)
    assert got.windows == [cache.rows for cache in got.caches] == [96, 16, 16]
    assert got.ready.kv_bytes == (96 + 2 * 16) * 8
    monkeypatch.setattr(memory, "free", lambda device: (256 << 20) + (64 + 2 * 16) * 8)
    assert loaded(parallel=3, side_max_len=16).windows == [64, 16, 16]
    with pytest.raises(LoadFailed, match="those of the side slots"):
        loaded(parallel=4, side_max_len=16)


def test_a_given_safe_step_is_taken_and_must_divide_the_grid() -> None:
    """G1: a step is --safe-rows rows, a divisor of the grid."""
    assert loaded(safe_rows=16).steps.blocks == (16,)
    with pytest.raises(LoadFailed, match="safe-rows 24") as failed:
        loaded(safe_rows=24)
    assert failed.value.code == 2


def test_a_window_that_does_not_fit_is_an_error_with_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: a --max-len that does not fit is an error at start with the sizes."""
    monkeypatch.setattr(memory, "free", lambda device: (256 << 20) + 400)
    with pytest.raises(LoadFailed, match=r"needs .* free") as failed:
        loaded(max_len=90)
    assert failed.value.code == 3
    with pytest.raises(LoadFailed, match="window of 96") as failed:
        loaded(max_len=97)
    assert failed.value.code == 3


def test_the_models_own_window_is_cut_and_described_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "free", lambda device: (256 << 20) + 64 * 8)
    line = Line()
    assert loaded(line).window == 64
    assert [m.window for m in line.said if isinstance(m, Described)] == [96, 64]
    assert "cut to 64" in capsys.readouterr().err


def test_checkpoints_have_their_room_beside_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6, M7: what a slot's checkpoints may grow into is no room for rows: of each half of ``state_bytes``."""

    class Stated(FakeModel):
        state_bytes = 400

    room = 2 * (400 + MARKS * 200 + 64 * 8)
    for less, window in ((0, 64), (16, None)):
        monkeypatch.setattr(memory, "free", lambda device, less=less: (256 << 20) + room - less)
        if window:
            assert loaded(parallel=2, model=lambda *_, **__: Stated()).window == window
        else:
            with pytest.raises(LoadFailed, match="not even 64"):
                loaded(parallel=2, model=lambda *_, **__: Stated())


def test_the_bounds_of_memory_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: from what was free at start; given ones as they are, and the prefills they are held against."""
    monkeypatch.setattr(memory, "free", lambda device: 10 << 30)
    ready = loaded(safe_rows=64).ready
    whole = 64 * 64, 32 * 96  # the window's two steps
    assert ready.ceiling == 8 << 30 and ready.peak_limit == (8 << 30) + max(whole)
    assert ready.slack == (10 << 30) // 50 and ready.most_rows == 96
    assert ready.workspaces == [(1, 1), (64, 64 * 64), (96, 64 * 64)]
    mine = loaded(safe_rows=64, mem_ceiling=1 << 30, mem_peak=(1 << 30) + 5, slack=0).ready
    assert (mine.ceiling, mine.peak_limit, mine.slack) == (1 << 30, (1 << 30) + 5, 0)


def test_the_line_of_a_start_has_readys_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: weights, and KV and state that are ``kv_bytes`` together, of the window that was taken."""

    class Stated(FakeModel):
        weights_bytes, kv_bytes_per_row, state_bytes = 1 << 30, 10 << 20, 500 << 20

    monkeypatch.setattr(memory, "free", lambda device: 40 << 30)
    monkeypatch.setattr(memory, "reserved", lambda device: 6 << 30)
    config = msgspec.structs.replace(CONFIG, parallel=2, side_max_len=40)
    one = loaded(parallel=2, side_max_len=40, model=lambda *_, **__: Stated())
    kv, state = 136 * (10 << 20), 2 * (500 << 20)
    assert (one.ready.weights_bytes, one.ready.kv_bytes) == (1 << 30, kv + state)
    line = windows_line(config, one, 96)
    assert line.startswith("[engine] weights 1.00 GiB; window 96: KV 1.33, state 0.98, 40.00 free; 48: KV 0.86, ")
    assert line.endswith("; 192: KV 2.27, state 0.98, 39.06 free (longer than the model's window)")


def test_the_longest_prompt_is_what_fits_beside_weights_and_rows() -> None:
    """J3: with every cache given back; that not even one row fits is said at start, never later."""
    held = 1000 + 96 * 8
    assert loaded(safe_rows=64, mem_peak=held + 50 * 50).ready.most_rows == 50
    assert loaded(safe_rows=64, mem_peak=held + 1).ready.most_rows == 1
    with pytest.raises(LoadFailed, match="--mem-peak-gib allows") as failed:
        loaded(safe_rows=64, mem_peak=held)
    assert failed.value.code == 3


def test_the_window_is_cut_to_the_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    """J1, I6: what stays between requests is under the ceiling, weights and rows first."""
    assert loaded(mem_ceiling=1000 + 96 * 8).window == 96
    assert loaded(mem_ceiling=1000 + 96 * 8 - 1).window == 64 and "cut to 64" in capsys.readouterr().err
    with pytest.raises(LoadFailed, match=r"not even 64 .* --mem-ceiling-gib allows 0\.00 GiB in all\.$") as failed:
        loaded(mem_ceiling=1000)
    assert failed.value.code == 3


def test_kv_that_cannot_be_allocated_is_told_with_its_size() -> None:
    """I6: never later."""

    class Greedy(FakeModel):
        def new_cache(self, rows: int) -> FakeCache:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(LoadFailed, match="could not be allocated") as failed:
        loaded(model=lambda *a, **k: Greedy())
    assert failed.value.code == 3


@pytest.mark.parametrize(("logits", "said"), [(math.nan, "not finite"), (None, "other logits")])
def test_a_failed_self_check_ends_the_load(logits: float | None, said: str) -> None:
    """N2: logits finite and equal twice, or the engine does not start."""

    class Broken(FakeModel):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.rand(1, 50) if logits is None else torch.full((1, 50), logits)

    with pytest.raises(LoadFailed, match=said) as failed:
        loaded(model=lambda *a, **k: Broken())
    assert failed.value.code == 4


def test_it_can_be_made_to_die_while_loading() -> None:
    line = Line()
    with pytest.raises(Left, match=str(EXIT_CODE)):
        loaded(line, points={"die_at_load": 1})
    assert [type(m) for m in line.said] == [Described]


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(LoadFailed, match="abacus"):
        device_for(msgspec.structs.replace(CONFIG, device="abacus"))
    assert device_for(msgspec.structs.replace(CONFIG, device="auto")) in ("cpu", "cuda")


def test_a_containers_share_of_time_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1: a step's time is that of its slowest thread, and threads beyond the share are held back."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert processors(tmp_path) == 64
    for said, count in (("max 100000", 64), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1)):
        (tmp_path / "cpu.max").write_text(said + "\n")
        assert processors(tmp_path) == count
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    for quota, count in (("-1", 64), ("400000", 4)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert processors(tmp_path) == count


def test_progress_is_said_four_times_a_second_and_at_both_ends() -> None:
    said: list[FromEngine] = []
    now = 0.0
    progress = throttled(1, said.append, lambda: now)
    for done in range(101):
        progress("weights", done, 100)
        now += 0.02
    progress("check", 0, 1)
    counts = [m.done for m in said if isinstance(m, Loading) and m.what == "weights"]
    assert counts[0] == 0 and counts[-1] == 100 and 7 <= len(counts) <= 10
    assert said[-1] == Loading(1, "check", 0, 1)


def test_decode_may_fall_to_one_thread_only_where_that_changes_no_bit() -> None:
    """F8: the thread count of a decode step is free only if the load saw equal logits with all and with one."""

    class Cut(FakeModel):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs) + torch.get_num_threads() * 1e-3

    class Joined(FakeModel):
        def forward(self, parts: Any) -> torch.Tensor:
            more = torch.get_num_threads() * 1e-3 if len(parts[0].tokens) > 1 else 0.0
            return super().forward(parts) + more

    assert loaded(threads=2).one_s > 0 and torch.get_num_threads() == 2
    assert loaded(threads=2, model=lambda *a, **k: Joined()).one_s == 0  # rounds have several rows
    assert loaded(threads=2, model=lambda *a, **k: Cut()).one_s == 0 and torch.get_num_threads() == 2
    assert loaded(threads=1).one_s == 0


def test_rounds_are_timed_by_their_rows_where_drafts_may_be() -> None:
    """F8: what a draft must pay for; where rows do not come out alike, or none is wanted, only a plain step."""

    class Few(FakeModel):
        alike, state_bytes, path = 5, 100, "few"

    assert sorted(loaded().costs) == [1, 2, 4, 8, 16, 32] and min(loaded().costs.values()) > 0
    assert sorted(loaded(speculate=False).costs) == [1]
    few = loaded(model=lambda *_, **__: Few(), parallel=2, max_len=40)
    assert sorted(few.costs) == [1, 2, 4]
    ready = few.ready
    assert (ready.path, ready.alike, ready.state_bytes, ready.kv_bytes) == ("few", 5, 100, 2 * (40 * 8 + 100))
