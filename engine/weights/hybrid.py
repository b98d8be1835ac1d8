"""What a hybrid decoder says of its shape: layers with a recurrent state between layers that attend.

Source: transformers' ``configuration_qwen3_5.py`` and ``configuration_qwen3_5_moe.py``, llama.cpp's
``conversion/qwen.py``. A setting that would change the result and is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from engine.weights import rope
from engine.weights.config import Config, stretched
from engine.weights.errors import CheckpointError

MTP = "mtp.fc.weight"
"""A tensor of the layer that guesses a token further."""


class HybridConfig(Config, frozen=True, kw_only=True):
    """Sizes in elements. ``attends``: which layers attend.

    The others hold a state ``[value_heads, key_dim, value_dim]``. ``conv``: taps of the convolution before it.
    ``experts``: of a feed-forward layer, ``active`` of them a row; 0: one for all rows. ``expert_ff``, ``shared_ff``:
    what they are wide inside. ``mtp``: layers that guess a token further.
    """

    attends: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    experts: int = 0
    active: int = 0
    expert_ff: int = 0
    shared_ff: int = 0
    mtp: int = 0

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys and values of a recurrent layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def check(self) -> None:
        """Raise CheckpointError unless these can be a model's sizes."""
        super().check()
        sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.conv)
        if min(sizes) < 1 or self.conv > 8 or len(self.attends) != self.layers or self.value_heads % self.key_heads:
            raise CheckpointError(
                f"The configuration's recurrent layers cannot be: {self.key_heads} heads of {self.key_dim} for "
                f"{self.value_heads} of {self.value_dim}, {self.conv} taps, {len(self.attends)} kinds of layers."
            )
        if len({*self.attends}) < 2:
            raise CheckpointError("The configuration has layers of one kind alone, which is not supported here.")
        if self.experts and not (0 < self.active <= self.experts and self.expert_ff > 0 and self.shared_ff > 0):
            raise CheckpointError(
                f"The configuration's experts cannot be: {self.active} of {self.experts}, {self.expert_ff} and "
                f"{self.shared_ff} inside."
            )
        if self.mtp not in (0, 1):
            raise CheckpointError(f"{self.mtp} layers that predict further tokens are not supported, only one.")


def in_gguf(base: Config, own: Callable[..., Any], names: set[str]) -> HybridConfig:
    """``base`` with what ``own(key, default)``, a GGUF file's keys of the architecture, say of recurrent layers.

    The layer that guesses counts among its blocks, as the last one. Keys: those of llama.cpp's converter.
    """
    guessing, heads = int(own("nextn_predict_layers", 0)), int(own("ssm.time_step_rank"))
    layers = base.layers - guessing
    inner, experts = int(own("ssm.inner_size")), int(own("expert_count", 0))
    every, kinds = int(own("full_attention_interval", 4)), own("attention.recurrent_layers", None)
    if inner % heads or every < 1:
        raise CheckpointError(f"The file's recurrent layers cannot be: {heads} heads, together {inner} wide.")
    attends = [(layer + 1) % every == 0 for layer in range(layers)]
    if kinds is not None:
        attends = [not recurrent for recurrent in kinds[:layers]]
    sizes = structs.asdict(base) | {
        "layers": layers,
        "ff": int(own("expert_shared_feed_forward_length")) if experts else base.ff,
        "rotary": base.rotary or base.head_dim,
        "qk_norm": True,
        "attends": tuple(attends),
        "key_heads": int(own("ssm.group_count")),
        "value_heads": heads,
        "key_dim": int(own("ssm.state_size")),
        "value_dim": inner // heads,
        "conv": int(own("ssm.conv_kernel")),
        "mtp": guessing if f"blk.{layers}.nextn.eh_proj.weight" in names else 0,
    }
    if experts:
        sizes |= {"experts": experts, "active": int(own("expert_used_count")), "shared_ff": sizes["ff"]}
        sizes |= {"expert_ff": int(own("expert_feed_forward_length"))}
    return HybridConfig(**sizes)


def is_hybrid(settings: Mapping[str, Any]) -> bool:
    """Whether ``settings`` describe such a model: they say what its recurrent layers are like."""
    return "linear_num_value_heads" in settings


def configured(settings: Mapping[str, Any], *, tied: bool, mtp: bool) -> HybridConfig:
    """Sizes from the text part of a config.json. ``mtp``: the files have the layer that guesses."""
    for key in ("attention_bias", "mlp_only_layers", "use_sliding_window"):
        if settings.get(key):
            raise CheckpointError(f"config.json sets {key}, which is not supported here.")
    if settings.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"The activation {settings['hidden_act']} is not supported, only silu.")
    base, scaling = rope.stretch(settings)
    layers, head_dim = int(settings["num_hidden_layers"]), int(settings["head_dim"])
    experts = int(settings.get("num_experts") or 0)
    inside = settings["shared_expert_intermediate_size"] if experts else settings["intermediate_size"]
    return HybridConfig(
        layers=layers,
        hidden=int(settings["hidden_size"]),
        heads=int(settings["num_attention_heads"]),
        kv_heads=int(settings["num_key_value_heads"]),
        head_dim=head_dim,
        ff=int(inside),
        vocab=int(settings["vocab_size"]),
        eps=float(settings.get("rms_norm_eps", 1e-6)),
        rope_base=base,
        window=stretched(int(settings["max_position_embeddings"]), scaling),
        tied=tied,
        rope_scaling=scaling,
        rotary=rope.turned({"partial_rotary_factor": 0.25, **settings}, head_dim) or head_dim,
        qk_norm=True,
        attends=_attends(settings, layers),
        key_heads=int(settings["linear_num_key_heads"]),
        value_heads=int(settings["linear_num_value_heads"]),
        key_dim=int(settings["linear_key_head_dim"]),
        value_dim=int(settings["linear_value_head_dim"]),
        conv=int(settings.get("linear_conv_kernel_dim", 4)),
        experts=experts,
        active=int(settings.get("num_experts_per_tok") or 0) if experts else 0,
        expert_ff=int(settings.get("moe_intermediate_size") or 0) if experts else 0,
        shared_ff=int(inside) if experts else 0,
        mtp=int(settings.get("mtp_num_hidden_layers") or 1) if mtp else 0,
    )


def _attends(settings: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """By ``layer_types``; without them each ``full_attention_interval``-th layer attends."""
    kinds = settings.get("layer_types")
    if kinds is None:
        every = int(settings.get("full_attention_interval", 4))
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    known = {"full_attention": True, "linear_attention": False}
    if unknown := [kind for kind in kinds if kind not in known]:
        raise CheckpointError(f"Layers of type {unknown[0]} are not supported.")
    return tuple(known[kind] for kind in kinds)
