"""Conversations put aside in memory, whole, when another one takes over their slot (G2). Least used goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from engine.models.cache import Mark
from engine.prefix import Prefix, shared
from engine.tally import Tally, alone, without


@dataclass(frozen=True, slots=True)
class Parked:
    """A conversation and copies of its rows, in the machine's memory. ``number`` is its name in messages."""

    number: int
    prefix: Prefix
    rows: dict[str, Tensor]

    @property
    def row_bytes(self) -> int:
        """Bytes of the copies of its rows."""
        return sum(tensor.nbytes for tensor in self.rows.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all its copies."""
        return self.row_bytes + sum(mark.nbytes for mark in self.prefix.marks)


class Park:
    """At most ``limit`` bytes of conversations."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parked: dict[int, Parked] = {}  # least used first
        self._numbers = 0

    def __iter__(self) -> Iterator[Parked]:
        return iter(list(self._parked.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is parked."""
        return sum(parked.nbytes for parked in self._parked.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of the copies of rows."""
        return sum(parked.row_bytes for parked in self._parked.values())

    @property
    def marks(self) -> list[Mark]:
        """All checkpoints, the least used conversation's first."""
        return [mark for parked in self._parked.values() for mark in parked.prefix.marks]

    def room(self, nbytes: int, prefix: Prefix | None = None) -> bool:
        """Let so many go that ``nbytes`` fit. False, and none goes: that is more than may ever be here.

        ``prefix``: what comes; those it goes on from go first, as their place is its own.
        """
        if nbytes > self.limit:
            return False
        if prefix is not None:
            self._outgrown(prefix)
        while self.nbytes + nbytes > self.limit:
            del self._parked[next(iter(self._parked))]
        return True

    def add(self, prefix: Prefix, rows: dict[str, Tensor]) -> Parked:
        """Park it, in place of those it goes on from. There is room."""
        self._outgrown(prefix)
        parked = Parked(self._numbers, prefix, rows)
        self._numbers += 1
        self._parked[parked.number] = parked
        return parked

    def best(self, usable: Callable[[Prefix], int]) -> tuple[Parked | None, int]:
        """The one of which most rows are ``usable``, and how many; the last used at a tie."""
        found: Parked | None = None
        most = 0
        for parked in reversed(self._parked.values()):
            rows = usable(parked.prefix)
            if rows > most:
                found, most = parked, rows
        return found, most

    def touch(self, parked: Parked) -> None:
        """It was used now."""
        self._parked[parked.number] = self._parked.pop(parked.number)

    def take(self, parked: Parked) -> None:
        """It is here no more."""
        del self._parked[parked.number]

    def thin(self, going: list[Mark]) -> None:
        """Let these checkpoints go."""
        for parked in self._parked.values():
            parked.prefix.marks = without(parked.prefix.marks, going)

    def shrink(self, nbytes: int, others: list[Mark]) -> int:
        """Let the least used go, no more than free ``nbytes``; what that freed. ``others`` hold checkpoints too."""
        tally, freed = Tally(alone(self.marks, others)), 0
        for parked in self:
            if freed >= nbytes:
                break
            freed += parked.row_bytes
            freed += sum(tally.drop(mark) for mark in parked.prefix.marks if mark in tally)
            self.take(parked)
        return freed

    def _outgrown(self, prefix: Prefix) -> None:
        """Those that ``prefix`` goes on from are of no use beside it."""
        for old in self:
            if len(old.prefix.tokens) == shared(old.prefix.tokens, prefix.tokens):
                self.take(old)
