"""How many rows a prefill step may have, so that it takes at most half a second wherever in the window it stands.

Within a step nobody is heard: a client that leaves is noticed behind it (G1). A small step wastes time, as what a step
costs once is shared by fewer rows; a row deep in the window costs more than one at its begin. So the size is chosen for
each block of the prefill grid, from a few timed steps. All sizes divide the grid: steps never cross a block, and the
same prompt is cut alike as long as the same sizes hold (they change bits, so they belong to a cache's fingerprint).
Knows rows and seconds; the caller has the clock.
"""

from __future__ import annotations

from collections.abc import Callable

STEP_S = 0.5
"""Seconds a step may take."""

CHECK_ROWS = 64
"""Rows of the first timed step."""


class Steps:
    """Rows a step, by where it begins. ``blocks[i]`` holds for rows ``i * grid`` to ``(i + 1) * grid``."""

    def __init__(self, grid: int, blocks: tuple[int, ...]) -> None:
        self.grid, self.blocks = grid, blocks

    def at(self, start: int) -> int:
        """Rows of a step that begins at row ``start``."""
        return self.blocks[min(start // self.grid, len(self.blocks) - 1)]

    @property
    def most(self) -> int:
        """Rows of the largest step."""
        return max(self.blocks)


def measured(grid: int, window: int, seconds: Callable[[int, int], float]) -> Steps:
    """Choose the sizes. ``seconds(rows, start)`` times a step.

    A step's time is that of the same step at the window's begin and, for each row of it, a share that grows with the
    rows before: attention. The share is taken from one size at both ends of the window.
    """
    begin = _at_begin(grid, window, lambda rows: seconds(rows, 0))
    first = min(begin)
    depth = window - first
    share = max(0.0, seconds(first, depth) - begin[first]) / (first * depth) if depth else 0.0
    last = (window - 1) // grid
    return Steps(grid, tuple(_fitting(grid, begin, share * min((i + 1) * grid, window)) for i in range(last + 1)))


def _at_begin(grid: int, window: int, seconds: Callable[[int], float]) -> dict[int, float]:
    """Seconds of steps at the window's begin, from ``CHECK_ROWS`` up to the first that takes too long.

    A row never costs more in a larger step, so the time so far, scaled up, bounds the next larger one's: none is tried
    that could take longer than twice what it may. One that was too slow is timed again: a busy neighbour is no reason
    for small steps.
    """
    divisors = [rows for rows in range(1, grid + 1) if grid % rows == 0 and rows <= window]
    rows = max(rows for rows in divisors if rows <= CHECK_ROWS)
    times = {rows: seconds(rows)}
    for more in (more for more in divisors if more > rows):
        if times[rows] > STEP_S or times[rows] * more > 2 * STEP_S * rows:
            break
        taken = seconds(more)
        times[more] = min(taken, seconds(more)) if taken > STEP_S else taken
        rows = more
    return times


def _fitting(grid: int, begin: dict[int, float], per_row: float) -> int:
    """The largest size whose step takes at most ``STEP_S`` where each of its rows costs ``per_row`` seconds more."""
    fits = [rows for rows, taken in begin.items() if taken + rows * per_row <= STEP_S]
    if fits:
        return max(fits)
    first = min(begin)
    row_s = begin[first] / first + per_row
    return max((rows for rows in range(1, first) if grid % rows == 0 and rows * row_s <= STEP_S), default=1)
