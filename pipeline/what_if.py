"""What-if (row R6): a recorded run with a policy flag changed.

Two cores take the recorded facts side by side, one with the recorded policy, one with the changed one. As long as they
decide the same, the facts are right for both. From the first decision that differs on, the changed one goes on with a
modelled engine (``what_if_model.py``); all of that part is *modelled*.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from pipeline import effects as do
from pipeline import events as ev
from pipeline.changes import Changes, changed
from pipeline.journal import Step
from pipeline.measured import Facts, costs
from pipeline.modelled import Costs
from pipeline.replay import opened
from pipeline.request import due
from pipeline.trace import Header, TraceError, read
from pipeline.watched import End, Told, Watched
from pipeline.what_if_model import Model

NO_COSTS = "Nothing beyond it can be modelled: no prompt was read and answered in this trace."


class Parting(msgspec.Struct, frozen=True):
    """The first decision that differs, after so many events. ``history``: rows of its record until then."""

    event: int
    time: float
    of: str
    recorded: str
    changed: str
    history: list[Step]


class Result(msgspec.Struct):
    """Both runs. ``modelled``: the first step that is, by its place; ``assumed``: what the trace does not tell.

    ``open``: requests that have no end, of each run. ``costs`` is None where nothing was modelled. ``drifted``: the
    recorded rows do not come again from these facts, so ``recorded`` is what this version makes of them.
    """

    header: Header
    changes: Changes
    events: int
    complete: bool
    drifted: bool = False
    asked: int = 0
    recorded: dict[int, End] = {}
    changed: dict[int, End] = {}
    open: tuple[int, int] = (0, 0)
    steps: list[Step] = []
    parting: Parting | None = None
    modelled: float = inf
    costs: Costs | None = None
    assumed: list[str] = []


class _Apart(msgspec.Struct):
    """Where the cores part: the decision, the recorded facts behind it, and what the changed core wants there."""

    parting: Parting
    left: Facts
    told: Told
    effects: list[do.Effect]


def what_if(path: Path, wanted: Sequence[str]) -> Result:
    """``wanted``: FLAG=VALUE, …. Raises ``TraceError`` or ``NoChange``."""
    header, facts, steps, complete = _recorded(path)
    changes = changed(header, wanted)
    old, new = Watched(opened(header)), Watched(opened(header, changes.policy))
    if header.snapshot is not None:
        changes.applied(new.core.memory)
    told = [old.take(event, time)[0] for time, event in facts]
    result = Result(header, changes, len(facts), complete, recorded=old.ends, changed=new.ends, steps=new.steps)
    result.drifted = steps != old.steps[: len(steps)]
    apart = _side_by_side([(time, changes.bounded(event)) for time, event in facts], told, new)
    if apart is not None:
        result.parting, result.modelled = apart.parting, len(new.steps) - len(apart.told.steps)
        result.costs = changes.costs(costs(event for _, event in facts))
        result.assumed = [NO_COSTS]
        if result.costs is not None:
            model = Model(facts, apart.left, old, new, result.costs)
            model.run(apart.parting.time, apart.effects)
            result.assumed = model.assumed()
    result.asked = len(new.received)
    result.open = len(old.received) - len(old.ends), len(new.received) - len(new.ends)
    return result


def _recorded(path: Path) -> tuple[Header, Facts, list[Step], bool]:
    """A trace's facts and rows, up to the first gap in it; whether there is none."""
    lines = iter(read(path))
    first = next(lines, None)
    if first is None or first.header is None:
        raise TraceError(f"{path}: empty")
    facts: list[tuple[float, ev.Event]] = []
    steps: list[Step] = []
    for line in lines:
        if line.lost:
            return first.header, facts, steps, False
        if line.event is not None:
            facts.append((line.t, line.event))
        if line.step is not None:
            steps.append(line.step)
    return first.header, facts, steps, True


def _side_by_side(facts: Facts, told: Sequence[Told], new: Watched) -> _Apart | None:
    """The changed core through the recorded facts, to its first other decision.

    A tick that it wants and the recorded one did not is its own; one that both want came when the recording says.
    """
    for number, ((time, event), old) in enumerate(zip(facts, told, strict=True)):
        while (wake := due(new.core.memory.wake)) < time and wake != old.wake:
            mine, effects = new.take(ev.Tick(), wake)
            if mine.steps or mine.asks:
                parting = _parting(number, wake, Told(0.0, (), ()), mine, new)
                return _Apart(parting, facts[number:], mine, effects)
            if due(new.core.memory.wake) == wake:
                break
        mine, effects = new.take(event, time)
        if (mine.steps, mine.asks) != (old.steps, old.asks):
            return _Apart(_parting(number + 1, time, old, mine, new), facts[number + 1 :], mine, effects)
    return None


def _parting(event: int, time: float, old: Told, mine: Told, new: Watched) -> Parting:
    """The first of an event's decisions that is not the same: a row, or else what the engine is asked."""
    rows = _differing(old.steps, mine.steps)
    if rows is None:
        was, now = _differing(old.asks, mine.asks) or (None, None)
        return Parting(event, time, "the engine", str(was or "nothing"), str(now or "nothing"), [])
    step: Step = rows[1] or rows[0]
    past = [s for s in new.steps if (s.life, s.id) == (step.life, step.id) and s.number < step.number]
    none = "no such row"
    return Parting(event, time, f"{step.life} {step.id}", str(rows[0] or none), str(rows[1] or none), past)


def _differing(was: Sequence[Any], now: Sequence[Any]) -> tuple[Any, Any] | None:
    for i in range(max(len(was), len(now))):
        one, other = was[i] if i < len(was) else None, now[i] if i < len(now) else None
        if one != other:
            return one, other
    return None
