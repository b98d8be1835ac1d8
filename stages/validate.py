"""The shape of a request: roles, order, ranges (rows A6, A6a) and the model's name (A9).

Types were settled by ``schema``; what is served and what is not is ``compat``'s. The first fault found is the answer.
"""

from __future__ import annotations

import re
from math import inf
from typing import Any

import msgspec

from stages.offer import malformed
from stages.refusal import Refusal, joined, quoted, refuse
from stages.schema import ChatRequest, CompletionRequest, Message, Part, Request
from stages.thinking import DEFAULTS, Defaults, boolean

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM = ("system", "developer")
MAX_STOPS = 16
MAX_CHOICES = 16
MAX_PROMPTS = 16
FORMATS = {
    "tags": "tags",
    "none": "tags",
    "raw": "tags",
    "reasoning_content": "reasoning_content",
    "deepseek": "reasoning_content",
    "parsed": "reasoning_content",
    "both": "both",
    "deepseek-legacy": "both",
    "hidden": "hidden",
    "auto": "auto",
}
"""Every word of ``reasoning_format`` (rows B1 to B3, B10), and the one of ours it means; ``auto``: the server's."""
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
    mid_system: str = "refuse"
    """``refuse`` or ``fold``: system messages after the conversation began (row A12)."""
    reasoning_format: str = "tags"
    """``tags``, ``reasoning_content`` or ``both``, where a request names none (rows B1 to B3)."""
    thinking: Defaults = DEFAULTS
    answer_reserve: int = -1
    """Tokens kept for the answer (row C4): 0 none, -1 ``auto``."""
    think_stall: bool = True
    plan: bool = True
    """Whether a plan is on (row Q1); without one it is the raw path."""


def validate(request: Request, rules: Rules) -> Refusal | None:
    """The first fault of the request's shape, None when it is well formed."""
    return (
        unknown_model(request.model, rules)
        or (_chat(request, rules) if isinstance(request, ChatRequest) else _completion(request))
        or _limits(request)
        or _ranges(request)
        or _one_stream(request)
        or _format(request.reasoning_format)
        or _hiding(request)
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


def prompts_of(request: CompletionRequest) -> list[str | list[int]] | Refusal:
    """The prompts, at least one, each a text or token ids. A list of exactly one of either counts as one."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt] if prompt else _empty_prompt()
    if not prompt:
        return _empty_prompt()
    if len({type(item) for item in prompt}) > 1:
        return refuse(
            "invalid_type", "prompt", "prompt must hold texts, token ids or lists of token ids, not a mixture."
        )
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        return refuse("invalid_value", "prompt", f"prompt must hold at most {MAX_PROMPTS} prompts.")
    prompts = [item for item in prompt if not isinstance(item, int)]
    empty = next((index for index, item in enumerate(prompts) if not item), None)
    return prompts if empty is None else _empty_prompt(prompt_name(len(prompts), empty))


def prompt_name(prompts: int, index: int) -> str:
    """What a refusal calls one of so many prompts."""
    return "prompt" if prompts == 1 else f"prompt[{index}]"


# -- chat ----------------------------------------------------------------------------------------------------------


def _chat(request: ChatRequest, rules: Rules) -> Refusal | None:
    return (
        _messages(request.messages)
        or _order(request.messages, rules)
        or _modalities(request.modalities)
        or malformed(request)
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


def _order(messages: list[Message], rules: Rules) -> Refusal | None:
    """Row A6: what the messages must hold together. Called once every role is known."""
    roles = [message.role for message in messages]
    begun = next((index for index, role in enumerate(roles) if role not in SYSTEM), None)
    if begun is None:
        return refuse("invalid_value", "messages", "messages holds a system prompt alone: add a user message.")
    for index in range(begun, len(roles)):
        if roles[index] in SYSTEM and rules.mid_system == "refuse":
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


# -- both routes ---------------------------------------------------------------------------------------------------


def _completion(request: CompletionRequest) -> Refusal | None:
    prompts = prompts_of(request)
    return prompts if isinstance(prompts, Refusal) else None


def _empty_prompt(name: str = "prompt") -> Refusal:
    return refuse("invalid_value", name, f"{name} is empty.")


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
        or _counted("min_tokens", request.min_tokens)
        or _counted("no_repeat_ngram_size", request.no_repeat_ngram_size)
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


def _counted(name: str, value: int | None) -> Refusal | None:
    return None if value is None or value >= 0 else refuse("invalid_value", name, f"{name} must be at least 0.")


def _one_stream(request: Request) -> Refusal | None:
    """Row A1: a stream holds one choice."""
    if not request.stream or (request.n or 1) == 1:
        return None
    return refuse("unsupported_value", "n", "n over 1 is not supported with stream: set n to 1 or stream to false.")


def _format(word: str | None) -> Refusal | None:
    if word is None or word in FORMATS:
        return None
    text = f"reasoning_format {quoted(word)} is unknown: use one of {', '.join(FORMATS)}."
    return refuse("invalid_value", "reasoning_format", text)


def _hiding(request: Request) -> Refusal | None:
    """Row B10: the two switches that hide the thinking. What ``reasoning`` else holds is read by ``thinking``."""
    inside = request.reasoning.get("exclude") if isinstance(request.reasoning, dict) else None
    for name, value in (("include_reasoning", request.include_reasoning), ("reasoning.exclude", inside)):
        if value is not None and boolean(value) is None:
            return refuse("invalid_type", name, f"{name} must be true or false.")
    return None


def _biases(biases: dict[str, Any]) -> Refusal | None:
    """Keys are token ids, values numbers in range or null. Which ids there are is known later: ``foreign_id``."""
    for key, value in biases.items():
        name = "logit_bias" + joined(key)
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
