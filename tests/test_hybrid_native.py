"""engine/models/hybrid.py on the native library: a row's bits are its own in any step, so any mark is gone on from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models import ways
from engine.models.attention import paths
from engine.models.batch import Rows
from engine.models.hybrid import Hybrid
from engine.models.hybrid_cache import HybridCache
from engine.native import lib, step
from tests.checkpoints import alone
from tests.hybrids import VOCAB, load, reference, save

pytestmark = pytest.mark.skipif(lib.kernels() is None, reason="no native library: it needs a compiler")

TOKENS = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(6)).tolist()
PROMPT, ROWS = 150, 200


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the worker runs; the number of threads is put back."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[False, True], ids=["one", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    """Sizes that leave a rest of every vector; a layer that guesses, so that its rows are looked at too."""
    odd = {"linear_key_head_dim": 24, "linear_value_head_dim": 40, "linear_num_value_heads": 4, "head_dim": 40}
    odd |= {"num_attention_heads": 4, "hidden_size": 96}
    if request.param:
        odd |= {"num_experts": 10, "num_experts_per_tok": 3}
    theirs = reference(experts=request.param, **odd)
    return load(save(theirs, tmp_path_factory.mktemp("hybrid"), mtp=True), exact=False)


def read(model: Hybrid, sizes: list[int], *, cache: HybridCache | None = None, draft: bool = False) -> Tensor:
    """Logits of every row of the prompt, read in steps of these sizes."""
    cache = cache or model.new_cache(ROWS)
    seen, start = [], 0
    for size in sizes:
        part = Rows(cache, TOKENS[start : start + size], start, wanted=size, draft=draft)
        seen.append(model.forward([part]))
        if draft:
            cache.keep(start, list(range(size)))
        start += size
    return torch.cat(seen)


def left(cache: HybridCache) -> dict[str, Tensor]:
    """All that a cache holds."""
    return {"kv": cache.kv.all.clone(), **cache.mark().tensors}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_it_says_of_itself(model: Hybrid) -> None:
    """N1: the path by name, float16 rows, and every row alike."""
    assert model.path == step.path() and model.path.startswith("native ")
    assert model.alike == step.ALIKE and model.mtp
    cache = model.new_cache(10)
    assert cache.kv.all.dtype is torch.float16 and cache.state.delta.dtype is torch.float32
    assert cache.nbytes == 10 * model.kv_bytes_per_row + model.state_bytes


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", [[1] * PROMPT, [7] * 21 + [3], [64, 64, 22], [149, 1]], ids=["1", "7", "64", "149"])
def test_a_prompt_is_cut_anywhere(model: Hybrid, sizes: list[int], threads: int) -> None:
    """G1, F8: bit for bit, every row's logits and all that is left, whatever the steps and the threads."""
    whole, cut = model.new_cache(ROWS), model.new_cache(ROWS)
    model.use(1)
    expected = read(model, [PROMPT], cache=whole)
    model.use(threads)
    assert torch.equal(read(model, sizes, cache=cut), expected)
    assert same(left(cut), left(whole))


def test_a_prompt_by_rounds_is_the_prompt_in_one_step(model: Hybrid) -> None:
    """N4: rows that were drafts and folded in later leave what a prompt's step leaves."""
    whole, rounds = model.new_cache(ROWS), model.new_cache(ROWS)
    expected = read(model, [PROMPT], cache=whole)
    assert torch.equal(read(model, [5] * 30, cache=rounds, draft=True), expected)
    after = [model.forward([Rows(cache, [7], PROMPT)]) for cache in (whole, rounds)]
    assert torch.equal(*after) and same(left(whole), left(rounds))


TREES = st.lists(st.integers(-1, 11), min_size=1, max_size=12).map(
    lambda asked: [min(parent, row - 1) for row, parent in enumerate(asked)]
)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees=st.lists(TREES, min_size=1, max_size=3), threads=st.integers(1, 2), seed=st.integers(0, 999))
def test_a_tree_s_rows_are_those_of_a_prompt(model: Hybrid, trees: list[list[int]], threads: int, seed: int) -> None:
    """M6: each row of several trees in one step, as the last row of a prompt that holds its path."""
    made = torch.Generator().manual_seed(seed)
    model.use(threads)
    parts, expected = [], []
    for index, tree in enumerate(trees):
        before = 3 + 30 * index
        drafts = torch.randint(0, VOCAB, (len(tree),), generator=made).tolist()
        for path in paths(tree):
            prompt = [*TOKENS[:before], *(drafts[at] for at in path)]
            expected.append(alone(model, torch.tensor(prompt), model.new_cache(ROWS), 0))
        cache = model.new_cache(ROWS)
        alone(model, torch.tensor(TOKENS[:before]), cache, 0)
        parts.append(Rows(cache, drafts, before, tree, len(drafts), draft=True))
    assert torch.equal(model.forward(parts), torch.cat(expected))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(st.tuples(TREES, st.integers(0, 11), st.integers(0, 3)), min_size=1, max_size=4))
def test_trees_and_rewinds_leave_what_a_prompt_leaves(model: Hybrid, rounds: list[tuple[list[int], int, int]]) -> None:
    """N4: after paths that stay and goings back, state and rows are those of the same tokens read at once."""
    cache, told = model.new_cache(ROWS), list(TOKENS[:20])
    alone(model, torch.tensor(told), cache, 0)
    first = len(told)
    for seed, (parents, leaf, back) in enumerate(rounds):
        made, start = torch.Generator().manual_seed(seed), len(told)
        drafts = torch.randint(0, VOCAB, (len(parents),), generator=made).tolist()
        model.forward([Rows(cache, drafts, start, parents, draft=True)])
        path = paths(parents)[leaf % len(parents)]
        cache.keep(start, path)
        told += [drafts[at] for at in path]
        if back:
            rows = max(first, len(told) - back)
            assert cache.rewind(rows) == rows
            del told[rows:]
            first = rows
        else:
            first = start
    plain = model.new_cache(ROWS)
    alone(model, torch.tensor(told), plain, 0)
    after = [model.forward([Rows(one, [9], len(told), draft=True)]) for one in (cache, plain)]
    assert torch.equal(*after)
    rows = len(told) - 1  # the guessing layer's end one row before
    assert torch.equal(cache.copy(0, rows)["kv"], plain.copy(0, rows)["kv"])
    assert torch.equal(cache.state.delta, plain.state.delta) and torch.equal(cache.state.tail, plain.state.tail)


@pytest.mark.parametrize("rows", [1, 37, 64, 149])
def test_any_mark_is_gone_on_from(model: Hybrid, rows: int) -> None:
    """G1: a state kept anywhere, with its rows put into another cache: the rest as without."""
    whole, first, other = (model.new_cache(ROWS) for _ in range(3))
    expected = read(model, [PROMPT], cache=whole)
    alone(model, torch.tensor(TOKENS[:rows]), first, 0)
    mark = first.mark()
    other.put(0, first.copy(0, rows))
    other.go_back(mark)
    rest = model.forward([Rows(other, TOKENS[rows:PROMPT], rows, wanted=PROMPT - rows)])
    assert torch.equal(rest, expected[rows:]) and same(left(other), left(whole))


def between_chunks(model: Hybrid, cache: HybridCache) -> list[int]:
    alone(model, torch.tensor(TOKENS[:33]), cache, 0)
    return TOKENS[:33]


def between_rounds(model: Hybrid, cache: HybridCache) -> list[int]:
    told = between_chunks(model, cache)
    model.forward([Rows(cache, [4], 33, draft=True)])
    cache.keep(33, [0])
    return [*told, 4]


def commit_pending(model: Hybrid, cache: HybridCache) -> list[int]:
    told = between_rounds(model, cache)
    model.forward([Rows(cache, [1, 2, 3, 4, 5], 34, [-1, 0, 1, 0, 3], draft=True)])
    cache.keep(34, [0, 3, 4])
    return [*told, 1, 4, 5]


@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("point", [between_chunks, between_rounds, commit_pending])
def test_a_lent_cache_comes_back(model: Hybrid, point: object, back: bool) -> None:
    """K4: bit for bit the holder's own run and that of its tokens read at once; without taking back it is not."""
    assert callable(point)
    cache, plain = model.new_cache(ROWS), model.new_cache(ROWS)
    told = point(model, cache)
    loan, stands = cache.lend(40), cache.stands
    assert stands == 0
    alone(model, torch.tensor(TOKENS[50:80]), cache, 0)
    model.forward([Rows(cache, [3, 4], 30, draft=True)])
    cache.keep(30, [0])
    if back:
        cache.take_back(loan)
        assert cache.stands == len(told)
    else:
        cache.rows = ROWS
    alone(model, torch.tensor(told), plain, 0)
    after = [model.forward([Rows(one, TOKENS[90:100], len(told), wanted=10)]) for one in (cache, plain)]
    assert torch.equal(*after) is back
    assert same(left(cache), left(plain)) is back


def test_it_guesses_the_same_wherever_a_prompt_was_cut(model: Hybrid) -> None:
    """N5: the guessing layer's rows too."""
    caches = [model.new_cache(ROWS), model.new_cache(ROWS)]
    for cache, sizes in zip(caches, ([60], [13, 30, 17]), strict=True):
        read(model, sizes, cache=cache)
    assert model.propose(caches[0], 5, 4) == model.propose(caches[1], 5, 4) != []


@pytest.mark.parametrize("experts", [False, True])
def test_the_numbers_are_transformers_own(
    experts: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N3: float32 weights on the native path, but for rows kept in float16; a wrong norm or order is far off."""
    theirs = reference(experts=experts)
    native = load(save(theirs, tmp_path_factory.mktemp("native")), exact=False)
    expected = theirs(torch.tensor(TOKENS[:PROMPT])[None]).logits[0]
    got = read(native, [PROMPT])
    assert native.path == step.path()
    assert float((got - expected).norm() / expected.norm()) < 2e-3
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.98


def test_matrices_of_another_form_go_by_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """N1: a width that the library has no form for: torch, and so many rows alike as there."""
    theirs = reference(hidden_size=80)
    model = load(save(theirs, tmp_path_factory.mktemp("narrow")), exact=False)
    assert model.path == "torch cpu" and model.alike in (1, 32)
    assert model.new_cache(4).kv.all.dtype is torch.bfloat16


def test_an_exact_model_goes_by_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """N3: in float32 throughout."""
    assert load(save(reference(), tmp_path_factory.mktemp("exact"))).path == "torch cpu"


SCORES = st.lists(st.lists(st.floats(-9, 9, width=32), min_size=7, max_size=7), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(scores=SCORES, active=st.integers(1, 7))
def test_a_router_s_shares(scores: list[list[float]], active: int) -> None:
    """N3: by the picked ones alone they are those of the whole softmax, one in sum, and a row's own."""
    asked = torch.tensor(scores)
    weights, picked = ways.NATIVE.share(asked, active)
    theirs, _ = ways.WHOLE.share(asked, active)
    assert torch.allclose(weights, theirs, rtol=1e-4, atol=1e-6) and torch.allclose(
        weights.sum(-1), torch.ones(len(scores))
    )
    for row in range(len(scores)):
        one, which = ways.NATIVE.share(asked[row : row + 1], active)
        assert torch.equal(one[0], weights[row]) and torch.equal(which[0], picked[row])


@pytest.mark.parametrize("width", [1, 5, 16, 77])
def test_elements_and_turns_are_those_of_torch(width: int) -> None:
    """N3: silu by a convolution of one tap, rotation in real numbers, a unit length by a norm."""
    made = torch.Generator().manual_seed(width)
    x = torch.randn(9, width, generator=made) * 4
    assert torch.allclose(ways.NATIVE.silu(x), torch.nn.functional.silu(x), rtol=1e-5, atol=1e-6)
    heads = torch.randn(5, 3, 2 * width + 4, generator=made)
    angles = torch.randn(5, 1, width, generator=made)
    turned, theirs = heads.clone(), heads.clone()
    ways.NATIVE.rotate(turned, torch.polar(torch.ones_like(angles), angles))
    ways.WHOLE.rotate(theirs, torch.polar(torch.ones_like(angles), angles))
    assert torch.allclose(turned, theirs, rtol=1e-5, atol=1e-5) and not torch.equal(turned, heads)
    unit = ways.NATIVE.unit(heads, 0.5)
    assert torch.allclose(unit, ways.WHOLE.unit(heads, 0.5), rtol=1e-5, atol=1e-6)
