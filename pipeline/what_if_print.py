"""A what-if as a person reads it: where the runs part, and both side by side."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.figures import PERCENTS
from pipeline.watched import End
from pipeline.what_if import Parting, Result
from stages.wait import nearest_rank

MODELLED = "modelled"


def printed(result: Result) -> str:
    """The report. What no recording vouches for is marked ``modelled``."""
    out = [", ".join(map(str, result.changes.each))]
    gap = "" if result.complete else " The recording dropped lines there."
    gap += " Not all recorded rows come again from these facts: see the plain replay." if result.drifted else ""
    if result.parting is None:
        out.append(f"{result.events} events, {len(result.steps)} rows: every decision is the same.{gap}")
        return "\n".join(out)
    out.append(_parting(result.parting))
    if result.costs is not None:
        costs = result.costs
        speed = f"{costs.prefill:.4g} prompt rows/s, {costs.decode:.4g} tokens/s"
        out += [f"what follows is {MODELLED}, at this trace's costs: {speed}", "", *_table(result), *_others(result)]
    out += ["", *result.assumed] if result.assumed else []
    return "\n".join(out + ([gap.strip()] if gap else []))


def journal(result: Result) -> str:
    """The changed run's rows, each modelled one marked."""
    rows = enumerate(result.steps)
    return "\n".join(f"{step}  [{MODELLED}]" if place >= result.modelled else str(step) for place, step in rows)


def _parting(parting: Parting) -> str:
    past = "".join(f"\n    {step}" for step in parting.history)
    return (
        f"first differing decision after event {parting.event}, at {parting.time:.3f} s, of {parting.of}:\n"
        f"  recorded: {parting.recorded}\n"
        f"  changed:  {parting.changed}\n"
        f"  its history:{past or ' none'}"
    )


def _table(result: Result) -> list[str]:
    """How requests ended, and what those that were served waited."""
    both = list(result.recorded.values()), list(result.changed.values())
    out = [f"{'':<34}{'recorded':>10}{MODELLED:>10}"]
    for name in sorted({end.row for ends in both for end in ends}):
        counts = [sum(end.row == name for end in ends) for ends in both]
        out.append(f"  {name:<32}{counts[0]:10}{counts[1]:10}")
    if any(result.open):
        out.append(f"  {'no end yet':<32}{result.open[0]:10}{result.open[1]:10}")
    served = [[end for end in ends if end.served] for ends in both]
    heads = "".join(f"{f'p{percent}':>9}" for percent in (*PERCENTS, 100)).replace("p100", "most")
    out += ["", f"{'seconds, of those served':<34}{heads}"]
    for name, values in (
        ("queue", [[end.queue for end in ends] for ends in served]),
        ("first token", [[end.ttft for end in ends] for ends in served]),
    ):
        for word, numbers in zip(("recorded", MODELLED), values, strict=True):
            out.append(f"  {name + ', ' + word:<32}{_cells(numbers)}")
    return out


def _cells(numbers: Sequence[float]) -> str:
    if not numbers:
        return f"{'none':>9}"
    return "".join(f"{nearest_rank(numbers, percent):9.1f}" for percent in (*PERCENTS, 100))


def _others(result: Result) -> list[str]:
    """Requests that end by another row."""
    out = []
    for id in sorted({**result.recorded, **result.changed}):
        was, now = result.recorded.get(id), result.changed.get(id)
        if _row(was) != _row(now):
            mark = f"  [{MODELLED}]" if now is None or now.modelled else ""
            out.append(f"  request {id}: {_row(was)} → {_row(now)}{mark}")
    return ["", "end otherwise:", *out] if out else []


def _row(end: End | None) -> str:
    return end.row if end is not None else "no end yet"
