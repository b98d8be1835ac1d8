"""The settings that the stages judge and render by, read once at the start. A wrong one is a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from pipeline.settings import Settings
from stages.clients import progress_kinds, reasoning_formats
from stages.judge import Rules
from stages.thinking import CAPS, EFFORTS, Defaults

_Read = TypeVar("_Read")


class WrongSetting(ValueError):
    """A sentence that names the flag and says what it takes."""


class Rulebook(msgspec.Struct, frozen=True):
    """``formats``: where thinking goes, by kind of client. ``lines``: kinds that see waiting lines as thinking."""

    rules: Rules
    formats: dict[str, str]
    lines: tuple[str, ...]
    depth: int
    template: str | None = None


def rulebook(settings: Settings, model: str) -> Rulebook:
    """What the flags say; ``model`` is the served name. Raises ``WrongSetting``."""
    return Rulebook(
        Rules(
            strict_model=settings.strict_model,
            model=model,
            mid_system=settings.mid_system,
            reasoning_format=settings.reasoning_format,
            thinking=_thinking(settings),
            answer_reserve=_reserve(settings.answer_reserve),
            think_stall=settings.think_stall == "on",
            plan=settings.conductor == "on",
        ),
        _read("--client-reasoning", reasoning_formats, settings.client_reasoning),
        _read("--progress-lines", progress_kinds, settings.progress_lines),
        settings.json_depth,
        _template(settings.chat_template),
    )


def _thinking(settings: Settings) -> Defaults:
    if settings.effort not in EFFORTS:
        raise WrongSetting(f"--effort {settings.effort}: use one of {', '.join(EFFORTS)}.")
    return Defaults(
        thinking=settings.thinking,
        effort=settings.effort,
        budget=settings.think_budget,
        caps=_caps(settings.effort_caps),
        budget_zero=settings.budget_zero,
    )


def _caps(text: str) -> dict[str, int]:
    caps: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        word, _, number = part.partition("=")
        if word not in CAPS or not number.isascii() or not number.isdigit():
            raise WrongSetting(f"--effort-caps {part}: write WORD=N with a word of {', '.join(CAPS)}.")
        caps[word] = int(number)
    return caps


def _reserve(text: str) -> int:
    if text == "auto":
        return -1
    if not text.isascii() or not text.isdigit():
        raise WrongSetting(f"--answer-reserve {text}: use auto or a number of tokens.")
    return int(text)


def _read(flag: str, reader: Callable[[str], _Read], text: str) -> _Read:
    try:
        return reader(text)
    except ValueError as error:
        raise WrongSetting(f"{flag}: {error}") from None


def _template(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text()
    except OSError as error:
        raise WrongSetting(f"--chat-template {path}: {(error.strerror or 'cannot be read').lower()}.") from None
    except ValueError:
        raise WrongSetting(f"--chat-template {path} is no text file.") from None
