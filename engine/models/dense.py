"""Dense decoders: RMS norm, rotary grouped attention, gated feed-forward; perhaps a bias or a norm on q and k.

Llama, Mistral, Qwen2, Qwen3 and what has their shape. Source: transformers' ``modeling_llama.py``, ``_qwen2.py`` and
``_qwen3.py``, which the tests compare with. The two of a rotated pair are neighbours here, as llama's converter to GGUF
leaves them; transformers and the other converters have them half a head apart, and such rows are put in order on
reading.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.models import alike, fixed, layers, workspace
from engine.models.attention import Place, paths
from engine.models.batch import Rows
from engine.models.cache import KV
from engine.models.elementwise import rowwise
from engine.models.fixed import Given
from engine.models.graphs import Cuda, Graphs, Recorder, tried
from engine.models.layers import Stream
from engine.models.loading import Loader
from engine.native import step as native
from engine.weights import quants
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.config import Config
from engine.weights.linear import Linear
from engine.weights.stored import Stored


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. ``qkv`` and ``gate_up`` are fused: their parts share an input.

    ``qkv_bias``: float32, added to what ``qkv`` gives. ``q_norm``, ``k_norm``: of a head, as
    :func:`engine.models.layers.norm_weight` makes them. ``window``: how many rows a row sees, itself among them,
    0 for all.
    """

    attn_norm: Tensor
    qkv: Linear
    out: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0


QKV, NORMS = ("attn_q", "attn_k", "attn_v"), ("attn_q_norm", "attn_k_norm")
PARTS = ("attn_norm", *QKV, "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def build(
    checkpoint: Checkpoint,
    loader: Loader,
    *,
    device: torch.device,
    rows: int,
    exact: bool,
    neighbours: bool = False,
) -> Decoder:
    """Read the weights of ``checkpoint`` and put the model together. ``rows`` 0 takes the checkpoint's whole window.

    ``neighbours``: the architecture's converter to GGUF puts the two of a rotated pair next to each other.
    """
    config = checkpoint.config
    paired = neighbours and checkpoint.form == "gguf"
    if paired and config.rotary not in (0, config.head_dim):
        raise CheckpointError("Rotating only a part of each head (rope.dimension_count) is not supported here.")
    loader.expect(_names(config), {"rope_freqs.weight", "output.weight"})
    scaling, factors = config.rope_scaling, None
    if scaling is not None and scaling.kind == "factors":
        factors = quants.decode_stored(loader.read("rope_freqs.weight", 1, config.head_dim // 2)).view(-1)
    table = loader.table("token_embd.weight", config.vocab, config.hidden)
    stack = [_layer(loader, config, i, paired=paired) for i in range(config.layers)]
    norm = layers.norm_weight(loader.vector("output_norm.weight", config.hidden))
    head = table if config.tied else loader.table("output.weight", config.vocab, config.hidden)
    window = min(rows, config.window) if rows else config.window
    size = scaling.attention if scaling is not None else 1.0
    turns = layers.rotations(layers.frequencies(config, factors), window, device, size)
    decoder = Decoder(config, table, stack, norm, head, turns, loader.nbytes, device=device, exact=exact)
    decoder.even()
    return decoder


def _names(config: Config) -> set[str]:
    """The tensors that a model of ``config`` has."""
    weights = [*PARTS, *(NORMS if config.qk_norm else ())]
    named = {f"blk.{i}.{part}.weight" for i in range(config.layers) for part in weights}
    named |= {f"blk.{i}.{part}.bias" for i in range(config.layers) for part in QKV if config.qkv_bias}
    return named | {"token_embd.weight", "output_norm.weight"} | (set() if config.tied else {"output.weight"})


def _layer(loader: Loader, config: Config, index: int, *, paired: bool) -> Layer:
    width, turned = config.head_dim, config.rotary or config.head_dim
    wide, narrow = config.heads * width, config.kv_heads * width

    def read(part: str, rows: int, cols: int) -> Stored:
        return loader.read(f"blk.{index}.{part}.weight", rows, cols)

    def norm(part: str) -> Tensor:
        return layers.norm_weight(loader.vector(f"blk.{index}.{part}.weight", config.hidden))

    def order(rows: int) -> Tensor:
        """Of a query's, key's or head norm's elements, the order they are kept in."""
        return torch.arange(rows) if paired else _paired(rows, width, turned)

    def head_norm(part: str) -> Tensor | None:
        if not config.qk_norm:
            return None
        vector = loader.vector(f"blk.{index}.{part}.weight", width)
        return layers.norm_weight(vector[order(width).to(vector.device)])

    def bias() -> Tensor | None:
        if not config.qkv_bias:
            return None
        q, k, v = (loader.vector(f"blk.{index}.{part}.bias", n) for part, n in zip(QKV, sizes, strict=True))
        return torch.cat([q[order(wide).to(q.device)], k[order(narrow).to(k.device)], v])

    sizes = (wide, narrow, narrow)
    q, k = read("attn_q", wide, config.hidden), read("attn_k", narrow, config.hidden)
    if not paired:
        q, k = q.pick(order(wide)), k.pick(order(narrow))
    gated = [read(part, config.ff, config.hidden) for part in ("ffn_gate", "ffn_up")]
    return Layer(
        norm("attn_norm"),
        loader.beside([q, k, read("attn_v", narrow, config.hidden)]),
        loader.beside([read("attn_output", config.hidden, wide)]),
        norm("ffn_norm"),
        loader.beside(gated),
        loader.beside([read("ffn_down", config.hidden, config.ff)]),
        bias(),
        head_norm("attn_q_norm"),
        head_norm("attn_k_norm"),
        config.seen(index),
    )


def _paired(rows: int, width: int, turned: int) -> Tensor:
    """The order that brings the two rows of a rotated pair next to each other, in heads of ``width``.

    They are ``turned / 2`` apart, and the rest of a head is not turned.
    """
    head = torch.arange(width)
    head[:turned] = head[:turned].view(2, -1).t().reshape(-1)
    return (torch.arange(0, rows, width)[:, None] + head).view(-1)


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
        self._step = native.step_for(config, stack, table, norm, head, turns, device, exact)
        half = torch.bfloat16 if self._step is None else torch.float16
        self._dtype = torch.float32 if exact else half
        self.window = turns.shape[0]
        """Rows a sequence may have."""
        self.vocab = config.vocab
        """Token ids there are."""
        self.weights_bytes = weights_bytes
        """Bytes of all weights that stay in memory; a tied head counts once."""
        self.state_bytes = 0
        self.path = f"torch {device.type}" if self._step is None else native.path()
        """How steps are computed."""
        self._kinds = _kinds(stack)
        self._rounds, self._rounds_head = stack, head
        self.graphs: Graphs | None = None
        """On cuda, what rounds run through; :meth:`record` sets it."""
        self.alike = 1 if self._step is None else native.ALIKE
        """Up to so many rows of rounds come out as they would alone; :meth:`even` finds out what torch does."""
        self.kv_bytes_per_row = config.layers * 2 * config.kv_heads * config.head_dim * self._dtype.itemsize
        """Bytes a row takes in a cache."""

    def new_cache(self, rows: int) -> KV:
        """Room for ``rows`` rows, allocated and touched now."""
        return self._cache(rows, self._config.layers)

    def _cache(self, rows: int, deep: int) -> KV:
        config = self._config
        return KV(deep, config.kv_heads, rows, config.head_dim, self._dtype, self._device)

    def use(self, threads: int) -> None:
        """Processors for the steps from here on; torch's are those of the whole process."""
        torch.set_num_threads(threads)
        if self._step is not None:
            self._step.threads = threads

    def workspace(self, rows: int, start: int) -> int:
        """About how many bytes a step of ``rows`` new rows behind ``start`` takes beside weights and cache."""
        if self._step is not None:
            return self._step.workspace(rows)
        return workspace.of_step(self._config, self._kinds, self._head, rows, start, self._dtype.itemsize)

    def forward(self, parts: Items[Rows]) -> Tensor:
        """One step over the rows of all ``parts``, as :class:`engine.models.registry.Model` says.

        In torch, rows of rounds are multiplied together; chunks, which gain nothing from it, each by itself.
        """
        if self._step is not None:
            return self._step.forward(parts)
        for part in parts:
            end = part.start + len(part.tokens)
            room = min(part.cache.rows, self.window)
            if not 0 <= part.start < end <= room:
                raise ValueError(f"rows {part.start} to {end} do not fit into {room}")
        rounds = all(part.draft or len(part.tokens) == 1 for part in parts)
        if len(parts) > 1 and not rounds:
            return torch.cat([self.forward([part]) for part in parts])
        if rounds and self.graphs is not None and sum(len(part.tokens) for part in parts) <= alike.MOST:
            return self.graphs.forward(parts)
        even = rounds and self.alike > 1
        stream = self._passed(parts, self._rounds if even else self._layers, even=even)
        if not any(part.wanted for part in parts):
            return torch.empty(0, self.vocab, device=self._device)
        stream.pick(_wanted(parts, self._device))
        head = self._rounds_head if even else self._head
        return head(stream.normed(self._norm, head.dtype)).float()

    def _passed(self, parts: Items[Rows], stack: list[Layer], *, even: bool) -> Stream:
        """The rows of all ``parts`` behind the layers of ``stack``. ``even``: a row's bits are its own."""
        places = [Place(part) for part in parts]
        ids = torch.tensor([token for part in parts for token in part.tokens], dtype=torch.int64, device=self._device)
        stream = Stream(self._table.gather(ids), self._config.eps)
        if len(places) == 1 and places[0].chain:
            turn = self._turns[places[0].start : places[0].stop]
        else:
            at = [position for place in places for position in place.positions]
            turn = self._turns[torch.tensor(at, device=self._device)]
        caches = [part.cache.layers for part in parts if isinstance(part.cache, KV)]
        for layer, *kvs in zip(stack, *caches, strict=True):
            self._attention(layer, stream, places, kvs, turn, even=even)
            self._feed_forward(layer, stream, even=even)
        return stream

    def _attention(
        self, layer: Layer, stream: Stream, places: list[Place], kvs: list[Tensor], turn: Tensor, *, even: bool
    ) -> None:
        q, new = self._projected(layer, stream, turn)
        attend = Place.each if even else Place.together
        seen, first = [], 0
        for place, kv in zip(places, kvs, strict=True):
            own = slice(first, first + place.n)
            seen.append(attend(place, q[own], new[:, own], kv, layer.window))
            first += place.n
        stream.x.add_(layer.out((seen[0] if len(seen) == 1 else torch.cat(seen)).to(layer.out.dtype)))

    def _projected(self, layer: Layer, stream: Stream, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``[n, heads, head_dim]``; keys and values ``[2 * kv_heads, n, head_dim]``, float32."""
        config, both = self._config, self._config.heads + self._config.kv_heads
        qkv = layer.qkv(stream.normed(layer.attn_norm, layer.qkv.dtype)).float()
        if layer.qkv_bias is not None:
            qkv.add_(layer.qkv_bias)
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            layers.norm_heads(heads[:, : config.heads], layer.q_norm, config.eps)
            layers.norm_heads(heads[:, config.heads : both], layer.k_norm, config.eps)
        layers.rotate(heads[:, :both], turn)
        return heads[:, : config.heads].to(self._dtype), heads[:, config.heads :].transpose(0, 1)

    def _feed_forward(self, layer: Layer, stream: Stream, *, even: bool) -> None:
        gate, up = layer.gate_up(stream.normed(layer.ffn_norm, layer.gate_up.dtype)).chunk(2, -1)
        gated = rowwise(F.silu, gate) if even else F.silu(gate)
        stream.x.add_(layer.down(gated.mul_(up).to(layer.down.dtype)))

    def _fixed(self, given: Given, caches: Items[KV]) -> Tensor:
        """Logits of all rows of a round in fixed shapes, for :class:`engine.models.graphs.Graphs`."""
        stream = Stream(self._table.gather(given.tokens), self._config.eps)
        turn = self._turns[given.positions]
        for layer, *kvs in zip(self._layers, *(cache.layers for cache in caches), strict=True):
            q, new = self._projected(layer, stream, turn)
            seen = fixed.attend(q, new, kvs, given, layer.window)
            stream.x.add_(layer.out(seen.to(layer.out.dtype)))
            self._feed_forward(layer, stream, even=False)
        return self._head(stream.normed(self._norm, self._head.dtype)).float()

    def record(self, recorder: Recorder) -> None:
        """Run rounds through graphs from here on, where a trial of it says that they serve."""
        made = Graphs(self._fixed, self.vocab, self._device, recorder)
        near = 1e-3 if self._dtype == torch.float32 else 0.05
        self.graphs = tried(made, self.forward, self.new_cache, self.window, near)
        if self.graphs is not None:
            self.alike = alike.MOST

    def even(self) -> None:
        """Make rows of rounds come out alike where torch lets them, and set ``alike`` by a trial of it."""
        if self._step is not None:
            return
        config, choice = self._config, alike.Choice(self._device)
        wide = config.heads * config.head_dim
        self._rounds = [
            replace(
                layer,
                qkv=choice.of(layer.qkv, config.hidden),
                out=choice.of(layer.out, wide),
                gate_up=choice.of(layer.gate_up, config.hidden),
                down=choice.of(layer.down, config.ff),
            )
            for layer in self._layers
        ]
        self._rounds_head = choice.of(self._head, config.hidden)
        self.alike = alike.MOST if self._tried() else 1
        if self._device.type == "cuda":
            self.record(Cuda(self._device))

    def _tried(self) -> bool:
        """Whether the rows of two trees and of a chain, in one step, are those of steps of one row."""
        stack, rows = [*self._rounds[:1], *self._rounds[1:][-1:]], min(self.window, 96)
        before, most = rows * 2 // 3, min(alike.MOST, rows // 3)
        trees = [[-1, 0, 1, 0, 3, -1], list(range(-1, 2)), [-1, 0, 0, 2, 2]]
        if most < sum(map(len, trees)):
            return False
        made = torch.Generator().manual_seed(before)
        joint, expected = [], []
        for parents in trees:
            tokens = torch.randint(0, self.vocab, (len(parents),), generator=made).tolist()
            cache, plain = (self._cache(rows, len(stack)) for _ in range(2))
            cache.all.copy_(torch.randn(cache.all.shape, generator=made))
            for path in paths(parents):
                plain.all.copy_(cache.all)
                for depth, row in enumerate(path):
                    one = [Rows(plain, tokens[row : row + 1], before + depth, draft=True)]
                    last = self._passed(one, stack, even=True)
                expected.append(last.x)
            joint.append(Rows(cache, tokens, before, parents, len(parents), draft=True))
        return torch.equal(self._passed(joint, stack, even=True).x, torch.cat(expected))


def _kinds(stack: list[Layer]) -> list[Layer]:
    """One layer of each kind: of those whose matrices have the same forms, the first."""
    found: dict[tuple[type, ...], Layer] = {}
    for layer in stack:
        found.setdefault(tuple(type(m) for m in (layer.qkv, layer.out, layer.gate_up, layer.down)), layer)
    return list(found.values())


def _wanted(parts: Items[Rows], device: torch.device) -> slice | Tensor:
    """Which of the rows of all ``parts`` are asked for."""
    if len(parts) == 1:
        return slice(len(parts[0].tokens) - parts[0].wanted, None)
    ends = list(accumulate(len(part.tokens) for part in parts))
    at = [range(end - part.wanted, end) for part, end in zip(parts, ends, strict=True)]
    return torch.tensor(list(chain.from_iterable(at)), device=device)
