"""``no_repeat_ngram_size`` in engine/sampling.py: what may not come next, against the definition and Hugging Face."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Sampling, Start
from engine.sampling import Adjustments, Repeats


def banned(tokens: list[int], n: int) -> set[int]:
    repeats = Repeats(n)
    for token in tokens:
        repeats.tell(token)
    return set(repeats.banned())


def plain(tokens: list[int], n: int) -> set[int]:
    """Every token that would make the last n tokens a run that is there already."""
    if n == 0 or len(tokens) < n - 1:
        return set()
    seen = [tokens[at : at + n] for at in range(len(tokens) - n + 1)]
    return {gram[-1] for gram in seen if gram[:-1] == tokens[len(tokens) - n + 1 :]}


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 6))
def test_what_would_complete_an_ngram_may_not_come(tokens: list[int], n: int) -> None:
    """A4: an n-gram that is there comes no second time; 0 bans nothing, 1 every token that was written."""
    assert banned(tokens, n) == plain(tokens, n)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_it_is_what_hugging_face_does(n: int) -> None:
    """A4: the meaning is that of the field's origin."""
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    tokens = np.random.default_rng(n).integers(0, 4, 30).tolist()
    scores = NoRepeatNGramLogitsProcessor(n)(torch.tensor([tokens]), torch.zeros(1, 6))
    assert banned(tokens, n) == {i for i, score in enumerate(scores[0].tolist()) if score < 0}


def test_a_ban_leaves_a_token() -> None:
    """A4: it is at -inf behind all other adjustments; were nothing left, nothing is banned by it."""
    start = Start(1, 1, 0, [], Sampling(temperature=0, logit_bias={0: 2.0}), 9, [3], min_tokens=5)
    adjustments, raw = Adjustments(start), np.zeros(4, np.float32)
    assert adjustments.apply(raw, 0, [0, 9]).tolist() == [-np.inf, 0, 0, -np.inf]
    assert adjustments.apply(raw, 0, [0, 1, 2]).tolist() == [2, 0, 0, -np.inf]
    assert adjustments.apply(raw, 5, [0, 1, 2]).tolist() == [-np.inf, -np.inf, -np.inf, 0]
    assert raw.tolist() == [0] * 4
