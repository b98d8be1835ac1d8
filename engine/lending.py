"""Slot 0 lent to a guest: whether the copy of what it can write fits, the copy, and putting it back."""

from __future__ import annotations

from engine import memory
from engine.keeper import Keeper
from engine.load import Loaded
from engine.models.cache import Loan
from engine.pipe import complain

MARGIN = 64 << 20
"""Bytes that stay free beside a guest: a copy is never what takes the last of the memory."""


class Lending:
    """A :class:`engine.guest.Lender` of slot 0's cache. ``keeper``: whoever copies its rows elsewhere."""

    def __init__(self, loaded: Loaded, keeper: Keeper) -> None:
        self._loaded, self._keeper = loaded, keeper
        self._loan: Loan | None = None
        self._rows = 0  # of the cache, when it is nobody's guest's

    @property
    def nbytes(self) -> int:
        """Bytes of the copy, while there is one."""
        return 0 if self._loan is None else self._loan.nbytes

    def lend(self, rows: int, prompt: int) -> int | None:
        """Copy what a guest can write, as ``guest.Lender`` says."""
        loaded, cache = self._loaded, self._loaded.caches[0]
        steps, model = loaded.steps, loaded.model
        workspace = memory.of_prefill(max(prompt, 1), steps.grid, steps.at, model.workspace)
        if not self._fits(rows * model.kv_bytes_per_row + model.state_bytes + workspace):
            return None
        self._keeper.lend(0)
        self._rows = cache.rows
        try:
            self._loan = cache.lend(rows)
        except (MemoryError, RuntimeError) as error:  # nothing is lent before all is copied
            complain(f"no guest: its copy could not be made: {type(error).__name__}")
            return None
        return self._loan.nbytes

    def take_back(self) -> None:
        """Put it back and free the copy."""
        loan, self._loan = self._loan, None
        assert loan is not None
        cache = self._loaded.caches[0]
        try:
            cache.take_back(loan)
        except Exception as error:
            complain(f"what slot 0 held could not be put back behind a guest: {type(error).__name__}")
            cache.rows = self._rows  # for the next run, which begins anew
            raise

    def _fits(self, nbytes: int) -> bool:
        """So many bytes more leave the margin free and stay under the peak, where that is known (K5)."""
        device, ready = self._loaded.device, self._loaded.ready
        loose = memory.loose(device)
        if nbytes + MARGIN > memory.free(device) + loose:
            return False
        if device == "cuda":
            held = memory.reserved(device) - loose
        else:  # as the gate counts it: of a process what the engine accounts for, not the interpreter and mapped files
            held = ready.weights_bytes + ready.kv_bytes + self._keeper.nbytes
        return not ready.peak_limit or held + nbytes <= ready.peak_limit
