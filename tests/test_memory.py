"""engine/memory.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import memory
from engine.protocol import windows


def test_a_window_that_fits_is_taken_as_it_is() -> None:
    assert memory.fit(0, 8192, per_row=1000, room=10**9) == (8192, "")
    assert memory.fit(100, 8192, per_row=1000, room=10**9) == (100, "")


def test_an_asked_window_that_does_not_fit_is_an_error_with_the_sizes() -> None:
    """I6: a --max-len given that does not fit is an error at start with the sizes."""
    with pytest.raises(memory.DoesNotFit, match=r"--max-len 4096 needs 4\.00 GiB .* 1\.00 GiB are free: at most 1024"):
        memory.fit(4096, 8192, per_row=1 << 20, room=1 << 30)


def test_the_models_own_window_is_cut_and_that_is_said() -> None:
    """I4: the checkpoint's window, cut to memory and said in one line."""
    rows, said = memory.fit(0, 8192, per_row=1 << 20, room=1 << 30)
    assert rows == 1024 and "cut to 1024" in said and "8.00 GiB" in said and "\n" not in said


def test_more_than_the_models_window_is_an_error() -> None:
    with pytest.raises(memory.DoesNotFit, match="window of 8192"):
        memory.fit(8193, 8192, per_row=1, room=1 << 30)


def test_nothing_fits() -> None:
    with pytest.raises(memory.DoesNotFit, match="not even 64"):
        memory.fit(0, 8192, per_row=1 << 20, room=-5)


@given(st.integers(64, 5_000), st.integers(0, 4), st.integers(1, 6_000), st.integers(1, 99), st.integers(0, 999_999))
def test_side_slots_are_counted(native: int, sides: int, side: int, per_row: int, room: int) -> None:
    """M1, I4: a window is cut so that its rows and the side slots' fit, and by no more than 64 rows."""

    def taken(rows: int) -> int:
        return per_row * sum(windows(rows, 1 + sides, side))

    try:
        rows, said = memory.fit(0, native, per_row, room, sides, side)
    except memory.DoesNotFit:
        assert taken(64) > room
        return
    assert taken(rows) <= room and 0 < rows <= native
    assert (said == "") == (rows == native) == (taken(native) <= room)
    assert rows == native or taken(rows + 64) > room


def test_the_machines_numbers_are_plausible() -> None:
    assert 0 < memory.resident() <= memory.peak() < 1 << 50
    assert memory.reserved("cpu") > 1 << 20 and memory.high_water("cpu") > 1 << 20
    assert 0 < memory.free("cpu") < 1 << 50


def test_a_containers_limit_counts_the_pages_of_read_files_as_free(tmp_path: Path) -> None:
    """I4: a model just read lies in the page cache too; that must not cut its window."""
    assert list(memory._group_room(tmp_path)) == []
    (tmp_path / "memory.max").write_text("10000\n")
    (tmp_path / "memory.current").write_text("9000\n")
    assert list(memory._group_room(tmp_path)) == [1000]
    (tmp_path / "memory.stat").write_text("anon 4000\nfile 5000\ninactive_file 4500\nactive_file 500\n")
    assert list(memory._group_room(tmp_path)) == [5500]
    (tmp_path / "memory.max").write_text("max\n")
    old = tmp_path / "memory"
    old.mkdir()
    for name, value in (("limit_in_bytes", "700"), ("usage_in_bytes", "600")):
        (old / f"memory.{name}").write_text(value)
    (old / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50\n")
    assert list(memory._group_room(tmp_path)) == [150]


@given(
    st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=6),
    st.integers(1, 120),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_a_prefill_takes_what_its_dearest_step_takes(sizes: list[int], rows: int, each: int, deep: int) -> None:
    """J4: small steps deep in a window may take less than large ones at its begin, or more."""

    def size(start: int) -> int:
        return sizes[min(start // 16, len(sizes) - 1)]

    def workspace(step: int, start: int) -> int:
        return step * (each + deep * (start + step))

    dearest, start = 0, 0
    while start < rows:  # as a run is cut
        stop = min(rows, (start // size(start) + 1) * size(start))
        dearest = max(dearest, workspace(stop - start, start))
        start = stop
    assert memory.of_prefill(rows, 16, size, workspace) == dearest


GIB = 1 << 30


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_bounds_are_the_devices_where_nobody_says(whole: int, prefill: int, ceiling: int, peak: int) -> None:
    """J1: four fifths between requests, a whole window's prefill more during one, 2 GiB or 2 % of free blocks."""
    plain = memory.bounds(whole, prefill)
    assert plain == (memory.ceiling_of(whole), plain.ceiling + prefill, min(2 * GIB, whole // 50))
    assert 4 * whole - 5 < 5 * plain.ceiling <= 4 * whole
    given_ = memory.bounds(whole, prefill, ceiling, peak, 7)
    assert given_.ceiling == (ceiling or plain.ceiling) and given_.slack == 7
    assert given_.peak == (peak or given_.ceiling + prefill)
    assert memory.bounds(128 * GIB, 0, 70 * GIB, 77 * GIB, 2 * GIB) == (70 * GIB, 77 * GIB, 2 * GIB)


@given(st.integers(1, 70_000), st.integers(1, 99), st.integers(-5, 8_000_000))
def test_the_longest_prompt_that_fits_is_found(window: int, each: int, room: int) -> None:
    """J3: the most rows whose prefill fits, none where not even one does."""
    most = memory.longest(window, room, lambda rows: rows * each)
    assert most == min(window, max(0, room // each))


@given(st.integers(1, 300_000), st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_prefills_are_told_up_to_the_window(window: int, each: list[int]) -> None:
    """J1, M7: 1, 64, 256, 1024 rows, then doubling; the last is the window, and what is told never falls."""
    told = memory.heights(window, lambda rows: each[rows % len(each)] + rows // 100)
    rows = [count for count, _ in told]
    assert rows[-1] == window and rows == sorted(set(rows)) and len(rows) < 16
    assert all(wanted in rows for wanted in (1, 64, 256, 1024, 2048, 4096) if wanted <= window)
    assert all(after <= 2 * before for before, after in pairwise(rows) if before >= 1024)
    sizes = [size for _, size in told]
    assert sizes == sorted(sizes)
    assert all(size >= each[count % len(each)] + count // 100 for count, size in told)


def test_the_cpus_memory_is_what_is_free_and_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: on the CPU what is available at start; freed blocks of its allocator are not known before they are given."""
    monkeypatch.setattr(memory, "free", lambda device: 700)
    monkeypatch.setattr(memory, "reserved", lambda device: 300)
    assert memory.whole("cpu") == 1000 and memory.loose("cpu") == 0 and not memory.apart("cpu")


def test_what_was_freed_goes_back_to_the_system() -> None:
    """J2, J3: collecting gives back what glibc keeps of many small pieces, also those that only refer to each other."""
    memory.collect("cpu")
    before = memory.resident()
    pieces: list[object] = [bytearray(1000) for _ in range(100_000)]
    pieces.append(pieces)
    held = memory.resident()
    del pieces
    memory.collect("cpu")
    assert held - before > 80_000_000 and memory.resident() - before < (held - before) // 4
