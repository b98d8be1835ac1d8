"""engine/steps.py: the sizes of prefill steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.steps import DEEP, STEP_S, Steps, measured

costs = st.tuples(st.floats(0, 0.4), st.floats(1e-6, 0.02), st.floats(0, 1e-6))


@given(cost=costs, grid=st.sampled_from([64, 96, 1024]), window=st.integers(1, 40_000))
def test_no_step_takes_longer_than_it_may(cost: tuple[float, float, float], grid: int, window: int) -> None:
    """G1: a step is a divisor of the grid, chosen so that it takes at most 0.5 s, deep in the window too."""
    fixed, row_s, depth_s = cost
    tried: list[tuple[int, float]] = []

    def seconds(rows: int, start: int) -> float:
        tried.append((rows, fixed + rows * (row_s + depth_s * start)))
        return tried[-1][1]

    steps = measured(grid, window, seconds)
    assert len(steps.blocks) == -(-window // grid)
    assert all(grid % rows == 0 and rows <= window for rows in steps.blocks)
    assert list(steps.blocks) == sorted(steps.blocks, reverse=True)
    for number, rows in enumerate(steps.blocks):
        end = min((number + 1) * grid, window)
        taken = fixed + rows * (row_s + depth_s * max(0, end - rows))
        assert rows == 1 or taken <= STEP_S * 1.01 or rows < tried[0][0], (rows, taken)


def test_a_fast_machine_gets_the_whole_grid_and_a_slow_one_a_small_step() -> None:
    """G1: at the begin of the window and at its end."""
    assert measured(1024, 8192, lambda rows, _: rows * 1e-5).blocks == (1024,) * 8
    assert measured(1024, 8192, lambda rows, _: rows * 0.02).blocks == (16,) * 8
    assert measured(1024, 40, lambda rows, _: rows * 1e-5).blocks == (32,)
    growing = measured(1024, 8192, lambda rows, start: rows * (4e-4 + start * 2e-7))
    assert growing.blocks == (512, 512, 256, 256, 256, 256, 256, 128)


def test_a_busy_neighbour_is_asked_again() -> None:
    """G1: one slow step does not halve the size."""
    times = iter([0.01, 0.02, 0.9, 0.05, 0.1, 0.2, 0.01])
    assert measured(1024, 1024, lambda rows, _: next(times)).most == 1024


def test_nothing_is_tried_that_is_known_or_hopeless() -> None:
    """N5: a load measures little: not what it knows, not what the steps before say is too slow, not a window's end."""
    tried: list[tuple[int, int]] = []

    def seconds(rows: int, start: int) -> float:
        tried.append((rows, start))
        return rows * (3e-3 + start * 1e-7)

    known = {64: 64 * 3e-3}
    assert measured(1024, 262_144, seconds, known).blocks[:2] == (128, 128)
    assert tried == [(128, 0), (64, DEEP)]
    assert measured(1024, 262_144, seconds).blocks == measured(1024, 262_144, seconds, known).blocks


def test_the_size_at_a_row() -> None:
    """G1: a step takes the size of the block it begins in; the last block's holds behind it."""
    steps = Steps(4, (4, 2, 1))
    assert [steps.at(row) for row in (0, 3, 4, 8, 99)] == [4, 4, 2, 1, 1]
