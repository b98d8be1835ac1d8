"""Every thinking shape of a request, read into one: whether the model thinks, and under which cap (section C).

What this file knows: the names clients use, their order, what a word is worth. What it does not: how a cap is kept
(the engine's work) and whether the served model thinks at all: where it does not, a wish for thinking asks for nothing.

The tables are the specification as data. Order is theirs, never that of a body's keys; null is absent everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from stages.refusal import Refusal, quoted, refuse

# -- the tables ----------------------------------------------------------------------------------------------------


class Number(msgspec.Struct, frozen=True):
    """A field that holds a count of tokens, and what its own documentation says of -1 and 0 (row C7)."""

    path: str
    minus_one: bool = False
    """-1 is no cap."""
    zero_closes: bool = False
    """0 is *close at once* on the server this shape comes from; read so with ``--budget-zero as-documented``."""


def _documented(path: str) -> Number:
    return Number(path, minus_one=True, zero_closes=True)


GOOGLE = ("thinking_config", "thinkingConfig", "extra_body.google.thinking_config", "extra_body.google.thinkingConfig")
"""The places of Gemini's object. The two spellings go through: snake case inside snake case, camel inside camel."""


def _google(snake: str, camel: str) -> tuple[str, ...]:
    return tuple(f"{place}.{camel if place.endswith('Config') else snake}" for place in GOOGLE)


NUMBERS: tuple[Number, ...] = (
    Number("max_reasoning_tokens"),
    Number("thinking_budget"),
    Number("chat_template_kwargs.thinking_budget"),
    _documented("thinking_token_budget"),  # vLLM
    Number("reasoning.max_tokens"),
    Number("thinking.budget_tokens"),
    _documented("thinking_budget_tokens"),  # llama.cpp, as the next one and number 11
    _documented("reasoning_budget"),
    *(_documented(path) for path in _google("thinking_budget", "thinkingBudget")),
    Number("nvext.max_thinking_tokens", zero_closes=True),  # Dynamo hands its two names to vLLM's
    _documented("reasoning_budget_tokens"),
    Number("max_thinking_tokens", zero_closes=True),
    Number("reasoning_tokens"),
    Number("custom_params.thinking_budget", zero_closes=True),  # SGLang
    Number("chat_template_kwargs.thinking_token_budget"),
)
"""Numbers 1 to 15: the first one that is there gives the cap, whatever the words say."""

WORDS: tuple[str, ...] = (
    "reasoning_effort",
    "reasoning.effort",
    "chat_template_kwargs.reasoning_effort",
    "output_config.effort",
    "think",
    *_google("thinking_level", "thinkingLevel"),
)
"""Words 1 to 6: the first one that is there gives the cap where no number does."""

DECIDES: tuple[str, ...] = ("chat_template_kwargs.enable_thinking", "enable_thinking")
"""What is said here holds whatever else the request says; the first wins."""

SWITCHES: tuple[str, ...] = (
    *DECIDES,
    "chat_template_args.enable_thinking",
    "chat_template_kwargs.thinking",
    "reasoning.enabled",
    "reasoning.enable",
    "thinking.type",
    "think",
)
"""On forms when true and off forms when false (C0, C2); behind ``DECIDES`` one off form outweighs every on form."""

TYPES = {"enabled": True, "adaptive": True, "disabled": False}
"""The words of ``thinking.type``."""

BOOLEANS = {"true": True, "false": False}

CAPS: dict[str, int] = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576, "xhigh": 32768}
OFF_WORDS = ("none", "off")
DEFAULT_WORDS = ("auto", "default", "on")
"""As the server's default: its cap, and its switch, except that under a default of off they turn thinking on (C0)."""
AMOUNTS = (*CAPS, "max", "ultra")
"""Words that say how much; the last two have no cap."""
EFFORTS = ("none", *AMOUNTS, *DEFAULT_WORDS, "off")
"""Every word of row C1."""

OBJECTS = ("chat_template_kwargs", "chat_template_args", "reasoning", "thinking", "output_config", "nvext")
CONTAINERS = (*OBJECTS, "custom_params", "extra_body", "extra_body.google", *GOOGLE)
"""Objects that hold fields of the tables, an outer one before its inner ones."""

ROWS: dict[str, str] = {
    **dict.fromkeys(CONTAINERS, "C"),
    **dict.fromkeys((number.path for number in NUMBERS), "C"),
    **dict.fromkeys(WORDS, "C1"),
    **dict.fromkeys(SWITCHES, "C2"),
}
"""Every field this stage reads, with its row, in the order in which faults are found."""

TOP: tuple[str, ...] = tuple(dict.fromkeys(path.split(".")[0] for path in ROWS))
"""The top-level fields it needs; it looks at no other."""

_NUMBER = {number.path: number for number in NUMBERS}

# -- the reading ---------------------------------------------------------------------------------------------------


class Defaults(msgspec.Struct, frozen=True):
    """What the server does when a request says nothing (row C0), and how it reads words and zeros."""

    thinking: str = "auto"
    """``auto`` (as the checkpoint's template does), ``on`` or ``off``."""
    effort: str = "max"
    budget: int = 0
    """Tokens; 0: none."""
    caps: Mapping[str, int] = {}
    """``--effort-caps``: the words whose number differs from ``CAPS``; 0 is no cap."""
    budget_zero: str = "no-cap"
    """``no-cap`` or ``as-documented``."""


DEFAULTS = Defaults()


class Thinking(msgspec.Struct, frozen=True):
    """What the request asked for. ``cap`` None: no cap; 0: the reasoning closes at once."""

    on: bool | None = None
    """None: as the template does."""
    cap: int | None = None
    asked: bool = False
    """A budget was asked for, in whatever shape (row C4): a number, 0 too, or a word."""
    source: str = ""
    """The field the cap came from, else the one that turned thinking on or off; empty: the server's default."""
    note: str = ""
    """How a special value was read (row C7), for the request's history."""
    switch: str = ""
    """The field that decided ``on``, empty for the default: one of ``SWITCHES`` is an explicit form (row K1)."""


class _Said(msgspec.Struct, frozen=True):
    """The well-formed values by path, each in the order of its table."""

    switches: dict[str, bool]
    numbers: dict[str, int]
    words: dict[str, str]


def read(fields: Mapping[str, object], defaults: Defaults = DEFAULTS) -> Thinking | Refusal:
    """The one reading of a request's top-level ``fields``; a refusal names the first field that is malformed."""
    said = _said(fields)
    if isinstance(said, Refusal):
        return said
    on, switch = _switched(said, defaults)
    asked = bool(said.numbers or said.words)
    if on is False:
        return Thinking(False, None, asked, switch, "", switch)
    cap, source, note = _budget(said, defaults)
    return Thinking(on, cap, asked, source or switch, note, switch)


def effort(fields: Mapping[str, object]) -> str:
    """The first word that asks for an amount of thinking, for templates that read one; "" where none does."""
    words = (at(fields, path) for path in WORDS)
    return next((word for word in words if isinstance(word, str) and word in AMOUNTS), "")


def at(fields: Mapping[str, object], path: str) -> Any:
    """What stands at a dotted path, None where nothing does."""
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


# -- on or off -----------------------------------------------------------------------------------------------------


def _switched(said: _Said, defaults: Defaults) -> tuple[bool | None, str]:
    """Whether the model thinks, and the field that says so."""
    for path in DECIDES:
        if path in said.switches:
            return said.switches[path], path
    off = next(_off_forms(said), None)
    if off:
        return False, off
    default = _default_on(defaults)
    on = next(_on_forms(said, default), None)
    return (True, on) if on else (default, "")


def _off_forms(said: _Said) -> Iterator[str]:
    yield from (path for path, value in said.switches.items() if not value)
    yield from (path for path, word in said.words.items() if word in OFF_WORDS)


def _on_forms(said: _Said, default: bool | None) -> Iterator[str]:
    """On forms, then what asks for an amount of thinking, the weakest wish last. No off form is there any more."""
    yield from (path for path, value in said.switches.items() if value)
    yield from (path for path, count in said.numbers.items() if count)
    yield from (path for path, word in said.words.items() if word not in DEFAULT_WORDS)
    yield from said.numbers
    if default is False:
        yield from said.words


def _default_on(defaults: Defaults) -> bool | None:
    if defaults.thinking == "auto":
        return False if defaults.effort in OFF_WORDS else None
    return defaults.thinking == "on"


# -- the cap -------------------------------------------------------------------------------------------------------


def _budget(said: _Said, defaults: Defaults) -> tuple[int | None, str, str]:
    """The cap, the field it came from and a note."""
    for path, count in said.numbers.items():
        cap, note = _number_cap(_NUMBER[path], count, defaults)
        return cap, path, note
    for path, word in said.words.items():
        return _word_cap(word, defaults), path, ""
    return _default_cap(defaults), "", ""


def _number_cap(number: Number, count: int, defaults: Defaults) -> tuple[int | None, str]:
    if count > 0:
        return count, ""
    if count == 0 and number.zero_closes and defaults.budget_zero == "as-documented":
        return 0, f"{number.path}: 0 read as close at once"
    return None, f"{number.path}: {count} read as no cap"


def _word_cap(word: str, defaults: Defaults) -> int | None:
    """An off word gets here only where ``enable_thinking: true`` overrules it: it gives no cap (row C2)."""
    return _default_cap(defaults) if word in DEFAULT_WORDS else _effort_cap(word, defaults)


def _default_cap(defaults: Defaults) -> int | None:
    return defaults.budget or _effort_cap(defaults.effort, defaults)


def _effort_cap(word: str, defaults: Defaults) -> int | None:
    if word in OFF_WORDS or word in DEFAULT_WORDS:
        return None
    return defaults.caps.get(word, CAPS.get(word, 0)) or None


# -- shapes --------------------------------------------------------------------------------------------------------


def _said(fields: Mapping[str, object]) -> _Said | Refusal:
    """Every value that is there, checked: a malformed one is refused even where another would win."""
    said = _Said({}, {}, {})
    for path in ROWS:
        value = at(fields, path)
        fault = None if value is None else _take(said, path, value)
        if fault:
            return fault
    return said


def _take(said: _Said, path: str, value: object) -> Refusal | None:
    """Put a value where it belongs, or say what is wrong with it. ``think`` is a switch or a word, by its value."""
    if path in CONTAINERS:
        return None if isinstance(value, Mapping) else refuse("invalid_type", path, f"{path} must be an object.")
    if path in _NUMBER:
        return _take_number(said, path, value)
    if path == "thinking.type":
        return _take_type(said, path, value)
    if path in SWITCHES and (path not in WORDS or boolean(value) is not None):
        return _take_switch(said, path, value)
    return _take_word(said, path, value)


def _take_number(said: _Said, path: str, value: object) -> Refusal | None:
    least = -1 if _NUMBER[path].minus_one else 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return refuse("invalid_type", path, f"{path} must be an integer: tokens of thinking, 0 for no cap.")
    if value < least:
        return refuse("invalid_value", path, f"{path} must be at least {least}; {_no_cap(least)} no cap.")
    said.numbers[path] = value
    return None


def _no_cap(least: int) -> str:
    return "-1 and 0 are" if least else "0 is"


def _take_switch(said: _Said, path: str, value: object) -> Refusal | None:
    switch = boolean(value)
    if switch is None:
        return refuse("invalid_type", path, f"{path} must be true or false.")
    said.switches[path] = switch
    return None


def boolean(value: object) -> bool | None:
    """A boolean, also one written as a string."""
    if isinstance(value, str):
        return BOOLEANS.get(value)
    return value if isinstance(value, bool) else None


def _take_type(said: _Said, path: str, value: object) -> Refusal | None:
    if not isinstance(value, str):
        return refuse("invalid_type", path, f"{path} must be a string: one of {', '.join(TYPES)}.")
    if value not in TYPES:
        return refuse("invalid_value", path, f"{path} {quoted(value)} is unknown: use one of {', '.join(TYPES)}.")
    said.switches[path] = TYPES[value]
    return None


def _take_word(said: _Said, path: str, value: object) -> Refusal | None:
    words = ", ".join(EFFORTS)
    if not isinstance(value, str):
        kinds = "true, false or one of" if path in SWITCHES else "one of"
        return refuse("invalid_type", path, f"{path} must be {kinds} the words {words}.")
    if value not in EFFORTS:
        return refuse("invalid_value", path, f"{path} {quoted(value)} is no effort word: use one of {words}.")
    said.words[path] = value
    return None
