"""A draft: proposed next tokens as a tree, in depth-first order, and what makes, cuts and judges one."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Token i follows token ``parents[i]``; -1: the last committed one. Every subtree stands behind its root in a row.

    ``chances``: of each token how likely it comes once its parent came; not given: certain. No two children of one
    parent are the same token. Raises ValueError for what is no such tree.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.chances:
            object.__setattr__(self, "chances", (1.0,) * len(self.tokens))
        if not len(self.tokens) == len(self.parents) == len(self.chances):
            raise ValueError("a parent and a chance for each token")
        open_: list[int] = [-1]  # the last token's ancestors and itself
        for at, parent in enumerate(self.parents):
            while open_ and open_[-1] != parent:
                open_.pop()
            if not open_:
                raise ValueError("not in depth-first order")
            open_.append(at)
        if len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens):
            raise ValueError("a token twice behind one parent")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each token how many of the draft it stands behind."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def odds(self) -> tuple[float, ...]:
        """Of each token how likely it comes at all: the chances along its path, multiplied."""
        return odds(self, self.chances)

    def ancestors(self, at: int) -> list[int]:
        """The tokens that token ``at`` stands behind, the first one first."""
        path: list[int] = []
        while (at := self.parents[at]) >= 0:
            path.append(at)
        return path[::-1]

    def child(self, at: int, token: int) -> int | None:
        """Which one proposes ``token`` behind token ``at`` (-1: first of all); None: none."""
        for i in range(at + 1, len(self.tokens)):
            if self.parents[i] == at and self.tokens[i] == token:
                return i
            if self.parents[i] < at:  # out of its subtree
                break
        return None

    def walk(self, tokens: Iterable[int]) -> list[int]:
        """The path that ``tokens`` take through it, as far as it proposed them."""
        path: list[int] = []
        for token in tokens:
            at = self.child(path[-1] if path else -1, token)
            if at is None:
                break
            path.append(at)
        return path

    def judged(self, tokens: Items[int]) -> tuple[list[float], list[bool]]:
        """What became of its guesses when ``tokens`` came: chances, and which were right.

        Only of those whose parent came and which have a token to be compared with.
        """
        chances: list[float] = []
        right: list[bool] = []
        at = -1
        for token in tokens:
            found = None
            for i in range(at + 1, len(self.tokens)):
                if self.parents[i] == at:
                    chances.append(self.chances[i])
                    right.append(self.tokens[i] == token)
                    found = i if right[-1] else found
            if found is None:
                break
            at = found
        return chances, right

    def rows(self, last: int) -> tuple[list[int], list[int]]:
        """The tokens and parents of a step (``Rows``) that verifies it behind ``last``, the last committed token."""
        return [last, *self.tokens], [-1, *(parent + 1 for parent in self.parents)]

    def only(self, nodes: Iterable[int]) -> Draft:
        """What is left with ``nodes`` alone. Raises ValueError where the parent of one is not among them."""
        kept = sorted(nodes)
        new = {-1: -1, **{at: i for i, at in enumerate(kept)}}
        if any(self.parents[at] not in new for at in kept):
            raise ValueError("a token without its parent")
        return Draft(
            tuple(self.tokens[at] for at in kept),
            tuple(new[self.parents[at]] for at in kept),
            tuple(self.chances[at] for at in kept),
        )

    def cut(self, most: int) -> Draft:
        """At most its ``most`` likeliest tokens, each with its parent."""
        if len(self.tokens) <= most:
            return self
        return self.only(likeliest(self.odds)[: max(most, 0)])

    def shallow(self, depth: int) -> Draft:
        """What of it stands in the first ``depth`` places: where the window or a limit ends there."""
        return self.only(at for at, behind in enumerate(self.depths) if behind < depth)


NOTHING = Draft()


class Drafter(Protocol):
    """Proposes what comes next in one sequence. It is told every token, and decides none."""

    def tell(self, tokens: Items[int]) -> None:
        """These came next: the prompt's first, then the answer's as they are committed."""
        ...

    def draft(self, most: int) -> Draft:
        """What may come next, at most ``most`` tokens; empty when it has nothing to say."""
        ...


def odds(draft: Draft, chances: Items[float]) -> tuple[float, ...]:
    """Of each token how likely it comes at all, by ``chances``: never likelier than its parent."""
    path: list[float] = []
    for parent, chance in zip(draft.parents, chances, strict=True):
        path.append(min(max(chance, 0.0), 1.0) * (1.0 if parent < 0 else path[parent]))
    return tuple(path)


def likeliest(odds: Items[float]) -> list[int]:
    """The tokens by their odds, likeliest first: any first part of it has each one's parent in it."""
    return sorted(range(len(odds)), key=lambda at: (-odds[at], at))


def from_branches(branches: Iterable[tuple[Items[int], float]], most: int | None = None) -> Draft:
    """One tree of several continuations, each with its weight; what they have in common stands once.

    A token's chance is its share of the weight that came to its parent. The heavier child comes first, of equals the
    one that was named first. ``most``: the likeliest so many tokens.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []

    def grow(group: list[tuple[Items[int], float]], depth: int, parent: int) -> None:
        total = sum(weight for _, weight in group)
        going: dict[int, list[tuple[Items[int], float]]] = {}
        for branch, weight in group:
            if len(branch) > depth:
                going.setdefault(branch[depth], []).append((branch, weight))
        weights = {token: sum(weight for _, weight in each) for token, each in going.items()}
        for token in sorted(going, key=lambda token: -weights[token]):  # stable: of equals the first named
            tokens.append(token)
            parents.append(parent)
            chances.append(min(weights[token] / total, 1.0) if total > 0 else 0.0)
            grow(going[token], depth + 1, len(tokens) - 1)

    grow([(branch, max(weight, 0.0)) for branch, weight in branches], 0, -1)
    draft = Draft(tuple(tokens), tuple(parents), tuple(chances))
    return draft if most is None else draft.cut(most)


def merged(first: Draft, second: Draft, most: int) -> Draft:
    """Both in one tree. What both propose has the better chance; what only ``second`` does shares what ``first`` left.

    So the chances of one parent's children stay at most 1 together.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []

    def grow(at: int | None, other: int | None, parent: int) -> None:
        mine = [] if at is None else [i for i, p in enumerate(first.parents) if p == at]
        theirs = {} if other is None else {second.tokens[i]: i for i, p in enumerate(second.parents) if p == other}
        left = 1.0
        for i in mine:
            token = first.tokens[i]
            twin = theirs.pop(token, None)
            best = first.chances[i] if twin is None else max(first.chances[i], second.chances[twin])
            chance = min(best, left)
            left -= chance
            tokens.append(token)
            parents.append(parent)
            chances.append(chance)
            grow(i, twin, len(tokens) - 1)
        for token, i in theirs.items():
            tokens.append(token)
            parents.append(parent)
            chances.append(second.chances[i] * left)
            grow(None, i, len(tokens) - 1)

    grow(-1, -1, -1)
    return Draft(tuple(tokens), tuple(parents), tuple(chances)).cut(most)
