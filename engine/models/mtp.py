"""The layer that guesses a token further (multi-token prediction): drafts, never text.

Of row ``t`` it sees the model's hidden row behind the final norm and the token that follows; from these it guesses the
token after that. Wired as vLLM's ``qwen3_next_mtp.py`` and ``qwen3_5_mtp.py`` describe it::

    x   = fc([norm(embedding of token t + 1), norm(hidden row t)])
    x   = one attending layer, over such rows 0 … t
    out = norm(x)        # through the model's head: token t + 2; as hidden row t + 1 with that token: the next guess

There is no reference to compare with: transformers drops these tensors. What it guesses is verified like any draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.attention import Place
from engine.models.batch import Rows
from engine.models.experts import Feed
from engine.models.gated import Attention
from engine.models.hybrid_cache import HybridCache
from engine.models.layers import Stream
from engine.models.ways import WHOLE, Way
from engine.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class Guess:
    """Its weights; the embedding and the head are the model's. Norms as for a stream."""

    token_norm: Tensor
    hidden_norm: Tensor
    fc: Linear
    attn_norm: Tensor
    attention: Attention
    ffn_norm: Tensor
    feed: Feed
    norm: Tensor
    table: Linear
    head: Linear
    turns: Tensor
    eps: float
    way: Way = WHOLE

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its own matrices."""
        return self.fc, *self.attention.linears, *self.feed.linears

    def write(self, cache: HybridCache, first: int, hidden: Tensor, tokens: Items[int]) -> None:
        """The rows from ``first`` on: ``hidden`` ``[n, hidden]``, each with the token behind it."""
        if not tokens:
            return
        x = self.way.normed(self._joined(hidden, tokens), self.attn_norm)
        self.attention.write(x, cache.kv.layers[-1], first, self.turns[first : first + len(tokens)], self.way)

    def catch_up(self, cache: HybridCache) -> None:
        """The rows of a pending commit, unless they were written to guess from."""
        if cache.guessed < cache.stands - 1:
            first, hidden, tokens = cache.untold()
            self.write(cache, first, hidden[:-1], tokens)
            cache.guessed = cache.stands - 1

    def tokens(self, cache: HybridCache, token: int, most: int) -> list[int]:
        """Up to ``most`` tokens, the likeliest each, that may follow ``token``, itself behind the cache's last row."""
        stands = cache.stands
        most = min(most, min(cache.rows, len(self.turns)) - stands)
        if stands == 0 or most < 1:
            return []
        first, hidden, between = cache.untold()
        given, found = [*between, token], list[int]()
        for _ in range(most):
            hidden = self._step(cache, first, hidden, given)
            first += len(given)
            given = [int(self.head(hidden.to(self.head.dtype)).float().argmax())]
            found += given
        cache.guessed = stands
        return found

    def _step(self, cache: HybridCache, first: int, hidden: Tensor, tokens: Items[int]) -> Tensor:
        """The rows from ``first`` on; the last one behind the norm, ``[1, hidden]``."""
        stream, place = self._joined(hidden, tokens), Place(Rows(cache, tokens, first))
        x, kv, way = self.way.normed(stream, self.attn_norm), cache.kv.layers[-1], self.way
        stream.x.add_(self.attention(x, [place], [kv], self.turns[first : place.stop], way))
        stream.pick(slice(-1, None))
        stream.x.add_(self.feed(way.normed(stream, self.ffn_norm), way))
        return way.normed(stream, self.norm)

    def _joined(self, hidden: Tensor, tokens: Items[int]) -> Stream:
        ids = torch.tensor(tokens, dtype=torch.int64, device=hidden.device)
        token = self.way.normed(Stream(self.table.gather(ids), self.eps), self.token_norm).to(self.fc.dtype)
        row = self.way.normed(Stream(hidden, self.eps), self.hidden_norm).to(self.fc.dtype)
        return Stream(self.fc(torch.cat([token, row], -1)).float(), self.eps)
