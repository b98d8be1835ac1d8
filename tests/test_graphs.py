"""engine/models/graphs.py and fixed.py: rounds in fixed shapes, recorded by a fake that only calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.failpoints import Failpoints
from engine.load import Line
from engine.models import fixed, graphs
from engine.models.attention import paths
from engine.models.batch import Rows
from engine.models.cache import KV
from engine.models.dense import Decoder
from engine.models.fixed import BLOCK, MOST, OF_PART, OWN, TAIL
from engine.models.graphs import Graphs, Play, tried
from engine.native import lib
from engine.protocol import FromEngine, OwnWork
from engine.weights.checkpoint import open_checkpoint
from engine.worker import Engine, tell_of_graphs
from tests.checkpoints import build, write_gguf
from tests.test_dense import reference, served
from tests.test_worker import FAKE, Bench

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the worker runs; the number of threads is put back."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


class Recorded:
    """Calls instead of recording. ``made`` and ``played`` count; ``fails`` after so many."""

    def __init__(self, fails: int = 1 << 30, spoil: Callable[[], None] = lambda: None) -> None:
        self.made = self.played = self.nbytes = self.freed = 0
        self._fails, self._spoil = fails, spoil

    def record(self, run: Play) -> Play:
        """As a graph: the warm-up runs, then a recording that is only played."""
        if self.made >= self._fails:
            raise RuntimeError("a prompt's text")
        run()
        self.made, self.nbytes = self.made + 1, self.nbytes + 1000

        def play() -> None:
            self.played += 1
            run()
            self._spoil()

        return play

    def free(self) -> None:
        self.freed, self.nbytes = self.freed + 1, 0


def cache(rows: int = 200, seed: int = 0) -> KV:
    made = KV(1, 1, rows, 4, torch.float32, CPU)
    made.all.copy_(torch.randn(made.all.shape, generator=torch.Generator().manual_seed(seed)))
    return made


TREES = st.lists(st.integers(0, 7), max_size=MOST).map(
    lambda behind: [-1 if back == 7 else max(-1, at - 1 - back) for at, back in enumerate(behind)] or [-1]
)


@given(st.lists(st.tuples(TREES, st.integers(0, 5000)), min_size=1, max_size=4))
def test_a_row_is_given_what_its_position_says(drawn: list[tuple[list[int], int]]) -> None:
    """F8: its cut is before the round, its own keys are those up to itself in order, whatever the round is."""
    drawn = [(tree[: MOST // len(drawn)], start) for tree, start in drawn]
    parts = [Rows(cache(8), list(range(len(tree))), start, tree, len(tree)) for tree, start in drawn]
    plan = fixed.plan(parts)
    assert len(plan.table) == MOST and {len(row) for row in plan.table} == {OWN + OF_PART * len(parts)}
    assert plan.wanted == list(range(sum(len(tree) for tree, _ in drawn)))
    assert plan.blocks * BLOCK >= max(row[2] for row in plan.table)
    first = 0
    for number, (tree, start) in enumerate(drawn):
        for at, path in enumerate(paths(tree)):
            token, position, shared, *rest = plan.table[first + at]
            assert (token, position, shared) == (at, start + len(path) - 1, fixed.cut(position)) and shared <= start
            logical = [*range(start), *(start + row for row in path)]
            assert len(logical) - shared <= TAIL
            assert rest[: len(logical) - shared] == logical[shared:]
        of = [row[OWN + OF_PART * number :][:OF_PART] for row in plan.table]
        assert [at for at, (mine, _, _) in enumerate(of) if mine] == list(range(first, first + len(tree)))
        assert {(source - first, to - start) for _, source, to in of} == {(at, at) for at in range(len(tree))}
        first += len(tree)


@given(st.integers(0, 1 << 17))
def test_buckets_are_few_and_hold_all_keys(keys: int) -> None:
    """F8: a power of two of blocks, at most twice what is needed."""
    blocks = fixed.bucket(keys)
    assert blocks & (blocks - 1) == 0 and keys <= blocks * BLOCK < 2 * max(keys, 1) + 2 * BLOCK


def softmax(q: Tensor, kv: Tensor, seen: list[int]) -> Tensor:
    """One row's attention, in float64 and with no tricks."""
    keys, values = kv.double().chunk(2)
    rows = []
    for head, query in enumerate(q.double()):
        of = head // (q.shape[0] // keys.shape[0])
        weights = torch.softmax(keys[of, seen] @ query * query.numel() ** -0.5, 0)
        rows.append(weights @ values[of, seen])
    return torch.cat(rows)


@pytest.mark.parametrize("window", [0, 50, 2000])
def test_attention_sees_what_it_should_and_nothing_else(window: int) -> None:
    """N3: over blocks, one that the cache ends in, and rows of its own, against a softmax in float64."""
    made = torch.Generator().manual_seed(1)
    kvs = [torch.randn(4, rows, 8, generator=made) for rows in (2700, 40)]
    tree, chain = [-1, 0, 1, 0, 3, -1], [-1, 0, 1]
    caches = [KV(1, 2, kv.shape[1], 8, torch.float32, CPU) for kv in kvs]
    rounds = [Rows(caches[0], [0] * 6, 2650, tree, 6), Rows(caches[1], [0] * 3, 37, chain, 3)]
    plan = fixed.plan(rounds)
    q, new = torch.randn(MOST, 6, 8, generator=made), torch.randn(4, MOST, 8, generator=made)
    got = fixed.attend(q, new, kvs, fixed.Given(torch.tensor(plan.table), plan.blocks), window)
    at = 0
    for part, kv in zip(rounds, kvs, strict=True):
        assert torch.equal(kv[:, part.start : part.start + len(part.tokens)], new[:, at : at + len(part.tokens)])
        for path in paths(part.parents or ()):
            seen = [*range(part.start), *(part.start + row for row in path)]
            expected = softmax(q[at], kv, seen[-window:] if window else seen)
            assert torch.allclose(got[at].double(), expected, atol=1e-6)
            at += 1
    assert bool(torch.isfinite(got).all())


def recorded(**more: object) -> tuple[Graphs, Recorded]:
    """Graphs of a step that gives each row's token, and counts."""
    recorder = more.pop("recorder", Recorded())
    assert isinstance(recorder, Recorded)

    def step(given: fixed.Given, caches: object) -> Tensor:
        return given.tokens[:, None].float().expand(-1, 2)

    return Graphs(step, 2, CPU, recorder, **more), recorder  # type: ignore[arg-type]


def one(over: KV, token: int = 7, start: int = 0) -> list[Rows]:
    return [Rows(over, [token], start, draft=True)]


def test_a_recording_serves_every_round_of_its_caches_and_bucket() -> None:
    """F8: other tokens, other rows, trees: the same recording; other caches or more keys: another."""
    made, recorder = recorded()
    a, b, told = cache(9000), cache(9000), []
    made.told = told.append
    assert made.forward(one(a, 5)).tolist() == [[5, 5]]
    assert made.forward([Rows(a, [3, 4, 6], 500, [-1, 0, 0], 2, True)]).tolist() == [[4, 4], [6, 6]]
    assert (recorder.made, recorder.played, told) == (1, 2, [True, False])
    made.forward(one(a, start=2 * BLOCK))
    made.forward(one(b))
    assert made.forward([*one(a, 1), *one(b, 2)]).tolist() == [[1, 1], [2, 2]]
    assert (recorder.made, len(made)) == (4, 4)


def test_logits_stay_what_they_were_when_the_next_round_is_played() -> None:
    """F8: what a round gave is a copy."""
    made, _ = recorded()
    over = cache()
    first = made.forward(one(over, 5))
    made.forward(one(over, 6))
    assert first.tolist() == [[5, 5]]


def test_the_least_recently_played_goes_first() -> None:
    """J2: so many are kept and no more; one that was let go of is recorded anew."""
    made, recorder = recorded(most=2)
    a, b, c = cache(), cache(), cache()
    for over in (a, b, a, c, a):
        made.forward(one(over))
    assert (recorder.made, len(made)) == (3, 2)
    made.forward(one(b))
    assert (recorder.made, len(made)) == (4, 2)


def test_bytes_are_counted_and_given_back() -> None:
    """J2: what recordings hold is known, and goes when asked; the next round is recorded anew and is right."""
    made, recorder = recorded()
    over = cache()
    empty = made.graph_bytes
    made.forward(one(over))
    table = MOST * (OWN + OF_PART) * 8
    assert made.graph_bytes == empty + 1000 + table
    assert made.free() == 1000 and made.graph_bytes == empty + table and len(made) == 0
    assert made.forward(one(over, 9)).tolist() == [[9, 9]] and recorder.made == 2


def test_a_recording_that_fails_ends_recording_not_the_round(capfd: pytest.CaptureFixture[str]) -> None:
    """F8: what is recorded goes on, all else runs the same calls; one sentence says so, without the error's text."""
    recorder = Recorded(fails=1)
    made, _ = recorded(recorder=recorder)
    a, b, told = cache(), cache(), []
    made.forward(one(a))
    made.told = told.append
    assert made.forward(one(b, 8)).tolist() == [[8, 8]] and told == [True, False]
    assert made.forward(one(b, 4)).tolist() == [[4, 4]] and told == [True, False]
    played = recorder.played
    made.forward(one(a))
    assert recorder.played == played + 1
    assert capfd.readouterr().err == "no more rounds are recorded as graphs: RuntimeError\n"


def test_a_recording_is_told(tiny: Decoder) -> None:
    """L6: the worker says that it has begun and that it is over; of a model without graphs it says nothing."""
    said: list[FromEngine] = []
    line = cast(Line, SimpleNamespace(post=said.append))
    tell_of_graphs(tiny, 3, line)
    tiny.record(Recorded())
    tell_of_graphs(tiny, 3, line)
    tiny.forward(one(tiny.new_cache(10)))
    assert said == [OwnWork(3, "graph capture", True), OwnWork(3, "graph capture", False)]


def test_rounds_of_other_slots_are_not_recorded() -> None:
    """M6: with ``serves``, rounds of other caches or with one run the same calls unrecorded."""
    a, b = cache(), cache()
    made, recorder = recorded(serves=[a])
    for parts in (one(a), one(b), [*one(a), *one(b)]):
        made.forward(parts)
    assert recorder.made == recorder.played == 1


@pytest.mark.parametrize(("side_graphs", "made"), [(True, 2), (False, 1)])
def test_side_graphs_off_leaves_the_first_slots(side_graphs: bool, made: int) -> None:
    """M6: with the flag off no round of a side slot is recorded, a joint one neither."""
    bench = Bench(2)
    a, b = bench.loaded.caches[:] = [cache(), cache()]
    held, recorder = recorded()
    bench.loaded.model.graphs = held  # type: ignore[attr-defined]
    config = msgspec.structs.replace(FAKE, parallel=2, side_graphs=side_graphs)
    Engine(config, bench.loaded, bench.line, Failpoints())
    for of in (a, b):
        assert isinstance(of, KV)
        held.forward(one(of))
    assert recorder.made == made


FAMILIES = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 40}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fixed_round_is_the_models_round(tmp_path: Path, family: str) -> None:
    """N3: in float32 within 1e-5 of ``forward``, the caches' rows near too; several sequences, chains and trees."""
    name, changes = FAMILIES[family]
    model = served(reference(name, **changes), tmp_path, exact=True)
    assert isinstance(model, Decoder)
    made = torch.Generator().manual_seed(2)
    trees = [[-1, 0, 0, 2, 3, -1], [-1, 0, 1, 2], [-1]]
    rounds: list[list[Rows]] = [[], []]
    for tree, start in zip(trees, (150, 20, 97), strict=True):
        prompt = torch.randint(0, 320, (start,), generator=made).tolist()
        tokens = torch.randint(0, 320, (len(tree),), generator=made).tolist()
        for side in rounds:
            over = model.new_cache(200)
            model.forward([Rows(over, prompt, 0)])
            side.append(Rows(over, tokens, start, tree, len(tree), draft=True))
    expected = model.forward(rounds[0])
    got = Graphs(model._fixed, model.vocab, CPU, Recorded()).forward(rounds[1])
    assert float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 1e-5
    for theirs, ours in zip(rounds[0], rounds[1], strict=True):
        assert isinstance(theirs.cache, KV) and isinstance(ours.cache, KV)
        assert torch.allclose(theirs.cache.all, ours.cache.all, atol=1e-4)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A tiny model in bfloat16 that torch computes, of a window that the trial has room in."""
    monkeypatch.setattr(lib, "kernels", lambda: None)
    path = write_gguf(tmp_path / "tiny.gguf", {"": "BF16"}, extra={"llama.context_length": 3200})
    made = build(open_checkpoint(path))
    assert isinstance(made, Decoder)
    return made


def test_the_trial_lets_graphs_serve_and_rounds_go_through_them(tiny: Decoder) -> None:
    """F8: after it ``forward`` of rounds is the graphs', of chunks not, and the trial's recordings are gone."""
    recorder = Recorded()
    tiny.record(recorder)
    assert tiny.graphs is not None and tiny.alike == MOST
    assert recorder.nbytes == 0 and len(tiny.graphs) == 0 and recorder.made > 0
    over, made = tiny.new_cache(100), recorder.made
    tiny.forward([Rows(over, [1, 2, 3], 0)])
    assert recorder.made == made
    tiny.forward(one(over, 5, 3))
    assert recorder.made == made + 1
    with pytest.raises(ValueError, match="do not fit"):
        tiny.forward(one(over, 5, 100))


def test_rounds_through_graphs_come_out_as_alone(tiny: Decoder) -> None:
    """F8: a joint round's rows, a chain and a tree, are bit for bit those of rounds of one row each."""
    tiny.record(Recorded())
    assert tiny.graphs is not None
    joint, expected = [], []
    for start, tree in ((130, [-1, 0, 0, 2, 3]), (61, [-1, 0, 1, 2, 3, 4])):
        both, tokens = (tiny.new_cache(180), tiny.new_cache(180)), [start + at for at in range(len(tree))]
        for over in both:
            tiny.forward([Rows(over, [7 * at % 320 for at in range(start)], 0)])
        joint.append(Rows(both[0], tokens, start, tree, len(tree), draft=True))
        for path in paths(tree):
            rows = [tiny.forward(one(both[1], tokens[row], start + depth)) for depth, row in enumerate(path)]
            expected.append(rows[-1])
    assert torch.equal(tiny.forward(joint), torch.cat(expected))


def test_the_trial_finds_what_is_wrong(tiny: Decoder, capfd: pytest.CaptureFixture[str]) -> None:
    """F8: other numbers when played, other numbers than a step's, rows that are not their own, no recording: eager."""

    def refused(step: graphs.Step, recorder: Recorded, window: int = 3200) -> str:
        made = Graphs(step, tiny.vocab, CPU, recorder)
        assert tried(made, tiny.forward, tiny.new_cache, window, 0.05) is None
        return capfd.readouterr().err

    def other(given: fixed.Given, caches: object) -> Tensor:
        return tiny._fixed(given, caches).mul_(2)  # type: ignore[arg-type]

    def uneven(given: fixed.Given, caches: object) -> Tensor:
        logits = tiny._fixed(given, caches)  # type: ignore[arg-type]
        return logits * (1 + 1e-6 * (given.tokens != 0).sum())

    def longer(given: fixed.Given, caches: object) -> Tensor:
        return tiny._fixed(given, caches) * (1 + 1e-6 * given.blocks)  # type: ignore[arg-type]

    assert "could not be recorded" in refused(tiny._fixed, Recorded(fails=0))
    assert "not those of other steps" in refused(other, Recorded())
    for step in (uneven, longer):
        assert "a row's numbers depend on its round" in refused(step, Recorded())
    assert "too short" in refused(tiny._fixed, Recorded(), 60)
    spoiled = Recorded()
    made = Graphs(tiny._fixed, tiny.vocab, CPU, spoiled)
    spoiled._spoil = lambda: made._logits.mul_(1.5)  # type: ignore[assignment, return-value]
    assert tried(made, tiny.forward, tiny.new_cache, 3200, 0.05) is None
    assert "a recorded round gave other numbers" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_rounds_are_recorded_on_cuda(tmp_path: Path, kind: str) -> None:
    """N4: the trial passes there, a recorded round repeats bit for bit, and its memory is counted and given back."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": kind}, extra={"llama.context_length": 3200})
    model = build(open_checkpoint(path), device="cuda")
    assert isinstance(model, Decoder) and model.graphs is not None and model.alike == MOST
    over = model.new_cache(3200)
    model.forward([Rows(over, [7 * at % 320 for at in range(1500)], 0)])
    first = model.forward(one(over, 5, 1500))
    assert len(model.graphs) == 1 and torch.equal(model.forward(one(over, 5, 1500)), first)
    tree = [Rows(over, [5, 6, 7, 8], 1500, [-1, 0, 0, 2], 4, draft=True)]
    assert torch.equal(model.forward(tree)[:1], first)
    assert model.graphs.graph_bytes > 0
    model.graphs.free()
    assert len(model.graphs) == 0 and torch.equal(model.forward(one(over, 5, 1500)), first)
