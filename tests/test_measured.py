"""What a recorded trace says of costs, answers and clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import events as ev
from pipeline.measured import Answer, answers, asking, costs, expected
from pipeline.modelled import Costs

READY = [ev.EngineDescribed(1, 8_192), ev.EngineReady(1, 3.5, 128, workspaces=[(1, 10), (8_192, 900)], device="cuda")]


def test_costs_of_work() -> None:
    """R6: rows a second of prefill steps, without what was resumed; tokens a second of rounds, without the first."""
    found = costs(
        [
            *READY,
            ev.MemoryRead(1, 5, 100, 200, 300, 40, 7, [("park", 9)], 12),
            ev.RunResumed(1, 5, 100, "park"),
            ev.ChunkDone(1, 5, 228, 300, 500.0),
            ev.ChunkDone(1, 5, 300, 300, 300.0),
            ev.Progress(1, 1, 5, 1, ms=0.1),
            ev.Progress(1, 1, 5, 4, ms=60.0),
            ev.Progress(1, 1, 5, 5, ms=20.0),
            ev.GuestStarted(1, 6, 5, 10, 640),
        ]
    )
    assert found is not None
    assert (found.prefill, found.decode) == (200 / 0.8, 4 / 0.08)
    assert (found.window, found.load_s, found.safe_rows, found.row_bytes, found.told_s) == (8_192, 3.5, 128, 64, 0.0)
    assert found.joint == Costs().joint
    store = found.store
    assert (store.allocated, store.reserved, store.peak, store.free, store.device) == (100, 200, 300, 7, "cuda")
    assert store.growth == 12
    assert (store.levels, store.workspaces) == ((("park", 9),), ((1, 10), (8_192, 900)))


def test_costs_of_joint_rounds() -> None:
    """M6: rounds that several shared took as long for each; how much faster two are is measured, three are as usual."""
    alone = [ev.Progress(1, 1, 1, n, ms=50.0) for n in range(1, 12)]
    together = [ev.Progress(r, 1, r, n, ms=80.0, shared=2) for n in range(12, 32) for r in (1, 2)]
    found = costs([ev.ChunkDone(1, 1, 10, 10, 10.0), *alone, ev.Progress(2, 1, 2, 11, ms=1.0), *together])
    assert found is not None
    assert found.decode == pytest.approx(20.0)
    assert [round(part, 6) for part in found.joint] == [1.0, 25.0 / 20.0, *Costs().joint[2:]]


def test_guests_are_no_sample() -> None:
    """K6: what was read and written inside another's run says nothing of the speed of runs; its copy has a size."""
    alone: list[ev.Event] = [ev.ChunkDone(1, 5, 100, 100, 100.0)]
    alone += [ev.Progress(1, 1, 5, n, ms=50.0) for n in range(1, 12)]
    inside = [ev.GuestStarted(1, 6, 5, 10, 640), ev.ChunkDone(1, 6, 9, 9, 900.0)]
    inside += [ev.Progress(2, 1, 6, n, ms=500.0) for n in range(1, 12)]
    found = costs([*alone[:6], *inside, *alone[6:]])
    assert found is not None
    assert (found.prefill, found.decode, found.row_bytes) == (1_000.0, pytest.approx(20.0), 64)


def test_what_memory_was_asked_for() -> None:
    """J4: an engine that said nothing of workspaces is known by the readings before its prefills."""
    said: list[ev.Event] = []
    for run, rows in ((1, 200), (2, 100)):
        said += [ev.MemoryRead(1, run, 0, 0, 0, rows * 3), ev.ChunkDone(1, run, rows, rows, 10.0)]
        said += [ev.Progress(run, 1, run, n, ms=5.0) for n in (1, 2)]
    found = costs(said)
    assert found is not None
    assert [found.store.workspace(rows) for rows in (50, 100, 150, 200, 400)] == [150, 300, 450, 600, 1_200]


def test_nothing_to_measure() -> None:
    """R6: a trace without a prompt that was read and answered has no costs."""
    assert costs(READY) is None
    assert costs([*READY, ev.ChunkDone(1, 5, 100, 100, 5.0), ev.Progress(1, 1, 5, 1, ms=0.1)]) is None


def test_how_long_answers_were() -> None:
    """R6: an end by stop, or a stop string, is an answer's own; a limit and a client that left have cut it."""
    runs = {1: (7, 0), 2: (7, 1), 3: (8, 0), 4: (9, 0), 5: (8, 0)}
    said = [
        ev.Progress(7, 1, 1, 5),
        ev.RunEnded(1, 1, "stop", 10, 6, closed_calls=2),
        ev.Progress(7, 1, 2, 4, stopped=True, keep=3),
        ev.RunEnded(1, 2, "cancelled", 10, 4),
        ev.Progress(8, 1, 3, 9),
        ev.RunEnded(1, 3, "cancelled", 10, 9),
        ev.RunEnded(1, 4, "length", 10, 16),
        ev.Progress(8, 1, 5, 2),
        ev.Progress(1, 1, 99, 2),
    ]
    assert answers(said, runs) == {
        (7, 0): Answer(6, True, 2), (7, 1): Answer(4, True), (8, 0): Answer(2, False), (9, 0): Answer(16, False),
    }  # fmt: skip


@given(
    st.none() | st.builds(Answer, st.integers(1, 100), st.booleans()),
    st.lists(st.builds(Answer, st.integers(1, 100), st.booleans())),
)
def test_how_long_it_would_have_been(answer: Answer | None, others: list[Answer]) -> None:
    """R6: an answer's own length stands; a cut one goes on; one never begun lies within those there were."""
    tokens = expected(answer, others, 1_000)
    known = [one.tokens for one in others if one.whole] or [one.tokens for one in others]
    if answer is None:
        assert min(known, default=1_000) <= tokens <= max(known, default=1_000)
    elif answer.whole:
        assert tokens == answer.tokens
    else:
        assert tokens > answer.tokens
        assert tokens == 1_000 or tokens <= max(known)


def test_what_is_usual() -> None:
    """R6: the medians of those whose body and prompt were read and well formed."""
    facts: list[tuple[float, ev.Event]] = []
    for id, (size, limit, prompt) in enumerate(((10, 0, 5), (30, 64, 70), (90, 100, 8_000)), 1):
        facts += [
            (id, ev.Received(id, "", "chat", 0, 0, 0.0)),
            (id + 0.5, ev.Checked(id, body_bytes=size, stream=id != 2, max_tokens=limit, messages=id)),
            (id + 0.5, ev.Fetched(id)),
            (id + 0.75, ev.Prepared(id, prompt_tokens=prompt)),
        ]
    facts.append((9.0, ev.Checked(4, code="invalid_type", body_bytes=10**6)))
    usual = asking(facts)
    assert usual.checked == ev.Checked(0, body_bytes=30, stream=True, messages=2, max_tokens=64)
    assert usual.prepared == ev.Prepared(0, prompt_tokens=70)
    assert (usual.to_checked, usual.to_fetched, usual.to_prepared) == (0.5, 0.0, 0.25)
    assert asking([]).prepared.prompt_tokens == 1
