"""The shapes of an answer: a stream's lines and chunks, and the whole JSON. Plain functions of text and figures.

Usage stands in exactly one place (F1): on the finish chunk by default, on an own last chunk with empty ``choices``
where the client asked for it, nowhere where it declined. Timings stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pipeline.effects import Finish
from pipeline.outbox import Comment, End, Item, Text
from pipeline.outcomes import error_object
from stages.logprobs import Entry, shaped
from stages.usage import timings, usage

encode = msgspec.json.Encoder().encode

BLOCK = 64 << 10
"""Bytes of one write. One round's tokens are far below; what a slow reader left pending goes out in pieces."""
DONE = b"data: [DONE]\n\n"
OBJECTS = {"chat": ("chatcmpl-", "chat.completion"), "completions": ("cmpl-", "text_completion")}


def public_id(route: str, name: str) -> str:
    """The request's id as its client sees it."""
    return OBJECTS[route][0] + name


def figures(end: Finish) -> dict[str, Any]:
    """Usage and timings of an ended request."""
    return {
        "usage": usage(end.prompt_tokens, end.completion_tokens, end.cached_tokens),
        "timings": timings(
            prompt_n=end.prompt_tokens - end.cached_tokens,
            prompt_ms=end.prompt_ms,
            predicted_n=end.completion_tokens,
            predicted_ms=end.predicted_ms,
            cache_n=end.cached_tokens,
            queue_ms=end.queue_ms,
            ttft_ms=end.ttft_ms,
            total_ms=end.total_ms,
        ),
    }


def finish_words(end: End, words: str) -> tuple[str, dict[str, Any]]:
    """The finish reason, and the error object beside it. ``words`` "openai" knows neither ``timeout`` nor ``error``."""
    word = end.figures.finish
    if not end.figures.code or (words == "openai" and word == "timeout"):
        error: dict[str, Any] = {}
    else:
        error = error_object(end.figures.code, end.message, end.param)
    return ({"timeout": "length", "error": "stop"}.get(word, word) if words == "openai" else word), error


class Stream:
    """One stream's bytes. ``include_usage`` None: the client does not say, ``usage_default`` decides."""

    def __init__(
        self, *, route: str, name: str, created: int, model: str, include_usage: bool | None, usage_default: bool,
        words: str,
    ) -> None:  # fmt: skip
        self._route, self._words = route, words
        self._own_chunk = include_usage is True
        self._on_finish = include_usage is None and usage_default
        kind = OBJECTS[route][1] + (".chunk" if route == "chat" else "")
        self._top = {"id": public_id(route, name), "object": kind, "created": created, "model": model}
        self._begun = False
        self.over = False
        # A token's chunk is cut from one encoded by the general way, so that both look the same.
        self._before, self._after = self._chunk(self._content("\0"), None).split(b'"\\u0000"')

    def blocks(self, items: list[Item]) -> Iterator[bytes]:
        """The bytes of everything pending, in one write unless it is much."""
        block = bytearray()
        for item in items:
            for data in self._lines(item):
                block += data
                if len(block) >= BLOCK:
                    yield bytes(block)
                    block.clear()
        if block:
            yield bytes(block)

    def broken(self) -> bytes:
        """The end of a stream whose handler broke."""
        gone = Finish(request=0, finish="error", opened=True, code="internal_error")
        return b"".join(self._end(End(gone), counted=False))

    def _lines(self, item: Item) -> Iterator[bytes]:
        match item:
            case Text(pieces, logprobs):
                each = logprobs or [[]] * len(pieces)
                yield from (self._piece(piece, entries) for piece, entries in zip(pieces, each, strict=True) if piece)
            case Comment(text):
                yield b": " + " ".join(text.split()).encode() + b"\n\n"
            case End():
                self.over = True
                yield from self._end(item)

    def _piece(self, text: str, entries: list[Entry]) -> bytes:
        if self._begun and not entries:
            return self._before + encode(text) + self._after
        role = {"role": "assistant"} if self._route == "chat" and not self._begun else {}
        self._begun = True
        return self._chunk(self._content(text, role), None, entries=entries)

    def _end(self, end: End, counted: bool = True) -> Iterator[bytes]:
        word, extra = finish_words(end, self._words)
        if self._on_finish and counted:
            extra |= figures(end.figures)
        last = self._content("", {"role": "assistant"} if self._route == "chat" else {})
        if self._begun and self._route == "chat":
            last = {"delta": {}}
        yield self._chunk(last, word, extra, end.logprobs)
        if self._own_chunk and counted:
            yield b"data: " + encode({**self._top, "choices": [], **figures(end.figures)}) + b"\n\n"
        yield DONE

    def _content(self, text: str, role: dict[str, str] | None = None) -> dict[str, Any]:
        if self._route == "chat":
            return {"delta": {**(role or {}), "content": text}}
        return {"text": text}

    def _chunk(
        self, content: dict[str, Any], finish: str | None, extra: dict[str, Any] | None = None,
        entries: list[Entry] | None = None,
    ) -> bytes:  # fmt: skip
        logprobs = shaped(self._route, entries) if entries else None
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}
        null = {"usage": None} if self._own_chunk else {}
        return b"data: " + encode({**self._top, "choices": [choice], **null, **(extra or {})}) + b"\n\n"


def whole(
    *, route: str, name: str, created: int, model: str, text: str, logprobs: list[Entry] | None, end: End, words: str
) -> dict[str, Any]:
    """The answer to a request without a stream. ``logprobs``: those of its text, None where not asked for."""
    word, error = finish_words(end, words)
    told = None if logprobs is None else shaped(route, [*logprobs, *end.logprobs])
    content: dict[str, Any] = {"text": text}
    if route == "chat":
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    return {
        "id": public_id(route, name),
        "object": OBJECTS[route][1],
        "created": created,
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": told, "finish_reason": word}],
        **figures(end.figures),
        **error,
    }
