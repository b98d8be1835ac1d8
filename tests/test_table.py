"""The tables themselves: the whole product of states and triggers, totality, every guard used, every row reachable."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from pipeline import outcomes, table
from pipeline.machine import BY_NAME, Illegal, fire
from pipeline.request import Engine, Facts, Request, Slot
from pipeline.states import RequestState, Trigger
from pipeline.table import ENDED, STATES, TABLES


def record(life: str, state: Any) -> Any:
    """A fresh record of that life in that state."""
    if life == "request":
        return Request(id=1, name="x", route="chat", seed=1, wall=0.0, received_at=0.0, state=state)
    return Slot(id=0, state=state) if life == "slot" else Engine(state=state)


PRODUCT = [(life, state, trigger) for life in TABLES for state in STATES[life] for trigger in Trigger]


@pytest.mark.parametrize(("life", "state", "trigger"), PRODUCT, ids=lambda v: getattr(v, "value", v))
def test_product_of_states_and_triggers(life: str, state: Any, trigger: Trigger) -> None:
    """R1: a declared pair fires one of its rows; an undeclared one is Illegal and changes nothing."""
    rows = [row for row in TABLES[life] if trigger is row.trigger and state in row.sources]
    one = record(life, state)
    before = copy.deepcopy(one)
    if not rows:
        with pytest.raises(Illegal):
            fire(one, trigger, Facts())
        assert one == before
        return
    row = fire(one, trigger, Facts(window=10_000))
    assert row in rows
    assert one.state is (row.dest or state)
    assert one.row == row.name


@pytest.mark.parametrize("life", TABLES)
def test_every_group_ends_with_a_row_without_a_guard(life: str) -> None:
    """R1: no trigger fails silently: the last row of every (state, trigger) group has no guard, and only the last."""
    for state in STATES[life]:
        for trigger in Trigger:
            group = [r for r in TABLES[life] if r.trigger is trigger and state in r.sources]
            assert [r.guard is None for r in group] == [False] * (len(group) - 1) + [True] * bool(group)


def test_every_guard_is_used_and_every_name_is_its_own() -> None:
    """R2: guards are the named functions of the table file; none is left over, no two rows share a name."""
    used = {row.guard.__name__ for rows in TABLES.values() for row in rows if row.guard}
    written = {
        name
        for name, value in vars(table).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == table.__name__
        and "facts" in str(value.__code__.co_varnames if hasattr(value, "__code__") else "")
    }  # fmt: skip
    assert used == written
    for life, rows in TABLES.items():
        assert len(BY_NAME[life]) == len(rows)


def test_ended_requests_have_no_row() -> None:
    """R1: a request ends once: no row leaves finished or abandoned."""
    assert not [row.name for row in table.ROWS if set(row.sources) & set(ENDED)]


def test_every_end_has_an_outcome() -> None:
    """R1: the map of outcomes names exactly the rows that lead to finished, and only codes of the table."""
    ending = {row.name for row in table.ROWS if row.dest is RequestState.finished}
    assert set(outcomes.ENDS) == ending
    for row in sorted(ending):
        for opened in (False, True):
            outcome = outcomes.of(row, opened)
            assert outcome.code == "" or outcome.code in outcomes.CODES
            if opened:
                assert outcome.status == 200


def test_every_destination_is_reachable() -> None:
    """R1: every state but the first is some row's destination."""
    for life, rows in TABLES.items():
        first, *rest = STATES[life]
        assert {row.dest for row in rows} | {first} >= {first, *rest}


def test_retry_after_is_never_over_a_minute() -> None:
    """I6a: every Retry-After is between 1 and 60 seconds, on the codes that carry one."""
    assert all(0 <= code.retry_after <= 60 for code in outcomes.CODES.values())
    for word in ("queue_full", "queue_timeout", "draining", "live_full", "shutting_down", "engine_restarting"):
        assert 1 <= outcomes.CODES[word].retry_after <= 60


def test_nothing_else_writes_a_state() -> None:
    """R1: no file of the project assigns a `state`."""
    root = Path(table.__file__).parent.parent
    for package in ("pipeline", "stages", "engine"):
        for path in sorted((root / package).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert ".state = " not in line, f"{path.name}:{number} writes a state"
