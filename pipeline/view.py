"""The live state as plain values: for ``/health``, the Dev view and nothing that decides. No text of any request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.request import Memory, Request
from pipeline.states import RequestState
from pipeline.summary import rate
from stages.wait import OWN_OTHER, OWN_WORK

if TYPE_CHECKING:
    from pipeline.runner import Runner

WAITS = (RequestState.queued,)
RUNS = (RequestState.admitted, RequestState.prefilling, RequestState.decoding, RequestState.guest)


def request_view(request: Request, memory: Memory, now: float) -> dict[str, Any]:
    """One request, live or ended. Times in seconds since the server's start but ``age_s`` and ``*_ms``."""
    end = request.ended_at if request.ended_at is not None else now
    position = memory.queue.index(request.id) + 1 if request.id in memory.queue else 0

    def span(start: float | None, stop: float | None) -> float:
        return 0.0 if start is None else 1_000 * ((stop if stop is not None else end) - start)

    return {
        "id": request.id,
        "name": request.name,
        "route": request.route,
        "state": request.state.value,
        "row": request.row,
        "stream": request.stream,
        "age_s": end - request.received_at,
        "prompt_tokens": request.prompt_tokens,
        "done": request.rows_done,
        "total": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "source": request.source,
        "shared_rows": request.shared_rows,
        "drafts": msgspec.to_builtins(request.drafts),
        "completion_tokens": request.completion_tokens,
        "reasoning_tokens": request.reasoning_tokens,
        "closed": request.closed,
        "calls": request.calls,
        "choice": request.choice,
        "choices": request.choices,
        "parent": request.parent,
        "max_tokens": request.max_tokens,
        "position": position,
        "slot": request.served_by,
        "lane": request.lane,
        "inside": request.inside,
        "outgrown": request.outgrown,
        "line": request.line,
        "waits": waits(request, memory),
        "wait_own_ms": 1_000 * request.own_wait_s + span(request.own_since, None),
        "tokens_s": rate(request),
        "history": request.history,
        "outcome": request.outcome,
        "queue_ms": span(request.received_at, request.admitted_at),
        "prompt_ms": span(request.prefill_at, request.first_token_at),
        "decode_ms": span(request.first_token_at, None),
        "total_ms": 1_000 * (end - request.received_at),
        "wait_mem_ms": 1_000 * request.mem_wait_s + span(request.mem_since, None),
    }


def waits(request: Request, memory: Memory) -> str:
    """Why a request waits, as a person reads it (row L4); "" for one that does not."""
    if request.state not in WAITS:
        return ""
    slots = len(memory.slots)
    work = memory.engine.own_work
    words = {
        "memory": "not enough memory beside those that run",
        "slot0": "slot 0 is busy, and keeps its conversation",
        "own": OWN_WORK.get(work[-1], OWN_OTHER) if work else OWN_OTHER,
        "engine": "the engine is not ready",
    }
    return f"Queued: {words.get(request.why, f'all {slots} slots are busy' if slots > 1 else 'the slot is busy')}"


def counts(memory: Memory) -> dict[str, int]:
    """How many wait and run, and how the others ended."""
    states = [request.state for request in memory.requests.values()]
    return {
        "waiting": sum(state in WAITS for state in states),
        "running": sum(state in RUNS for state in states),
        **msgspec.to_builtins(memory.counts),
    }


def cache(memory: Memory) -> dict[str, Any]:
    """What the engine holds between requests, by its own word: rows of each slot; park and disk as sums."""

    def stored(where: str) -> dict[str, int]:
        held = [held for held in memory.residents if held.where == where]
        return {"entries": len(held), "rows": sum(h.rows for h in held), "bytes": sum(h.nbytes for h in held)}

    rows = {held.slot: held.rows for held in memory.residents if held.where == "slot"}
    return {
        "slots": [{"slot": slot.id, "rows": rows.get(slot.id, 0)} for slot in memory.slots],
        "park": stored("park"),
        "disk": stored("disk"),
    }


def memory_gate(memory: Memory) -> dict[str, Any]:
    """Memory by the engine's last reading and its bounds, in bytes, and what the gate decided last (rows J1 to J3)."""
    engine = memory.engine
    return {
        "allocated": engine.allocated,
        "reserved": engine.reserved,
        "free": engine.free,
        "peak": engine.peak,
        "ceiling": engine.ceiling,
        "peak_limit": engine.peak_limit,
        "slack": engine.slack,
        "levels": dict(engine.levels),
        "decision": msgspec.to_builtins(memory.decision),
        "refused": memory.memory_refused,
        "last_refused": msgspec.to_builtins(memory.last_refused),
    }


def lane(memory: Memory) -> dict[str, Any]:
    """The side lane since the start (section K): what came of its offers, and who is inside now, -1: nobody.

    ``copied_rows`` and ``copied_bytes`` are those of the last guest; ``bytes_a_row`` gives the copy of any length.
    """
    guest, counted = memory.guest, memory.lane
    inside = guest.request if guest is not None and guest.begun_at is not None else -1
    a_row = counted.copied_bytes / counted.copied_rows if counted.copied_rows else 0.0
    return {"guest": inside, **msgspec.to_builtins(counted), "bytes_a_row": a_row}


def parallel(memory: Memory) -> dict[str, Any]:
    """Requests in slots: now, the most so far and why not more (row M8). Guests have none.

    ``max_running_reason``: what one more waited for (slots, memory, slot0, own), or ``arrivals``: there was none.
    ``spill_waits`` waited for slot 0 as the park or the disk holds their conversation; ``slot0_gave_up`` of those that
    waited took a side slot. ``overlap_rounds`` were written while another answer was, ``joint_rounds`` in one step.
    """
    return {
        "slots": len(memory.slots),
        "running": sum(request.slot >= 0 for request in memory.requests.values()),
        "max_running": memory.max_running,
        "max_running_reason": memory.max_running_why,
        "spill_waits": memory.spill_waits,
        "slot0_gave_up": memory.slot0_gave_up,
        "joint_rounds": memory.joint_rounds,
        "overlap_rounds": memory.overlap_rounds,
    }


def view(runner: Runner) -> dict[str, Any]:
    """Everything the Dev view shows."""
    memory, now, ready = runner.core.memory, runner.now(), runner.loaded
    engine = memory.engine
    return {
        "now": now,
        "uptime_s": now,
        "engine": {
            "state": engine.state.value,
            "row": engine.row,
            "epoch": engine.epoch,
            "model": runner.model,
            "window": engine.window,
            "load_done": engine.load_done,
            "load_total": engine.load_total,
            "load_s": engine.load_s,
            "safe_rows": engine.safe_rows,
            "allocated": engine.allocated,
            "history": engine.history,
            "device": ready.device if ready else "",
            "path": ready.path if ready else "",
            "alike": ready.alike if ready else 0,
            "state_bytes": ready.state_bytes if ready else 0,
            "own_work": engine.own_work,
            "threads": ready.threads if ready else 0,
            "file_bytes": ready.file_bytes if ready else 0,
            "weights_bytes": ready.weights_bytes if ready else 0,
            "kv_bytes": ready.kv_bytes if ready else 0,
            "rss_bytes": ready.rss_bytes if ready else 0,
            "selfcheck_ms": ready.selfcheck_ms if ready else 0.0,
            "prefill_rate": ready.prefill_rate if ready else 0.0,
            "decode_rate": ready.decode_rate if ready else 0.0,
        },
        "slots": [
            {
                "slot": s.id,
                "state": s.state.value,
                "row": s.row,
                "request": s.request if s.state.value != "free" else -1,
            }
            for s in memory.slots
        ],
        "parallel": parallel(memory),
        "cache": cache(memory),
        "lane": lane(memory),
        "memory": memory_gate(memory),
        "queue": list(memory.queue),
        "requests": [request_view(r, memory, now) for r in memory.requests.values()],
        "recent": [request_view(r, memory, now) for r in memory.recent],
        "counts": counts(memory),
        "counters": dict(runner.counters),
        "settings": runner.settings.public(),
        "lag_ms": runner.lag_ms,
    }
