"""Which waiter gets which slot (rows M1, M2): order of arrival, slot 0 first, a side slot only for who fits in it."""

from __future__ import annotations

from collections.abc import Sequence


def rows_needed(prompt: int, asked: int, default: int, whole: int) -> int:
    """Rows of a run with its whole answer, of which ``asked`` tokens are wanted (0: not said). Slot 0 holds them."""
    return min(prompt + (asked or default), whole)


def placed(needs: Sequence[int], free: Sequence[tuple[int, int]]) -> list[int]:
    """The slot of each waiter, -1 where it waits on. ``needs``: rows, in the order they wait.

    ``free``: slots with their rows, in the order they are taken. A waiter whom no free slot holds keeps nobody behind
    it from one that it could not have.
    """
    left, out = list(free), []
    for need in needs:
        at = next((i for i, (_, rows) in enumerate(left) if need <= rows), -1)
        out.append(left.pop(at)[0] if at >= 0 else -1)
    return out
