"""A hybrid decoder out of a GGUF file: the numbers are those of the same weights in a folder.

The file is written from transformers' model by the changes that llama.cpp's converter makes, under the names that the
gguf package gives; its own reader and ours share nothing with that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from torch import Tensor

from engine.models.batch import Rows
from engine.models.hybrid import Hybrid
from engine.weights.checkpoint import CheckpointError, open_checkpoint
from engine.weights.hybrid import HybridConfig
from tests.checkpoints import gguf_begun, gguf_ended
from tests.hybrids import VOCAB, load, reference, save

TOKENS = torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(8)).tolist()
GUESS = {
    "fc": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    "pre_fc_norm_embedding": gguf.MODEL_TENSOR.NEXTN_ENORM,
    "pre_fc_norm_hidden": gguf.MODEL_TENSOR.NEXTN_HNORM,
    "norm": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def in_turn(x: Tensor, dim: int, keys: int, width: int) -> Tensor:
    """Heads of values, grouped by the head of keys they share, put in turn of the heads of keys."""
    moved = x.movedim(dim, 0)
    heads = moved.reshape(keys, -1, width, *moved.shape[1:]).transpose(0, 1)
    return heads.reshape(moved.shape).movedim(0, dim)


def changed(name: str, x: Tensor, config: Any) -> Tensor:
    """A tensor as the converter leaves it."""
    keys, wide = config.linear_num_key_heads, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    width = config.linear_value_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        x = x.squeeze()
        return torch.cat([x[:wide], in_turn(x[wide:], 0, keys, width)])
    if "in_proj_z" in name:
        return in_turn(x, 0, keys, width)
    if any(part in name for part in ("in_proj_a", "in_proj_b", "dt_bias")):
        return in_turn(x, 0, keys, 1)
    if "A_log" in name:
        return -in_turn(x, 0, keys, 1).exp()
    if "out_proj" in name:
        return in_turn(x, 1, keys, width)
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return x + 1
    return x


def converted(folder: Path, path: Path, theirs: Any, *, joined: bool = False, kind: str = "F32", **extra: Any) -> Path:
    """The folder's weights as a GGUF file. ``kind``: of matrices. ``joined``: experts' gate and up in one tensor.

    ``extra``: further keys of the architecture, ``__`` for a dot; None leaves one out.
    """
    config, tensors = theirs.config, load_file(folder / "model.safetensors")
    experts = "num_experts" in config.to_dict()
    arch = gguf.MODEL_ARCH.QWEN35MOE if experts else gguf.MODEL_ARCH.QWEN35
    name_of, layers = gguf.MODEL_ARCH_NAMES[arch], config.num_hidden_layers
    mtp = "mtp.fc.weight" in tensors
    keys = {
        "block_count": layers + mtp,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 0.25)),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
    }
    if mtp:
        keys["nextn_predict_layers"] = 1
    if experts:
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": config.moe_intermediate_size}
        keys |= {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    else:
        keys["feed_forward_length"] = config.intermediate_size
    keys |= {key.replace("__", "."): value for key, value in extra.items()}
    writer = gguf_begun(path, name_of, VOCAB, {f"{name_of}.{k}": v for k, v in keys.items() if v is not None})
    names = gguf.get_tensor_name_map(arch, layers + mtp)
    found = {name.replace("mtp.layers.0.", f"model.layers.{layers}."): tensor for name, tensor in tensors.items()}
    for prefix in {name.split("experts.")[0] for name in found if ".experts." in name}:
        apart = {name: found.pop(name) for name in [*found] if name.startswith(f"{prefix}experts.")}
        for part in ("gate_proj", "up_proj", "down_proj"):
            each = [apart[f"{prefix}experts.{i}.{part}.weight"] for i in range(config.num_experts)]
            found[f"{prefix}experts.{part}.weight"] = torch.stack(each)
        if joined:
            both = [found.pop(f"{prefix}experts.{part}.weight") for part in ("gate_proj", "up_proj")]
            found[f"{prefix}experts.gate_up_proj.weight"] = torch.cat(both, 1)
    for name, tensor in found.items():
        asked = name.replace(".dt_bias", ".dt_proj.bias")
        if name.startswith("mtp."):
            ours = gguf.TENSOR_NAMES[GUESS[name.split(".")[1]]].format(bid=layers) + ".weight"
            name = ours  # renamed before it is changed: all its norms end alike
        else:
            ours = names.get_name(asked, (".weight", ".bias"))
        assert ours is not None, name
        values = np.ascontiguousarray(changed(name, tensor, config).squeeze().numpy())
        of = gguf.GGMLQuantizationType[kind if values.ndim > 1 and "conv1d" not in name else "F32"]
        writer.add_tensor(ours, gguf.quants.quantize(values, of), raw_dtype=of)
    return gguf_ended(writer, path)


class Pair(NamedTuple):
    folder: Hybrid
    file: Hybrid


FORMS: dict[str, dict[str, Any]] = {
    "heads in groups of two": {},
    "tied, groups of three": {"tie_word_embeddings": True, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    "one head of values a head of keys": {"linear_num_key_heads": 4},
    "experts": {"experts": True},
}


def pair(tmp_path: Path, *, joined: bool = False, **changes: Any) -> Pair:
    theirs = reference(**changes)
    folder = save(theirs, tmp_path, mtp=True)
    return Pair(load(folder), load(converted(folder, tmp_path / "tiny.gguf", theirs, joined=joined)))


def logits(model: Hybrid) -> Tensor:
    return model.forward([Rows(model.new_cache(80), TOKENS, 0, wanted=80)])


def near(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_its_folder(tmp_path: Path, form: str) -> None:
    """N3: the same logits and guesses of what follows, whichever format the weights lie in."""
    of = pair(tmp_path, **FORMS[form])
    assert near(logits(of.file), logits(of.folder)) < 1e-5
    guesses = []
    for model in of:
        cache = model.new_cache(90)
        model.forward([Rows(cache, TOKENS[:40], 0)])
        guesses.append(model.propose(cache, 7, 5))
    assert guesses[0] == guesses[1] and len(guesses[0]) == 5


def test_experts_with_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    """N3: newer converters may join them."""
    of = pair(tmp_path, experts=True, joined=True)
    assert near(logits(of.file), logits(of.folder)) < 1e-5


def test_its_configuration_is_the_folders(tmp_path: Path) -> None:
    """N3: every size, from llama.cpp's keys."""
    for experts in (False, True):
        theirs = reference(experts=experts)
        folder = save(theirs, tmp_path, mtp=True)
        file = converted(folder, tmp_path / "tiny.gguf", theirs)
        ours, known = open_checkpoint(file).config, open_checkpoint(folder).config
        assert ours.eps == pytest.approx(known.eps)  # the file has it in 32 bits
        assert structs.replace(ours, eps=known.eps) == known


@pytest.mark.parametrize("experts", [False, True])
def test_quantised_matrices(tmp_path: Path, experts: bool) -> None:
    """N2, N3: eight bits, experts too; as served near the same weights in float32, and smaller."""
    theirs = reference(experts=experts)
    path = converted(save(theirs, tmp_path, mtp=True), tmp_path / "tiny.gguf", theirs, kind="Q8_0")
    served, exact = load(path, exact=False), load(path)
    assert near(logits(served)[:20], logits(exact)[:20]) < 0.1
    assert served.weights_bytes < 0.5 * exact.weights_bytes


def test_which_layers_attend_may_be_listed(tmp_path: Path) -> None:
    """N3: a layer each, before the interval."""
    theirs = reference(layer_types=["full_attention", "linear_attention"] * 2)
    folder = save(theirs, tmp_path)
    listed = [False, True, False, True]
    file = converted(folder, tmp_path / "tiny.gguf", theirs, attention__recurrent_layers=listed)
    config = open_checkpoint(file).config
    assert isinstance(config, HybridConfig) and config.attends == (True, False, True, False)
    assert near(logits(load(file)), logits(load(folder))) < 1e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ssm__inner_size": 130}, "recurrent layers cannot be"),
        ({"full_attention_interval": 0}, "recurrent layers cannot be"),
        ({"full_attention_interval": 9}, "one kind alone"),
        ({"ssm__group_count": 3}, "recurrent layers cannot be"),
        ({"ssm__state_size": None}, "ssm.state_size"),
        ({"ssm__conv_kernel": 3}, "conv1d"),
        ({"nextn_predict_layers": 0}, "does not use here|no tensor"),
        ({"feed_forward_length": None}, "sizes cannot be"),
        ({"attention__sliding_window": 16}, "sliding_window"),
    ],
)
def test_a_file_that_is_not_understood(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """N1: refused by name, before or while tensors are read."""
    theirs = reference()
    file = converted(save(theirs, tmp_path, mtp=True), tmp_path / "tiny.gguf", theirs, **changes)
    with pytest.raises(CheckpointError, match=said):
        load(file)


def test_the_family_before_it_is_refused_by_name(tmp_path: Path) -> None:
    """N1: qwen3next lays its tensors out in another way."""
    theirs = reference()
    file = converted(save(theirs, tmp_path), tmp_path / "tiny.gguf", theirs)
    file.write_bytes(file.read_bytes().replace(b"qwen35", b"qwen3n"))
    with pytest.raises(CheckpointError, match="architecture qwen3n is not supported"):
        load(file)
