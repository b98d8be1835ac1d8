"""Calls out of the text of an answer (rows D1, D3, D4, D6, D8, D10).

What this file knows: the three forms a call is written in, and when a part of one is certain. What it does not: ids,
chunks, and who may call. It reads the answer only; reasoning never comes here.

The answer is walked by one step a state; a step that cannot decide yet waits for more text, and one that can does not
depend on how the text was cut. What is held, and no more: a mark that is not whole, the newline that may belong to a
close, a close until what follows says that it counts, a typed value, a JSON call object (a broken one is never sent),
a call while it is still a prefix of the one before, and a code fence that so far holds only calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from stages.arguments import TEXT, Kind, Value, dumped, given, kinds, quoted
from stages.calls import Content, Delta, Dropped, Gate, join
from stages.calltags import (
    CLOSE,
    FUNCTION,
    FUNCTION_END,
    OPEN,
    PARAMETER,
    PARAMETER_END,
    WAIT,
    Braces,
    Closes,
    Tag,
    ValueEnd,
    bare_call,
    blanks,
    call_object,
    good_name,
    skipped,
    tag_at,
)

_WINDOW = 4096
_MARK = re.compile(r"[<`{]")
_VALUE_MARK = re.compile(r"\n?<|\n\Z")
_FENCE = re.compile(r"(`{3,64})[^`\n]{0,40}\n")
_FENCE_END = re.compile(r"`{1,64}[ \t]{0,40}")
_BEGUN = re.compile(r"<[ \t]*(?:tool_call[ \t]*>|function[ \t]*=)|\{\s*\"name\"\s*:")
_FENCE_START = re.compile(r"`{1,2}\Z|`{3,64}[^`\n]{0,40}\Z")


class _Fence(msgspec.Struct):
    """A code fence that holds only calls so far: the text it is if that ends, and what it says if it does not."""

    ticks: str
    raw: str  # with the blanks before it
    gate: Gate  # as it was before
    deltas: list[Delta] = []


class CallReader:
    """Reads one answer. ``tools``: the offered tools, as OpenAI writes them; ``parallel``: more than one call (D6)."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], parallel: bool = True, bare: bool = True) -> None:
        functions = [tool.get("function") or {} for tool in tools]
        self._tools = {str(tool["name"]): kinds(tool.get("parameters")) for tool in functions if "name" in tool}
        self._names = list(self._tools)
        self._bare = bare
        self._gate = Gate(parallel)
        self._step: Callable[[], bool] = self._text
        self._buf = ""
        self._base = 0  # where it begins in the answer
        self._final = False
        self._out: list[Delta] = []
        self._fence: _Fence | None = None
        self._ticks = ""  # of the fence that is plain text
        self._gap = ""  # blanks since the start or since a call
        self._gapping = True
        self._fresh = True  # only blanks stand on this line so far
        self._tail = False  # a call ended and its last tag may follow
        self._called = False
        self._unread = False  # the text ended inside a call without a name
        self._braces = Braces()
        self._tagged = False
        self._declared: dict[str, Kind] = {}
        self._given: list[str] = []
        self._lead = False  # the next character may be the newline before the value
        self._value: Value | None = None  # none: it is not sent
        self._closes = Closes({})
        self._ends = ValueEnd({}, [], self._closes)

    @property
    def complete(self) -> int:
        """D10: calls sent that are whole."""
        return self._gate.complete

    @property
    def open(self) -> bool:
        """D10: whether the text ended inside a call that may be let out; sure after ``finish``."""
        begun = self._unread or self._step in (self._json, self._skip)
        return self._gate.busy or (begun and not self._gate.full)

    def inside(self, char: str) -> bool:
        """B6, B7: whether ``char``, the next one, stands in a call; behind a mark that may begin one it does so too."""
        if self._step != self._text:
            return True
        begun = _BEGUN.match(self._buf)
        if begun is None or begun[0][-1] != ">" or self._buf[begun.end() :].strip():
            return begun is not None
        return char.isspace() or char in "<{"

    @property
    def held(self) -> int:
        """Characters that nothing was said of yet."""
        return len(self._buf) + len(self._fence.raw if self._fence else self._gap)

    def push(self, text: str) -> list[Delta]:
        """Read on; what is certain now."""
        self._buf += text
        return self._run()

    def finish(self) -> list[Delta]:
        """No text follows: half a tag is text, and a call that is not closed stays open."""
        deltas = self._run(final=True)
        if self._step == self._json:
            self._drop("broken JSON")
            self._unread = True
        self._emit(self._gate.cut())
        if self._fence:
            self._fence_done()
        elif self._gap and not self._called:
            self._emit([Content(self._gap)])
        return join([*deltas, *self._flush()])

    def _run(self, final: bool = False) -> list[Delta]:
        rest = ""  # of a long text: what a step cuts off costs no more than a window
        while True:
            self._final = final and not rest
            if self._buf and self._step():
                if len(self._buf) > 2 * _WINDOW:
                    self._buf, rest = self._buf[:_WINDOW], self._buf[_WINDOW:] + rest
            elif rest:
                size = max(_WINDOW, len(self._buf))
                self._buf, rest = self._buf + rest[:size], rest[size:]
            else:
                return join(self._flush())

    def _flush(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _emit(self, deltas: list[Delta]) -> None:
        (self._fence.deltas if self._fence else self._out).extend(deltas)

    def _drop(self, reason: str) -> None:
        self._after_call()
        self._emit([Dropped(reason)])

    def _take(self, count: int) -> str:
        cut, self._buf = self._buf[:count], self._buf[count:]
        self._base += len(cut)
        if self._fence:
            self._fence.raw += cut
        return cut

    # Text around calls

    def _text(self) -> bool:
        if self._gapping:
            self._gap += self._take(blanks(self._buf, 0))
        if not self._buf:
            return False
        mark = _MARK.search(self._buf)
        start = mark.start() if mark else len(self._buf)
        if start:
            return self._say(start)
        if self._buf[0] == "`":
            return self._tick()
        if self._ticks:
            return self._say(1)
        return self._angle() if self._buf[0] == "<" else self._brace()

    def _say(self, count: int) -> bool:
        """The next ``count`` characters are content, and so is a fence that they stand in."""
        if self._fence:
            self._unfence(self._fence)
            return True
        text = self._gap + self._take(count)
        self._gap, self._gapping, self._tail = "", False, False
        self._emit([Content(text)])
        line = text.rpartition("\n")
        self._fresh = (bool(line[1]) or self._fresh) and not line[2].strip()
        return True

    def _after_call(self) -> None:
        """What follows stands behind a call: blanks before the next one are no content."""
        self._gap, self._gapping, self._called, self._fresh = "", True, True, True
        self._step = self._text

    def _angle(self) -> bool:
        wanted = [OPEN, *([FUNCTION] if self._fresh else []), *([CLOSE] if self._tail else [])]
        tag = tag_at(self._buf, 0, self._final, wanted)
        if tag == WAIT:
            return False
        if not isinstance(tag, Tag) or (tag.kind == FUNCTION and not good_name(tag.name, self._names)):
            return self._say(1)
        if tag.kind == FUNCTION:
            return self._begin(tag)
        if tag.kind == OPEN:
            return self._opening(tag.end)
        self._take(tag.end)
        self._tail, self._gap = False, ""
        return True

    def _opening(self, end: int) -> bool:
        """A ``<tool_call>`` opens a call only before one; in a sentence it is a word."""
        at = skipped(self._buf, end)
        if at == len(self._buf):
            return self._final and self._no_name(at, unread=True)
        if self._buf[at] == "{":
            self._take(at)
            return self._object(tagged=True)
        if self._buf[at] != "<":
            return self._say(end)
        tag = tag_at(self._buf, at, self._final)
        return tag != WAIT and self._inside(tag if isinstance(tag, Tag) else None, at, end)

    def _inside(self, tag: Tag | None, at: int, end: int) -> bool:
        kind = tag.kind if tag else FUNCTION if self._buf.startswith(FUNCTION, at) else ""
        if tag and kind == FUNCTION and good_name(tag.name, self._names):
            return self._begin(tag)
        if tag and kind == CLOSE:
            return self._no_name(tag.end)
        if kind in (FUNCTION, PARAMETER):
            self._no_name(at + 1)
            self._step = self._skip
            return True
        if kind == OPEN:
            self._take(at)  # written twice
            return True
        return self._say(end)

    def _no_name(self, count: int, unread: bool = False) -> bool:
        self._take(count)
        self._unread = unread
        self._drop("no name")
        return True

    def _skip(self) -> bool:
        """Through the end of a call that cannot be read."""
        at = self._buf.find("<")
        self._take(at if at >= 0 else len(self._buf))
        tag = tag_at(self._buf, 0, self._final, (OPEN, CLOSE)) if self._buf else WAIT
        if tag == WAIT:
            return False
        if isinstance(tag, Tag):
            self._step = self._text
        if not isinstance(tag, Tag) or tag.kind == CLOSE:
            self._take(tag.end if isinstance(tag, Tag) else 1)
        return True

    # Code fences

    def _tick(self) -> bool:
        ticks = self._fence.ticks if self._fence else self._ticks
        if not self._fresh:
            return self._say(1)
        if ticks:
            return self._fence_end(ticks)
        if found := _FENCE.match(self._buf):
            raw = self._gap + self._take(found.end())
            self._fence = _Fence(found[1], raw, self._gate.copy())
            self._gap, self._gapping = "", True
            return True
        return False if not self._final and _FENCE_START.match(self._buf) else self._say(1)

    def _fence_end(self, ticks: str) -> bool:
        line = _FENCE_END.match(self._buf)
        end = line.end() if line else 0
        if end == len(self._buf) and not self._final:
            return False
        if not self._buf.startswith(ticks) or self._buf[end : end + 1] not in ("", "\n"):
            return self._say(1)
        if self._fence and self._fence.deltas:
            self._take(end)
            self._fence_done()
            return True
        if self._fence:
            return self._say(1)
        self._ticks = ""
        return self._say(end)

    def _fence_done(self) -> None:
        """The fence held only calls: it is no content."""
        fence, self._fence = self._fence, None
        if fence and fence.deltas:
            self._emit(fence.deltas)
            if self._step == self._text:
                self._after_call()
        elif fence:
            self._emit([Content(fence.raw)])

    def _unfence(self, fence: _Fence) -> None:
        """The fence holds other text too: all of it is content."""
        self._fence, self._gate, self._ticks = None, fence.gate, fence.ticks
        self._gap, self._gapping, self._tail = "", False, False
        self._emit([Content(fence.raw)])
        self._fresh = not fence.raw.rpartition("\n")[2].strip()

    # JSON call objects

    def _brace(self) -> bool:
        found = bare_call(self._buf, self._names, self._final) if self._fresh and self._bare else False
        if found == WAIT:
            return False
        return self._object(tagged=False) if found else self._say(1)

    def _object(self, tagged: bool) -> bool:
        self._braces, self._tagged, self._step = Braces(), tagged, self._json
        self._gap = ""
        return True

    def _json(self) -> bool:
        end = self._braces.end(self._buf)
        if end is None:
            return False
        if end:
            self._call(self._take(end))
            self._tail = True
        else:
            self._take(self._braces.at)
            self._drop("broken JSON")
            self._step = self._skip if self._tagged else self._text
        return True

    def _call(self, text: str) -> None:
        call = call_object(text, self._names)
        if isinstance(call, str):
            return self._drop(call)
        name, arguments = call
        declared = self._tools.get(name, {})
        try:
            written = dumped({key: given(value, declared.get(key, TEXT)) for key, value in arguments.items()})
        except (ValueError, RecursionError):
            return self._drop("broken JSON")
        self._emit(self._gate.open(name))
        self._emit(self._gate.piece(written))
        self._emit(self._gate.close())
        return self._after_call()

    # Calls in tags

    def _begin(self, tag: Tag) -> bool:
        self._take(tag.end)
        self._declared = self._tools.get(tag.name, {})
        self._given, self._closes = [], Closes(self._declared)
        self._called, self._step = True, self._body
        self._gap = ""
        self._emit([*self._gate.open(tag.name), *self._gate.piece("{")])
        return True

    def _body(self) -> bool:
        """Between the parameters; stray text there is part of no value and of no content."""
        at = self._buf.find("<")
        self._take(at if at >= 0 else len(self._buf))
        tag = tag_at(self._buf, 0, self._final) if self._buf else WAIT
        if tag == WAIT:
            return False
        if not isinstance(tag, Tag):
            return bool(self._take(1))
        if tag.kind == PARAMETER:
            return self._open_value(tag)
        if tag.kind != PARAMETER_END:
            self._end_call(tag.kind)
        if tag.kind not in (OPEN, FUNCTION):  # these begin the next call
            self._take(tag.end)
        return True

    def _end_call(self, kind: str) -> None:
        self._emit([*self._gate.piece("}"), *self._gate.close()])
        self._after_call()
        self._tail = kind == FUNCTION_END

    def _open_value(self, tag: Tag) -> bool:
        self._take(tag.end)
        self._value, self._lead, self._step = None, True, self._in_value
        self._ends = ValueEnd(self._declared, self._given, self._closes)
        if tag.name not in self._given:  # a JSON object has each key once: of two the first is sent already
            self._value = Value(self._declared.get(tag.name, TEXT))
            self._emit(self._gate.piece((", " if self._given else "") + quoted(tag.name) + ": "))
            self._given.append(tag.name)
        return True

    def _in_value(self) -> bool:
        if self._lead:
            self._take(1 if self._buf[0] == "\n" else 0)
            self._lead = False
        mark = _VALUE_MARK.search(self._buf)
        start = mark.start() if mark else len(self._buf)
        if start:
            self._write(self._take(start))
            return True
        if mark is None or mark[0] == "\n":
            return False
        return self._mark(mark.end() - 1)

    def _mark(self, at: int) -> bool:
        """A tag or a mere ``<`` in a value."""
        tag = tag_at(self._buf, at, self._final)
        if tag == WAIT:
            return False
        if not isinstance(tag, Tag):
            self._write(self._take(at + 1))
            return True
        ends = self._ends.judge(self._buf, tag, at, self._base, self._final)
        if ends == WAIT:
            return False
        if ends:
            self._take(tag.end if tag.kind == PARAMETER_END else at)
            self._emit(self._gate.piece(self._value.end() if self._value else ""))
            self._step = self._body
        else:
            self._write(self._take(tag.end))
        return True

    def _write(self, text: str) -> None:
        if self._value:
            self._emit(self._gate.piece(self._value.add(text)))
