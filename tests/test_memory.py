"""engine/memory.py."""

from __future__ import annotations

import pytest

from engine import memory


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


def test_the_machines_numbers_are_plausible() -> None:
    assert 0 < memory.resident() <= memory.peak() < 1 << 50
    assert memory.reserved("cpu") > 1 << 20 and memory.high_water("cpu") > 1 << 20
    assert 0 < memory.free("cpu") < 1 << 50
