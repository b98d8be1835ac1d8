"""Which waiter gets which slot (rows M1 to M5, M7): order of arrival, slot 0 first, a side slot for whom it suits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

YIELDING = ("disk write", "park copy")
"""The engine's own work that stops by itself where a run begins: nobody has to wait for it (row L6)."""
OWN_WAIT_S = 15.0
"""Seconds that other work of the engine's own is waited for, at most."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a waiter may take. ``rows``: of its run with the whole answer; ``aside``: in a side slot, with the margin.

    ``alone_in_0``: no side slot serves it (its images). ``continues``: where the conversation is held that it goes on
    with (slot, park, disk), "" for none. ``short``: a short guest of what slot 0 holds. ``slot0_until`` and
    ``own_until``: when it has waited long enough for slot 0, for the engine's own work. ``held``: memory does not allow
    it now; ``last_to_pass``: it has been so for long. ``offered``: to the engine as a guest, no answer yet.
    """

    rows: int
    aside: int
    alone_in_0: bool = False
    continues: str = ""
    short: bool = False
    slot0_until: float = 0.0
    own_until: float = 0.0
    held: bool = False
    last_to_pass: bool = False
    offered: bool = False


class Route(msgspec.Struct, frozen=True):
    """The slot of a waiter, -1 where it waits on. ``why``: free (slot 0 is), busy (it is), gave_up (waited for it in
    vain), guest (it keeps its conversation); of a waiter what it waits for: slots, memory, slot0, own.
    """

    slot: int = -1
    why: str = "slots"


def rows_needed(prompt: int, asked: int, default: int, whole: int) -> int:
    """Rows of a run with its whole answer, of which ``asked`` tokens are wanted (0: not said). Slot 0 holds them."""
    return min(prompt + (asked or default), whole)


def routed(claims: Sequence[Claim], free: Sequence[tuple[int, int]], now: float, own: bool = False) -> list[Route]:
    """Where each waiter goes, in the order they wait. ``own``: the engine does work that slot 0 waits for.

    ``free``: slots with their rows, in the order they are taken. A waiter that no free slot suits keeps nobody behind
    it from one that it could not have. One that memory has held up for long keeps all behind it: they would take what
    it waits for.
    """
    left, out, held = dict(free), [], False
    for claim in claims:
        route = _next(claim, left, now, own)
        if route.slot >= 0 and (held or claim.held):
            held, route = held or claim.last_to_pass, Route(-1, "memory")
        left.pop(route.slot, None)
        out.append(route)
    return out


def _next(claim: Claim, left: dict[int, int], now: float, own: bool) -> Route:
    """Where it goes with these slots free, memory aside."""
    if claim.offered:
        return Route()
    side = side_slot(claim, left.items())
    if 0 in left and claim.rows <= left[0]:
        if claim.short and not claim.continues and side >= 0:
            return Route(side, "guest")
        return Route(-1, "own") if own and now < claim.own_until else Route(0, "free")
    if side < 0:
        return Route()
    if not claim.continues:
        return Route(side, "busy")
    return Route(side, "gave_up") if now >= claim.slot0_until else Route(-1, "slot0")


def side_slot(claim: Claim, free: Iterable[tuple[int, int]]) -> int:
    """The first free side slot that it fits in, -1: none."""
    fitting = (slot for slot, rows in free if slot > 0 and claim.aside <= rows)
    return -1 if claim.alone_in_0 else next(fitting, -1)
