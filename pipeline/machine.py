"""One shared ``transitions.Machine`` a table; ``fire`` is the only way anything changes its state.

The machines hold no model (``add_model`` costs kilobytes and microseconds a request): a record is handed to the event.
They are synchronous and never fire inside a callback, so the journal is in the order things happened.
"""

from __future__ import annotations

import logging
from typing import Any

from transitions import EventData, Machine, MachineError

from pipeline.request import HISTORY, Engine, Facts, Request, Slot
from pipeline.states import Trigger
from pipeline.table import STATES, TABLES, Row

logging.getLogger("transitions").setLevel(logging.WARNING)

Record = Request | Slot | Engine


class Illegal(Exception):
    """A trigger was fired in a state that has no row for it. Nothing was changed."""


def record_of(event: EventData) -> Record:
    """The record an event was fired on: ``transitions`` knows it as a plain object."""
    model = event.model
    assert isinstance(model, Request | Slot | Engine)
    return model


def _condition(row: Row) -> Any:
    """The row's guard as ``transitions`` calls it."""
    guard = row.guard

    def condition(event: EventData) -> bool:
        return guard is None or guard(event.model, event.kwargs["facts"])

    return condition


def _recorder(row: Row) -> Any:
    """Writes the row that fires into the record, before its state changes."""

    def record(event: EventData) -> None:
        record_of(event).row = row.name

    return record


def _machine(life: str) -> Machine:
    """The machine of one table."""
    machine = Machine(
        model=None,
        states=STATES[life],
        initial=None,
        auto_transitions=False,
        send_event=True,
        name=life,
    )
    for row in TABLES[life]:
        for source in row.sources:
            machine.add_transition(
                row.trigger.value, source, row.dest, conditions=[_condition(row)], before=[_recorder(row)]
            )
    return machine


MACHINES: dict[str, Machine] = {life: _machine(life) for life in TABLES}
BY_NAME: dict[str, dict[str, Row]] = {life: {row.name: row for row in rows} for life, rows in TABLES.items()}
LIFE: dict[type, str] = {Request: "request", Slot: "slot", Engine: "engine"}


def fire(record: Record, trigger: Trigger, facts: Facts) -> Row:
    """Fire ``trigger`` on a record and return the row that fired. Raises ``Illegal`` where the table has no row."""
    life = LIFE[type(record)]
    event = MACHINES[life].events.get(trigger.value)
    try:
        moved = event is not None and event.trigger(record, facts=facts)
    except MachineError:
        moved = False
    if not moved:
        raise Illegal(f"{life} {record.state.value}: no row for {trigger.value}")
    record.history.append((facts.now, record.row))
    del record.history[:-HISTORY]
    return BY_NAME[life][record.row]
