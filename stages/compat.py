"""The one field table: what the server does with every field a client may send.

``honoured``: read and acted on. ``accepted``: without effect by its own definition (row A2). ``refused``: never served
(A3). ``later``: of the design, not built yet; until then a value that asks for nothing passes and any other is refused,
so that no wish is dropped in silence. A field that is not here is unknown and passes (A5).

Dotted names are fields of objects. The model served now does not think, so a request passes when it turns thinking
off or leaves it to the server, and is refused when it asks for some.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stages.refusal import Refusal, refuse
from stages.schema import ChatRequest, Request
from stages.thinking import ROWS, TOP, Thinking, at, read


class Answer(msgspec.Struct, frozen=True):
    """What becomes of a field. ``neutral`` values count as absent; ``hint`` says what to use in its place."""

    kind: str
    row: str
    neutral: tuple[object, ...] = ()
    hint: str = ""


HONOURED = Answer("honoured", "A1")
EXTENSION = Answer("honoured", "A4")
ACCEPTED = Answer("accepted", "A2")
REFUSED = Answer("refused", "A3")
USE_TOOLS = Answer("refused", "A3", hint="use tools")


def _later(row: str, *neutral: object) -> Answer:
    return Answer("later", row, neutral)


THINKING: dict[str, Answer] = {path: _later(row) for path, row in ROWS.items()}
"""The thinking shapes. ``stages.thinking`` reads them all into one wish, and that wish is judged, not each field."""

COMMON: dict[str, Answer] = {
    "model": HONOURED,
    "stream": HONOURED,
    "stream_options": HONOURED,
    "stream_options.include_usage": HONOURED,
    "stream_options.include_obfuscation": ACCEPTED,
    "stream_options.continuous_usage_stats": Answer("accepted", "A10"),
    "stream_options.include_progress": _later("L8", False),
    "max_tokens": HONOURED,
    "max_completion_tokens": HONOURED,
    "stop": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "seed": HONOURED,
    "top_k": EXTENSION,
    "min_p": EXTENSION,
    "n": _later("F11", 1),
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "repetition_penalty": EXTENSION,
    "no_repeat_ngram_size": _later("A4", 0),
    "logit_bias": HONOURED,
    "logprobs": HONOURED,
    "response_format": _later("E1"),
    "structured_outputs": _later("E1", {}),
    "guided_json": _later("E1"),
    "guided_regex": _later("E1"),
    "guided_choice": _later("E1"),
    "ignore_eos": EXTENSION,
    "min_tokens": EXTENSION,
    "stop_token_ids": EXTENSION,
    "reasoning_format": _later("B10", "auto", "none"),
    "include_reasoning": Answer("accepted", "B10"),  # no thinking: nothing to show or to hide
    "draft_temperature": Answer("accepted", "A4"),  # of a drafter's proposals only: never changes the text
    "user": ACCEPTED,
    **THINKING,
}

FIELDS: dict[str, dict[str, Answer]] = {
    "chat": {
        "messages": HONOURED,
        "modalities": HONOURED,
        **COMMON,
        "top_logprobs": HONOURED,
        "tools": _later("D1", []),
        "tool_choice": _later("D5", "none", "auto"),
        "parallel_tool_calls": _later("D6", True, False),  # of tools only, which are refused themselves
        "metadata": ACCEPTED,
        "store": ACCEPTED,
        "service_tier": ACCEPTED,
        "prompt_cache_key": ACCEPTED,
        "prompt_cache_retention": ACCEPTED,
        "prompt_cache_options": ACCEPTED,
        "safety_identifier": ACCEPTED,
        "prediction": ACCEPTED,
        "audio": REFUSED,
        "functions": USE_TOOLS,
        "function_call": USE_TOOLS,
        "web_search_options": REFUSED,
        "verbosity": REFUSED,
        "moderation": REFUSED,
    },
    "completions": {
        "prompt": HONOURED,
        **COMMON,
        "suffix": Answer("refused", "A3", ("",)),
        "echo": Answer("refused", "A3", (False,)),
        "best_of": Answer("refused", "A3", (1,)),
    },
}
"""By route, then by field."""


def refused_field(request: Request) -> Refusal | None:
    """A malformed thinking shape; else the first field that asks for what is not served (``unsupported_parameter``)."""
    shapes = {name: getattr(request, name) for name in TOP}
    thinking = read(shapes)
    if isinstance(thinking, Refusal):
        return thinking
    fields = FIELDS["chat" if isinstance(request, ChatRequest) else "completions"]
    for path, answer in fields.items():
        if path not in THINKING and answer.kind in ("refused", "later") and _asks(request, path, answer):
            return _refusal(path, answer)
    return _thinks(thinking, shapes) or _unknown_template_field(request)


def _thinks(thinking: Thinking, shapes: dict[str, object]) -> Refusal | None:
    """No model thinks yet. A lone 0 passes: where nothing is thought, nothing is lost by having no cap."""
    if not thinking.on or at(shapes, thinking.switch) == 0:
        return None
    return _refusal(thinking.switch, THINKING[thinking.switch])


def _asks(request: Request, path: str, answer: Answer) -> bool:
    value = _value(request, path)
    if value is None or any(_same(value, neutral) for neutral in answer.neutral):
        return False
    match path:
        case "tools":
            return getattr(request, "tool_choice", None) != "none"
        case "best_of":
            return not _same(value, request.n or 1)
        case "response_format":
            return not (isinstance(value, dict) and value.get("type") == "text")
    return True


def _value(request: Request, path: str) -> Any:
    """What the request holds at a dotted path, None where nothing is."""
    value: Any = request
    for name in path.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        else:
            value = getattr(value, name, None) if isinstance(value, msgspec.Struct) else None
    return value


def _same(value: object, neutral: object) -> bool:
    """Equality as JSON means it: ``false`` is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _refusal(path: str, answer: Answer) -> Refusal:
    state = "is not supported yet by this server" if answer.kind == "later" else "is not supported"
    advice = answer.hint or "leave it out"
    return refuse("unsupported_parameter", path, f"{path} {state}: {advice}.")


def _unknown_template_field(request: Request) -> Refusal | None:
    """A template's own variable would change the prompt: it is not dropped in silence either."""
    kwargs = request.chat_template_kwargs or {}
    for name, value in kwargs.items():
        path = f"chat_template_kwargs.{name}"
        if value is not None and path not in THINKING:
            return _refusal(path, THINKING["chat_template_kwargs"])
    return None
