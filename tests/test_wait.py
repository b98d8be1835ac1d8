import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.wait import next_line_at, prefill_line, rounded, waiting_line


def test_lines():
    """L1: the words of a waiting line, with and without an estimate, and while the model loads."""
    assert waiting_line(1, 30.0, False, 40.0) == "waiting, position 1, about 40 s, 30 s so far"
    assert waiting_line(1, 30.0, False) == "waiting, position 1, 30 s so far"
    assert waiting_line(2, 30.0, True) == "waiting, position 2, the model is loading, 30 s so far"
    assert waiting_line(2, 30.0, True, 40.0) == "waiting, position 2, the model is loading, 30 s so far"


def test_prefill_line():
    """G3: rows resident and rows of the whole prompt."""
    assert prefill_line(12288, 95131) == "prefill 12288/95131"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, 0),
        (0.4, 0),
        (0.5, 1),
        (9.4, 9),
        (9.6, 10),
        (10.003, 10),
        (12.5, 15),
        (57.4, 55),
        (59, 60),
        (64.9, 60),
        (65, 70),
    ],
)
def test_rounding(seconds, shown):
    """L1: to 1 s under 10, to 5 s under 60, else to 10 s."""
    assert rounded(seconds) == shown


def test_when():
    """L1: at 10, 20, 30 s from the waiter's start."""
    assert next_line_at(100.0, 100.0, 10.0) == 110.0
    assert next_line_at(100.0, 109.9, 10.0) == 110.0
    assert next_line_at(100.0, 110.0, 10.0) == 120.0
    assert next_line_at(100.0, 137.0, 10.0) == 140.0
    assert next_line_at(100.0, 50.0, 10.0) == 110.0  # a clock that stepped back asks for no earlier line


@given(st.floats(0, 1e7), st.floats(0, 1e5), st.sampled_from([1.0, 5.0, 10.0, 60.0]))
def test_never_due_twice(start, waited, every):
    """L1: the next line is later than now, and by no more than one interval."""
    now = start + waited
    line = next_line_at(start, now, every)
    assert now < line <= max(now, start) + every * (1 + 1e-9) + 1e-6
    assert next_line_at(start, line, every) > line
