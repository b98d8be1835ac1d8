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
from tests.checkpoints import alone, build, write_gguf, write_tokenizer

TEXT = Path(__file__).resolve().parent.parent / "fixtures" / "texts" / "accuracy.txt"

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "untied, fewer kv heads, wide heads": {"num_key_value_heads": 2, "head_dim": 32},
    "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama3 scaling": {"num_key_value_heads": 1, "head_dim": 64, "rope_parameters": LLAMA3},
    "linear scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the worker runs; the number of threads is put back."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def reference(**changes: Any) -> Any:
    """transformers' own model, random."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 320, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes))).eval()


def near(got: Tensor, expected: Tensor) -> float:
    """Relative error."""
    return float((got - expected).norm() / expected.norm())


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


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_agrees_with_transformers(tmp_path: Path, shape: str) -> None:
    """N3: float32 folders of every shape of the family; 64 greedy tokens the same."""
    theirs = reference(**SHAPES[shape])
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 320)
    model = build(open_checkpoint(tmp_path), exact=True)
    agrees(model, theirs, torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(2)), 64)


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
    """M: rows cost what the cache says; a step's estimate grows with its rows and what lies before them."""
    cache = tiny.new_cache(40)
    assert cache.nbytes == 40 * tiny.kv_bytes_per_row and cache.rows == 40
    assert (tiny.window, tiny.vocab) == (128, 320)
    assert 0 < tiny.workspace(1, 0) < tiny.workspace(64, 0) < tiny.workspace(64, 64)


@pytest.mark.parametrize(("start", "n"), [(0, 41), (40, 1), (-1, 2), (0, 0)])
def test_rows_that_do_not_fit_are_refused(tiny: Model, start: int, n: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        alone(tiny, torch.zeros(n, dtype=torch.int64), tiny.new_cache(40), start)


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
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k\.bias, which this architecture does not use"):
        build(open_checkpoint(tmp_path))
    reference().save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 160', '"intermediate_size": 128'))
    with pytest.raises(CheckpointError, match=r"ffn_gate\.weight is 160 × 96, and the configuration says 128 × 96"):
        build(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(CheckpointError, match=r"no tensor blk\.3\.attn_k\.weight"):
        build(open_checkpoint(tmp_path))
