"""A stream's lines and chunks: plain functions of items and figures.

Usage stands in exactly one place (F1): on the finish chunk by default, on an own last chunk with empty ``choices``
where the client asked for it, nowhere where it declined. Timings stand beside it. Of several choices the last to end
carries it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from pipeline.effects import Finish
from pipeline.http.shapes import OBJECTS, Shape, encode, figures, finish_words, public_id
from pipeline.outbox import Beat, ChoiceEnd, Comment, End, Item, Text
from stages.calls import Content, Delta, Reasoning
from stages.logprobs import Entry, shaped

BLOCK = 64 << 10
"""Bytes of one write. One round's tokens are far below; what a slow reader left pending goes out in pieces."""
DONE = b"data: [DONE]\n\n"


class Stream:
    """One stream's bytes. ``include_usage`` None: the client does not say, ``usage_default`` decides."""

    def __init__(
        self, *, shape: Shape, created: int, model: str, include_usage: bool | None, usage_default: bool, words: str
    ) -> None:
        self._shape, self._words = shape, words
        self._own_chunk = include_usage is True
        self._on_finish = include_usage is None and usage_default
        kind = OBJECTS[shape.route][1] + (".chunk" if shape.route == "chat" else "")
        self._top = {"id": public_id(shape.route, shape.name), "object": kind, "created": created, "model": model}
        self._begun: list[int] = []  # choices that said something
        self._at = 0  # the choice that is written
        self._ended: ChoiceEnd | None = None  # its finish may have to carry the usage
        self.over = False
        # A token's chunk is cut from one encoded by the general way, so that both look the same.
        self._before, self._after = self._chunk(0, shape.delta([Content("\0")]), None).split(b'"\\u0000"')

    def blocks(self, items: list[Item]) -> Iterator[bytes]:
        """The bytes of everything pending, in one write unless it is much.

        The end of the answer comes together with that of its last choice: where nothing is pending behind an end,
        others follow.
        """
        block = bytearray()
        for line in chain(chain.from_iterable(map(self._lines, items)), self._close()):
            block += line
            if len(block) >= BLOCK:
                yield bytes(block)
                block.clear()
        if block:
            yield bytes(block)

    def broken(self) -> bytes:
        """The end of a stream whose handler broke, on the choice it was at: no figures are known of it."""
        self._ended = None
        gone = Finish(request=0, finish="error", opened=True, code="internal_error")
        return b"".join(self._end(End(gone, choice=self._at), counted=False))

    def _lines(self, item: Item) -> Iterator[bytes]:
        match item:
            case Text(parts, logprobs, choice):
                yield from self._close()
                self._at = choice
                each = logprobs or [[]] * len(parts)
                for part, entries in zip(parts, each, strict=True):
                    yield from self._part(choice, part, entries)
            case Comment(text, reasoning, progress):
                yield b": " + " ".join(text.split()).encode() + b"\n\n"
                if reasoning:
                    yield from self._part(0, [Reasoning(text + "\n")], [])
                if progress is not None:
                    yield self._chunk(self._at, {}, None, {"progress": progress})
            case Beat():  # it says nothing, so not the role either
                yield self._chunk(self._at, {}, None)
            case ChoiceEnd():
                yield from self._close()
                self._ended, self._at = item, item.choice
            case End():
                self.over = True
                yield from self._end(item)

    def _part(self, choice: int, part: list[Delta], entries: list[Entry]) -> Iterator[bytes]:
        begun = choice in self._begun
        if begun and not entries and choice == 0 and len(part) == 1 and isinstance(part[0], Content):
            yield self._before + encode(part[0].text) + self._after
            return
        delta = self._shape.delta(part, choice)
        if not delta and not entries:
            return
        yield self._chunk(choice, self._opening(choice, delta), None, entries=entries)

    def _opening(self, choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        """A choice's first delta names the role."""
        if choice in self._begun:
            return delta
        self._begun.append(choice)
        if self._shape.route != "chat":
            return delta
        return {"role": "assistant", **({"content": None} if "tool_calls" in delta else {}), **delta}

    def _close(self) -> Iterator[bytes]:
        """The finish chunk of a choice that others follow."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._at = ended.choice + 1
            yield self._finish(ended.choice, ended.logprobs, *finish_words(ended, self._words))

    def _end(self, end: End, counted: bool = True) -> Iterator[bytes]:
        last: ChoiceEnd | End = end
        if self._ended is not None and end.closed:
            last, self._ended = self._ended, None
        yield from self._close()
        word, extra = finish_words(last, self._words)
        if self._on_finish and counted:
            extra |= figures(end.figures)
        yield self._finish(last.choice, last.logprobs, word, extra)
        if self._own_chunk and counted:
            yield b"data: " + encode({**self._top, "choices": [], **figures(end.figures)}) + b"\n\n"
        yield DONE

    def _finish(self, choice: int, entries: list[Entry], word: str, extra: dict[str, Any]) -> bytes:
        empty = {} if self._shape.route == "chat" and choice in self._begun else self._shape.delta([Content("")])
        return self._chunk(choice, self._opening(choice, empty), word, extra, entries)

    def _chunk(
        self, choice: int, delta: dict[str, Any], finish: str | None, extra: dict[str, Any] | None = None,
        entries: list[Entry] | None = None,
    ) -> bytes:  # fmt: skip
        route = self._shape.route
        content = {"delta": delta} if route == "chat" else {"text": "", **delta}
        logprobs = shaped(route, entries) if entries else None
        said = {"index": choice, **content, "logprobs": logprobs, "finish_reason": finish}
        null = {"usage": None} if self._own_chunk else {}
        return b"data: " + encode({**self._top, "choices": [said], **null, **(extra or {})}) + b"\n\n"
