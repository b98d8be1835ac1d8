"""A simulation drawn as one SVG file, written by hand: the queue over time, and what was told against what came."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

from pipeline.simulate import Outcome, Told

WIDE, HIGH, EDGE = 720, 240, 48
INK, SOFT, MARK = "#333", "#ccc", "#2a6fb0"
SPAN = (1.0, 1_000.0)
"""Seconds of the second picture, both ways, by their logarithm."""


def svg(outcome: Outcome, title: str) -> str:
    """Both pictures, one under the other."""
    whole = 2 * (HIGH + 2 * EDGE)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE + 2 * EDGE}" height="{whole}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            _text(EDGE, 20, title),
            *_queue(outcome.queue, outcome.ends_at, EDGE),
            *_told([one for one in outcome.told if one.place == "waits"], HIGH + 3 * EDGE),
            "</svg>",
            "",
        ]
    )


def _queue(queue: Sequence[tuple[float, int]], until: float, top: float) -> list[str]:
    """Requests that wait, over time."""
    most = max((length for _, length in queue), default=0) or 1
    points, last = [], 0
    for time, length in [*queue, (until, 0)]:
        x = EDGE + WIDE * time / (until or 1)
        points += [f"{x:.1f},{top + HIGH * (1 - last / most):.1f}", f"{x:.1f},{top + HIGH * (1 - length / most):.1f}"]
        last = length
    line = f'<polyline fill="none" stroke="{MARK}" points="{" ".join(points)}"/>'
    labels = [_text(EDGE, top + HIGH + 16, "0"), _text(EDGE + WIDE, top + HIGH + 16, f"{until:.0f} s", "end")]
    sides = [_text(EDGE - 4, top + 8, str(most), "end"), _text(EDGE + 4, top + 12, "waiting requests")]
    return [_frame(top), line, *labels, *sides]


def _told(told: Sequence[Told], top: float) -> list[str]:
    """A point each: the real wait to the right, the estimate upwards; on the line they are the same."""
    low, wide = log10(SPAN[0]), log10(SPAN[1]) - log10(SPAN[0])

    def part(seconds: float) -> float:
        return (log10(min(max(seconds, SPAN[0]), SPAN[1])) - low) / wide

    points = [
        f'<circle cx="{EDGE + WIDE * part(one.real):.1f}" cy="{top + HIGH * (1 - part(one.estimate)):.1f}" r="1.5" '
        f'fill="{MARK}" fill-opacity="0.4"/>'
        for one in told
        if one.estimate is not None and one.real >= SPAN[0]
    ]
    same = f'<line x1="{EDGE}" y1="{top + HIGH}" x2="{EDGE + WIDE}" y2="{top}" stroke="{SOFT}"/>'
    ticks = [_text(EDGE + WIDE * part(s), top + HIGH + 16, f"{s:g} s", "middle") for s in (1, 10, 100, 1_000)]
    words = [_text(EDGE + 4, top + 12, "estimate, upwards, by real wait"), *ticks]
    return [_frame(top), same, *points, *words]


def _frame(top: float) -> str:
    return f'<rect x="{EDGE}" y="{top}" width="{WIDE}" height="{HIGH}" fill="none" stroke="{SOFT}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    plain = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{plain}</text>'
