"""engine/native/step.py: the fused step, against float32 and against itself in every other arrangement of its rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import accuracy
from benchmarks.accuracy import Distance
from engine.models import dense, layers
from engine.models.batch import Rows
from engine.models.cache import KV
from engine.models.dense import Decoder, Layer
from engine.native import build, lib, step
from engine.sampling import LogitsNotFinite, highest
from engine.weights.checkpoint import open_checkpoint
from engine.weights.config import Config
from engine.weights.embedded import embedded_model
from engine.weights.linear import Linear, Side, linear
from engine.weights.stored import Stored
from tests import checkpoints
from tests.checkpoints import blocks

pytestmark = pytest.mark.skipif(lib.kernels() is None, reason=f"no native library: {build.why()}")
CPU = torch.device("cpu")

WINDOW = 300
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"qkv_bias": True, "kv_heads": 4},
    "normed": {"qk_norm": True, "head_dim": 24, "hidden": 96, "ff": 160},
    "sliding": {"windows": (20, 0), "head_dim": 80, "kv_heads": 1, "heads": 2, "hidden": 160},
    "partial": {"rotary": 8},
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(shape: str, kind: str = "Q4_1", *, exact: bool = False) -> Decoder:
    """A decoder of two layers with the sizes of ``shape``; the same weights natively and in float32."""
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ff": 96}
    sizes |= {"vocab": 200, "eps": 1e-5, "rope_base": 1e4, "window": WINDOW, "tied": True}
    config = Config(**sizes | SHAPES[shape])
    width, wide, narrow = config.head_dim, config.heads * config.head_dim, config.kv_heads * config.head_dim
    config.check()

    def weight(rows: int, cols: int, seed: int, kind: str = kind, table: bool = False) -> Linear:
        if kind == "F32":
            data = (random(rows, cols, seed=seed) * cols**-0.5).view(torch.uint8)
        else:
            data = torch.from_numpy(blocks(kind, rows, cols, seed, 0.4 * cols**-0.5 / (16 if kind == "Q4_1" else 127)))
        return linear(Stored(kind, rows, cols, data), CPU, exact=exact, table=table)

    def layer(index: int) -> Layer:
        at = 10 * index
        qkv = [weight(rows, config.hidden, at + i) for i, rows in enumerate((wide, narrow, narrow))]
        return Layer(
            layers.norm_weight(1 + random(config.hidden, seed=at) / 9),
            Side(qkv),
            weight(config.hidden, wide, at + 3),
            layers.norm_weight(1 + random(config.hidden, seed=at + 1) / 9),
            weight(2 * config.ff, config.hidden, at + 4),
            weight(config.hidden, config.ff, at + 5),
            random(wide + 2 * narrow, seed=at + 6) / 9 if config.qkv_bias else None,
            layers.norm_weight(1 + random(width, seed=at + 7) / 9) if config.qk_norm else None,
            layers.norm_weight(1 + random(width, seed=at + 8) / 9) if config.qk_norm else None,
            config.seen(index),
        )

    table = weight(config.vocab, config.hidden, 99, "Q8_0" if kind != "F32" else "F32", True)
    turns = layers.rotations(layers.frequencies(config, None), WINDOW, CPU)
    norm = layers.norm_weight(1 + random(config.hidden, seed=98) / 9)
    stack = [layer(i) for i in range(config.layers)]
    made = Decoder(config, table, stack, norm, table, turns, 0, device=CPU, exact=exact)
    made.use(1)
    return made


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(made: Decoder, ids: list[int]) -> tuple[Tensor, KV]:
    cache = made.new_cache(WINDOW)
    return made.forward([Rows(cache, ids, 0, wanted=len(ids))]), cache


@pytest.mark.parametrize("shape", SHAPES)
def test_the_native_step_is_the_model(shape: str) -> None:
    """N1: plain weights: logits of a prompt within what float16 keys and values cost; the path says native."""
    native, ids = model(shape, "F32"), tokens(150)
    assert native.path == step.path() and native.alike == step.ALIKE
    expected, _ = whole(model(shape, "F32", exact=True), ids)
    got, _ = whole(native, ids)
    assert float((got - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_the_native_step_with_quantised_weights(shape: str) -> None:
    """N3: four-bit weights, activations in eight bits: a few per cent of a random model's logits."""
    ids = tokens(150)
    expected, _ = whole(model(shape, exact=True), ids)
    got, _ = whole(model(shape), ids)
    assert float((got - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_reaches_the_logits(kind: str, bad: float) -> None:
    """F8: rounding to eight bits and a softmax's maximum hide nothing that went wrong before: the run ends by it."""
    for spoiled in ("attn_norm", "ffn_norm", "norm", "values"):
        made = model("llama", kind)
        _, cache = whole(made, tokens(5))
        if spoiled == "norm":
            made._norm[3] = bad
        elif spoiled == "values":
            cache.all[0, 3, 1, 2] = bad
        else:
            getattr(made._layers[0], spoiled)[3] = bad
        with pytest.raises(LogitsNotFinite):
            highest(made.forward([Rows(cache, [7], 5)])[0].numpy())
    made = model("llama", kind)
    _, cache = whole(made, tokens(5))
    cache.all[0, 0, 1, 2] = math.nan  # a key; an infinite one may rightly be seen by nobody
    with pytest.raises(LogitsNotFinite):
        highest(made.forward([Rows(cache, [7], 5)])[0].numpy())


@pytest.mark.parametrize("kind", ["Q4_1", "F32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_the_whole(shape: str, kind: str) -> None:
    """N2: logits and rows of the cache are the same bits by chunks of 1, 7 and 64, on one thread and two."""
    made, ids = model(shape, kind), tokens(150)
    expected, kept = whole(made, ids)
    for size, threads in ((1, 1), (7, 2), (64, 2), (150, 2)):
        made.use(threads)
        cache = made.new_cache(WINDOW)
        steps = [ids[at : at + size] for at in range(0, len(ids), size)]
        got = [made.forward([Rows(cache, part, i * size, wanted=len(part))]) for i, part in enumerate(steps)]
        assert torch.equal(torch.cat(got), expected), (size, threads)
        assert torch.equal(cache.all, kept.all)
    made.use(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_is_its_paths(shape: str) -> None:
    """D4: each row of a tree is bit for bit that of a plain run over its path; what is kept goes on as that run."""
    made, prompt = model(shape), tokens(70)
    parents = [-1, 0, 1, 0, 3, 3, -1, 6]
    drafted = tokens(len(parents), 5)
    _, cache = whole(made, prompt)
    before = cache.all.clone()
    got = made.forward([Rows(cache, drafted, 70, parents, len(parents), draft=True)])
    for row in range(len(parents)):
        path: list[int] = []
        at = row
        while at >= 0:
            path, at = [at, *path], parents[at]
        plain = made.new_cache(WINDOW)
        plain.all.copy_(before)
        alone = [made.forward([Rows(plain, [drafted[i]], 70 + depth)]) for depth, i in enumerate(path)]
        assert torch.equal(got[row], alone[-1][0]), row
        if path == [0, 3, 5]:
            kept = plain
    cache.keep(70, [0, 3, 5])
    assert torch.equal(cache.all[:, :, :73], kept.all[:, :, :73])
    following = [made.forward([Rows(c, [9], 73)]) for c in (cache, kept)]
    assert torch.equal(*following)


def test_sequences_in_one_pass_are_each_alone() -> None:
    """S2: 2, 4 and 8 sequences, of one row, of a chain, a tree and a chunk: the bits of each alone."""
    made = model("llama")
    prompts = [tokens(n, n) for n in (3, 64, 65, 128, 20, 90, 1, 70)]
    parents = [-1, 0, 0, 1]

    def part(cache: KV, i: int) -> Rows:
        start = len(prompts[i])
        if i % 4 == 2:
            return Rows(cache, tokens(4, 40 + i), start, parents, 4, draft=True)
        return Rows(cache, tokens((1, 5, 0, 33)[i % 4], 40 + i), start, wanted=1 + i % 2, draft=i % 2 == 0)

    alone = []
    for i, prompt in enumerate(prompts):
        _, cache = whole(made, prompt)
        part_alone = part(cache, i)
        alone.append(made.forward([part_alone]))
    for count in (2, 4, 8):
        for threads in (1, 2):
            made.use(threads)
            caches = [whole(made, prompt)[1] for prompt in prompts[:count]]
            got = made.forward([part(cache, i) for i, cache in enumerate(caches)])
            assert torch.equal(got, torch.cat(alone[:count])), (count, threads)
    made.use(1)


def test_nothing_wanted_and_nothing_that_does_not_fit() -> None:
    """N2: a chunk in the middle gives no logits; rows behind the cache and unknown tokens are refused."""
    made = model("llama")
    cache = made.new_cache(10)
    assert made.forward([Rows(cache, [1, 2, 3], 0, wanted=0)]).shape == (0, 200)
    for bad in (Rows(cache, [1], 10), Rows(cache, [200], 3), Rows(cache, [-1], 3), Rows(cache, [], 3)):
        with pytest.raises(ValueError):
            made.forward([bad])


def test_two_models_live_side_by_side() -> None:
    """N1: a step holds nothing that another could touch."""
    first, second = model("llama"), model("sliding")
    ids = tokens(30)
    expected = whole(first, ids)[0]
    other = whole(second, ids)[0]
    del second
    assert torch.equal(whole(first, ids)[0], expected)
    assert other.shape == expected.shape


def test_shapes_that_torch_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: without the library the model runs in torch and says so."""
    monkeypatch.setattr(lib, "kernels", lambda: None)
    made = model("llama")
    assert made.path.startswith("torch")
    assert whole(made, tokens(5))[0].shape == (5, 200)


def test_every_kind_of_file_runs_natively(tmp_path: Path) -> None:
    """N3: mixed kinds, as Q4_K_M files have them: matrices side by side."""
    kinds = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "ffn_up": "Q5_K"}
    checkpoint = open_checkpoint(checkpoints.write_gguf(tmp_path / "mixed.gguf", kinds))
    native, exact = checkpoints.build(checkpoint), checkpoints.build(checkpoint, exact=True)
    assert native.path == step.path()
    ids = np.random.default_rng(0).integers(0, 320, 60).tolist()
    got, expected = (m.forward([Rows(m.new_cache(60), ids, 0, wanted=60)]) for m in (native, exact))
    assert float((got - expected).norm() / expected.norm()) < 0.06


def test_the_embedded_model_stays_near_float32() -> None:
    """N3: mean KL a token at most 3.5e-3 over 512 positions of real text; decode and prefill are the same bits."""
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    checkpoint = open_checkpoint(path)
    ids = accuracy.tokenised(checkpoint, accuracy.TEXT.read_text(encoding="utf-8"), 512)
    with torch.inference_mode():
        expected = accuracy.prefill(checkpoints.build(checkpoint, exact=True), ids)
        native = checkpoints.build(checkpoint)
        assert native.path == step.path()
        got = accuracy.prefill(native, ids)
        distance = Distance.of("prefill", got, expected)
        assert distance.mean <= 3.5e-3 and distance.same > 0.95, distance
        assert torch.equal(accuracy.decode(native, ids[:96], 1), got[:96])


def test_the_embedded_model_with_and_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: greedy, fed the same text, both choose the same tokens but where two are nearly as likely."""
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    checkpoint = open_checkpoint(path)
    ids = accuracy.tokenised(checkpoint, accuracy.TEXT.read_text(encoding="utf-8"), 96)
    native = accuracy.prefill(checkpoints.build(checkpoint), ids)
    monkeypatch.setattr(lib, "kernels", lambda: None)
    monkeypatch.setattr(dense.Decoder, "even", lambda self: None)
    torch_only = accuracy.prefill(checkpoints.build(checkpoint), ids)
    a, b = native.log_softmax(-1), torch_only.log_softmax(-1)
    chosen = a.argmax(-1, keepdim=True)
    lost = b.amax(-1) - b.gather(-1, chosen)[:, 0]
    assert float(lost.max()) < 0.3
