"""The memory gate in virtual time: what becomes of a request between its slot and its prefill, and of the others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scripted import Answer, Script
from pipeline import effects as do
from pipeline import events as ev
from pipeline.call import Call
from pipeline.closing import finished
from pipeline.outbox import End
from pipeline.states import RequestState, SlotState
from pipeline.view import memory_gate, request_view
from tests.box import TEN, Box, Store
from tests.world import Plan, World, replayed


def gate_rows(world: World, id: int) -> list[str]:
    """The rows of the gate that fired for a request, in order."""
    return [step.row for step in world.steps if step.life == "request" and step.id == id and step.trigger == "gate"]


def done(world: World) -> None:
    """Nobody is inside, every slot is free, and a replay of the facts gives the same journal."""
    memory = world.core.memory
    assert not memory.requests and not memory.queue and memory.gate == -1
    assert all(slot.state is SlotState.free for slot in memory.slots)
    assert all(client.ends == 1 for client in world.clients.values())
    assert replayed(world) == world.steps


def code(world: World, id: int) -> str:
    end = world.clients[id].end
    assert end is not None
    return end.code


def code_or_none(world: World, id: int) -> str | None:
    end = world.clients[id].end
    return end.code if end is not None else None


def test_fits_at_once() -> None:
    """J2: a prompt that fits takes nothing from anyone."""
    world = Box(Store(peak=110, levels={"park": 50}))
    one = world.arrive(Plan(prompt=10))
    world.run_until(9.0)
    assert gate_rows(world, one) == ["fits"] and world.given == []
    assert code(world, one) == ""
    done(world)


def test_level_by_level() -> None:
    """J2, J5: one level after the other, the cheapest first, no more than needed; each is a step of the journal."""
    world = Box(Store(peak=110, levels={"images": 20, "park": 40, "checkpoints": 40}))
    one = world.arrive(Plan(prompt=50))
    world.run_until(9.0)
    assert gate_rows(world, one) == ["level_given", "level_given", "fits"]
    assert world.given == [("images", 20), ("park", 20)]
    said = [step.line for step in world.steps if step.row == "level_given"]
    assert said == ["images gives back 20 bytes", "park gives back 20 bytes"]
    assert world.clients[one].lines == [] and code(world, one) == ""
    done(world)


def test_the_machine_is_short_before_the_peak_is() -> None:
    """J1, J2: what other processes left free bounds a prefill too."""
    world = Box(Store(peak=10_000, free=30, levels={"park": 40}))
    one = world.arrive(Plan(prompt=50))
    world.run_until(9.0)
    assert world.given == [("park", 20)] and code(world, one) == ""
    done(world)


def test_collecting_is_enough() -> None:
    """J3: what nobody used any more is collected before anybody waits or is refused."""
    world = Box(Store(peak=110, garbage=45, levels={"park": 10}))
    one = world.arrive(Plan(prompt=50))
    world.run_until(9.0)
    assert gate_rows(world, one) == ["collects", "fits"] and world.given == [("collect", 0)]
    done(world)


def test_the_allocators_reserve_serves() -> None:
    """J3: an allocator that cannot let go of its free blocks still serves a prompt that they are enough for."""
    world = Box(Store(allocated=100, peak=105, levels={"allocator": 0}, device="cuda"))
    one = world.arrive(Plan(prompt=50))
    world.run_until(0.003)
    read = {"allocated": 40, "reserved": 100, "peak": 0, "workspace": 50, "free": 10}
    levels = [("allocator", 60)]
    run = world.core.memory.gate
    world.post(ev.MemoryRead(1, run, **read, levels=levels))
    assert isinstance(world.effects[-1][1], do.Log) and world.given == [("allocator", 45)]
    for _ in range(2):  # it let go of none of them, then nothing was left to collect
        world.post(ev.MemoryRead(1, run, **read, levels=levels))
    assert gate_rows(world, one) == ["level_given", "collects", "fits_reserve"]
    world.run_until(9.0)
    assert code(world, one) == ""


def test_the_scripted_engine_says_the_same() -> None:
    """J2, J3: through the protocol: what the script's levels hold is given back, what is stuck is a reserve."""
    taken = (1 << 20) + (1_000 << 10)
    script = Script(
        answers=[Answer(ids=[1] * 3)], levels=[("allocator", 400), ("park", 300)], stuck=400, workspace_per_row=10,
        peak_limit=taken + 800,
    )  # fmt: skip
    world = World(script)
    ids = [world.arrive(Plan(prompt=rows), at=0.1 * rows) for rows in (10, 30, 40, 41)]
    world.run_until(9.0)
    asked = [(e.level, e.nbytes) for _, e in world.effects if isinstance(e, do.GiveBack)]
    assert asked == [("allocator", 200), ("park", 200), ("allocator", 100), ("park", 100), ("allocator", 10)]
    assert [gate_rows(world, id)[-1] for id in ids] == ["fits", "fits", "fits", "refused_memory"]
    done(world)


def test_alone_it_is_refused() -> None:
    """J3: nothing is given back in vain; alone, a 503 with both figures, and the next request is served."""
    world = Box(Store(peak=110, levels={"park": 30}))
    one, two = world.arrive(Plan(prompt=50, stream=False)), world.arrive(Plan(prompt=5), at=1.0)
    world.run_until(9.0)
    assert gate_rows(world, one) == ["collects", "refused_memory"] and world.given == [("collect", 0)]
    end = world.clients[one].end
    assert end is not None and (end.status, end.code) == (503, "memory") and 5 <= end.retry_after <= 60
    assert any(log.startswith("[memory] refused: ") and "allocated" in log and "reserved" in log for log in world.logs)
    shown = memory_gate(world.core.memory)
    assert shown["refused"] == 1
    assert (shown["last_refused"]["allocated"], shown["last_refused"]["workspace"]) == (100, 50)
    assert code(world, two) == "" and shown["decision"]["row"] == "fits"
    done(world)


def test_waits_for_memory_while_another_runs() -> None:
    """J3, L4, M7: beside others it leaves its slot, waits for an end, and is served in its place."""
    world = Box(Store(peak=160, a_run=40, levels={"park": 5}), slots=2)
    one, two = world.arrive(Plan(prompt=10)), world.arrive(Plan(prompt=50), at=0.1)
    world.run_until(0.5)
    memory = world.core.memory
    waiter = memory.requests[two]
    assert gate_rows(world, two) == ["collects", "waits_for_memory"]
    assert (waiter.state, waiter.why, waiter.slot, waiter.admitted_at) == (RequestState.queued, "memory", -1, None)
    assert memory.queue == [two] and memory.slots[1].state is SlotState.free
    world.run_until(0.9)
    assert gate_rows(world, two) == ["collects", "waits_for_memory"], "it is not offered before a run has ended"
    assert request_view(waiter, memory, world.now)["wait_mem_ms"] > 0
    world.run_until(9.0)
    assert gate_rows(world, two)[2:] == ["fits"]
    assert code(world, one) == code(world, two) == ""
    ended = next(request for request in memory.recent if request.id == two)
    assert ended.mem_wait_s > 0 and ended.mem_since is None
    assert any("wait_mem_ms=" in log for log in world.logs)
    assert world.given == [("collect", 0)]
    done(world)


def test_a_wait_for_memory_ends_like_any_other() -> None:
    """J3, I3: it counts as waiting: a whole answer that gets no memory in time is a 429."""
    world = Box(Store(peak=160, a_run=40), Script(answers=[Answer(ids=[1] * 90, decode_ms=1_000.0)]), slots=2,
                queue_timeout=20.0)  # fmt: skip
    world.arrive(Plan(prompt=10))
    two = world.arrive(Plan(prompt=50, stream=False), at=0.1)
    world.run_until(60.0)
    end = world.clients[two].end
    assert end is not None and (end.status, end.code) == (429, "queue_timeout")
    world.run_until(100.0)
    done(world)


def test_one_that_waits_is_told() -> None:
    """L4: on a stream its lines go on as they were due."""
    world = Box(Store(peak=160, a_run=40), Script(answers=[Answer(ids=[1] * 30, decode_ms=1_000.0)]), slots=2)
    world.arrive(Plan(prompt=10))
    two = world.arrive(Plan(prompt=50), at=1.0)
    world.run_until(25.0)
    assert [round(at) for at, _ in world.clients[two].lines] == [11, 21]
    assert all(line.startswith("waiting for memory, position 1, ") for _, line in world.clients[two].lines)
    world.run_until(100.0)
    assert code(world, two) == ""
    done(world)


def test_never_fits() -> None:
    """J3: a prompt that no memory here holds is a 400 before it queues, and takes nothing from anyone."""
    loads = msgspec.structs.replace(TEN, load_ms=500.0)
    world = Box(Store(peak=110, most_rows=40, levels={"park": 30}), loads)
    early = world.arrive(Plan(prompt=41))  # the engine has not said yet what it holds
    world.run_until(1.0)
    late, fits = world.arrive(Plan(prompt=41)), world.arrive(Plan(prompt=40))
    world.run_until(9.0)
    end = world.clients[late].end
    assert end is not None and (end.status, end.code) == (400, "context_length_exceeded")
    assert [step.row for step in world.steps if step.id == late][-1] == "never_fits"
    assert not gate_rows(world, late) and code(world, fits) == ""
    end = world.clients[early].end
    assert end is not None and (end.status, end.code) == (400, "context_length_exceeded")
    assert gate_rows(world, early) == ["unfit_after_all"]


def test_a_list_with_one_that_never_fits() -> None:
    """J3, A13: it refuses the list before its prompts are requests of their own."""
    world = Box(Store(most_rows=40))
    world.run_until(1.0)
    parent = world.arrive(Plan(prompt=10, others=(10, 41)))
    world.run_until(9.0)
    assert code(world, parent) == "context_length_exceeded" and len(world.clients) == 1


@pytest.mark.parametrize("when", [0.0031, 0.0042, 0.0053])
def test_a_client_leaves_in_the_middle_of_the_gate(when: float) -> None:
    """J2, G1: its slot is free at once, whatever was asked for it; the next one has the gate."""
    world = Box(Store(peak=110, levels={"images": 20, "park": 40}), slots=2)
    one, two = world.arrive(Plan(prompt=50)), world.arrive(Plan(prompt=20))
    world.hang_up(one, at=when)
    world.run_until(9.0)
    assert world.clients[one].forgotten and "fits" not in gate_rows(world, one)
    assert code(world, two) == ""
    done(world)


@pytest.mark.parametrize("when", [0.0031, 0.0042, 0.0053])
def test_the_engine_is_lost_in_the_gate(when: float) -> None:
    """J2, I11: nothing had run: it keeps its place and passes the gate of the next engine."""
    world = Box(Store(peak=110, levels={"images": 20, "park": 40}), slots=2)
    one, two = world.arrive(Plan(prompt=50)), world.arrive(Plan(prompt=20))
    world.kill(at=when)
    world.run_until(9.0)
    assert code(world, one) == code(world, two) == ""
    done(world)


def test_who_waits_while_the_engine_starts_again_waits_for_it() -> None:
    """L4, I11: not for a slot, whatever it waited for before; once the engine is there that is said anew."""
    world = World(Script(answers=[Answer(ids=[1] * 60, decode_ms=100.0)], load_ms=500.0))
    world.arrive(Plan())
    two, three = world.arrive(Plan(), at=0.6), world.arrive(Plan(), at=0.6)
    world.run_until(0.9)
    memory = world.core.memory
    assert [request_view(memory.requests[id], memory, 0.9)["waits"] for id in (two, three)] == [
        "Queued: the slot is busy"
    ] * 2
    world.kill()
    assert [request_view(memory.requests[id], memory, 0.9)["waits"] for id in (two, three)] == [
        "Queued: the engine is not ready"
    ] * 2
    world.run_until(2.0)
    assert memory.requests[two].slot == 0 and memory.requests[three].why == "slots"
    world.run_until(99.0)
    done(world)


def test_the_engine_is_lost_while_one_waits_for_memory() -> None:
    """J3, I11: with its runs gone there is nothing to wait for."""
    world = Box(Store(peak=160, a_run=40), slots=2)
    one, two = world.arrive(Plan(prompt=10)), world.arrive(Plan(prompt=50), at=0.1)
    world.kill(at=0.5)
    world.run_until(9.0)
    assert code(world, one) == "engine_restarting" and code(world, two) == ""
    done(world)


def test_two_at_the_gate() -> None:
    """J2: one at a time: the second is measured when the first has passed, in the order they were admitted."""
    world = Box(Store(peak=130, levels={"park": 40}), slots=3)
    ids = [world.arrive(Plan(prompt=40)), world.arrive(Plan(prompt=45)), world.arrive(Plan(prompt=10))]
    world.run_until(9.0)
    order = [(step.id, step.row) for step in world.steps if step.trigger == "gate"]
    assert order == [
        (ids[0], "level_given"), (ids[0], "fits"), (ids[1], "level_given"), (ids[1], "fits"), (ids[2], "fits"),
    ]  # fmt: skip
    asked = [effect for _, effect in world.effects if isinstance(effect, do.Measure)]
    assert [effect.rows for effect in asked] == [40, 45, 10]
    assert world.given == [("park", 10), ("park", 5)]
    done(world)


def test_two_that_wait_for_memory() -> None:
    """J3: both wait for the one that runs, and go one after the other in their order."""
    world = Box(Store(peak=160, a_run=40), slots=3)
    ids = [world.arrive(Plan(prompt=10)), world.arrive(Plan(prompt=50), at=0.1), world.arrive(Plan(prompt=60), at=0.2)]
    world.run_until(20.0)
    fitted = [step.id for step in world.steps if step.row == "fits"]
    assert fitted == ids and all(code(world, id) == "" for id in ids)
    done(world)


def test_an_end_is_enough_while_a_third_runs() -> None:
    """J3: it is tried again when any run has ended, not when it is alone."""
    answers = [Answer(ids=[1] * count, decode_ms=100.0) for count in (10, 60, 10)]
    world = Box(Store(peak=200, a_run=30), Script(answers=answers), slots=3)
    for at in (0.0, 0.1):
        world.arrive(Plan(prompt=10), at=at)
    three = world.arrive(Plan(prompt=50), at=0.3)
    world.run_until(4.0)
    assert gate_rows(world, three) == ["collects", "waits_for_memory", "fits"]
    assert world.clients[2].end is None
    world.run_until(20.0)
    done(world)


def test_each_try_is_a_whole_one() -> None:
    """J2, J3: who waited for memory may ask every level again, and collects again."""
    taken = (1 << 20) + (2_000 << 10)
    script = Script(
        answers=[Answer(ids=[1] * 10, decode_ms=100.0)], levels=[("allocator", 400)], stuck=400, workspace_per_row=10,
        peak_limit=taken + 700,
    )  # fmt: skip
    world = World(script, slots=2)
    one, two = world.arrive(Plan(prompt=10)), world.arrive(Plan(prompt=50), at=0.2)
    world.run_until(9.0)
    tried = ["level_given", "collects"]
    assert gate_rows(world, two) == [*tried, "waits_for_memory", *tried, "refused_memory"]
    assert code(world, one) == ""
    done(world)


def test_one_behind_at_the_gate_is_no_run_to_wait_for() -> None:
    """J3: two that come together: the first is refused as one alone, the second is served."""
    world = Box(Store(peak=110), slots=2)
    one, two = world.arrive(Plan(prompt=50)), world.arrive(Plan(prompt=5))
    world.run_until(9.0)
    assert gate_rows(world, one) == ["collects", "refused_memory"] and gate_rows(world, two) == ["fits"]
    done(world)


def test_a_late_reading_is_no_decision() -> None:
    """J5: a reading for a run that is not at the gate changes figures and nothing else."""
    world = Box(Store(), Script(answers=[Answer(ids=[1] * 10, decode_ms=100.0)]))
    one = world.arrive()
    world.run_until(0.5)
    world.post(ev.MemoryRead(1, world.core.memory.requests[one].run, 7, 8, 9, 10**9))
    world.run_until(9.0)
    assert gate_rows(world, one) == ["fits"] and code(world, one) == ""


PROMPTS = st.lists(st.tuples(st.integers(1, 80), st.floats(0.0, 3.0), st.booleans()), min_size=1, max_size=6)


@given(PROMPTS, st.integers(1, 3), st.integers(0, 60), st.integers(0, 40), st.integers(0, 40), st.integers(0, 30))
@settings(max_examples=60)
def test_everybody_ends_once(
    prompts: list[tuple[int, float, bool]], slots: int, room: int, images: int, park: int, a_run: int
) -> None:
    """J1, J2, J3: whatever comes: nothing starts above the peak, nobody waits for ever, and every gate is left."""
    store = Store(peak=100 + room, a_run=a_run, levels={"images": min(images, 50), "park": min(park, 50)})
    world = Box(store, slots=slots, queue_timeout=1_000.0)
    for rows, at, leaves in prompts:
        id = world.arrive(Plan(prompt=rows), at=at)
        if leaves:
            world.hang_up(id, at=at + 0.0045)
    world.run_until(200.0)
    assert store.over == 0
    for id, (rows, _, leaves) in enumerate(prompts, 1):
        assert leaves or code(world, id) in ("", "memory")
        if code_or_none(world, id) == "memory":
            assert rows > room + images + park, "alone it would have had all of it"
    done(world)


# -- the floor ---------------------------------------------------------------------------------------------------------


def floor_holds(world: Box, prompt: int) -> bool:
    """Whether one more prompt would be let in beside those who run, as far as available memory goes."""
    core = world.core
    one = core.memory.requests[world.arrive(Plan(prompt=prompt))]
    one.prompt_tokens = prompt
    return core._holds_floor(one)


@pytest.mark.parametrize(("floor", "peak", "holds"), [(40, 200, True), (41, 200, False), (41, 159, True)])
def test_the_floor_counts_what_everybody_takes(floor: int, peak: int, holds: bool) -> None:
    """M7: of 100 its own 10, the other's 30 and the caches' 20 leave 40; the room to the peak bounds what they take."""
    store = Store(allocated=100, free=100, ceiling=120, peak=peak, workspaces=[(10, 10), (100, 30)])
    slow = Script(answers=[Answer(ids=[1] * 10, prefill_ms_per_row=1_000.0)])
    world = Box(store, slow, slots=2, parallel_floor=floor)
    world.run_until(0.5)
    world.arrive(Plan(prompt=50))
    world.run_until(1.0)  # it reads its prompt
    assert floor_holds(world, 10) == holds


@pytest.mark.parametrize(("growth", "floor", "holds"), [(5, 85, True), (5, 86, False), (50, 70, True), (50, 71, False)])
def test_the_floor_leaves_caches_what_they_can_take(growth: int, floor: int, holds: bool) -> None:
    """M7: caches that can take 5 more are not reserved the 20 up to the ceiling; none grows over it."""
    store = Store(allocated=100, free=100, ceiling=120, growth=growth, workspaces=[(100, 10)])
    world = Box(store, slots=2, parallel_floor=floor)
    world.run_until(0.5)
    world.arrive(Plan(prompt=50))
    world.run_until(0.8)  # it writes its answer
    assert floor_holds(world, 10) == holds


def test_alone_no_floor_holds_it() -> None:
    """M7: a request alone is never held by the floor."""
    world = Box(Store(free=10, ceiling=800, peak=1_000), slots=2, parallel_floor=1_000)
    one = world.arrive(Plan(prompt=5))
    world.run_until(9.0)
    assert code(world, one) == "" and world.core.memory.engine.free == 10
    assert floor_holds(world, 100)


def test_the_floor_holds_one_back() -> None:
    """M7, L4: who would take memory under the floor waits for it in the queue, and goes when the other has ended."""
    world = Box(Store(free=100, ceiling=120, peak=1_000, workspaces=[(100, 10)]), slots=2, parallel_floor=75)
    one, two = world.arrive(Plan(prompt=50)), world.arrive(Plan(prompt=10), at=0.5)
    world.run_until(0.9)
    waiter = world.core.memory.requests[two]
    assert (waiter.state, waiter.row, waiter.why) == (RequestState.queued, "waits_memory", "memory")
    assert request_view(waiter, world.core.memory, world.now)["wait_mem_ms"] > 0
    world.run_until(9.0)
    assert code(world, one) == code(world, two) == "" and waiter.mem_wait_s > 0
    done(world)


def test_the_floor_lets_go_when_the_other_has_read() -> None:
    """M7: the other's workspace counts while it reads its prompt, not while it writes its answer."""
    slow = Script(answers=[Answer(ids=[1] * 50, prefill_ms_per_row=20.0, decode_ms=100.0)])
    store = Store(free=100, ceiling=120, peak=1_000, workspaces=[(10, 10), (100, 30)])
    world = Box(store, slow, slots=2, parallel_floor=60)
    one, two = world.arrive(Plan(prompt=50)), world.arrive(Plan(prompt=10), at=0.5)
    world.run_until(0.9)
    waiter = world.core.memory.requests[two]
    assert (waiter.state, waiter.why) == (RequestState.queued, "memory")
    world.run_until(3.0)
    assert world.core.memory.requests[one].state is RequestState.decoding and waiter.slot == 1
    assert waiter.mem_wait_s > 0 and waiter.mem_since is None
    world.run_until(20.0)
    done(world)


def test_the_default_floor_is_a_share_of_memory() -> None:
    """M7: without the flag 12 % of what the ceiling is four fifths of."""
    world = Box(Store(free=150, ceiling=800, allocated=800, peak=1_000), slots=2)
    world.run_until(0.5)
    world.arrive(Plan(prompt=10))
    world.run_until(0.8)
    assert floor_holds(world, 10)
    world.core.memory.engine.free = 119
    assert not floor_holds(world, 10)


# -- what the client is told -------------------------------------------------------------------------------------------


def test_the_sentence_of_one_that_never_fits() -> None:
    """J3, A9: it names the size, what is short and how long a prompt may be; one over the window says so."""

    async def said(window: int, sizes: list[int]) -> End:
        call = Call(1, "x", "completions", 0, 0)
        call.prompts = [[1] * size for size in sizes]
        end = finished(call, do.Finish(1, "error", False, 400, "context_length_exceeded"), window, 40)[-1]
        assert isinstance(end, End)
        return end

    end = asyncio.run(said(100, [50]))
    assert end.param == "prompt" and "50 tokens" in end.message
    assert "memory" in end.message and "at most 40" in end.message
    assert asyncio.run(said(100, [10, 41])).param == "prompt[1]"
    end = asyncio.run(said(45, [41, 50]))
    assert end.param == "prompt[1]" and "window is 45" in end.message
