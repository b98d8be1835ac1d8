"""A refusal is a value, not an exception: the code, the field it names and a sentence for the client.

What this file knows: how large an error may be (2 KB, row A9) and which names a log may show (row P1). What it does
not: statuses and types, which hang on the code and live in ``pipeline/outcomes.py``.
"""

from __future__ import annotations

import json
import re

import msgspec

from stages import keywords

TEXT_BYTES = 1400
"""Most bytes of a text once encoded as JSON: with the param and the object around it an error stays under 2 KB."""
PARAM_BYTES = 300
WORD_CHARS = 80
"""A client's word is quoted up to here; what it sent is known to it, what we say about it is not."""

_NAMES = """
messages role content type text refusal name tool_calls tool_call_id id function arguments reasoning_content
model prompt stream stream_options include_usage include_obfuscation include_progress continuous_usage_stats
max_tokens max_completion_tokens stop temperature top_p top_k min_p seed n modalities
user metadata store service_tier prompt_cache_key prompt_cache_retention prompt_cache_options safety_identifier
prediction draft_temperature include_reasoning
audio functions function_call web_search_options verbosity moderation suffix echo best_of
presence_penalty frequency_penalty repetition_penalty no_repeat_ngram_size logit_bias logprobs top_logprobs
tools tool_choice parallel_tool_calls description parameters allowed_tools mode
response_format structured_outputs json_schema schema strict json json_object regex choice
guided_json guided_regex guided_choice ignore_eos min_tokens stop_token_ids
reasoning_format exclude reasoning_effort reasoning effort enabled enable enable_thinking think thinking budget_tokens
output_config thinking_config thinkingConfig thinkingBudget thinking_level thinkingLevel extra_body google nvext
custom_params chat_template_kwargs chat_template_args max_reasoning_tokens thinking_budget thinking_token_budget
thinking_budget_tokens reasoning_budget reasoning_budget_tokens max_thinking_tokens reasoning_tokens
documents add_generation_prompt continue_final_message chat_template tokenize return_dict
bos_token eos_token pad_token unk_token strftime_now raise_exception
"""
KNOWN = frozenset(_NAMES.split()) | keywords.ALL
"""Every name of ours and of JSON Schema's that a ``param`` may hold; a test holds that no field of the table is missing
here."""

_HOLD_NAMES = keywords.NAMED | {"$defs", "definitions", "dependentSchemas", "logit_bias"}
"""Behind these stands a name of the client's, whatever it spells."""
_SEGMENT = re.compile(r"\[\"(?:[^\"\\]|\\.)*(?:\"\]|\Z)|\[\d{1,6}\]|[^.\[\]]+", re.DOTALL)
_PLAIN = re.compile(r"[\w$-]+")
_encode = msgspec.json.Encoder().encode


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not served. ``code``: a word of the error table. ``param`` None: the whole body is at fault."""

    code: str
    param: str | None
    text: str


def refuse(code: str, param: str | None, text: str) -> Refusal:
    """A refusal whose parts are cut so that the whole error object stays under 2 KB."""
    short = None if param is None else clipped(param, PARAM_BYTES)
    return Refusal(code, short, clipped(text, TEXT_BYTES))


def clipped(text: str, limit: int) -> str:
    """``text`` cut to about ``limit`` bytes of JSON, an ellipsis in place of what is gone."""
    cut = text[:limit]
    while len(_encode(cut)) > limit:
        cut = cut[: len(cut) * 3 // 4]
    return cut if cut == text else cut + "…"


def quoted(word: str) -> str:
    """A client's word in quotes, cut at 80 characters."""
    return f"'{word}'" if len(word) <= WORD_CHARS else f"'{word[:WORD_CHARS]}…'"


def joined(*steps: str | int) -> str:
    """What stands behind a param that leads into a client's own object. A name with other signs than a word's is
    quoted, so that none of it passes for a step of its own."""
    return "".join(map(_step, steps))


def _step(step: str | int) -> str:
    if isinstance(step, str) and _PLAIN.fullmatch(step):
        return f".{step}"
    return f"[{json.dumps(step, ensure_ascii=False)}]"


def masked(param: str | None) -> str:
    """``param`` as logs, traces and metrics may show it: known names and indices stay, any other name is ``*``."""
    named = False  # the next step is a client's name

    def shown(segment: re.Match[str]) -> str:
        nonlocal named
        step, foreign, named = segment[0], named, segment[0] in _HOLD_NAMES and not named
        if step.startswith('["'):
            return ".*"
        return step if step.startswith("[") or (step in KNOWN and not foreign) else "*"

    return _SEGMENT.sub(shown, param) if param else ""
