"""How much of a draft pays: what a step costs by its rows, and what its tokens are worth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Items

from engine.speculate.draft import NOTHING, Draft, likeliest, odds

RATE = 0.1
"""How far a measurement moves what it measures."""
OUTLIER = 3.0
"""A step that took so many times what was expected counts as that much: a neighbour had the processors."""
STALE = 64
"""After so many steps of other sizes a size's own measurements are forgotten, slowly."""
PARTS = 10
"""Parts of the scale from 0 to 1 in which chances are compared with what came."""
DOUBT = 20.0
"""Right guesses that a drafter's own chances count for, beside those that were judged."""
FADING = 0.998
"""What is left of them after a round: a part whose guesses are not tried any more comes back."""


class Costs:
    """What a step costs, in ms, by its rows: known at some counts, straight lines between, never falling.

    A time comes out too long, never too short: so fewer rows cost at most what more of them did. Measurements move the
    figures near them; those that are not measured any more follow the machine's speed and forget the rest, so that a
    few slow steps do not rule a size out for good. Raises ValueError without a figure for one row.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        if 1 not in costs or min(costs) < 1 or min(costs.values()) <= 0:
            raise ValueError("the costs of steps, of one row and more")
        self._rows = sorted(costs)
        self._loaded = [costs[rows] for rows in self._rows]
        self._factors = [1.0] * len(self._rows)
        self._unseen = [0] * len(self._rows)  # steps since one near it
        self._now = self._settled()

    def __call__(self, rows: int) -> float:
        """Of a step of ``rows`` rows. Behind the last figure each row costs what the rows before it did."""
        return sum(self._now[at] * part for at, part in self._near(rows).items())

    def took(self, rows: int, ms: float) -> None:
        """A step of ``rows`` rows took ``ms``."""
        near, figures = self._near(min(rows, self._rows[-1])), self._figures()
        expected = sum(figures[at] * part for at, part in near.items()) * max(1.0, rows / self._rows[-1])
        error = min(max(ms / expected, 1 / OUTLIER), OUTLIER)
        seen = error * sum(self._factors[at] * part for at, part in near.items())
        for at, factor in enumerate(self._factors):
            if at in near:
                self._factors[at] += RATE * near[at] * factor * (error - 1)
                self._unseen[at] = 0
            elif self._unseen[at] < STALE:
                self._unseen[at] += 1
            else:
                self._factors[at] += RATE / 4 * (seen - factor)
        self._now = self._settled()

    def _figures(self) -> list[float]:
        return [loaded * factor for loaded, factor in zip(self._loaded, self._factors, strict=True)]

    def _settled(self) -> list[float]:
        figures = self._figures()
        for at in range(len(figures) - 2, -1, -1):
            figures[at] = min(figures[at], figures[at + 1])
        return figures

    def _near(self, rows: int) -> dict[int, float]:
        """The figures that stand around ``rows``, each with its part in it."""
        at = bisect_right(self._rows, rows) - 1
        if self._rows[at] == rows:
            return {at: 1.0}
        if at + 1 == len(self._rows):
            return {at: rows / self._rows[at]}
        part = (rows - self._rows[at]) / (self._rows[at + 1] - self._rows[at])
        return {at: 1.0 - part, at + 1: part}


class Shapes:
    """Cuts drafts to what pays: the most tokens to be expected a millisecond, or none where a plain step is better.

    ``costs``: ms of a step by its rows, measured at load. ``learned``: steps and judged guesses refine what is known;
    without it the same drafts are cut alike whatever came before. ``always``: cut to the room alone, for tests.
    """

    def __init__(self, costs: Mapping[int, float], learned: bool = True, always: bool = False) -> None:
        self.costs = Costs(costs)
        self.learned, self.always = learned, always
        self._expected = [0.0] * PARTS  # of the judged guesses, by their chance: how many should be right
        self._right = [0.0] * PARTS  # and how many were

    def cut(self, draft: Draft, probabilities: Items[float], room: int) -> Draft:
        """What of ``draft`` pays, at most ``room`` tokens. ``probabilities``: of each, once its parent came."""
        return self.joint([draft], [probabilities], [room], room + 1)[0]

    def joint(
        self, drafts: Items[Draft], probabilities: Items[Items[float]], rooms: Items[int], most: int
    ) -> list[Draft]:
        """What of the drafts of a joint step pays: its rows, one a run and one a token, are at most ``most``.

        ``rooms``: tokens each may have. With ``share`` of them each run has its own part of the step; with ``most``
        the likeliest tokens of all runs are taken.
        """
        if self.learned:
            self._expected = [expected * FADING for expected in self._expected]
            self._right = [right * FADING for right in self._right]
        runs = len(drafts)
        paths = [odds(draft, self._known(each)) for draft, each in zip(drafts, probabilities, strict=True)]
        nodes = [(-path[at], run, at) for run, path in enumerate(paths) for at in likeliest(path)[: max(rooms[run], 0)]]
        nodes.sort()  # of equals the parent is first: its index is smaller
        nodes = nodes[: max(most - runs, 0)]
        count = len(nodes) if self.always else self._best(runs, [-negative for negative, _, _ in nodes])
        kept: list[list[int]] = [[] for _ in drafts]
        for _, run, at in nodes[:count]:
            kept[run].append(at)
        return [draft.only(each) if each else NOTHING for draft, each in zip(drafts, kept, strict=True)]

    def took(self, rows: int, ms: float) -> None:
        """A step of ``rows`` rows, of all its runs together, took ``ms``."""
        if self.learned and rows > 0 and ms > 0:
            self.costs.took(rows, ms)

    def saw(self, confidences: Items[float], accepted: Items[bool]) -> None:
        """Guesses that a drafter had these chances for were right or not (``Draft.judged``)."""
        if not self.learned:
            return
        for confidence, right in zip(confidences, accepted, strict=True):
            part = _part(confidence)
            self._expected[part] += confidence
            self._right[part] += right

    def _best(self, runs: int, values: list[float]) -> int:
        """Of tokens of these odds, likeliest first, how many to take."""
        best, rate, expected = 0, runs / self.costs(runs), float(runs)
        for count, value in enumerate(values, start=1):
            expected += value
            now = expected / self.costs(runs + count)
            if now > rate:
                best, rate = count, now
        return best

    def _known(self, chances: Items[float]) -> list[float]:
        """The chances as they were right so far, where a drafter thinks too well of its guesses, or too little."""
        if not self.learned:
            return list(chances)
        ratios = [
            (DOUBT + right) / (DOUBT + expected) for right, expected in zip(self._right, self._expected, strict=True)
        ]
        return [chance * ratios[_part(chance)] for chance in chances]


def share(runs: int, most: int = 32) -> int:
    """Draft tokens each of ``runs`` runs may have in a joint step of ``most`` rows, its own row beside them."""
    return max(most // max(runs, 1) - 1, 0)


def _part(chance: float) -> int:
    return min(max(int(chance * PARTS), 0), PARTS - 1)
