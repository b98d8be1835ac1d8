"""Blocks of a prompt as hashes, and what two prompts share by them."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from stages.hashes import BLOCK, SIZE, hashes
from stages.shared import shared

SALT = b"salt"
PROMPTS = st.lists(st.integers(0, 3), max_size=5 * BLOCK)


def common(left: list[int], right: list[int]) -> int:
    """Leading tokens that two lists share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def test_known_hashes() -> None:
    """G2: the form is fixed, a disk prefix is found by it after a restart: 8 bytes for each whole block."""
    tokens = list(range(130))
    assert [block.hex() for block in hashes(tokens, b"x" * 16)] == ["fd8d2da5fce35d3a", "d618ceecc351b2a0"]
    assert hashes(tokens[: BLOCK - 1], SALT) == []
    assert len(hashes([0xFFFF_FFFF] * BLOCK, SALT)[0]) == SIZE


@given(PROMPTS, PROMPTS, st.integers(0, 5 * BLOCK))
def test_what_two_prompts_share(left: list[int], right: list[int], taken: int) -> None:
    """G2: prompts share exactly the whole blocks that all their tokens up to there are alike in."""
    other = left[:taken] + right
    rows = shared(hashes(left, SALT), hashes(other, SALT))
    assert rows == common(left, other) // BLOCK * BLOCK


@given(st.lists(PROMPTS, max_size=4), PROMPTS)
def test_several_held_at_once(kept: list[list[int]], prompt: list[int]) -> None:
    """G2: of several held prompts the longest match counts, whatever their order."""
    held = [block for tokens in kept for block in hashes(tokens, SALT)]
    best = max((common(prompt, tokens) // BLOCK * BLOCK for tokens in kept), default=0)
    assert shared(hashes(prompt, SALT), held) == shared(hashes(prompt, SALT), held[::-1]) == best


@given(st.lists(st.integers(0, 2**32 - 1), min_size=BLOCK, max_size=3 * BLOCK))
def test_another_salt_is_another_chain(tokens: list[int]) -> None:
    """R5: without the salt no block can be told from its hash, also behind one that is known."""
    one, other = hashes(tokens, SALT), hashes(tokens, b"pepper")
    assert not set(one) & set(other)
    assert shared(one, other) == 0
