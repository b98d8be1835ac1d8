"""A drafter that reads: what followed the last time that the text ended like this.

The longest match of the last tokens counts most, of equal ones the latest. What several matches go on with makes a
tree. It learns from the tokens it is told how often it is right, so it needs to know of no verification, and a request
where it never is makes it quiet.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.speculate.draft import NOTHING, Draft, likeliest

SHORTEST, LONGEST = 2, 8
"""Tokens that must match, and those that count."""
VOTES = 12
"""Matches that are asked how they go on."""
SCALE = 3.0
"""A match one token longer has so many times the weight."""
FADES = 0.95
"""Each match before the latest of its length has so much of the weight of the one behind it."""
DEEPEST = 32
"""Tokens a match is followed for."""
UNLIKELY = 0.03
"""What is less likely than that is not proposed."""
PRIOR = (0.0, 0.0, 0.35, 0.45, 0.55, 0.65, 0.72, 0.77, 0.82, 0.84, 0.86, 0.88, 0.9, 0.91, 0.92, 0.93)
"""How often a guess is right, by how many tokens matched before it; of more the last. ``benchmarks.lookup``: a little
more in files that are edited, half as much of short matches in prose."""
BELIEF = 6.0
"""Guesses that the prior counts for, beside the sequence's own."""
WINDOW = 60.0
"""Guesses of a kind that are remembered; then the old ones fade."""
LEAST = 0.05
"""No match is worth less: what is never proposed could never be right again."""
SEEDS = 65_536
"""Tokens of earlier requests that are looked through."""
BREAK = -1
"""Stands between two texts: no match goes over it."""


class _Branch(NamedTuple):
    """A way that matches go on: its tokens, the longest match that led there, the weight of all."""

    tokens: tuple[int, ...]
    order: int
    weight: float


class _Tree:
    """The tree of a draft in depth-first order, and why each token is in it.

    ``kinds``: tokens that matched before it, its parents among them. ``shares``: of the weight that came to its parent.
    """

    def __init__(self, reliable: list[float]) -> None:
        self._reliable = reliable
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.kinds: list[int] = []
        self.shares: list[float] = []
        self.chances: list[float] = []
        self.odds: list[float] = []

    def grow(self, branches: list[_Branch], depth: int = 0, parent: int = -1, odds: float = 1.0) -> None:
        """What ``branches`` have from place ``depth`` on, behind a parent of these odds."""
        while len(branches) == 1 and depth < len(branches[0].tokens):  # most of a tree is that
            odds = self._add(branches[0].tokens[depth], parent, branches[0].order + depth, 1.0, odds)
            if odds < UNLIKELY:
                return
            depth, parent = depth + 1, len(self.tokens) - 1
        weight = sum(branch.weight for branch in branches)
        going: dict[int, list[_Branch]] = {}
        for branch in branches:
            if depth < len(branch.tokens):
                going.setdefault(branch.tokens[depth], []).append(branch)
        for token, each in going.items():
            share = sum(branch.weight for branch in each) / weight
            further = self._add(token, parent, max(branch.order for branch in each) + depth, share, odds)
            if further >= UNLIKELY:
                self.grow(each, depth + 1, len(self.tokens) - 1, further)

    def _add(self, token: int, parent: int, kind: int, share: float, odds: float) -> float:
        kind = min(kind, len(PRIOR) - 1)
        chance = share * self._reliable[kind]
        if odds * chance >= UNLIKELY:
            self.tokens.append(token)
            self.parents.append(parent)
            self.kinds.append(kind)
            self.shares.append(share)
            self.chances.append(chance)
            self.odds.append(odds * chance)
        return odds * chance

    def cut(self, most: int) -> None:
        """Leave the likeliest ``most``."""
        kept = sorted(likeliest(self.odds)[:most])
        new = {-1: -1, **{at: i for i, at in enumerate(kept)}}
        self.parents = [new[self.parents[at]] for at in kept]
        self.tokens, self.kinds = [self.tokens[at] for at in kept], [self.kinds[at] for at in kept]
        self.shares, self.chances = [self.shares[at] for at in kept], [self.chances[at] for at in kept]
        self.odds = [self.odds[at] for at in kept]


class Lookup:
    """A :class:`~engine.speculate.draft.Drafter` from the sequence's own tokens, and from those of earlier requests.

    ``learned``: its chances follow how often it was right in this sequence; without it they stay those of the prior.
    Four bytes a token; a look-up reads them once, and takes 0.15 ms at 10,000 of them, 0.2 ms at 100,000.
    """

    def __init__(self, learned: bool = True) -> None:
        self.learned = learned
        self._tokens: NDArray[np.int32] = np.full(1024, BREAK, dtype=np.int32)
        self._count = LONGEST  # a match may look so far back from the first token
        self._told = False
        self._tree: _Tree | None = None  # of the last draft, while what comes is compared with it
        self._at = -1  # how far what came has gone along it
        self._expected = [0.0] * len(PRIOR)
        self._right = [0.0] * len(PRIOR)

    def seed(self, tokens: Items[int]) -> None:
        """Tokens of an earlier request, the latest last; before anything is told. The oldest are dropped."""
        if self._told:
            raise ValueError("seeded behind the prompt")
        if tokens:
            self._append([*tokens[-SEEDS:], BREAK])
        if self._count > SEEDS:
            self._tokens[LONGEST:SEEDS] = self._tokens[self._count - SEEDS + LONGEST : self._count].copy()
            self._count = SEEDS

    def tell(self, tokens: Items[int]) -> None:
        """These came next."""
        self._told = self._told or len(tokens) > 0
        for token in tokens:
            if self._tree is None:
                break
            self._judge(token)
        self._append(tokens)

    def draft(self, most: int) -> Draft:
        """What followed the matches; nothing where the last ``SHORTEST`` tokens never came before."""
        self._tree, self._at = None, -1
        branches = self._branches(min(most, DEEPEST)) if most > 0 else []
        if not branches:
            return NOTHING
        tree = _Tree([self._reliable(kind) for kind in range(len(PRIOR))])
        tree.grow(branches)
        if len(tree.tokens) > most:
            tree.cut(most)
        self._tree = tree
        return Draft(tuple(tree.tokens), tuple(tree.parents), tuple(tree.chances))

    def _append(self, tokens: Items[int]) -> None:
        count = self._count + len(tokens)
        if count > len(self._tokens):
            room = np.full(max(count, 2 * len(self._tokens)), BREAK, dtype=np.int32)
            room[: self._count] = self._tokens[: self._count]
            self._tokens = room
        self._tokens[self._count : count] = tokens
        self._count = count

    def _matches(self) -> list[tuple[int, int]]:
        """Where text like the last tokens ended, and how many of them: the longest first, of equals the latest."""
        tokens, count = self._tokens, self._count
        last, before = tokens[count - 1], tokens[count - 2]
        if BREAK in (last, before):
            return []
        # All of them are compared: at 100,000 tokens that takes 0.1 ms. An index has hundreds of bytes a token.
        ends = np.flatnonzero((tokens[1 : count - 1] == last) & (tokens[: count - 2] == before)) + 1
        found: list[tuple[int, int]] = []
        groups: list[tuple[int, NDArray[np.intp]]] = []
        for order in range(SHORTEST, LONGEST + 1):
            if not len(ends):
                break
            if order == LONGEST or tokens[count - 1 - order] == BREAK:
                groups.append((order, ends))
                break
            longer = tokens[ends - order] == tokens[count - 1 - order]
            groups.append((order, ends[~longer]))
            ends = ends[longer]
        for order, those in reversed(groups):
            found += [(int(end), order) for end in those[: -(VOTES - len(found)) - 1 : -1]]
            if len(found) >= VOTES:
                break
        return found

    def _branches(self, depth: int) -> list[_Branch]:
        merged: dict[tuple[int, ...], _Branch] = {}
        fade, order_before = 1.0, 0
        for end, order in self._matches():
            fade = fade * FADES if order == order_before else 1.0
            order_before = order
            going = tuple(self._tokens[end + 1 : min(end + 1 + depth, self._count)].tolist())
            if BREAK in going:
                going = going[: going.index(BREAK)]
            longest, weight = merged[going][1:] if going in merged else (order, 0.0)
            merged[going] = _Branch(going, longest, weight + SCALE ** (order - SHORTEST) * fade)
        return [branch for branch in merged.values() if branch.tokens]

    def _reliable(self, kind: int) -> float:
        """How often what followed a match of ``kind`` tokens came again."""
        if not self.learned:
            return PRIOR[kind]
        share = (BELIEF * PRIOR[kind] + self._right[kind]) / (BELIEF + self._expected[kind])
        return min(max(share, LEAST), 0.98)

    def _judge(self, token: int) -> None:
        """Compare the guesses for this place with what came."""
        tree, found = self._tree, None
        if tree is None:
            return
        for i, parent in enumerate(tree.parents):
            if parent != self._at:
                continue
            kind, share, right = tree.kinds[i], tree.shares[i], tree.tokens[i] == token
            fading = WINDOW / (WINDOW + share)
            self._expected[kind] = self._expected[kind] * fading + share
            self._right[kind] = self._right[kind] * fading + right
            found = i if right else found
        if found is None:
            self._tree = None
        else:
            self._at = found
