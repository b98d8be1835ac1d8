"""The runs of an engine, at most one a slot, and which of them computes next. Holds no model, no cache and no clock.

The owner's loop is

1. at a *safe point* give every message that has arrived to ``Slots.handle``, then call ``Slots.settle``;
2. compute what ``Slots.turn`` names: one prefill step, then ``Sequence.read``, or a step of rounds, each then closed
   (``Sequence.close``); none: wait for a message.

Prefill steps and rounds take turns: behind a prefill step every run that can have a round has one before the next
prefill step, so nobody's long prompt stands still and nobody's answer does.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from engine.failpoints import Failpoints
from engine.grammar import Masks
from engine.pieces import Vocabulary
from engine.protocol import Cancel, Chunk, Declined, Ended, FromEngine, Resumed, Seen, Start
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

    def end(self, slot: int, run: Sequence) -> None:
        """A run is over: of its prompt and answer the first ``run.rows`` rows are the slot's. 0: nothing is trusted."""
        ...


class Slots:
    """``windows``: rows of each slot. Every ``Start`` ends in exactly one ``Ended`` or ``Declined``.

    ``keeper`` None: every prompt is read from its begin.
    """

    def __init__(
        self,
        epoch: int,
        windows: Items[int],
        failpoints: Failpoints,
        vocabulary: Vocabulary = NO_TAGS,
        masks: Masks | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._epoch, self._windows, self._failpoints, self._vocabulary = epoch, windows, failpoints, vocabulary
        count = len(windows)
        self._masks, self._keeper = masks, keeper
        self._runs: list[Sequence | None] = [None] * count
        self._ends: list[tuple[list[int], Logits] | None] = [None] * count  # by slot: a prompt whose end is kept
        self._next = 0  # the slot whose prefill comes first
        self._had = [False] * count  # a round, since the last prefill step
        self._starts = 0

    @property
    def live(self) -> bool:
        """A run is in some slot."""
        return any(run is not None for run in self._runs)

    def handle(self, message: Start | Seen | Cancel) -> list[FromEngine]:
        """Take a message in; what is to be said at once. Another epoch's is dropped, one of an unknown run ignored."""
        if message.epoch != self._epoch:
            return []
        if isinstance(message, Start):
            return self._admit(message)
        run = next((run for run in self._runs if run is not None and run.start.run == message.run), None)
        if run is None:
            return []
        if isinstance(message, Seen):
            run.seen(message.n)
        else:
            run.cancel(message)
        return []

    def settle(self) -> list[FromEngine]:
        """Commit and end what may be, in every slot, and free the slots of ended runs."""
        said = [message for run in self._runs if run is not None for message in run.settle()]
        self._free()
        return said

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
        return [slot for slot, run in enumerate(self._runs) if run is not None and run.step is step]

    def _named(self, slots: list[int]) -> Turn:
        return [(slot, run) for slot in slots if (run := self._runs[slot]) is not None]

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

    def _free(self) -> None:
        for slot, run in enumerate(self._runs):
            if run is None or run.step is not Step.OVER:
                continue
            if run.start.keep_end and run.end is not None and run.rows >= run.prompt:
                self._ends[slot] = run.start.tokens, run.end
            self._runs[slot] = None
            if self._keeper is not None:
                self._keeper.end(slot, run)
