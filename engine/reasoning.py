"""Where the thinking of a run begins and ends, and when the engine must close it (rows B0, C3, C4, C6, C8).

What this file knows: the tags, as bytes and as added tokens, and the rules by which a block that stays open is closed.
What it does not: a model, a text, a client. It is fed each token of the answer once, in order, and nothing it says
hangs on how tokens fall into rounds.

A tag is found in the bytes that tokens write, wherever they are cut, or as the added token of its name. A block closes
once; whatever is written after that is answer. Reasoning tokens are those from the one that completes the opening tag
(from the first of the answer where the prompt opened the block) through the one that completes the closing tag.

A forced closing is the closing tag's own tokens. They go the way of all tokens: through the model, through ``feed``.
So a budget of n ends after n tokens and the tag; of a tag the model has begun in those very tokens, only the rest is
forced.
"""

from __future__ import annotations

from engine.pieces import CLOSING, OPENING, Vocabulary
from engine.protocol import Thinking, Turn

RESERVE = 2048
"""Tokens: the most an ``auto`` reserve keeps."""
BLOCK, TIMES = 16, 4
"""A block of up to so many tokens, written so many times in a row, is a stall."""
NGRAM, SPAN, FIRST, EVERY, NEW = 8, 128, 320, 64, 0.1
"""So is, from ``FIRST`` reasoning tokens on and ``EVERY`` so many, a ``SPAN`` with under ``NEW`` of its n-grams new."""


class Reasoning:
    """The thinking of one run that may write ``limit`` tokens.

    ``inside``: the next token is thinking. ``may_open``: it may still be the opening tag, or a part of it. ``count``:
    reasoning tokens so far. ``spelled``: tokens of the closing tag, as it would be forced, that were just written.
    """

    def __init__(self, thinking: Thinking, vocabulary: Vocabulary, limit: int) -> None:
        self.inside = thinking.state == "open"
        self.may_open = thinking.state == "may"
        self.count = 0
        self.spelled = 0
        self._vocabulary = vocabulary
        self._cap = thinking.cap
        room = kept(thinking.reserve, limit)
        self._last = limit - room if room else None  # position behind the last token of the thinking
        self._stall = Stall() if thinking.stall else None
        self._n = 0
        self._tail = b""  # the bytes written last: what may be the begin of a tag
        self._recent: tuple[int, ...] = ()  # the thinking's last tokens, as many as a forced closing has
        self._why = self._due()

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        return self._vocabulary.close[self.spelled] if self._why else None

    def feed(self, token: int) -> list[Turn]:
        """The next token of the answer; the turns that it completes."""
        at, self._n = self._n, self._n + 1
        if not (self.inside or self.may_open):
            return []
        pieces = self._vocabulary.pieces
        data = pieces[token] if 0 <= token < len(pieces) else b""
        turns = []
        if self.may_open:
            size = len(OPENING) if data else 0
            rest = self._open(token, data)
            if rest is None:
                return []
            turns.append(Turn("opened", at, size, len(rest)))
            data, token = rest, -1
        self.count += 1
        tail = self._close(token, data)
        if tail is not None:
            turns.append(Turn("closed", at, len(CLOSING) if data else 0, tail, self._why or "model"))
            self.inside, self._why = False, ""
        elif token >= 0:
            self._went_on(token)
        self._why = self._why or self._due()
        return turns

    def _open(self, token: int, data: bytes) -> bytes | None:
        """Look for the opening tag at the answer's begin; the token's bytes behind it, None while there is none."""
        head = (self._tail + data).lstrip()
        if not data and not self._tail and token in self._vocabulary.opening:
            head = OPENING
        self._tail = head
        self.inside = head.startswith(OPENING)
        self.may_open = not self.inside and OPENING.startswith(head)
        if not self.inside:
            return None
        self._tail = b""
        return head[len(OPENING) :]

    def _close(self, token: int, data: bytes) -> int | None:
        """Look for the closing tag in the bytes written last; those of the token behind it, None while it is open."""
        if not data and token in self._vocabulary.closing:
            return 0
        written = self._tail + data
        found = written.find(CLOSING)
        self._tail = written[1 - len(CLOSING) :]
        return None if found < 0 else len(written) - found - len(CLOSING)

    def _went_on(self, token: int) -> None:
        close = self._vocabulary.close
        self._recent = recent = (*self._recent, token)[-len(close) :]
        self.spelled = next((n for n in range(len(close) - 1, 0, -1) if recent[-n:] == close[:n]), 0)
        if self._stall is not None:
            self._stall.feed(token)

    def _due(self) -> str:
        """Why the block must be closed now; "" while it may go on."""
        close = len(self._vocabulary.close)
        if not self.inside or not close:
            return ""
        if 0 <= self._cap <= self.count:
            return "budget"
        if self._last is not None and self._n + close >= self._last:
            return "reserve"
        return "stall" if self._stall is not None and self._stall.found else ""


def kept(reserve: int, limit: int) -> int:
    """Tokens of the limit that are kept for the answer; ``reserve`` as ``Thinking`` has it."""
    return min(min(RESERVE, limit // 4) if reserve < 0 else reserve, limit // 2)


class Stall:
    """Whether the thinking only repeats itself. Each token costs the same however many there were."""

    def __init__(self) -> None:
        self.found = False
        self._tokens: list[int] = []
        self._same = [0] * (BLOCK + 1)  # by period: how many tokens up to here equal the one a period before

    def feed(self, token: int) -> None:
        """The next token of the thinking."""
        tokens, same = self._tokens, self._same
        for period in range(1, min(BLOCK, len(tokens)) + 1):
            same[period] = same[period] + 1 if tokens[-period] == token else 0
        tokens.append(token)
        repeats = any(same[period] >= period * (TIMES - 1) for period in range(1, BLOCK + 1))
        self.found = repeats or self._nothing_new()

    def _nothing_new(self) -> bool:
        count = len(self._tokens)
        if count < FIRST or (count - FIRST) % EVERY:
            return False
        before = set(ngrams(self._tokens[-2 * SPAN : -SPAN]))
        now = ngrams(self._tokens[-SPAN:])
        return sum(gram not in before for gram in now) < NEW * len(now)


def ngrams(tokens: list[int]) -> list[tuple[int, ...]]:
    """All runs of ``NGRAM`` tokens."""
    return [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
