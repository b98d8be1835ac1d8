"""Writes tiny checkpoints of random weights, in both formats, for the tests of engine/weights and engine/models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from tokenizers import pre_tokenizers
from torch import Tensor

from engine.models import registry
from engine.models.batch import Rows
from engine.models.cache import Cache
from engine.weights.checkpoint import Checkpoint
from engine.weights.folder import canonical

SPECIAL = ["<|start|>", "<|im_end|>", "<|pad|>"]
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where the float16 values of a block lie, in bytes."""


def blocks(kind: str, rows: int, cols: int, seed: int = 0, size: float = 0.02) -> np.ndarray[Any, Any]:
    """Random blocks, uint8 ``[rows, row bytes]``: every code equally likely, scales finite and about ``size``."""
    made = np.random.default_rng(seed)
    elements, width = (int(n) for n in GGML_QUANT_SIZES[GGMLQuantizationType[kind]])
    data = made.integers(0, 256, (rows * cols // elements, width), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = made.uniform(-size, size, (data.shape[0], 1)).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8)
    return data.reshape(rows, -1)


def build(
    checkpoint: Checkpoint, *, exact: bool = False, rows: int = 0, threads: int = 1, device: str = "cpu"
) -> registry.Model:
    """On one thread: two would wait for each other when tests run beside other work."""
    on = torch.device(device)
    return registry.build(checkpoint, device=on, threads=threads, rows=rows, progress=lambda *_: None, exact=exact)


def alone(model: registry.Model, tokens: Tensor, cache: Cache, start: int, *, all_rows: bool = False) -> Tensor:
    """A step of one sequence: logits of its last row, or of all."""
    wanted = tokens.numel() if all_rows else 1
    return model.forward([Rows(cache, tokens.tolist(), start, wanted=wanted)])


def byte_vocabulary(size: int) -> list[str]:
    """``size`` tokens of a byte-level vocabulary without merges: specials, the 256 bytes, and fillers."""
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    return tokens + [f"<filler{i}>" for i in range(size - len(tokens))]


SHAPES = {
    "token_embd": ("vocab", "hidden"),
    "attn_q": ("wide", "hidden"),
    "attn_k": ("narrow", "hidden"),
    "attn_v": ("narrow", "hidden"),
    "attn_output": ("hidden", "wide"),
    "ffn_gate": ("ff", "hidden"),
    "ffn_up": ("ff", "hidden"),
    "ffn_down": ("hidden", "ff"),
}
SIZES = {"vocab": 320, "hidden": 256, "wide": 256, "narrow": 128, "ff": 512}
EPS = "attention.layer_norm_rms_epsilon"
META: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": SIZES["hidden"],
    "feed_forward_length": SIZES["ff"],
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def write_gguf(
    path: Path,
    kinds: dict[str, str],
    *,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    arch: str = "llama",
) -> Path:
    """A llama of two layers. ``kinds``: part → ggml type, "" for all others. ``extra``, ``tensors``: more of them."""
    sizes = {f"{arch}.{key}": value for key, value in META.items()}
    writer = gguf_begun(path, arch, SIZES["vocab"], sizes | {f"{arch}.{EPS}": 1e-5} | (extra or {}))
    for layer in range(META["block_count"]):
        for part in (p for p in SHAPES if p != "token_embd"):
            _add(writer, f"blk.{layer}.{part}.weight", part, kinds, layer)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.full(SIZES["hidden"], 1.1, np.float32))
    _add(writer, "token_embd.weight", "token_embd", kinds, 7)
    writer.add_tensor("output_norm.weight", np.full(SIZES["hidden"], 0.9, np.float32))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    return gguf_ended(writer, path)


def gguf_of(path: Path, arch: str, theirs: Any, *, neighbours: bool = False, **extra: Any) -> Path:
    """The float32 weights of one of transformers' models. ``neighbours``: q and k as llama's converter puts them.

    ``extra``: further keys of the architecture, ``__`` for a dot.
    """
    config = theirs.config
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": theirs.model.layers[0].self_attn.head_dim,
        "attention.value_length": theirs.model.layers[0].self_attn.head_dim,
        EPS: config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    sizes |= {key.replace("__", "."): value for key, value in extra.items()}
    writer = gguf_begun(path, arch, config.vocab_size, {f"{arch}.{key}": value for key, value in sizes.items()})
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in theirs.named_parameters():
        ours = canonical(name)
        assert ours is not None
        values = weight.detach().numpy()
        part = ours.split(".")[-2]
        if neighbours and part in heads:
            # LlamaModel.permute of convert_hf_to_gguf.py
            halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        writer.add_tensor(ours, values)
    return gguf_ended(writer, path)


def gguf_begun(path: Path, arch: str, vocab: int, meta: dict[str, Any]) -> GGUFWriter:
    """A file with ``meta`` and a tokenizer of ``vocab`` tokens."""
    writer = GGUFWriter(path, arch)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_vocabulary(vocab - 1), "ab"])
    writer.add_token_types([3 if i < len(SPECIAL) else 1 for i in range(vocab)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[list] = writer.add_array
    for key, value in meta.items():
        add[type(value)](key, value)  # type: ignore[operator]
    return writer


def gguf_ended(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, part: str, kinds: dict[str, str], seed: int) -> None:
    rows, cols = (SIZES[n] for n in SHAPES[part])
    kind = kinds.get(part, kinds.get("", "F32"))
    made = np.random.default_rng([seed, rows, cols, len(part)]).normal(0, 0.05, (rows, cols)).astype(np.float32)
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        # gguf cannot quantise to these; random codes about zero serve as well.
        size = {"Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5}[kind]
        data = blocks(kind, rows, cols, seed, size)
    elif kind == "F32":
        data = made
    else:
        data = quants.quantize(made, GGMLQuantizationType[kind])
    writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])


def tokenizer(size: int) -> dict[str, Any]:
    """A tokenizer.json of bytes."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for i, t in enumerate(SPECIAL)
    ]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(byte_vocabulary(size))}, "merges": []}
    return {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}


def write_tokenizer(folder: Path, size: int, **config: Any) -> None:
    """tokenizer.json and tokenizer_config.json beside weights."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(size)))
    names = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1]}, "pad_token": SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
