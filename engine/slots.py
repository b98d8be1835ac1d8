"""The runs of an engine, at most one a slot, and which of them computes next. Holds no model, no cache and no clock.

The owner's loop is

1. at a *safe point* give every message that has arrived to ``Slots.handle``, then call ``Slots.settle``;
2. compute what ``Slots.turn`` names: one prefill step, then ``Sequence.read``, or a step of rounds, each then closed
   (``Sequence.close``); none: wait for a message.

Prefill steps and rounds take turns: behind a prefill step every run that can have a round has one before the next
prefill step, so nobody's long prompt stands still and nobody's answer does. While a guest is inside slot 0's run
(``guest``) it has that slot's turns; its rounds are steps of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import msgspec

from engine.failpoints import Failpoints
from engine.grammar import Masks
from engine.guest import Guests, Lender
from engine.pieces import Vocabulary
from engine.protocol import Cancel, Chunk, Declined, Ended, FromEngine, Guest, Resumed, Seen, Start
from engine.sampling import Logits
from engine.sequence import NO_TAGS, Sequence, Step

Turn = list[tuple[int, Sequence]]
"""Slots and runs that compute together: one in its prefill, or those whose rounds are one step."""


class Keeper(Protocol):
    """Who knows which rows a slot holds from one run to the next."""

    def begin(self, slot: int, start: Start, at_end: bool) -> tuple[int, str]:
        """Make a slot ready: how many of the prompt's rows are resident in it, fewer than all, and their source.

        ``at_end``: all are, and the logits after them are kept: the run goes on from there.
        """
        ...

    def end(self, slot: int, run: Sequence) -> int:
        """A run is over: of its prompt and answer the first ``run.rows`` rows are the slot's. 0: nothing is trusted.

        How many of them stay, in the slot or parked.
        """
        ...


class Slots:
    """``windows``: rows of each slot. Every ``Start`` or ``Guest`` ends in exactly one ``Ended`` or ``Declined``.

    ``keeper`` None: every prompt is read from its begin. ``lender``: of slot 0, None: nothing is copied.
    """

    def __init__(
        self,
        epoch: int,
        windows: Items[int],
        failpoints: Failpoints,
        vocabulary: Vocabulary = NO_TAGS,
        masks: Masks | None = None,
        keeper: Keeper | None = None,
        lender: Lender | None = None,
    ) -> None:
        self._epoch, self._windows, self._failpoints, self._vocabulary = epoch, windows, failpoints, vocabulary
        count = len(windows)
        self._masks, self._keeper = masks, keeper
        self._guests = Guests(epoch, windows[0], failpoints, vocabulary, masks, lender)
        self._runs: list[Sequence | None] = [None] * count
        self._ends: list[tuple[list[int], Logits] | None] = [None] * count  # by slot: a prompt whose end is kept
        self._next = 0  # the slot whose prefill comes first
        self._had = [False] * count  # a round, since the last prefill step
        self._starts = 0

    @property
    def live(self) -> bool:
        """A run is in some slot."""
        return any(run is not None for run in self._runs)

    def kept_ends(self) -> list[int]:
        """Slots without a run whose last prompt can be gone on from at its end."""
        return [slot for slot, kept in enumerate(self._ends) if kept is not None]

    def end_bytes(self, slot: int | None = None) -> int:
        """Bytes of the logits after the kept prompt of a slot; None: after all that are kept, by live runs too."""
        if slot is None:
            live = sum(run.end.nbytes for run in self._runs if run is not None and run.end is not None)
            return live + sum(self.end_bytes(one) for one in self.kept_ends())
        kept = self._ends[slot]
        return 0 if kept is None else int(kept[1].nbytes)

    def forget_end(self, slot: int) -> None:
        """The next choice of its prompt reads what it needs of it again."""
        self._ends[slot] = None

    def handle(self, message: Start | Guest | Seen | Cancel) -> list[FromEngine]:
        """Take a message in; what is to be said at once. Another epoch's is dropped, one of an unknown run ignored."""
        if message.epoch != self._epoch:
            return []
        if isinstance(message, Start):
            return self._admit(message)
        if isinstance(message, Guest):
            return self._guests.ask(message)
        runs = (*self._runs, self._guests.run)
        run = next((run for run in runs if run is not None and run.start.run == message.run), None)
        if run is None:
            return self._guests.withdraw(message.run) if isinstance(message, Cancel) else []
        if isinstance(message, Seen):
            run.seen(message.n)
        else:
            run.cancel(message)
        return []

    def settle(self) -> list[FromEngine]:
        """Commit and end what may be, in every slot, and free the slots of ended runs; then a guest enters."""
        said = self._guests.settle()
        for run in self._runs:
            if run is not None and not self._guests.waits(run):
                said += run.settle()
        said = _corrected(said, self._free())
        return said + self._guests.enter(self._runs[0])

    def turn(self, most: int = 1) -> Turn:
        """What computes next, at most so many rounds together. Empty: all runs wait, or there is none."""
        reading, ready = self._at(Step.PREFILL), self._at(Step.ROUND)
        due = [slot for slot in ready if not self._had[slot]]
        if reading and not due:
            slot = next((slot for slot in reading if slot >= self._next), reading[0])
            self._next = slot + 1
            self._had = [False] * len(self._runs)
            return self._named([slot])
        if ready and not due:
            self._had, due = [False] * len(self._runs), ready
        if self._guests.run is not None and ready:
            ready = due = [slot for slot in due if slot] or [0]
        slots = sorted([*due, *(slot for slot in ready if slot not in due)][:most])
        for slot in slots:
            self._had[slot] = True
        return self._named(slots)

    def fault(self, run: Sequence, why: str) -> Ended:
        """End a run by an exception of class ``why`` and free its slot."""
        ended = run.fault(why)
        self._free()
        return ended

    def _at(self, step: Step) -> list[int]:
        return [slot for slot in range(len(self._runs)) if (run := self._computes(slot)) and run.step is step]

    def _named(self, slots: list[int]) -> Turn:
        return [(slot, run) for slot in slots if (run := self._computes(slot)) is not None]

    def _computes(self, slot: int) -> Sequence | None:
        """The run that has a slot's turns."""
        return self._runs[slot] if slot or self._guests.run is None else self._guests.run

    def _admit(self, start: Start) -> list[FromEngine]:
        self._starts += 1
        slot, rows = start.slot, len(start.tokens)
        if not 0 <= slot < len(self._runs) or self._runs[slot] is not None:
            return [Declined(self._epoch, start.run, "busy")]
        if rows + 1 > self._windows[slot] or self._failpoints.fires("decline_start", self._starts):
            return [Declined(self._epoch, start.run, "memory")]
        kept, self._ends[slot] = self._ends[slot], None
        end = kept[1] if kept is not None and kept[0] == start.tokens else None
        there, source = (0, "none") if self._keeper is None else self._keeper.begin(slot, start, end is not None)
        self._runs[slot] = Sequence(start, self._windows[slot], self._vocabulary, end, self._masks, there)
        if end is not None:
            return [Resumed(self._epoch, start.run, rows, "end"), Chunk(self._epoch, start.run, rows, rows, 0.0)]
        return [Resumed(self._epoch, start.run, there, source)] if there else []

    def _free(self) -> dict[int, int]:
        """Free the slots of ended runs: how many rows stay of each."""
        stay: dict[int, int] = {}
        for slot, run in enumerate(self._runs):
            if run is None or run.step is not Step.OVER:
                continue
            if run.keeps_end and run.end is not None:
                self._ends[slot] = run.start.tokens, run.end
            self._runs[slot] = None
            if self._keeper is not None:
                stay[run.start.run] = self._keeper.end(slot, run)
            elif slot and not run.keeps_end:
                stay[run.start.run] = 0  # there is no park
        return stay


def _corrected(said: list[FromEngine], stay: dict[int, int]) -> list[FromEngine]:
    """What was said of ends, before it was known how many rows stay."""
    return [
        msgspec.structs.replace(one, kept=stay[one.run]) if isinstance(one, Ended) and one.run in stay else one
        for one in said
    ]
