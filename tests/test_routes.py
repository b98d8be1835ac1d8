"""stages/slots.py and stages/continuing.py: who goes where, and whether a prompt goes on with what is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import windows
from stages.continuing import Opening, alike, continued, in_head
from stages.hashes import BLOCK, hashes, through
from stages.slots import Claim, Route, routed, rows_needed, side_slot

WINDOW = 100


def test_the_rows_of_a_request() -> None:
    """M2, A8: prompt and effective max_tokens, which slot 0's window bounds."""
    assert rows_needed(10, 5, 99, 1_000) == 15
    assert rows_needed(10, 0, 99, 1_000) == 109
    assert rows_needed(10, 0, 5_000, 1_000) == 1_000


@st.composite
def claims(draw: st.DrawFn) -> Claim:
    """Any waiter."""
    rows = draw(st.integers(0, WINDOW))
    held = draw(st.booleans())
    return Claim(
        rows=rows,
        aside=rows + draw(st.sampled_from([0, 0, 20])),
        alone_in_0=draw(st.booleans()),
        continues=draw(st.sampled_from(["", "", "slot", "park", "disk"])),
        short=draw(st.booleans()),
        slot0_until=draw(st.floats(0, 6)),
        own_until=draw(st.floats(0, 6)),
        held=held,
        last_to_pass=held and draw(st.booleans()),
        offered=draw(st.sampled_from([False, False, True])),
    )


queues = st.lists(claims(), max_size=6)
counts, sides, taken, times = st.integers(1, 4), st.integers(1, WINDOW), st.sets(st.integers(0, 3)), st.floats(0, 6)


def free_slots(count: int, side: int, busy: set[int]) -> list[tuple[int, int]]:
    return [(slot, rows) for slot, rows in enumerate(windows(WINDOW, count, side)) if slot not in busy]


@given(queues, counts, sides, taken, times, st.booleans())
def test_a_slot_has_one_waiter_who_fits_in_it(
    queue: list[Claim], count: int, side: int, busy: set[int], now: float, own: bool
) -> None:
    """M1, M2: a free slot has one waiter, a side slot nobody too long for it or with images; none is invented."""
    free = free_slots(count, side, busy)
    routes = routed(queue, free, now, own)
    got = [route.slot for route in routes if route.slot >= 0]
    assert len(routes) == len(queue) and len(got) == len(set(got))
    for claim, route in zip(queue, routes, strict=True):
        if route.slot > 0:
            assert claim.aside <= dict(free)[route.slot] and not claim.alone_in_0
        assert route.slot < 0 or route.slot in dict(free)
        assert (route.slot >= 0) == (route.why in ("free", "busy", "gave_up", "guest"))
        assert not (route.slot >= 0 and (claim.offered or claim.held))


@given(queues, counts, sides, taken, times, st.booleans())
def test_who_stands_behind_changes_nothing(
    queue: list[Claim], count: int, side: int, busy: set[int], now: float, own: bool
) -> None:
    """M2: order of arrival: each has its place before those behind it are looked at."""
    free = free_slots(count, side, busy)
    routes = routed(queue, free, now, own)
    for at in range(len(queue)):
        assert routed(queue[: at + 1], free, now, own) == routes[: at + 1]


@given(queues, counts, sides, taken, times, st.booleans())
def test_who_continues_leaves_slot_0_to_nobody_before_its_time(
    queue: list[Claim], count: int, side: int, busy: set[int], now: float, own: bool
) -> None:
    """M3, M4: never aside before it has waited long enough, at once after that where a side slot is free."""
    free = free_slots(count, side, busy)
    left = dict(free)
    for claim, route in zip(queue, routed(queue, free, now, own), strict=True):
        if claim.continues:
            assert route.slot <= 0 or (route.why == "gave_up" and now >= claim.slot0_until and 0 not in left)
            if route.why == "slot0":
                assert now < claim.slot0_until and side_slot(claim, left.items()) > 0
        left.pop(route.slot, None)


@given(queues, counts, sides, times, st.booleans())
def test_the_first_of_an_idle_server_never_waits_but_for_own_work(
    queue: list[Claim], count: int, side: int, now: float, own: bool
) -> None:
    """I1, L6, M7: nobody starves: with all slots free the first goes in, or waits for work of our own, for so long."""
    alone = [claim for claim in queue if not claim.offered and not claim.held]
    if alone:
        first = routed(alone, free_slots(count, side, set()), now, own)[0]
        assert first.slot >= 0 or (first.why == "own" and own and now < alone[0].own_until)
        assert first.slot < 1 or first.why == "guest", "own work sends nobody aside"


@given(queues, counts, sides, taken, times)
def test_memory_holds_back_those_behind_only_after_a_while(
    queue: list[Claim], count: int, side: int, busy: set[int], now: float
) -> None:
    """M7: whom memory holds may be passed, until it has waited for long: then nobody behind it takes a slot."""
    routes = routed(queue, free_slots(count, side, busy), now)
    stuck = [i for i, (c, r) in enumerate(zip(queue, routes, strict=True)) if c.last_to_pass and r.why == "memory"]
    if stuck:
        assert all(route.slot < 0 for route in routes[stuck[0] :])
    if not any(claim.held for claim in queue):
        assert all(route.why != "memory" for route in routes)


def short(**more: object) -> Claim:
    return Claim(**{"rows": 10, "aside": 10, **more})  # type: ignore[arg-type]


def test_each_reason() -> None:
    """M2 to M5, L6: one waiter and two slots."""
    both, side = [(0, 100), (1, 50)], [(1, 50)]
    assert routed([short()], both, 0.0) == [Route(0, "free")]
    assert routed([short()], side, 0.0) == [Route(1, "busy")]
    assert routed([short()], [(0, 100)], 0.0) == [Route(0, "free")]
    assert routed([short(aside=51)], side, 0.0) == [Route(-1, "slots")]
    assert routed([short(alone_in_0=True)], side, 0.0) == [Route(-1, "slots")]
    assert routed([short(short=True)], both, 0.0) == [Route(1, "guest")]
    assert routed([short(short=True, continues="park")], both, 0.0) == [Route(0, "free")]
    assert routed([short(short=True)], [(0, 100)], 0.0) == [Route(0, "free")]
    assert routed([short(continues="slot", slot0_until=3.0)], side, 2.9) == [Route(-1, "slot0")]
    assert routed([short(continues="slot", slot0_until=3.0)], side, 3.0) == [Route(1, "gave_up")]
    assert routed([short(continues="slot", aside=51, slot0_until=3.0)], side, 9.0) == [Route(-1, "slots")]
    assert routed([short(own_until=15.0)], both, 1.0, own=True) == [Route(-1, "own")]
    assert routed([short(own_until=15.0)], both, 15.0, own=True) == [Route(0, "free")]
    assert routed([short(offered=True), short()], both, 0.0) == [Route(-1, "slots"), Route(0, "free")]
    assert routed([short(held=True), short()], both, 0.0) == [Route(-1, "memory"), Route(0, "free")]
    assert routed([short(held=True, last_to_pass=True), short()], both, 0.0) == [Route(-1, "memory")] * 2


# -- continuing --------------------------------------------------------------------------------------------------------

SALT = b"salt"
CHUNK = 2 * BLOCK
tokens = st.lists(st.integers(0, 1), max_size=5).map(lambda blocks: [b for b in blocks for _ in range(BLOCK)])


@given(tokens, tokens)
def test_blocks_alike_are_those_both_begin_with(one: list[int], other: list[int]) -> None:
    """M3: found by halving, as by looking at each."""
    first, second = hashes(one, SALT), hashes(other, SALT)
    plain = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert alike(first, second) == (min(len(first), len(second)) if plain is None else plain)


@given(st.lists(st.integers(0, 3), max_size=200), st.data())
def test_a_beginning_has_one_hash(prompt: list[int], data: st.DataObject) -> None:
    """M3: of the first rows alone, whatever follows; other tokens, more rows or another salt make another."""
    rows = data.draw(st.integers(0, len(prompt)))
    one = through(prompt, rows, hashes(prompt, SALT), SALT)
    cut = prompt[:rows]
    assert one == through([*cut, 9], rows, hashes([*cut, 9], SALT), SALT)
    assert (one == b"") == (rows == 0)
    if rows:
        assert one != through([*cut, 9], rows + 1, hashes([*cut, 9], SALT), SALT)
        changed = [*cut[:-1], 7]
        assert one != through(changed, rows, hashes(changed, SALT), SALT)
        assert one != through(prompt, rows, hashes(prompt, b"x"), b"x")


def chain(*blocks: str) -> list[bytes]:
    """Hashes of a prompt whose blocks these are: each stands for all before it."""
    return ["/".join(blocks[: i + 1]).encode() for i in range(len(blocks))]


blocky = st.lists(st.sampled_from("ab"), max_size=6).map(lambda names: chain(*names))


@given(blocky, st.lists(blocky, max_size=4), st.integers(0, 400), st.booleans(), st.integers(1, 300))
def test_one_block_tells_what_all_do(
    prompt: list[bytes], held: list[list[bytes]], rows: int, known: bool, chunk: int
) -> None:
    """M3: by its definition: what is not shared of the held prompt is less than a chunk, what is reaches far enough."""

    def goes_on(blocks: list[bytes]) -> bool:
        got = alike(prompt, blocks) * BLOCK
        past = got > rows or (known and rows - got < BLOCK) if rows else got > chunk
        return got > 0 and len(blocks) * BLOCK - got < chunk and past

    named = [(str(at), blocks) for at, blocks in enumerate(held)]
    plain = next((name for name, blocks in named if goes_on(blocks)), "")
    assert continued(prompt, named, Opening(0, rows, known), chunk) == plain


HEAD = ("h0", "h1", "h2")
TALK = (*HEAD, "a0", "a1", "a2")
"""Its first user message ends inside block a0."""
OPENING = Opening(3 * BLOCK, 3 * BLOCK + 30)


def test_the_next_turn_goes_on() -> None:
    """M3: it starts with the whole of the held prompt, but for less than a chunk of its end, past its own opening."""
    next_turn = chain(*TALK, "a3", "a4")
    for where in ("slot", "park", "disk"):
        assert continued(next_turn, [(where, chain(*TALK))], OPENING, CHUNK) == where
    assert continued(next_turn, [(w, chain(*TALK)) for w in ("slot", "park")], OPENING, CHUNK) == "slot"
    other_end = chain(*TALK[:-1], "header"), chain(*TALK[:-1], "header", "x")
    assert continued(next_turn, [("slot", other_end[0])], OPENING, CHUNK) == "slot"
    assert continued(next_turn, [("slot", other_end[1])], OPENING, CHUNK) == ""
    assert continued(next_turn, [("slot", []), ("slot", chain(*TALK, "z"))], OPENING, CHUNK) == "slot"
    assert continued([], [("slot", chain(*TALK))], OPENING, CHUNK) == ""


def test_another_conversation_of_that_client_does_not() -> None:
    """M3, M11: what it shares ends inside its own first user message; on disk that is told as the client's head."""
    other = chain(*HEAD, "b0")
    assert continued(other, [("slot", chain(*HEAD, "a0"))], OPENING, CHUNK) == ""
    files = [chain(*HEAD[:2]), chain(*TALK)]
    assert continued(other, [("disk", blocks) for blocks in files], OPENING, CHUNK) == ""
    assert in_head(other, files, OPENING.head) == 3 * BLOCK and in_head(other, files[:1], OPENING.head) == CHUNK
    assert in_head(other, files, 2 * BLOCK) == CHUNK and in_head(other, [], OPENING.head) == 0


def test_a_second_turn_is_known_by_its_first_message() -> None:
    """M3: where the first message ends in the block behind what is shared, this very beginning decides."""
    held, turn = [("slot", chain(*HEAD))], chain(*HEAD, "a0", "a1")
    assert continued(turn, held, OPENING, CHUNK) == ""
    known = Opening(OPENING.head, OPENING.rows, known=True)
    assert continued(turn, held, known, CHUNK) == "slot"
    assert continued(turn, held, Opening(0, 4 * BLOCK, known=True), CHUNK) == "", "a whole block is missing"


def test_a_completion_goes_on_by_its_blocks_alone() -> None:
    """M3: nobody knows where its first message ends: more than a chunk in common."""
    turn = chain(*TALK, "a3")
    assert continued(turn, [("slot", chain(*TALK[:2]))], Opening(), CHUNK) == ""
    assert continued(turn, [("slot", chain(*TALK[:3]))], Opening(), CHUNK) == "slot"
