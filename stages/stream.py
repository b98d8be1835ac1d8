"""Answer tokens to whole characters (row F2).

What this file knows: UTF-8 at byte level, and how far into the text each token reaches. What it does not: what the text
says.

A character goes out once its last byte is here. Bytes that can belong to no character are dropped, and no replacement
character is made up for them. Every token is judged by itself, so how a run's ids are cut into rounds changes nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_decoder = codecs.getincrementaldecoder("utf-8")


class Stream:
    """The text of one run, in characters as the model wrote them. ``pieces``: the bytes of each token id; ids beyond
    them have none.

    ``chars``: how many are whole. ``ends``, by token: the characters that its bytes, and all before it, reach into.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self.chars = 0
        self.ends: list[int] = []
        self._pieces = pieces
        self._utf8 = _decoder(errors="ignore")
        self._open = 0  # the last tokens whose bytes end inside a character

    def written(self, token: int) -> bytes:
        """What a token writes."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def push(self, data: bytes, cuts: Sequence[int] = ()) -> list[str]:
        """The characters that the next token completes: up to each of ``cuts``, places in its bytes, and the rest.

        No character reaches across a cut: there one text ends and another begins.
        """
        texts, start = [], 0
        for cut in cuts:
            texts.append(self._decode(data[start:cut]))
            self._close()
            start = cut
        texts.append(self._decode(data[start:] if start else data))
        is_open = bool(self._utf8.getstate()[0])
        self._open = self._open + 1 if is_open else 0
        self.ends.append(self.chars + is_open)
        return texts

    def _decode(self, data: bytes) -> str:
        before, _ = self._utf8.getstate()
        text = self._utf8.decode(data)
        if before:
            whole = before + data
            if self._utf8.getstate()[0] != whole:  # the open character is complete, or its bytes were dropped
                if not (text and whole.startswith(text[0].encode())):
                    self._reach_back()
                self._open = 0
        self.chars += len(text)
        return text

    def _close(self) -> None:
        """A character still open is none."""
        if self._utf8.getstate()[0]:
            self._utf8.reset()
            self._reach_back()
            self._open = 0

    def _reach_back(self) -> None:
        """Tokens that ended in bytes now dropped end where the text stood."""
        for index in range(len(self.ends) - self._open, len(self.ends)):
            self.ends[index] = self.chars
