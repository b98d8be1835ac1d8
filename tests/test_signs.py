"""What a client hears while nothing is there for it: estimates in its lines, empty chunks, a whole answer's blanks."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import msgspec
import pytest

from engine.scripted import Answer, Script
from pipeline import effects as do
from pipeline import events as ev
from pipeline import view
from pipeline.core import Core
from pipeline.outbox import Beat, Blank, Comment, Item
from pipeline.replay import replay
from pipeline.request import Memory
from pipeline.runner import Runner
from pipeline.settings import Policy, Settings
from pipeline.trace import Header, Recorder
from stages.wait import Ended, History, flat
from tests.world import Client, Plan, World, replayed

KNOWN = History({"plain": tuple(Ended("plain", 10 * n, 1.0, 10) for n in range(1, 41))})


def writing(tokens: int, decode_ms: float = 500.0, prefill_ms_per_row: float = 0.0, load_ms: float = 0.0) -> Script:
    return Script([Answer(ids=[1] * tokens, decode_ms=decode_ms, prefill_ms_per_row=prefill_ms_per_row)], load_ms)


def times(client: Client, what: str) -> list[int]:
    """When it got such signs, to the second."""
    return [round(time) for time, kind in client.signs if kind == what]


def checked(world: World) -> World:
    """The world, once a fresh core fired the same rows over its facts."""
    assert replayed(world) == world.steps
    return world


# -- lines ---------------------------------------------------------------------------------------------------------


def test_a_line_has_the_estimate() -> None:
    """L1, L2: each waiter is told its own, by the core's history and the self-check's rates."""
    world = World(writing(900, 100.0))
    ids = [world.arrive() for _ in range(3)]
    world.run_until(0.5)
    memory = world.core.memory
    memory.history, memory.engine.prefill_rate, memory.engine.decode_rate = KNOWN, 1_000.0, 10.0
    world.run_until(11.0)
    (_, first), (_, second) = (world.clients[id].lines[0] for id in ids[1:])
    assert first.startswith("waiting, position 1, about ")
    assert second.startswith("waiting, position 2, about ")
    told = [int(line.split(" s, ")[0].rpartition(" ")[2]) for line in (first, second)]
    assert told[1] >= told[0] + 15  # a plain answer of some 200 tokens stands between them


def test_without_a_history_there_is_only_the_place() -> None:
    """L3: with too little to judge by the line has the position only."""
    world = World(writing(900, 100.0))
    world.arrive()
    other = world.arrive()
    world.run_until(10.5)
    assert [text for _, text in world.clients[other].lines] == ["waiting, position 1, 10 s so far"]
    checked(world)


def test_a_wait_for_memory_is_told_apart() -> None:
    """L4: what it waits for is the first end of those who run."""
    world = World(writing(900, 100.0))
    world.arrive()
    other = world.arrive()
    world.run_until(0.5)
    memory = world.core.memory
    memory.history, memory.requests[other].why = KNOWN, "memory"
    memory.engine.prefill_rate, memory.engine.decode_rate = 1_000.0, 10.0
    world.run_until(10.5)
    ((_, line),) = world.clients[other].lines
    assert line.startswith("waiting for memory, position 1, about ")


def test_figures_for_who_asked() -> None:
    """L8: position, estimate and time so far of a waiter; rows done and total of a prefill; zeros for all others."""
    world = World(writing(200, 100.0, 20.0))
    ids = [world.arrive(Plan(prompt=600, progress=progress)) for progress in (True, False, True)]
    world.run_until(25.0)
    reads, silent, waits = (world.clients[id].figures for id in ids)
    assert [(line.done, line.total, line.position) for line in reads] == [(256, 600, 0), (512, 600, 0), (600, 600, 0)]
    assert {(line.position, line.waited_s, line.total) for line in silent} == {(0, 0.0, 0)}
    assert [(line.position, line.estimate_s, line.waited_s) for line in waits] == [(2, None, 10.0), (2, None, 20.0)]
    assert [line.text for line in reads] == [f"prefill {done}/600" for done in (256, 512, 600)]


# -- the server's own work -------------------------------------------------------------------------------------------


def test_own_work_is_told_and_counted() -> None:
    """L6: who waits behind it is told so, by the median of real waits; how long it was stands in log and history."""
    world = World(writing(3))
    world.run_until(1.0)
    world.core.memory.own_waits["disk write"] = [30.0, 14.0, 20.0]
    engine, world._engine = world._engine, None  # it takes no message while it writes
    world.post(ev.OwnWork(1, "disk write", True))
    id = world.arrive()
    world.run_until(12.0)
    assert [text for _, text in world.clients[id].lines] == [
        "waiting, position 1, about 10 s, 10 s so far, the server is writing its cache"
    ]
    world._engine = engine
    world.post(ev.OwnWork(1, "disk write", False))
    waited = world.core.memory.own_waits["disk write"][-1]
    assert waited == pytest.approx(11.0, abs=0.01)
    assert world.core.memory.behind_own == []
    world.post(ev.MemoryRead(1, world.core.memory.requests[id].run, 0, 0, 0, 0))
    world.run_until(20.0)
    assert world.clients[id].end is not None
    assert next(line for line in world.logs if line.startswith("[req]")).split("wait_own_ms=")[1] == "10997"


def test_who_leaves_behind_own_work() -> None:
    """L6: its clock stops with it, and only so many waits are kept."""
    world = World(writing(3))
    world.run_until(1.0)
    world.core.memory.own_waits["park copy"] = [1.0] * 64
    world._engine = None
    world.post(ev.OwnWork(1, "park copy", True))
    id = world.arrive()
    world.run_until(3.0)
    world.hang_up(id)
    memory = world.core.memory
    assert (memory.behind_own, len(memory.own_waits["park copy"])) == ([], 64)
    assert memory.own_waits["park copy"][-1] == pytest.approx(2.0, abs=0.01)
    assert memory.recent[0].own_wait_s == memory.own_waits["park copy"][-1]


def test_the_core_s_memory_goes_through_json() -> None:
    """R1: history and clocks are plain state: a snapshot holds them."""
    world = World(writing(3))
    world.arrive()
    world.core.memory.own_waits["park copy"] = [1.0]
    world.run_until(30.0)
    memory = world.core.memory
    assert memory.history.recent
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory


# -- empty chunks ----------------------------------------------------------------------------------------------------


def test_empty_chunks_while_it_waits() -> None:
    """L1: beside the comments every ten seconds a chunk every minute, from its arrival on."""
    world = World(writing(900))
    world.arrive()
    other = world.arrive(at=0.5)
    world.run_until(131.0)
    client = world.clients[other]
    assert times(client, "Beat") == [60, 120]
    assert [round(time) for time, _ in client.lines] == [round(n + 0.5) for n in range(10, 131, 10)]
    assert [step.row for step in world.steps if step.id == other].count("beat_due") == 2
    checked(world)


def test_empty_chunks_in_a_prefill() -> None:
    """L1: they open a stream whose prefill has no lines; who asked for no stream gets none."""
    for stream in (True, False):
        world = World(writing(5, 10.0, 100.0), prefill_heartbeat_s=0.0)
        id = world.arrive(Plan(prompt=900, stream=stream))
        world.run_until(80.0)
        assert times(world.clients[id], "Beat") == ([60] if stream else [])
        assert world.core.memory.requests[id].opened == stream
        checked(world)


def test_empty_chunks_in_an_answer_that_says_nothing() -> None:
    """L1: only once nothing was sent for that long."""
    slow, fast = World(writing(5, 12_000.0), keepalive_s=10.0), World(writing(30, 1_000.0), keepalive_s=10.0)
    ids = [world.arrive() for world in (slow, fast)]
    for world in (slow, fast):
        world.run_until(40.0)
    assert times(slow.clients[ids[0]], "Beat") == [10, 22, 34]
    assert times(fast.clients[ids[1]], "Beat") == []
    assert {step.row for step in fast.steps} & {"beat_due", "not_due"} == set()
    checked(slow)


def test_no_empty_chunk_where_none_is_wanted() -> None:
    """L1: ``--keepalive-chunk-s 0``."""
    world = World(writing(900), keepalive_s=0.0)
    world.arrive()
    other = world.arrive()
    world.run_until(130.0)
    assert times(world.clients[other], "Beat") == []
    assert len(world.clients[other].lines) == 13


def test_no_sign_while_the_engine_stands_still() -> None:
    """L9: neither a line nor a chunk, in the queue or in a run, until it is heard again or starts again."""
    world = World(writing(900, 1_000.0, load_ms=30_000.0), keepalive_s=20.0)
    runs, waits = world.arrive(), world.arrive()
    world.run_until(35.5)
    world.freeze()
    world.run_until(120.0)
    assert times(world.clients[runs], "Beat") == [20, 55]  # within the 30 s in which its silence says nothing
    assert times(world.clients[waits], "Beat") == [20, 40, 60]
    assert [round(time) for time, _ in world.clients[waits].lines] == [10, 20, 30, 40, 50, 60]
    assert {"not_due", "waits_silently"} <= {step.row for step in world.steps}
    world.run_until(150.0)  # given up at 125 s, and starts again
    assert times(world.clients[waits], "Beat") == [20, 40, 60, 140]
    checked(world)


def test_a_list_of_prompts_gets_one_chunk() -> None:
    """L1, A13: they are one client's: one chunk for all of them, and none while one of them says something."""
    world = World(writing(900))
    world.arrive(Plan(max_tokens=700))
    first = world.arrive(Plan(others=(10, 10)), at=0.5)
    world.run_until(200.0)
    members = [id for id, client in world.clients.items() if client.parent == first]
    assert times(world.clients[first], "Beat") == [60, 120, 180]
    assert [times(world.clients[id], "Beat") for id in members] == [[], []]
    world.run_until(600.0)  # the first of them writes from 350 s on
    assert not [time for id in (first, *members) for time in times(world.clients[id], "Beat") if time > 360]
    checked(world)


# -- a whole answer ----------------------------------------------------------------------------------------------------


def test_headers_of_a_whole_answer_leave_early() -> None:
    """I6b: at that age, then a blank every 30 s; the end is a 200."""
    world = World(writing(100, 1_000.0), early_headers_s=20.0)
    id = world.arrive(Plan(stream=False))
    world.run_until(200.0)
    client = world.clients[id]
    assert times(client, "Blank") == [20, 50, 80]
    assert client.end is not None
    assert (client.end.finish, client.end.opened, client.end.status) == ("stop", True, 200)
    rows = [step.row for step in world.steps if step.id == id and step.trigger == "tick"]
    assert rows == ["headers_due", "beat_due", "beat_due"]
    checked(world)


def test_no_header_leaves_a_queue() -> None:
    """I6b: not while it waits; the moment it runs it is old enough."""
    world = World(writing(50, 1_000.0, 1.0), early_headers_s=20.0)
    world.arrive()
    other = world.arrive(Plan(stream=False))
    world.run_until(60.0)
    first = next(s.time for s in world.steps if s.id == other and s.dest == "prefilling")
    assert first > 40
    assert [time for time, _ in world.clients[other].signs] == [first]
    checked(world)


@pytest.mark.parametrize("early", [0.0, 20.0])
@pytest.mark.parametrize("how", ["timeout", "engine", "shutdown"])
def test_every_end_behind_the_headers_is_a_200(early: float, how: str) -> None:
    """I6b, F5: the error object rides on a 200 with the finish reason; without the headers it has its own status."""
    world = World(writing(500, 1_000.0), early_headers_s=early, request_timeout=40.0 if how == "timeout" else 0.0)
    id = world.arrive(Plan(stream=False))
    world.run_until(30.0)
    if how == "engine":
        world.kill()
    elif how == "shutdown":
        world.post(ev.Shutdown())
    world.run_until(45.0)
    client, opened = world.clients[id], early > 0
    assert times(client, "Blank") == ([20] if opened else [])
    assert client.end is not None
    assert client.end.opened == opened
    code = {"timeout": "request_timeout", "engine": "engine_restarting", "shutdown": "shutting_down"}[how]
    assert client.end.code == code
    assert client.end.finish == ("timeout" if how == "timeout" else "error")
    assert client.end.status == (200 if opened or how == "timeout" else 503)
    assert (client.end.retry_after == 0) == (opened or how == "timeout")
    checked(world)


def test_a_whole_list_leaves_early_once() -> None:
    """I6b, A13: one of its prompts that run gives the blanks; what one opened is open for all."""
    world = World(writing(40, 1_000.0), early_headers_s=20.0, slots=2)
    first = world.arrive(Plan(stream=False, others=(10, 10)))
    world.run_until(200.0)
    signs = sorted(round(time) for client in world.clients.values() for time, _ in client.signs)
    assert signs == sorted(set(signs))
    assert signs[0] == 20
    assert all(later - sooner >= 30 for sooner, later in itertools.pairwise(signs))
    assert all(client.end is not None and client.end.opened for client in world.clients.values())
    assert world.clients[first].end is not None
    checked(world)


# -- Retry-After -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load_ms", "wait"), [(20_000.0, 20), (1_000.0, 5), (59_000.0, 59), (0.0, 30)])
def test_retry_after_a_lost_engine(load_ms: float, wait: int) -> None:
    """I6a, I11: what the engine takes to start, between 5 and 60 s; where nothing is known of it, the table's 30."""
    world = World(writing(500, 1_000.0, load_ms=load_ms), queue_timeout=200.0)
    id = world.arrive(Plan(stream=False))
    world.run_until(load_ms / 1_000 + 10.0)
    world.kill()
    end = world.clients[id].end
    assert end is not None
    assert (end.code, end.status, end.retry_after) == ("engine_restarting", 503, wait)


@pytest.mark.parametrize(("decode_rate", "least", "most"), [(20.0, 20, 59), (1.0, 60, 60)])
def test_retry_after_counts_who_waits(decode_rate: float, least: int, most: int) -> None:
    """I6a: who would come now stands behind them all; 60 s at most."""
    world = World(writing(900, 1_000.0, load_ms=10_000.0))
    id = world.arrive(Plan(stream=False))
    for _ in range(2):
        world.arrive()
    world.run_until(15.0)
    memory = world.core.memory
    memory.history, memory.engine.prefill_rate, memory.engine.decode_rate = KNOWN, 1_000.0, decode_rate
    world.kill()
    end = world.clients[id].end
    assert end is not None
    assert least <= end.retry_after <= most  # 10 s of loading and two answers of some 200 tokens


# -- around the core -----------------------------------------------------------------------------------------------


def test_a_header_s_history_makes_the_lines_again(tmp_path: Path) -> None:
    """R6, L3: what a server knew at its start stands in the trace; without it the lines are others."""
    core, world = Core(Policy()), World(writing(900, 100.0))
    for _ in range(2):
        world.arrive()
    world.run_until(30.0)
    core.memory.history = KNOWN
    header = Header(tandem="0", engine="scripted", policy=Policy(), history=flat(KNOWN))
    recorder = Recorder(tmp_path, header, 1 << 30)
    core.begin(0.0)
    for time, event in world.events:
        core.handle(event, time)
        recorder.event(event, time, core.take_steps())
    recorder.close()
    (path,) = tmp_path.iterdir()
    report = replay(path)
    assert report.difference is None
    assert any(", about " in step.line for step in report.steps)
    first, *lines = path.read_text().splitlines()
    bare = json.loads(first)
    bare["header"]["history"] = []
    path.write_text("\n".join([json.dumps(bare), *lines]) + "\n")
    assert replay(path).difference is not None


def test_the_runner_passes_signs_on() -> None:
    """L1, L8, I6b: a line with its figures where there are any; chunks and blanks as they are."""

    async def run() -> list[Item]:
        runner = Runner(Settings(), "model.gguf", "model")
        call = runner.receive("chat", 0)
        effects = [
            do.Line(call.request, "waiting", 2, None, 10.0),
            do.Line(call.request, "prefill 1/2", done=1, total=2),
            do.Line(call.request, "x"),
            do.Beat(call.request),
            do.Blank(call.request),
        ]
        for effect in effects:
            runner._do[type(effect)](effect)
        items = await call.outbox.take()
        await runner.close()
        return items

    assert asyncio.run(run()) == [
        Comment("waiting", progress={"position": 2, "estimate_s": None, "waited_s": 10.0}),
        Comment("prefill 1/2", progress={"rows_done": 1, "rows_total": 2}),
        Comment("x"),
        Beat(),
        Blank(),
    ]


@pytest.mark.parametrize(
    ("why", "slots", "said"),
    [
        ("slots", 3, "Queued: all 3 slots are busy"),
        ("slots", 1, "Queued: the slot is busy"),
        ("memory", 3, "Queued: not enough memory beside those that run"),
        ("own", 3, "Queued: the server is writing its cache"),
    ],
)
def test_the_dev_view_says_why(why: str, slots: int, said: str) -> None:
    """L4, L6: a wait for memory, for a slot and for the server's own work are told apart."""
    world = World(writing(900), slots=slots)
    ids = [world.arrive() for _ in range(slots + 1)]
    world.run_until(1.0)
    memory = world.core.memory
    memory.requests[ids[-1]].why, memory.engine.own_work = why, ["disk write"]
    assert view.waits(memory.requests[ids[-1]], memory) == said
    assert view.waits(memory.requests[ids[0]], memory) == ""
