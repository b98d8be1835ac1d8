"""What stays resident from one run to the next, and where: in slot 0, parked in memory, in files (G2, G5, M12).

A side slot begins with what is parked or filed, and what it held is parked behind each run or lost.

A prompt is compared with what is held by its tokens; the place with the longest part to go on from wins, slot 0 before
the park before files. Whatever else the slot held is parked before it is overwritten, if losing it would cost a prefill
worth speaking of. The owner calls ``begin`` or ``stay`` before a run writes to its slot, ``mark`` for every checkpoint
it makes, and ``end`` or ``drop`` behind the run; between steps ``work`` writes files, a piece at a time. The server is
told of what is held by block hashes alone (``messages``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.disk import Disk
from engine.models.cache import Cache, Mark
from engine.park import Park, Parked
from engine.prefix import Prefix, Whole, blocks, shared, with_mark
from engine.protocol import FromEngine, OwnWork, Resident
from engine.tally import Tally, alone, enough, without

WORTH = 256
"""Rows that are parked rather than lost. Fewer, where the prefill's grid is finer."""

Place = tuple[str, int]
"""As in ``Resident``: where, and the number of the slot or entry there."""


class Begin(NamedTuple):
    """``rows`` of the prompt are in the slot, ``source`` where they come from; 0 rows have none."""

    rows: int
    source: str


@dataclass(slots=True)
class Writing:
    """Files being written from the first ``rows`` rows of a slot."""

    slot: int
    rows: int
    pieces: Generator[None]
    begun: bool = False
    marks: Sequence[Mark] = ()


class Residency:
    """``grid``: rows between checkpoints. ``park_bytes``: what may be parked. ``disk``: the files, where there are any.

    ``recurrent``: a state stands beside the rows. ``whole``: what of a shared part a run may begin behind. ``apart``:
    what is parked takes none of the memory that slots are in. ``marks_bytes``: what checkpoints of all slots can come
    to.
    """

    def __init__(
        self,
        epoch: int,
        slots: int,
        grid: int,
        park_bytes: int,
        disk: Disk | None = None,
        *,
        recurrent: bool = False,
        whole: Whole = int,
        apart: bool = False,
        marks_bytes: int = 0,
    ) -> None:
        self._epoch, self._recurrent, self._whole, self._apart = epoch, recurrent, whole, apart
        self._worth, self._marks_bytes = min(grid, WORTH), marks_bytes
        self._slots = [Prefix([], []) for _ in range(slots)]
        self._caches: list[Cache | None] = [None] * slots
        self._park, self._disk = Park(park_bytes), disk
        self._writing: deque[Writing] = deque()
        self._said: list[FromEngine] = []
        self._told: dict[Place, Resident] = {}
        self._changed = True

    def nbytes(self, kept: Sequence[Mark] = ()) -> int:
        """Bytes of what is parked and of the checkpoints of slots, with those that the owner has ``kept`` besides."""
        marks = [*self._marks, *self._pinned(kept)]
        return Tally(marks).nbytes if self._apart else Tally([*marks, *self._park.marks]).nbytes + self._park.row_bytes

    @property
    def growth(self) -> int:
        """What checkpoints of slots may still take, and what may still be parked where that is memory of the device."""
        marks = max(self._marks_bytes - Tally(self._marks).nbytes, 0)
        return marks + (0 if self._apart else max(self._park.limit - self._park.nbytes, 0))

    def spare(self, kept: Sequence[Mark] = ()) -> dict[str, int]:
        """What these levels could give back, each when those before it are gone (``protocol.LEVELS``)."""
        pinned = self._pinned(kept)
        checkpoints = Tally(alone(self._spare, [*self._newest, *pinned])).nbytes
        if self._apart:
            return {"snapshots": 0, "park": 0, "checkpoints": checkpoints}
        others = [*self._marks, *pinned]
        parked = Tally(alone(self._park.marks, others)).nbytes + self._park.row_bytes
        snapshots = Tally(self._stored(others)).nbytes
        return {"snapshots": snapshots, "park": parked - snapshots, "checkpoints": checkpoints}

    def give_back(self, level: str, nbytes: int, kept: Sequence[Mark] = ()) -> int:
        """Let entries of a level of ``spare`` go, no more than free ``nbytes``; what that freed.

        Of ``snapshots`` those of the conversation least used go first; of ``checkpoints`` those of the last slot.
        """
        pinned, freed = self._pinned(kept), 0
        if level == "snapshots" and not self._apart:
            going, freed = enough(self._stored([*self._marks, *pinned]), nbytes)
            self._park.thin(going)
        elif level == "park" and not self._apart:
            freed = self._park.shrink(nbytes, [*self._marks, *pinned])
        elif level == "checkpoints":
            held = [*self._newest, *pinned, *(() if self._apart else self._park.marks)]
            going, freed = enough(alone(self._spare, held), nbytes)
            for prefix in self._slots:
                prefix.marks = without(prefix.marks, going)
        self._changed = self._changed or freed > 0
        return freed

    @property
    def busy(self) -> bool:
        """There are files to be written."""
        return bool(self._writing)

    def begin(self, slot: int, cache: Cache, tokens: list[int], hashes: Sequence[bytes]) -> Begin:
        """Ready ``slot`` for a run over ``tokens``: ``cache`` holds its first rows then, and stands behind them."""
        self._caches[slot] = cache
        if slot:
            self._slots[slot] = Prefix([], [])
        source = "slot"
        while True:
            held = self._slots[slot]
            rows = self._usable(held, tokens)
            parked, more = self._park.best(lambda prefix: self._usable(prefix, tokens))
            chain = self._disk.find(tokens) if self._disk is not None else []
            filed = len(chain) * self._disk.grid if self._disk is not None else 0
            if parked is not None and more > rows and more >= filed:
                self._fetch(slot, cache, parked, tokens, more)
                source = "park"
            elif self._disk is not None and filed > rows:
                self._put_aside(slot, cache, shared(held.tokens, tokens))
                self._release(slot, 0)
                prefix = self._disk.load(chain, cache)
                self._disk.learn(chain, hashes)
                if prefix.tokens:  # otherwise the slot is as it was; the file is gone, so it is not found again
                    self._slots[slot] = prefix
                    source = "disk"
            else:
                break
        self._put_aside(slot, cache, rows)
        self._stand(held, cache, rows)
        held.hashes = list(hashes[: blocks(hashes, held.tokens, rows)])
        self._release(slot, rows)
        self._plan(slot)
        self._changed = True
        return Begin(rows, source if rows else "none")

    def stay(self, slot: int, rows: int) -> None:
        """The owner itself put ``slot`` behind its first ``rows`` rows: another run begins there."""
        self._slots[slot].cut(rows)
        self._slots[slot].stands = rows
        self._release(slot, rows)
        self._changed = True

    def mark(self, slot: int, mark: Mark | None, instead: int = 0) -> None:
        """A checkpoint of the slot's run, whose rows up to it are computed, ``instead`` of that so many rows behind.

        None is none.
        """
        if mark is not None:
            left = [old for old in self._slots[slot].marks if old.rows != instead]
            self._slots[slot].marks = with_mark(left, mark)

    def end(self, slot: int, tokens: list[int], hashes: Sequence[bytes], *, more: bool = False) -> bool:
        """The run in ``slot`` is over: whether these tokens' rows stay anywhere. ``hashes``: of its prompt.

        A side slot keeps no conversation (row M12): it is parked, or lost. ``more``: another run begins in these rows.
        """
        cache, rows = self._caches[slot], len(tokens)
        if cache is None:
            return False
        marks = [mark for mark in self._slots[slot].marks if mark.rows <= rows]
        told = list(hashes[: blocks(hashes, tokens, rows)])
        stands = rows if cache.rewind(rows) == rows else 0
        self._slots[slot] = Prefix(list(tokens), told, marks, stands)
        self._release(slot, rows)
        self._plan(slot)
        self._changed = True
        if not slot or more:
            return True
        parked = self._put_aside(slot, cache, 0)
        self._slots[slot] = Prefix([], [])
        return parked

    def lend(self, slot: int) -> None:
        """A guest writes to the slot's rows for a while: what copies them stops, and begins anew behind the run."""
        self._release(slot, 0)

    def drop(self, slot: int) -> None:
        """Nothing of ``slot`` is trusted: a fault."""
        self._release(slot, 0)
        self._slots[slot] = Prefix([], [])
        self._changed = True

    def work(self) -> bool:
        """A piece of what is to be written. Whether there is more. What raises is not tried again."""
        if not self._writing:
            return False
        writing = self._writing[0]
        if not writing.begun:
            writing.begun = True
            self._said.append(OwnWork(self._epoch, "disk write", True))
        try:
            over = next(writing.pieces, writing) is writing
        except Exception:
            self._over(writing)
            raise
        if over:
            self._over(writing)
            self._plan(writing.slot, writing.rows)
        return bool(self._writing)

    def messages(self) -> list[FromEngine]:
        """What is to be said since the last time: own work, and every place that holds something else now."""
        said, self._said = self._said, []
        if not self._changed:
            return said
        self._changed = False
        now = {(held.where, held.slot): held for held in self._places()}
        gone = [Resident(self._epoch, *place, 0) for place in self._told if place not in now]
        new = [held for place, held in now.items() if self._told.get(place) != held]
        self._told = now
        return [*said, *gone, *new]

    def _places(self) -> Iterator[Resident]:
        held = self._slots[0]
        if held.tokens:
            nbytes = sum(mark.nbytes for mark in held.marks)
            yield Resident(self._epoch, "slot", 0, len(held.tokens), list(held.hashes), nbytes)
        for parked in self._park:
            prefix = parked.prefix
            yield Resident(self._epoch, "park", parked.number, len(prefix.tokens), list(prefix.hashes), parked.nbytes)
        for number, rows, hashes, nbytes in self._disk.held() if self._disk is not None else ():
            yield Resident(self._epoch, "disk", number, rows, hashes, nbytes)

    @property
    def _marks(self) -> list[Mark]:
        return [mark for held in self._slots for mark in held.marks]

    @property
    def _newest(self) -> list[Mark]:
        return [mark for held in self._slots for mark in held.marks[-1:]]

    @property
    def _spare(self) -> list[Mark]:
        """Checkpoints that are not their slot's newest; slot 0's come last."""
        return [mark for held in reversed(self._slots) for mark in held.marks[:-1]]

    def _stored(self, others: Sequence[Mark]) -> list[Mark]:
        """Checkpoints of parked conversations that are not their last, and that nobody else holds."""
        lasts = [mark for parked in self._park for mark in parked.prefix.marks[-1:]]
        return alone(self._park.marks, [*others, *lasts])

    def _pinned(self, kept: Sequence[Mark]) -> list[Mark]:
        """Checkpoints that stay whatever is given back: the owner's, and of what is being written."""
        return [*kept, *(mark for writing in self._writing for mark in writing.marks)]

    def _usable(self, prefix: Prefix, tokens: list[int]) -> int:
        return prefix.usable(tokens, recurrent=self._recurrent, whole=self._whole)

    def _stand(self, held: Prefix, cache: Cache, rows: int) -> None:
        """Go on behind ``rows``, where the state stands or was marked."""
        if self._recurrent and (rows == 0 or held.stands != rows):
            cache.go_back(next((mark for mark in held.marks if mark.rows == rows), None))
        elif not self._recurrent:
            cache.rewind(rows)
        held.cut(rows)
        held.stands = rows

    def _fetch(self, slot: int, cache: Cache, parked: Parked, tokens: list[int], rows: int) -> None:
        """Put a parked conversation's first ``rows`` rows into ``slot``. It stays parked where the rest is worth it."""
        prefix = parked.prefix
        if len(prefix.tokens) - rows < self._worth:
            self._park.take(parked)
        else:
            self._park.touch(parked)
        self._put_aside(slot, cache, shared(self._slots[slot].tokens, tokens))
        self._release(slot, 0)
        cache.put(0, {name: tensor[:rows] for name, tensor in parked.rows.items()})
        marks = [mark for mark in prefix.marks if mark.rows <= rows]
        self._slots[slot] = Prefix(prefix.tokens[:rows], list(prefix.hashes), marks)

    def _put_aside(self, slot: int, cache: Cache, staying: int) -> bool:
        """Park what ``slot`` holds, whole, if more than its first ``staying`` rows would be lost; whether it is."""
        held = self._slots[slot]
        rows = len(held.tokens)
        if rows - staying < self._worth:
            return False
        marks = held.marks
        if self._recurrent and held.stands == rows and (mark := cache.mark()) is not None:
            marks = with_mark(marks, mark)
        best = self._usable(Prefix(held.tokens, [], marks), [*held.tokens, 0])
        there, most = self._park.best(lambda prefix: self._usable(prefix, [*held.tokens, 0]))
        if there is not None and most >= best:
            self._park.touch(there)
            return True
        size = rows * sum(tensor.nbytes for tensor in cache.copy(0, 1).values())
        for kept in (marks, marks[-1:]):
            if self._park.room(size + sum(mark.nbytes for mark in kept), held):
                self._said.append(OwnWork(self._epoch, "park copy", True))
                try:
                    copies = {name: tensor.cpu() for name, tensor in cache.copy(0, rows).items()}
                    copied = [_on_host(mark) for mark in kept]
                finally:
                    self._said.append(OwnWork(self._epoch, "park copy", False))
                self._park.add(Prefix(list(held.tokens), list(held.hashes), copied), copies)
                return True
        return False

    def _plan(self, slot: int, behind: int = 0) -> None:
        """Have the files written that slot 0's prefix is worth, where that are more than ``behind`` rows."""
        cache, held = self._caches[slot], self._slots[slot]
        if slot or self._disk is None or cache is None or any(writing.slot == slot for writing in self._writing):
            return
        rows = self._disk.missing(held)
        if rows > behind:
            prefix = Prefix(held.tokens[:rows], list(held.hashes), list(held.marks))
            self._writing.append(Writing(slot, rows, self._disk.save(prefix, cache), marks=prefix.marks))

    def _release(self, slot: int, rows: int) -> None:
        """Rows from ``rows`` on of ``slot`` will be written: what is still to copy them stops."""
        for writing in [one for one in self._writing if one.slot == slot and one.rows > rows]:
            writing.pieces.close()
            self._over(writing)

    def _over(self, writing: Writing) -> None:
        self._writing.remove(writing)
        self._changed = True
        if writing.begun:
            self._said.append(OwnWork(self._epoch, "disk write", False))


def _on_host(mark: Mark) -> Mark:
    return Mark(mark.rows, {name: tensor.cpu() for name, tensor in mark.tensors.items()})
