"""Caches for the tests of what stays resident: rows that are their tokens, with or without a state beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.cache import Mark
from tests.fake_engine import FakeCache

GRID = 4
PRIME = 1_000_003


def state_of(tokens: Sequence[int]) -> int:
    """The recurrent state behind ``tokens``."""
    state = 0
    for token in tokens:
        state = (state * 31 + token + 1) % PRIME
    return state


class Recalling(FakeCache):
    """Also a state that is made of all rows. It can go back by the last two steps."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.state = torch.zeros(1, dtype=torch.int64)
        self.stands = 0
        self.recent: dict[int, Tensor] = {}

    def write(self, start: int, tokens: Sequence[int]) -> None:
        assert start == self.stands
        self.recent = dict([*self.recent.items(), (self.stands, self.state.clone())][-2:])
        for token in tokens:
            self.state = (self.state * 31 + token + 1) % PRIME
        self.stands = start + len(tokens)

    def rewind(self, rows: int) -> int:
        if rows != self.stands:
            known = rows in self.recent
            self.state = self.recent[rows].clone() if known else torch.zeros(1, dtype=torch.int64)
            self.stands = rows if known else 0
        return self.stands

    def mark(self) -> Mark:
        return Mark(self.stands, {"state": self.state.clone()})

    def go_back(self, mark: Mark | None) -> None:
        self.stands = 0 if mark is None else mark.rows
        self.state = torch.zeros(1, dtype=torch.int64) if mark is None else mark.tensors["state"].clone()
        self.recent = {}


def make(recurrent: bool, rows: int = 96) -> FakeCache:
    return Recalling(rows) if recurrent else FakeCache(rows)


def write(cache: FakeCache, start: int, tokens: Sequence[int]) -> None:
    """One step: ``tokens`` become the rows from ``start`` on."""
    cache.tokens[start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    if isinstance(cache, Recalling):
        cache.write(start, tokens)


def holds(cache: FakeCache, tokens: Sequence[int]) -> bool:
    """The rows are those of ``tokens``, and the state stands behind them."""
    there = cache.tokens[: len(tokens)].tolist() == list(tokens)
    if isinstance(cache, Recalling):
        return there and cache.stands == len(tokens) and int(cache.state) == state_of(tokens)
    return there
