"""Replay: drive a fresh core over recorded facts and compare transition for transition, line for line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from pipeline.core import Core
from pipeline.journal import Step
from pipeline.request import Memory
from pipeline.settings import Policy
from pipeline.trace import Header, Line, TraceError, read
from stages.wait import folded


class Report(msgspec.Struct):
    """What a replay found. ``difference`` is None when every recorded row came again; ``to`` counts events replayed."""

    header: Header
    events: int = 0
    steps: list[Step] = []
    recorded: int = 0
    complete: bool = True
    difference: Difference | None = None


class Difference(msgspec.Struct):
    """The first row that differs. ``history``: the rows of that record up to it, as the replay saw them."""

    event: int
    recorded: Step | None
    replayed: Step | None
    history: list[Step]

    def __str__(self) -> str:
        """As a person reads it."""
        record = self.recorded or self.replayed
        name = f"{record.life} {record.id}" if record else "nothing"
        past = "\n".join(f"    {step}" for step in self.history)
        return (
            f"first difference after event {self.event}, of {name}:\n"
            f"  recorded: {self.recorded or 'no such row'}\n"
            f"  replayed: {self.replayed or 'no such row'}\n"
            f"  its history:\n{past}"
        )


class _Batch(msgspec.Struct):
    """One event and the steps recorded behind it; not ``whole`` where the recording broke off behind it."""

    line: Line
    steps: list[Step]
    whole: bool = True


def replay(path: Path, *, compare: bool = True) -> Report:
    """Replay one trace file. ``compare=False`` ignores its journal rows and only produces the journal.

    Raises TraceError when the file is no trace.
    """
    lines = iter(read(path))
    first = next(lines, None)
    if first is None or first.header is None:
        raise TraceError(f"{path}: empty")
    report = Report(first.header)
    core = opened(report.header)
    for batch in _batches(lines, report):
        assert batch.line.event is not None
        core.handle(batch.line.event, batch.line.t)
        report.events += 1
        fresh = core.take_steps()
        if compare and report.difference is None:
            report.difference = _compare(report, batch.steps, fresh if batch.whole else fresh[: len(batch.steps)])
        report.steps.extend(fresh)
        if report.difference is not None:
            break
    return report


def opened(header: Header, policy: Policy | None = None) -> Core:
    """A core as the recording's stood before the file's first event; ``policy``: another one than it had."""
    policy = policy or header.policy
    if header.snapshot is not None:
        return Core(policy, msgspec.json.decode(msgspec.json.encode(header.snapshot), type=Memory))
    core = Core(policy)
    core.memory.history = folded(header.history)
    core.begin(0.0)
    core.take_steps()
    return core


def _batches(lines: Iterable[Line], report: Report) -> Iterable[_Batch]:
    """Events with the steps behind each, up to the first gap in the recording."""
    batch: _Batch | None = None
    for line in lines:
        if line.lost:
            report.complete = False
            if batch is not None:
                batch.whole = False
            break
        if line.step is not None and batch is not None:
            batch.steps.append(line.step)
            report.recorded += 1
        if line.event is not None:
            if batch is not None:
                yield batch
            batch = _Batch(line, [])
    if batch is not None:
        yield batch


def _compare(report: Report, recorded: list[Step], fresh: list[Step]) -> Difference | None:
    """The first differing row of one event's steps."""
    for i in range(max(len(recorded), len(fresh))):
        old = recorded[i] if i < len(recorded) else None
        new = fresh[i] if i < len(fresh) else None
        if old != new:
            of = new or old
            past = [s for s in [*report.steps, *fresh[:i]] if of and (s.life, s.id) == (of.life, of.id)]
            return Difference(report.events, old, new, past)
    return None
