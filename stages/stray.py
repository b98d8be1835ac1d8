"""A closing tag that stands alone on a line of the answer (row B7).

What this file knows: lines, code fences, and blocks that the answer opens itself. What it does not: calls; whether a
line begins inside one it asks. Of a line only what may still be the lone tag is held.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from stages.reasoning import CLOSE, OPEN

_LONE = re.compile(r"</think>[ \t\r]{0,200}(\n|\Z)")  # a model may write blanks for ever
_TAG = re.compile(f"{OPEN}|{CLOSE}")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_LINE = 200
"""Characters of a line that are looked at for a fence."""


class Stray:
    """Lets an answer through without it. ``inside``: whether the next character stands in a call."""

    def __init__(self, inside: Callable[[str], bool]) -> None:
        self._inside = inside
        self._text = ""
        self._start = True  # of a line
        self._skip = False  # the line began inside a call
        self._line = ""
        self._last = ""  # of the text let through: what may be the begin of a tag
        self._fence = ""
        self._depth = 0  # blocks that the answer opened and did not close

    @property
    def held(self) -> int:
        """Characters that wait for the rest of their line."""
        return len(self._text)

    def push(self, text: str) -> Iterator[str]:
        """What goes on, up to a line at a time: ``inside`` is asked between them."""
        text, self._text, at = self._text + text, "", 0
        while at < len(text):
            if self._start:
                self._skip = self._inside(text[at])
                if not (self._skip or self._fence or self._depth):
                    lone = _LONE.match(text, at)
                    if lone and lone[1]:
                        at = lone.end()
                        continue
                    if lone or CLOSE.startswith(text[at : at + len(CLOSE) + 1]):
                        self._text = text[at:]
                        return
            end = text.find("\n", at) + 1 or len(text)
            line, at = text[at:end], end
            self._note(line)
            yield line

    def finish(self) -> str:
        """No text follows: a tag whose line is at its end is a lone one."""
        text, self._text = self._text, ""
        return "" if _LONE.match(text) else text

    def _note(self, text: str) -> None:
        """More of a line: the fences and blocks in it."""
        self._start = text.endswith("\n")
        if self._skip:
            return
        if not self._fence:
            seen = self._last + text
            for tag in _TAG.finditer(seen):
                if tag.end() > len(self._last):
                    self._depth = self._depth + 1 if tag[0] == OPEN else max(self._depth - 1, 0)
            self._last = seen[1 - len(CLOSE) :]
        self._line = (self._line + text)[:_LINE]
        if self._start:
            self._end_line()

    def _end_line(self) -> None:
        fence, self._line, self._last = _FENCE.match(self._line), "", ""
        if fence and not self._fence:
            self._fence = fence[1]
        elif fence and fence[1].startswith(self._fence) and not fence[2].strip():
            self._fence = ""
