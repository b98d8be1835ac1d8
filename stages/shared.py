"""How much of a prompt is resident already, told by hashes alone."""

from __future__ import annotations

from collections.abc import Iterable

from stages.hashes import BLOCK


def shared(hashes: list[bytes], held: Iterable[bytes]) -> int:
    """Rows of the leading blocks that are held. Hashes are chained (``stages/hashes.py``), so their order says it."""
    known = frozenset(held)
    blocks = next((index for index, block in enumerate(hashes) if block not in known), len(hashes))
    return blocks * BLOCK
