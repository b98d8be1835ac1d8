"""Feed-forward layers: one for all rows, or for each row the few experts that its router picks and one they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.models.alike import Choice
from engine.models.ways import Way
from engine.weights.linear import Linear


class Feed(Protocol):
    """What stands behind a layer's second norm."""

    def __call__(self, x: Tensor, way: Way) -> Tensor:
        """Float32 ``[n, hidden]`` → ``[n, hidden]``."""
        ...

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices."""
        ...

    def evened(self, choice: Choice, hidden: int) -> Feed:
        """With matrices whose rows come out alike."""
        ...


@dataclass(frozen=True, slots=True)
class Gated:
    """``down(silu(gate(x)) * up(x))``; ``gate_up`` is both, ``ff`` rows each."""

    gate_up: Linear
    down: Linear
    ff: int

    def __call__(self, x: Tensor, way: Way) -> Tensor:
        """As :class:`Feed` says."""
        gate, up = self.gate_up(x.to(self.gate_up.dtype)).chunk(2, -1)
        return self.down((way.silu(gate) * up).to(self.down.dtype)).float()

    @property
    def linears(self) -> tuple[Linear, ...]:
        """As :class:`Feed` says."""
        return self.gate_up, self.down

    def evened(self, choice: Choice, hidden: int) -> Gated:
        """As :class:`Feed` says."""
        return Gated(choice.of(self.gate_up, hidden), choice.of(self.down, self.ff), self.ff)


@dataclass(frozen=True, slots=True)
class Experts:
    """``active`` of ``experts`` a row, weighed by their share of the router's softmax, and ``shared`` times its gate.

    ``router``: an output an expert. ``gate``: one output. A row's sum runs over its experts in ascending order,
    whatever other rows ask for.
    """

    router: Linear
    experts: tuple[Gated, ...]
    shared: Gated
    gate: Linear
    active: int

    def __call__(self, x: Tensor, way: Way) -> Tensor:
        """As :class:`Feed` says."""
        weights, picked = way.share(self.router(x.to(self.router.dtype)).float(), self.active)
        opened = way.each(torch.sigmoid, self.gate(x.to(self.gate.dtype)).float())
        total = torch.zeros_like(x)
        for index in sorted(set(picked.flatten().tolist())):
            rows, place = torch.where(picked == index)
            total[rows] += self.experts[index](x[rows], way) * weights[rows, place, None]
        return total.add_(self.shared(x, way) * opened)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """As :class:`Feed` says."""
        each = [linear for expert in self.experts for linear in expert.linears]
        return self.router, self.gate, *self.shared.linears, *each

    def evened(self, choice: Choice, hidden: int) -> Experts:
        """As :class:`Feed` says."""
        return Experts(
            choice.of(self.router, hidden),
            tuple(expert.evened(choice, hidden) for expert in self.experts),
            self.shared.evened(choice, hidden),
            choice.of(self.gate, hidden),
            self.active,
        )
