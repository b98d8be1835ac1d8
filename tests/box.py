"""A server in virtual time whose engine has memory to account for, whatever its script says."""

from __future__ import annotations

from typing import Any

import msgspec

from engine import protocol as wire
from engine.scripted import Answer, Script
from pipeline import events as ev
from tests.world import World

TEN = Script(answers=[Answer(ids=[1] * 10, decode_ms=100.0)])


class Store(msgspec.Struct):
    """Memory as an engine would have it: every row of a prompt takes ``per_row`` to read, every live run ``a_run``."""

    allocated: int = 100
    free: int = 1_000
    per_row: int = 1
    a_run: int = 0
    ceiling: int = 0
    peak: int = 0
    most_rows: int = 0
    workspaces: list[tuple[int, int]] = []
    levels: dict[str, int] = {}
    growth: int = -1
    garbage: int = 0
    device: str = "cpu"
    runs: list[int] = []
    rows: int = 0
    over: int = 0

    @property
    def taken(self) -> int:
        """With the prefill last measured for."""
        return self.allocated + self.a_run * len(self.runs) + self.rows * self.per_row


class Box(World):
    """A server whose engine has memory to account for. ``given`` is what was asked of it."""

    def __init__(self, store: Store, script: Script = TEN, **policy: Any) -> None:
        self.store, self.given = store, list[tuple[str, int]]()
        super().__init__(script, **policy)

    def _tell(self, message: wire.ToEngine) -> None:
        store = self.store
        match message:
            case wire.Measure():
                store.rows = message.rows
            case wire.GiveBack():
                self.given.append((message.level, message.nbytes))
                store.levels[message.level] -= message.nbytes
                store.allocated -= message.nbytes
                store.free += message.nbytes
            case wire.Collect():
                self.given.append(("collect", 0))
                store.allocated, store.garbage = store.allocated - store.garbage, 0
            case wire.Start():
                store.over += store.taken > store.peak > 0
                store.runs = [*store.runs, message.run]
                return super()._tell(message)
            case _:
                return super()._tell(message)
        if self._engine is None:
            return None
        allocated, workspace = store.allocated + store.a_run * len(store.runs), store.rows * store.per_row
        levels = list(store.levels.items())
        read = wire.Memory(
            message.epoch, message.run, allocated, allocated, 0, workspace, store.free, levels, store.growth
        )
        return self._hear([(self.now + 0.001, read)])

    def _fact(self, message: Any) -> ev.Event | None:
        store = self.store
        if isinstance(message, wire.Ready):
            message = msgspec.structs.replace(
                message, ceiling=store.ceiling, peak_limit=store.peak, most_rows=store.most_rows,
                workspaces=store.workspaces, device=store.device,
            )  # fmt: skip
        if isinstance(message, wire.Ended):
            store.runs = [run for run in store.runs if run != message.run]
        return super()._fact(message)

    def _spawn(self, epoch: int) -> None:
        self.store.runs = []
        super()._spawn(epoch)
