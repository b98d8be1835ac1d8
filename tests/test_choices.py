"""Choices, calls and the close of the thinking, as the core tells them: rows, their order, and the finish of each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scripted import Answer, Script
from pipeline import effects as do
from pipeline import events as ev
from pipeline.machine import fire
from pipeline.outcomes import ENDS, finish_word
from pipeline.request import Facts, Request
from pipeline.states import RequestState, SlotState, Trigger
from tests.world import Plan, World


def rows(world: World, life: str = "request") -> list[str]:
    return [step.row for step in world.steps if step.life == life]


def started(world: World) -> list[do.StartRun]:
    return [effect for _, effect in world.effects if isinstance(effect, do.StartRun)]


def finish(world: World, id: int) -> do.Finish:
    end = world.clients[id].end
    assert end is not None
    return end


def test_choices_run_one_after_another() -> None:
    """F11: each is a run of its own in the same slot; the prompt counts once, what was written is summed."""
    answers = [Answer(ids=[1] * 3), Answer(ids=[1] * 50), Answer(ids=[1])]
    world = World(Script(answers=answers))
    id, behind = world.arrive(Plan(prompt=30, choices=3, max_tokens=7)), world.arrive(Plan(prompt=5))
    world.run_until(9.0)
    assert world.clients[id].choices == [(0, "stop"), (1, "length")]
    assert (finish(world, id).finish, finish(world, id).prompt_tokens, finish(world, id).completion_tokens) == (
        "stop", 30, 3 + 7 + 1,
    )  # fmt: skip
    runs = started(world)
    assert [(run.request, run.choice, run.more, run.max_tokens) for run in runs] == [
        (id, 0, True, 7), (id, 1, True, 7), (id, 2, False, 7), (behind, 0, False, runs[3].max_tokens),
    ]  # fmt: skip
    assert len({run.run for run in runs}) == 4
    assert rows(world, "slot") == ["taken", "next_choice", "next_choice", "run_ended", "taken", "run_ended"]
    assert rows(world).count("answering") == 2
    [line] = [line for line in world.logs if line.startswith(f"[req] {id:024x}")]
    assert "completion=11" in line and "choices=3" in line


def test_a_choice_has_its_end_before_the_next_starts() -> None:
    """F11: the text of a choice, then its finish, then the next run."""
    world = World(Script(answers=[Answer(ids=[1])]))
    world.arrive(Plan(choices=2))
    world.run_until(9.0)
    told = [e for _, e in world.effects if isinstance(e, do.Send | do.EndChoice | do.StartRun | do.Finish)]
    assert [type(effect).__name__ for effect in told] == ["StartRun", "Send", "EndChoice", "StartRun", "Send", "Finish"]


def test_a_stop_in_the_text_of_a_choice() -> None:
    """F11, G5: the run is cancelled, the next choice waits for its end, what comes behind the stop is not counted."""
    world = World(Script(answers=[Answer(ids=[1] * 50, decode_ms=100.0)]))
    id = world.arrive(Plan(choices=2, stop_at=4))
    while not world.clients[id].choices:
        world.run_until(world.now + 0.01)
    request = world.core.memory.requests[id]
    assert (len(started(world)), world.core.memory.slots[0].state) == (1, SlotState.busy)
    world.post(ev.Progress(id, 1, request.run, 5, 9, 3))
    assert (request.completion_tokens, rows(world)[-1]) == (4, "choice_ended")
    world.run_until(9.0)
    cancels = [(e.run, e.keep) for _, e in world.effects if isinstance(e, do.CancelRun)]
    assert cancels == [(run.run, 3) for run in started(world)]
    assert (finish(world, id).finish, finish(world, id).completion_tokens) == ("stop", 8)
    assert rows(world, "slot") == ["taken", "next_choice", "let_go", "wound_down"]


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_a_run_that_ends_by_itself_behind_a_stop(reason: str) -> None:
    """F11: the engine may have ended the run before it heard of the stop: the choice is over once, all the same."""
    world = World(Script(answers=[Answer(ids=[1] * 50, decode_ms=100.0)]))
    id = world.arrive(Plan(choices=2, stop_at=4))
    while not world.clients[id].choices:
        world.run_until(world.now + 0.01)
    world.post(ev.RunEnded(1, started(world)[0].run, reason, 14, 6))
    assert len(started(world)) == 2
    assert world.clients[id].choices == [(0, "stop")]
    assert world.core.memory.requests[id].completion_tokens == 4


def test_a_client_leaves_between_two_choices() -> None:
    """F11, G1: nothing more starts; the slot is free once the engine said so."""
    world = World(Script(answers=[Answer(ids=[1] * 50, decode_ms=100.0)]))
    id = world.arrive(Plan(choices=3, stop_at=4))
    while not world.clients[id].choices:
        world.run_until(world.now + 0.01)
    world.hang_up(id)
    assert world.core.memory.slots[0].state is SlotState.ending
    world.run_until(9.0)
    assert len(started(world)) == 1
    assert world.core.memory.slots[0].state is SlotState.free
    assert (world.clients[id].forgotten, world.clients[id].end) == ("closed", None)


@pytest.mark.parametrize(
    ("trouble", "code"),
    [("deadline", "request_timeout"), ("kill", "engine_restarting"), ("fault", "internal_error")],
)
def test_what_ends_all_choices(trouble: str, code: str) -> None:
    """F11: the time limit, the engine's loss and a fault end all of them; what was written is counted."""
    then = "fault" if trouble == "fault" else "stop"
    answers = [Answer(ids=[1] * 3, decode_ms=100.0), Answer(ids=[1] * 9, decode_ms=100.0, then=then)]
    world = World(Script(answers=answers), request_timeout=1.0 if trouble == "deadline" else 60.0)
    id = world.arrive(Plan(choices=3))
    if trouble == "kill":
        world.kill(at=0.8)
    world.run_until(5.0)
    assert finish(world, id).code == code
    assert world.clients[id].choices == [(0, "stop")]
    assert [run.choice for run in started(world)] == [0, 1]
    assert finish(world, id).completion_tokens > 3


@pytest.mark.parametrize(
    ("calls", "length", "limit", "word"),
    [
        (0, 6, 0, "stop"),
        (1, 6, 0, "tool_calls"),
        (2, 6, 0, "tool_calls"),
        (2, 6, 6, "tool_calls"),  # both whole, at the limit
        (2, 6, 3, "length"),  # at the limit inside the second
        (1, 6, 1, "length"),  # at the limit inside the first
        (1, 3, 2, "tool_calls"),  # one whole, none open
        (0, 6, 3, "length"),
    ],
)
def test_the_finish_of_calls(calls: int, length: int, limit: int, word: str) -> None:
    """D2, D10: whole calls and none open are ``tool_calls``, also at the limit; an open one there is ``length``."""
    world = World(Script(answers=[Answer(ids=[1] * length)]))
    id, twice = world.arrive(Plan(calls=calls, max_tokens=limit)), world.arrive(
        Plan(calls=calls, max_tokens=limit, choices=2)
    )  # fmt: skip
    world.run_until(5.0)
    assert finish(world, id).finish == word
    assert world.clients[twice].choices == [(0, word)]
    assert finish(world, twice).finish == word
    whole = sum(step.row == "call_closed" and step.id == id for step in world.steps)
    assert any(f"tools={whole}" in line for line in world.logs if f"{id:024x}" in line)


def test_what_no_tools_were_offered_for() -> None:
    """D7: without calls told, an answer never ends with ``tool_calls``, whatever its text says."""
    world = World(Script(answers=[Answer(ids=[1] * 6)]))
    id = world.arrive(Plan(calls=0))
    world.run_until(5.0)
    assert finish(world, id).finish == "stop"
    assert not {"call_opened", "call_closed", "called"} & set(rows(world))


def test_rows_of_calls_alternate() -> None:
    """D3: a row for each call that begins and each that is whole, in their order, also when one round tells of many."""
    world = World(Script(answers=[Answer(ids=[1] * 9, round=9)]))
    id = world.arrive(Plan(calls=3, call_at=2))
    world.run_until(5.0)
    assert [row for row in rows(world) if row.startswith("call_")] == ["call_opened", "call_closed"] * 3
    names = rows(world)
    assert names.index("answering") < names.index("call_opened") < names.index("called")
    assert finish(world, id).finish == "tool_calls"


def test_the_thinking_closes_once() -> None:
    """C6, F3: one row for each choice that thinks; its tokens are counted and summed."""
    world = World(Script(answers=[Answer(ids=[1] * 9)]))
    id = world.arrive(Plan(choices=2, closes_at=4))
    open_ended = world.arrive(Plan())
    world.run_until(5.0)
    assert rows(world).count("reasoning_closed") == 2
    assert finish(world, id).reasoning_tokens == 8
    assert finish(world, open_ended).reasoning_tokens == 0
    assert any("reasoning=8" in line for line in world.logs)
    core = World(Script(answers=[Answer(ids=[1] * 9, decode_ms=100.0)]))
    one = core.arrive(Plan())
    while core.core.memory.requests[one].state is not RequestState.decoding:
        core.run_until(core.now + 0.001)
    request = core.core.memory.requests[one]
    facts: dict[str, Any] = {"reasoning": 2, "closed": "budget", "closed_at": 1}
    for n in (2, 3):
        core.post(ev.Progress(one, 1, request.run, n, n, 3, **facts))
    assert (request.closed, request.closed_at, rows(core).count("reasoning_closed")) == ("budget", 1, 1)


def test_cached_rows_are_those_of_the_first_run() -> None:
    """F3, F11: the rows a later choice takes over are this request's own: they are no cached tokens."""
    world = World(Script(answers=[Answer(ids=[1] * 3, decode_ms=50.0)]))
    id = world.arrive(Plan(prompt=20, choices=2))
    while not started(world):
        world.run_until(world.now + 0.001)
    world.post(ev.RunResumed(1, started(world)[0].run, 16, "slot"))
    before = len(world.steps)
    world.post(ev.RunResumed(0, started(world)[0].run, 3, "slot"))
    assert len(world.steps) == before
    while len(started(world)) < 2:
        world.run_until(world.now + 0.001)
    world.post(ev.RunResumed(1, started(world)[1].run, 20, "end"))
    world.run_until(5.0)
    assert finish(world, id).cached_tokens == 16
    assert any("cached=16" in line for line in world.logs)


def test_a_schema_is_refused_before_the_queue() -> None:
    """E5: a 400 of its own row, also when the queue is full; any other fault of the prompt keeps its own."""
    world = World(Script(answers=[Answer(ids=[1] * 500, decode_ms=100.0)]), max_queue=2)
    world.arrive()
    world.run_until(0.5)
    world.arrive()
    schema = world.arrive(Plan(prompt_code="unsupported_schema"))
    prompt = world.arrive(Plan(prompt_code="invalid_value"))
    long = world.arrive(Plan(prompt=2_000, prompt_code="unsupported_schema"))
    world.run_until(1.0)
    assert [(finish(world, id).status, finish(world, id).code) for id in (schema, prompt, long)] == [
        (400, "unsupported_schema"), (400, "invalid_value"), (400, "unsupported_schema"),
    ]  # fmt: skip
    assert [row for row in rows(world) if row in ("bad_schema", "no_token")] == ["bad_schema", "no_token", "bad_schema"]


records = st.builds(
    Request, id=st.just(1), name=st.just("x"), route=st.just("chat"), seed=st.just(1), wall=st.just(0.0),
    received_at=st.just(0.0), state=st.just(RequestState.decoding), end_reason=st.sampled_from(["stop", "length"]),
    opened_calls=st.integers(0, 3), closed_calls=st.integers(0, 3), open_call=st.booleans(),
)  # fmt: skip


@given(records)
def test_a_choice_ends_by_the_rule_of_the_rows(request: Request) -> None:
    """F11, D10: a choice's finish word is that of the row its request would end by."""
    word = finish_word(request)
    assert word == ENDS[fire(request, Trigger.end, Facts()).name][0]
    assert (word == "tool_calls") == (
        0 < request.closed_calls == request.opened_calls and not request.open_call
    )  # fmt: skip
