"""The shapes of an answer: what a delta, a whole choice and the figures look like on each route.

Plain functions of deltas and figures. Rows B2 to B4 (where the thinking stands), D2 (calls), F4 and F5.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.effects import Finish
from pipeline.outbox import ChoiceEnd, End, Text
from pipeline.outcomes import error_object
from stages.calls import Arguments, CallOpened, Content, Delta, Reasoning
from stages.logprobs import Entry, shaped
from stages.message import assembled
from stages.usage import timings, usage

encode = msgspec.json.Encoder().encode

OBJECTS = {"chat": ("chatcmpl-", "chat.completion"), "completions": ("cmpl-", "text_completion")}


def public_id(route: str, name: str) -> str:
    """The request's id as its client sees it."""
    return OBJECTS[route][0] + name


def call_id(name: str, choice: int, index: int) -> str:
    """The id of a call: of the request's ``name`` (24 hex digits), its choice and its place in it."""
    return f"call_{name}{choice:02x}{index:04x}"


def figures(end: Finish) -> dict[str, Any]:
    """Usage and timings of an ended request."""
    return {
        "usage": usage(end.prompt_tokens, end.completion_tokens, end.cached_tokens, end.reasoning_tokens),
        "timings": timings(
            prompt_n=end.prompt_tokens - end.cached_tokens,
            prompt_ms=end.prompt_ms,
            predicted_n=end.completion_tokens,
            predicted_ms=end.predicted_ms,
            cache_n=end.cached_tokens,
            draft_n=end.drafted,
            draft_n_accepted=end.accepted,
            queue_ms=end.queue_ms,
            ttft_ms=end.ttft_ms,
            total_ms=end.total_ms,
        ),
    }


def finish_words(end: End | ChoiceEnd, words: str) -> tuple[str, dict[str, Any]]:
    """The finish reason, and the error object beside it. ``words`` "openai" knows neither ``timeout`` nor ``error``."""
    if isinstance(end, ChoiceEnd):
        word, code, message, param = end.finish, end.code, "", None
    else:
        word, code, message, param = end.figures.finish, end.figures.code, end.message, end.param
    told = code and not (words == "openai" and word == "timeout")
    error: dict[str, Any] = error_object(code, message, param) if told else {}
    return ({"timeout": "length", "error": "stop"}.get(word, word) if words == "openai" else word), error


class Shape(msgspec.Struct, frozen=True):
    """One answer's shape. ``both_keys``: the thinking under ``reasoning`` too (row B4)."""

    route: str
    name: str
    both_keys: bool = False

    def delta(self, part: list[Delta], choice: int = 0) -> dict[str, Any]:
        """What one token let go, as a chunk says it; {} for nothing a client sees."""
        content = "".join(delta.text for delta in part if isinstance(delta, Content))
        texts = any(isinstance(delta, Content) for delta in part)
        if self.route != "chat":
            return {"text": content} if texts else {}
        reasoning = "".join(delta.text for delta in part if isinstance(delta, Reasoning))
        calls = self._calls(part, choice)
        return {
            **self._reasoning(reasoning),
            **({"content": content} if texts else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def message(self, deltas: list[Delta], choice: int) -> dict[str, Any]:
        """A whole choice's message or text."""
        content, reasoning, calls = assembled(deltas)
        if self.route != "chat":
            return {"text": content or ""}
        told = [
            {"id": call_id(self.name, choice, index), "type": "function", "function": {"name": name, "arguments": args}}
            for index, name, args in calls
        ]
        message = {"role": "assistant", "content": content, "refusal": None, **self._reasoning(reasoning)}
        return {"message": {**message, **({"tool_calls": told} if told else {})}}

    def _reasoning(self, text: str) -> dict[str, Any]:
        if not text:
            return {}
        return {"reasoning_content": text, **({"reasoning": text} if self.both_keys else {})}

    def _calls(self, part: list[Delta], choice: int) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for delta in part:
            match delta:
                case CallOpened(index, name):
                    function = {"name": name, "arguments": ""}
                    id = call_id(self.name, choice, index)
                    calls.append({"index": index, "id": id, "type": "function", "function": function})
                case Arguments(index, piece):
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += piece
        return calls


class Whole:
    """A request without a stream: what its choices say, until all is there."""

    def __init__(self, shape: Shape, logprobs: bool) -> None:
        self._shape, self._logprobs = shape, logprobs
        self._deltas: dict[int, list[Delta]] = {}
        self._entries: dict[int, list[Entry]] = {}
        self._ends: dict[int, ChoiceEnd] = {}

    def add(self, item: Text | ChoiceEnd) -> None:
        """What came next."""
        entries = self._entries.setdefault(item.choice, [])
        deltas = self._deltas.setdefault(item.choice, [])
        if isinstance(item, ChoiceEnd):
            self._ends[item.choice] = item
            entries += item.logprobs
            return
        deltas += [delta for part in item.parts for delta in part]
        entries += [entry for group in item.logprobs for entry in group]

    def answer(self, end: End, created: int, model: str, words: str) -> dict[str, Any]:
        """The JSON. A choice that nothing ended ends as the request does. One error object stands for all of them."""
        word, error = finish_words(end, words)
        self._deltas.setdefault(end.choice, [])
        self._entries.setdefault(end.choice, []).extend(end.logprobs)
        route, name = self._shape.route, self._shape.name
        return {
            "id": public_id(route, name),
            "object": OBJECTS[route][1],
            "created": created,
            "model": model,
            "choices": [self._choice(choice, word, words) for choice in sorted(self._deltas)],
            **figures(end.figures),
            **error,
        }

    def _choice(self, choice: int, word: str, words: str) -> dict[str, Any]:
        told = shaped(self._shape.route, self._entries[choice]) if self._logprobs else None
        message = self._shape.message(self._deltas[choice], choice)
        ended = self._ends.get(choice)
        finish = finish_words(ended, words)[0] if ended else word
        return {"index": choice, **message, "logprobs": told, "finish_reason": finish}
