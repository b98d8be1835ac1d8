"""One request as the runner holds it: what the core must not see (body, prompt, text) and the way back to its client.

Of a list of prompts each is a call of its own. The first one is the ``head``: it has the client's task and the one
outbox that all of them write to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline import events as ev
from pipeline.outbox import Outbox, Text
from stages.logprobs import Logprobs
from stages.text import Piece, TextStage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine import protocol as wire
    from pipeline.effects import Finish
    from stages.calls import Delta
    from stages.judge import Judged
    from stages.logprobs import Entry
    from stages.run import Run


class Call:
    """``name`` is 24 hex digits, of a further prompt with its place behind it; ``created`` a Unix time in seconds.

    ``task`` is the HTTP handler, to be cut off; ``work`` what is being prepared for it.
    """

    def __init__(
        self, request: int, name: str, route: str, created: int, seed: int, head: Call | None = None, index: int = 0
    ) -> None:
        self.request, self.name, self.route, self.created, self.seed = request, name, route, created, seed
        self.head, self.index = head or self, index
        self.members: list[Call] = [self]  # of a head: a call for each prompt of its body
        self.ends: list[Finish] = []  # of a head: those of its members that are over, as they came
        self.is_over = self.stream = self.thinks = False
        self.include_usage: bool | None = None
        self.outbox: Outbox = head.outbox if head else Outbox()
        self.task: asyncio.Task[object] | None = None
        self.work: asyncio.Future[object] | None = None
        self.shows_lines = False  # beside the comments, where the thinking stands (row Q6)
        self.headers: Mapping[str, str] = {}
        self.judged: Judged | None = None
        self.checked: ev.Checked | None = None
        self.prompts: list[list[int]] = []
        self.blocks: list[list[bytes]] = []  # of a head: each prompt's whole blocks as hashes
        self.pieces: list[bytes] = []  # the bytes of each token id
        self.run: Run | None = None
        self.runs: list[Run] = []  # of a head: one for each prompt, where they are not all as ``run``
        self.text: TextStage | None = None
        self.alternatives = -1  # that each token's log-probability comes with; -1: none is wanted
        self.logprobs: Logprobs | None = None
        self.choice = 0
        self.choices_ended = 0
        self.dropped_calls = self.lost_calls = 0  # of this choice, counted so far
        self._pieces: dict[int, Text] = {}
        self._handles = 0
        self.message, self.param = "", None  # type: tuple[str, str | None]
        self._verdict: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def tokens(self) -> list[int]:
        """Its prompt."""
        return self.head.prompts[self.index]

    @property
    def hashes(self) -> list[bytes]:
        """Its prompt's whole blocks, salted."""
        return self.head.blocks[self.index] if self.head.blocks else []

    @property
    def choices(self) -> int:
        """How many its client wants of each prompt."""
        return self.head.checked.choices if self.head.checked else 1

    @property
    def several(self) -> bool:
        """Whether its client gets more than one choice: then each has an end of its own."""
        return self.choices > 1 or len(self.head.members) > 1

    def shown(self, choice: int) -> int:
        """The index its client sees."""
        return self.index * self.choices + choice

    def further(self, request: int, index: int, seed: int) -> Call:
        """The call of another prompt of the same body. It has chance of its own where the client asked for no seed."""
        call = Call(request, f"{self.name}-{index}", self.route, self.created, seed, self, index)
        call.stream, call.include_usage, call.pieces = self.stream, self.include_usage, self.pieces
        call.run = self.runs[index] if self.runs else self.run
        if call.run is not None and call.run.sampling.seed == self.seed:
            call.run = msgspec.structs.replace(call.run, sampling=msgspec.structs.replace(call.run.sampling, seed=seed))
        self.members.append(call)
        return call

    def new_choice(self, choice: int) -> Run:
        """The next choice begins: its text is read anew."""
        assert self.run is not None
        self.choice, self.alternatives = choice, self.run.alternatives
        self.dropped_calls = self.lost_calls = 0
        self.text = TextStage(self.pieces, self.run.reading)
        self.logprobs = Logprobs(self.pieces) if self.run.alternatives >= 0 else None
        return self.run

    def recall(self) -> None:
        """Nothing of its text was sent, and it is written anew: forget it."""
        self._pieces.clear()
        self.text = self.logprobs = None

    def rest(self) -> list[Entry]:
        """The log-probabilities that went with no part of the choice."""
        return self.logprobs.rest() if self.logprobs else []

    async def wants_body(self) -> bool:
        """Whether the body is to be read; False when the request was refused on arrival."""
        return await self._verdict

    def decide(self, read: bool) -> None:
        """Answer ``wants_body``; the first answer counts."""
        if not self._verdict.done():
            self._verdict.set_result(read)

    def over(self) -> None:
        """The request is over: nobody reads a body or prepares a prompt for it any more."""
        self.is_over = True
        self.decide(False)
        if self.work is not None:
            self.work.cancel()

    def read(self, message: wire.Tokens, counters: dict[str, int]) -> ev.Progress:
        """A round through the text stage: the fact it makes, its text held back under the handle. Raises what that
        stage raises.
        """
        assert self.text is not None
        piece = self.text.push(message.ids, message.turns)
        entries = self.logprobs.add(message.ids, message.logprobs, piece) if self.logprobs else []
        return ev.Progress(
            self.request, message.epoch, message.run, piece.n, self.keep(piece.parts, entries), piece.characters,
            piece.stopped, piece.keep, message.ms, drafted=message.drafted, accepted=message.accepted,
            shared=message.shared, **self._told(piece, counters),
        )  # fmt: skip

    def read_end(self, ended: ev.RunEnded, counters: dict[str, int]) -> ev.RunEnded:
        """The end of a run with what the text stage lets go at it."""
        assert self.text is not None
        piece = self.text.finish()
        handle = self.keep(piece.parts, self.logprobs.add([], [], piece) if self.logprobs else [])
        return msgspec.structs.replace(
            ended, n=piece.n, handle=handle, characters=piece.characters, **self._told(piece, counters)
        )

    def read_cut(self, counters: dict[str, int]) -> Text | None:
        """What the text stage still held of an answer that ends before its run did: it stands (row F5)."""
        if self.text is None:
            return None
        piece = self.text.finish()
        entries = self.logprobs.add([], [], piece) if self.logprobs else []
        self._told(piece, counters)
        return Text(piece.parts, entries, self.shown(self.choice)) if piece.parts else None

    def _told(self, piece: Piece, counters: dict[str, int]) -> dict[str, Any]:
        """What the text says of a choice beside its text; calls that are not sent are counted."""
        counters["dropped_calls"] += piece.dropped_calls - self.dropped_calls
        counters["lost_calls"] += piece.lost_calls - self.lost_calls
        self.dropped_calls, self.lost_calls = piece.dropped_calls, piece.lost_calls
        return {
            "reasoning": piece.reasoning,
            "closed": piece.closed,
            "closed_at": piece.closed_at,
            "opened_calls": piece.opened_calls,
            "closed_calls": piece.closed_calls,
            "open_call": piece.open_call,
        }

    def keep(self, parts: list[list[Delta]], logprobs: list[list[Entry]]) -> int:
        """Hold a piece of text until the core says to send it; its handle. Of nothing only the number is kept."""
        handle, self._handles = self._handles, self._handles + 1
        if parts:
            self._pieces[handle] = Text(parts, logprobs, self.shown(self.choice))
        return handle

    def release(self, handle: int) -> Text:
        """The piece behind a handle, held no longer."""
        return self._pieces.pop(handle)

    def abort(self) -> None:
        """Cut the client off: it does not read."""
        if self.head.task is not None:
            self.head.task.cancel()
