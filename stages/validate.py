"""The shape of a request: roles, order, ranges (rows A6, A6a) and the model's name (A9).

Types were settled by ``schema``; what is served and what is not is ``compat``'s. The first fault found is the answer.
"""

from __future__ import annotations

import re
from math import inf
from typing import Any

import msgspec

from stages.refusal import Refusal, quoted, refuse
from stages.schema import ChatRequest, CompletionRequest, Message, Part, Request, Tool

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM = ("system", "developer")
MAX_STOPS = 16
MAX_CHOICES = 16
CHAT_LOGPROBS = (0, 20)
COMPLETION_LOGPROBS = (0, 5)
PENALTIES = (-2, 2)
BIASES = (-100, 100)
SEEDS = (-(1 << 63), (1 << 63) - 1)


_ID = re.compile(r"0|[1-9][0-9]{0,17}")  # one spelling for each token id, so that no two keys mean the same


class Rules(msgspec.Struct, frozen=True):
    """What the settings say about requests. ``model`` is the name served; others are a 404 only when strict."""

    strict_model: bool = False
    model: str = ""


def validate(request: Request, rules: Rules) -> Refusal | None:
    """The first fault of the request's shape, None when it is well formed."""
    return (
        unknown_model(request.model, rules)
        or (_chat(request) if isinstance(request, ChatRequest) else _completion(request))
        or _limits(request)
        or _ranges(request)
        or _stop(request.stop)
        or _logprobs(request)
    )


def unknown_model(name: object, rules: Rules) -> Refusal | None:
    """With ``--strict-model``: ``model_not_found`` for another name. A name of a wrong type is left to ``schema``."""
    if not rules.strict_model or name == rules.model:
        return None
    if name is None:
        return refuse("missing_required_parameter", "model", "model is missing.")
    return refuse("model_not_found", "model", f"There is no model {quoted(name)}.") if isinstance(name, str) else None


def prompt_of(request: CompletionRequest) -> str | list[int] | Refusal:
    """The one prompt: a text or token ids. A list of exactly one of either counts as one."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt or _empty_prompt()
    if not prompt:
        return _empty_prompt()
    if len({type(item) for item in prompt}) > 1:
        return refuse(
            "invalid_type", "prompt", "prompt must hold texts, token ids or lists of token ids, not a mixture."
        )
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        return ids
    if len(prompt) > 1:
        return refuse(
            "unsupported_parameter", "prompt", "A prompt that is a list of prompts is not supported yet: send one."
        )
    only = prompt[0]
    return only if only and not isinstance(only, int) else _empty_prompt()


# -- chat ----------------------------------------------------------------------------------------------------------


def _chat(request: ChatRequest) -> Refusal | None:
    return (
        _messages(request.messages)
        or _order(request.messages)
        or _modalities(request.modalities)
        or _tools(request.tools)
        or _tool_choice(request)
    )


def _messages(messages: list[Message]) -> Refusal | None:
    if not messages:
        return refuse("invalid_value", "messages", "messages must hold at least one message.")
    faults = (_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    return next((fault for fault in faults if fault), None)


def _message(path: str, message: Message) -> Refusal | None:
    role, content = message.role, message.content
    if role == "function":
        return refuse(
            "invalid_value", f"{path}.role", "The role 'function' is not supported: use tools and the role 'tool'."
        )
    if role not in ROLES:
        return refuse("invalid_value", f"{path}.role", f"{quoted(role)} is not a role: use one of {', '.join(ROLES)}.")
    if content is None and role not in ("assistant", "tool"):
        return refuse("missing_required_parameter", f"{path}.content", f"{path}.content is missing.")
    if not isinstance(content, list):
        return None
    faults = (_part(f"{path}.content[{index}]", part) for index, part in enumerate(content))
    return next((fault for fault in faults if fault), None)


def _part(path: str, part: Part) -> Refusal | None:
    match part.type:
        case "text" | "refusal":
            text = part.text if part.type == "text" else part.refusal
            name = f"{path}.{part.type}"
            return refuse("missing_required_parameter", name, f"{name} is missing.") if text is None else None
        case "image_url":
            return refuse("unsupported_value", path, "The served model reads no images: send text.")
        case "input_audio" | "audio_url" | "video_url" | "input_video" | "file":
            return refuse("unsupported_value", path, f"Parts of type {quoted(part.type)} are not supported: send text.")
    return refuse("invalid_value", f"{path}.type", f"{quoted(part.type)} is not a type of part: use 'text'.")


def _order(messages: list[Message]) -> Refusal | None:
    """Row A6: what the messages must hold together. Called once every role is known."""
    roles = [message.role for message in messages]
    begun = next((index for index, role in enumerate(roles) if role not in SYSTEM), None)
    if begun is None:
        return refuse("invalid_value", "messages", "messages holds a system prompt alone: add a user message.")
    for index in range(begun, len(roles)):
        if roles[index] in SYSTEM:
            text = f"A {roles[index]} message cannot stand after the conversation began: put it first."
            return refuse("invalid_value", f"messages[{index}].role", text)
    if "tool" in roles and "user" not in roles:
        return refuse("invalid_value", "messages", "messages holds tool results but no user message.")
    return None


def _modalities(modalities: list[str] | None) -> Refusal | None:
    other = next((word for word in modalities or [] if word != "text"), None)
    if other is None:
        return None
    return refuse("unsupported_value", "modalities", f"The modality {quoted(other)} is not supported: only 'text' is.")


def _tools(tools: list[Tool] | None) -> Refusal | None:
    for index, tool in enumerate(tools or []):
        name = f"tools[{index}].function.name"
        if tool.function is None:
            return refuse("missing_required_parameter", name, f"{name} is missing.")
        if not tool.function.name:
            return refuse("invalid_value", name, f"{name} is empty.")
    return None


def _tool_choice(request: ChatRequest) -> Refusal | None:
    """Without tools nothing can be required or named (row D5)."""
    choice = request.tool_choice
    if request.tools or choice in (None, "none", "auto"):
        return None
    if choice == "required" or isinstance(choice, dict):
        return refuse("invalid_value", "tool_choice", "tool_choice asks for a tool, but tools offers none.")
    if isinstance(choice, str):
        return refuse("invalid_value", "tool_choice", f"{quoted(choice)} is not a tool choice.")
    return refuse("invalid_type", "tool_choice", "tool_choice must be a string or an object.")


# -- both routes ---------------------------------------------------------------------------------------------------


def _completion(request: CompletionRequest) -> Refusal | None:
    prompt = prompt_of(request)
    return prompt if isinstance(prompt, Refusal) else None


def _empty_prompt() -> Refusal:
    return refuse("invalid_value", "prompt", "prompt is empty.")


def _limits(request: Request) -> Refusal | None:
    for name, value in (("max_completion_tokens", request.max_completion_tokens), ("max_tokens", request.max_tokens)):
        if value is not None and value < 1:
            return refuse("invalid_value", name, f"{name} must be at least 1.")
    return None


def _ranges(request: Request) -> Refusal | None:
    return (
        _within("temperature", request.temperature, 0, 2)
        or _within("top_p", request.top_p, 0, 1)
        or _within("min_p", request.min_p, 0, 1)
        or _within("n", request.n, 1, MAX_CHOICES)
        or _within("seed", request.seed, *SEEDS)
        or _within("presence_penalty", request.presence_penalty, *PENALTIES)
        or _within("frequency_penalty", request.frequency_penalty, *PENALTIES)
        or _repetition(request.repetition_penalty)
        or _min_tokens(request.min_tokens)
        or _top_k(request.top_k)
        or _biases(request.logit_bias or {})
    )


def _within(name: str, value: float | None, low: int, high: int) -> Refusal | None:
    if value is None or low <= value <= high:
        return None
    return refuse("invalid_value", name, f"{name} must be between {low} and {high}.")


def _logprobs(request: Request) -> Refusal | None:
    """Chat: a switch and a count, which needs the switch; a count of 0 asks for nothing. Completions: a count."""
    if isinstance(request, CompletionRequest):
        if request.logprobs is True:
            return refuse("invalid_type", "logprobs", "logprobs must be an integer: how many alternatives to list.")
        return _within("logprobs", request.logprobs or 0, *COMPLETION_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        return refuse("invalid_value", "top_logprobs", "top_logprobs needs logprobs: set logprobs to true.")
    return _within("top_logprobs", request.top_logprobs, *CHAT_LOGPROBS)


def _top_k(value: int | None) -> Refusal | None:
    if value is None or value >= -1:
        return None
    return refuse("invalid_value", "top_k", "top_k must be at least -1; -1 and 0 turn it off.")


def _repetition(value: float | None) -> Refusal | None:
    if value is None or 0 < value < inf:
        return None
    return refuse("invalid_value", "repetition_penalty", "repetition_penalty must be over 0; 1 turns it off.")


def _min_tokens(value: int | None) -> Refusal | None:
    if value is None or value >= 0:
        return None
    return refuse("invalid_value", "min_tokens", "min_tokens must be at least 0.")


def _biases(biases: dict[str, Any]) -> Refusal | None:
    """Keys are token ids, values numbers in range or null. Which ids there are is known later: ``foreign_id``."""
    for key, value in biases.items():
        name = f"logit_bias.{key}"
        if not _ID.fullmatch(key):
            return refuse("invalid_value", name, f"The keys of logit_bias must be token ids, not {quoted(key)}.")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            return refuse("invalid_type", name, f"{name} must be a number.")
        fault = _within(name, value, *BIASES)
        if fault:
            return fault
    return None


def foreign_id(request: Request, vocab: int) -> Refusal | None:
    """The first id that is none of the checkpoint's ``vocab`` tokens. Called once the vocabulary is known."""
    named = [(f"logit_bias.{key}", int(key)) for key in request.logit_bias or {}]
    named += [(f"stop_token_ids[{index}]", token) for index, token in enumerate(request.stop_token_ids or [])]
    for name, token in named:
        if not 0 <= token < vocab:
            text = f"{name} names a token that is not there: this model's vocabulary is 0 to {vocab - 1}."
            return refuse("invalid_value", name, text)
    return None


def _stop(stop: str | list[str] | None) -> Refusal | None:
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        return refuse("invalid_value", "stop", f"stop must hold at most {MAX_STOPS} strings.")
    for index, text in enumerate(stops):
        if not text:
            name = "stop" if isinstance(stop, str) else f"stop[{index}]"
            return refuse("invalid_value", name, f"{name} is empty.")
    return None
