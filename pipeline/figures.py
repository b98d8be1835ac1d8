"""The figures of a simulation as tables: how requests ended, what they waited, what they were told."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from pipeline.simulate import PLACES, Outcome, Told
from stages.wait import nearest_rank

CLASSES = ((2.0, 10.0), (10.0, 60.0), (60.0, inf))
"""Real waits, in seconds: one under 2 s gets no line."""
PERCENTS = (50, 75, 90, 99)
WHO = {"next": "right behind who runs", "last": "at the end of the line", "waits": "each that waits"}


class Estimates(msgspec.Struct, frozen=True):
    """Estimate by real wait in one class: how many, how many of them were told nothing, and the ratio's spread."""

    place: str
    low: float
    high: float
    count: int
    silent: int
    median: float
    p10: float
    p90: float
    within: float

    @property
    def words(self) -> str:
        """The class in words."""
        return f"{self.low:.0f}-{self.high:.0f} s" if self.high < inf else f"over {self.low:.0f} s"


def estimates(told: Sequence[Told]) -> list[Estimates]:
    """One for each place and class that somebody was told something in."""
    out = []
    for place in PLACES:
        for low, high in CLASSES:
            there = [one for one in told if one.place == place and low <= one.real < high]
            ratios = [one.estimate / one.real for one in there if one.estimate is not None]
            if ratios:
                within = sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
                median, p10, p90 = (nearest_rank(ratios, percent) for percent in (50, 10, 90))
                silent = len(there) - len(ratios)
                out.append(Estimates(place, low, high, len(there), silent, median, p10, p90, within))
    return out


def printed(outcomes: Sequence[Outcome], load: float, seconds: float, slots: int) -> str:
    """The tables of runs of one load, taken together."""
    names = sorted({row for outcome in outcomes for row in outcome.rows})
    ends = ", ".join(f"{name} {sum(outcome.rows.get(name, 0) for outcome in outcomes)}" for name in names)
    busy = sum(stop - start for outcome in outcomes for start, stop in outcome.holds)
    asked = sum(outcome.requests for outcome in outcomes)
    share = busy / (slots * sum(max(seconds, outcome.ends_at) for outcome in outcomes) or 1)
    out = [
        f"load {load:g}, {slots} slot{'s' * (slots > 1)}: {asked} requests, slots held {share:.0%} of the time",
        f"  ended: {ends}",
    ]
    guests = [outcome.lane for outcome in outcomes if outcome.lane.offered]
    if guests:
        inside, offered = sum(lane.served for lane in guests), sum(lane.offered for lane in guests)
        outgrown, seconds_in = sum(lane.outgrown for lane in guests), sum(lane.guest_s for lane in guests)
        out.append(f"  side lane: {inside} of {offered} offers served inside, {seconds_in:.0f} s; {outgrown} outgrown")
    served = [one for outcome in outcomes for one in outcome.served]
    if served:
        head = "".join(f"{f'p{percent}':>9}" for percent in PERCENTS)
        out.append(f"  {'seconds':<12}{head}{'most':>9}")
        sides = [one for one in served if one.side]
        for name, values in (
            ("queue", [one.queued for one in served]),
            ("first token", [one.ttft for one in served]),
            ("side: total", [one.total for one in sides]),
            ("not: total", [one.total for one in served if not one.side and sides]),
        ):
            if not values:
                continue
            cells = "".join(f"{nearest_rank(values, percent):9.1f}" for percent in (*PERCENTS, 100))
            out.append(f"  {name:<12}{cells}")
    rows = estimates([one for outcome in outcomes for one in outcome.told])
    if rows:
        head = f"{'asked':>7}{'silent':>8}{'median':>8}{'p10':>7}{'p90':>7}{'in 2x':>7}"
        out.append(f"  {'estimate / real wait':<34}{head}")
    for row in rows:
        cells = f"{row.count:7}{row.silent:8}{row.median:8.2f}{row.p10:7.2f}{row.p90:7.2f}{row.within:7.0%}"
        out.append(f"  {WHO[row.place]:<24}{row.words:>10}{cells}")
    return "\n".join(out)
