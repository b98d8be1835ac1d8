"""The sentences a waiting client reads (row L1), without the colon of a comment line, and when they are due."""

from __future__ import annotations

import math


def waiting_line(position: int, waited: float, loading: bool, estimate: float | None = None) -> str:
    """Where it stands: ``position`` from 1, times in seconds. While the model loads nothing is estimated."""
    so_far = f"{rounded(waited)} s so far"
    if loading:
        return f"waiting, position {position}, the model is loading, {so_far}"
    if estimate is None:
        return f"waiting, position {position}, {so_far}"
    return f"waiting, position {position}, about {rounded(estimate)} s, {so_far}"


def prefill_line(done: int, total: int) -> str:
    """How far its prompt is read, in rows (row G3)."""
    return f"prefill {done}/{total}"


def rounded(seconds: float) -> int:
    """To 1 s under 10 s, to 5 s under a minute, else to 10 s."""
    step = 1 if seconds < 10 else 5 if seconds < 60 else 10
    return math.floor(seconds / step + 0.5) * step


def next_line_at(start: float, now: float, every: float) -> float:
    """The first of ``start + every``, ``start + 2 * every``, … that is later than ``now``; all in seconds."""
    count = max(1, math.floor((now - start) / every))
    while start + count * every <= now:  # the quotient may round down: a line is never due twice
        count += 1
    return start + count * every
