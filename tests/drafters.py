"""Drafters for tests: what they propose is right in places and wrong in others, by plan."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculate.draft import Draft, from_branches


class Forced:
    """Always drafts, whether it pays or not: with room for four tokens a tree of two branches and more.

    ``ahead``: the answer a run without drafts gave, so that some of it can be proposed; behind it, or where the answer
    turns out to be another one, every guess is a wild one. What is right in a round, and how far, goes by ``seed`` and
    the place in the answer alone.
    """

    def __init__(self, vocab: int, prompt: Sequence[int], ahead: Sequence[int] = (), seed: int = 0) -> None:
        self._vocab, self._seed = vocab, seed
        self._expected = [*prompt, *ahead]
        self._told: list[int] = []

    def tell(self, tokens: Sequence[int]) -> None:
        self._told += tokens

    def draft(self, most: int) -> Draft:
        if most <= 0:
            return Draft()
        place = len(self._told)
        known = self._expected[place : place + most] if self._expected[:place] == self._told else []
        good = known[: self._number(place, 1) % 6]  # 0 … 5 tokens right
        wrong = [self._number(place, 10 + i) % self._vocab for i in range(2)]
        deeper = [self._number(place, 20 + i) % self._vocab for i in range(2)]
        other = next(token for token in range(3) if token not in (*good[:1], *wrong[:1]))
        branches: list[tuple[Sequence[int], float]] = [([*good, *wrong], 3.0), ([other, *deeper], 2.0)]
        if len(good) > 1:
            branches.append(([*good[:-1], self._number(place, 30) % self._vocab, *deeper], 1.0))
        # By their places, not by their odds: every branch's begin is in it.
        whole = from_branches(branches)
        kept = sorted(range(len(whole)), key=lambda at: (whole.depths[at], at))[:most]
        return whole.only(kept)

    def _number(self, place: int, salt: int) -> int:
        """A number that looks like chance and is the same each time."""
        number = (place * 2654435761 + salt * 40503 + self._seed * 97 + 12345) & 0xFFFFFFFF
        number ^= number >> 15
        number = number * 2246822519 & 0xFFFFFFFF
        return number ^ number >> 13
