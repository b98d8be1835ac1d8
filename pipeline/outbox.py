"""One client's pending answer, between the core's effects and the socket.

The engine never waits for a client: what the socket does not take piles up here, merged, up to a limit; over it, or
after too long without a sip, the client counts as gone (``stalled``). Comment lines are dropped while text is pending.
"""

from __future__ import annotations

import asyncio

import msgspec

from pipeline.effects import Finish
from stages.logprobs import Entry

LIMIT = 4 << 20
"""Bytes of text that may be pending for one client."""
STALL_S = 120.0
"""Seconds without the socket taking anything."""
MERGE = 64 << 10
"""Bytes pending from which on pieces are merged into one: a slow reader gets fewer, larger deltas."""

BLOCK = 16 << 10
"""Characters of one merged piece."""


class Text(msgspec.Struct):
    """Answer text, one string a token. ``logprobs``, where asked for: those that go with each piece."""

    pieces: list[str]
    logprobs: list[list[Entry]] = []

    @property
    def size(self) -> int:
        """About its bytes."""
        text = sum(len(piece.encode()) for piece in self.pieces)
        return text + sum(entry.size for entries in self.logprobs for entry in entries)


class Comment(msgspec.Struct):
    """A comment line, without its colon."""

    text: str


class End(msgspec.Struct):
    """The last item. ``message`` and ``param`` go into the error object when ``figures.code`` is set.

    ``logprobs``: those that went with no piece of text.
    """

    figures: Finish
    message: str = ""
    param: str | None = None
    logprobs: list[Entry] = []


Item = Text | Comment | End


class Outbox:
    """A queue of one writer (the runner) and one reader (the HTTP handler), on one event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.pending = 0
        self.blocked_since: float | None = None
        self._items: list[Item] = []
        self._news = asyncio.Event()

    def put(self, item: Item, now: float) -> bool:
        """Add an item. False when the client did not read for too long: it is stalled and nothing was added."""
        if isinstance(item, Comment) and self.pending:
            return True
        if isinstance(item, Text):
            size = item.size
            if self.pending + size > self.limit or self.stalled(now):
                return False
            if self.blocked_since is None:
                self.blocked_since = now
            self.pending += size
            last = self._items[-1] if self._items else None
            if self.pending > MERGE and isinstance(last, Text):
                self._merge(last, item)
                return True
        self._items.append(item)
        self._news.set()
        return True

    @staticmethod
    def _merge(last: Text, item: Text) -> None:
        """Append to the last piece while it is small: copying stays linear, a million tokens stay few objects."""
        text, entries = "".join(item.pieces), [entry for group in item.logprobs for entry in group]
        if len(last.pieces[-1]) < BLOCK:
            last.pieces[-1] += text
            if last.logprobs:
                last.logprobs[-1] += entries
        else:
            last.pieces.append(text)
            if last.logprobs:
                last.logprobs.append(entries)

    def stalled(self, now: float) -> bool:
        """Whether text has been pending for ``STALL_S`` without the reader coming back."""
        return self.blocked_since is not None and now - self.blocked_since > STALL_S

    async def take(self) -> list[Item]:
        """Everything pending, waiting for the first item. The caller is done with what it took before."""
        self.blocked_since = None
        await self._news.wait()
        items, self._items, self.pending = self._items, [], 0
        self._news.clear()
        return items

    def sent(self, now: float) -> None:
        """The reader starts to write what it took: the stall clock runs until it takes again."""
        self.blocked_since = now
