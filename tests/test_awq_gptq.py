"""engine/weights/autoquant.py: folders that AWQ and GPTQ made, packed here bit by bit as the formats are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from engine.weights import quants
from engine.weights.autoquant import Scheme, Unpacked, scheme
from engine.weights.checkpoint import open_checkpoint
from engine.weights.errors import CheckpointError
from engine.weights.folder import Folder, canonical
from engine.weights.stored import Stored
from tests.checkpoints import alone, build, write_tokenizer

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
EIGHT = {**GPTQ, "bits": 8, "sym": True}
MODULE = "model.layers.0.self_attn.q_proj"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}


def words(codes: np.ndarray[Any, Any], bits: int, order: list[int] | None = None) -> Tensor:
    """``[a, b]`` codes as int32 ``[a, b / n]``: of each ``n`` neighbours, the one ``order[i]`` in the i-th field."""
    each = 32 // bits
    out = np.zeros((codes.shape[0], codes.shape[1] // each), dtype=np.uint64)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            for field, place in enumerate(order or range(each)):
                out[row, column] |= np.uint64(int(codes[row, each * column + place]) << (bits * field))
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


class Made:
    """A random quantised matrix ``[out, in]``: its parts in a format, and what it decodes to.

    ``middle``: every zero is the middle code. ``of``: the group of each input.
    """

    def __init__(
        self, said: dict[str, Any], rows: int, cols: int, seed: int, *, middle: bool = False, of: Any = None
    ) -> None:
        made = np.random.default_rng([seed, rows, cols])
        bits, group = said["bits"], said["group_size"] if said["group_size"] > 0 else cols
        self.of = np.arange(cols) // group if of is None else np.asarray(of)
        groups = cols // group
        most = 1 << bits
        codes = made.integers(0, most, (rows, cols))
        zeros = np.full((rows, groups), most // 2) if middle or bits == 8 else made.integers(0, most, (rows, groups))
        zeros[0, 0] = most // 2 if middle or bits == 8 else 0
        scales = (made.uniform(1e-3, 2e-2, (rows, groups)) * 16 / most).astype(np.float16)
        wide = scales.astype(np.float64)[:, self.of]
        self.weight = torch.from_numpy(wide * (codes - zeros[:, self.of]))
        self.parts = {"scales": torch.from_numpy(scales.T.copy())}
        if said["quant_method"] == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            self.parts |= {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order)}
        else:
            # The first form keeps a zero less one, in the bits of a code.
            kept = zeros if said.get("checkpoint_format") == "gptq_v2" else (zeros - 1) % most
            self.parts["qweight"] = words(codes, bits).t().contiguous()
            self.parts["qzeros"] = words(kept.T, bits)
            self.parts["g_idx"] = torch.from_numpy(self.of.astype(np.int32))

    def named(self, module: str = MODULE) -> dict[str, Tensor]:
        return {f"{module}.{part}": tensor for part, tensor in self.parts.items()}


class Lying:
    """Tensors without a file."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return {canonical(name) or name for name in self.tensors}

    def tensor(self, name: str) -> Tensor:
        return next(tensor for own, tensor in self.tensors.items() if name in (own, canonical(own)))

    def read(self, name: str) -> Stored:
        values = self.tensor(name).reshape(1, -1).float()
        return Stored("F32", 1, values.shape[1], values.view(torch.uint8))


def unpacked(made: Made, said: dict[str, Any]) -> Stored:
    return Unpacked(Lying(made.named()), scheme(said), canonical).read("blk.0.attn_q.weight")


def exactly(stored: Stored, weight: Tensor) -> bool:
    """Whether the stored codes, scales and zeros are those weights, in arithmetic that does not round."""
    parts = quants.split(stored.kind, stored.data)
    decoded = parts.q.double() * parts.scale.double()[..., None]
    if parts.offset is not None:
        decoded += parts.offset.double()[..., None]
    return torch.equal(decoded.flatten(1), weight)


@given(
    st.sampled_from([AWQ, GPTQ, V2, EIGHT]),
    st.sampled_from([(32, 32), (64, 64), (128, 128), (96, 32), (256, 128), (-1, 64)]),
    st.integers(1, 2),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_weights_are_read_exactly(
    said: dict[str, Any], groups: tuple[int, int], wide: int, seed: int, middle: bool
) -> None:
    """N3: AWQ and GPTQ of both forms, in every group size: each weight is scale * (code - zero) to the last bit."""
    size, ours = groups
    said = {**said, "group_size": size}
    cols = 192 if size < 0 else size * wide
    made = Made(said, 16, cols, seed, middle=middle)
    stored = unpacked(made, said)
    assert (stored.rows, stored.cols) == (16, cols)
    four = "Q4_0" if middle else f"I4_{ours}"
    assert stored.kind == (f"I8_{ours}" if said["bits"] == 8 else four)
    assert exactly(stored, made.weight)


@given(st.permutations(range(4)), st.sampled_from([GPTQ, V2]))
def test_groups_in_another_order(order: list[int], said: dict[str, Any]) -> None:
    """N3: desc_act where each group's inputs still lie together."""
    made = Made(said, 8, 256, 1, of=np.repeat(order, 64))
    stored = unpacked(made, {**said, "desc_act": True})
    assert stored.kind == ("I4_64" if order == sorted(order) else "I4_32") and exactly(stored, made.weight)


def test_reordered_inputs_are_refused_by_name() -> None:
    """N3: desc_act that scatters the inputs of a group; and one whose order is missing."""
    of = np.random.default_rng(0).permutation(np.repeat(range(4), 64))
    said = {**GPTQ, "desc_act": True}
    made = Made(said, 8, 256, 1, of=of)
    with pytest.raises(CheckpointError, match="desc_act"):
        unpacked(made, said)
    del made.parts["g_idx"]
    with pytest.raises(CheckpointError, match="no g_idx"):
        unpacked(made, said)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"bits": 4}, "an unnamed method"),
        ("awq", "an unnamed method"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({**AWQ, "version": "gemv"}, "AWQ in its form gemv"),
        ({**AWQ, "bits": 8}, "AWQ with 8 bits"),
        ({**AWQ, "zero_point": False}, "AWQ without zero points"),
        ({**GPTQ, "bits": 3}, "GPTQ with 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ in its form marlin"),
    ],
)
def test_other_ways_are_refused_by_name(tmp_path: Path, said: Any, what: str) -> None:
    """N3: what is not read is named, and what to use instead."""
    folder = written(tmp_path, {"lm_head.weight": torch.zeros(300, 128)}, quantization_config=said)
    with pytest.raises(CheckpointError, match=f"not supported: {what}; use AWQ"):
        Folder(folder).config()


def damaged(part: str, change: Any) -> Made:
    made = Made(GPTQ, 8, 128, 0)
    made.parts[part] = change(made.parts[part])
    return made


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("qweight", lambda t: t[1:], "do not fit together"),
        ("qweight", lambda t: t[0], "do not fit together"),
        ("qweight", lambda t: t[:0], "do not fit together"),
        ("qweight", lambda t: t[None], "do not fit together"),
        ("qweight", lambda t: t.half(), "types"),
        ("qzeros", lambda t: t[:, :0], "do not fit together"),
        ("qzeros", lambda t: t.long(), "types"),
        ("scales", lambda t: t[:, :5], "do not fit together"),
        ("scales", lambda t: t[:0], "do not fit together"),
        ("scales", lambda t: t.int(), "types"),
        ("scales", lambda t: t * 1e9, "float16 cannot hold"),
        ("scales", lambda t: t.float() * 1e9, "float16 cannot hold"),
        ("g_idx", lambda t: t + 1, "do not fit together"),
        ("g_idx", lambda t: t[:40], "do not fit together"),
        ("g_idx", lambda t: t[:32], "do not fit together"),
    ],
)
def test_parts_that_do_not_fit_are_refused(part: str, change: Any, said: str) -> None:
    """N3: a damaged matrix is named; nothing is guessed."""
    with pytest.raises(CheckpointError, match=f"{MODULE}.*{said}"):
        unpacked(damaged(part, change), GPTQ)


def test_groups_that_no_kernel_takes_are_refused() -> None:
    """N3: and eight bits that are not symmetric."""
    with pytest.raises(CheckpointError, match="groups of 16 columns"):
        unpacked(Made({**GPTQ, "group_size": 16}, 8, 64, 0), GPTQ)
    uneven = Made(EIGHT, 8, 64, 0)
    uneven.parts["qzeros"] = uneven.parts["qzeros"] + 1
    with pytest.raises(CheckpointError, match="8 bits that is not symmetric"):
        unpacked(uneven, EIGHT)


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    """N3: an incomplete checkpoint says what it lacks."""
    made = Made(AWQ, 8, 64, 0)
    del made.parts["qzeros"]
    folder = written(tmp_path, made.named(), quantization_config=AWQ)
    with pytest.raises(CheckpointError, match=f"has no tensor {MODULE}.qzeros"):
        Folder(folder).source.read("blk.0.attn_q.weight")


def test_biases_that_a_quantiser_made_up() -> None:
    """N3: all zeros where the model has none they are passed over; one that says something stays."""
    out, query = "model.layers.0.self_attn.o_proj", MODULE
    made = Made(GPTQ, 8, 64, 0)
    tensors = {**made.named(out), **made.named(query), f"{out}.bias": torch.zeros(8), f"{query}.bias": torch.zeros(8)}
    weights = {"blk.0.attn_output.weight", "blk.0.attn_q.weight"}
    source = Unpacked(Lying(tensors), Scheme(awq=False, one=1), canonical)
    assert source.names() == weights | {"blk.0.attn_q.bias"}
    assert source.read("blk.0.attn_q.bias").kind == "F32"
    tensors[f"{out}.bias"] = torch.ones(8)
    said = Unpacked(Lying(tensors), Scheme(awq=False, one=1), canonical)
    assert said.names() == weights | {"blk.0.attn_q.bias", "blk.0.attn_output.bias"}


def written(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    save_file(tensors, path / "model.safetensors")
    write_tokenizer(path, 300)
    return path


def pair(path: Path, said: dict[str, Any], *, middle: bool) -> tuple[Path, Path]:
    """A quantised llama whose head and table stay plain, and the same weights as float32."""
    made = torch.Generator().manual_seed(2)
    plain = {
        name: torch.randn(300, 128, generator=made).half() for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    plain["model.norm.weight"] = torch.full((128,), 0.9, dtype=torch.float16)
    packed, floats = dict(plain), {name: tensor.float() for name, tensor in plain.items()}
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            packed[f"model.layers.{layer}.{norm}.weight"] = torch.full((128,), 1.1, dtype=torch.float16)
            floats[f"model.layers.{layer}.{norm}.weight"] = torch.full((128,), 1.1).half().float()
        for number, (part, (rows, cols)) in enumerate(SHAPES.items()):
            module = f"model.layers.{layer}.{part}"
            matrix = Made(said, rows, cols, 10 * layer + number, middle=middle)
            packed |= matrix.named(module)
            floats[f"{module}.weight"] = matrix.weight.float()
    skipped = {"modules_to_not_convert": ["lm_head"]}
    return written(path / "packed", packed, quantization_config=said | skipped), written(path / "floats", floats)


@pytest.mark.parametrize(
    ("said", "middle"), [(AWQ, False), (GPTQ, False), ({**GPTQ, "group_size": 128}, True), (V2, False), (EIGHT, True)]
)
def test_a_whole_model(tmp_path: Path, said: dict[str, Any], middle: bool) -> None:
    """N3: a quantised folder gives the logits of its weights in float32; as it is served, their likeliest token."""
    packed, floats = (open_checkpoint(folder) for folder in pair(tmp_path, said, middle=middle))
    tokens = torch.arange(20) * 13 % 300
    threads = torch.get_num_threads()
    with torch.inference_mode():
        logits = []
        for checkpoint, exact in ((floats, True), (packed, True), (packed, False)):
            model = build(checkpoint, exact=exact)
            logits.append(alone(model, tokens, model.new_cache(32), 0, all_rows=True))
    torch.set_num_threads(threads)
    expected, exactly_read, served = logits
    assert float((exactly_read - expected).norm() / expected.norm()) < 1e-4
    assert float((served - expected).norm() / expected.norm()) < 0.03
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 4 * (served - expected).abs().max()
    assert bool(clear.any()) and torch.equal(served.argmax(-1)[clear], expected.argmax(-1)[clear])
