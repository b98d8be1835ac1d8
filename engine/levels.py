"""The engine's memory as it answers for it: what is taken, what each level could give back, and giving it back (J2).

====================  ================================================================================================
level                 entries
====================  ================================================================================================
``allocator``         free blocks of a device's allocator, all at once. Of the CPU's: 0, it is not known beforehand
``images``            none yet
``snapshots``         checkpoints of parked conversations but the last of each, then prompt ends kept for a next choice
``guest_copies``      none: a copy is freed with its guest
``park``              parked conversations, the least used first; none where they take no memory of the device
``graphs``            all recordings, which share one pool; none while any run is in a slot
``checkpoints``       checkpoints of slots but the newest of each
====================  ================================================================================================

What two places hold counts with the one that is given back last.
"""

from __future__ import annotations

from typing import Protocol

from engine import memory
from engine.keeper import Keeper
from engine.load import Loaded, prefill_bytes
from engine.models.graphs import Graphs
from engine.protocol import LEVELS, Collect, GiveBack, Measure, Memory
from engine.slots import Slots


class Copy(Protocol):
    """Who has a guest's copy."""

    @property
    def nbytes(self) -> int:
        """Bytes of it, 0 without a guest."""
        ...


class Levels:
    """``slots`` and ``keeper`` hold what is given back; ``copy``: what a guest's holder had."""

    def __init__(self, loaded: Loaded, keeper: Keeper, slots: Slots, copy: Copy) -> None:
        self._device, self._ready = loaded.device, loaded.ready
        self._keeper, self._slots, self._copy = keeper, slots, copy
        self._graphs: Graphs | None = getattr(loaded.model, "graphs", None)
        self._apart = memory.apart(loaded.device)
        self._window, self._prefill = loaded.window, prefill_bytes(loaded.steps, loaded.model)
        self._workspace = 0

    def answer(self, message: Measure | GiveBack | Collect) -> Memory:
        """Do it, and read the memory: see ``memory`` for what each number counts."""
        if isinstance(message, Measure):
            self._workspace = self._prefill(max(1, min(message.rows, self._window)))
        elif isinstance(message, GiveBack):
            self._give_back(message.level, message.nbytes)
        else:
            memory.collect(self._device)
        return Memory(
            message.epoch,
            message.run,
            allocated=self._allocated(),
            reserved=memory.reserved(self._device),
            peak=memory.high_water(self._device),
            workspace=self._workspace,
            free=memory.free(self._device),
            levels=self._levels(),
            growth=self._keeper.growth,
        )

    def rest(self) -> None:
        """No run is in a slot: what an allocator holds free over the slack goes back to the driver (J1)."""
        if self._loose() > self._ready.slack:
            memory.empty(self._device)

    def _allocated(self) -> int:
        ready = self._ready
        logits = 0 if self._apart else self._slots.end_bytes()
        return ready.weights_bytes + ready.kv_bytes + self._keeper.nbytes + self._copy.nbytes + logits

    def _levels(self) -> list[tuple[str, int]]:
        spare = self._keeper.spare()
        spare["allocator"] = self._loose()
        spare["graphs"] = self._recorded()
        spare["snapshots"] += sum(self._end_bytes(slot) for slot in self._slots.kept_ends())
        return [(level, spare.get(level, 0)) for level in LEVELS]

    def _give_back(self, level: str, nbytes: int) -> None:
        if level == "allocator" and nbytes > 0:
            memory.empty(self._device)
        elif level == "graphs" and nbytes > 0 and self._recorded() and self._graphs is not None:
            self._graphs.free()
        else:
            freed = self._keeper.give_back(level, nbytes)
            for slot in self._slots.kept_ends() if level == "snapshots" else ():
                if freed >= nbytes:
                    return
                freed += self._end_bytes(slot)
                self._slots.forget_end(slot)
                self._keeper.forget_end(slot)

    def _end_bytes(self, slot: int) -> int:
        """What forgetting the kept end of a slot's last prompt frees."""
        return self._keeper.end_bytes(slot) + (0 if self._apart else self._slots.end_bytes(slot))

    def _recorded(self) -> int:
        """Bytes of recordings that nobody plays."""
        return 0 if self._graphs is None or self._slots.live else self._graphs.recorded_bytes

    def _loose(self) -> int:
        """Free blocks of the allocator: not those of recordings, which stay theirs."""
        return max(0, memory.loose(self._device) - (self._graphs.recorded_bytes if self._graphs is not None else 0))
