"""engine/speculate/lookup.py and mtp.py: what drafters propose."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.cache import Cache
from engine.speculate.draft import NOTHING, Draft
from engine.speculate.lookup import LONGEST, PRIOR, SHORTEST, VOTES, Lookup
from engine.speculate.mtp import Mtp, Together
from tests.fake_engine import FakeCache

texts = st.lists(st.integers(0, 3), max_size=40)


def told(*texts: list[int], learned: bool = True) -> Lookup:
    lookup = Lookup(learned)
    for text in texts:
        lookup.tell(text)
    return lookup


def matched(text: list[int], end: int) -> int:
    """How many tokens that end at ``end`` are the last of ``text``."""
    count = 0
    while count < min(LONGEST, end + 1) and text[end - count] == text[-1 - count]:
        count += 1
    return count


def paths(draft: Draft) -> list[list[int]]:
    return [[draft.tokens[i] for i in [*draft.ancestors(at), at]] for at in range(len(draft))]


@given(text=texts, most=st.integers(0, 12))
def test_what_is_proposed_followed_the_same_tokens_before(text: list[int], most: int) -> None:
    """F8: every path of the tree once followed a match of two tokens and more; where there is a match, something is."""
    draft = told(text).draft(most)
    ends = [end for end in range(len(text) - 1) if matched(text, end) >= SHORTEST]
    assert len(draft) <= most
    assert bool(len(draft)) == bool(ends and most)
    for path in paths(draft):
        assert any(text[end + 1 : end + 1 + len(path)] == path for end in ends)


@given(text=texts)
def test_the_latest_longest_match_counts_most(text: list[int]) -> None:
    """F8: what followed it is in every draft."""
    draft = told(text, learned=False).draft(31)
    ends = [end for end in range(len(text) - 1) if matched(text, end) >= SHORTEST]
    if ends:
        best = max(ends, key=lambda end: (matched(text, end), end))
        assert draft.child(-1, text[best + 1]) is not None


@given(text=texts, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_how_it_is_told_changes_nothing(text: list[int], cuts: list[int]) -> None:
    """K4: in one piece or in several, the same tokens give the same draft, and asking twice does too."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    draft = told(text).draft(31)
    lookup = told(*parts)
    assert lookup.draft(31) == draft == lookup.draft(31)


@given(text=texts)
def test_children_of_one_parent_are_at_most_certain_together(text: list[int]) -> None:
    """F8: chances are shares of what followed."""
    draft = told(text).draft(31)
    for parent in range(-1, len(draft)):
        assert sum(c for c, p in zip(draft.chances, draft.parents, strict=True) if p == parent) <= 1


def test_a_longer_match_beats_a_later_one() -> None:
    """F8: 2 3 4 went on with 5; the later 3 4 with 6: both are proposed, 5 first."""
    draft = told([0, 2, 3, 4, 5, 9, 9, 3, 4, 6, 8, 7, 2, 3, 4]).draft(31)
    five, six = draft.child(-1, 5), draft.child(-1, 6)
    assert five == 0 and six is not None and draft.parents.count(-1) == 2
    assert draft.odds[five] > 0.3 > draft.odds[six]


def test_of_many_matches_the_latest_are_asked() -> None:
    """F8: twenty went on in twenty ways: only the last dozen have a vote."""
    lookup = told([token for at in range(20) for token in (1, 2, 3, 4, 5, 6, 7, 8, 100 + at)])
    lookup.tell([1, 2, 3, 4, 5, 6, 7, 8])
    draft = lookup.draft(31)
    first = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0]
    assert first == list(range(119, 119 - VOTES, -1))


def test_a_match_ends_where_its_text_begins() -> None:
    """F8: the beginnings of two texts are not what they have in common."""
    lookup = Lookup(learned=False)
    lookup.seed([1, 2, 3])
    lookup.tell([1, 2])
    assert lookup.draft(31).chances == (PRIOR[2],)


def test_silent_when_nothing_matches() -> None:
    """F8: new text, no text, no room."""
    assert told(list(range(100))).draft(31) == NOTHING
    assert told([], [1]).draft(31) == NOTHING
    assert told([1, 2, 1, 2]).draft(0) == NOTHING


def test_a_request_where_it_is_wrong_makes_it_quiet_and_one_where_it_is_right_bold() -> None:
    """F8: its chances follow what came, whether its drafts were verified or not; those of ``fixed`` stay."""

    def after(follower: list[int], learned: bool) -> float:
        lookup = told([1, 2, 7, 0], learned=learned)
        for at in range(40):
            lookup.tell([1, 2])
            lookup.draft(8)
            lookup.tell([follower[at % len(follower)], 20 + at])
        lookup.tell([1, 2])
        return max(lookup.draft(8).odds, default=0.0)

    wrong, right = list(range(100, 140)), [7]
    assert after(wrong, True) < 0.2 < 0.8 < after(right, True)
    # Fixed, what came before still moves the shares, not what a match is worth.
    lookup = told([1, 2, 7, 0, 1, 2], learned=False)
    before = lookup.draft(8).chances[0]
    lookup.tell([99, 98, 3, 4, 6, 5, 3, 4])
    assert lookup.draft(8).chances[0] == before


def test_earlier_requests_are_looked_through() -> None:
    """F8: no match goes over the seam between two of them, and the oldest tokens are dropped."""
    lookup = Lookup()
    lookup.seed([1, 2, 3])
    lookup.seed([4, 5, 6])
    lookup.tell([8, 1, 2])
    assert lookup.draft(31).tokens == (3,)
    lookup.tell([3, 4])
    assert lookup.draft(31) == NOTHING
    with pytest.raises(ValueError):
        lookup.seed([1])


def test_memory_for_earlier_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """F8: the newest stay."""
    monkeypatch.setattr("engine.speculate.lookup.SEEDS", 40)
    lookup = Lookup()
    for request in range(50):
        lookup.seed([100 + request, 200 + request, 300 + request])
    assert lookup._count <= 40
    lookup.tell([149, 249])
    assert lookup.draft(31).tokens == (349,)
    lookup = Lookup()
    for request in range(50):
        lookup.seed([100 + request, 200 + request, 300 + request])
    lookup.tell([100, 200])
    assert lookup.draft(31) == NOTHING


class Layer:
    """A draft layer: each next token is one more, and what it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def propose(self, cache: Cache, token: int, most: int) -> list[int]:
        self.asked.append((token, most))
        return [token + 1 + at for at in range(most)]


def test_the_draft_layer_is_asked_as_deep_as_it_is_right() -> None:
    """N4: a chain behind the last token; deeper while it is right, one token where it never is."""
    layer = Layer()
    mtp = Mtp(layer, FakeCache(8))
    assert mtp.draft(4) == NOTHING and not layer.asked
    mtp.tell([5, 6])
    assert mtp.draft(3) == Draft((7, 8, 9), (-1, 0, 1), (0.7, 0.7, 0.7))
    for _ in range(100):
        mtp.draft(16)
        mtp.tell([layer.asked[-1][0] + 1 + at for at in range(layer.asked[-1][1])])
    assert layer.asked[-1][1] == 16 and min(mtp.draft(16).chances) > 0.9
    for _ in range(120):
        mtp.draft(16)
        mtp.tell([0])
    assert layer.asked[-1] == (0, 1)
    assert mtp.draft(0) == NOTHING


def test_behind_a_wrong_guess_nothing_is_judged() -> None:
    """N4: the second token of a chain says nothing where the first was wrong."""
    layer = Layer()
    mtp = Mtp(layer, FakeCache(8))
    mtp.tell([5])
    mtp.draft(3)
    mtp.tell([9, 7, 8])
    first, second, _ = mtp.draft(3).chances
    assert first < 0.7 == second


def test_drafters_together() -> None:
    """F8: the second is asked only where the first is not sure, and both are told everything."""
    layer = Layer()
    lookup = Lookup(learned=False)
    both = Together(lookup, Mtp(layer, FakeCache(8)))
    both.tell([1, 2, 9, 8, 1, 2])
    draft = both.draft(8)
    first = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0]
    assert first == [9, 3] and len(draft) <= 8
    text = list(range(20, 30))
    both.tell([*text, 50, *text])
    asked = len(layer.asked)
    assert both.draft(8).tokens[0] == 50 and len(layer.asked) == asked
