"""The log-probabilities a client asked for: held until the text of their token is sent, then shaped for its route.

What this file knows: OpenAI's two shapes and the bytes of a token. When a token's text is out is the text stage's word
(``Piece``). A token that only began before a stop string is not told, nor one whose text is still held back, nor one of
a thinking that is hidden (B10); one whose bytes complete no character goes with the next piece or the finish (rows F2
and F7).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import msgspec

from engine.protocol import TokenLogprob
from stages.text import HIDDEN, Piece

LOWEST = -9999.0
"""What -inf is sent as: JSON has no infinity."""
BYTES_EACH = 64
"""About what one token's value costs in memory and on the wire."""


class Entry(msgspec.Struct, frozen=True):
    """One answer token's. ``top``: the likeliest tokens' bytes and values; ``offset``: characters in front of it."""

    data: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    offset: int

    @property
    def size(self) -> int:
        """About how many bytes a client that does not read makes us keep."""
        return BYTES_EACH * (1 + len(self.top))


class Logprobs:
    """Those of one run. ``pieces``: the bytes of each token id; ids beyond them have none."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._held: list[Entry | None] = []  # not handed out yet, in order; none for a token that is not told
        self._out = 0  # answer tokens handed out
        self._shown = 0  # answer tokens that may be: the text stage's count

    def add(self, ids: list[int], logprobs: list[TokenLogprob], piece: Piece) -> list[list[Entry]]:
        """A round and what the text stage made of it: the entries that go with each of its parts."""
        judged = zip(ids, logprobs, piece.starts, strict=False)  # it judges none past a stop
        self._held += [
            None if start == HIDDEN else self._entry(token, logprob, start) for token, logprob, start in judged
        ]
        self._shown = piece.shown
        return [self._take(through) for through in piece.through]

    def rest(self) -> list[Entry]:
        """What may be told and went with no part: it belongs to the finish."""
        return self._take(self._shown)

    def _take(self, through: int) -> list[Entry]:
        count = max(through - self._out, 0)
        taken, self._held = self._held[:count], self._held[count:]
        self._out += count
        return [entry for entry in taken if entry]

    def _entry(self, token: int, logprob: TokenLogprob, start: int) -> Entry:
        top = zip(logprob.top_ids, logprob.top_logprobs, strict=True)
        alternatives = [(self._bytes(id), _finite(value)) for id, value in top]
        return Entry(self._bytes(token), _finite(logprob.logprob), alternatives, start)

    def _bytes(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


def shaped(route: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """A choice's ``logprobs``, as OpenAI has it for "chat" or "completions"."""
    if route == "chat":
        return {"content": [_chat(entry) for entry in entries], "refusal": None}
    return {
        "tokens": [_text(entry.data) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_by_text(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _chat(entry: Entry) -> dict[str, Any]:
    return {**_value(entry.data, entry.logprob), "top_logprobs": [_value(*one) for one in entry.top]}


def _value(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _by_text(entry: Entry) -> dict[str, float]:
    """The alternatives and the chosen token by text. Of several with one text the likeliest: they come best first."""
    found: dict[str, float] = {}
    for data, logprob in [*entry.top, (entry.data, entry.logprob)]:
        found.setdefault(_text(data), logprob)
    return found


def _text(data: bytes) -> str:
    """The whole characters in a token; no replacement character is made up for the others."""
    return data.decode("utf-8", "ignore")


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else LOWEST
