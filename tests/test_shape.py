"""engine/speculate/shape.py: how much of a draft pays."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculate.draft import Draft, from_branches
from engine.speculate.shape import Costs, Shapes, share

ROWS = (1, 2, 4, 8, 16, 32)
FLAT = dict.fromkeys(ROWS, 10.0)
STEEP = {rows: 10.0 * rows for rows in ROWS}
figures = st.lists(st.floats(0.5, 50), min_size=6, max_size=6).map(lambda ms: dict(zip(ROWS, ms, strict=True)))
branches = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.floats(0.1, 9)), max_size=4)
unsure = st.builds(
    lambda draft, times: Draft(draft.tokens, draft.parents, tuple(chance * times for chance in draft.chances)),
    branches.map(from_branches),
    st.floats(0.1, 1),
)


def expected(draft: Draft) -> float:
    return 1 + sum(draft.odds)


@given(costs=figures, rows=st.integers(1, 64))
def test_costs_never_fall(costs: dict[int, float], rows: int) -> None:
    """F8: fewer rows never cost more; what was measured counts where it fits."""
    cost = Costs(costs)
    assert cost(rows) <= cost(rows + 1) + 1e-9
    rising = Costs({at: float(at) for at in ROWS})
    assert rising(rows) == pytest.approx(rows)


@given(costs=figures, seen=st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 5000)), max_size=40))
def test_whatever_is_measured_costs_stay_costs(costs: dict[int, float], seen: list[tuple[int, float]]) -> None:
    """F8: above nothing and never falling, after any steps."""
    cost = Costs(costs)
    for rows, ms in seen:
        cost.took(rows, ms)
    now = [cost(rows) for rows in range(1, 41)]
    assert now[0] > 0 and all(a <= b + 1e-6 * b for a, b in itertools.pairwise(now))


def test_measurements_move_the_costs() -> None:
    """F8: what was measured wrong at load comes right; a size that is not measured follows the machine's speed."""
    cost = Costs({1: 10.0, 8: 12.0, 32: 40.0})
    for _ in range(200):
        cost.took(1, 10.0)
        cost.took(8, 24.0)
    assert cost(1) == pytest.approx(10, rel=0.1) and cost(8) == pytest.approx(24, rel=0.1)
    slower = Costs(FLAT)
    for _ in range(400):
        slower.took(1, 20.0)
    assert slower(32) == pytest.approx(20, rel=0.1)
    once = Costs(STEEP)
    once.took(1, 1e9)
    assert once(1) < 10 * 1.3
    with pytest.raises(ValueError):
        Costs({2: 1.0})


@given(draft=unsure, costs=figures, room=st.integers(0, 12))
def test_the_best_cut_of_all_is_taken(draft: Draft, costs: dict[int, float], room: int) -> None:
    """F8: no set of tokens with their parents brings more tokens a millisecond, the empty one included."""
    shapes = Shapes(costs, learned=False)
    cut = shapes.cut(draft, draft.chances, room)
    assert len(cut) <= room
    rate = expected(cut) / shapes.costs(1 + len(cut))
    nodes = range(min(len(draft), 9))
    for count in range(min(room, len(nodes)) + 1):
        for chosen in itertools.combinations(nodes, count):
            if all(draft.parents[at] in (-1, *chosen) for at in chosen):
                other = draft.only(chosen)
                assert expected(other) / shapes.costs(1 + len(other)) <= rate * (1 + 1e-9)


def test_free_rows_are_all_taken_and_dear_ones_none() -> None:
    """F8: where a drafted round costs more than it brings, the plain step is taken."""
    draft = from_branches([([1, 2, 3, 4], 3.0), ([5, 6], 1.0)])
    assert Shapes(FLAT).cut(draft, draft.chances, 31) == draft
    assert len(Shapes(STEEP).cut(draft, draft.chances, 31)) == 0
    assert len(Shapes(FLAT).cut(draft, [0.0] * 6, 31)) == 0


@given(draft=unsure, room=st.integers(0, 12))
def test_forced_rounds_are_cut_to_their_room_alone(draft: Draft, room: int) -> None:
    """F8: for tests every draft is verified, whatever it costs."""
    cut = Shapes(STEEP, always=True).cut(draft, draft.chances, room)
    assert cut == draft.cut(room)


def test_a_drafter_that_is_wrong_is_believed_less() -> None:
    """F8: chances are compared with what came, and a part of the scale that was wrong recovers when it is right."""
    costs = {rows: 10.0 + 3.0 * (rows - 1) for rows in ROWS}
    draft = Draft((1, 2), (-1, 0), (0.8, 0.8))
    shapes = Shapes(costs)
    assert len(shapes.cut(draft, draft.chances, 8)) == 2
    shapes.saw([0.8] * 200, [False] * 200)
    assert len(shapes.cut(draft, draft.chances, 8)) == 0
    shapes.saw([0.8] * 2000, [True] * 2000)
    assert len(shapes.cut(draft, draft.chances, 8)) == 2


def test_guesses_that_are_not_tried_any_more_are_tried_again() -> None:
    """F8: what was seen fades, or a part of the scale that was wrong once would stay silent for good."""
    costs = {rows: 10.0 + 3.0 * (rows - 1) for rows in ROWS}
    draft = Draft((1,), (-1,), (0.8,))
    shapes = Shapes(costs)
    shapes.saw([0.8] * 400, [False] * 400)
    tried = [len(shapes.cut(draft, draft.chances, 8)) for _ in range(3000)]
    assert tried[0] == 0 and tried[-1] == 1


def test_fixed_shapes_are_those_of_the_load() -> None:
    """K4: with ``fixed`` the same draft is cut alike, whatever was seen before."""
    draft = Draft((1, 2), (-1, 0), (0.8, 0.8))
    shapes = Shapes({1: 10.0, 4: 14.0}, learned=False)
    before = shapes.cut(draft, draft.chances, 8)
    shapes.saw([0.8] * 500, [False] * 500)
    for _ in range(500):
        shapes.took(4, 900.0)
    assert shapes.cut(draft, draft.chances, 8) == before and len(before) == 2


@given(drafts=st.lists(unsure, min_size=1, max_size=4), costs=figures, most=st.integers(4, 16))
def test_a_joint_step_has_no_more_rows_than_it_may(drafts: list[Draft], costs: dict[int, float], most: int) -> None:
    """M6: cut to their shares, or by expected tokens over all: then none beats the same step without drafts."""
    shapes, runs, chances = Shapes(costs, learned=False), len(drafts), [draft.chances for draft in drafts]
    each = share(runs, most)
    shared = shapes.joint(drafts, chances, [each] * runs, most)
    assert all(len(draft) <= each for draft in shared)
    joint = shapes.joint(drafts, chances, [most] * runs, most)
    for cut in (shared, joint):
        rows = runs + sum(len(draft) for draft in cut)
        assert rows <= most
        assert sum(expected(draft) for draft in cut) / shapes.costs(rows) >= runs / shapes.costs(runs) * (1 - 1e-9)


def test_the_joint_cut_gives_the_rows_to_the_run_that_uses_them() -> None:
    """M6: with ``joint`` a sure run takes what an unsure one would waste; with ``share`` each keeps its part."""
    sure = Draft(tuple(range(12)), tuple(range(-1, 11)), (0.95,) * 12)
    unsure = Draft(tuple(range(12)), tuple(range(-1, 11)), (0.1,) * 12)
    shapes = Shapes(FLAT, learned=False)
    chances = [sure.chances, unsure.chances]
    assert [len(cut) for cut in shapes.joint([sure, unsure], chances, [10, 10], 10)] == [8, 0]
    assert [len(cut) for cut in shapes.joint([sure, unsure], chances, [share(2, 10)] * 2, 10)] == [4, 4]
    assert share(1) == 31 and share(4) == 7 and share(40) == 0
