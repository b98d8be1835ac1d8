"""One client's pending answer, between the core's effects and the socket.

The engine never waits for a client: what the socket does not take piles up here, merged, up to a limit; over it, or
after too long without a sip, the client counts as gone (``stalled``). Comment lines and empty chunks are dropped while
text is pending.
"""

from __future__ import annotations

import asyncio

import msgspec

from pipeline.effects import Finish
from stages.calls import Arguments, CallOpened, Content, Delta, Reasoning, join
from stages.logprobs import Entry

LIMIT = 4 << 20
"""Bytes of text that may be pending for one client."""
STALL_S = 120.0
"""Seconds without the socket taking anything."""
MERGE = 64 << 10
"""Bytes pending from which on pieces are merged into one: a slow reader gets fewer, larger deltas."""

BLOCK = 16 << 10
"""Characters of one merged part."""


class Text(msgspec.Struct):
    """What an answer says: by token that let something go, its deltas. ``logprobs``, where asked for: by part.

    ``choice`` is the index its client sees.
    """

    parts: list[list[Delta]]
    logprobs: list[list[Entry]] = []
    choice: int = 0

    @property
    def size(self) -> int:
        """About its bytes."""
        text = sum(len(said(delta).encode()) for part in self.parts for delta in part)
        return text + sum(entry.size for entries in self.logprobs for entry in entries)


class Comment(msgspec.Struct):
    """A comment line, without its colon. ``reasoning``: its client shows it where the thinking stands (row Q6).

    ``progress``: its figures, for a client that wants them as a chunk too (row L8).
    """

    text: str
    reasoning: bool = False
    progress: dict[str, float | None] | None = None


class Beat(msgspec.Struct):
    """A chunk that says nothing: many clients take no comment for a sign of life (row L1)."""


class Blank(msgspec.Struct):
    """White space in front of a whole answer's JSON, its headers before the first (row I6b)."""


class ChoiceEnd(msgspec.Struct):
    """One choice of several is over; the others go on. ``logprobs``: those that went with no part of it.

    ``code``: a word of the error table for one that an error or a time-out ended.
    """

    choice: int
    finish: str
    logprobs: list[Entry] = []
    code: str = ""


class End(msgspec.Struct):
    """The last item. ``message`` and ``param`` go into the error object when ``figures.code`` is set.

    ``choice``: the one that ends here. ``closed``: its ``ChoiceEnd`` was said. ``logprobs``: those that went with no
    part of it.
    """

    figures: Finish
    message: str = ""
    param: str | None = None
    logprobs: list[Entry] = []
    choice: int = 0
    closed: bool = False


Item = Text | Comment | Beat | Blank | ChoiceEnd | End


def said(delta: Delta) -> str:
    """The text a delta brings."""
    match delta:
        case Content(text) | Reasoning(text) | Arguments(_, text) | CallOpened(_, text):
            return text
    return ""


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
        if isinstance(item, Comment | Beat) and self.pending:
            return True
        if isinstance(item, Text):
            size = item.size
            if self.pending + size > self.limit or self.stalled(now):
                return False
            if self.blocked_since is None:
                self.blocked_since = now
            self.pending += size
            last = self._items[-1] if self._items else None
            if self.pending > MERGE and isinstance(last, Text) and last.choice == item.choice:
                self._merge(last, item)
                return True
        self._items.append(item)
        self._news.set()
        return True

    @staticmethod
    def _merge(last: Text, item: Text) -> None:
        """Append to the last part while it is small: copying stays linear, a million tokens stay few objects."""
        part = [delta for part in item.parts for delta in part]
        entries = [entry for group in item.logprobs for entry in group]
        if sum(len(said(delta)) for delta in last.parts[-1]) < BLOCK:
            last.parts[-1] = join([*last.parts[-1], *part])
            if last.logprobs:
                last.logprobs[-1] += entries
        else:
            last.parts.append(join(part))
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
