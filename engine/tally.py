"""Bytes of checkpoints of which several may hold one tensor: it counts once, and is free when the last lets go.

So does the copy of a checkpoint that a parked conversation has, where the machine's memory is the device's.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.models.cache import Mark


class Tally:
    """Who holds which tensors. A checkpoint that is held twice counts once."""

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._held: dict[int, int] = {}  # how often, by identity: a tensor that is held is no other's
        self.nbytes = 0
        for mark in marks:
            self.add(mark)

    def __contains__(self, mark: Mark) -> bool:
        """Whether every tensor of it is held."""
        return all(id(tensor) in self._held for tensor in mark.tensors.values())

    def add(self, mark: Mark) -> None:
        """One more that holds."""
        for tensor in mark.tensors.values():
            times = self._held.get(id(tensor), 0)
            self._held[id(tensor)] = times + 1
            self.nbytes += 0 if times else tensor.nbytes

    def drop(self, mark: Mark) -> int:
        """One that was added lets go; how many bytes nobody holds for it any more."""
        before = self.nbytes
        for tensor in mark.tensors.values():
            self._held[id(tensor)] -= 1
            if not self._held[id(tensor)]:
                del self._held[id(tensor)]
                self.nbytes -= tensor.nbytes
        return before - self.nbytes


def alone(marks: Iterable[Mark], others: Iterable[Mark]) -> list[Mark]:
    """Those of ``marks`` that are not all held by ``others`` too: letting these go frees something."""
    held = Tally(others)
    return [mark for mark in marks if mark not in held]


def enough(marks: Iterable[Mark], nbytes: int) -> tuple[list[Mark], int]:
    """The first of ``marks``, no more than free ``nbytes`` when they are let go, and what they free."""
    left = list(marks)
    tally, freed = Tally(left), 0
    for count, mark in enumerate(left):
        if freed >= nbytes:
            return left[:count], freed
        freed += tally.drop(mark)
    return left, freed


def without(marks: Iterable[Mark], going: Iterable[Mark]) -> list[Mark]:
    """``marks`` but those that are ``going``."""
    gone = frozenset(id(mark) for mark in going)
    return [mark for mark in marks if id(mark) not in gone]
