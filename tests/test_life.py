"""Whole lives in virtual time, one by one: what each end, wait and trouble looks like."""

from __future__ import annotations

import itertools

import pytest

from engine.scripted import Answer, Script
from pipeline.effects import CancelRun
from pipeline.events import BodyGrew, Draining, EngineLoading, Faulted, Shutdown
from pipeline.states import RequestState, SlotState
from tests.world import Plan, World


def rows(world: World) -> list[str]:
    return [s.row for s in world.steps]


def test_a_short_life() -> None:
    """R1: a request that is answered walks the whole table, and its slot is free when the engine said so."""
    world = World(Script(answers=[Answer(ids=[1, 2, 3], decode_ms=10.0)]))
    id = world.arrive(Plan(prompt=300))
    world.run_until(5)
    path = [s.dest for s in world.steps if s.life == "request" and s.source != s.dest]
    assert path == ["validated", "image_fetched", "queued", "admitted", "prefilling", "decoding", "finished"]
    end = world.clients[id].end
    assert end is not None
    assert (end.finish, end.code, end.completion_tokens, end.prompt_tokens) == ("stop", "", 3, 300)
    assert world.core.memory.slots[0].state is SlotState.free


def test_lines_at_ten_twenty_thirty() -> None:
    """L1: two streams wait behind a long turn: lines at 10, 20, 30 s with positions; one leaves, the other moves up."""
    world = World(Script(answers=[Answer(ids=[1] * 600, decode_ms=100.0)]))
    world.arrive()
    second, third = world.arrive(), world.arrive()
    world.hang_up(second, at=25.0)
    world.run_until(31.0)
    assert world.clients[second].lines == [
        (10.0, "waiting, position 1, 10 s so far"), (20.0, "waiting, position 1, 20 s so far"),
    ]  # fmt: skip
    assert [text for _, text in world.clients[third].lines] == [
        "waiting, position 2, 10 s so far", "waiting, position 2, 20 s so far", "waiting, position 1, 30 s so far",
    ]  # fmt: skip
    assert [time for time, _ in world.clients[third].lines] == [10.0, 20.0, 30.0]


def test_a_whole_answer_waits_its_queue_timeout() -> None:
    """I2, I3: without a stream 429 after --queue-timeout; a stream waits as long as it may run."""
    world = World(Script(answers=[Answer(ids=[1] * 900, decode_ms=1_000.0)]), queue_timeout=40.0, request_timeout=100.0)
    first, whole, stream = world.arrive(), world.arrive(Plan(stream=False)), world.arrive()
    world.run_until(99.0)
    end = world.clients[whole].end
    assert end is not None
    assert (end.status, end.code, end.retry_after, end.opened) == (429, "queue_timeout", 10, False)
    assert world.clients[stream].end is None
    world.run_until(250.0)
    running = world.clients[first].end
    assert running is not None
    assert (running.finish, running.code, running.status) == ("timeout", "request_timeout", 200)
    waited = world.clients[stream].end
    assert waited is not None
    assert (waited.finish, waited.code, waited.opened, waited.status) == ("timeout", "queue_timeout", True, 200)


def test_sixty_four_at_once() -> None:
    """I1: queue of 4, one slot, 64 at once: exactly five are admitted in the end, the others 503 with Retry-After."""
    world = World(Script(answers=[Answer(ids=[1, 2], decode_ms=100.0)]), max_queue=4)
    ids = [world.arrive(Plan(stream=False)) for _ in range(64)]
    world.run_until(60.0)
    ends = [world.clients[id].end for id in ids]
    assert all(ends)
    assert sum(end.code == "" for end in ends if end) == 5
    refused = [end for end in ends if end and end.code]
    assert {(end.status, end.code, end.retry_after) for end in refused} == {(503, "queue_full", 5)}
    assert "queue_filled" in rows(world)
    world = World(Script(answers=[Answer(ids=[1, 2], decode_ms=100.0)]), max_queue=1)
    [world.arrive(at=t / 2) for t in range(5)]
    world.run_until(1.6)
    late = world.arrive()
    assert world.clients[late].end is None or world.clients[late].end.code == "queue_full"


def test_a_full_queue_refuses_at_arrival() -> None:
    """I1: a request that finds the queue full is refused before its body is read."""
    world = World(Script(answers=[Answer(ids=[1] * 100, decode_ms=100.0)]), max_queue=1)
    world.arrive()
    world.run_until(0.5)
    world.arrive()
    world.run_until(1.0)
    late = world.arrive()
    end = world.clients[late].end
    assert end is not None
    assert (end.status, end.code) == (503, "queue_full")
    assert rows(world)[-1] == "refused_queue_full"


@pytest.mark.parametrize("when", [0.0005, 0.5, 1.5, 3.0])
def test_a_client_leaves(when: float) -> None:
    """G1, F6: before, in the queue, in prefill, in decode: abandoned, and the engine free within one step or round."""
    script = Script(answers=[Answer(ids=[1] * 500, prefill_ms_per_row=1.0, decode_ms=100.0)])
    world = World(script)
    if when == 0.5:
        world.arrive()
        world.run_until(0.1)
    id = world.arrive(Plan(prompt=900))
    world.hang_up(id, at=world.now + when)
    world.run_until(world.now + when + 0.31)
    client = world.clients[id]
    assert client.forgotten == "closed"
    assert client.end is None
    assert world.core.memory.counts.abandoned == 1
    assert world.core.memory.counts.errors == 0
    if when != 0.5:
        assert world.core.memory.slots[0].state is SlotState.free
    assert any(text.startswith("[req]") and "finish=abandoned" in text for text in world.logs)


def test_a_leaver_never_runs() -> None:
    """G1: A runs, B and C wait, B leaves, A ends: B never reaches prefill, C starts at once."""
    world = World(Script(answers=[Answer(ids=[1] * 10, decode_ms=100.0)]))
    world.arrive()
    b, c = world.arrive(), world.arrive()
    world.run_until(0.5)
    world.hang_up(b)
    assert world.core.memory.queue == [c]
    world.run_until(5.0)
    assert "admitted" not in [s.row for s in world.steps if s.life == "request" and s.id == b]
    end = world.clients[c].end
    assert end is not None
    assert end.finish == "stop"


def test_a_lost_engine() -> None:
    """I11: what ran ends with error and is never run again, what waits stays, the engine starts again."""
    world = World(Script(answers=[Answer(ids=[1] * 50, decode_ms=100.0)]))
    running, waiting = world.arrive(), world.arrive()
    world.run_until(1.0)
    world.kill()
    end = world.clients[running].end
    assert end is not None
    assert (end.finish, end.code, end.opened, end.status) == ("error", "engine_restarting", True, 200)
    world.run_until(20.0)
    later = world.clients[waiting].end
    assert later is not None
    assert later.finish == "stop"
    assert world.core.memory.engine.epoch == 2
    assert sum(s.row == "fits" and s.id == running for s in world.steps) == 1


def test_three_failed_starts() -> None:
    """I11: after three failed starts in a minute health says failed, the queue ends; a new request tries again."""
    world = World(Script(), failpoints=[{"die_at_load": 1}])
    world.run_until(1.0)
    assert rows(world)[-1] == "third_failure"
    early = world.arrive()
    end = world.clients[early].end
    assert end is not None
    assert (end.status, end.code) == (503, "engine_restarting")
    assert 1 <= end.retry_after <= 60
    world.run_until(100.0)
    world.failpoints = [{}]
    late = world.arrive()
    world.run_until(110.0)
    assert world.clients[late].end is not None
    assert world.clients[late].end.finish == "stop"
    assert [s.row for s in world.steps if s.life == "engine"][-2:] == ["tried_again", "loaded"]


def test_a_silent_engine() -> None:
    """L9, I3: no message in time: lines stop, health is red, after a minute the engine counts as lost."""
    world = World(Script(answers=[Answer(ids=[1] * 9, decode_ms=100.0)]), failpoints=[{"silent_at_token": 5}, {}])
    first, second = world.arrive(), world.arrive()
    world.run_until(95.0)
    assert [s.row for s in world.steps if s.life == "engine"] == [
        "loaded",
        "went_quiet",
        "given_up",
        "restarted",
        "loaded",
    ]
    assert world.clients[first].end is not None
    assert world.clients[first].end.code == "engine_restarting"
    times = [time for time, _ in world.clients[second].lines]
    assert times == [10.0, 20.0, 30.0]
    assert "waits_silently" in rows(world)
    world.run_until(120.0)
    assert world.clients[second].end is not None
    assert world.clients[second].end.finish == "stop"


def test_a_request_times_out_on_a_silent_engine() -> None:
    """I3: the core's own timer ends a request; no token and no offer is needed."""
    world = World(Script(answers=[Answer(ids=[1] * 5, decode_ms=100.0, then="silent")]), request_timeout=12.0)
    id = world.arrive()
    world.run_until(15.0)
    end = world.clients[id].end
    assert end is not None
    assert (end.finish, end.code) == ("timeout", "request_timeout")


def test_draining() -> None:
    """I5: new ones are refused with 503, those inside finish, then the server leaves."""
    world = World(Script(answers=[Answer(ids=[1] * 20, decode_ms=100.0)]))
    inside, waiting = world.arrive(), world.arrive()
    world.run_until(0.5)
    world.post(Draining())
    outside = world.arrive()
    end = world.clients[outside].end
    assert end is not None
    assert (end.status, end.code, end.retry_after) == (503, "draining", 30)
    world.run_until(10.0)
    assert [world.clients[id].end.finish for id in (inside, waiting)] == ["stop", "stop"]  # type: ignore[union-attr]
    assert world.exited == 0
    world = World(Script(answers=[Answer(ids=[1] * 900, decode_ms=100.0)]), drain_timeout=5.0)
    cut, queued = world.arrive(), world.arrive()
    world.run_until(1.0)
    world.post(Draining())
    world.run_until(7.0)
    ends = [world.clients[id].end for id in (cut, queued)]
    assert [(e.finish, e.code, e.opened, e.status) for e in ends if e] == [
        ("error", "shutting_down", True, 200), ("error", "shutting_down", False, 503),
    ]  # fmt: skip
    assert world.exited == 0
    world = World(Script(answers=[Answer(ids=[1] * 900, decode_ms=100.0)]))
    world.arrive()
    world.run_until(1.0)
    world.post(Draining())
    world.post(Shutdown())
    assert world.exited == 0


def test_an_unusable_model_stops_the_server() -> None:
    """I6: an engine that says at its start that the model cannot be used is not started again."""
    world = World(Script(load_ms=1_000.0))
    id = world.arrive()
    world.run_until(0.5)
    world.kill(code=3)
    assert world.exited == 1
    assert world.clients[id].end is not None
    assert world.clients[id].end.code == "shutting_down"
    late = world.arrive()
    assert world.clients[late].end is not None
    assert world.clients[late].end.code == "draining"


def test_prefill_lines() -> None:
    """G3: a prefill older than five seconds says how far it is, at most once a second."""
    world = World(Script(answers=[Answer(ids=[1], prefill_ms_per_row=10.0)]), failpoints=[{}])
    id = world.arrive(Plan(prompt=990))
    world.run_until(20.0)
    lines = world.clients[id].lines
    assert [text for _, text in lines] == ["prefill 512/990", "prefill 768/990", "prefill 990/990"]
    assert all(later - earlier >= 1.0 for (earlier, _), (later, _) in itertools.pairwise(lines))
    silent = World(Script(answers=[Answer(ids=[1], prefill_ms_per_row=10.0)]), prefill_heartbeat_s=0.0)
    other = silent.arrive(Plan(prompt=990))
    silent.run_until(20.0)
    assert silent.clients[other].lines == []


def test_a_stop_in_the_text() -> None:
    """G5: a stop in the text cancels the run and keeps the rows of what was sent; usage counts through it."""
    world = World(Script(answers=[Answer(ids=[1] * 50, decode_ms=10.0)]))
    id = world.arrive(Plan(stop_at=7))
    world.run_until(5.0)
    cancels = [e for _, e in world.effects if isinstance(e, CancelRun)]
    assert [c.keep for c in cancels] == [6]
    end = world.clients[id].end
    assert end is not None
    assert (end.finish, end.completion_tokens) == ("stop", 7)
    assert [s.row for s in world.steps if s.life == "slot"] == ["taken", "let_go", "wound_down"]


def test_a_stalled_load_is_given_up() -> None:
    """L9: a load that stands still for a minute is killed and tried again."""
    world = World(Script(), failpoints=[{"stall_load": 1}, {}])
    id = world.arrive()
    world.run_until(70.0)
    assert [s.row for s in world.steps if s.life == "engine"] == ["given_up", "restarted", "loaded"]
    assert world.clients[id].end is not None
    assert world.clients[id].end.finish == "stop"
    assert world.clients[id].lines[0] == (10.0, "waiting, position 1, the model is loading, 10 s so far")


def test_failed_starts_are_forgotten() -> None:
    """R5: a load that never ends costs no memory, and no longer snapshot, however often it was tried."""
    world = World(Script(), failpoints=[{"stall_load": 1}])
    world.run_until(3_600.0)
    assert world.core.memory.engine.epoch > 50
    assert len(world.core.memory.engine.failures) <= 2


def test_a_fault_of_ours() -> None:
    """A9: a fault of ours is a 500 in any live state, and the engine goes on."""
    world = World(Script(answers=[Answer(ids=[1], then="fault"), Answer(ids=[1])]))
    first = world.arrive(Plan(stream=False))
    world.run_until(1.0)
    assert world.clients[first].end is not None
    assert (world.clients[first].end.status, world.clients[first].end.code) == (500, "internal_error")
    second = world.arrive(Plan(stream=False))
    world.post(Faulted(second, "judge", "KeyError"))
    assert world.clients[second].end is not None
    assert world.clients[second].end.status == 500
    third = world.arrive()
    world.run_until(3.0)
    assert world.clients[third].end is not None
    assert world.clients[third].end.finish == "stop"


def test_admitted_when_the_engine_is_lost() -> None:
    """I11: nothing had run: the request goes back to its place and is served by the next engine."""
    world = World(Script(answers=[Answer(ids=[1])]))
    world.run_until(1.0)
    world.freeze()
    first, second = world.arrive(), world.arrive()
    world.run_until(2.0)
    assert world.core.memory.requests[first].state is RequestState.admitted
    world.kill()
    assert world.core.memory.queue == [first, second]
    assert "requeued" in rows(world)
    world.run_until(5.0)
    assert [world.clients[id].end.finish for id in (first, second)] == ["stop", "stop"]  # type: ignore[union-attr]
    admitted = [s.id for s in world.steps if s.row == "admitted"]
    assert admitted == [first, first, second]


def test_heard_again() -> None:
    """L9: an engine that was silent and speaks again is ready again, and lines go on."""
    world = World(Script(answers=[Answer(ids=[1] * 9, decode_ms=100.0, then="silent")]))
    world.arrive()
    waiting = world.arrive()
    world.run_until(45.0)
    assert world.core.memory.engine.state.value == "silent"
    world.post(EngineLoading(1, 0, 1))
    assert world.core.memory.engine.state.value == "ready"
    world.run_until(52.0)
    assert [time for time, _ in world.clients[waiting].lines] == [10.0, 20.0, 30.0, 50.0]


def test_bodies_in_flight_are_counted_as_they_come() -> None:
    """A14: what comes beyond the declared size counts while it is read; who passes the bound is refused, no other."""
    world = World(Script(), bodies=1_000)
    first, second = world.arrive(Plan(body_s=5.0)), world.arrive(Plan(body_s=5.0))
    world.post(BodyGrew(first, 700))
    world.post(BodyGrew(first, 600))
    assert [world.core.memory.requests[id].body_bytes for id in (first, second)] == [700, 100]
    world.post(BodyGrew(second, 301))
    end = world.clients[second].end
    assert end is not None
    assert (end.code, end.status, end.retry_after) == ("live_full", 503, 5)
    world.post(BodyGrew(second, 900))
    third = world.arrive(Plan(body_s=5.0))
    assert world.core.memory.requests[third].row == "arrived"
    world.run_until(20.0)
    assert [client.end is not None and client.end.finish for client in world.clients.values()] == [
        "stop",
        "error",
        "stop",
    ]
    assert [row for row in rows(world) if row in ("reads_on", "refused_bodies_full")] == [
        "reads_on", "reads_on", "refused_bodies_full",
    ]  # fmt: skip
    world.post(BodyGrew(third, 5_000))
    assert rows(world)[-1] != "reads_on"
