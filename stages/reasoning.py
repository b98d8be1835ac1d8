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


class Begin:
    """B0: the begin of an answer for as long as it may still become an opening tag, blanks in front of it."""

    def __init__(self) -> None:
        self.size = 0
        self._texts: list[str] = []
        self._tag = ""  # without the blanks, which a model may write for ever

    def push(self, text: str) -> bool:
        """Read on; whether it still may."""
        self.size += len(text)
        self._texts.append(text)
        self._tag = (self._tag + text).lstrip(_BLANKS)
        return OPEN.startswith(self._tag)

    def take(self) -> str:
        """What was read; after it nothing is."""
        text = "".join(self._texts)
        self.size, self._texts, self._tag = 0, [], ""
        return text


def tag_begin(text: str) -> int:
    """How many characters at the end of ``text`` may be the begin of a close: newlines, and a part of the tag."""
    part = next((size for size in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:size])), 0)
    return len(text) - len(text[: len(text) - part].rstrip("\n"))


class Split:
    """One answer's. ``shape`` is tags, reasoning_content, both or hidden, ``state`` as in ``protocol.Thinking``.

    ``held``: characters taken that nothing was said of yet. ``added``: characters of content that the model did not
    write there, less those it wrote that are none of the content.
    """

    def __init__(self, shape: str, state: str, blank_line: bool = False) -> None:
        self.added = 0
        self.where = state if state in ("open", "may") else "off"
        self._tags = shape in ("tags", "both")
        self._apart = shape in ("reasoning_content", "both")
        self._blank_line = blank_line and shape == "reasoning_content"
        self._begin = Begin()
        self._newlines = 0  # of the thinking that wait, and behind them
        self._tag = ""  # the begin of a close
        self._opener = self.where == "open"  # it was not sent yet
        self._lead = False  # the newline behind the model's own opening tag may follow
        self._after = False  # only newlines since the close

    @property
    def held(self) -> int:
        """Characters that wait for more; where they went into the content already, none."""
        waits = 0 if self._tags else self._newlines + len(self._tag)
        return self._begin.size + waits

    def push(self, text: str) -> list[Run]:
        """Read on; what can be said now."""
        if self.where == "off":
            return self._answer(text) if self._after else [("answer", text)] if text else []
        if self.where == "open":
            return self._thinking(text)
        if self._begin.push(text):
            return []
        self.where = "off"
        return [("answer", self._begin.take())]

    def turn(self, text: str, kind: str, size: int) -> list[Run]:
        """Read on through the end of a tag: the last ``size`` characters, with those before, are the tag."""
        if kind == "opened":
            self.added -= len(self._begin.take()) + len(text)
            self.where, self._opener, self._lead = "open", True, True
            return []
        text, runs = self._write(text)
        whole = self._tag + text
        if thinking := whole[: len(whole) - size].rstrip("\n"):
            runs += self._let_go(thinking)
        self.where, self._newlines, self._tag, self._after = "off", 0, "", True
        if self._tags and not size:
            self.added += len(CLOSE)
            runs += self._content(CLOSE)
        if self._blank_line:
            runs.append(("content", BLANK_LINE))
        return runs

    def finish(self) -> list[Run]:
        """No text follows: what was held is what it looks like, and an opener that met no text goes out alone."""
        if self.where == "may":
            self.where, held = "off", self._begin.take()
            return [("answer", held)] if held else []
        if self.where == "off":
            return []
        runs = self._content("") if self._tags and self._opener else []
        held, self._tag = self._tag, ""
        return [*runs, *(self._let_go(held) if held or self._newlines else [])]

    def _thinking(self, text: str) -> list[Run]:
        text, runs = self._write(text)
        whole = self._tag + text
        count = len(whole) - tag_begin(whole)
        if count:
            runs += self._let_go(whole[:count])
        self._tag = whole[count:].lstrip("\n")
        self._newlines += len(whole) - count - len(self._tag)
        return runs

    def _let_go(self, text: str) -> list[Run]:
        """Thinking that can be no part of the close, behind the newlines that then are none either."""
        text, self._newlines = "\n" * self._newlines + text, 0
        return [("reasoning", text)] if self._apart else []

    def _write(self, text: str) -> tuple[str, list[Run]]:
        """Text of the thinking without the newline behind the model's own tag; beside the tags content at once."""
        if self._lead and text:
            self._lead = False
            if text[0] == "\n":
                text = text[1:]
                self.added -= 1
        if self._tags:
            return text, self._content(text) if text else []
        self.added -= len(text)
        return text, []

    def _content(self, text: str) -> list[Run]:
        if not self._opener:
            return [("content", text)]
        self._opener = False
        self.added += len(OPENER)
        return [("content", OPENER + text)]

    def _answer(self, text: str) -> list[Run]:
        """The first of it: the newlines behind the close are content only beside the tags."""
        rest = text.lstrip("\n")
        blanks = text[: len(text) - len(rest)]
        self._after = not rest
        runs: list[Run] = [("content", blanks)] if self._tags and blanks else []
        self.added -= 0 if self._tags else len(blanks)
        return [*runs, ("answer", rest)] if rest else runs
