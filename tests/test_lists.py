"""A list of prompts: each is a request of its own in states and journal, together they are one against the queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scripted import Answer, Script
from pipeline import effects as do
from pipeline import events as ev
from pipeline.effects import Finish
from pipeline.request import Request
from pipeline.states import RequestState
from pipeline.summary import join, refused
from tests.world import Plan, World, replayed

PATH = ["arrived", "well_formed", "fetched", "queued", "admitted", "fits", "chunk_done", "answering", "stopped"]


def rows(world: World, id: int) -> list[str]:
    return [step.row for step in world.steps if (step.life, step.id) == ("request", id) and step.row != "must_wait"]


def live(world: World) -> dict[int, Request]:
    return world.core.memory.requests


def finish(world: World, id: int) -> do.Finish:
    end = world.clients[id].end
    assert end is not None
    return end


def test_every_prompt_walks_the_whole_table() -> None:
    """A13: each has its own rows, runs in the order of the list, and its own figures."""
    world = World(Script(answers=[Answer(ids=[1] * 3), Answer(ids=[1]), Answer(ids=[1] * 2)]))
    parent = world.arrive(Plan(prompt=10, others=(20, 30)))
    world.run_until(5.0)
    assert [rows(world, id) for id in (parent, 2, 3)] == [PATH] * 3
    assert [(finish(world, id).prompt_tokens, finish(world, id).completion_tokens) for id in (1, 2, 3)] == [
        (10, 3), (20, 1), (30, 2),
    ]  # fmt: skip
    assert [(c.parent, c.ends) for c in world.clients.values()] == [(-1, 1), (parent, 1), (parent, 1)]
    assert replayed(world) == world.steps


def test_a_list_counts_once() -> None:
    """A13, I1: sixteen prompts are one against the queue and against those that are being read."""
    world = World(Script(answers=[Answer(ids=[1] * 5, decode_ms=100.0)]), max_queue=2, max_live=1)
    long = Plan(others=(10,) * 15, stream=False)
    first = world.arrive(long)
    world.run_until(0.1)
    assert len(live(world)) == 16 and len(world.core.memory.queue) == 15
    second = world.arrive(Plan())
    world.run_until(0.2)
    assert live(world)[second].state is RequestState.queued
    third = world.arrive(Plan())
    assert finish(world, third).code == "queue_full"
    world.run_until(60.0)
    ends = [finish(world, id).finish for id, client in world.clients.items() if id == first or client.parent == first]
    assert ends == ["stop"] * 16
    assert finish(world, second).finish == "stop"


def test_what_was_let_in_stays_in() -> None:
    """A13, I5: neither a drain nor a queue that filled meanwhile refuses the further prompts of a request inside."""
    world = World(Script(answers=[Answer(ids=[1] * 5, decode_ms=100.0)]), max_queue=1)
    parent = world.arrive(Plan(others=(10, 10)))
    world.post(ev.Draining(), at=0.001)
    world.run_until(20.0)
    assert [finish(world, id).finish for id in (parent, 2, 3)] == ["stop"] * 3
    assert world.exited == 0


def test_members_wait_for_one_another_alone() -> None:
    """A13, I2: while one of them runs the others' clock stands still; it begins anew when that one is over."""
    answers = [Answer(ids=[1] * 20, decode_ms=1_000.0)]
    world = World(Script(answers=answers), queue_timeout=15.0, request_timeout=50.0)
    parent = world.arrive(Plan(others=(10, 10), stream=False))
    other = world.arrive(Plan(stream=False))
    world.run_until(10.0)
    assert [live(world)[id].deadline_at for id in (3, 4)] == [None, None]
    world.run_until(30.0)
    assert finish(world, parent).finish == "stop"
    assert (finish(world, other).code, finish(world, other).status) == ("queue_timeout", 429)
    world.run_until(70.0)
    assert [finish(world, id).finish for id in (3, 4)] == ["stop", "stop"]


def test_a_member_that_ran_out_leaves_the_others() -> None:
    """A13, F5: the running clock ends one prompt's answer with what it has, and the next one runs."""
    answers = [Answer(ids=[1] * 90, decode_ms=1_000.0), Answer(ids=[1] * 3)]
    world = World(Script(answers=answers), queue_timeout=15.0, request_timeout=20.0)
    parent = world.arrive(Plan(others=(10,), stream=False))
    world.run_until(30.0)
    assert (finish(world, parent).finish, finish(world, parent).status) == ("timeout", 200)
    assert finish(world, 2).finish == "stop"


def test_an_engine_that_stands_still_ends_a_list_in_the_queue() -> None:
    """A13, I2: a list of which none ever ran waits as long as one request does, and is refused as a whole."""
    world = World(Script(answers=[Answer(ids=[1] * 90, decode_ms=1_000.0)]), queue_timeout=15.0)
    world.arrive()
    parent = world.arrive(Plan(others=(10, 10), stream=False))
    world.run_until(20.0)
    assert (finish(world, parent).code, finish(world, parent).status) == ("queue_timeout", 429)
    assert [client.forgotten or client.end.code for client in list(world.clients.values())[2:] if client] == [
        "sibling", "sibling",
    ]  # fmt: skip
    assert not world.core.memory.queue


def test_a_refusal_is_the_whole_answer() -> None:
    """A13, I11: an end with a status before anything was sent ends the other prompts too; nothing of them runs."""
    world = World(Script(answers=[Answer(ids=[1] * 90, decode_ms=100.0)]))
    parent = world.arrive(Plan(others=(10, 10), stream=False))
    world.run_until(2.0)
    world.kill()
    assert (finish(world, parent).code, finish(world, parent).status) == ("engine_restarting", 503)
    assert [world.clients[id].forgotten for id in (2, 3)] == ["sibling", "sibling"]
    world.run_until(20.0)
    assert not live(world)
    assert sum(isinstance(e, do.StartRun) for _, e in world.effects) == 1


def test_an_open_stream_goes_on() -> None:
    """A13, F10: once something was sent, one prompt's error is its own finish, and the others are served."""
    world = World(Script(answers=[Answer(ids=[1] * 90, decode_ms=100.0), Answer(ids=[1] * 2)]))
    parent = world.arrive(Plan(others=(10, 10)))
    world.run_until(2.0)
    world.kill()
    end = finish(world, parent)
    assert (end.finish, end.code, end.opened, end.status) == ("error", "engine_restarting", True, 200)
    world.run_until(20.0)
    assert [(finish(world, id).finish, finish(world, id).opened) for id in (2, 3)] == [("stop", True)] * 2


def test_a_finish_opens_the_stream() -> None:
    """A13, F10: an empty answer's finish is sent: the next prompt's error is a finish too, no status behind a 200."""
    world = World(Script(answers=[Answer(), Answer(ids=[1] * 90, decode_ms=100.0, prefill_ms_per_row=50.0)]))
    parent = world.arrive(Plan(others=(10, 10)))
    world.run_until(0.2)
    assert (finish(world, parent).finish, world.clients[parent].pieces) == ("stop", 0)
    assert [live(world)[id].opened for id in (2, 3)] == [True, True]
    world.kill()
    assert (finish(world, 2).code, finish(world, 2).status) == ("engine_restarting", 200)
    world.run_until(20.0)
    assert finish(world, 3).finish == "stop"


def test_an_open_list_waits_no_longer_than_one_request() -> None:
    """A13, I3: prompts that all wait behind somebody else's turn are over together, also on an open stream."""
    world = World(Script(answers=[Answer(ids=[1] * 900, decode_ms=1_000.0)]), request_timeout=40.0)
    world.arrive()
    world.run_until(5.0)
    world.arrive()  # runs from 40 to 80 s
    world.run_until(10.0)
    parent = world.arrive(Plan(others=(10, 10)))
    world.run_until(60.0)
    ends = [finish(world, id) for id in (parent, 4, 5)]
    assert [(end.code, end.opened, end.status) for end in ends] == [("queue_timeout", True, 200)] * 3


def test_one_prompt_is_too_long() -> None:
    """A13, A8: a prompt over the window refuses the list before its prompts are requests of their own."""
    world = World(Script())
    parent = world.arrive(Plan(prompt=10, others=(10, 1_000)))
    world.run_until(1.0)
    assert (finish(world, parent).code, finish(world, parent).status) == ("context_length_exceeded", 400)
    assert len(world.clients) == 1


@pytest.mark.parametrize("when", [0.003, 0.05, 0.5, 2.5])
def test_a_client_leaves_a_list(when: float) -> None:
    """A13, G1: every prompt hangs up, before, in and between the runs; nothing starts any more."""
    world = World(Script(answers=[Answer(ids=[1] * 10, decode_ms=100.0)]))
    parent = world.arrive(Plan(others=(10, 10)))
    world.run_until(when)
    world.hang_up(parent)
    assert not live(world) and not world.core.memory.queue
    runs = sum(isinstance(e, do.StartRun) for _, e in world.effects)
    world.run_until(when + 9.0)
    assert sum(isinstance(e, do.StartRun) for _, e in world.effects) == runs
    assert all(client.ends == 1 for client in world.clients.values())
    left = [id for id, client in world.clients.items() if client.end is None]
    assert left and [rows(world, id)[-1] for id in left] == ["hung_up"] * len(left)


def test_a_client_that_left_before_its_prompts_were_requests() -> None:
    """A13, G1: a further prompt whose list is over already arrives, and is given up at once."""
    world = World(Script())
    world.arrive()
    world.hang_up(1)
    world.clients[2] = type(world.clients[1])(Plan(), parent=1)
    world.post(ev.Received(2, "x", "completions", 0, 1, 1.0, 1))
    assert rows(world, 2) == ["arrived", "hung_up"]
    assert world.clients[2].forgotten == "sibling"


def test_the_first_prompt_alone_is_told_its_place() -> None:
    """A13, L1: one stream, one line at a time: the others wait behind the first."""
    world = World(Script(answers=[Answer(ids=[1] * 300, decode_ms=100.0)]))
    world.arrive()
    parent = world.arrive(Plan(others=(10,)))
    world.run_until(12.0)
    assert [text for _, text in world.clients[parent].lines] == ["waiting, position 1, 10 s so far"]
    assert world.clients[3].lines == [] and live(world)[3].opened


def test_the_next_one_is_told_when_the_first_is_over() -> None:
    """A13, L1: an open stream whose first prompt is over hears on while the others wait for a new engine."""
    world = World(Script(answers=[Answer(ids=[1] * 90, decode_ms=100.0)], load_ms=25_000.0))
    parent = world.arrive(Plan(others=(10, 10)))
    world.run_until(27.0)
    world.kill()
    assert finish(world, parent).code == "engine_restarting"
    world.run_until(50.0)
    received = live(world)[2].received_at
    assert world.clients[2].lines == [
        (received + at, f"waiting, position 1, the model is loading, {at} s so far") for at in (30, 40)
    ]  # fmt: skip
    assert world.clients[3].lines == []


def test_admitted_when_the_engine_is_lost() -> None:
    """A13, I11: a member that goes back to its place waits on, and the others with it."""
    world = World(Script(answers=[Answer(ids=[1])]), queue_timeout=20.0)
    world.run_until(1.0)
    world.freeze()
    parent = world.arrive(Plan(others=(10,), stream=False))
    world.run_until(2.0)
    assert (live(world)[parent].state, live(world)[2].deadline_at) == (RequestState.admitted, None)
    world.kill()
    assert [live(world)[id].deadline_at for id in (1, 2)] == [21.0, 21.0]
    world.run_until(9.0)
    assert [finish(world, id).finish for id in (1, 2)] == ["stop", "stop"]


finishes = st.builds(
    Finish, request=st.integers(1, 16), finish=st.sampled_from(["stop", "length", "timeout", "error"]),
    opened=st.booleans(), status=st.sampled_from([200, 503]), code=st.sampled_from(["", "queue_full"]),
    prompt_tokens=st.integers(0, 9), completion_tokens=st.integers(0, 9), cached_tokens=st.integers(0, 9),
    reasoning_tokens=st.integers(0, 9), queue_ms=st.floats(0, 9), total_ms=st.floats(0, 9),
)  # fmt: skip


@given(st.lists(finishes, min_size=1, max_size=16))
def test_ends_joined(ends: list[Finish]) -> None:
    """A13, F3: usage is summed; a refusal is the answer, else the first error, else the last; of one end it is that."""
    joined = join(ends)
    for field in ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"):
        assert getattr(joined, field) == sum(getattr(end, field) for end in ends)
    assert (joined.code, joined.status, joined.opened) in [(e.code, e.status, e.opened) for e in ends]
    assert refused(joined) == any(refused(end) for end in ends)
    if not refused(joined):
        assert joined.finish == next((end for end in ends if end.code), ends[-1]).finish
    assert joined.request == min(end.request for end in ends)
    assert join(ends[:1]) == ends[0]
