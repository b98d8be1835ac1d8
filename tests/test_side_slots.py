"""Several slots in virtual time: who gets which, in what order, what a side slot holds."""

from __future__ import annotations

import pytest

from engine.scripted import Answer, Script
from pipeline.core import Core
from pipeline.effects import StartRun
from pipeline.events import (
    Checked,
    EngineDescribed,
    EngineReady,
    Fetched,
    MemoryRead,
    Prepared,
    Progress,
    Received,
    RunEnded,
)
from pipeline.settings import Policy
from pipeline.states import SlotState
from tests.world import Plan, World


def served(world: World) -> dict[int, int]:
    """The slot of every request that had one, by its id."""
    memory = world.core.memory
    return {r.id: r.served_by for r in [*memory.requests.values(), *memory.recent] if r.served_by >= 0}


LONG = Script(answers=[Answer(ids=[1] * 30, decode_ms=100.0)])


@pytest.mark.parametrize("count", [2, 4])
def test_as_many_run_as_there_are_slots(count: int) -> None:
    """M1: with N slots N requests run at once, the next one waits for the first that ends; all are answered."""
    world = World(LONG, slots=count)
    ids = [world.arrive() for _ in range(count + 1)]
    world.run_until(1.0)
    assert served(world) == {id: slot for slot, id in enumerate(ids[:count])}
    assert world.core.memory.queue == ids[count:]
    world.run_until(60.0)
    assert [world.clients[id].end.finish for id in ids] == ["stop"] * len(ids)  # type: ignore[union-attr]
    assert all(slot.state is SlotState.free for slot in world.core.memory.slots)
    assert world.core.memory.max_running == count
    said = [line for line in world.logs if line.startswith("[parallel]")]
    assert len(said) == len(ids) and said[0].endswith(" slot=0 slot 0 is free")
    assert said[1].endswith(" slot=1 a side slot: slot 0 is busy")


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(("kept", "row"), [(0, "rows_lost"), (40, "")])
def test_the_row_says_what_became_of_a_side_slots_rows(leaves: bool, kept: int, row: str) -> None:
    """G2: parked or lost, as the engine said; of slot 0 they stay. The same where its client has left."""
    world = World(LONG, slots=2)
    ids = [world.arrive(), world.arrive()]
    world.run_until(1.0)
    held = [slot.run for slot in world.core.memory.slots]
    if leaves:
        for id in ids:
            world.hang_up(id)
    for run in held:
        world.post(RunEnded(1, run, "cancelled" if leaves else "stop", kept, 3))
    ends = [[step.row for step in world.steps if step.life == "slot" and step.id == slot][-1] for slot in (0, 1)]
    stays = "wound_down" if leaves else "run_ended"
    assert ends == [stays, row or stays]
    assert all(slot.state is SlotState.free for slot in world.core.memory.slots)


def test_one_slot_says_nothing_of_slots() -> None:
    """M1: without the flag nothing is another's, and the log is as it was."""
    world = World(LONG)
    world.arrive()
    world.run_until(30.0)
    assert not [line for line in world.logs if line.startswith("[parallel]")]


def test_a_side_slot_takes_only_who_fits() -> None:
    """M2: one too long for it waits for slot 0 and holds up nobody behind it; order stays within a kind."""
    world = World(LONG, slots=2, side_max_len=100)
    first = world.arrive(Plan(max_tokens=30))
    long, other_long = world.arrive(Plan(prompt=71, max_tokens=30)), world.arrive(Plan(prompt=500, max_tokens=30))
    short, next_short = world.arrive(Plan(prompt=70, max_tokens=30)), world.arrive(Plan(prompt=10, max_tokens=30))
    world.run_until(1.0)
    assert served(world) == {first: 0, short: 1}
    assert world.core.memory.queue == [long, other_long, next_short]
    world.run_until(90.0)
    assert served(world) == {first: 0, long: 0, other_long: 0, short: 1, next_short: 1}
    assert all(world.clients[id].end.completion_tokens == 30 for id in world.clients)  # type: ignore[union-attr]


def test_without_a_limit_the_default_counts() -> None:
    """M2, A8: a request that sets no limit takes a side slot only if the server's default fits."""
    for default, slot in ((89, {1: 0, 2: 1}), (91, {1: 0})):
        world = World(LONG, slots=2, side_max_len=100, default_max_tokens=default)
        for _ in range(2):
            world.arrive(Plan(prompt=10))
        world.run_until(1.0)
        assert served(world) == slot


def test_a_full_queue_refuses_only_whom_no_slot_is_free_for() -> None:
    """M2, I1: with no place to wait, one that fits a free side slot is taken, one that does not is refused."""
    world = World(LONG, slots=2, side_max_len=100, max_queue=0)
    world.arrive()
    world.run_until(1.0)
    long, short = world.arrive(Plan(prompt=500, max_tokens=30)), world.arrive(Plan(prompt=10, max_tokens=30))
    world.run_until(2.0)
    refused = world.clients[long].end
    assert refused is not None and (refused.status, refused.code) == (503, "queue_full")
    assert served(world)[short] == 1


def test_a_slot_that_one_in_front_will_have_is_not_free() -> None:
    """M2, I1: while the model loads, those who wait are counted against the slots they will take."""
    world = World(Script(load_ms=5_000.0), slots=2, max_queue=1)
    first, second, third = world.arrive(), world.arrive(at=1.0), world.arrive(at=2.0)
    world.run_until(3.0)
    refused = world.clients[third].end
    assert world.core.memory.queue == [first, second]
    assert refused is not None and refused.code == "queue_full"
    world.run_until(60.0)
    assert served(world) == {first: 0, second: 1}


def test_a_leaver_frees_its_own_slot() -> None:
    """M1, R3: a client of slot 1 leaves: the next one is served there, the one in slot 0 goes on."""
    world = World(LONG, slots=2)
    first, leaver, waiter = world.arrive(), world.arrive(), world.arrive()
    world.hang_up(leaver, at=1.0)
    world.run_until(2.0)
    assert served(world) == {first: 0, leaver: 1, waiter: 1}
    world.run_until(60.0)
    assert [world.clients[id].end.completion_tokens for id in (first, waiter)] == [30, 30]  # type: ignore[union-attr]


def test_prompts_of_a_list_run_beside_one_another() -> None:
    """M1, A13: the prompts of one body take the slots there are."""
    world = World(LONG, slots=3)
    world.arrive(Plan(others=(20, 30), stream=False))
    world.run_until(1.0)
    assert sorted(served(world).values()) == [0, 1, 2]
    world.run_until(60.0)
    assert all(client.end is not None and client.end.finish == "stop" for client in world.clients.values())


def test_a_lost_engine_frees_every_slot() -> None:
    """M1, I11: those that ran are told, those that waited are served in all slots of the next engine."""
    world = World(LONG, slots=2)
    ids = [world.arrive() for _ in range(4)]
    world.kill(at=1.0)
    world.run_until(2.0)
    assert [world.clients[id].end.code for id in ids[:2]] == ["engine_restarting"] * 2  # type: ignore[union-attr]
    assert served(world) == {ids[0]: 0, ids[1]: 1, ids[2]: 0, ids[3]: 1}


def test_joint_rounds_are_counted() -> None:
    """M6: a round whose step was another answer's too counts, one alone does not."""
    core, effects = Core(Policy(slots=2)), []
    facts = [EngineDescribed(1, 1_000), EngineReady(1, 0.1, 1)]
    for id in (1, 2):
        facts += [Received(id, "n", "chat", 1, 1, 1.0), Checked(id), Fetched(id), Prepared(id, 10)]  # type: ignore[list-item]
    facts += [MemoryRead(1, run, 0, 0, 0, 0) for run in (1, 2)]  # type: ignore[list-item]
    for now, fact in enumerate(facts):
        effects += core.handle(fact, float(now))
    assert [effect.slot for effect in effects if isinstance(effect, StartRun)] == [0, 1]
    for shared in (1, 2, 2):
        core.handle(Progress(1, 1, 1, 1, shared=shared), 99.0)
    assert core.memory.joint_rounds == 2
