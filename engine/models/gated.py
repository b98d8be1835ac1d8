"""The two mixers of a hybrid decoder: attention whose output is gated, and the gated delta rule.

Source: transformers' ``modeling_qwen3_5.py``, which the tests compare with. The two of a rotated pair are neighbours
here; the builder puts rows in order on reading.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.models import delta
from engine.models.alike import Choice
from engine.models.attention import Place, paths
from engine.models.batch import Rows
from engine.models.delta import Sizes
from engine.models.hybrid_cache import HybridCache, Pending, Record, State
from engine.models.ways import Way
from engine.weights.config import Config
from engine.weights.linear import Linear


class Flow:
    """One part on its way through a step: where its rows stand, what is folded in first, what is noted of drafts."""

    def __init__(self, part: Rows, first: int, width: int, way: Way) -> None:
        assert isinstance(part.cache, HybridCache)
        self.part, self.cache, self.place = part, part.cache, Place(part)
        self.own = slice(first, first + self.place.n)
        device = self.cache.state.delta.device
        self.parents = tuple(range(-1, self.place.n - 1)) if part.parents is None else tuple(part.parents)
        self.seen = self.path = self.folding = None
        if not (self.place.chain and way.chains):
            self.seen = torch.tensor(delta.taps(paths(self.parents), width), device=device)
        self.pending: Pending | None = self.cache.begin(part.start)
        if self.pending is not None:
            self.path = torch.tensor(self.pending.path, device=device)
            if not way.settling.chains:
                chain = paths(range(-1, len(self.pending.path) - 1))
                self.folding = torch.tensor(delta.taps(chain, width), device=device)
        self.noted: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(self, hidden: Tensor) -> Record:
        """What is kept of draft rows; ``hidden``: this part's."""
        inputs, decay, beta = (torch.stack(tensors) for tensors in zip(*self.noted, strict=True))
        return Record(tuple(self.part.tokens), self.parents, inputs, decay, beta, hidden)


@dataclass(frozen=True, slots=True)
class Attention:
    """``mix`` gives queries, keys, values and the gates of the outputs. Norms as for a stream.

    ``dtype``: of rows in a cache where torch attends.
    """

    mix: Linear
    out: Linear
    q_norm: Tensor
    k_norm: Tensor
    config: Config = field(repr=False)
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, x: Tensor, places: Items[Place], kvs: Items[Tensor], turn: Tensor, way: Way) -> Tensor:
        """Float32 ``[n, hidden]`` → ``[n, hidden]``. ``kvs``: this layer's of each part."""
        config, values = self.config, self.config.heads + 2 * self.config.kv_heads
        heads = self._turned(x, turn, way)
        q, new = heads[:, : config.heads], heads[:, config.heads : values].transpose(0, 1)
        seen, first = [], 0
        for place, kv in zip(places, kvs, strict=True):
            own = slice(first, first + place.n)
            seen.append(way.attend(place, q[own], new[:, own], kv))
            first += place.n
        opened = way.each(torch.sigmoid, heads[:, values:].flatten(1))
        together = seen[0] if len(seen) == 1 else torch.cat(seen)
        return self.out((together * opened).to(self.out.dtype)).float()

    def write(self, x: Tensor, kv: Tensor, first: int, turn: Tensor, way: Way) -> None:
        """The keys and values of rows from ``first`` on, and nothing else."""
        config = self.config
        new = self._turned(x, turn, way)[:, config.heads : config.heads + 2 * config.kv_heads]
        kv[:, first : first + x.shape[0]].copy_(new.transpose(0, 1))

    def _turned(self, x: Tensor, turn: Tensor, way: Way) -> Tensor:
        config, both = self.config, self.config.heads + self.config.kv_heads
        heads = self.mix(x.to(self.mix.dtype)).float().view(x.shape[0], -1, config.head_dim)
        way.norm_heads(heads[:, : config.heads], self.q_norm, config.eps)
        way.norm_heads(heads[:, config.heads : both], self.k_norm, config.eps)
        way.rotate(heads[:, :both], turn)
        return heads

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices."""
        return self.mix, self.out

    def evened(self, choice: Choice) -> Attention:
        """With matrices whose rows come out alike."""
        wide = self.config.heads * self.config.head_dim
        return replace(self, mix=choice.of(self.mix, self.config.hidden), out=choice.of(self.out, wide))


@dataclass(frozen=True, slots=True)
class Delta:
    """``mix`` gives the convolution's inputs, the outputs' gates, and a head's rate and decay.

    ``index``: which of the recurrent layers it is. ``conv`` ``[taps, channels]``. A row's decay is
    ``exp(-slope * softplus(a + bias))``, a head each. ``norm``: of a head's output.
    """

    index: int
    mix: Linear
    out: Linear
    conv: Tensor
    slope: Tensor
    bias: Tensor
    norm: Tensor
    sizes: Sizes
    eps: float
    hidden: int

    def __call__(self, x: Tensor, flows: Items[Flow], way: Way) -> Tensor:
        """Float32 ``[n, hidden]`` → ``[n, hidden]``."""
        heads, wide = self.sizes.value_heads, self.sizes.value_heads * self.sizes.value_dim
        widths = [self.conv.shape[1], wide, heads, heads]
        inputs, gate, rate, fade = torch.split(self.mix(x.to(self.mix.dtype)).float(), widths, -1)
        beta, decay = way.each(torch.sigmoid, rate), way.faded(way.each(F.softplus, fade + self.bias) * -self.slope)
        out = torch.cat([self._part(flow, inputs, decay, beta, way) for flow in flows])
        way.norm_heads(out, self.norm, self.eps)
        return self.out((out.flatten(1) * way.silu(gate)).to(self.out.dtype)).float()

    def _part(self, flow: Flow, inputs: Tensor, decay: Tensor, beta: Tensor, way: Way) -> Tensor:
        own, state, at = flow.own, self._settled(flow, way.settling), self.index
        seen = torch.cat([state.tail[at], inputs[own]])
        mixed = delta.split(way.conv(seen, flow.seen, self.conv), self.sizes, way.unit)
        parents = None if flow.place.chain else flow.parents
        out, last = way.recall(state.delta[at], mixed, decay[own], beta[own], parents)
        if flow.part.draft:
            flow.noted.append((inputs[own].clone(), decay[own].clone(), beta[own].clone()))
        else:
            state.delta[at] = last
            state.tail[at] = seen[len(seen) - self.conv.shape[0] + 1 :]
        return out

    def _settled(self, flow: Flow, way: Way) -> State:
        """The state to go on from: behind the pending commit, which is folded in here."""
        state, pending, at = flow.cache.state, flow.pending, self.index
        if pending is None:
            return state
        record, path, spare = pending.record, flow.path, flow.cache.spare
        inputs, decay, beta = (tensor[at][path] for tensor in (record.inputs, record.decay, record.beta))
        seen = torch.cat([state.tail[at], inputs])
        mixed = delta.split(way.conv(seen, flow.folding, self.conv), self.sizes, way.unit)
        spare.delta[at] = way.fold(state.delta[at], mixed, decay, beta)
        spare.tail[at] = seen[len(seen) - self.conv.shape[0] + 1 :]
        return spare

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices."""
        return self.mix, self.out

    def evened(self, choice: Choice) -> Delta:
        """With matrices whose rows come out alike."""
        wide = self.sizes.value_heads * self.sizes.value_dim
        return replace(self, mix=choice.of(self.mix, self.hidden), out=choice.of(self.out, wide))
