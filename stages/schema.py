"""The body of a request as typed records.

What this file knows: the JSON types of the fields, and how a wrong one is said. What it does not: ranges, roles and
order (``validate``), and which fields are served (``compat``). Fields that are refused are declared as ``Any``: they
arrive here untouched, so that ``compat`` can tell a neutral value from a wish; so do the thinking shapes, which
``thinking`` types itself. Fields without an entry here are dropped, which is how unknown ones pass (row A5).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stages.refusal import Refusal, refuse

MAX_DEPTH = 128
"""Levels of nesting (row A14)."""


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A call in the history. ``arguments`` is JSON as text; some clients send the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an assistant message of the history."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class Message(msgspec.Struct, frozen=True):
    """One message. What it holds beside these fields has no meaning for a template and is dropped."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """A tool's name and the schema of its parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True):
    """One offered tool. Only its types are read here: what a template and a reader get is the client's own object."""

    type: str | None = None
    function: ToolFunction | None = None


class _Tools(msgspec.Struct, frozen=True):
    tools: list[Tool]


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage`` None: not said (row F1 tells the three apart)."""

    include_usage: bool | None = None
    include_progress: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes read. None is absent everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # validate judges keys and values: msgspec would not name the key
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None

    no_repeat_ngram_size: int | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None

    reasoning_format: str | None = None
    include_reasoning: Any = None
    reasoning_effort: Any = None
    reasoning: Any = None
    enable_thinking: Any = None
    think: Any = None
    thinking: Any = None
    output_config: Any = None
    thinking_config: Any = None
    thinkingConfig: Any = None  # noqa: N815 - the client's spelling
    extra_body: Any = None
    nvext: Any = None
    custom_params: Any = None
    chat_template_kwargs: Any = None
    chat_template_args: Any = None
    max_reasoning_tokens: Any = None
    thinking_budget: Any = None
    thinking_token_budget: Any = None
    thinking_budget_tokens: Any = None
    reasoning_budget: Any = None
    reasoning_budget_tokens: Any = None
    max_thinking_tokens: Any = None
    reasoning_tokens: Any = None


class ChatRequest(Common, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    modalities: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    moderation: Any = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt`` is a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None  # false, chat's word for none, asks for none here too

    suffix: Any = None
    echo: Any = None
    best_of: Any = None


Request = ChatRequest | CompletionRequest

_COUNTS = "max_tokens max_completion_tokens top_k seed n min_tokens stop_token_ids no_repeat_ngram_size"
INTEGERS = tuple(_COUNTS.split())
"""Fields whose 1024.0 is read as 1024, in a list too."""

# The hook reads 1e999 as infinity, so that a field's range check names it; without it the whole body would be at fault.
_parser = msgspec.json.Decoder(float_hook=float)

_LONE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_BYTE = re.compile(r"\(byte (\d+)\)")
_EXPECTED = re.compile(r"Expected `(.+?)`, got `(.+?)`")
_MISSING = re.compile(r"missing required field `(\w+)`")
_PATH = re.compile(r"- at `\$\.?(.*)`$")
_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def decode(route: str, body: bytes) -> Request | Refusal:
    """The request in ``body``; ``route`` is "chat" or "completions". Never raises for what a client sent."""
    fields = parse(body)
    return fields if isinstance(fields, Refusal) else shape(route, fields)


def parse(body: bytes) -> dict[str, Any] | Refusal:
    """The body's fields, as JSON gives them, those that are null left out; else ``invalid_json``."""
    try:
        value = _parser.decode(body)
    except RecursionError:
        return _deep()
    except msgspec.ValidationError:  # an integer of thousands of digits: the parser names no field
        return refuse("invalid_json", None, "The body holds a number with too many digits.")
    except msgspec.DecodeError as error:
        return refuse("invalid_json", None, _malformed(body, str(error)))
    if not isinstance(value, dict):
        return refuse("invalid_json", None, f"The body must be a JSON object, not {_got(value)}.")
    if deeper_than(value, MAX_DEPTH):
        return _deep()
    return {name: entry for name, entry in value.items() if entry is not None}


def shape(route: str, fields: dict[str, Any]) -> Request | Refusal:
    """The typed request; else ``invalid_type``, ``invalid_value`` or ``missing_required_parameter`` with the path."""
    whole = {name: _whole(fields[name]) for name in INTEGERS if name in fields}
    try:
        if route == "chat":
            if isinstance(fields.get("tools"), list):
                msgspec.convert({"tools": fields["tools"]}, _Tools)
            return msgspec.convert(fields | whole, ChatRequest)
        return msgspec.convert(fields | whole, CompletionRequest)
    except msgspec.ValidationError as error:
        return _mistyped(str(error))


def _whole(value: object) -> object:
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _deep() -> Refusal:
    return refuse("invalid_json", None, f"The body is nested more than {MAX_DEPTH} levels deep.")


def deeper_than(body: object, limit: int) -> bool:
    """Whether containers lie more than ``limit`` levels inside each other; each round goes one level down."""
    level = [body]
    for _ in range(limit):
        level = [child for node in level for child in _children(node) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node


def _malformed(body: bytes, error: str) -> str:
    """Our own words for the parser's. It calls a lone surrogate at a string's end "truncated"."""
    truncated = "truncated" in error
    if "surrogate" in error or (truncated and _LONE.search(body)):
        return "The body holds half a surrogate pair: an escape from \\ud800 to \\udfff needs its other half."
    if "UTF-8" in error:
        return "The body is not valid UTF-8."
    if truncated:
        return "The body ends before its JSON does."
    at = _BYTE.search(error)
    return f"The body is not valid JSON (near byte {at[1]})." if at else "The body is not valid JSON."


def _got(value: object) -> str:
    kinds = ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), (list, "array"))
    return next((_WORDS[word] for kind, word in kinds if isinstance(value, kind)), "null")


def _mistyped(error: str) -> Refusal:
    """A refusal from msgspec's sentence: ``$.messages[0].role`` becomes ``messages[0].role``, types plain words."""
    at = _PATH.search(error)
    path = at[1] if at else ""
    missing = _MISSING.search(error)
    if missing:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return refuse("missing_required_parameter", name, f"{name} is missing.")
    expected = _EXPECTED.search(error)
    if expected is None:
        return refuse("invalid_value", path, f"{path} is out of range.")
    wanted = " or ".join(_WORDS.get(word, word) for word in expected[1].split(" | ") if word != "null")
    return refuse("invalid_type", path, f"{path} must be {wanted}, not {_WORDS.get(expected[2], expected[2])}.")
