"""What each file format calls a hybrid decoder's tensors, and how it leaves them.

A folder has transformers' names. A GGUF file has those of llama.cpp's converter (``conversion/qwen.py``), which has
also changed some: norms stored less one have it added, ``A_log`` is minus its exponential, and where several heads of
values share one of keys, the heads of values lie in turn of the heads of keys, wherever there is one each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.weights.folder import canonical

Name = Callable[[str], str]
"""The canonical name of a layer's part, which is asked for by transformers' name."""

GUESS = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
GGUF_GUESS = ("eh_proj", "enorm", "hnorm", "shared_head_norm")

GGUF_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.gate_proj": "ffn_gate_exps.weight",
    "mlp.experts.up_proj": "ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
"""What follows ``blk.<layer>.``."""


class Names(NamedTuple):
    """``layer(i)`` names the parts of a layer. ``guess``: matrix and norms of the layer that guesses; ``guess_layer``
    its other parts.

    ``less``: what norms are stored less. ``converted``: by llama.cpp, with the changes above.
    """

    layer: Callable[[int], Name]
    guess: tuple[str, ...]
    guess_layer: Name
    less: float
    converted: bool


def names(form: str, layers: int) -> Names:
    """Of a format, ``Checkpoint.form``. ``layers``: without the one that guesses, which a GGUF file has behind them."""
    if form == "gguf":
        guess = tuple(f"blk.{layers}.nextn.{part}.weight" for part in GGUF_GUESS)
        return Names(_in_gguf, guess, _in_gguf(layers), 0.0, True)
    guess = tuple(f"mtp.{part}.weight" for part in GUESS)
    return Names(lambda index: _in_folder(f"model.layers.{index}"), guess, _in_folder("mtp.layers.0"), 1.0, False)


def _in_folder(prefix: str) -> Name:
    return lambda part: canonical(f"{prefix}.{part}") or part


def _in_gguf(index: int) -> Name:
    return lambda part: f"blk.{index}.{GGUF_PARTS.get(part, part)}"
