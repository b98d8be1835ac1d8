"""Whether a prompt's prefill fits in memory, what is given back for it, and what else is done (rows J1 to J3, J5, M7).

``decide`` is asked again after every reading, until its word is none of ``give_back`` and ``collect``. Sizes in bytes.

What is *held* is what the ceiling and the peak bound. A device's allocator answers for all of it, its free blocks among
them. A process's resident memory does not: the interpreter and mapped files are in it, rows that nobody wrote yet are
not. There what the engine accounts for is held, and what the machine still has free decides beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.protocol import LEVELS

ALLOCATOR = LEVELS[0]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of memory for one prompt, and what was done for it so far.

    ``free``: what can still be taken from the machine; ``workspace``: of the prefill. ``ceiling`` and ``peak`` are
    bounds. Of these four 0 is not known, and asks for nothing. ``levels``: what each can give back, the cheapest to
    lose first. ``device``: ``reserved`` is what a device's allocator holds, not a process. ``asked``: levels that were
    asked already; ``others``: other runs are under way.
    """

    allocated: int = 0
    reserved: int = 0
    free: int = 0
    workspace: int = 0
    ceiling: int = 0
    peak: int = 0
    levels: Sequence[tuple[str, int]] = ()
    device: bool = False
    asked: Sequence[str] = ()
    collected: bool = False
    others: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """What is to be done: fits, give_back (``nbytes`` of ``level``), collect, fits_reserve, wait or refuse."""

    action: str = ""
    level: str = ""
    nbytes: int = 0


def decide(read: Snapshot) -> Verdict:
    """The next step of the gate. What all levels together would not be enough for takes nothing from any."""
    giving = [(name, size) for name, size in read.levels if size > 0 and _may_ask(name, read.asked)]
    together = sum(size for _, size in giving)
    short, over = missing(read), held(read) - read.ceiling if read.ceiling else 0
    needed = max(short, over if over <= together else 0)  # a ceiling that nothing helps against stops nobody
    if needed <= 0:
        return Verdict("fits")
    if short <= together:
        level, size = giving[0]
        return Verdict("give_back", level, min(size, needed))
    if not read.collected:
        return Verdict("collect")
    if read.workspace <= blocks(read) and not (read.peak and held(read) > read.peak):
        return Verdict("fits_reserve")
    return Verdict("wait" if read.others else "refuse")


def held(read: Snapshot) -> int:
    """What the bounds are for: all that the device's allocator holds, or what the engine accounts for."""
    own = read.allocated + blocks(read)
    return max(own, read.reserved) if read.device else own


def blocks(read: Snapshot) -> int:
    """Free blocks the allocator holds."""
    return sum(size for name, size in read.levels if name == ALLOCATOR)


def missing(read: Snapshot) -> int:
    """What the prefill lacks under the peak and in the machine; at most 0 when it fits."""
    over_peak = held(read) + read.workspace - read.peak if read.peak else 0
    return max(over_peak, read.workspace - read.free if read.free else 0)


def _may_ask(name: str, asked: Sequence[str]) -> bool:
    """A level is asked once: it gave what was needed, or it cannot. The allocator again, after each of the others,
    since what those give back may stay in its blocks.
    """
    return name not in asked or (name == ALLOCATOR and asked[-1] != ALLOCATOR)


# -- the floor beside others (row M7) ----------------------------------------------------------------------------------

FLOOR = 15 * 10**9
FLOOR_SHARE = 0.12
CEILING_SHARE = 0.8
"""The ceiling's default share of memory."""


def default_floor(ceiling: int) -> int:
    """Memory that is kept available: 15 GB or 12 % of all there is, which the ceiling is a share of."""
    return min(FLOOR, int(FLOOR_SHARE / CEILING_SHARE * ceiling))


def floor_held(
    own: int, others: int, growth: int, available: int, floor: int, room_to_peak: int | None, alone: bool
) -> bool:
    """Whether the floor stands when it is admitted beside others. A request alone is never held.

    ``own`` and ``others``: workspaces; ``growth``: what caches may still grow into. Together they take at most the room
    to the peak (None: not known).
    """
    taken = own + others + growth
    taken = taken if room_to_peak is None else min(taken, max(room_to_peak, 0))
    return alone or available - taken >= floor


def workspace_at(workspaces: Sequence[tuple[int, int]], rows: int) -> int:
    """The workspace of a prefill by the measured ones next above it; past the last that one's; 0: none is known."""
    return next((size for most, size in workspaces if most >= rows), workspaces[-1][1] if workspaces else 0)
