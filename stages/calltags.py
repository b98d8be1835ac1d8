"""The marks of a written call: tags, and the questions about what follows them.

What this file knows: how the tags look and which text makes them count (rows D1 and D8). What it does not: what a call
is made of. Every question is answered from the text alone; where text to come could change the answer it is ``WAIT``,
and with ``final`` set there is none to come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

import msgspec

from stages.arguments import no_constant

Wait = Literal["wait"]
WAIT: Final[Wait] = "wait"

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TAGS = (OPEN, CLOSE, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

_LONGEST = 200  # characters of a tag: a name is at most 64, the rest is for stray spaces
_TAG_END = re.compile(r"[<>\n]")
_BLANKS = re.compile(r"\s*")
_SKIPPED = re.compile(r"\s{0,4096}")  # a model may write blanks for ever
_BAD_NAME = re.compile("[\\s<>{}\"'=\ud800-\udfff]")


class Tag(msgspec.Struct, frozen=True):
    """A tag: which of ``TAGS``, the name in it as written, and where it ends."""

    kind: str
    name: str
    end: int


def tag_at(text: str, at: int, final: bool, wanted: Sequence[str] = TAGS) -> Tag | Wait | None:
    """The tag that begins at ``at``, stray spaces allowed."""
    stop = _TAG_END.search(text, at + 1, at + _LONGEST)
    end = stop.end() if stop else len(text)
    body = text[at:end].replace(" ", "").replace("\t", "")
    if stop is None:
        possible = not final and end - at < _LONGEST and any(_may_become(body, tag) for tag in wanted)
        return WAIT if possible else None
    if stop[0] != ">":
        return None
    for tag in wanted:
        if body == tag:
            return Tag(tag, "", end) if tag[-1] == ">" else None
        if tag[-1] == "=" and body.startswith(tag):
            return Tag(tag, text[at:end].partition("=")[2][:-1].strip(), end)
    return None


def _may_become(body: str, tag: str) -> bool:
    return tag.startswith(body) or (tag[-1] == "=" and body.startswith(tag))


def good_name(name: str, offered: Collection[str]) -> bool:
    """Whether a tool can be called that: one that is offered can whatever its name, an unrendered template cannot."""
    return name in offered or (bool(name) and _BAD_NAME.search(name) is None)


def blanks(text: str, at: int) -> int:
    """Where the blanks that begin at ``at`` end."""
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def skipped(text: str, at: int) -> int:
    """The same where what follows decides: more blanks than anyone writes are text."""
    found = _SKIPPED.match(text, at)
    return found.end() if found else at


def next_tag(text: str, at: int, final: bool) -> Tag | Wait | None:
    """The tag after the blanks; none where the text ends or other text stands there."""
    at = skipped(text, at)
    if at == len(text):
        return None if final else WAIT
    return tag_at(text, at, final) if text[at] == "<" else None


class Closes:
    """D8: judges which ``</parameter>`` of a call closes a value. ``declared``: the tool's parameters.

    An undeclared parameter behind it speaks for a close only if its own close counts: otherwise it is text of the
    value, and cannot be told from one earlier. So a row of such closes has one verdict. It is walked once, whatever the
    model writes again and again and however that comes.
    """

    def __init__(self, declared: Collection[str]) -> None:
        self._declared = declared
        self._verdicts: dict[int, bool] = {}  # by where a close ends in the answer
        self._row: list[int] = []  # the closes walked so far that share the verdict to come
        self._from = 0  # where the next of them is looked for

    def counts(self, text: str, at: int, base: int, final: bool) -> bool | Wait:
        """Whether a close that ends at ``at`` counts; ``text`` begins at ``base`` in the answer."""
        place = base + at
        if place not in self._verdicts:
            if self._row[:1] != [place]:
                self._row, self._from = [place], place
            verdict = self._walk(text, base, final)
            if verdict == WAIT:
                return WAIT
            self._verdicts.update(dict.fromkeys(self._row, verdict))
        return self._verdicts[place]

    def _walk(self, text: str, base: int, final: bool) -> bool | Wait:
        while self._row[-1] not in self._verdicts:
            tag = next_tag(text, self._row[-1] - base, final)
            if not isinstance(tag, Tag):
                return WAIT if tag == WAIT else False
            if tag.kind != PARAMETER:
                return tag.kind == FUNCTION_END or (tag.kind == CLOSE and last_close(text, tag.end, final))
            if not self._declared or tag.name in self._declared:
                return True
            found = text.find(PARAMETER_END, max(tag.end, self._from - base))
            if found < 0:
                self._from = base + max(tag.end, len(text) - len(PARAMETER_END) + 1)
                return False if final else WAIT
            self._from = base + found + len(PARAMETER_END)
            self._row.append(self._from)
        return self._verdicts[self._row[-1]]


def last_close(text: str, at: int, final: bool) -> bool | Wait:
    """Whether a ``</tool_call>`` that ends at ``at`` ends a call whose closes are missing: an end or a call follows."""
    tag = next_tag(text, at, final)
    if tag is None:
        return skipped(text, at) == len(text)
    return WAIT if tag == WAIT else isinstance(tag, Tag) and tag.kind == OPEN


def end_counts(text: str, at: int, final: bool) -> bool | Wait:
    """Whether a ``</function>`` that ends at ``at`` closes a value too: the end of the call or of the text follows."""
    tag = next_tag(text, at, final)
    if tag is None:
        return skipped(text, at) == len(text)
    return WAIT if tag == WAIT else isinstance(tag, Tag) and tag.kind == CLOSE


def opens_nested(text: str, at: int, final: bool) -> bool | Wait:
    """Whether a ``<function=name>`` inside a value, ending at ``at``, begins a call and is no mere mention."""
    tag = next_tag(text, at, final)
    if not isinstance(tag, Tag):
        return WAIT if tag == WAIT else False
    return tag.kind in (PARAMETER, FUNCTION_END)


class ValueEnd:
    """Judges which tag ends a value. ``declared``: the tool's parameters, ``given``: those the call has."""

    def __init__(self, declared: Collection[str], given: Collection[str], closes: Closes) -> None:
        self._declared = declared
        self._given = given
        self._closes = closes
        self._depth = 0

    def judge(self, text: str, tag: Tag, at: int, base: int, final: bool) -> bool | Wait:
        """Whether ``tag``, which begins at ``at`` in ``text``, ends the value; ``base``: as in ``Closes.counts``."""
        if self._depth or tag.kind == FUNCTION:
            return self._nested(text, tag, final)
        if tag.kind == PARAMETER_END:
            return self._closes.counts(text, tag.end, base, final)
        if tag.kind == FUNCTION_END:
            return end_counts(text, tag.end, final)
        if tag.kind == CLOSE:
            return last_close(text, tag.end, final)
        # a close left out: the next parameter begins on a line of its own
        return tag.kind == PARAMETER and at > 0 and tag.name in self._declared and tag.name not in self._given

    def _nested(self, text: str, tag: Tag, final: bool) -> bool | Wait:
        """D8: a call written inside the value is counted; nothing in it ends the value."""
        if tag.kind == FUNCTION:
            opens = opens_nested(text, tag.end, final)
            if opens == WAIT:
                return WAIT
            self._depth += 1 if opens else 0
        elif tag.kind == FUNCTION_END:
            self._depth -= 1
        return False


def bare_call(text: str, names: Sequence[str], final: bool) -> bool | Wait:
    """Whether ``text`` begins with a JSON call object of an offered tool."""
    at = 0
    offered = tuple(json.dumps(name, ensure_ascii=False) for name in names)
    for options in (("{",), ('"name"',), (":",), offered, (",",), ('"arguments"',), (":",)):
        at = skipped(text, at)
        rest = text[at:]
        hit = next((option for option in options if rest.startswith(option)), None)
        if hit is None:
            may = not final and any(option.startswith(rest) for option in options)
            return WAIT if may else False
        at += len(hit)
    return True


class Braces:
    """Finds where a JSON object ends, each character looked at once. ``at``: how far it looked."""

    _marks = re.compile(r'["{}<]|\\.?', re.DOTALL)

    def __init__(self) -> None:
        self.at = 0
        self._depth = 0
        self._quoted = False

    def end(self, text: str) -> int | None:
        """Where the object that ``text`` begins with ends; 0: it is broken, none: not yet."""
        while mark := self._marks.search(text, self.at):
            if mark[0] == "\\":
                return None  # what it escapes is not here yet
            if self._take(mark[0]):
                self.at = mark.start()
                return 0
            self.at = mark.end()
            if self._depth == 0:
                return self.at
        self.at = len(text)
        return None

    def _take(self, mark: str) -> bool:
        """One mark further; whether it shows that the object is broken: a tag outside of a string."""
        if mark == '"':
            self._quoted = not self._quoted
        elif not self._quoted:
            self._depth += {"{": 1, "}": -1}.get(mark, 0)
            return mark == "<"
        return False


def call_object(text: str, names: Collection[str]) -> tuple[str, dict[str, Any]] | str:
    """Name and arguments of a JSON call object, or why it is none; ``names``: of the offered tools."""
    try:
        call = json.loads(text, strict=False, parse_constant=no_constant)
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return "broken JSON"
    name = call.get("name")
    if not isinstance(name, str) or not good_name(name, names):
        return "no name"
    return (name, arguments) if isinstance(arguments, dict) else "broken JSON"
