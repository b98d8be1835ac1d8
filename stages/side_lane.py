"""The side lane: who may be served inside another one's run, and when (rows K1, K2).

What this file knows: the kinds of the lane, their limits and its pace. What it does not: slots, runs and the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stages.clients import NEVER_NOTED, RECOGNISED, Client
from stages.thinking import SWITCHES, Thinking, boolean

RAW, SIDE = "raw", "side"
"""A request whose prompt is as sent, with a small limit of its own; a recognised side request, whatever its limit."""
ROUNDS = 8
"""Of the holder between two guests; one of its prefill steps is as good."""
SPAN_S = 20.0
SHARE = 0.25
"""Guests take at most so much of any ``SPAN_S`` seconds,"""
PATIENCE_S = 5.0
"""but for one that has waited so long."""


def recognised(client: Client) -> bool:
    """A side request of a kind the lane takes: short by nature, and nobody wants it thought about."""
    return client.side in RECOGNISED


def quiet(thinking: Thinking, client: Client, plan: bool, think: object = None) -> Thinking:
    """The thinking of a request under a plan: off for a recognised side request.

    An explicit on form of its client wins, an effort word or a number does not. ``think`` is the field of that name,
    which holds either: only a true one is a form.
    """
    form = thinking.switch in SWITCHES and (thinking.switch != "think" or boolean(think) is True)
    if not plan or not recognised(client) or thinking.on is False or (thinking.on and form):
        return thinking
    return Thinking(on=False, note="off: a side request")


def kind(client: Client, *, asked: int, thinks: bool, plan: bool, images: int = 0, choices: int = 1) -> str:
    """As what the lane may serve a request: ``RAW``, ``SIDE`` or "". ``asked``: its own limit, 0: it has none."""
    if thinks or images or choices > 1:
        return ""
    if recognised(client):
        return SIDE
    return RAW if asked and (not plan or client.kind in NEVER_NOTED) else ""


class Bounds(msgspec.Struct, frozen=True):
    """What the flags allow: ``--side-lane``, ``--side-lane-prompt``, ``--side-lane-tokens``, ``-side-tokens``."""

    mode: str = "on"
    prompt: int = 2_048
    tokens: int = 64
    side_tokens: int = 192


def short(lane: str, prompt: int, asked: int, bounds: Bounds) -> bool:
    """Whether a request of that kind is one for the lane: its prompt is short, and so is what it asks for."""
    if lane not in (RAW, SIDE) or prompt > bounds.prompt:
        return False
    return lane == SIDE or 1 <= asked <= bounds.tokens


def cap(lane: str, most: int, bounds: Bounds) -> int:
    """Output tokens it gets in the lane, of the ``most`` it would get anywhere."""
    return min(most, bounds.side_tokens if lane == SIDE else bounds.tokens)


class Moment(msgspec.Struct, frozen=True):
    """What decides whether a guest may come now.

    ``holder``: what the run of slot 0 does: prefilling, decoding, or "" where none takes guests. ``rounds``: of it
    since the last guest. ``taken_s``: of the last ``SPAN_S`` by guests. ``waited_s``: by this one in the queue.
    """

    holder: str
    rounds: int
    taken_s: float
    waited_s: float


def paced(moment: Moment, bounds: Bounds) -> bool:
    """Whether the run of slot 0 takes a guest now."""
    if moment.holder == "" or bounds.mode == "off" or (moment.holder == "prefilling" and bounds.mode != "on"):
        return False
    if moment.rounds < ROUNDS:
        return False
    return moment.taken_s <= SHARE * SPAN_S or moment.waited_s >= PATIENCE_S


def taken(spans: Iterable[tuple[float, float]], now: float) -> float:
    """Seconds of the last ``SPAN_S`` within spans of time that do not overlap."""
    return sum(max(0.0, min(end, now) - max(start, now - SPAN_S)) for start, end in spans)


def recent(spans: Iterable[tuple[float, float]], now: float) -> list[tuple[float, float]]:
    """The spans that still count."""
    return [(start, end) for start, end in spans if end > now - SPAN_S]
