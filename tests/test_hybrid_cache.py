"""engine/models/hybrid_cache.py: drafts are kept, gone back from and lent behind, bit for bit an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models.attention import paths
from engine.models.batch import Rows
from engine.models.hybrid import Hybrid
from engine.models.hybrid_cache import HybridCache
from tests.checkpoints import alone
from tests.hybrids import VOCAB, load, reference, save

TOKENS = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(4)).tolist()
PROMPT, ROWS = 20, 100


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    """With a layer that guesses, so that its rows are looked at too."""
    return load(save(reference(num_hidden_layers=4), tmp_path_factory.mktemp("hybrid"), mtp=True))


def begun(model: Hybrid, rows: int = ROWS) -> HybridCache:
    """A cache that has read the prompt in one step."""
    cache = model.new_cache(rows)
    alone(model, torch.tensor(TOKENS[:PROMPT]), cache, 0)
    return cache


def plain(model: Hybrid, cache: HybridCache, tokens: list[int], start: int) -> Tensor:
    """Rounds of one row; the last one's logits."""
    for row, token in enumerate(tokens, start):
        logits = model.forward([Rows(cache, [token], row, draft=True)])
        cache.keep(row, [0])
    return logits


class Round(NamedTuple):
    """A tree and how many rows of its ``path`` stay."""

    parents: list[int]
    path: list[int]


def round_(asked: list[int], leaf: int, kept: int) -> Round:
    parents = [-1, *(max(0, min(parent, row)) for row, parent in enumerate(asked))]
    path = paths(parents)[leaf % len(parents)]
    return Round(parents, path[: 1 + kept % len(path)])


ROUNDS = st.builds(round_, st.lists(st.integers(0, 6), max_size=6), st.integers(0, 6), st.integers(0, 6))


def verify(model: Hybrid, cache: HybridCache, told: list[int], of: Round, seed: int) -> Tensor:
    """A round behind ``told``, whose tokens are made up; those kept are added. The last one's logits."""
    start, made = len(told), torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (len(of.parents),), generator=made).tolist()
    logits = model.forward([Rows(cache, tokens, start, of.parents, len(tokens), draft=True)])
    cache.keep(start, of.path)
    told += [tokens[at] for at in of.path]
    return logits[of.path[-1] :][:1]


SLOW = settings(max_examples=8, deadline=None, derandomize=True,
                suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip


@SLOW
@given(st.lists(st.tuples(ROUNDS, st.integers(0, 9)), min_size=1, max_size=4))
def test_rounds_and_rewinds_leave_what_a_plain_run_leaves(model: Hybrid, steps: list[tuple[Round, int]]) -> None:
    """N4: trees with a kept path, and going back into the last round or the one before: the next logits' bits."""
    cache, told = begun(model), list(TOKENS[:PROMPT])
    ends = [PROMPT]
    for seed, (of, back) in enumerate(steps):
        verify(model, cache, told, of, seed)
        ends.append(len(told))
        if back:
            first = ends[-3] if len(ends) > 2 else PROMPT
            rows = max(first, len(told) - back)
            assert cache.rewind(rows) == rows and cache.stands == rows
            del told[rows:]
            ends = [PROMPT] if rows == PROMPT else [rows]  # what lies before may be out of reach now
    other = begun(model)
    if len(told) > PROMPT:
        plain(model, other, told[PROMPT:], PROMPT)
    assert torch.equal(plain(model, cache, [7], len(told)), plain(model, other, [7], len(told)))
    assert cache.stands == len(told) + 1 == other.stands


def test_going_back_further_is_going_back_to_nothing(model: Hybrid) -> None:
    """N4: two rounds can be gone back by, a prompt's step not; then it begins anew, as a new cache."""
    cache, told = begun(model), list(TOKENS[:PROMPT])
    for seed in range(3):
        verify(model, cache, told, Round([-1, 0, 1], [0, 1, 2]), seed)
    assert cache.rewind(PROMPT + 3 - 1) == 0 and cache.stands == 0
    assert begun(model).rewind(PROMPT - 1) == 0
    assert begun(model).rewind(PROMPT + 1) == 0
    alone(model, torch.tensor(TOKENS[:PROMPT]), cache, 0)
    assert torch.equal(plain(model, cache, [7], PROMPT), plain(model, begun(model), [7], PROMPT))


def test_a_second_way_back_is_there_once(model: Hybrid) -> None:
    """N4: from the round before there is no further way; to where it began there is."""
    cache, told = begun(model), list(TOKENS[:PROMPT])
    for seed in range(3):
        verify(model, cache, told, Round([-1, 0, 1], [0, 1, 2]), seed)
    assert cache.rewind(PROMPT + 4) == PROMPT + 4
    assert cache.rewind(PROMPT + 3) == PROMPT + 3
    assert cache.rewind(PROMPT + 2) == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_mark_is_gone_back_to_in_any_cache(model: Hybrid, steps: int) -> None:
    """N4: with a commit pending or none; with the rows' copy another cache goes on with the same bits."""
    cache, told = begun(model), list(TOKENS[:PROMPT])
    for seed in range(steps):
        verify(model, cache, told, Round([-1, 0, 1, 0], [0, 1, 2][: 3 - seed]), seed)
    mark, rows = cache.mark(), cache.copy(0, len(told))
    assert mark.rows == len(told) and mark.nbytes > 0
    expected = plain(model, cache, [7, 8, 9], len(told))
    other = model.new_cache(ROWS)
    other.put(0, rows)
    for back in (other, cache):
        back.go_back(mark)
        assert back.stands == len(told)
        assert torch.equal(plain(model, back, [7, 8, 9], len(told)), expected)


def test_a_mark_stays_as_it_was_made(model: Hybrid) -> None:
    """N4: later steps do not write to it, and what is gone back to it does not either."""
    cache = begun(model)
    mark = cache.mark()
    before = {name: tensor.clone() for name, tensor in mark.tensors.items()}
    plain(model, cache, TOKENS[:3], PROMPT)
    cache.go_back(mark)
    plain(model, cache, TOKENS[:3], PROMPT)
    assert all(torch.equal(mark.tensors[name], tensor) for name, tensor in before.items())


def between_chunks(model: Hybrid) -> HybridCache:
    return begun(model)


def between_rounds(model: Hybrid) -> HybridCache:
    cache = begun(model)
    plain(model, cache, TOKENS[:2], PROMPT)
    return cache


def commit_pending(model: Hybrid) -> HybridCache:
    cache, told = between_rounds(model), TOKENS[: PROMPT + 2]
    model.propose(cache, TOKENS[5], 3)
    verify(model, cache, told, Round([-1, 0, 1, 0, 3], [0, 3, 4]), 1)
    return cache


def drafts_refused(model: Hybrid) -> HybridCache:
    cache = commit_pending(model)
    cache.rewind(PROMPT + 2)
    return cache


KINDS = (between_chunks, between_rounds, commit_pending, drafts_refused)


def guest(model: Hybrid, cache: HybridCache) -> None:
    """A prompt and rounds of its own, as far as it has room."""
    alone(model, torch.tensor(TOKENS[50:74]), cache, 0)
    plain(model, cache, TOKENS[80:84], 24)
    model.propose(cache, TOKENS[84], 3)


def all_of_it(model: Hybrid, cache: HybridCache) -> dict[str, Tensor]:
    """Everything the holder has and does next: states, rows, and logits of a chunk, a round and of going back."""
    rows = cache.stands
    found = {"rows": cache.kv.all.clone(), **cache.mark().tensors, "before": cache.spare.delta.clone()}
    found["guesses"] = torch.tensor(model.propose(cache, 9, 4))
    found["next"] = plain(model, cache, TOKENS[90:92], rows)
    cache.rewind(rows)
    found["back"] = plain(model, cache, TOKENS[93:94], rows)
    found["chunk"] = alone(model, torch.tensor(TOKENS[100:110]), cache, cache.stands)
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("holder", KINDS)
def test_a_lent_cache_comes_back_as_it_was(model: Hybrid, holder: Callable[[Hybrid], HybridCache]) -> None:
    """K4: bit for bit, at every kind of safe point; a guest finds a fresh cache of its own size."""
    expected, cache = all_of_it(model, holder(model)), holder(model)
    loan = cache.lend(30)
    assert cache.rows == 30 and cache.stands == 0 and loan.nbytes > 30 * model.kv_bytes_per_row
    guest(model, cache)
    with pytest.raises(ValueError, match="do not fit into 30"):
        alone(model, torch.tensor(TOKENS[:9]), cache, 28)
    cache.take_back(loan)
    assert cache.rows == ROWS and differing(all_of_it(model, cache), expected) == []


def test_the_round_before_comes_back_too(model: Hybrid) -> None:
    """K4: behind a guest the holder can still go back into the round before the pending one."""
    lent, own = commit_pending(model), commit_pending(model)
    loan = lent.lend(30)
    guest(model, lent)
    lent.take_back(loan)
    for cache in (lent, own):
        assert cache.rewind(PROMPT + 1) == PROMPT + 1
    assert torch.equal(plain(model, lent, [7], PROMPT + 1), plain(model, own, [7], PROMPT + 1))


@pytest.mark.parametrize("holder", KINDS)
def test_without_taking_back_it_does_not(model: Hybrid, holder: Callable[[Hybrid], HybridCache]) -> None:
    """K4: the same check fails at each kind: rows, states and every next step differ."""
    expected, cache = all_of_it(model, holder(model)), holder(model)
    stands = cache.stands
    cache.lend(30)
    guest(model, cache)
    cache.rows = ROWS
    assert cache.stands != stands
    mark = cache.mark()
    cache.go_back(type(mark)(stands, {k: v for k, v in mark.tensors.items() if k in ("delta", "tail", "hidden")}))
    wrong = all_of_it(model, cache)
    assert {"rows", "delta", "tail", "next", "back", "chunk"} <= set(
        differing({k: wrong.get(k, torch.empty(0)) for k in expected}, expected)
    )


def test_a_guest_alone_is_a_fresh_cache(model: Hybrid) -> None:
    """K4: what a guest computes in a lent cache is what it computes in one of its own."""
    lent = commit_pending(model)
    lent.lend(30)
    own = model.new_cache(30)
    for cache in (lent, own):
        guest(model, cache)
    assert torch.equal(plain(model, lent, [7], 28), plain(model, own, [7], 28))


def test_only_a_path_of_the_last_drafts_is_kept(model: Hybrid) -> None:
    """N4: rows that do not follow one another, another step's, or a prompt's are refused."""
    cache = begun(model)
    with pytest.raises(ValueError, match="no drafts"):
        cache.keep(PROMPT, [0])
    model.forward([Rows(cache, [1, 2, 3], PROMPT, [-1, 0, 0], draft=True)])
    with pytest.raises(ValueError, match="follow"):
        cache.keep(PROMPT, [0, 1, 2])
    with pytest.raises(ValueError, match="no drafts"):
        cache.keep(PROMPT + 1, [0])
    cache.keep(PROMPT, [0, 2])
    assert cache.stands == PROMPT + 2


def test_a_step_elsewhere_begins_anew(model: Hybrid) -> None:
    """N2: the loader's timed steps stand anywhere; the same one gives the same bits whatever was before."""
    used, new = begun(model), model.new_cache(ROWS)
    new.put(0, used.copy(0, ROWS))
    step = torch.tensor(TOKENS[:5])
    assert torch.equal(alone(model, step, used, 50), alone(model, step, new, 50))
    assert used.stands == 55


def test_its_bytes(model: Hybrid) -> None:
    """I6: rows and both states are there, and written, from the start."""
    cache = model.new_cache(9)
    assert cache.nbytes == 9 * model.kv_bytes_per_row + model.state_bytes
    assert not bool(cache.kv.all.any()) and not bool(cache.state.delta.any())
