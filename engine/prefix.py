"""What two prompts share, and how much of that can be gone on from (G2). Pure: tokens and row numbers.

Keys and values are there row by row, so any shared row will do. A recurrent state is there only where it stands now and
where it was marked: the last such place inside the shared part counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.models.cache import Mark

BLOCK = 64
"""Tokens a block hash stands for (``stages/hashes.py``)."""

Whole = Callable[[int], int]
"""At most how many of so many rows a run may begin with, where not every number will do."""

MARKS = 27
"""Checkpoints kept of one conversation."""


@dataclass(slots=True)
class Prefix:
    """Tokens whose rows are in one place, from the first on. ``hashes``: of whole blocks; they may be fewer.

    ``stands``: rows behind which the recurrent state in that place itself stands, 0: it is not known or not there.
    """

    tokens: list[int]
    hashes: list[bytes]
    marks: list[Mark] = field(default_factory=list)
    stands: int = 0

    def usable(self, tokens: Sequence[int], *, recurrent: bool, whole: Whole = int) -> int:
        """Rows of ``tokens`` that a run over them can begin with. One row is always left, to have logits of."""
        most = max(0, min(shared(self.tokens, tokens), len(tokens) - 1))
        if not recurrent:
            return whole(most)
        places = [self.stands, *(mark.rows for mark in self.marks)]
        return last_place(most, [place for place in places if whole(place) == place])

    def cut(self, rows: int) -> None:
        """Forget all behind ``rows``."""
        del self.tokens[rows:], self.hashes[blocks(self.hashes, self.tokens, rows) :]
        self.marks = [mark for mark in self.marks if mark.rows <= rows]
        self.stands = self.stands if self.stands <= rows else 0


def blocks(hashes: Sequence[bytes], tokens: Sequence[int], rows: int) -> int:
    """How many of ``hashes`` are of blocks inside the first ``rows`` of ``tokens``."""
    return min(len(hashes), min(rows, len(tokens)) // BLOCK)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with. By slices: a conversation has a hundred thousand of them."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def last_place(most: int, places: Iterable[int]) -> int:
    """The largest of ``places`` up to ``most``; 0 where there is none."""
    return max((place for place in places if place <= most), default=0)


def with_mark(marks: Sequence[Mark], mark: Mark, most: int = MARKS) -> list[Mark]:
    """``marks`` and one more, in order of rows, at most ``most``: the one that leaves the smallest gap goes first.

    The newest stays. One of the same rows is replaced.
    """
    kept = sorted([*(old for old in marks if old.rows != mark.rows), mark], key=lambda one: one.rows)
    while len(kept) > most:
        del kept[superfluous([one.rows for one in kept])]
    return kept


def superfluous(rows: Sequence[int]) -> int:
    """Of places in order the one whose absence leaves the smallest gap, never the last but where it is alone."""
    gaps = [after - before for before, after in zip([0, *rows], rows[1:], strict=False)]
    return gaps.index(min(gaps)) if gaps else 0
