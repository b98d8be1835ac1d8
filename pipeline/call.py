"""One client's request as the runner holds it: what the core must not see (body, prompt, text) and the way back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pipeline.outbox import Outbox, Text

if TYPE_CHECKING:
    from engine.protocol import Sampling
    from stages.judge import Ending, Judged
    from stages.logprobs import Entry, Logprobs
    from stages.text import TextStage


class Call:
    """``name`` is 24 hex digits; ``created`` a Unix time in seconds. ``task`` is the HTTP handler, to be cut off;
    ``work`` what is being prepared for it."""

    def __init__(self, request: int, name: str, route: str, created: int, seed: int) -> None:
        self.request, self.name, self.route, self.created, self.seed = request, name, route, created, seed
        self.stream = False
        self.include_usage: bool | None = None
        self.outbox = Outbox()
        self.task: asyncio.Task[object] | None = None
        self.work: asyncio.Future[object] | None = None
        self.judged: Judged | None = None
        self.tokens: list[int] = []
        self.sampling: Sampling | None = None
        self.ending: Ending | None = None
        self.text: TextStage | None = None
        self.alternatives = -1  # that each token's log-probability comes with; -1: none is wanted
        self.logprobs: Logprobs | None = None
        self._pieces: dict[int, Text] = {}
        self._handles = 0
        self.message, self.param = "", None  # type: tuple[str, str | None]
        self._verdict: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def wants_body(self) -> bool:
        """Whether the body is to be read; False when the request was refused on arrival."""
        return await self._verdict

    def decide(self, read: bool) -> None:
        """Answer ``wants_body``; the first answer counts."""
        if not self._verdict.done():
            self._verdict.set_result(read)

    def over(self) -> None:
        """The request is over: nobody reads a body or prepares a prompt for it any more."""
        self.decide(False)
        if self.work is not None:
            self.work.cancel()

    def keep(self, parts: list[str], logprobs: list[list[Entry]]) -> int:
        """Hold a piece of text until the core says to send it; its handle. Of nothing only the number is kept."""
        handle, self._handles = self._handles, self._handles + 1
        if parts:
            self._pieces[handle] = Text(parts, logprobs)
        return handle

    def release(self, handle: int) -> Text:
        """The piece behind a handle, held no longer."""
        return self._pieces.pop(handle)

    def abort(self) -> None:
        """Cut the client off: it does not read."""
        if self.task is not None:
            self.task.cancel()
