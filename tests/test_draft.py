"""engine/speculate/draft.py: trees of proposed tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculate.draft import NOTHING, Draft, from_branches, merged
from tests.drafters import Forced

token = st.integers(0, 3)  # few, so that branches have much in common
branches = st.lists(st.tuples(st.lists(token, max_size=5), st.floats(0.01, 100)), max_size=6)
drafts = branches.map(from_branches)


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Of every token what it stands behind and itself."""
    return [tuple(draft.tokens[i] for i in [*draft.ancestors(at), at]) for at in range(len(draft))]


@given(branches=branches)
def test_common_beginnings_stand_once(branches: list[tuple[list[int], float]]) -> None:
    """F8: the tree has every beginning of every branch, each once, and nothing else."""
    draft = from_branches(branches)
    begins = {tuple(tokens[:n]) for tokens, _ in branches for n in range(1, len(tokens) + 1)}
    assert sorted(paths(draft)) == sorted(begins)
    assert [len(path) - 1 for path in paths(draft)] == list(draft.depths)


@given(draft=drafts)
def test_depth_first_each_subtree_in_a_row(draft: Draft) -> None:
    """F8: a token's descendants are the tokens right behind it."""
    for at in range(len(draft)):
        below = [i for i in range(len(draft)) if at in draft.ancestors(i)]
        assert below == list(range(at + 1, at + 1 + len(below)))


@given(branches=branches)
def test_a_chance_is_the_share_of_the_weight(branches: list[tuple[list[int], float]]) -> None:
    """F8: so the odds of a token are the part of all weight that goes through it, and never above its parent's."""
    draft = from_branches(branches)
    total = sum(weight for _, weight in branches)
    for at, path in enumerate(paths(draft)):
        through = sum(weight for tokens, weight in branches if tuple(tokens[: len(path)]) == path)
        assert draft.odds[at] == pytest.approx(through / total)
        assert draft.parents[at] < 0 or draft.odds[at] <= draft.odds[draft.parents[at]]


@given(draft=drafts, most=st.integers(0, 12))
def test_a_cut_keeps_the_likeliest_and_their_parents(draft: Draft, most: int) -> None:
    """F8: as many as may stay, none less likely than one that was dropped, all on their old paths."""
    cut = draft.cut(most)
    assert len(cut) == min(most, len(draft))
    old = dict(zip(paths(draft), draft.odds, strict=True))
    kept = {path: old[path] for path in paths(cut)}
    dropped = [odds for path, odds in old.items() if path not in kept]
    assert not kept or max(dropped, default=0.0) <= min(kept.values()) + 1e-12
    assert list(cut.odds) == pytest.approx(list(kept.values()))


@given(draft=drafts, depth=st.integers(0, 6))
def test_shallow_drops_what_stands_too_deep(draft: Draft, depth: int) -> None:
    """F8: a draft ends with the window."""
    assert paths(draft.shallow(depth)) == [path for path in paths(draft) if len(path) <= depth]


@given(draft=drafts, came=st.lists(token, max_size=6))
def test_a_walk_goes_as_far_as_was_proposed(draft: Draft, came: list[int]) -> None:
    """F8: the longest beginning of what came that is in the tree, each the child of the one before."""
    path = draft.walk(came)
    assert [draft.tokens[at] for at in path] == came[: len(path)]
    assert [draft.parents[at] for at in path] == [-1, *path][: len(path)]
    known = paths(draft)
    assert len(path) == max((n for n in range(1, len(came) + 1) if tuple(came[:n]) in known), default=0)


@given(draft=drafts, came=st.lists(token, max_size=6))
def test_guesses_are_judged_where_their_parent_came(draft: Draft, came: list[int]) -> None:
    """F8: all children of the tokens that came, up to where no token is left to compare with."""
    chances, right = draft.judged(came)
    assert sum(right) == len(draft.walk(came))
    asked = [path for path in paths(draft) if tuple(came[: len(path) - 1]) == path[:-1] and len(path) <= len(came)]
    old = dict(zip(paths(draft), draft.chances, strict=True))
    assert sorted(chances) == sorted(old[path] for path in asked)


@given(draft=drafts, last=token)
def test_the_rows_of_a_step(draft: Draft, last: int) -> None:
    """F8: the last committed token is the root row, every other row stands behind its parent's."""
    tokens, parents = draft.rows(last)
    assert tokens == [last, *draft.tokens] and parents[0] == -1
    assert all(0 <= parent < row for row, parent in enumerate(parents) if row)
    for row in range(1, len(tokens)):
        assert parents[row] == draft.parents[row - 1] + 1


@given(first=drafts, second=drafts, most=st.integers(0, 12))
def test_two_drafts_in_one(first: Draft, second: Draft, most: int) -> None:
    """F8: no more is proposed than in both, and the chances of one parent's children are at most 1 together."""
    both = merged(first, second, 99)
    assert sorted(paths(both)) == sorted({*paths(first), *paths(second)})
    for parent in range(-1, len(both)):
        assert sum(c for c, p in zip(both.chances, both.parents, strict=True) if p == parent) <= 1 + 1e-9
    assert paths(merged(first, second, most)) == paths(both.cut(most))


def test_what_no_draft_may_be() -> None:
    """F8: a parent behind its child, a subtree in two pieces, a token twice behind one parent, a lost parent."""
    for tokens, parents in [((1,), (0,)), ((1, 2, 3), (-1, -1, 0)), ((1, 1), (-1, -1)), ((1, 2), (-1,))]:
        with pytest.raises(ValueError):
            Draft(tokens, parents)
    with pytest.raises(ValueError):
        Draft((1, 2), (-1, 0)).only([1])
    assert len(NOTHING) == 0 and NOTHING.rows(7) == ([7], [-1])


def test_a_chain_is_certain_where_nothing_is_said() -> None:
    """F8: without chances each token counts as sure."""
    assert Draft((5, 6), (-1, 0)).odds == (1.0, 1.0)


@given(ahead=st.lists(st.integers(0, 40), min_size=1, max_size=60), most=st.integers(0, 31), seed=st.integers(0, 9))
def test_the_forced_drafter_is_right_and_wrong(ahead: list[int], most: int, seed: int) -> None:
    """F8: what tests verify with has always two branches where there is room, some of what comes among them."""
    forced = Forced(41, [7, 8], ahead, seed)
    again = Forced(41, [7, 8], ahead, seed)
    forced.tell([7, 8])
    again.tell([7, 8])
    for at in range(len(ahead)):
        draft = forced.draft(most)
        assert draft == again.draft(most) and len(draft) <= most
        assert most < 4 or draft.parents.count(-1) >= 2
        forced.tell(ahead[at : at + 1])
        again.tell(ahead[at : at + 1])


def test_forced_rounds_are_enough_to_verify_with() -> None:
    """F8: an answer of 96 tokens has 20 rounds and more with a token accepted and one refused, in trees."""
    ahead = [at * 7 % 41 for at in range(96)]
    forced, at, rounds = Forced(41, [7, 8], ahead), 0, 0
    forced.tell([7, 8])
    depths: list[int] = []
    while at < len(ahead):
        draft = forced.draft(31)
        path = draft.walk(ahead[at:])
        rounds += 0 < len(path) < len(draft) and draft.parents.count(-1) >= 2
        depths.append(len(path))
        forced.tell(ahead[at : at + len(path) + 1])
        at += len(path) + 1
    assert rounds >= 20 and 0 in depths and max(depths) >= 4
