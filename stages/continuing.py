"""Whether a prompt goes on with a conversation that is held, told by its blocks' hashes alone (rows M3, M11).

Hashes are chained (``stages/hashes.py``): a block that two prompts have in common at one place says that all before it
is alike, so what they share is found by halving. Whole blocks are compared, and the end of the first user message lies
inside one: where it is less than a block behind what is shared, ``known`` decides: this very beginning, through its
first user message, was in slot 0 before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from stages.hashes import BLOCK


class Opening(msgspec.Struct, frozen=True):
    """The beginning of a prompt, in rows: through its system prompt and tools, and through its first user message.

    0: nobody knows (a completion, a template that cannot say).
    """

    head: int = 0
    rows: int = 0
    known: bool = False


def continued(
    hashes: Sequence[bytes], held: Iterable[tuple[str, Sequence[bytes]]], opening: Opening, chunk: int
) -> str:
    """Where the first of ``held`` is that the prompt starts with, but for less than a chunk of it, past its opening.

    "": none. Of each one block says whether it can be: there may be many.
    """
    for where, blocks in held:
        least = max(0, (len(blocks) * BLOCK - chunk) // BLOCK + 1)
        if not blocks or len(hashes) < least or (least and hashes[least - 1] != blocks[least - 1]):
            continue
        rows = alike(hashes, blocks) * BLOCK
        if rows and _past(rows, opening, chunk):
            return where
    return ""


def in_head(hashes: Sequence[bytes], held: Iterable[Sequence[bytes]], head: int) -> int:
    """Most rows that one of ``held`` has in common with the prompt and that end inside the client's head (row M11).

    Every conversation of that client begins with its head: that much is no reason to wait for slot 0.
    """
    rows = (alike(hashes, blocks) * BLOCK for blocks in held)
    return max((count for count in rows if count <= head), default=0)


def alike(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many blocks both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


def _past(rows: int, opening: Opening, chunk: int) -> bool:
    """Whether what is shared reaches past the end of the first user message; past a chunk where nobody knows that."""
    if not opening.rows:
        return rows > chunk
    return rows > opening.rows or (opening.known and opening.rows - rows < BLOCK)
