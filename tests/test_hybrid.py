"""engine/models/hybrid.py and its weights: the same numbers as transformers, and rows that come out alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.attention import paths
from engine.models.batch import Rows
from engine.models.hybrid import Hybrid
from engine.models.hybrid_cache import HybridCache
from engine.native import lib
from engine.weights.checkpoint import CheckpointError, open_checkpoint
from engine.weights.hybrid import HybridConfig
from tests.checkpoints import alone, build
from tests.hybrids import VOCAB, load, nest, reference, save

TOKENS = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(2))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
FORMS: dict[str, dict[str, Any]] = {
    "one feed-forward, untied": {},
    "one feed-forward, tied, more keys, all of a head turned": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "experts, untied": {"experts": True, "layer_types": ["full_attention", "linear_attention"] * 2},
    "experts, tied, yarn": {
        "experts": True,
        "tie_word_embeddings": True,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    },
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the worker runs; the number of threads is put back."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[False, True], ids=["one", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return load(save(reference(experts=request.param), tmp_path_factory.mktemp("hybrid")))


def near(got: Tensor, expected: Tensor) -> float:
    """Relative error."""
    return float((got - expected).norm() / expected.norm())


def chunked(model: Hybrid, cache: HybridCache, tokens: Tensor, size: int) -> Tensor:
    """Logits of every row."""
    starts = range(0, tokens.numel(), size)
    return torch.cat([alone(model, tokens[start : start + size], cache, start, all_rows=True) for start in starts])


def rounds(model: Hybrid, cache: HybridCache, logits: Tensor, start: int, n: int) -> tuple[list[int], Tensor]:
    """``n`` tokens by rounds of one row, as the worker decodes; the logits of each."""
    ids, seen = [], [logits]
    for row in range(start, start + n):
        ids.append(int(seen[-1].argmax()))
        seen.append(model.forward([Rows(cache, ids[-1:], row, draft=True)]))
        cache.keep(row, [0])
    return ids, torch.cat(seen[:-1])


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_agrees_with_transformers(tmp_path: Path, form: str) -> None:
    """N3: a prompt of 300 rows, whole and in chunks, and 64 rows decoded; where two tokens lead, by more than errs."""
    theirs = reference(**FORMS[form])
    model, prompt = load(save(theirs, tmp_path)), TOKENS[:300]
    expected = theirs(prompt[None]).logits[0]
    for size in (1, 7, 64, 300):
        cache = model.new_cache(364)
        assert near(chunked(model, cache, prompt, size), expected) < 1e-4, size
    last = chunked(model, cache, prompt, 300)[-1:]
    ids, logits = rounds(model, cache, last, 300, 64)
    whole = theirs(torch.cat([prompt, torch.tensor(ids[:-1])])[None]).logits[0, 299:]
    assert near(logits, whole) < 1e-4
    assert whole.argmax(-1).tolist() == ids
    best = whole.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 2 * float((logits - whole).abs().max())


def test_a_folder_of_a_model_that_sees(tmp_path: Path) -> None:
    """N3: the text part of a larger model: its settings and tensors lie one level down, its eyes are left."""
    theirs = reference()
    plain = load(save(theirs, tmp_path / "plain"))
    nested = load(nest(save(theirs, tmp_path / "nested")))
    step = [chunked(model, model.new_cache(20), TOKENS[:20], 20) for model in (plain, nested)]
    assert torch.equal(*step)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """N3: experts lie each in tensors of its own, or all of a layer in two."""
    apart = save(reference(experts=True), tmp_path / "apart")
    joined = save(reference(experts=True), tmp_path / "joined")
    tensors = load_file(joined / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        taken = [{part: tensors.pop(f"{prefix}.{i}.{part}.weight") for part in ("gate_proj", "up_proj", "down_proj")}
                 for i in range(6)]  # fmt: skip
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([t["gate_proj"], t["up_proj"]]) for t in taken])
        tensors[f"{prefix}.down_proj"] = torch.stack([t["down_proj"] for t in taken])
    save_file(tensors, joined / "model.safetensors")
    steps = [chunked(model, model.new_cache(20), TOKENS[:20], 20) for model in (load(apart), load(joined))]
    assert torch.equal(*steps)


def test_half_precision_is_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: bfloat16 weights and rows, without the native library; the state stays in float32."""
    monkeypatch.setattr(lib, "kernels", lambda: None)
    theirs = reference(half=True)
    folder = save(theirs, tmp_path)
    halved = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halved, folder / "model.safetensors")
    model = load(folder, exact=False)
    cache = model.new_cache(64)
    assert near(chunked(model, cache, TOKENS[:64], 64), theirs(TOKENS[None, :64]).logits[0]) < 0.06
    assert model.weights_bytes < 1.15 * (folder / "model.safetensors").stat().st_size
    assert cache.state.delta.dtype is torch.float32 and cache.kv.all.dtype is torch.bfloat16
    assert model.alike == 32 and model.path == "torch cpu"


def test_what_it_says_of_itself(model: Hybrid) -> None:
    """I8: bytes of rows and states are those of a cache."""
    assert model.alike == 32 and not model.mtp and model.window == 512 and model.vocab == VOCAB
    small, large = model.new_cache(10), model.new_cache(30)
    assert large.nbytes - small.nbytes == 20 * model.kv_bytes_per_row
    assert small.nbytes == 10 * model.kv_bytes_per_row + model.state_bytes
    assert model.workspace(64, 64) > model.workspace(8, 64) > 0


def test_rows_that_do_not_fit(model: Hybrid) -> None:
    """I6: a step over a cache's end is refused before anything is written."""
    cache = model.new_cache(8)
    with pytest.raises(ValueError, match="rows 0 to 9 do not fit into 8"):
        alone(model, TOKENS[:9], cache, 0)
    assert not bool(cache.kv.all.any()) and cache.stands == 0


TREES = st.lists(st.integers(-1, 7), min_size=1, max_size=8).map(
    lambda asked: [min(parent, row - 1) for row, parent in enumerate(asked)]
)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees=st.lists(TREES, min_size=1, max_size=3), seed=st.integers(0, 999))
def test_rows_of_a_joint_round_come_out_as_alone(model: Hybrid, trees: list[list[int]], seed: int) -> None:
    """M6: bit for bit, whatever else a step holds: each row of several trees as the last of rounds of one row."""
    made = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (3 + 5 * i,), generator=made) for i in range(len(trees))]
    drafts = [torch.randint(0, VOCAB, (len(tree),), generator=made).tolist() for tree in trees]
    parts, expected = [], []
    for prompt, draft, tree in zip(prompts, drafts, trees, strict=True):
        cache, start = model.new_cache(64), prompt.numel()
        alone(model, prompt, cache, 0)
        for path in paths(tree):
            plain = model.new_cache(64)
            alone(model, prompt, plain, 0)
            for depth, row in enumerate(path):
                logits = model.forward([Rows(plain, draft[row : row + 1], start + depth, draft=True)])
                plain.keep(start + depth, [0])
            expected.append(logits)
        parts.append(Rows(cache, draft, start, tree, len(draft), draft=True))
    assert torch.equal(model.forward(parts), torch.cat(expected))


def test_a_chunk_beside_rounds(model: Hybrid) -> None:
    """M6: a prompt's step in one call with a round: both as alone."""
    prompt, caches = TOKENS[:40], [model.new_cache(64) for _ in range(3)]
    alone(model, prompt, caches[0], 0)
    alone(model, prompt, caches[2], 0)
    round_ = model.forward([Rows(caches[2], [7], 40, draft=True)])
    both = model.forward([Rows(caches[0], [7], 40, draft=True), Rows(caches[1], prompt.tolist(), 0, wanted=2)])
    chunk = model.forward([Rows(model.new_cache(64), prompt.tolist(), 0, wanted=2)])
    assert torch.equal(both, torch.cat([round_, chunk]))


def test_a_step_that_asks_for_nothing(model: Hybrid) -> None:
    """G1: a prompt's inner steps want no logits; what they leave is the same."""
    silent, spoken = model.new_cache(20), model.new_cache(20)
    assert model.forward([Rows(silent, TOKENS[:16].tolist(), 0, wanted=0)]).shape == (0, VOCAB)
    alone(model, TOKENS[:16], spoken, 0)
    assert torch.equal(silent.state.delta, spoken.state.delta) and torch.equal(silent.kv.all, spoken.kv.all)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("experts", [False, True])
def test_on_cuda(tmp_path: Path, experts: bool) -> None:
    """N3: the same numbers as on the CPU, rows alike, and drafts folded in as plain rounds."""
    folder = save(reference(experts=experts), tmp_path, mtp=True)
    cpu, cuda = load(folder), load(folder, device="cuda")
    assert cuda.alike == 32
    caches = [model.new_cache(80) for model in (cpu, cuda, cuda)]
    logits = [
        chunked(model, cache, TOKENS[:60], 30).cpu() for model, cache in zip((cpu, cuda, cuda), caches, strict=True)
    ]
    assert near(logits[1], logits[0]) < 1e-3 and torch.equal(logits[1], logits[2])
    cuda.forward([Rows(caches[1], [5, 6, 7, 8], 60, [-1, 0, 0, 2], draft=True)])
    caches[1].keep(60, [0, 2, 3])
    for row, token in enumerate([5, 7, 8], 60):
        cuda.forward([Rows(caches[2], [token], row, draft=True)])
        caches[2].keep(row, [0])
    assert torch.equal(*(cuda.forward([Rows(cache, [9], 63, draft=True)]) for cache in caches[1:]))
    assert len(cuda.propose(caches[1], 9, 3)) == 3


def changed(folder: Path, **changes: Any) -> Path:
    """The folder's config.json with some settings changed; None takes one away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "one kind alone"),
        ({"linear_num_value_heads": 3}, "recurrent layers cannot be"),
        ({"linear_conv_kernel_dim": 9}, "recurrent layers cannot be"),
        ({"linear_key_head_dim": None}, "sizes"),
        ({"linear_conv_kernel_dim": 3}, "conv1d"),
        ({"num_experts": 4}, "sizes"),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, "does not use here"),
    ],
)
def test_a_configuration_that_is_not_understood(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """N1: refused by name, before or while tensors are read."""
    folder = changed(save(reference(), tmp_path), **changes)
    with pytest.raises(CheckpointError, match=said):
        build(open_checkpoint(folder))


def test_layer_types_may_be_said_by_an_interval(tmp_path: Path) -> None:
    """N1: each so-many-th layer attends; four where it is not said."""
    folder = changed(save(reference(), tmp_path), layer_types=None)
    config = open_checkpoint(folder).config
    assert isinstance(config, HybridConfig) and config.attends == (False, False, False, True)
    changed(folder, full_attention_interval=2)
    assert open_checkpoint(folder).config.attends == (False, True, False, True)  # type: ignore[attr-defined]
