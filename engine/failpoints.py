"""Places where a test makes the engine fail. Off by default: without ``Config.failpoints`` each is one empty lookup.

Knows names and counts only; who asks does the harm. Every point fires once a process.

===================  ===============================================================================================
``die_at_load``      any count: the process exits after ``Described``, before the weights are read
``stall_load``       any count: the load stands still after ``Described``
``decline_start``    the n-th ``Start`` is declined with ``memory``
``decline_guest``    the n-th ``Guest`` is declined with ``memory``
``fault_at_chunk``   instead of the n-th prefill step of a run an exception is raised
``die_at_chunk``     instead of the n-th prefill step of a run the process exits
``fault_at_token``   instead of choosing a run's n-th answer token (counted from 1) an exception is raised
``die_at_token``     instead of choosing a run's n-th answer token the process exits
``silent_at_token``  instead of choosing a run's n-th answer token the engine says nothing any more
===================  ===============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Harm = Literal["", "die", "fault", "silent"]
"""What a point does: the process exits, an exception is raised, nothing is said any more, or nothing at all."""

NAMES = frozenset(
    {
        "die_at_load",
        "stall_load",
        "decline_start",
        "decline_guest",
        "fault_at_chunk",
        "die_at_chunk",
        "fault_at_token",
        "die_at_token",
        "silent_at_token",
    }
)

EXIT_CODE = 70
"""What a process exits with when a failpoint made it die (``EX_SOFTWARE`` of sysexits)."""


class FailpointFault(Exception):
    """The exception a ``fault_…`` point raises."""


class Failpoints:
    """The points of one engine process, each with the count at which it fires."""

    def __init__(self, points: Mapping[str, int] | None = None) -> None:
        unknown = sorted(set(points or {}) - NAMES)
        if unknown:
            raise ValueError(f"no such failpoint: {', '.join(unknown)}")
        self._points = dict(points or {})

    def fires(self, name: str, count: int | None = None) -> bool:
        """Whether the point fires now, for the ``count``-th time its place is reached (None: whatever its count)."""
        if name not in self._points or count not in (None, self._points[name]):
            return False
        del self._points[name]
        return True

    def harm(self, place: Literal["chunk", "token"], counts: Iterable[int]) -> Harm:
        """What happens instead of the steps or tokens of a run numbered ``counts`` (from 1)."""
        if not self._points:
            return ""
        kinds: tuple[Harm, ...] = ("die", "fault", "silent")
        return next((kind for kind in kinds for n in counts if self.fires(f"{kind}_at_{place}", n)), "")
