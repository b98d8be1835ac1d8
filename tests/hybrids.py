"""Tiny hybrid decoders of random weights, as transformers writes them, and with a layer that guesses added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models import registry
from engine.models.hybrid import Hybrid
from engine.weights.checkpoint import open_checkpoint
from tests.checkpoints import write_tokenizer

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
DENSE = {"intermediate_size": 96}
EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


@torch.inference_mode(False)
def reference(*, experts: bool = False, seed: int = 5, half: bool = False, **changes: Any) -> Any:
    """transformers' own model, random: norms, decays and convolutions too, which would be plain at their start.

    ``half``: its weights are what bfloat16 can hold.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    config = getattr(transformers, f"{name}TextConfig")(**(SIZES | (EXPERTS if experts else DENSE) | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or "dt_bias" in key:
                value.add_(torch.randn_like(value) * 0.2)
            if "conv1d" in key:
                value.copy_(torch.randn_like(value) * 0.4)
            if "A_log" in key:
                value.copy_(torch.randn_like(value) - 1)
            if key.endswith("mlp.gate.weight"):
                value.copy_(torch.randn_like(value) * 0.3)
            if half:
                value.copy_(value.bfloat16())
    return model


def save(theirs: Any, folder: Path, *, mtp: bool = False) -> Path:
    """As a folder with a tokenizer. ``mtp``: with random tensors of the layer that guesses, shaped as layer 3's."""
    theirs.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    if mtp:
        tensors, hidden = load_file(folder / "model.safetensors"), theirs.config.hidden_size
        torch.manual_seed(11)
        like = {k.replace("model.layers.3.", "mtp.layers.0."): v for k, v in tensors.items() if "layers.3." in k}
        like |= {f"mtp.{name}.weight": torch.zeros(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        like |= {"mtp.norm.weight": torch.zeros(hidden), "mtp.fc.weight": torch.zeros(hidden, 2 * hidden)}
        save_file(tensors | {k: torch.randn_like(v) * 0.1 for k, v in like.items()}, folder / "model.safetensors")
    return folder


def nest(folder: Path) -> Path:
    """As a folder of the model that also sees: text settings and names one level down, and tensors of its eyes."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"].removesuffix("_text")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": config, "vision_config": {}}))
    tensors = {
        k.replace("model.", "model.language_model.", 1): v for k, v in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors | {"model.visual.patch_embed.proj.bias": torch.zeros(8)}, folder / "model.safetensors")
    return folder


def load(folder: Path, *, exact: bool = True, device: str = "cpu") -> Hybrid:
    """The model, on one thread."""
    model = registry.build(
        open_checkpoint(folder),
        device=torch.device(device),
        threads=1,
        rows=0,
        progress=lambda *_: None,
        exact=exact,
    )
    assert isinstance(model, Hybrid)
    return model
