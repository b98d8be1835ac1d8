"""The guest of an engine: a short run inside another's, in slot 0, between two steps of its holder (rows K2 to K5).

Holds no model, no cache and no clock: what a guest can write is copied and put back by the owner (:class:`Lender`).
A guest is asked for, enters at the next safe point or is declined, computes instead of its holder, and leaves at the
safe point behind its end. Meanwhile what the holder has computed may still be committed; a holder that is cancelled
ends behind its guest, for its rows are its own again only then.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.failpoints import Failpoints
from engine.grammar import Masks
from engine.pieces import Vocabulary
from engine.protocol import Declined, FromEngine, Guest, GuestStarted
from engine.sequence import Sequence, Step


class Lender(Protocol):
    """Who can make room in slot 0 for a guest, and put back what was there."""

    def lend(self, rows: int, prompt: int) -> int | None:
        """Copy all that a guest of ``rows`` rows, ``prompt`` of them its prompt's, can write.

        How many bytes that took; None: there is no room for the copy, and nothing was done.
        """
        ...

    def take_back(self) -> None:
        """Put all back and free the copy. Where it raises, nothing in the slot is to be trusted."""
        ...


class Guests:
    """At most one is asked for or inside. ``window``: rows of slot 0. ``lender`` None: there is nothing to copy."""

    def __init__(
        self,
        epoch: int,
        window: int,
        failpoints: Failpoints,
        vocabulary: Vocabulary,
        masks: Masks | None,
        lender: Lender | None,
    ) -> None:
        self._epoch, self._window, self._failpoints = epoch, window, failpoints
        self._vocabulary, self._masks, self._lender = vocabulary, masks, lender
        self._count = 0
        self._asked: Guest | None = None
        self._holder: Sequence | None = None
        self.run: Sequence | None = None
        """The guest that is inside."""

    def ask(self, guest: Guest) -> list[FromEngine]:
        """Take it in at the next safe point, unless there is one already."""
        self._count += 1
        inside = self.run is not None and self.run.step is not Step.OVER  # one that is over by a fault leaves first
        if self._asked is not None or inside:
            return [self._declined(guest, "busy")]
        if self._failpoints.fires("decline_guest", self._count):
            return [self._declined(guest, "memory")]
        self._asked = guest
        return []

    def withdraw(self, run: int) -> list[FromEngine]:
        """It was cancelled before it entered."""
        asked = self._asked
        if asked is None or asked.start.run != run:
            return []
        self._asked = None
        return [self._declined(asked, "late")]

    def waits(self, run: Sequence) -> bool:
        """That run's end is not said yet: a guest is inside it."""
        return run is self._holder and run.cancelled

    def enter(self, holder: Sequence | None) -> list[FromEngine]:
        """Behind the commits of a safe point: the guest that was asked for begins in slot 0, where ``holder`` is."""
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        if holder is None:
            return [self._declined(asked, "no_holder")]
        if holder.start.run != asked.holder or holder.ending:
            return [self._declined(asked, "late")]
        start = msgspec.structs.replace(asked.start, keep_end=False)  # nothing of it stays
        prompt = len(start.tokens)
        if prompt + 1 > self._window:
            return [self._declined(asked, "memory")]
        run = Sequence(start, self._window, self._vocabulary, masks=self._masks, guest=True)
        rows = prompt + run.limit
        nbytes = 0 if self._lender is None else self._lender.lend(rows, prompt)
        if nbytes is None:
            return [self._declined(asked, "memory")]
        self.run, self._holder = run, holder
        return [GuestStarted(self._epoch, start.run, asked.holder, rows, nbytes)]

    def settle(self) -> list[FromEngine]:
        """At a safe point: commit or end what may be. One that is over leaves, and its holder goes on.

        A holder whose rows cannot be put back ends by that fault.
        """
        run, holder = self.run, self._holder
        if run is None or holder is None:
            return []
        said = run.settle()
        if run.step is not Step.OVER:
            return said
        self.run = self._holder = None
        try:
            if self._lender is not None:
                self._lender.take_back()
        except Exception as error:
            said.append(holder.fault(type(error).__name__))
        return said

    def _declined(self, guest: Guest, reason: str) -> Declined:
        return Declined(self._epoch, guest.start.run, reason)
