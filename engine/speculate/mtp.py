"""Drafts of a checkpoint's own draft layer (MTP), and drafters that are asked together."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from engine.models.cache import Cache
from engine.speculate.draft import NOTHING, Draft, Drafter, merged

PRIOR = 0.7
"""How often the layer is right, where nothing is known yet."""
BELIEF = 6.0
"""Guesses that counts for."""
WINDOW = 40.0
"""Guesses of a depth that are remembered; then the old ones fade."""
UNLIKELY = 0.2
"""Each token of a chain takes a step of the layer and of the head: no deeper than to those odds."""


class Proposer(Protocol):
    """A model with a draft layer."""

    def propose(self, cache: Cache, token: int, most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``token``, the last committed one, which has no row yet."""
        ...


class Mtp:
    """A :class:`~engine.speculate.draft.Drafter` by a model's draft layer: one chain, each token from the one before.

    A draft costs steps of the layer, so it asks for as many as are likely enough by what came before in this sequence.
    ``learned``: its chances follow that; without it they stay the prior's.
    """

    def __init__(self, model: Proposer, cache: Cache, learned: bool = True) -> None:
        self._model, self._cache, self._learned = model, cache, learned
        self._last: int | None = None
        self._guess: list[int] = []  # the last chain, from the place that comes next on
        self._depth = 0  # of its first token
        self._expected: list[float] = []
        self._right: list[float] = []

    def tell(self, tokens: Items[int]) -> None:
        """These came next."""
        for token in tokens:
            if self._guess:
                self._judge(self._guess[0] == token)
            self._last = token

    def draft(self, most: int) -> Draft:
        """The chain behind the last token told, as deep as it is likely enough; nothing before the first token."""
        self._guess, self._depth = [], 0
        depth, odds = 0, self._chance(0)
        while depth < most and odds >= UNLIKELY:
            depth += 1
            odds *= self._chance(depth)
        # A layer that was wrong so far is asked for a token now and then, or it could never be right again.
        if self._last is None or most <= 0:
            return NOTHING
        self._guess = self._model.propose(self._cache, self._last, max(depth, 1))[:most]
        count = len(self._guess)
        chances = tuple(self._chance(at) for at in range(count))
        return Draft(tuple(self._guess), tuple(range(-1, count - 1)), chances)

    def _chance(self, depth: int) -> float:
        if not self._learned or depth >= len(self._right):
            return PRIOR
        return (BELIEF * PRIOR + self._right[depth]) / (BELIEF + self._expected[depth])

    def _judge(self, right: bool) -> None:
        if self._depth == len(self._right):
            self._right.append(0.0)
            self._expected.append(0.0)
        fading = WINDOW / (WINDOW + 1)
        self._expected[self._depth] = self._expected[self._depth] * fading + 1
        self._right[self._depth] = self._right[self._depth] * fading + right
        self._depth += 1
        self._guess = self._guess[1:] if right else []


class Together:
    """Several drafters as one: every later one adds what those before it did not propose.

    ``sure``: a draft whose first token is that likely is not added to; the later drafters' cost is spared.
    """

    def __init__(self, *drafters: Drafter, sure: float = 0.8) -> None:
        self._drafters, self._sure = drafters, sure

    def tell(self, tokens: Items[int]) -> None:
        """All are told."""
        for drafter in self._drafters:
            drafter.tell(tokens)

    def draft(self, most: int) -> Draft:
        """One tree of what they propose."""
        draft = NOTHING
        for drafter in self._drafters:
            if draft.odds and max(draft.odds) >= self._sure:
                break
            draft = merged(draft, drafter.draft(most), most)
        return draft
