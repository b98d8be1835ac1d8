"""engine/park.py: conversations in memory, bounded, the least used first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.cache import Mark
from engine.park import Park
from engine.prefix import Prefix, shared


def parked(park: Park, tokens: list[int], marks: int = 0) -> bool:
    """Whether there was room for it."""
    made = [Mark(n, {"state": torch.zeros(1)}) for n in range(marks)]
    if not park.room(len(tokens) * 8 + marks * 4):
        return False
    park.add(Prefix(tokens, [], made), {"rows": torch.tensor(tokens)})
    return True


def held(park: Park) -> list[list[int]]:
    return [one.prefix.tokens for one in park]


def test_the_least_used_goes_first() -> None:
    """G2: by bytes; what was used since stays."""
    park = Park(3 * 16)
    for n in range(3):
        assert parked(park, [n, n])
    park.touch(next(iter(park)))
    assert parked(park, [7, 7]) and held(park) == [[2, 2], [0, 0], [7, 7]]
    assert park.nbytes == 48


def test_one_too_large_alone_costs_nobody_a_place() -> None:
    """G2: it is refused, and what is parked stays."""
    park = Park(20)
    assert parked(park, [1, 2]) and not parked(park, [1, 2, 3]) and held(park) == [[1, 2]]
    assert not Park(0).room(1)


def test_checkpoints_count() -> None:
    """G2: bytes are those of rows and checkpoints together."""
    park = Park(1000)
    parked(park, [1, 2], marks=3)
    assert park.nbytes == 2 * 8 + 3 * 4


def test_what_a_conversation_grew_out_of_goes() -> None:
    """G2: a longer one takes the place of its own begin, and of nothing that only begins alike."""
    park = Park(1000)
    for tokens in ([1, 2], [1, 3], [1, 2, 4]):
        parked(park, tokens)
    assert held(park) == [[1, 3], [1, 2, 4]]


def test_what_grows_costs_nobody_else_a_place() -> None:
    """G2: its own begin makes room for it before another conversation does."""
    park = Park(5 * 8)
    for tokens in ([5, 6], [1, 2], [1, 2, 4]):
        prefix = Prefix(tokens, [])
        assert park.room(8 * len(tokens), prefix)
        park.add(prefix, {"rows": torch.tensor(tokens)})
    assert held(park) == [[5, 6], [1, 2, 4]]


def test_the_longest_part_wins_and_at_a_tie_the_last_used() -> None:
    """G2: of all that share something."""
    park = Park(1000)
    for tokens in ([1, 2, 3], [1, 2, 9], [5, 6]):
        parked(park, tokens)
    best, rows = park.best(lambda prefix: shared(prefix.tokens, [1, 2, 7]))
    assert best is not None and best.prefix.tokens == [1, 2, 9] and rows == 2
    assert park.best(lambda prefix: 0) == (None, 0)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20), st.integers(0, 120))
def test_it_is_never_over_its_bound(talks: list[list[int]], limit: int) -> None:
    """G2: whatever comes, and the newest that fits at all is there."""
    park = Park(limit)
    for tokens in talks:
        fits = parked(park, tokens)
        assert park.nbytes <= limit and fits == (8 * len(tokens) <= limit)
        assert not fits or held(park)[-1] == tokens
    numbers = [one.number for one in park]
    assert len(set(numbers)) == len(numbers)
