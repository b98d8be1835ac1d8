"""What the core knows, as the facts the stage ``wait`` estimates from (rows L2, L3)."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from engine.protocol import windows
from pipeline.request import Held, Memory, Request
from pipeline.settings import Policy
from pipeline.states import SlotState
from stages.hashes import BLOCK
from stages.slots import rows_needed
from stages.wait import SURE, Ended, Holder, Rates, Waiter, holder_left, recent_rates, waits_left

SIDE_MARGIN = 8_192
"""Rows beside the answer of a request under a plan in a side slot, where no flag says."""


class Said(msgspec.Struct, frozen=True):
    """Seconds to a slot, None where nothing can be said: of one right behind the holders, of each that waits, in order,
    and of one more who joined them now.
    """

    next: float | None
    waits: list[float | None]
    last: float | None


def kind(request: Request) -> str:
    """Whose answers tell how long its own will be."""
    return "thinking" if request.thinks else "plain"


def said(memory: Memory, policy: Policy, now: float) -> Said:
    """What everybody could be told now."""
    queue = [memory.requests[id] for id in memory.queue]
    history, checked = memory.history, _checked(memory)
    holders = [_holder(memory, slot.id, now) for slot in memory.slots]
    if any(slot.state is not SlotState.free and holders[slot.id] is None for slot in memory.slots):
        return Said(None, [None] * len(queue), None)  # who is over still winds down: a step, but nobody knows how long
    unread = to_read([request.prompt_tokens for request in queue], [r.hashes for r in queue], memory.residents)
    waiters = [_waiter(request, rows, memory, policy) for request, rows in zip(queue, unread, strict=True)]
    anybody = Waiter("", 0, 0, tuple(range(len(holders))))
    *waits, last = waits_left(holders, [*waiters, anybody], history, checked)
    return Said(waits_left(holders, [anybody], history, checked)[0], waits, last)


def first_end(memory: Memory, now: float) -> float | None:
    """Seconds until one of those who run is over: what somebody who waits for memory waits for. None: not known."""
    holders = [_holder(memory, slot.id, now) for slot in memory.slots if slot.state is not SlotState.free]
    live = [holder for holder in holders if holder is not None]
    rates = recent_rates(memory.history, _checked(memory))
    unread = sum(holder.unread for holder in live)
    ends = [holder_left(holder, memory.history, rates, unread - holder.unread) for holder in live]
    known = [end for end in ends if end is not None]
    return min(known) if known and len(known) == len(holders) else None


def to_read(prompts: list[int], hashes: list[list[bytes]], residents: list[Held]) -> list[int]:
    """Rows that each prompt will still have to be read for, when those before it have run.

    One that nothing is held for takes a place, and as many places as now are held then too: the oldest is gone.
    """
    held, out = [(place.rows, frozenset(place.hashes)) for place in residents], []
    for prompt, blocks in zip(prompts, hashes, strict=True):
        rows, at = max(((_leading(blocks, place[1]), i) for i, place in enumerate(held)), default=(0, -1))
        out.append(prompt - rows)
        if held:
            held.pop(at if rows * 2 > held[at][0] else 0)
            held.append((prompt, frozenset(blocks)))
    return out


def ended(request: Request) -> Ended | None:
    """What is remembered of a request that came to its own end; None of one that was cut, or was a guest (row K6)."""
    begun, end = request.admitted_at, request.ended_at
    if request.outcome not in ("stop", "length", "tool_calls") or begun is None or end is None or request.inside:
        return None
    read, wrote = request.prompt_tokens - request.cached_tokens, request.completion_tokens
    return Ended(kind(request), wrote, end - begun, read, request.read_ms / 1_000, request.write_ms / 1_000)


def _holder(memory: Memory, slot: int, now: float) -> Holder | None:
    request = memory.requests.get(memory.slots[slot].request)
    if request is None or request.slot != slot or request.admitted_at is None:
        return None
    read = request.rows_done - request.cached_tokens
    return Holder(
        kind(request),
        request.prompt_tokens - request.cached_tokens,
        max(request.prompt_tokens - max(request.rows_done, request.cached_tokens), 0),
        request.completion_tokens,
        request.max_tokens or memory.engine.window,
        now - request.admitted_at,
        _rate(read, request.read_ms),
        _rate(request.completion_tokens, request.write_ms),
    )


def _checked(memory: Memory) -> Rates:
    """Those of the engine's self-check."""
    return Rates(memory.engine.prefill_rate, memory.engine.decode_rate)


def _rate(amount: int, ms: float) -> float:
    """A second; 0 where there is too little of it yet."""
    return amount / ms * 1_000 if amount >= SURE and ms > 0 else 0.0


def _waiter(request: Request, rows: int, memory: Memory, policy: Policy) -> Waiter:
    most = request.asked_tokens or policy.default_max_tokens
    return Waiter(kind(request), rows, most, tuple(_slots(request, memory, policy)))


def _leading(hashes: list[bytes], held: frozenset[bytes]) -> int:
    """Rows of the leading blocks that are held; chained hashes are held up to one and not beyond it."""
    return bisect_left(hashes, 1, key=lambda block: block not in held) * BLOCK


def _slots(request: Request, memory: Memory, policy: Policy) -> list[int]:
    """The slots its whole answer fits in, beside it the margin of a side slot; images are read in slot 0 alone."""
    window = memory.engine.window
    rows = windows(window, len(memory.slots) if not request.images else 1, policy.side_max_len)
    needs = rows_needed(request.prompt_tokens, request.asked_tokens, policy.default_max_tokens, window)
    return [slot for slot, room in enumerate(rows) if needs + (margin(request, policy) if slot else 0) <= room]


def margin(request: Request, policy: Policy) -> int:
    """Rows beside its answer that a side slot must have for it (row M2)."""
    return (policy.side_margin if policy.side_margin >= 0 else SIDE_MARGIN) if request.planned else 0
