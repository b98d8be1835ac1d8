"""What the reading of an answer says, and which of its calls go out (rows D3 and D6).

What this file knows: the order of a call's parts, the call before it, and whether one may follow. What it does not:
how a call is written.
"""

from __future__ import annotations

import copy
from typing import TypeAlias

import msgspec


class Content(msgspec.Struct, frozen=True, tag=True):
    """Text of the answer, as written."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    """Text of the thinking. The reading of calls never makes one."""

    text: str


class CallOpened(msgspec.Struct, frozen=True, tag=True):
    """A call begins. ``index`` counts the calls sent, the name is as written."""

    index: int
    name: str


class Arguments(msgspec.Struct, frozen=True, tag=True):
    """The next piece of a call's arguments: joined, the pieces are their JSON."""

    index: int
    piece: str


class CallClosed(msgspec.Struct, frozen=True, tag=True):
    """Nothing more of this call comes. ``complete`` is false for one that the text ended in."""

    index: int
    complete: bool


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """A call that is not sent: ``no name``, ``broken JSON``, ``parallel``, ``repeated`` or ``cut``."""

    reason: str


Delta: TypeAlias = Content | Reasoning | CallOpened | Arguments | CallClosed | Dropped


def join(deltas: list[Delta]) -> list[Delta]:
    """The same with neighbours of one kind made one."""
    out: list[Delta] = []
    runs: list[list[str]] = []
    for delta in deltas:
        if out and _same(out[-1], delta):
            runs[-1].append(text_of(delta))
        else:
            out.append(delta)
            runs.append([text_of(delta)])
    return [_with(delta, "".join(run)) if len(run) > 1 else delta for delta, run in zip(out, runs, strict=True)]


def text_of(delta: Delta) -> str:
    """What a delta adds to a message's texts."""
    if isinstance(delta, Content | Reasoning):
        return delta.text
    return delta.piece if isinstance(delta, Arguments) else ""


def _same(one: Delta, other: Delta) -> bool:
    if isinstance(one, Arguments):
        return isinstance(other, Arguments) and one.index == other.index
    return isinstance(one, Content | Reasoning) and type(one) is type(other)


def _with(delta: Delta, text: str) -> Delta:
    if isinstance(delta, Arguments):
        return Arguments(delta.index, text)
    return Reasoning(text) if isinstance(delta, Reasoning) else Content(text)


class Gate:
    """Lets calls out in order. One that repeats the call before it is held while it is a prefix of that one."""

    def __init__(self, parallel: bool = True) -> None:
        self.complete = 0
        self.busy = False
        self._parallel = parallel
        self._index = -1
        self._name = ""
        self._parts: list[str] = []
        self._held = False
        self._matched = 0
        self._before: tuple[str, str] | None = None

    def copy(self) -> Gate:
        """This gate as it is now; a call must not be open."""
        return copy.copy(self)

    @property
    def full(self) -> bool:
        """D6: with ``parallel`` off only the first call is let out."""
        return not self._parallel and self._index >= 0

    def open(self, name: str) -> list[Delta]:
        """A call begins."""
        if self.full:
            return [Dropped("parallel")]
        self.busy, self._name, self._parts, self._matched = True, name, [], 0
        self._held = self._before is not None and self._before[0] == name
        return [] if self._held else self._let_out()

    def piece(self, text: str) -> list[Delta]:
        """More of its arguments."""
        if not self.busy or not text:
            return []
        self._parts.append(text)
        if not self._held:
            return [Arguments(self._index, text)]
        if self._before and self._before[1].startswith(text, self._matched):
            self._matched += len(text)
            return []
        return self._let_out()

    def _let_out(self) -> list[Delta]:
        self._held = False
        self._index += 1
        text = "".join(self._parts)
        return [CallOpened(self._index, self._name), *([Arguments(self._index, text)] if text else [])]

    def close(self) -> list[Delta]:
        """The call is whole."""
        if not self.busy:
            return []
        self.busy = False
        if self._held:
            return [Dropped("repeated")]
        self.complete += 1
        self._before = (self._name, "".join(self._parts))
        return [CallClosed(self._index, True)]

    def cut(self) -> list[Delta]:
        """The text ended; ``busy`` goes on saying that it did so inside a call."""
        if not self.busy:
            return []
        return [Dropped("cut")] if self._held else [CallClosed(self._index, False)]
