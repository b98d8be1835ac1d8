"""How many rows a prefill step may have, so that it takes at most half a second wherever in the window it stands.

Within a step nobody is heard: a client that leaves is noticed behind it (G1). A small step wastes time, as what a step
costs once is shared by fewer rows; a row deep in the window costs more than one at its begin. So the size is chosen for
each block of the prefill grid, from a few timed steps. All sizes divide the grid: steps never cross a block, and the
same prompt is cut alike as long as the same sizes hold (they change bits, so they belong to a cache's fingerprint).
Knows rows and seconds; the caller has the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

STEP_S = 0.5
"""Seconds a step may take."""

CHECK_ROWS = 64
"""Rows of the first timed step."""

DEEP = 4096
"""Rows before the deepest timed step: attention grows in proportion, and at a long window's end it takes seconds."""

LIKELY = 1.25
"""No step is tried that would be expected to take so many times what it may."""


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


def measured(
    grid: int, window: int, seconds: Callable[[int, int], float], known: Mapping[int, float] | None = None
) -> Steps:
    """Choose the sizes. ``seconds(rows, start)`` times a step; ``known``: what some take at the begin, by their rows.

    A step's time is that of the same step at the window's begin and, for each row of it, a share that grows with the
    rows before: attention. The share is taken from one size at the begin and far into the window.
    """
    begin = _at_begin(grid, window, lambda rows: seconds(rows, 0), dict(known or {}))
    first = min(begin)
    depth = min(window - first, DEEP)
    share = max(0.0, seconds(first, depth) - begin[first]) / (first * depth) if depth else 0.0
    last = (window - 1) // grid
    return Steps(grid, tuple(_fitting(grid, begin, share * min((i + 1) * grid, window)) for i in range(last + 1)))


def _at_begin(grid: int, window: int, seconds: Callable[[int], float], known: dict[int, float]) -> dict[int, float]:
    """Seconds of steps at the window's begin, from ``CHECK_ROWS`` up to the first that takes too long.

    None is tried that could take longer than twice what it may, or would be expected to take much longer than it may.
    One that was too slow is timed again: a busy neighbour is no reason for small steps.
    """
    divisors = [rows for rows in range(1, grid + 1) if grid % rows == 0 and rows <= window]
    rows = max(rows for rows in divisors if rows <= CHECK_ROWS)
    times = {rows: known.get(rows) or seconds(rows)}
    for more in (more for more in divisors if more > rows):
        if times[rows] > STEP_S or times[rows] * more > 2 * STEP_S * rows:
            break
        if _expected(times, more) > LIKELY * STEP_S:
            break
        taken = seconds(more)
        times[more] = min(taken, seconds(more)) if taken > STEP_S else taken
        rows = more
    return times


def _expected(times: dict[int, float], more: int) -> float:
    """Seconds of a step of ``more`` rows, on the line through the two largest; 0 where there is one. Noise may tilt it.

    In proportion to the largest it would take at most so long: a row never costs more in a larger step.
    """
    if len(times) < 2:
        return 0.0
    less, rows = sorted(times)[-2:]
    steep = max(0.0, times[rows] - times[less]) / (rows - less)
    return min(times[rows] * more / rows, times[rows] + steep * (more - rows))


def _fitting(grid: int, begin: dict[int, float], per_row: float) -> int:
    """The largest size whose step takes at most ``STEP_S`` where each of its rows costs ``per_row`` seconds more."""
    fits = [rows for rows, taken in begin.items() if taken + rows * per_row <= STEP_S]
    if fits:
        return max(fits)
    first = min(begin)
    row_s = begin[first] / first + per_row
    return max((rows for rows in range(1, first) if grid % rows == 0 and rows * row_s <= STEP_S), default=1)
