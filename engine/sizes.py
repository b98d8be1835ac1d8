"""What a window takes of memory and what it leaves: the chosen one, half and double of it (row I8). Sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine import memory
from engine.protocol import windows

TITLES = ("weights", "KV", "state", "together", "free")
"""Columns of :func:`table`, in GiB."""


class Model(NamedTuple):
    """``weights``; a ``row`` of KV; of one sequence both its recurrent states and what its checkpoints can come to."""

    weights: int
    row: int
    state: int
    marks: int


class Taken(NamedTuple):
    """What a window takes with every slot: as in ``Ready``, whose ``kv_bytes`` is KV and state. ``marks``: later on."""

    window: int
    weights: int
    kv: int
    state: int
    marks: int

    @property
    def together(self) -> int:
        """What is taken once it is loaded."""
        return self.weights + self.kv + self.state


class Machine(NamedTuple):
    """With no model loaded: what is ``free``, and what may be taken between requests (``bound``)."""

    free: int
    bound: int


def taken(model: Model, window: int, slots: int, side: int) -> Taken:
    """What slots take of which the first has the whole ``window``, the others no more than ``side`` rows."""
    rows = sum(windows(window, slots, side))
    return Taken(window, model.weights, rows * model.row, slots * model.state, slots * model.marks)


def around(model: Model, window: int, slots: int, side: int) -> list[Taken]:
    """The ``window``, half and double of it."""
    return [taken(model, rows, slots, side) for rows in (window, max(1, window // 2), 2 * window)]


def room(model: Model, machine: Machine, slots: int) -> int:
    """What the rows of all slots may take."""
    left = memory.room(machine.free - model.weights, machine.bound - model.weights)
    return left - slots * (model.state + model.marks)


def verdict(one: Taken, machine: Machine, native: int) -> str:
    """Whether a start with this window would succeed. ``native``: of the checkpoint."""
    if one.window > native:
        return "longer than the model's window"
    left = memory.room(machine.free - one.weights, machine.bound - one.weights)
    return "fits" if one.kv + one.state + one.marks <= left else "does not fit"


def table(every: Sequence[Taken], machine: Machine, native: int) -> list[tuple[str, str]]:
    """For ``tandem doctor``: a line of titles, then one a window, a pair of label and words each."""
    lines = [("window", " ".join(f"{title:<8}" for title in TITLES) + " GiB")]
    for one in every:
        sizes = (one.weights, one.kv, one.state, one.together, machine.free - one.together)
        cells = " ".join(f"{_gib(size):<8}" for size in sizes)
        lines.append((str(one.window), f"{cells} {verdict(one, machine, native)}"))
    return lines


def line(every: Sequence[Taken], machine: Machine, native: int) -> str:
    """For the log of a start, the loaded window first."""
    said = [f"{_words(one)}, {_gib(machine.free - one.together)} free" for one in every]
    for at, one in enumerate(every[1:], 1):
        why = verdict(one, machine, native)
        said[at] += "" if why == "fits" else f" ({why})"
    return f"weights {_gib(every[0].weights)} GiB; window {'; '.join(said)}"


def _words(one: Taken) -> str:
    return f"{one.window}: KV {_gib(one.kv)}, state {_gib(one.state)}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f}"
