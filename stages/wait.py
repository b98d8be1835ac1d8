"""The sentences a waiting client reads (row L1), when they are due, and the estimate they give (rows L2, L3).

The estimate knows prompts by their length and requests by their kind. What a request will write it does not know: it
asks those of its kind that have ended. How good it is on real traffic says ``docs/estimates.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

OWN_WORK = {
    "disk write": "the server is writing its cache",
    "park copy": "the server is putting a conversation aside",
    "graph capture": "the server is recording its decode steps",
    "warm-up": "the server is warming up",
    "cache clear": "the server is clearing its cache",
}
"""What is told of the engine's own work (row L6), by its name."""
OWN_OTHER = "the server is busy with work of its own"
OWN_KEPT = 64
"""Waits behind one kind of own work that are remembered."""


def waiting_line(
    position: int, waited: float, loading: bool, estimate: float | None = None, *, memory: bool = False, own: str = ""
) -> str:
    """Where it stands: ``position`` from 1, times in seconds. While the model loads nothing is estimated.

    ``memory``: it waits for memory, not for a slot (row L4). ``own``: work of the engine's own that runs (row L6).
    """
    place = f"waiting for memory, position {position}" if memory else f"waiting, position {position}"
    so_far = f"{rounded(waited)} s so far"
    if loading:
        return f"{place}, the model is loading, {so_far}"
    about = "" if estimate is None else f", about {rounded(estimate)} s"
    why = f", {OWN_WORK.get(own, OWN_OTHER)}" if own else ""
    return f"{place}{about}, {so_far}{why}"


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


# -- the estimate (rows L2, L3) ----------------------------------------------------------------------------------------

KEPT = 512
"""Ended requests of a kind that are remembered."""
FEW = 8
"""With fewer than so many to judge by nothing is said."""
RECENT = 32
"""Ended requests the rates are taken from."""
SURE = 8
"""Tokens or rows from which on a run's own rate says more than the recent one."""
HOLDER = 40
"""The percentile of what ended requests wrote beyond the holder's count. Row L2 has 75; see ``docs/estimates.md``."""
ALIKE = 32
"""Of those that ended, the ones with the nearest prompts are asked: so many."""
NOISE = 64
"""Rows by which prompts differ without being different."""


class Ended(msgspec.Struct, frozen=True):
    """What is remembered of a request that came to its own end. ``kind``: thinking or not; ``rows``: those it read."""

    kind: str
    written: int
    ran: float
    rows: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class History(msgspec.Struct, frozen=True):
    """Ended requests: the last ``KEPT`` of each kind, and the last few of all of them. Fed by ends alone."""

    kinds: dict[str, tuple[Ended, ...]] = {}
    recent: tuple[Ended, ...] = ()


class Rates(msgspec.Struct, frozen=True):
    """Prompt rows and answer tokens a second; 0: not known."""

    prefill: float
    decode: float


class Holder(msgspec.Struct, frozen=True):
    """Who has a slot. ``rows``: those of its prompt that had to be read, ``unread`` those that still have to.

    ``most``: tokens it may write; ``ran``: seconds since it was admitted; rates are its own, 0: none yet.
    """

    kind: str
    rows: int
    unread: int
    written: int
    most: int
    ran: float
    prefill: float = 0.0
    decode: float = 0.0


class Waiter(msgspec.Struct, frozen=True):
    """Who waits. ``rows``: those of its prompt that nobody holds for it; ``slots``: those it may take."""

    kind: str
    rows: int
    most: int
    slots: tuple[int, ...] = (0,)


def remembered(history: History, end: Ended) -> History:
    """The history with one more end."""
    of_kind = (*history.kinds.get(end.kind, ()), end)[-KEPT:]
    return History({**history.kinds, end.kind: of_kind}, (*history.recent, end)[-RECENT:])


def flat(history: History) -> list[Ended]:
    """The ends of a history, so that ``folded`` makes it again: all but the recent by kind, then those."""
    out: list[Ended] = []
    for kind in sorted(history.kinds):
        ended = history.kinds[kind]
        out += ended[: len(ended) - sum(end.kind == kind for end in history.recent)]
    return [*out, *history.recent]


def folded(ends: Sequence[Ended]) -> History:
    """A history of these ends, the oldest first."""
    history = History()
    for end in ends:
        history = remembered(history, end)
    return history


def nearest_rank(values: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank: the least value that so many percent of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def recent_rates(history: History, checked: Rates) -> Rates:
    """What the last ended requests were served at; before the first of them, the self-check's."""
    return Rates(
        _rate([(end.rows, end.prefill_s) for end in history.recent]) or checked.prefill,
        _rate([(end.written, end.decode_s) for end in history.recent]) or checked.decode,
    )


def holder_left(holder: Holder, history: History, rates: Rates, others: int = 0) -> float | None:
    """Seconds until it lets go of its slot; None: nothing can be said.

    ``others``: rows that other slots still read meanwhile. Between two steps of theirs it has one step, so it waits for
    nearly all of them.
    """
    ended = history.kinds.get(holder.kind, ())
    beyond = [end for end in ended if end.written > holder.written]
    prefill, decode = holder.prefill or rates.prefill, holder.decode or rates.decode
    if len(ended) < FEW or len(beyond) < FEW or not prefill or not decode:
        return _left_by_time(holder.ran, history)
    more = nearest_rank([end.written - holder.written for end in _alike(beyond, holder.rows)], HOLDER)
    read = holder.unread / prefill + others / (rates.prefill or prefill)
    return read + min(more, max(holder.most - holder.written, 0)) / decode


def waiter_takes(waiter: Waiter, history: History, rates: Rates) -> float | None:
    """Seconds a waiter will hold a slot for, on average; None: nothing can be said."""
    ended = history.kinds.get(waiter.kind, ())
    if len(ended) < FEW or not rates.prefill or not rates.decode:
        return None
    alike = _alike(ended, waiter.rows)
    tokens = sum(min(end.written, waiter.most) for end in alike) / len(alike)
    return waiter.rows / rates.prefill + tokens / rates.decode


def own_left(waits: Sequence[float], waited: float) -> float | None:
    """Seconds that the engine's own work still takes for one who waited behind it so long: the median of what was left
    of real waits that were longer. None: there was none.
    """
    left = [wait - waited for wait in waits if wait > waited]
    return nearest_rank(left, 50) if left else None


def waits_left(
    holders: Sequence[Holder | None], line: Sequence[Waiter], history: History, checked: Rates
) -> list[float | None]:
    """Seconds until each of the line gets a slot, behind the holders (None: a free slot) and those before it.

    List scheduling: in their order they take the slot of theirs that is free first, and while one reads its prompt the
    others stand nearly still. ``checked``: the self-check's rates.
    """
    rates = recent_rates(history, checked)
    unread = sum(holder.unread for holder in holders if holder is not None)
    free = [0.0 if h is None else holder_left(h, history, rates, unread - h.unread) for h in holders]
    out: list[float | None] = []
    for waiter in line:
        at = _first(free, waiter.slots)
        begins = None if at is None else free[at]
        takes = waiter_takes(waiter, history, rates)
        out.append(begins)
        if begins is None or takes is None:
            for slot in waiter.slots:  # one of them, nobody knows which: nothing is known of any from here on
                free[slot] = None
            continue
        reads = waiter.rows / rates.prefill
        free = [begins + takes if slot == at else _held_up(time, begins, reads) for slot, time in enumerate(free)]
    return out


def _held_up(time: float | None, begins: float, reads: float) -> float | None:
    """When a slot is free beside which somebody begins to read."""
    return time + reads if time is not None and time > begins else time


def _first(free: Sequence[float | None], slots: Sequence[int]) -> int | None:
    """The slot that is free first; None when that cannot be said of all of them."""
    times = [(free[slot], slot) for slot in slots]
    known = [(time, slot) for time, slot in times if time is not None]
    return min(known)[1] if known and len(known) == len(times) else None


def _alike(ended: Sequence[Ended], rows: int) -> Sequence[Ended]:
    """Those whose prompts were nearest in length, as a ratio; of equally near ones the older."""
    if len(ended) <= ALIKE:
        return ended
    own = rows + NOISE
    return sorted(ended, key=lambda end: max((end.rows + NOISE) / own, own / (end.rows + NOISE)))[:ALIKE]


def _left_by_time(ran: float, history: History) -> float | None:
    """The median time left over requests of any kind that had run as long."""
    left = [end.ran - ran for kind in sorted(history.kinds) for end in history.kinds[kind] if end.ran > ran]
    return nearest_rank(left, 50) if len(left) >= FEW else None


def _rate(parts: Sequence[tuple[int, float]]) -> float:
    """Of amounts and their seconds; 0 where there is too little of either."""
    amount, seconds = sum(part[0] for part in parts), sum(part[1] for part in parts)
    return amount / seconds if amount >= SURE and seconds > 0 else 0.0
