"""Stop strings, character by character (rows A1 and B6).

What this file knows: when a stop is complete, and how much of the text may still become one. What it does not: where
in an answer stops act.

A stop is found at the character that completes it: of several the one complete first, of those the longest. So the
text does not depend on where tokens begin.
"""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Those of one run. ``matched``: how much of the text, from its end, may still become one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.matched = 0
        self._stops = [_Stop(text) for text in texts]

    def __bool__(self) -> bool:
        return bool(self._stops)

    def take(self, char: str) -> int:
        """Walk one character on; the length of the stop that it completes, 0 where it completes none."""
        complete = [len(stop.text) for stop in self._stops if stop.take(char)]
        self.matched = max(stop.matched for stop in self._stops)
        return max(complete, default=0)

    def forget(self) -> None:
        """Nothing of what was written is part of a stop."""
        if self.matched:
            self.matched = 0
            for stop in self._stops:
                stop.matched = 0


class _Stop:
    """A stop string and how much of it the text ends with.

    Knuth, Morris and Pratt's walk: a character costs the same however long the stop is, and whatever the model writes.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._back = [0]  # by matched length - 1: the next shorter start of the stop that it ends with

    def take(self, char: str) -> bool:
        """Walk one character on; whether it completes the stop."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self._back[self.matched - 1]
        if self.text[self.matched] == char:
            self.matched += 1
            self._learn()
        return self.matched == len(self.text)

    def _learn(self) -> None:
        for at in range(len(self._back), self.matched):
            back = self._back[at - 1]
            while back and self.text[at] != self.text[back]:
                back = self._back[back - 1]
            self._back.append(back + 1 if self.text[at] == self.text[back] else back)
