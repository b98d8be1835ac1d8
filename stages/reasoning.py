"""The thinking and the answer, in the shape a client gets them in (rows B0 to B3, B5, B9, B10, C6).

What this file knows: the four shapes. What it does not: where a block begins and ends. The engine decides that, once,
and says it (``Turn``); here nothing is searched for. What is held, and no more: where thinking goes out on its own, the
newlines and the begin of a tag that may belong to the close; and a first text that may become the opening tag.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

OPEN, CLOSE = "<think>", "</think>"
OPENER = OPEN + "\n"
BLANK_LINE = "\n\n"
"""B9: what templates write between the close and the answer."""

_BLANKS = " \t\n\r\x0b\x0c"  # as the engine's bytes have them

Where: TypeAlias = Literal["content", "reasoning", "answer"]
Run: TypeAlias = tuple[Where, str]
"""``answer`` is content in which calls are read; ``content`` is what stands around it."""


def may_open(text: str) -> bool:
    """B0: whether an answer that begins so may still become an opening tag."""
    return OPEN.startswith(text.lstrip(_BLANKS))


def tag_begin(text: str) -> int:
    """How many characters at the end of ``text`` may be the begin of a close: newlines, and a part of the tag."""
    part = next((size for size in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:size])), 0)
    return len(text) - len(text[: len(text) - part].rstrip("\n"))


class Split:
    """One answer's. ``shape`` is tags, reasoning_content, both or hidden, ``state`` as in ``protocol.Thinking``.

    ``held``: characters taken that nothing was said of yet. ``added``: characters of content that the model did not
    write there, less those it wrote for nothing.
    """

    def __init__(self, shape: str, state: str, blank_line: bool = False) -> None:
        self.added = 0
        self.where = state if state in ("open", "may") else "off"
        self._tags = shape in ("tags", "both")
        self._apart = shape in ("reasoning_content", "both")
        self._blank_line = blank_line and shape == "reasoning_content"
        self._held = ""
        self._opener = self.where == "open"  # it was not sent yet
        self._lead = False  # the newline behind the model's own opening tag may follow
        self._after = False  # only newlines since the close

    @property
    def held(self) -> int:
        """Characters that wait for more; where they went into the content already, none."""
        return 0 if self._tags and self.where == "open" else len(self._held)

    def push(self, text: str) -> list[Run]:
        """Read on; what can be said now."""
        if self.where == "off":
            return self._answer(text) if self._after else [("answer", text)] if text else []
        if self.where == "open":
            return self._thinking(text)
        self._held += text
        if may_open(self._held):
            return []
        self.where, text, self._held = "off", self._held, ""
        return [("answer", text)]

    def turn(self, text: str, kind: str, size: int) -> list[Run]:
        """Read on through the end of a tag: the last ``size`` characters, with those before, are the tag."""
        if kind == "opened":
            self._add(-len(self._held) - len(text))
            self.where, self._held, self._opener, self._lead = "open", "", True, True
            return []
        runs = self._write(text)
        thinking = self._held[: len(self._held) - size].rstrip("\n")
        self.where, self._held, self._after = "off", "", True
        if self._apart and thinking:
            runs.append(("reasoning", thinking))
        if self._tags and not size:
            self._add(len(CLOSE))
            runs += self._content(CLOSE)
        if self._blank_line:
            runs.append(("content", BLANK_LINE))
        return runs

    def finish(self) -> list[Run]:
        """No text follows: what was held is what it looks like, and an opener that met no text goes out alone."""
        held, self._held = self._held, ""
        if self.where == "may":
            self.where = "off"
            return [("answer", held)] if held else []
        if self.where == "off":
            return []
        runs = self._content("") if self._tags and self._opener else []
        return [*runs, ("reasoning", held)] if self._apart and held else runs

    def _thinking(self, text: str) -> list[Run]:
        runs = self._write(text)
        count = len(self._held) - tag_begin(self._held)
        if count and self._apart:
            runs.append(("reasoning", self._held[:count]))
        self._held = self._held[count:]
        return runs

    def _write(self, text: str) -> list[Run]:
        """Text of the thinking: beside the tags it is content at once, and otherwise held."""
        if self._lead and text:
            self._lead = False
            if text[0] == "\n":
                text = text[1:]
                self._add(-1)
        self._held += text
        return self._content(text) if self._tags and text else []

    def _add(self, count: int) -> None:
        self.added += count if self._tags else 0

    def _content(self, text: str) -> list[Run]:
        if not self._opener:
            return [("content", text)]
        self._opener = False
        self._add(len(OPENER))
        return [("content", OPENER + text)]

    def _answer(self, text: str) -> list[Run]:
        """The first of it: the newlines behind the close are content only beside the tags."""
        rest = text.lstrip("\n")
        blanks = text[: len(text) - len(rest)]
        self._after = not rest
        runs: list[Run] = [("content", blanks)] if self._tags and blanks else []
        return [*runs, ("answer", rest)] if rest else runs
