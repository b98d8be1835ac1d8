"""Reads a hybrid decoder's weights into a model: which tensors there are, and in which order their rows are kept.

Rows of queries and keys are put so that the two of a rotated pair are neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models import layers
from engine.models.delta import Sizes
from engine.models.experts import Experts, Feed, Gated
from engine.models.gated import Attention, Delta
from engine.models.hybrid import Hybrid, Layer, Weights
from engine.models.hybrid_names import Name, Names, names
from engine.models.loading import Loader
from engine.models.mtp import Guess
from engine.weights import quants
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.hybrid import HybridConfig
from engine.weights.stored import Stored

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
ATTENTION = tuple(f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
MIXED = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
DELTA = (*MIXED, *(f"linear_attn.{part}" for part in ("out_proj.weight", "conv1d.weight", "norm.weight")))
FADES = ("linear_attn.A_log", "linear_attn.dt_bias")
GATED = ("gate_proj", "up_proj", "down_proj")
JOINED = "mlp.experts.gate_up_proj"
TOGETHER = tuple(f"mlp.experts.{part}" for part in GATED)
"""Experts in one tensor, as a GGUF file has them; a folder has two of three so or all apart."""


def build(checkpoint: Checkpoint, loader: Loader, *, device: torch.device, rows: int, exact: bool) -> Hybrid:
    """Read the weights of ``checkpoint`` and put the model together. ``rows`` 0 takes the checkpoint's whole window."""
    config = checkpoint.config
    if not isinstance(config, HybridConfig):
        raise CheckpointError(f"{checkpoint.name} does not say what its recurrent layers are; convert it anew.")
    there = checkpoint.names()
    eyes = {name for name in there if name.startswith("model.visual.")}
    called = names(checkpoint.form, config.layers)
    loader.expect(_names(config, called, there), eyes | {"output.weight"})
    return _Reader(config, loader, called, there, device, exact).model(rows)


def _names(config: HybridConfig, called: Names, there: set[str]) -> set[str]:
    """The tensors that a model of ``config`` has; experts lie in one tensor or each in its own, as they lie there."""
    found = {"token_embd.weight", "output_norm.weight"} | (set() if config.tied else {"output.weight"})
    for index, attends in enumerate(config.attends):
        found |= _layer_names(config, there, called.layer(index), attends=attends)
    if config.mtp:
        found |= {*called.guess} | _layer_names(config, there, called.guess_layer, attends=True)
    return found


def _layer_names(config: HybridConfig, there: set[str], name: Name, *, attends: bool) -> set[str]:
    parts = [*NORMS, *(ATTENTION if attends else (*DELTA, *FADES))]
    if not config.experts:
        parts += [f"mlp.{part}.weight" for part in GATED]
    else:
        parts += ["mlp.gate.weight", "mlp.shared_expert_gate.weight"]
        parts += [f"mlp.shared_expert.{part}.weight" for part in GATED]
        if name(JOINED) in there:
            parts += [JOINED, TOGETHER[2]]
        elif name(TOGETHER[0]) in there:
            parts += TOGETHER
        else:
            parts += [f"mlp.experts.{i}.{part}.weight" for i in range(config.experts) for part in GATED]
    return {name(part) for part in parts}


class _Reader:
    def __init__(
        self,
        config: HybridConfig,
        loader: Loader,
        called: Names,
        there: set[str],
        device: torch.device,
        exact: bool,
    ) -> None:
        self.config, self.loader, self.called, self.there = config, loader, called, there
        self.device, self.exact = device, exact
        self.recurrent = 0

    def model(self, rows: int) -> Hybrid:
        config, loader = self.config, self.loader
        window = min(rows, config.window) if rows else config.window
        scaling = config.rope_scaling
        size = scaling.attention if scaling is not None else 1.0
        turns = layers.rotations(layers.frequencies(config, None), window, self.device, size)
        table = loader.table("token_embd.weight", config.vocab, config.hidden)
        stack = tuple(self._layer(self.called.layer(i), attends) for i, attends in enumerate(config.attends))
        norm = self._norm("output_norm.weight", config.hidden)
        head = table if config.tied else loader.table("output.weight", config.vocab, config.hidden)
        guess = None
        if config.mtp:
            token_norm, hidden_norm, last_norm = (self._norm(name, config.hidden) for name in self.called.guess[1:])
            fc = loader.beside([loader.read(self.called.guess[0], config.hidden, 2 * config.hidden)])
            layer = self._layer(self.called.guess_layer, True)
            assert isinstance(layer.mixer, Attention)
            before = (token_norm, hidden_norm, fc, layer.mixer_norm, layer.mixer, layer.ffn_norm, layer.feed)
            guess = Guess(*before, last_norm, table, head, turns, config.eps)
        weights = Weights(table, stack, norm, head, turns, guess, loader.nbytes)
        return Hybrid(config, weights, device=self.device, exact=self.exact)

    def _layer(self, name: Name, attends: bool) -> Layer:
        before, after = (self._norm(name(part), self.config.hidden) for part in NORMS)
        return Layer(before, self._attention(name) if attends else self._delta(name), after, self._feed(name))

    def _norm(self, name: str, size: int) -> Tensor:
        return layers.norm_weight(self.called.less + self.loader.vector(name, size))

    def _attention(self, name: Name) -> Attention:
        """A head of ``q_proj`` is followed by its gate's rows; gates are as wide as what they open, and not turned."""
        config, loader = self.config, self.loader
        width, hidden = config.head_dim, config.hidden
        wide, narrow = config.heads * width, config.kv_heads * width
        order = _order(width, config.rotary)
        queries = loader.read(name(ATTENTION[0]), 2 * wide, hidden)
        heads = torch.arange(config.heads)[:, None] * 2 * width
        q, gate = queries.pick((heads + order).view(-1)), queries.pick((heads + width + torch.arange(width)).view(-1))
        k = loader.read(name(ATTENTION[1]), narrow, hidden)
        k = k.pick((torch.arange(config.kv_heads)[:, None] * width + order).view(-1))
        v = loader.read(name(ATTENTION[2]), narrow, hidden)
        out = loader.beside([loader.read(name(ATTENTION[3]), hidden, wide)])
        q_norm, k_norm = (self._norm(name(part), width)[order.to(self.device)] for part in ATTENTION[4:])
        dtype = torch.float32 if self.exact else torch.bfloat16
        return Attention(loader.beside([q, k, v, gate]), out, q_norm, k_norm, config, dtype)

    def _delta(self, name: Name) -> Delta:
        config, loader = self.config, self.loader
        heads, wide, hidden = config.value_heads, config.value_heads * config.value_dim, config.hidden
        sizes = Sizes(config.key_heads, heads, config.key_dim, config.value_dim, in_turn=self.called.converted)
        widths = (config.mixed, wide, heads, heads)
        mix = [loader.read(name(part), rows, hidden) for part, rows in zip(MIXED, widths, strict=True)]
        out = loader.beside([loader.read(name(DELTA[4]), hidden, wide)])
        taps = quants.decode_stored(loader.read(name(DELTA[5]), config.mixed, config.conv)).T.contiguous()
        loader.nbytes += taps.nbytes
        slope, bias = (loader.vector(name(part), heads) for part in FADES)
        slope = -slope if self.called.converted else slope.exp()
        norm = layers.norm_weight(loader.vector(name(DELTA[6]), config.value_dim))
        index, self.recurrent = self.recurrent, self.recurrent + 1
        conv = taps.to(self.device)
        return Delta(index, loader.beside(mix), out, conv, slope, bias, norm, sizes, config.eps, hidden)

    def _feed(self, name: Name) -> Feed:
        config, loader = self.config, self.loader
        if not config.experts:
            return self._gated(name, "mlp", config.ff)
        router = loader.beside([loader.read(name("mlp.gate.weight"), config.experts, config.hidden)])
        gate = loader.beside([loader.read(name("mlp.shared_expert_gate.weight"), 1, config.hidden)])
        shared = self._gated(name, "mlp.shared_expert", config.shared_ff)
        return Experts(router, self._experts(name), shared, gate, config.active)

    def _gated(self, name: Name, prefix: str, ff: int) -> Gated:
        gate, up, down = (name(f"{prefix}.{part}.weight") for part in GATED)
        loader, hidden = self.loader, self.config.hidden
        gate_up = loader.beside([loader.read(gate, ff, hidden), loader.read(up, ff, hidden)])
        return Gated(gate_up, loader.beside([loader.read(down, hidden, ff)]), ff)

    def _experts(self, name: Name) -> tuple[Gated, ...]:
        config, ff, hidden = self.config, self.config.expert_ff, self.config.hidden
        if name(JOINED) in self.there:
            ups = [[both] for both in self._apart(name(JOINED), 2 * ff, hidden)]
        elif name(TOGETHER[0]) in self.there:
            gates, others = (self._apart(name(part), ff, hidden) for part in TOGETHER[:2])
            ups = [[gate, up] for gate, up in zip(gates, others, strict=True)]
        else:
            return tuple(self._gated(name, f"mlp.experts.{i}", ff) for i in range(config.experts))
        pairs = zip(ups, self._apart(name(TOGETHER[2]), hidden, ff), strict=True)
        return tuple(Gated(self.loader.beside(up), self.loader.beside([low]), ff) for up, low in pairs)

    def _apart(self, name: str, rows: int, cols: int) -> list[Stored]:
        """A tensor of a matrix an expert, ``[experts, rows, cols]``, as matrices."""
        experts = self.config.experts
        if self.called.converted:
            whole = self.loader.read(name, experts * rows, cols)
        else:
            whole = self.loader.read(name, experts, rows * cols)
        return [Stored(whole.kind, rows, cols, data) for data in whole.data.view(experts, rows, -1)]


def _order(width: int, rotary: int) -> Tensor:
    """Of a head's rows: the pairs of its first ``rotary``, half of that apart, next to each other; then the rest."""
    return torch.cat([torch.arange(rotary).view(2, -1).T.reshape(-1), torch.arange(rotary, width)])
