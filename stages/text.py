"""Answer tokens to text: whole characters only, and no further than a stop string.

What this file knows: UTF-8 at byte level and stop strings. What it does not: what a token is, beyond its bytes.

Every token is judged by itself, so how a run's ids are cut into rounds changes nothing. Three rules (row F2 and the
stops of A1):

* a character goes out once its last byte is here; bytes that can belong to no character are dropped, and no
  replacement character is made up for them;
* a stop is found at the character that completes it: of several the one complete first, of those the longest. So the
  text does not depend on where tokens begin;
* text that may still become a stop is held, and no more than that.
"""

from __future__ import annotations

import codecs

import msgspec

_decoder = codecs.getincrementaldecoder("utf-8")


class Piece(msgspec.Struct, frozen=True):
    """What a push let go. ``parts``: one text a token that let some go. ``n``: answer tokens judged so far.

    ``stopped``: a stop string is complete; ``n`` then counts the tokens through the one that completed it and ``keep``
    those that lie wholly before it (0 otherwise).

    For what is told of single tokens: ``through``, by part: the answer tokens that lie wholly in the text sent with it;
    ``shown``: the same count after the last part (at the end without a stop all: nothing of them is to come);
    ``starts``: by token judged in this push, the characters in front of it.
    """

    parts: list[str]
    n: int
    stopped: bool = False
    keep: int = 0
    through: list[int] = []
    shown: int = 0
    starts: list[int] = []

    @property
    def characters(self) -> int:
        """Characters in ``parts``."""
        return sum(len(part) for part in self.parts)


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


class TextStage:
    """The text of one run. ``pieces``: the bytes of each token id; ids beyond them have none."""

    def __init__(self, pieces: list[bytes], stops: list[str]) -> None:
        self._pieces = pieces
        self._stops = [_Stop(stop) for stop in stops]
        self._utf8 = _decoder(errors="ignore")
        self._held = ""
        self._sent = 0  # characters let go
        self._ends: list[int] = []  # by token: the characters its bytes, and all before it, reach into
        self._shown = 0  # tokens wholly in what was let go
        self._starts: list[int] = []  # by token of this push: characters in front of it
        self._open = 0  # the last tokens whose bytes end inside a character
        self._stopped = False
        self._keep = 0

    def push(self, ids: list[int]) -> Piece:
        """Judge the next answer tokens. After a stop nothing more is judged."""
        parts, through = [], []
        self._starts = []
        for token in ids:
            if self._stopped:
                break
            part = self._token(self._pieces[token] if 0 <= token < len(self._pieces) else b"")
            if part:
                parts.append(part)
                through.append(self._show())
        return self._piece(parts, through)

    def finish(self) -> Piece:
        """No token follows: what was held is text after all, and a character still open is none."""
        part = self._release(len(self._held))
        self._starts = []
        if not self._stopped:
            self._shown = len(self._ends)
        return self._piece([part], [self._shown]) if part else self._piece([], [])

    def _piece(self, parts: list[str], through: list[int]) -> Piece:
        return Piece(parts, len(self._ends), self._stopped, self._keep, through, self._show(), self._starts)

    def _show(self) -> int:
        """Count on over the tokens that lie wholly in what was let go. A stop's ``keep`` is the last such count."""
        while self._shown < len(self._ends) and self._ends[self._shown] <= self._sent:
            self._shown += 1
        return self._shown

    def _token(self, data: bytes) -> str:
        text = self._decode(data)
        before = len(self._held)
        self._held += text
        if not self._stops:
            return self._release(len(self._held))
        for end, char in enumerate(text, before + 1):
            complete = [len(stop.text) for stop in self._stops if stop.take(char)]
            if complete:
                return self._stop_at(end - max(complete))
        return self._release(len(self._held) - max(stop.matched for stop in self._stops))

    def _stop_at(self, start: int) -> str:
        """The stop begins at ``start`` in the held text: what stands before it is the last there is to say."""
        self._stopped = True
        self._keep = sum(1 for reach in self._ends if reach <= self._sent + start)
        part = self._release(start)
        self._held = ""
        return part

    def _decode(self, data: bytes) -> str:
        """The characters ``data`` completes; notes how far into the text the token reaches."""
        before, _ = self._utf8.getstate()
        text = self._utf8.decode(data)
        after, _ = self._utf8.getstate()
        at = self._sent + len(self._held)
        self._starts.append(at)
        whole = before + data
        if before and after != whole:  # the open character is complete, or its bytes were dropped
            if not (text and whole.startswith(text[0].encode())):
                self._reach_back(at)
            self._open = 0
        self._ends.append(at + len(text) + (1 if after else 0))
        self._open = self._open + 1 if after else 0
        return text

    def _reach_back(self, at: int) -> None:
        """Tokens that ended in bytes now dropped end where the text stood."""
        for index in range(len(self._ends) - self._open, len(self._ends)):
            self._ends[index] = at

    def _release(self, count: int) -> str:
        part, self._held = self._held[:count], self._held[count:]
        self._sent += count
        return part
