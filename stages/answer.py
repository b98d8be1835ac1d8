"""The answer without the thinking: a lone closing tag cut, calls read and counted (rows B7, D1, D6, D7, D10).

What this file knows: who is offered tools, and what is cut where nobody is. What it does not: how a call is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.calls import CallClosed, CallOpened, Content, Delta, Dropped
from stages.stray import Stray
from stages.toolcall import CallReader


class Answer:
    """One. ``tools``: the offered ones; none: calls are not read, nor are they for an empty list without a plan.

    ``opened``, ``closed``: calls sent, and those of them that are whole. ``dropped``: those cut.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] | None, parallel: bool, plan: bool, bare: bool = True
    ) -> None:
        self.opened = self.closed = self.dropped = 0
        self._offered = bool(tools)
        read = tools is not None and (plan or self._offered)
        self.reader = CallReader(tools or [], parallel, bare) if read else None
        self._stray = Stray(self.inside) if plan else None

    def inside(self, char: str) -> bool:
        """Whether ``char``, the next one, stands in a call."""
        return self.reader is not None and self.reader.inside(char)

    @property
    def open(self) -> bool:
        """D10: the same for a call that is offered; sure after ``finish``."""
        return self._offered and self.reader is not None and self.reader.open

    @property
    def held(self) -> int:
        """Characters that nothing was said of yet."""
        return (self._stray.held if self._stray else 0) + (self.reader.held if self.reader else 0)

    def push(self, text: str) -> list[Delta]:
        """Read on; what is certain now."""
        out: list[Delta] = []
        for part in self._stray.push(text) if self._stray else [text]:
            out += self._counted(self.reader.push(part)) if self.reader else [Content(part)]
        return out

    def finish(self) -> list[Delta]:
        """No text follows."""
        text = self._stray.finish() if self._stray else ""
        if not self.reader:
            return [Content(text)] if text else []
        return self._counted([*(self.reader.push(text) if text else []), *self.reader.finish()])

    def _counted(self, deltas: list[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Dropped):
                self.dropped += 1
            elif isinstance(delta, Content):
                out.append(delta)
            elif self._offered:
                self.opened += isinstance(delta, CallOpened)
                self.closed += isinstance(delta, CallClosed) and delta.complete
                out.append(delta)
            else:  # D7: a call that nobody offered
                self.dropped += isinstance(delta, CallOpened)
        return out
