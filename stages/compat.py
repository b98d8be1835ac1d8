"""The one field table: what the server does with every field a client may send.

``honoured``: read and acted on. ``accepted``: without effect by its own definition (row A2). ``refused``: never served
(A3): a value that asks for nothing passes, any other is refused, so that no wish is dropped in silence. A field that is
not here is unknown and passes (A5).

Dotted names are fields of objects. A template's own variables pass to it (``chat_template_kwargs``), but for the names
that the server itself gives a template: with those a client would write the prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stages.refusal import Refusal, refuse
from stages.schema import ChatRequest, Request
from stages.thinking import ROWS


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

THINKING: dict[str, Answer] = {path: Answer("honoured", row) for path, row in ROWS.items()}
"""The thinking shapes. ``stages.thinking`` reads them all into one wish."""

_OURS = """
messages tools documents add_generation_prompt continue_final_message chat_template tokenize return_dict
bos_token eos_token pad_token unk_token strftime_now raise_exception
"""
RESERVED = frozenset(_OURS.split())
"""Names in ``chat_template_kwargs`` that are the server's to give."""

COMMON: dict[str, Answer] = {
    "model": HONOURED,
    "stream": HONOURED,
    "stream_options": HONOURED,
    "stream_options.include_usage": HONOURED,
    "stream_options.include_obfuscation": ACCEPTED,
    "stream_options.continuous_usage_stats": Answer("accepted", "A10"),
    "stream_options.include_progress": Answer("honoured", "L8"),
    "max_tokens": HONOURED,
    "max_completion_tokens": HONOURED,
    "stop": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "seed": HONOURED,
    "top_k": EXTENSION,
    "min_p": EXTENSION,
    "n": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "repetition_penalty": EXTENSION,
    "no_repeat_ngram_size": EXTENSION,
    "logit_bias": HONOURED,
    "logprobs": HONOURED,
    "response_format": HONOURED,
    "structured_outputs": EXTENSION,
    "guided_json": EXTENSION,
    "guided_regex": EXTENSION,
    "guided_choice": EXTENSION,
    "ignore_eos": EXTENSION,
    "min_tokens": EXTENSION,
    "stop_token_ids": EXTENSION,
    "reasoning_format": EXTENSION,
    "include_reasoning": Answer("honoured", "B10"),
    "reasoning.exclude": Answer("honoured", "B10"),
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
        "tools": HONOURED,
        "tool_choice": HONOURED,
        "parallel_tool_calls": HONOURED,
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
    """The first field that asks for what is not served (``unsupported_parameter``)."""
    fields = FIELDS["chat" if isinstance(request, ChatRequest) else "completions"]
    for path, answer in fields.items():
        if answer.kind == "refused" and _asks(request, path, answer):
            return _refusal(path, answer)
    return _reserved(request)


def _asks(request: Request, path: str, answer: Answer) -> bool:
    value = _value(request, path)
    if value is None or any(_same(value, neutral) for neutral in answer.neutral):
        return False
    return path != "best_of" or not _same(value, request.n or 1)


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
    advice = answer.hint or "leave it out"
    return refuse("unsupported_parameter", path, f"{path} is not supported: {advice}.")


def _reserved(request: Request) -> Refusal | None:
    for name, value in (request.chat_template_kwargs or {}).items():
        if value is not None and name in RESERVED:
            path = f"chat_template_kwargs.{name}"
            return refuse("unsupported_parameter", path, f"{path} is set by the server: leave it out.")
    return None
