"""engine/models/dense.py: the same numbers as transformers, and steps that repeat bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.models.registry import Model
from engine.weights import quants
from engine.weights.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from engine.weights.config import Config
from engine.weights.embedded import embedded_model
from engine.weights.folder import canonical
from tests.checkpoints import alone, build, gguf_of, write_gguf, write_tokenizer

TEXT = Path(__file__).resolve().parent.parent / "fixtures" / "texts" / "accuracy.txt"

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
SHARED = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama: untied, fewer kv heads, wide heads": ("Llama", {"num_key_value_heads": 2, "head_dim": 32}),
    "llama: tied, one kv head": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama: llama3 scaling": ("Llama", {"num_key_value_heads": 1, "head_dim": 64, "rope_parameters": LLAMA3}),
    "llama: linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama: yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral: sliding windows": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 40}),
    "qwen2: bias": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2: bias, sliding windows from the second layer on": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    ),
    "qwen3: norm of heads, wide heads": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen3: norm of heads, yarn": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": SHARED}),
}
SEEDS = {"qwen2: bias, sliding windows from the second layer on": 4}
"""Prompts after which no two tokens come near each other."""
CHUNKS = (1, 7, 64, 300)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the worker runs; the number of threads is put back."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def reference(family: str = "Llama", **changes: Any) -> Any:
    """transformers' own model, every weight of it random: it begins with norms of 1 and biases of 0."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 320, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.1}
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.uniform_(-1, 1).add_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def served(theirs: Any, path: Path, **more: Any) -> Model:
    """Our model of the folder that transformers writes."""
    theirs.save_pretrained(path)
    write_tokenizer(path, 320)
    return build(open_checkpoint(path), **more)


def near(got: Tensor, expected: Tensor) -> float:
    """Relative error."""
    return float((got - expected).norm() / expected.norm())


def furthest(got: Tensor, expected: Tensor) -> float:
    """Relative error of the worst row."""
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def greedy(model: Model, tokens: Tensor, n: int) -> tuple[list[int], Tensor]:
    """``n`` tokens decoded one by one behind ``tokens``, and the logits of each."""
    cache = model.new_cache(tokens.numel() + n)
    logits, ids, seen = alone(model, tokens, cache, 0), [], []
    for i in range(n):
        seen.append(logits)
        ids.append(int(logits.argmax()))
        if i + 1 < n:
            logits = alone(model, torch.tensor(ids[-1:]), cache, tokens.numel() + i)
    return ids, torch.cat(seen)


def agrees(model: Model, theirs: Any, tokens: Tensor, n: int) -> None:
    """Prefill logits within 1e-3, and the same ``n`` greedy tokens, their logits within 1e-3 too."""
    cache = model.new_cache(tokens.numel())
    assert near(alone(model, tokens, cache, 0, all_rows=True), theirs(tokens[None]).logits[0]) < 1e-3
    ids, logits = greedy(model, tokens, n)
    whole = theirs(torch.cat([tokens, torch.tensor(ids[:-1])])[None]).logits[0, tokens.numel() - 1 :]
    assert whole.argmax(-1).tolist() == ids
    assert near(logits, whole) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_transformers(tmp_path: Path, family: str) -> None:
    """N3: logits of a 300-token prompt, in chunks of any size, and of 64 greedy tokens within 1e-4; the tokens equal.

    The two likeliest tokens must be further apart than twice that, or equal tokens would say nothing.
    """
    theirs = reference(FAMILIES[family][0], **FAMILIES[family][1])
    model = served(theirs, tmp_path, exact=True)
    tokens = torch.randint(0, 320, (300,), generator=torch.Generator().manual_seed(SEEDS.get(family, 2)))
    ids, decoded = greedy(model, tokens, 64)
    whole = theirs(torch.cat([tokens, torch.tensor(ids[:-1])])[None]).logits[0]
    assert whole[299:].argmax(-1).tolist() == ids
    best, second = whole[299:].topk(2).values.unbind(-1)
    assert bool((best - second > 2e-4 * whole[299:].abs().amax(-1)).all())
    assert furthest(decoded, whole[299:]) < 1e-4
    for chunk in CHUNKS:
        cache = model.new_cache(300)
        rows = [alone(model, t, cache, i * chunk, all_rows=True) for i, t in enumerate(tokens.split(chunk))]
        assert furthest(torch.cat(rows), whole[:300]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served_near_transformers(tmp_path: Path, family: str) -> None:
    """N3: as it is served, by the native step where there is one, a prompt in two chunks and rows one by one."""
    theirs = reference(FAMILIES[family][0], **FAMILIES[family][1])
    model, tokens = served(theirs, tmp_path), torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(3))
    cache = model.new_cache(90)
    parts = [tokens[:50], tokens[50:80], *tokens[80:].split(1)]
    starts = [0, 50, *range(80, 90)]
    rows = [alone(model, part, cache, start, all_rows=True) for part, start in zip(parts, starts, strict=True)]
    assert near(torch.cat(rows), theirs(tokens[None]).logits[0]) < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_cuda(tmp_path: Path, family: str) -> None:
    """N3: the same numbers there, in float32."""
    theirs = reference(FAMILIES[family][0], **FAMILIES[family][1])
    model, tokens = served(theirs, tmp_path, exact=True, device="cuda"), torch.arange(120)
    cache = model.new_cache(120)
    rows = [alone(model, part, cache, i * 64, all_rows=True) for i, part in enumerate(tokens.split(64))]
    assert furthest(torch.cat(rows).cpu(), theirs(tokens[None]).logits[0]) < 1e-3


def test_a_part_of_each_head_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: partial_rotary_factor, against transformers' llama taught to leave the rest of a head as it is."""
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    whole = module.apply_rotary_pos_emb

    def part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        n = cos.shape[-1]
        turned = whole(q[..., :n], k[..., :n], cos, sin)
        return tuple(torch.cat([new, old[..., n:]], -1) for new, old in zip(turned, (q, k), strict=True))

    monkeypatch.setattr(module, "apply_rotary_pos_emb", part)
    rope = {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    theirs = reference("Llama", head_dim=32, num_key_value_heads=2, rope_parameters=rope)
    model = served(theirs, tmp_path, exact=True)
    tokens = torch.arange(100)
    got = alone(model, tokens, model.new_cache(100), 0, all_rows=True)
    assert furthest(got, theirs(tokens[None]).logits[0]) < 1e-4


CONVERTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {"num_key_value_heads": 2}),
    "llama, yarn": ("Llama", "llama", {"num_key_value_heads": 2, "rope_parameters": YARN}),
    "mistral": ("Mistral", "llama", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", "qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
}
YARN_KEYS = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 128,
    "rope__scaling__yarn_beta_fast": 8.0,
    "rope__scaling__yarn_beta_slow": 1.0,
}


@pytest.mark.parametrize("family", CONVERTED)
def test_every_familys_gguf_agrees_with_transformers(tmp_path: Path, family: str) -> None:
    """N3: the same weights as their converters leave them: q and k of llama's turned round, qwen's as they were."""
    name, arch, changes = CONVERTED[family]
    theirs = reference(name, **changes)
    keys = YARN_KEYS if "yarn" in family else {}
    path = gguf_of(tmp_path / "tiny.gguf", arch, theirs, neighbours=arch == "llama", **keys)
    tokens = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(2))
    model = build(open_checkpoint(path), exact=True)
    got = alone(model, tokens, model.new_cache(150), 0, all_rows=True)
    assert furthest(got, theirs(tokens[None]).logits[0]) < 1e-4


def test_shards_and_half_precision(tmp_path: Path) -> None:
    """N3: a folder in several bfloat16 or float16 files, served in its own type: close, and as small as the files."""
    for dtype in (torch.bfloat16, torch.float16):
        theirs = reference().to(dtype)
        theirs.save_pretrained(tmp_path / str(dtype), max_shard_size="200KB")
        assert len(list((tmp_path / str(dtype)).glob("*.safetensors"))) > 1
        write_tokenizer(tmp_path / str(dtype), 320)
        checkpoint = open_checkpoint(tmp_path / str(dtype))
        model = build(checkpoint)
        tokens = torch.arange(100)
        got = alone(model, tokens, model.new_cache(100), 0, all_rows=True)
        assert near(got, theirs.float()(tokens[None]).logits[0]) < 0.02
        assert model.weights_bytes < 1.15 * checkpoint.file_bytes


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    return open_checkpoint(path)


def transformers_order(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of q and k, as its converter documents it."""
    return weight.view(heads, weight.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def as_transformers(checkpoint: Checkpoint) -> Any:
    """transformers' model with a GGUF file's weights, decoded to float32."""
    transformers = pytest.importorskip("transformers")
    c: Config = checkpoint.config
    sizes = {"hidden_size": c.hidden, "intermediate_size": c.ff, "num_hidden_layers": c.layers}
    sizes |= {"num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "vocab_size": c.vocab}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, rms_norm_eps=c.eps, rope_theta=c.rope_base, tie_word_embeddings=True)
    )
    state = theirs.state_dict()
    for name, old in state.items():
        ours = "token_embd.weight" if name == "lm_head.weight" else canonical(name)
        assert ours is not None
        weight = quants.decode_stored(checkpoint.read(ours)).view(old.shape)
        heads = {"q_proj": c.heads, "k_proj": c.kv_heads}.get(name.split(".")[-2])
        state[name] = transformers_order(weight, heads) if heads else weight
    theirs.load_state_dict(state)
    return theirs.eval()


def test_the_embedded_model_agrees_with_transformers(embedded: Checkpoint) -> None:
    """N3: the GGUF file's float32 weights give transformers' logits within 1e-3, and its 64 greedy tokens."""
    from tokenizers import Tokenizer

    tokens = torch.tensor(Tokenizer.from_str(embedded.tokenizer_json).encode(TEXT.read_text()).ids[:48])
    agrees(build(embedded, exact=True, rows=256), as_transformers(embedded), tokens, 64)


MIXES = {
    "Q4_1, Q8_0 head": {"": "Q4_1", "token_embd": "Q8_0"},
    "Q4_0": {"": "Q4_0"},
    "Q8_0": {"": "Q8_0"},
    "K-quants": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K"},
    "BF16": {"": "BF16"},
    "F16": {"": "F16"},
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_format_runs_near_float32(tmp_path: Path, mix: str) -> None:
    """N3: served weights of each type, one row and many, stay near the same weights in float32."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", MIXES[mix]))
    model, exact = build(checkpoint), build(checkpoint, exact=True)
    tokens = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(3))
    expected = alone(exact, tokens, exact.new_cache(60), 0, all_rows=True)
    assert near(alone(model, tokens, model.new_cache(60), 0, all_rows=True), expected) < 0.03
    cache = model.new_cache(60)
    single = torch.cat([alone(model, t, cache, i) for i, t in enumerate(tokens.split(1))])
    assert near(single, expected) < 0.03


def test_the_files_own_divisors_are_used(tmp_path: Path) -> None:
    """N3: GGUF carries llama3 scaling as a tensor of divisors; all of them 2 is linear scaling by 2."""
    twos = {"rope_freqs.weight": np.full(32, 2, np.float32)}
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    tokens, seen = torch.arange(40), []
    for more in ({"tensors": twos}, {"extra": linear}, {}):
        model = build(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {}, **more)), exact=True)
        seen.append(alone(model, tokens, model.new_cache(40), 0))
    assert torch.equal(seen[0], seen[1]) and near(seen[0], seen[2]) > 1e-3


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return build(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", MIXES["Q4_1, Q8_0 head"])))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_same_chunks_give_the_same_bits(tiny: Model, chunk: int) -> None:
    """Decode, few rows and many rows alike; the cache too."""
    tokens = torch.arange(100)

    def once() -> tuple[Tensor, Tensor]:
        cache = tiny.new_cache(100)
        rows = [alone(tiny, t, cache, i * chunk, all_rows=True) for i, t in enumerate(tokens.split(chunk))]
        return torch.cat(rows), torch.stack(cache.layers)

    first, again = once(), once()
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_what_lies_behind_the_rows_does_not_matter(tiny: Model) -> None:
    """Old rows behind ``start + n`` (of a longer prompt, of a cut answer) are not seen."""
    clean, used = tiny.new_cache(100), tiny.new_cache(100)
    alone(tiny, torch.arange(100), used, 0)
    for start, n in ((0, 20), (20, 1), (21, 30)):
        tokens = torch.arange(start, start + n)
        assert torch.equal(alone(tiny, tokens, clean, start), alone(tiny, tokens, used, start))


def test_chunks_are_the_whole(tmp_path: Path) -> None:
    """In float32 the result does not depend on where a prompt was cut; only the last row's logits come by default."""
    model = build(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {})), exact=True)
    tokens = torch.arange(90)
    whole = alone(model, tokens, model.new_cache(90), 0, all_rows=True)
    assert whole.shape == (90, 320) and whole.dtype == torch.float32
    cache = model.new_cache(90)
    for start, end in ((0, 50), (50, 51), (51, 90)):
        last = alone(model, tokens[start:end], cache, start)
        assert last.shape == (1, 320)
        assert near(last[0], whole[end - 1]) < 1e-5


def test_sizes_are_what_is_there(tiny: Model) -> None:
    """M: rows cost what the cache says; a step's estimate grows with its rows."""
    cache = tiny.new_cache(40)
    assert cache.nbytes == 40 * tiny.kv_bytes_per_row and cache.rows == 40
    assert (tiny.window, tiny.vocab) == (128, 320)
    assert 0 < tiny.workspace(1, 0) < tiny.workspace(64, 0)


@pytest.mark.parametrize(("start", "n"), [(0, 41), (40, 1), (-1, 2), (0, 0)])
def test_rows_that_do_not_fit_are_refused(tiny: Model, start: int, n: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        alone(tiny, torch.zeros(n, dtype=torch.int64), tiny.new_cache(40), start)


def test_part_of_a_head_that_a_converter_turned_whole_is_refused(tmp_path: Path) -> None:
    """N3: llama's converter reorders whole heads, so that a part of one would be another part."""
    extra = {"llama.rope.dimension_count": 32}
    with pytest.raises(CheckpointError, match=r"part of each head \(rope\.dimension_count\)"):
        build(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {}, extra=extra)))


def test_a_shorter_window_may_be_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {}))
    assert build(checkpoint, rows=32).window == 32
    assert build(checkpoint, rows=999).window == 128


def test_a_tensor_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    """N3: a bias or an expert means another model; so does a shape that the configuration does not promise."""
    theirs = reference(attention_bias=True)
    theirs.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"attention_bias": true', '"attention_bias": false')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_output\.bias, which this architecture does not use"):
        build(open_checkpoint(tmp_path))
    reference().save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 160', '"intermediate_size": 128'))
    with pytest.raises(CheckpointError, match=r"ffn_gate\.weight is 160 × 96, and the configuration says 128 × 96"):
        build(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(CheckpointError, match=r"no tensor blk\.3\.attn_k\.weight"):
        build(open_checkpoint(tmp_path))
