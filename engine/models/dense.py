"""Llama and everything of its shape: RMS norm, rotary grouped attention, gated feed-forward, no biases.

Source: transformers' ``modeling_llama.py``, which the tests compare with. The two of a rotated pair are neighbours
here, as llama's converter to GGUF leaves them; transformers has them half a head apart, and such rows are put in order
on reading.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.models import layers
from engine.models.batch import Rows
from engine.models.cache import KV
from engine.models.layers import Stream
from engine.models.loading import Loader
from engine.weights import quants
from engine.weights.checkpoint import Checkpoint
from engine.weights.config import Config
from engine.weights.linear import Linear
from engine.weights.stored import Stored


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. ``qkv`` and ``gate_up`` are fused: their parts share an input."""

    attn_norm: Tensor
    qkv: Linear
    out: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def build(checkpoint: Checkpoint, loader: Loader, *, device: torch.device, rows: int, exact: bool) -> Decoder:
    """Read the weights of ``checkpoint`` and put the model together. ``rows`` 0 takes the checkpoint's whole window."""
    config = checkpoint.config
    names = {"token_embd.weight", "output_norm.weight"}
    names |= {f"blk.{i}.{part}.weight" for i in range(config.layers) for part in PARTS}
    loader.expect(names | (set() if config.tied else {"output.weight"}), {"rope_freqs.weight", "output.weight"})
    factors = None
    if config.rope_scaling is not None and config.rope_scaling.kind == "factors":
        factors = quants.decode_stored(loader.read("rope_freqs.weight", 1, config.head_dim // 2)).view(-1)
    table = loader.table("token_embd.weight", config.vocab, config.hidden)
    stack = [_layer(loader, config, i, pairs=checkpoint.form == "gguf") for i in range(config.layers)]
    norm = layers.norm_weight(loader.vector("output_norm.weight", config.hidden))
    head = table if config.tied else loader.table("output.weight", config.vocab, config.hidden)
    window = min(rows, config.window) if rows else config.window
    turns = layers.rotations(layers.frequencies(config, factors), window, device)
    return Decoder(config, table, stack, norm, head, turns, loader.nbytes, device=device, exact=exact)


def _layer(loader: Loader, config: Config, index: int, *, pairs: bool) -> Layer:
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def read(part: str, rows: int, cols: int) -> Stored:
        return loader.read(f"blk.{index}.{part}.weight", rows, cols)

    def norm(part: str) -> Tensor:
        return layers.norm_weight(loader.vector(f"blk.{index}.{part}.weight", config.hidden))

    q, k = read("attn_q", wide, config.hidden), read("attn_k", narrow, config.hidden)
    if not pairs:
        q, k = q.pick(_paired(q.rows, config.head_dim)), k.pick(_paired(k.rows, config.head_dim))
    gated = [read(part, config.ff, config.hidden) for part in ("ffn_gate", "ffn_up")]
    return Layer(
        norm("attn_norm"),
        loader.beside([q, k, read("attn_v", narrow, config.hidden)]),
        loader.beside([read("attn_output", config.hidden, wide)]),
        norm("ffn_norm"),
        loader.beside(gated),
        loader.beside([read("ffn_down", config.hidden, config.ff)]),
    )


def _paired(rows: int, width: int) -> Tensor:
    """The order that brings the two rows of a rotated pair, half a head of ``width`` apart, next to each other."""
    return torch.arange(rows).view(-1, 2, width // 2).transpose(1, 2).reshape(-1)


class Decoder:
    """A model whose weights are read. Holds no sequence: caches are the caller's."""

    def __init__(
        self,
        config: Config,
        table: Linear,
        stack: list[Layer],
        norm: Tensor,
        head: Linear,
        turns: Tensor,
        weights_bytes: int,
        *,
        device: torch.device,
        exact: bool,
    ) -> None:
        self._config, self._table, self._layers, self._norm, self._head = config, table, stack, norm, head
        self._turns, self._device = turns, device
        self._dtype = torch.float32 if exact else torch.bfloat16
        self.window = turns.shape[0]
        """Rows a sequence may have."""
        self.vocab = config.vocab
        """Token ids there are."""
        self.weights_bytes = weights_bytes
        """Bytes of all weights that stay in memory; a tied head counts once."""
        self.state_bytes, self.alike, self.path = 0, 1, "torch"
        self.kv_bytes_per_row = config.layers * 2 * config.kv_heads * config.head_dim * self._dtype.itemsize
        """Bytes a row takes in a cache."""

    def new_cache(self, rows: int) -> KV:
        """Room for ``rows`` rows, allocated and touched now."""
        config = self._config
        return KV(config.layers, config.kv_heads, rows, config.head_dim, self._dtype, self._device)

    def use(self, threads: int) -> None:
        """Torch's threads, of the whole process."""
        torch.set_num_threads(threads)

    def workspace(self, rows: int, start: int) -> int:
        """About how many bytes a step of ``rows`` new rows behind ``start`` takes beside weights and cache."""
        config = self._config
        wide = (config.heads + 2 * config.kv_heads) * config.head_dim
        activations = rows * (6 * config.hidden + 3 * wide + 4 * config.ff) * 4
        mask = rows * (start + rows) * 2 if start and rows > 1 else 0
        decoded = 2 * 2 * max(2 * config.ff * config.hidden, wide * config.hidden)
        return activations + mask + decoded + config.vocab * 4 * 3

    def forward(self, parts: Items[Rows]) -> Tensor:
        """One step over the rows of all ``parts``, as :class:`engine.models.registry.Model` says."""
        return torch.cat([self._alone(part) for part in parts])

    def _alone(self, part: Rows) -> Tensor:
        cache, start, end = part.cache, part.start, part.start + len(part.tokens)
        assert isinstance(cache, KV)
        if part.parents is not None and list(part.parents) != list(range(-1, len(part.tokens) - 1)):
            raise NotImplementedError("a tree of rows")
        if not 0 <= start < end <= min(cache.rows, self.window):
            raise ValueError(f"rows {start} to {end} do not fit into {min(cache.rows, self.window)}")
        tokens = torch.tensor(part.tokens, dtype=torch.int64, device=self._device)
        stream = Stream(self._table.gather(tokens), self._config.eps)
        turn = self._turns[start:end]
        mask = layers.causal_mask(end - start, start, self._dtype, self._device)
        for layer, kv in zip(self._layers, cache.layers, strict=True):
            self._attention(layer, stream, kv, turn, mask, start)
            self._feed_forward(layer, stream)
        stream.last(part.wanted)
        return self._head(stream.normed(self._norm, self._head.dtype)).float()

    def _attention(
        self, layer: Layer, stream: Stream, kv: Tensor, turn: Tensor, mask: Tensor | None, start: int
    ) -> None:
        config, end = self._config, start + turn.shape[0]
        qkv = layer.qkv(stream.normed(layer.attn_norm, layer.qkv.dtype)).float()
        heads = qkv.view(end - start, -1, config.head_dim)
        layers.rotate(heads[:, : config.heads + config.kv_heads], turn)
        kv[:, start:end].copy_(heads[:, config.heads :].transpose(0, 1))
        seen = layers.attend(heads[:, : config.heads].to(self._dtype), kv[:, :end], mask)
        stream.x.add_(layer.out(seen.to(layer.out.dtype)))

    def _feed_forward(self, layer: Layer, stream: Stream) -> None:
        gate, up = layer.gate_up(stream.normed(layer.ffn_norm, layer.gate_up.dtype)).chunk(2, -1)
        stream.x.add_(layer.down(F.silu(gate).mul_(up).to(layer.down.dtype)))
