"""Which slot a request waits for, in virtual time: conversations that go on in slot 0, short guests, who fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scripted import Answer, Script
from pipeline import events as ev
from stages.hashes import BLOCK
from tests.world import Plan, World, replayed

CHUNK = 2 * BLOCK
HEAD = ("h0", "h1")


def chain(*blocks: str) -> tuple[bytes, ...]:
    """Hashes of a prompt whose blocks these are: each stands for all before it."""
    return tuple("/".join(blocks[: i + 1]).encode() for i in range(len(blocks)))


def turn(name: str, count: int, **more: object) -> Plan:
    """The ``count``-th turn of a session: the client's head, its own first message, two blocks more a turn."""
    blocks = chain(*HEAD, *(f"{name}{i}" for i in range(2 * count)))
    opening = len(HEAD) * BLOCK + 30
    facts = {"head": len(HEAD) * BLOCK, "opening": opening, "first": name.encode(), "max_tokens": 30}
    return Plan(prompt=len(blocks) * BLOCK + 10, hashes=blocks, **facts | more)  # type: ignore[arg-type]


def world(decode_ms: float = 100.0, **policy: object) -> World:
    """Answers of thirty tokens: three seconds."""
    script = Script(answers=[Answer(ids=[1] * 30, decode_ms=decode_ms)])
    return World(script, **{"slots": 2, "prefix_chunk": CHUNK, **policy})


def served(world: World) -> dict[int, int]:
    """The slot of every request that had one, by its id."""
    memory = world.core.memory
    return {r.id: r.served_by for r in [*memory.requests.values(), *memory.recent] if r.served_by >= 0}


def rows(world: World, id: int) -> list[str]:
    """The rows by which it was offered a slot."""
    return [step.row for step in world.steps if step.life == "request" and step.id == id and step.trigger == "offer"]


def said(world: World, id: int) -> str:
    """What the log said of its slot."""
    [line] = [line for line in world.logs if line.startswith(f"[parallel] {id:024x}")]
    return line


def holds(world: World, where: str, number: int, plan: Plan) -> None:
    """The engine says that it holds a prompt there."""
    world.post(ev.Resident(1, where, number, plan.prompt, list(plan.hashes), 1))


def parallel(world: World) -> tuple[int, int]:
    return world.core.memory.spill_waits, world.core.memory.slot0_gave_up


def test_two_sessions_take_turns_on_slot_0() -> None:
    """M3: each next turn waits for slot 0, one in place, the other as the park holds it; the side slot stays idle."""
    one = world(decode_ms=50.0)
    first = one.arrive(turn("a", 1))
    one.run_until(2.0)
    other = one.arrive(turn("b", 1))
    one.run_until(4.0)
    holds(one, "park", 1, turn("a", 1))
    turns = []
    for count in (2, 3):
        for name in "ab":
            turns.append(one.arrive(turn(name, count)))
            one.run_until(one.now + 0.1)
        assert rows(one, turns[-2]) == ["admitted"] and rows(one, turns[-1]) == ["waits_slot0"]
        one.run_until(one.now + 5.0)
        holds(one, "park", 1, turn("a", count))
    assert served(one) == dict.fromkeys((first, other, *turns), 0)
    assert parallel(one) == (0, 0), "b was in slot 0 last"
    assert all(line.endswith("slot=0 slot 0 is free") for line in map(said, [one] * 6, (first, other, *turns)))
    assert one.steps == replayed(one)


def test_a_parked_session_waits_too_and_is_counted() -> None:
    """M3, M8: the conversation in the park, or in files, is gone on with in slot 0."""
    for where in ("park", "disk"):
        one = world(decode_ms=60.0)
        holder = one.arrive(turn("a", 1))
        one.run_until(0.5)
        holds(one, where, 7, turn("b", 1))
        waiter = one.arrive(turn("b", 2))
        one.run_until(1.0)
        assert one.core.memory.requests[waiter].why == "slot0" and parallel(one) == (1, 0)
        one.run_until(9.0)
        assert served(one) == {holder: 0, waiter: 0} and parallel(one) == (1, 0)


def test_a_session_gives_slot_0_up() -> None:
    """M4: it waits three seconds, then takes the side slot; with no wait allowed it takes it at once."""
    for wait, admitted in ((3.0, 3.503), (1.0, 1.503), (0.0, 0.503)):
        one = world(decode_ms=500.0, side_slot0_wait=wait)
        one.arrive(turn("a", 1))
        one.run_until(0.5)
        holds(one, "park", 7, turn("b", 1))
        waiter = one.arrive(turn("b", 2))
        one.run_until(5.0)
        assert rows(one, waiter)[-1] == "admitted_gave_up"
        assert one.core.memory.requests[waiter].admitted_at == pytest.approx(admitted)
        assert said(one, waiter).endswith("slot=1 a side slot: slot 0 stayed busy too long for it")
        assert parallel(one) == (1 if wait else 0, 1)


@pytest.mark.parametrize("beside", [False, True])
def test_the_lane_is_for_whom_no_side_slot_is_free(beside: bool) -> None:
    """K1, M3, M4: a short next turn waits for slot 0 and takes the free side slot; with none free it is a guest."""
    one = world(decode_ms=500.0)
    one.arrive(turn("a", 1))
    one.run_until(0.5)
    holds(one, "park", 7, turn("b", 1))
    if beside:
        one.arrive(Plan(max_tokens=30))
    one.run_until(1.0)
    waiter = one.arrive(turn("b", 2, lane="raw"))
    one.run_until(2.0)
    if beside:
        assert rows(one, waiter) == ["offered_to_lane"] and one.core.memory.lane.offered == 1
    else:
        assert rows(one, waiter) == ["waits_slot0"]
        one.run_until(10.0)
        assert one.core.memory.lane.offered == 0 and rows(one, waiter)[-1] == "admitted_gave_up"
    one.run_until(200.0)
    assert not one.core.memory.requests and one.steps == replayed(one)


def test_one_too_long_for_the_side_slots_keeps_waiting() -> None:
    """M4: it has slot 0 or nothing, and holds up nobody behind it."""
    one = world(decode_ms=500.0, side_max_len=200)
    one.arrive(turn("a", 1))
    one.run_until(0.5)
    holds(one, "park", 7, turn("b", 1))
    waiter, short = one.arrive(turn("b", 2)), one.arrive(Plan(max_tokens=5))
    one.run_until(10.0)
    assert served(one)[short] == 1 and waiter in one.core.memory.queue
    assert rows(one, waiter) == ["must_wait"]
    one.run_until(60.0)
    assert served(one)[waiter] == 0


def test_the_wait_counts_from_where_a_side_slot_would_have_been_free() -> None:
    """M4: with all slots busy it waits for any; then three seconds more for slot 0."""
    one = world(decode_ms=500.0)
    one.arrive(turn("a", 1))
    one.arrive(Plan(max_tokens=12))
    one.run_until(0.5)
    holds(one, "park", 7, turn("b", 1))
    waiter = one.arrive(turn("b", 2))
    one.run_until(40.0)
    assert rows(one, waiter) == ["must_wait", "waits_slot0", "admitted_gave_up"]
    gone = [step.time for step in one.steps if step.life == "slot" and step.id == 1 and step.trigger == "ended"]
    assert {r.id: r for r in one.core.memory.recent}[waiter].admitted_at == pytest.approx(gone[0] + 3.0)


def test_another_conversation_of_the_same_client_goes_aside() -> None:
    """M3: a second tab shares the client's head and no more: it does not wait, whatever slot 0 held."""
    one = world(decode_ms=500.0)
    first = one.arrive(turn("a", 1, max_tokens=1))
    one.run_until(2.0)
    one.arrive(turn("a", 2))
    one.run_until(3.0)
    tab = one.arrive(turn("b", 1))
    one.run_until(4.0)
    assert served(one)[first] == 0 and rows(one, tab) == ["admitted_aside"]
    assert said(one, tab).endswith("slot=1 a side slot: slot 0 is busy")


def test_a_match_inside_the_clients_head_is_told() -> None:
    """M11: files that end inside the system prompt and tools hold nobody for slot 0; the log has the rows."""
    one = world(decode_ms=500.0)
    one.arrive(Plan())
    one.run_until(0.5)
    one.post(ev.Resident(1, "disk", 3, CHUNK, list(chain(*HEAD)), 1))
    tab = one.arrive(turn("b", 2))
    one.run_until(1.0)
    assert said(one, tab).endswith(f"slot=1 a side slot: slot 0 is busy spill_head={CHUNK}")


def test_a_second_turn_is_known_by_its_first_message() -> None:
    """M3: a short first turn ends in the block in which the first message ended: the message itself says it."""
    one = world(decode_ms=100.0)
    one.arrive(Plan(prompt=BLOCK + 50, hashes=chain("x0"), opening=BLOCK + 40, first=b"x", max_tokens=1))
    one.run_until(1.0)
    one.arrive(Plan(max_tokens=10))
    one.run_until(1.2)
    second = {"prompt": 3 * BLOCK, "hashes": chain("x0", "x1", "x2"), "opening": BLOCK + 40, "max_tokens": 5}
    waiter, other = one.arrive(Plan(first=b"x", **second)), one.arrive(Plan(first=b"y", **second))  # type: ignore[arg-type]
    one.run_until(1.5)
    assert rows(one, waiter) == ["waits_slot0", "must_wait"] and served(one)[other] == 1
    one.run_until(5.0)
    assert served(one)[waiter] == 0


def test_what_slot_0_holds_no_more_is_not_waited_for() -> None:
    """M3: rows that another run took, a fault, or a new engine: the conversation has to be read again anyway."""

    def lost(one: World) -> None:
        one.post(ev.Resident(1, "slot", 0, BLOCK, [b"z"], 1))

    def kept(one: World) -> None:
        one.post(ev.Resident(1, "slot", 0, 4 * BLOCK, [b"z"], 1))

    for harm, row in ((kept, "waits_slot0"), (lost, "admitted_aside"), (World.kill, "admitted_aside")):
        one = world(decode_ms=100.0)
        one.arrive(turn("a", 1, max_tokens=1))
        one.run_until(1.0)
        harm(one)
        one.run_until(2.0)
        one.arrive(Plan(prompt=300, max_tokens=10))
        one.run_until(2.5)
        waiter = one.arrive(turn("a", 2))
        one.run_until(2.6)
        assert rows(one, waiter) == [row]


def test_a_faulty_run_leaves_nothing_to_go_on_from() -> None:
    """M3, G5: after a fault of ours nothing of slot 0 is trusted; after a client left, what was read is."""
    for script, leaves, row in ((Answer(ids=[1], then="fault"), False, "admitted_aside"),
                                (Answer(ids=[1] * 99, decode_ms=100.0), True, "waits_slot0")):  # fmt: skip
        one = World(Script(answers=[script, Answer(ids=[1] * 30, decode_ms=100.0)]), slots=2, prefix_chunk=CHUNK)
        first = one.arrive(turn("a", 2))
        one.run_until(1.0)
        if leaves:
            one.hang_up(first)
        one.run_until(2.0)
        one.arrive(Plan(max_tokens=20))
        one.run_until(2.5)
        waiter = one.arrive(turn("a", 2))
        one.run_until(2.6)
        assert rows(one, waiter) == [row]


# -- short guests of slot 0's conversation -----------------------------------------------------------------------------


def idle(**policy: object) -> World:
    """Slot 0 is free and holds a conversation of 522 rows."""
    one = world(**policy)
    one.run_until(0.1)
    holds(one, "slot", 0, turn("a", 3))
    return one


def test_a_short_guest_leaves_slot_0_its_conversation() -> None:
    """M5: a free side slot is taken though slot 0 is free, unless the flag says off, or no side slot is free."""
    short = Plan(prompt=100, hashes=chain("t0"), max_tokens=20)
    one = idle()
    guest, beside = one.arrive(short), one.arrive(short)
    one.run_until(1.0)
    assert served(one) == {guest: 1, beside: 0} and rows(one, guest) == ["admitted_guest_aside"]
    assert said(one, guest).endswith("slot=1 a side slot: slot 0 keeps its conversation")
    off = idle(side_guests=False)
    guest = off.arrive(short)
    off.run_until(1.0)
    assert served(off) == {guest: 0}


@pytest.mark.parametrize(
    ("plan", "policy"),
    [
        (Plan(prompt=131), {}),  # a quarter of it
        (Plan(prompt=100), {"resident_guest_max": 99}),
        (Plan(prompt=100), {"prefix_chunk": 300}),  # slot 0 holds less than two chunks
        (Plan(prompt=130, hashes=chain(*HEAD), opening=40), {}),  # shares a chunk with it
        (Plan(prompt=100, images=1), {}),
        (Plan(prompt=100, max_tokens=999), {"side_max_len": 200}),
    ],
)
def test_who_is_no_short_guest(plan: Plan, policy: dict[str, object]) -> None:
    """M5: then slot 0 is free for it."""
    one = idle(**policy)
    id = one.arrive(plan)
    one.run_until(1.0)
    assert served(one) == {id: 0} and rows(one, id) == ["admitted"]


# -- who fits ----------------------------------------------------------------------------------------------------------


def test_a_plan_needs_a_margin_in_a_side_slot() -> None:
    """M2: 8,192 rows beside the answer of a request under a plan, or as many as the flag says; else none."""
    for planned, margin, slot in ((False, -1, 1), (True, -1, None), (True, 50, 1), (True, 200, None), (False, 200, 1)):
        one = world(decode_ms=500.0, side_max_len=300, side_margin=margin)
        one.arrive(Plan())
        id = one.arrive(Plan(prompt=100, max_tokens=100, planned=planned))
        one.run_until(1.0)
        assert served(one).get(id) == slot


def test_images_are_for_slot_0() -> None:
    """M2: no side slot takes them; who stands behind is not held up."""
    one = world(decode_ms=100.0)
    one.arrive(Plan())
    seen, behind = one.arrive(Plan(images=1)), one.arrive(Plan())
    one.run_until(1.0)
    assert served(one)[behind] == 1 and seen in one.core.memory.queue
    one.run_until(20.0)
    assert served(one)[seen] == 0


def test_whether_a_side_slot_is_free_for_it() -> None:
    """K1: what the side lane asks: one that fits, and is nobody's."""
    one = world(decode_ms=100.0, side_max_len=200)
    one.arrive(Plan())
    fits, long, seen = one.arrive(Plan(images=1)), one.arrive(Plan(prompt=500)), one.arrive(Plan(images=1))
    one.run_until(0.5)
    core, requests = one.core, one.core.memory.requests
    requests[fits].images, requests[fits].asked_tokens = 0, 20
    assert core._side_slot_free(requests[fits])
    assert not core._side_slot_free(requests[long]) and not core._side_slot_free(requests[seen])
    requests[fits].images = 1
    one.arrive(Plan(max_tokens=9))
    one.run_until(0.6)
    requests[fits].images = 0
    assert not core._side_slot_free(requests[fits])


# -- anything ----------------------------------------------------------------------------------------------------------

plans = st.builds(
    turn,
    st.sampled_from("abc"),
    st.integers(1, 3),
    max_tokens=st.integers(1, 40),
    images=st.sampled_from([0, 0, 1]),
    planned=st.booleans(),
    choices=st.sampled_from([1, 1, 2]),
    others=st.sampled_from([(), (), (30, 300)]),
    stop_at=st.sampled_from([0, 0, 3]),
) | st.builds(Plan, prompt=st.sampled_from([5, 60, 700]), max_tokens=st.integers(1, 40))
steps = st.lists(
    st.tuples(st.just("arrive"), plans)
    | st.tuples(st.just("holds"), st.tuples(st.sampled_from(["park", "disk", "slot"]), st.sampled_from("abc")))
    | st.tuples(st.just("own"), st.booleans())
    | st.tuples(st.just("leave"), st.integers(1, 4))
    | st.tuples(st.just("wait"), st.sampled_from([0.001, 0.1, 2.0, 4.0, 16.0])),
    max_size=14,
)


@given(steps, st.integers(2, 3), st.sampled_from([65_536, 400]), st.sampled_from([0.0, 3.0]), st.sampled_from([0, 100]))
@settings(deadline=None)
def test_nobody_waits_for_a_slot_that_is_his(
    steps: list[tuple[str, Any]], slots: int, side: int, wait: float, margin: int
) -> None:
    """M1 to M5, L6, R4: at every moment who waits has no slot to go to, and is told what for; all are answered."""
    one = world(slots=slots, side_max_len=side, side_slot0_wait=wait, side_margin=margin, max_queue=99, max_live=99)
    for step, what in steps:
        if step == "arrive":
            one.arrive(what)
        elif step == "holds":
            holds(one, what[0], 0, turn(what[1], 2))
        elif step == "own":
            one.post(ev.OwnWork(1, "warm-up", what))
        elif step == "leave":
            one.hang_up(len(one.clients) - what)
        else:
            one.run_until(one.now + what)
        memory = one.core.memory
        for id in memory.queue:
            waiter = memory.requests[id]
            route = one.core._route(waiter, one.now)
            assert route.slot < 0 and route.why == waiter.why
            assert waiter.continues in ("", "slot", "park", "disk")
        for request in memory.requests.values():
            assert request.slot <= 0 or not request.images
    one.post(ev.OwnWork(1, "warm-up", False))
    one.run_until(one.now + 900.0)
    assert all(client.ends == 1 or not client.received for client in one.clients.values())
    assert one.steps == replayed(one)
