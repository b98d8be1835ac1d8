"""The parts of an answer as one message (row F9)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from stages.calls import Arguments, CallClosed, CallOpened, Content, Delta, Reasoning

Call: TypeAlias = tuple[int, str, str]
"""Index, name and arguments."""


def assembled(deltas: Iterable[Delta]) -> tuple[str | None, str, list[Call]]:
    """Content, reasoning and calls. A call that was not closed is left out (D10); beside calls no text is none (D2)."""
    content, reasoning = [], []
    calls: list[Call] = []
    name, pieces = "", list[str]()
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallOpened(_, name):
                pieces = []
            case Arguments(_, piece):
                pieces.append(piece)
            case CallClosed(index, True):
                calls.append((index, name, "".join(pieces)))
    text = "".join(content)
    return None if calls and not text else text, "".join(reasoning), calls
