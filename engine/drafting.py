"""Who drafts for the runs of an engine: a drafter a run, and what of its proposals is worth a step's rows.

Knows tokens and what rounds cost; no clock, and a model only by its own draft layer. What it proposes never changes a
text: it says only which rows a round computes beside the one it must.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import cast

from engine.models.cache import Cache
from engine.models.registry import Model
from engine.sequence import Sequence
from engine.slots import Turn
from engine.speculate.draft import NOTHING, Draft, Drafter
from engine.speculate.lookup import SEEDS, Lookup
from engine.speculate.mtp import Mtp, Proposer, Together
from engine.speculate.shape import Shapes, share

Make = Callable[[int, Items[int]], Drafter]
"""A drafter for a run in that slot, given tokens of earlier answers."""


class Drafting:
    """Drafts for joint rounds of at most ``most`` rows, one of them each run's own. ``shapes`` None: never any.

    ``by_share``: each run has its part of the rows; else the likeliest tokens of all runs are taken.
    """

    def __init__(self, shapes: Shapes | None, most: int, make: Make, by_share: bool = True) -> None:
        self._shapes, self._most, self._make, self._by_share = shapes, most, make, by_share
        self._costs = shapes.costs if shapes is not None else None
        self._held: dict[int, tuple[Sequence, Drafter, int]] = {}  # by slot: the run, and how much of it was told
        self._earlier: list[int] = []

    def drafts(self, turn: Turn) -> list[Draft]:
        """One for each run of a joint round, empty where none pays."""
        if self._shapes is None or len(turn) >= self._most:
            return [NOTHING] * len(turn)
        room = share(len(turn), self._most) if self._by_share else self._most - len(turn)
        rooms = [min(room, run.limit - len(run.answer) - 1) for _, run in turn]
        drafts = [
            self._told(slot, run).draft(most) if most > 0 and run.answer else NOTHING
            for (slot, run), most in zip(turn, rooms, strict=True)
        ]
        if not any(len(draft) for draft in drafts):
            return drafts
        return self._shapes.joint(drafts, [draft.chances for draft in drafts], rooms, self._most)

    def stop(self) -> None:
        """Draft no more."""
        self._shapes = None

    def took(self, rows: int, ms: float) -> None:
        """A joint round of ``rows`` rows took so long."""
        if self._shapes is not None:
            self._shapes.took(rows, ms)

    def came(self, draft: Draft, tokens: Items[int]) -> None:
        """What a round wrote that had verified ``draft``."""
        if self._shapes is not None and len(draft):
            self._shapes.saw(*draft.judged(tokens))

    def dearer(self, rows: int) -> float:
        """How many times a plain step's time a round of ``rows`` rows takes; at most, where that was not measured."""
        return float(rows) if self._costs is None else self._costs(rows) / self._costs(1)

    def _told(self, slot: int, run: Sequence) -> Drafter:
        """The run's drafter, told all that is committed."""
        held = self._held.get(slot)
        if held is None or held[0] is not run:
            if held is not None:  # what it wrote is an earlier answer now
                self._earlier = [*self._earlier, *held[0].answer][-SEEDS:]
            drafter = self._make(slot, self._earlier)
            drafter.tell(run.start.tokens)
            held = run, drafter, 0
        _, drafter, told = held
        drafter.tell(run.answer[told:])
        self._held[slot] = run, drafter, len(run.answer)
        return drafter


def drafters(model: Model, caches: Items[Cache], learned: bool) -> Make:
    """Drafters that read the run's own tokens, with the model's own draft layer where it has one.

    Earlier answers are read too where what is drafted may hang on what came before (``learned``).
    """

    def make(slot: int, earlier: Items[int]) -> Drafter:
        lookup = Lookup(learned)
        if learned:
            lookup.seed(earlier)
        if not getattr(model, "mtp", False):
            return lookup
        return Together(lookup, Mtp(cast(Proposer, model), caches[slot], learned))

    return make
