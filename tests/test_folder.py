"""engine/weights/folder.py: a folder as transformers writes it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.weights.config import RopeScaling
from engine.weights.errors import CheckpointError
from engine.weights.folder import Folder, canonical
from tests.checkpoints import write_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "eos_token_id": [1, 2],
    "bos_token_id": 0,
}


def folder(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A folder with one tensor unless told; ``changes`` to config.json, None removes a key."""
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"lm_head.weight": torch.zeros(300, 96)}, path / "model.safetensors")
    write_tokenizer(path, 300)
    return path


def test_names_are_those_of_gguf() -> None:
    """N3: both formats speak of the same tensors."""
    assert canonical("model.layers.11.self_attn.q_proj.weight") == "blk.11.attn_q.weight"
    assert canonical("model.layers.0.mlp.down_proj.bias") == "blk.0.ffn_down.bias"
    assert canonical("model.embed_tokens.weight") == "token_embd.weight"
    assert canonical("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert canonical("model.layers.0.mlp.experts.0.w1.weight") == "blk.0.mlp.experts.0.w1.weight"


def test_sizes(tmp_path: Path) -> None:
    """N3: the configuration from config.json."""
    config = Folder(folder(tmp_path)).config()
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (2, 96, 4, 2, 32)
    assert (config.ff, config.vocab, config.window, config.tied) == (64, 300, 128, False)
    assert config.rope_base == 5000.0 and config.rope_scaling is None


def test_head_width_and_kv_heads_have_defaults(tmp_path: Path) -> None:
    config = Folder(folder(tmp_path, head_dim=None, num_key_value_heads=None)).config()
    assert (config.head_dim, config.kv_heads) == (24, 4)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_of_both_generations(tmp_path: Path, key: str) -> None:
    """transformers 4 and 5 write it differently."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 64
    config = Folder(folder(tmp_path, **{key: llama3})).config()
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    linear = Folder(folder(tmp_path, **{key: {"type": "linear", "factor": 2.0, "rope_theta": 7000.0}})).config()
    assert linear.rope_scaling == RopeScaling("linear", 2.0) and linear.rope_base == 7000.0


@pytest.mark.parametrize(
    ("rope", "attention"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
    ],
)
def test_yarn(tmp_path: Path, rope: dict[str, float], attention: float) -> None:
    """N3: its settings and their defaults; the window is what was stretched, whatever the configuration kept."""
    said = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100} | rope
    config = Folder(folder(tmp_path, rope_scaling=said)).config()
    scaling = RopeScaling("yarn", 4.0, original_window=100, attention=pytest.approx(attention))
    assert config.rope_scaling == scaling and config.window == 400
    short = Folder(folder(tmp_path, rope_scaling={"type": "yarn", "factor": 2.0, "beta_fast": 9})).config()
    assert short.rope_scaling is not None and short.rope_scaling.original_window == 128 and short.window == 256
    assert short.rope_scaling.beta_fast == 9.0


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 8}, (8, 8)),
        ({"sliding_window": 128}, ()),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}, ()),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, ()),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, (8, 0)),
        ({"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]}, ()),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    """N3: how many rows a layer sees, as each family says it; one that reaches over the whole window is none."""
    assert Folder(folder(tmp_path, **changes)).config().windows == windows


@pytest.mark.parametrize("where", ["beside", "within"])
def test_a_part_of_each_head(tmp_path: Path, where: str) -> None:
    """N3: how much of a head is turned, as transformers 4 and 5 write it."""
    part = {"partial_rotary_factor": 0.25}
    changes = part if where == "beside" else {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, **part}}
    assert Folder(folder(tmp_path, **changes)).config().rotary == 8
    assert Folder(folder(tmp_path, rope_parameters=None, partial_rotary_factor=1.0)).config().rotary == 0


def test_biases_and_norms_are_found_among_the_tensors(tmp_path: Path) -> None:
    """N3: no file says in its configuration that queries have a bias, or that heads are normed."""
    bare = Folder(folder(tmp_path)).config()
    assert not bare.qkv_bias and not bare.qk_norm
    for part, bias in (("q_proj.bias", True), ("q_norm.weight", False)):
        config = Folder(folder(tmp_path, {f"model.layers.0.self_attn.{part}": torch.ones(32)})).config()
        assert (config.qkv_bias, config.qk_norm) == (bias, not bias)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "chunked_attention"], "sliding_window": 8}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "Quantised safetensors"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "each type of layer"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """N3: a setting that is not understood is named, never ignored."""
    with pytest.raises(CheckpointError, match=said):
        Folder(folder(tmp_path, **changes)).config()


def test_tensors_keep_their_type_and_bytes(tmp_path: Path) -> None:
    """N3: bf16, f16 and f32 are read as they are; another type is refused by name."""
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    for dtype, kind in names.items():
        weight = torch.randn(3, 8).to(dtype)
        source = Folder(folder(tmp_path, {"lm_head.weight": weight, "model.norm.weight": weight[0].clone()})).source
        stored = source.read("output.weight")
        assert (stored.kind, stored.rows, stored.cols) == (kind, 3, 8)
        assert torch.equal(stored.data.view(dtype), weight)
        assert source.read("output_norm.weight").rows == 1
    whole = Folder(folder(tmp_path, {"lm_head.weight": torch.ones(3, 8, dtype=torch.int32)})).source
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored as torch\.int32"):
        whole.read("output.weight")


def test_tokenizer_template_and_special_tokens(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert Folder(path).special() == {"bos_token": "<|start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    assert Folder(path).template() == ""
    write_tokenizer(path, 300, chat_template="{{ plain }}")
    assert Folder(path).template() == "{{ plain }}"
    write_tokenizer(path, 300, chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert Folder(path).template() == "d"
    (path / "chat_template.jinja").write_text("{{ file }}")
    assert Folder(path).template() == "{{ file }}"
    assert '"BPE"' in Folder(path).tokenizer_json()


def test_prompts_come_whole(tmp_path: Path) -> None:
    """N3: a tokenizer saved with a length to cut or fill up to, as training leaves it, does neither here."""
    path = folder(tmp_path)
    settings = json.loads((path / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2}
    settings["padding"] |= {"pad_type_id": 0, "pad_token": "<|pad|>"}
    (path / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_str(Folder(path).tokenizer_json())
    assert [len(tokenizer.encode(text).ids) for text in ("a", "abcdef")] == [1, 6]


def test_one_set_of_weights_is_read_where_several_lie(tmp_path: Path) -> None:
    """N3: the index's files, else model.safetensors; a second copy in another form is not mixed in."""
    path = folder(tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, path / "consolidated.safetensors")
    assert Folder(path).source.names() == {"output.weight"}
    assert Folder(path).file_bytes == (path / "model.safetensors").stat().st_size
    save_file({"model.norm.weight": torch.zeros(2)}, path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Folder(path).source.names() == {"output_norm.weight"}
    for name in ("model.safetensors", "model.safetensors.index.json", "consolidated.safetensors"):
        (path / name).unlink()
    assert Folder(path).source.names() == {"output_norm.weight"}


def test_a_tensor_of_no_elements_is_refused(tmp_path: Path) -> None:
    source = Folder(folder(tmp_path, {"lm_head.weight": torch.zeros(0, 8)})).source
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has no elements"):
        source.read("output.weight")


def test_ends_come_from_both_configurations(tmp_path: Path) -> None:
    path = folder(tmp_path, eos_token_id=2)
    assert Folder(path).end_ids() == [1, 2]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert Folder(path).end_ids() == [1, 2, 9]


def test_bos_is_said_or_put_in_front(tmp_path: Path) -> None:
    """By ``add_bos_token``, or by a template in tokenizer.json."""
    path = folder(tmp_path)
    assert Folder(path).bos() == (False, 0)
    write_tokenizer(path, 300, add_bos_token=True)
    assert Folder(path).bos() == (True, 0)
    write_tokenizer(path, 300)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}]}
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Folder(path).bos() == (True, 0)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """Each file that lacks or is damaged is said by name."""
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Folder(tmp_path)
    path = folder(tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lacks model-2\.safetensors"):
        Folder(path)
    (path / "model.safetensors.index.json").unlink()
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Folder(path).tokenizer_json()
    with pytest.raises(CheckpointError, match=r"no tensor blk\.0\.attn_q\.weight"):
        Folder(path).source.read("blk.0.attn_q.weight")
    (path / "model.safetensors").write_bytes(b"not this")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Folder(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Folder(path)
    (path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        Folder(path)
    (path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json is not a JSON object"):
        Folder(path)
