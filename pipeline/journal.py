"""The journal: one step a transition, in the order they fired. It is what a replay must reproduce, row for row."""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, frozen=True):
    """One transition. ``time`` in seconds on the core's clock; ``line`` is the comment a client got, or ""."""

    number: int
    time: float
    life: str
    id: int
    trigger: str
    row: str
    source: str
    dest: str
    line: str = ""

    def __str__(self) -> str:
        """As a person reads it."""
        line = f"  : {self.line}" if self.line else ""
        what = f"{self.life} {self.id}"
        return f"{self.number:>6} {self.time:>10.3f} {what:<12} {self.source} → {self.dest}  {self.row}{line}"
