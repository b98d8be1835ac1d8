"""How many threads a decode step gets: all of them, or one while a neighbour is busy.

A step of two threads waits for the slower one. While another process holds a processor that is many times the step's
time, and one thread alone loses nothing. So each step is timed against what one thread takes, known from the load and
from every stretch with one. Knows seconds and counts; no clock and no torch.

Prefill steps keep their thread count always: with another, torch cuts the matrix products elsewhere and the bits change
(measured). A step of one row is not cut so; the load checks that before it allows the change (see ``load``).
"""

from __future__ import annotations

_STEPS, _MEAN, _ONCE = 4, 1.2, 4.0  # so much slower than one thread, on average of some steps or once: a neighbour
_SHORT, _LONG = 16, 256  # steps with one thread before all are tried again


class Threads:
    """The count for the next step. ``most`` threads there are; ``one_s`` is a step of one thread, 0: never change."""

    def __init__(self, most: int, one_s: float) -> None:
        self._most, self._one_s = most, one_s
        self._single = 0  # steps left with one thread
        self._span = _SHORT
        self._last: list[float] = []  # steps running with all threads, of what one takes
        self._good = 0  # such steps that were no slower

    @property
    def count(self) -> int:
        """Threads for the next step."""
        return 1 if self._single else self._most

    def took(self, seconds: float) -> None:
        """The step with ``count`` threads took so long."""
        if self._one_s <= 0 or self._most == 1:
            return
        if self._single:
            self._one_s += (seconds - self._one_s) / 8  # it grows with the sequence
            self._single -= 1
            return
        taken = seconds / self._one_s
        self._last = [*self._last, taken][-_STEPS:]
        if taken > _ONCE or (len(self._last) == _STEPS and sum(self._last) > _MEAN * _STEPS):
            self._single, self._good, self._last = self._span, 0, []
            self._span = min(2 * self._span, _LONG)
        else:
            self._good = self._good + 1 if taken <= _MEAN else 0
            if self._good == _SHORT:
                self._span = _SHORT
