"""A request's figures at its end: for its client, for the counts and for its one log line. No text of it anywhere."""

from __future__ import annotations

import msgspec

from pipeline.effects import Finish
from pipeline.outcomes import Outcome
from pipeline.request import Counts, Request

CUT = ("engine_restarting", "shutting_down")
"""Codes that are errors for a request that ran, refusals for one that waited."""


def _ms(start: float | None, end: float | None) -> float:
    """Milliseconds between two times; 0 when either never came."""
    return 0.0 if start is None or end is None else round((end - start) * 1_000, 3)


def finish(request: Request, outcome: Outcome, now: float) -> Finish:
    """What the client is told."""
    return Finish(
        request=request.id,
        finish=outcome.finish,
        opened=request.opened,
        status=outcome.status,
        code=outcome.code,
        retry_after=outcome.retry_after,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        cached_tokens=request.cached_tokens,
        reasoning_tokens=request.reasoning_tokens,
        drafted=request.drafts.drafted,
        accepted=request.drafts.accepted,
        queue_ms=_ms(request.received_at, request.admitted_at if request.admitted_at is not None else now),
        prompt_ms=_ms(request.prefill_at, request.first_token_at if request.first_token_at is not None else now),
        predicted_ms=_ms(request.first_token_at, request.last_token_at),
        ttft_ms=_ms(request.received_at, request.first_token_at),
        total_ms=_ms(request.received_at, now),
    )


def refused(end: Finish) -> bool:
    """Whether an end is a status of its own: nothing was sent before it, and no answer timed out."""
    return end.code != "" and not end.opened and end.status != 200


def join(ends: list[Finish]) -> Finish:
    """What the client of a list of prompts is told, from its members' ends in the order they came.

    One that refuses is the answer, else the first that an error ended, else the last. Usage is summed; what was waited
    is the first one's.
    """
    faulty = [end for end in ends if end.code]
    whole = next(filter(refused, ends), [*faulty, ends[-1]][0])
    first = min(ends, key=lambda end: end.request)
    return msgspec.structs.replace(
        whole,
        request=first.request,
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        completion_tokens=sum(end.completion_tokens for end in ends),
        cached_tokens=sum(end.cached_tokens for end in ends),
        reasoning_tokens=sum(end.reasoning_tokens for end in ends),
        drafted=sum(end.drafted for end in ends),
        accepted=sum(end.accepted for end in ends),
        queue_ms=first.queue_ms,
        prompt_ms=sum(end.prompt_ms for end in ends),
        predicted_ms=sum(end.predicted_ms for end in ends),
        ttft_ms=first.ttft_ms,
        total_ms=max(end.total_ms for end in ends),
    )


def rate(request: Request) -> float:
    """Tokens a second of the answer, between its first and its last; 0 before there are two."""
    ms = _ms(request.first_token_at, request.last_token_at)
    return 1_000 * (request.completion_tokens - 1) / ms if ms > 0 else 0.0


def log_line(request: Request, now: float) -> str:
    """P1: one line a request."""
    kind = "stream" if request.stream else "json"
    line = (
        f"[req] {request.name} {request.route} {kind} prompt={request.prompt_tokens} "
        f"completion={request.completion_tokens} finish={request.outcome} ms={_ms(request.received_at, now):.0f} "
        f"tok/s={rate(request):.1f} queue_ms={_ms(request.received_at, request.admitted_at):.0f} "
        f"cached={request.cached_tokens} reasoning={request.reasoning_tokens} tools={request.calls}"
    )
    if request.source:
        line += f" from={request.source}"
    drafts = request.drafts
    if drafts.drafted:
        line += f" rounds={drafts.rounds} drafted={drafts.drafted} accept={drafts.accepted / drafts.drafted:.2f}"
    if request.choices > 1:
        line += f" choices={request.choices}"
    if request.served_by >= 0:
        line += f" slot={request.served_by}"
    if request.inside:
        line += " lane=guest"
    if request.own_wait_s:
        line += f" wait_own_ms={1_000 * request.own_wait_s:.0f}"
    if request.mem_wait_s:
        line += f" wait_mem_ms={1_000 * request.mem_wait_s:.0f}"
    if request.param:
        line += f" param={request.param}"
    if request.outcome == "abandoned":
        line += f" why={request.end_reason} row={request.row}"
    return line


def count(counts: Counts, request: Request, outcome: Outcome) -> None:
    """Add an ended request to the counts."""
    if not outcome.code:
        counts.served += 1
    elif outcome.finish == "timeout":
        counts.timeouts += 1
    elif outcome.code == "internal_error" or (outcome.code in CUT and request.admitted_at is not None):
        counts.errors += 1
    else:
        counts.refused += 1
