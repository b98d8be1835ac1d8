"""What the core knows as facts of the estimate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scripted import Answer, Script
from pipeline.forecast import ended, first_end, said, to_read
from pipeline.request import Held, Request
from pipeline.settings import Policy
from stages.wait import Ended, History
from tests.world import Plan, World

BLOCKS = [bytes([n]) * 8 for n in range(40)]


def place(slot: int, blocks: list[bytes]) -> Held:
    return Held(where="park", slot=slot, rows=len(blocks) * 64, hashes=blocks)


def test_what_is_held_need_not_be_read() -> None:
    """L2: a waiter's prompt counts without the rows that are held, unless those before it will have driven them out."""
    residents = [place(1, BLOCKS[:10]), place(2, BLOCKS[20:30])]
    assert to_read([640], [BLOCKS[:10]], residents) == [0]
    assert to_read([704], [BLOCKS[:10]], residents) == [64]
    assert to_read([64, 640], [BLOCKS[35:36], BLOCKS[:10]], residents) == [64, 640]  # the first drove out the oldest
    assert to_read([64, 640], [BLOCKS[35:36], BLOCKS[20:30]], residents) == [64, 0]
    assert to_read([640], [BLOCKS[:10]], []) == [640]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=6), st.integers(0, 3))
def test_never_more_than_the_prompt(asked: list[tuple[int, int]], held: int) -> None:
    """L2: of a prompt at most all rows are read, and never fewer than none."""
    residents = [place(n, BLOCKS[10 * n : 10 * n + 10]) for n in range(held)]
    prompts = [64 * length + 5 for _, length in asked]
    unread = to_read(prompts, [BLOCKS[first : first + length] for first, length in asked], residents)
    assert all(5 <= rows <= prompt for rows, prompt in zip(unread, prompts, strict=True))


def test_a_holder_and_its_line() -> None:
    """L2: the holder's count, rates and limit are the core's facts; each waiter adds to those behind it."""
    world = World(script_of(200))
    for _ in range(3):
        world.arrive(Plan(prompt=10))
    world.run_until(5.0)
    memory = world.core.memory
    memory.history = History({"plain": tuple(Ended("plain", n * 10, 1.0, 10) for n in range(1, 41))})
    memory.engine.prefill_rate, memory.engine.decode_rate = 1_000.0, 10.0
    told = said(memory, Policy(), 5.0)
    (request,) = (r for r in world.core.memory.requests.values() if r.slot >= 0)
    assert request.completion_tokens in (48, 49, 50)
    assert told.next == told.waits[0]
    assert told.waits == sorted(w for w in told.waits if w is not None)
    assert len(told.waits) == 2
    assert told.last is not None
    assert told.last > (told.waits[1] or 0)
    assert first_end(memory, 5.0) == told.next


def test_a_side_slot_needs_its_margin() -> None:
    """M2: a waiter counts on a side slot alone that its answer and the margin of a plan fit in."""
    world = World(script_of(200), slots=2, side_max_len=300, side_margin=50)
    for _ in range(3):
        world.arrive(Plan(prompt=10, max_tokens=250))
    world.run_until(5.0)
    memory = world.core.memory
    memory.history = History({"plain": tuple(Ended("plain", n * 10, 1.0, 10) for n in range(1, 41))})
    memory.engine.prefill_rate, memory.engine.decode_rate = 1_000.0, 10.0
    first, side = (memory.requests[slot.request] for slot in memory.slots)
    first.completion_tokens = 0  # slot 0 is free last
    told = []
    for planned in (False, True):
        memory.requests[3].planned = planned
        told.append(said(memory, world.policy, 5.0).waits[0] or 0.0)
    assert side.completion_tokens > 0
    assert told[0] < told[1]


def test_only_ends_of_its_own_are_remembered() -> None:
    """L3: one that was cut says nothing of how long an answer is."""
    request = Request(id=1, name="x", route="chat", seed=0, wall=0.0, received_at=0.0)
    request.prompt_tokens, request.cached_tokens, request.completion_tokens = 300, 100, 50
    request.admitted_at, request.prefill_at, request.first_token_at, request.ended_at = 2.0, 2.5, 4.0, 9.0
    request.outcome, request.read_ms, request.write_ms = "stop", 1_400.0, 4_800.0
    assert ended(request) == Ended("plain", 50, 7.0, 200, 1.4, 4.8)
    for outcome in ("timeout", "abandoned", "internal_error"):
        request.outcome = outcome
        assert ended(request) is None


def test_kinds_are_apart_and_guests_are_nothing() -> None:
    """L2, K6: an answer of a prompt whose thinking is on is of another kind; a guest's is no speed sample."""
    request = Request(id=1, name="x", route="chat", seed=0, wall=0.0, received_at=0.0)
    request.admitted_at, request.ended_at, request.outcome, request.thinks = 0.0, 1.0, "length", True
    end = ended(request)
    assert end is not None
    assert end.kind == "thinking"
    request.inside = True
    assert ended(request) is None


def test_an_end_is_remembered_by_the_core() -> None:
    """L3: the history is the core's, fed by ends of their own alone."""
    world = World(script_of(5))
    for _ in range(3):
        world.arrive()
    world.hang_up(2)
    world.run_until(30.0)
    history = world.core.memory.history
    assert [end.written for end in history.recent] == [5, 5]
    assert history.kinds == {"plain": history.recent}


def test_a_rate_is_of_its_own_steps() -> None:
    """L2: a request's rates are of its own steps: what the engine did between them is not in its time."""
    world = World(Script(answers=[Answer(ids=[1] * 20, decode_ms=100.0, prefill_ms_per_row=2.0)]), slots=2)
    for _ in range(2):
        world.arrive(Plan(prompt=300))
    world.run_until(60.0)
    for request in world.core.memory.recent:
        assert round(request.read_ms) == 600
        assert round(request.write_ms) == 1_900  # the first of 20 tokens comes with the prompt's last row
        assert request.ended_at is not None
        assert request.admitted_at is not None
        assert request.ended_at - request.admitted_at > 3.0  # they took turns


def script_of(tokens: int) -> Script:
    return Script(answers=[Answer(ids=[1] * tokens, decode_ms=100.0)])
