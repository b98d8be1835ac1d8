"""What one step of a model is given: rows of one sequence or of several, each sequence over its own cache."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.models.cache import Cache


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's rows of a step: ``tokens`` become the rows from ``start`` on of ``cache``.

    Each row sees rows 0 … ``start - 1``, its ancestors and itself, and stands at the position ``start`` + how many
    ancestors it has. ``parents``: of each token the index in ``tokens`` of the one it follows, smaller than its own;
    -1: it follows row ``start - 1``; None: each follows the one before. ``wanted``: logits are given of the last so
    many rows. ``draft``: rows may be refused: ``cache.keep`` says which stay before the cache is used again.
    """

    cache: Cache
    tokens: Items[int]
    start: int
    parents: Items[int] | None = None
    wanted: int = 1
    draft: bool = False
