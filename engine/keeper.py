"""Between the runs of a slot and what stays resident: when rows are looked for, checkpoints made and rows let go.

What is resident, where, and for how long is ``resident``'s; this knows the slots' caches and when a run begins, reads
and ends. Whatever goes wrong with rows that were kept costs a prefill and nothing else: the slot is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path

from engine import memory
from engine.disk import Disk
from engine.load import ROUND_ROWS, Loaded, marks_bytes
from engine.models.cache import Cache, Mark
from engine.native import packed
from engine.pipe import complain
from engine.protocol import Config, FromEngine, Start
from engine.resident import Residency
from engine.sequence import Sequence
from engine.steps import Steps

PARK_SHARE = 4
"""Of the free memory what is parked may take one part in so many, where nobody says."""
APART = 64
"""Rows between checkpoints of an answer."""


class Keeper:
    """``grid``: rows between two checkpoints of a prompt; its end is one too.

    ``steps``: where a prompt that was read may be gone on from (``uncut``); None: at any row.
    """

    def __init__(self, residency: Residency, caches: Items[Cache], grid: int, steps: Steps | None) -> None:
        self._residency, self._caches, self._grid, self._steps = residency, caches, grid, steps
        self._prompts = [0] * len(caches)  # rows of the last run's prompt
        self._ends: list[Mark | None] = [None] * len(caches)  # the state behind a prompt whose end is kept
        self._answers: list[list[int]] = [[] for _ in caches]  # rows of the run's checkpoints behind its prompt

    @property
    def nbytes(self) -> int:
        """Bytes of what is held beside the slots' own rows."""
        return self._residency.nbytes(self._kept)

    @property
    def busy(self) -> bool:
        """There is something to be written."""
        return self._residency.busy

    def begin(self, slot: int, start: Start, at_end: bool) -> tuple[int, str]:
        """Make a slot ready for a run, as ``slots.Keeper`` says."""
        cache, before = self._caches[slot], self._prompts[slot]
        self._prompts[slot], self._answers[slot] = len(start.tokens), []
        end, self._ends[slot] = self._ends[slot], None
        if at_end:
            cache.go_back(end)
            self._ends[slot] = end if start.keep_end else None
            self._residency.stay(slot, len(start.tokens))
            return 0, "none"
        try:
            rows, source = self._residency.begin(slot, cache, start.tokens, start.hashes)
            if self._steps is not None and (source != "slot" or rows < before):
                rows = uncut(self._steps, rows)
            return rows, source if rows else "none"
        except Exception as error:
            complain(f"what slot {slot} held is forgotten: {type(error).__name__}")
            self._residency.drop(slot)
            cache.go_back(None)
            return 0, "none"

    def lend(self, slot: int) -> None:
        """A guest will write to the slot's rows; all is put back behind it."""
        self._residency.lend(slot)

    def read(self, slot: int, run: Sequence) -> None:
        """A prefill step of a run is done: a checkpoint where one belongs."""
        at_end = run.rows == run.prompt
        if at_end or run.rows % self._grid == 0:
            mark = self._caches[slot].mark()
            self._residency.mark(slot, mark)
            if at_end and run.start.keep_end:
                self._ends[slot] = mark

    def wrote(self, slot: int, before: int, rows: int) -> None:
        """A round took a slot from ``before`` rows to ``rows``: a checkpoint now and then, two of them at most.

        A stop in the text can be many rounds behind: its first token is not sent either. A state goes back by two.
        """
        if before // APART == rows // APART:
            return
        marked, mark = self._answers[slot], self._caches[slot].mark()
        if mark is not None:
            self._residency.mark(slot, mark, instead=marked.pop(0) if len(marked) == 2 else 0)
            marked.append(mark.rows)

    def end(self, slot: int, run: Sequence) -> int:
        """A run is over: of its first ``run.rows`` rows so many stay, all or none; after a fault none does."""
        tokens = [*run.start.tokens, *run.answer][: run.rows]
        stay, more = False, run.keeps_end
        self._ends[slot] = self._ends[slot] if more else None
        try:
            if tokens:
                stay = self._residency.end(slot, tokens, run.start.hashes, more=more)
        except Exception as error:
            complain(f"what slot {slot} held is forgotten: {type(error).__name__}")
            tokens = []
        if not tokens:
            self._residency.drop(slot)
        return run.rows if stay else 0

    @property
    def growth(self) -> int:
        """What checkpoints and the park may still take of the device's memory (row M7)."""
        return self._residency.growth

    def spare(self) -> dict[str, int]:
        """What levels of memory could give back, by name (``protocol.LEVELS``)."""
        return self._residency.spare(self._kept)

    def give_back(self, level: str, nbytes: int) -> int:
        """Let entries of a level go, no more than free ``nbytes``; what that freed."""
        return self._residency.give_back(level, nbytes, self._kept)

    def forget_end(self, slot: int) -> None:
        """The end of the slot's last prompt is not gone on from."""
        self._ends[slot] = None

    def end_bytes(self, slot: int) -> int:
        """What forgetting it frees: nothing where its state is one of the slot's checkpoints."""
        others = [mark for at, mark in enumerate(self._ends) if mark is not None and at != slot]
        return self.nbytes - self._residency.nbytes(others)

    @property
    def _kept(self) -> list[Mark]:
        return [mark for mark in self._ends if mark is not None]

    def work(self) -> bool:
        """A piece of what is to be written. Whether there is more. What fails is not written, and harms no run."""
        try:
            return self._residency.work()
        except Exception as error:
            complain(f"a prefix is not written: {type(error).__name__}")
            return self.busy

    def messages(self) -> list[FromEngine]:
        """What is to be said of what is resident."""
        return self._residency.messages()


def keeper_for(config: Config, loaded: Loaded) -> Keeper:
    """What is kept with these settings."""
    recurrent = loaded.model.state_bytes > 0  # its checkpoints are on the grid
    residency = Residency(
        config.epoch,
        len(loaded.caches),
        config.prefix_chunk,
        park_limit(config, loaded),
        _disk(config, loaded) if config.disk_cache_bytes > 0 and config.data_dir else None,
        recurrent=recurrent,
        apart=memory.apart(loaded.device),
        marks_bytes=marks_bytes(loaded.model.state_bytes) * len(loaded.caches),
    )
    steps = None if recurrent or same_bits(loaded) else loaded.steps
    return Keeper(residency, loaded.caches, config.prefix_chunk, steps)


def park_limit(config: Config, loaded: Loaded) -> int:
    """What parked conversations may take: as asked for or a share of what is free, never over the ceiling (J1).

    Below it is also room for the checkpoints of every slot.
    """
    limit = config.park_bytes if config.park_bytes >= 0 else max(memory.free("cpu"), 0) // PARK_SHARE
    ready = loaded.ready
    if memory.apart(loaded.device) or not ready.ceiling:
        return limit
    taken = max(memory.reserved(loaded.device), ready.weights_bytes + ready.kv_bytes)
    return max(0, min(limit, ready.ceiling - taken - marks_bytes(loaded.model.state_bytes) * len(loaded.caches)))


def same_bits(loaded: Loaded) -> bool:
    """Every row comes out the same whatever step it is part of, not those of rounds alone: a prompt is cut anywhere."""
    return loaded.model.alike > ROUND_ROWS


def uncut(steps: Steps, rows: int) -> int:
    """At most ``rows`` rows, as many as whole steps make: from there on a prompt is cut as it is from its begin.

    So the same prompt again has the same bits where a step's cut changes them (F8). A prompt that goes on behind the
    last answer begins right there (G5): it was never read before.
    """
    return rows - rows % steps.at(rows)


def _disk(config: Config, loaded: Loaded) -> Disk | None:
    """The files of this model, computed this way; None where the folder cannot be used."""
    cut = () if same_bits(loaded) else (loaded.steps.blocks, loaded.ready.threads)
    how = repr((loaded.device, loaded.model.path, packed.layout(), cut))
    try:
        identity = packed.identity_of(checkpoint_files(Path(config.model)), how)
        folder, limit = Path(config.data_dir) / "prefixes", config.disk_cache_bytes
        return Disk(folder, limit, identity, config.prefix_chunk, loaded.caches[0], complain)
    except OSError as error:
        complain(f"No prefix is kept in files: {type(error).__name__}.")
        return None


def checkpoint_files(path: Path) -> list[Path]:
    """What says which model it is: the file, or a folder's weights and settings."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
