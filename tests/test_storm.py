"""The storm: over ten thousand requests in every weather, the laws looked at after every event (``tests/laws.py``)."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from pipeline.events import ChunkDone, RunResumed
from tests.storm import ROWS, made, played, storm

SEED = 7
REQUESTS = 12_000
LEAST = 10


@pytest.mark.timeout(900)
def test_ten_thousand_requests_and_more(record_property: Any) -> None:
    """R1, R3: every law holds after every event, every world replays, and every row fired, each many times."""
    tally = storm(SEED, count(), REQUESTS)
    record_property("summary", tally.said())
    print(tally.table())
    assert tally.requests >= REQUESTS
    assert tally.rare(LEAST) == {}, "rows that the weather does not reach"


def test_a_world_is_its_number() -> None:
    """R3: the same number gives the same facts, journal and effects; another number others."""
    one, again, other = (made(SEED, number) for number in (3, 3, 4))
    for world in (one, again, other):
        played(world)
    assert (one.events, one.steps, one.effects) == (again.events, again.steps, again.effects)
    assert one.events != other.events


def test_the_tally_counts_every_row_of_the_tables() -> None:
    """R1: a row that never fired is named."""
    tally = storm(SEED, [0])
    assert sum(tally.rows[key] for key in ROWS) == tally.rows.total()
    assert set(tally.rare(1)) == {f"{life} {name}" for life, name in ROWS if (life, name) not in tally.rows}
    assert tally.rare(0) == {}


def test_what_an_engine_keeps_is_not_read_again() -> None:
    """G2: a scripted engine with a keeper begins where it says; without one at a prompt's first row."""
    resumed = 0
    for number in (11, 12):  # conversations
        world = made(SEED, number)
        played(world)
        sources = {event.run: event.rows for _, event in world.events if isinstance(event, RunResumed)}
        first = {event.run: event for _, event in reversed(world.events) if isinstance(event, ChunkDone)}
        assert all(first[run].done > rows for run, rows in sources.items() if run in first and first[run].ms > 0)
        resumed += len(sources)
    assert resumed
