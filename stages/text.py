"""Answer tokens to what a client gets: whole characters, cut at a stop, thinking apart, calls read.

What this file knows: the order of the stages and where each of them acts. What it does not: how any of them works:
``stream`` (characters), ``stops``, ``reasoning`` (thinking and answer), ``answer`` (the rest of it).

Every token is judged by itself, and each character goes through the stages in its turn, so how a run's ids are cut
into rounds changes nothing. Where stops act (row B6): on the raw path everywhere, under a plan from the answer's first
line on that is not blank, and in no open call on either. A stop that is complete before a call is known to have
begun, or behind its ``</function>``, counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from engine.protocol import Turn
from stages.answer import Answer
from stages.calls import CallOpened, Content, Delta, Reasoning, join, text_of
from stages.reasoning import Begin, Run, Split
from stages.stops import Stops
from stages.stream import Stream
from stages.toolcall import CallReader

_MARKS = '<>={}:"`\n'
"""The characters that may begin or end a call: behind any other, where nothing waits, the next stands where it did."""
HIDDEN = -1
"""In ``Piece.starts``: the token is not told."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer is read.

    ``shape``: tags, reasoning_content, both or hidden. ``state``: as in ``protocol.Thinking``. ``tools``: the offered
    ones as OpenAI writes them; none: calls are not read. ``parallel``: more than one call (D6). ``bare``: a JSON object
    outside of tags may be one (D5b). ``plan``: stops in the answer only (B6), a lone closing tag (B7) and calls that
    nobody offered (D7) are cut. ``blank_line``: B9, and only for a stream.
    """

    stops: list[str] = []
    shape: str = "tags"
    state: str = "off"
    tools: list[dict[str, Any]] | None = None
    parallel: bool = True
    bare: bool = True
    plan: bool = False
    blank_line: bool = False


class Piece(msgspec.Struct, frozen=True):
    """What a push let go. ``parts``: the deltas of each token that let some go. ``n``: answer tokens judged so far.

    ``stopped``: a stop string is complete; ``n`` then counts the tokens through the one that completed it and ``keep``
    those that lie wholly before it (0 otherwise).

    For what is told of single tokens: ``through``, by part: the answer tokens that lie wholly in the text sent with it;
    ``shown``: the same count after the last part (at the end without a stop all: nothing of them is to come);
    ``starts``: by token judged in this push, the characters in front of it, the tags we add among them; ``HIDDEN`` for
    one of a thinking that is not sent (B10).

    ``reasoning``: tokens of the thinking so far, through its closing tag. ``closed``, ``closed_at``: why and at which
    token it closed, if it did in this push. ``opened_calls``, ``closed_calls``: calls sent, and those of them that are
    whole. ``open_call``: the text ends inside a call (D10). ``dropped_calls``: those cut from the content (D1, D6, D7).
    ``lost_calls``: those written in a block that never closed, known at the end (D1).
    """

    parts: list[list[Delta]]
    n: int
    stopped: bool = False
    keep: int = 0
    through: list[int] = []
    shown: int = 0
    starts: list[int] = []
    reasoning: int = 0
    closed: str = ""
    closed_at: int = -1
    opened_calls: int = 0
    closed_calls: int = 0
    open_call: bool = False
    dropped_calls: int = 0
    lost_calls: int = 0

    @property
    def characters(self) -> int:
        """Characters in ``parts``."""
        return sum(_size(delta) for part in self.parts for delta in part)


def _size(delta: Delta) -> int:
    return len(delta.name) if isinstance(delta, CallOpened) else len(text_of(delta))


class TextStage:
    """The text of one run. ``pieces``: the bytes of each token id; ids beyond them have none."""

    def __init__(self, pieces: list[bytes], reading: Reading) -> None:
        self._reading = reading
        self._stream = Stream(pieces)
        self._stops = Stops(reading.stops)
        self._split = Split(reading.shape, reading.state, reading.blank_line)
        self._answer = Answer(reading.tools, reading.parallel, reading.plan, reading.bare)
        self._thinking = reading.state == "open"
        self._first = 0  # the token that opened the block
        self._last: Turn | None = None  # the close
        self._undecided = reading.plan and reading.state == "may" and bool(self._stops)
        self._begun = not reading.plan  # stops act: the answer's blank lines are over
        self._begin = Begin()  # under a plan: what may become an opening tag, in which no stop acts
        self._held = ""  # what may become a stop
        self._turns: list[tuple[int, Turn]] = []  # those in the held text, with their places
        self._passed = 0  # characters that stops let go
        self._out: list[Delta] = []
        self._inner = CallReader(reading.tools) if reading.tools else None  # reads the thinking, for calls lost in it
        self._shown = 0  # tokens wholly in what was let go
        self._stopped = self._over = False
        self._keep = 0
        self._lost = 0

    def push(self, ids: list[int], turns: Sequence[Turn] = ()) -> Piece:
        """Judge the next answer tokens; ``turns``: those that they complete. After a stop nothing more is judged."""
        parts, through, starts, before = [], [], list[int](), self._last
        for token in ids:
            if self._over:
                break
            secret = self._thinking and self._reading.shape == "hidden"
            starts.append(HIDDEN if secret else self._stream.chars + self._split.added)
            at = len(self._stream.ends)
            self._token(self._stream.written(token), [turn for turn in turns if turn.at == at] if turns else [])
            if self._out:
                parts.append(self._flush())
                through.append(self._show())
        closed = self._last if self._last is not before else None
        return self._piece(parts, through, starts, closed)

    def finish(self) -> Piece:
        """No token follows: what was held is what it looks like, and a character still open is none."""
        if self._undecided:
            self._undecided = False
            self._judge(self._begin.take())
        if not self._over:
            self._end()
        if not self._stopped:
            self._shown = len(self._stream.ends)
        return self._piece([self._flush()], [self._show()], []) if self._out else self._piece([], [], [])

    def _piece(
        self, parts: list[list[Delta]], through: list[int], starts: list[int], closed: Turn | None = None
    ) -> Piece:
        answer = self._answer
        return Piece(
            parts, len(self._stream.ends), self._stopped, self._keep, through, self._show(), starts, self._reasoning(),
            closed.reason if closed else "", closed.at if closed else -1, answer.opened, answer.closed,
            answer.open, answer.dropped, self._lost,
        )  # fmt: skip

    def _reasoning(self) -> int:
        if self._last:
            return self._last.at + 1 - self._first
        return len(self._stream.ends) - self._first if self._thinking else 0

    def _flush(self) -> list[Delta]:
        out, self._out = self._out, []
        return join(out) if len(out) > 1 else out

    def _show(self) -> int:
        """Count on over the tokens that lie wholly in what was let go. A stop's ``keep`` is the last such count."""
        ends = self._stream.ends
        sent = self._passed if self._over else self._passed - self._split.held - self._answer.held
        while self._shown < len(ends) and ends[self._shown] <= sent:
            self._shown += 1
        return self._shown

    # One token

    def _token(self, data: bytes, turns: list[Turn]) -> None:
        if not turns:
            return self._read(self._stream.push(data)[0])
        texts = self._stream.push(data, [len(data) - turn.tail for turn in turns])
        place = self._stream.chars - sum(map(len, texts))
        for text, turn in zip(texts, turns, strict=False):
            place += len(text)
            self._turn(text, turn, place)
        return self._read(texts[-1])

    def _turn(self, text: str, turn: Turn, place: int) -> None:
        """Text through the end of a tag. Under a plan no stop acts in it; else it may be part of one."""
        if self._over:
            return
        if self._undecided:
            self._undecided, text = False, self._begin.take() + text
        self._turns.append((place, turn))
        if self._reading.plan:
            self._held += text
        else:
            self._judge(text)
        if self._reading.plan or not turn.size:  # a tag without characters stands between those beside it all the same
            self._stops.forget()
            self._release(len(self._held))
        if not self._over:
            self._thinking = turn.kind == "opened"
            self._first = turn.at if self._thinking else self._first
            self._last = None if self._thinking else turn

    def _read(self, text: str) -> None:
        if self._over:
            return
        if self._undecided:
            if self._begin.push(text):
                return
            self._undecided, text = False, self._begin.take()
        self._judge(text)

    # Stops

    def _judge(self, text: str) -> None:
        """Let text go as far as no stop may begin in it; where calls are read, character by character around marks."""
        if not self._stops or (self._reading.plan and self._thinking):
            self._held += text
            return self._release(len(self._held))
        for char in text:
            silent = self._silent(char)
            if silent:
                self._stops.forget()
            size = 0 if silent else self._stops.take(char)
            self._held += char
            if size:
                return self._stop(len(self._held) - size)
            if self._answer.reader and (char in _MARKS or self._answer.held):
                self._release(len(self._held) - self._stops.matched)
        return self._release(len(self._held) - self._stops.matched)

    def _silent(self, char: str) -> bool:
        """Whether no stop acts on this character: in the blank lines before the answer, or in a call."""
        if not self._begun and char == "\n":
            return True
        self._begun = self._begun or not char.isspace()
        inside = self._begun and self._answer.inside(char)
        if inside:
            self._release(len(self._held))
        return inside

    def _stop(self, start: int) -> None:
        """The stop begins at ``start`` in the held text: what stands before it is the last there is to say."""
        place = self._passed + start
        self._keep = sum(1 for reach in self._stream.ends if reach <= place)
        self._release(start)
        self._held, self._turns, self._stopped = "", [], True
        self._end()

    def _release(self, count: int) -> None:
        """Let the next ``count`` characters on, in the parts that turns make of them."""
        until = self._passed + count
        while self._turns and self._turns[0][0] <= until:
            place, turn = self._turns.pop(0)
            self._say(self._split.turn(self._pass(place), turn.kind, turn.size))
            self._inner = self._inner if turn.kind == "opened" else None
        if text := self._pass(until):
            if self._inner and self._split.where == "open":
                self._inner.push(text)
            self._say(self._split.push(text))

    def _pass(self, place: int) -> str:
        """The held text up to a place."""
        count = place - self._passed
        text, self._held = self._held[:count], self._held[count:]
        self._passed = place
        return text

    # What is said

    def _say(self, runs: Iterable[Run]) -> None:
        for where, text in runs:
            if where == "answer":
                self._out += self._answer.push(text)
            else:
                self._out.append(Content(text) if where == "content" else Reasoning(text))

    def _end(self) -> None:
        """Nothing follows, in this order: what each stage still holds."""
        self._over = True
        self._release(len(self._held))
        if self._inner and self._split.where == "open":
            self._inner.finish()
            self._lost = self._inner.complete
        self._say(self._split.finish())
        self._out += self._answer.finish()
