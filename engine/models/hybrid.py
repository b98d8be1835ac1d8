"""Hybrid decoders: of a few layers one attends, the others hold a state; feed-forward layers of one kind or of experts.

Qwen3.5 and its mixture-of-experts form. Source: transformers' ``modeling_qwen3_5.py`` and ``_moe.py``, which the tests
compare with. For text the three positions of its rotary angles are one: plain angles of a head's first part.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from msgspec import structs
from torch import Tensor

from engine.models import alike, hybrid_workspace, ways
from engine.models.attention import paths
from engine.models.batch import Rows
from engine.models.experts import Feed
from engine.models.gated import Attention, Delta, Flow
from engine.models.hybrid_cache import HybridCache
from engine.models.layers import Stream
from engine.models.mtp import Guess
from engine.models.ways import EVEN, NATIVE, WHOLE, Way
from engine.native import step
from engine.weights.hybrid import HybridConfig
from engine.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Norms as for a stream."""

    mixer_norm: Tensor
    mixer: Attention | Delta
    ffn_norm: Tensor
    feed: Feed

    def evened(self, choice: alike.Choice, hidden: int) -> Layer:
        """With matrices whose rows come out alike."""
        return replace(self, mixer=self.mixer.evened(choice), feed=self.feed.evened(choice, hidden))


@dataclass(frozen=True, slots=True)
class Weights:
    """All that was read. ``nbytes``: what stays in memory; a tied head counts once."""

    table: Linear
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    turns: Tensor
    guess: Guess | None
    nbytes: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix."""
        each = [linear for layer in self.layers for linear in (*layer.mixer.linears, *layer.feed.linears)]
        return self.table, self.head, *each, *(self.guess.linears if self.guess is not None else ())


class Hybrid:
    """A model whose weights are read. Holds no sequence: caches are the caller's."""

    def __init__(self, config: HybridConfig, weights: Weights, *, device: torch.device, exact: bool) -> None:
        native = not exact and device.type == "cpu" and ways.native(weights.linears)
        if native and weights.guess is not None:
            weights = replace(weights, guess=replace(weights.guess, way=NATIVE))
        self._config, self._weights, self._device = config, weights, device
        self._native = native
        self._dtype = torch.float32 if exact else torch.float16 if native else torch.bfloat16
        self.window = len(weights.turns)
        """Rows a sequence may have."""
        self.vocab = config.vocab
        """Token ids there are."""
        self.weights_bytes = weights.nbytes
        """Bytes of all weights that stay in memory; a tied head counts once."""
        self.mtp = weights.guess is not None
        """Whether it has a layer that guesses further tokens."""
        rows = (sum(config.attends) + config.mtp) * 2 * config.kv_heads * config.head_dim
        self.kv_bytes_per_row = rows * self._dtype.itemsize
        """Bytes a row takes in a cache."""
        self.state_bytes = HybridCache(config, 0, self._dtype, device).nbytes
        """Bytes of both states in a cache."""
        self.path = step.path() if native else f"torch {device.type}"
        """How steps are computed."""
        self._rounds, self._rounds_head = weights.layers, weights.head
        self.alike = step.ALIKE if native else self._even()
        """Rows that come out bit for bit as alone: of any step, or in torch of rounds, of operations of one shape."""

    def new_cache(self, rows: int) -> HybridCache:
        """Room for ``rows`` rows, allocated and touched now."""
        return HybridCache(self._config, rows, self._dtype, self._device)

    def use(self, threads: int) -> None:
        """Torch's threads, of the whole process."""
        torch.set_num_threads(threads)

    def workspace(self, rows: int, start: int) -> int:
        """About how many bytes a step of ``rows`` new rows behind ``start`` takes beside weights and cache."""
        size = self._dtype.itemsize
        return hybrid_workspace.of_step(self._config, self._weights, rows, start, size, native=self._native)

    def propose(self, cache: HybridCache, token: int, most: int) -> list[int]:
        """Up to ``most`` guesses of what follows ``token``, the last one committed, which has no row yet."""
        return [] if self._weights.guess is None else self._weights.guess.tokens(cache, token, most)

    def forward(self, parts: Items[Rows]) -> Tensor:
        """One step over the rows of all ``parts``, as :class:`engine.models.registry.Model` says.

        Rows of rounds are multiplied together; chunks, which gain nothing from it, each by itself. A part that does not
        begin where its cache stands begins anew there: ``HybridCache.begin``.
        """
        for part in parts:
            end, room = part.start + len(part.tokens), min(part.cache.rows, self.window)
            if not 0 <= part.start < end <= room:
                raise ValueError(f"rows {part.start} to {end} do not fit into {room}")
        rounds = all(part.draft or len(part.tokens) == 1 for part in parts)
        if len(parts) > 1 and not rounds:
            return torch.cat([self.forward([part]) for part in parts])
        way = NATIVE if self._native else EVEN if rounds else WHOLE
        hidden = self._passed(parts, self._rounds if rounds else self._weights.layers, way)
        ends = list(accumulate(len(part.tokens) for part in parts))
        at = [row for end, part in zip(ends, parts, strict=True) for row in range(end - part.wanted, end)]
        if not at:
            return torch.empty(0, self.vocab, device=self._device)
        head = self._rounds_head if rounds else self._weights.head
        return head(hidden[torch.tensor(at, device=self._device)].to(head.dtype)).float()

    def _passed(self, parts: Items[Rows], stack: Items[Layer], way: Way) -> Tensor:
        """The rows of all ``parts`` behind the layers of ``stack`` and the final norm, float32.

        Their caches have what they leave.
        """
        weights, guess = self._weights, self._weights.guess
        ends = list(accumulate((len(part.tokens) for part in parts), initial=0))
        flows = [Flow(part, first, self._config.conv, way) for part, first in zip(parts, ends[:-1], strict=True)]
        places = [flow.place for flow in flows]
        if guess is not None:
            for flow in flows:
                guess.catch_up(flow.cache)
        ids = torch.tensor([token for part in parts for token in part.tokens], dtype=torch.int64, device=self._device)
        turn = weights.turns[torch.tensor([at for place in places for at in place.positions], device=self._device)]
        stream, attending = Stream(weights.table.gather(ids), self._config.eps), 0
        for layer in stack:
            x = way.normed(stream, layer.mixer_norm)
            if isinstance(layer.mixer, Delta):
                stream.x.add_(layer.mixer(x, flows, way))
            else:
                kvs = [flow.cache.kv.layers[attending] for flow in flows]
                stream.x.add_(layer.mixer(x, places, kvs, turn, way))
                attending += 1
            stream.x.add_(layer.feed(way.normed(stream, layer.ffn_norm), way))
        hidden = way.normed(stream, weights.norm)
        for flow in flows:
            self._leave(flow, hidden[flow.own])
        return hidden

    def _leave(self, flow: Flow, hidden: Tensor) -> None:
        """What a step leaves in a cache beside rows: a state that has the pending commit, and either drafts or rows."""
        cache, part, guess = flow.cache, flow.part, self._weights.guess
        if flow.pending is not None:
            if guess is not None:
                cache.spare.hidden.copy_(flow.pending.record.hidden[flow.pending.path[-1]])
            cache.folded()
        kept = hidden.clone() if guess is not None else hidden[:, :0]
        if part.draft:
            cache.note(flow.record(kept))
            return
        if guess is not None:
            before = torch.cat([cache.state.hidden[None], kept[:-1]])
            skip = part.start == 0
            guess.write(cache, part.start - 1 + skip, before[skip:], list(part.tokens)[skip:])
            cache.state.hidden.copy_(kept[-1])
            cache.guessed = part.start + len(part.tokens) - 1
        cache.advance(len(part.tokens))

    def _even(self) -> int:
        """Make the rows of rounds come out alike where torch lets them; up to how many do."""
        choice, hidden = alike.Choice(self._device), self._config.hidden
        self._rounds = tuple(layer.evened(choice, hidden) for layer in self._weights.layers)
        self._rounds_head = choice.of(self._weights.head, hidden)
        return alike.MOST if self._tried() else 1

    def _tried(self) -> bool:
        """Whether the rows of two trees and of a chain, in one step, are those of steps of one row.

        Of the first layer of each kind: matrices of one shape are of one kind throughout.
        """
        attends = self._config.attends
        picked = sorted((attends.index(True), attends.index(False)))
        config = structs.replace(self._config, layers=2, attends=tuple(attends[i] for i in picked))
        stack, rows = [self._rounds[i] for i in picked], min(self.window, 96)
        before, trees = rows * 2 // 3, [[-1, 0, 1, 0, 3, -1], [-1, 0, 1], [-1, 0, 0, 2, 2]]
        if min(alike.MOST, rows - before) < sum(map(len, trees)):
            return False
        made = torch.Generator().manual_seed(before)
        tokens = torch.randint(0, self.vocab, (before,), generator=made).tolist()
        caches = [HybridCache(config, rows, self._dtype, self._device) for _ in range(4)]
        for cache in caches:
            self._passed([Rows(cache, tokens, 0)], stack, WHOLE)
        plain, joint, expected = caches[3], [], []
        begin = plain.mark()
        for cache, parents in zip(caches, trees, strict=False):
            for path in paths(parents):
                plain.go_back(begin)
                for depth, row in enumerate(path):
                    one = [Rows(plain, tokens[row : row + 1], before + depth, draft=True)]
                    last = self._passed(one, stack, EVEN)
                    plain.keep(before + depth, [0])
                expected.append(last)
            joint.append(Rows(cache, tokens[: len(parents)], before, parents, draft=True))
        return torch.equal(self._passed(joint, stack, EVEN), torch.cat(expected))
