"""What a scripted engine says of its memory: what its script has it hold, give back, and lend to a guest."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.protocol import LEVELS, Collect, GiveBack, Measure, Memory


class ScriptedMemory:
    """``taken`` bytes of weights and rows, ``levels`` beside them; ``free`` and ``limit`` (the peak) 0: not known.

    Of the allocator's free blocks ``stuck`` bytes stay. Prefills and guests' copies take so many bytes a row. A
    ``guest.Lender`` too: a copy takes memory while it is there.
    """

    def __init__(
        self,
        taken: int,
        levels: Items[tuple[str, int]],
        free: int,
        limit: int,
        workspace_per_row: int,
        copy_per_row: int,
        stuck: int = 0,
    ) -> None:
        unknown = sorted({name for name, _ in levels} - set(LEVELS))
        if unknown:
            raise ValueError(f"no such level: {', '.join(unknown)}")
        self._taken, self._levels, self._free, self._limit = taken, dict(levels), free, limit
        self._workspace_per_row, self._copy_per_row = workspace_per_row, copy_per_row
        self._known, self._stuck = free > 0, stuck
        self._workspace = self._copy = 0
        self._peak = self._reserved

    def answer(self, message: Measure | GiveBack | Collect) -> Memory:
        """Do it, and read."""
        if isinstance(message, Measure):
            self._workspace = message.rows * self._workspace_per_row
        elif isinstance(message, GiveBack):
            self._give_back(message.level, message.nbytes)
        else:
            self._give_back("allocator", self._levels.get("allocator", 0))
        levels = [(name, self._levels[name]) for name in LEVELS if name in self._levels]
        return Memory(
            message.epoch, message.run, self._allocated, self._reserved, self._peak, self._workspace,
            max(self._free, 1) if self._known else 0, levels,
        )  # fmt: skip

    def lend(self, rows: int, prompt: int) -> int | None:
        """Room for a guest's copy, as ``guest.Lender`` says."""
        copy = rows * self._copy_per_row
        needed = copy + prompt * self._workspace_per_row
        if (self._known and needed > self._free) or (self._limit and self._allocated + needed > self._limit):
            return None
        self._copy, self._free = copy, self._free - copy
        self._peak = max(self._peak, self._reserved)
        return copy

    def take_back(self) -> None:
        """The copy is freed."""
        self._free += self._copy
        self._copy = 0

    def _give_back(self, level: str, nbytes: int) -> None:
        stays = self._stuck if level == "allocator" else 0
        back = min(max(nbytes, 0), max(self._levels.get(level, 0) - stays, 0))
        if back:
            self._levels[level] -= back
            self._free += back

    @property
    def _allocated(self) -> int:
        return self._reserved - self._levels.get("allocator", 0)

    @property
    def _reserved(self) -> int:
        return self._taken + self._copy + sum(self._levels.values())
