"""The three ways in which a hybrid decoder's step is computed, but for its matrices.

``WHOLE``: in torch, the rows of a chunk at once. ``EVEN``: in torch, so that a row's bits are its own in any round.
``NATIVE``: by the native library, so that they are its own in any step: chunks, rounds, trees, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import Tensor

from engine.models import delta, layers
from engine.models.attention import Place
from engine.models.delta import Mixed
from engine.models.elementwise import rowwise
from engine.models.layers import Stream
from engine.native import blocks, lib
from engine.native.matrix import Matrix
from engine.weights.linear import Linear, Side


class Way:
    """In torch, a chunk at once. Tensors are float32."""

    chains = True
    """:meth:`conv` knows by itself what each row of a chain sees."""

    @property
    def settling(self) -> Way:
        """How a pending commit is folded in: a round's rows get the bits they had in it."""
        return EVEN

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function`` of each element of ``x`` ``[n, cols]``."""
        return function(x)

    def silu(self, x: Tensor) -> Tensor:
        """``x * sigmoid(x)`` of ``[n, cols]``."""
        return self.each(F.silu, x)

    def normed(self, stream: Stream, weight: Tensor) -> Tensor:
        """The stream behind a norm, float32 ``[n, hidden]``."""
        return stream.normed(weight, torch.float32)

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """:func:`engine.models.layers.norm_heads`."""
        layers.norm_heads(heads, weight, eps)

    def rotate(self, heads: Tensor, turn: Tensor) -> None:
        """:func:`engine.models.layers.rotate`."""
        layers.rotate(heads, turn)

    def attend(self, place: Place, q: Tensor, new: Tensor, kv: Tensor) -> Tensor:
        """``[n, heads, head_dim]`` over the part's cache, which ``new`` is written to: ``[n, heads * head_dim]``."""
        return place.together(q.to(kv.dtype), new, kv, 0).float()

    def conv(self, inputs: Tensor, seen: Tensor | None, weight: Tensor) -> Tensor:
        """:func:`engine.models.delta.conv`."""
        return delta.conv(inputs, seen, weight)

    def unit(self, x: Tensor, size: float) -> Tensor:
        """Each of ``x`` ``[n, heads, width]`` with the length ``size``."""
        return delta.unit(x, size)

    def faded(self, log_decay: Tensor) -> Tensor:
        """The decay as :meth:`recall` takes it."""
        return log_decay

    def recall(
        self,
        state: Tensor,
        mixed: Mixed,
        decay: Tensor,
        beta: Tensor,
        parents: Items[int] | None,  # noqa: ARG002 (a chunk is a chain)
    ) -> tuple[Tensor, Tensor]:
        """What the rows recall, and the last one's state; ``parents`` None: a chain."""
        return delta.chunk(state, mixed, decay, beta)

    def fold(self, state: Tensor, mixed: Mixed, decay: Tensor, beta: Tensor) -> Tensor:
        """The state behind a chain of rows."""
        return delta.fold(state, mixed, decay, beta, len(mixed.v))

    def share(self, scores: Tensor, active: int) -> tuple[Tensor, Tensor]:
        """Of a router's ``scores`` ``[n, experts]`` the highest: how much of each, and which, ``[n, active]``."""
        weights, picked = scores.softmax(-1).topk(active, -1)
        return weights / weights.sum(-1, keepdim=True), picked


class Even(Way):
    """In torch, few rows, each by operations of its own or of a shape that does not depend on the others."""

    chains = False

    @property
    def settling(self) -> Way:  # noqa: D102
        return self

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # noqa: D102
        return rowwise(function, x)

    def attend(self, place: Place, q: Tensor, new: Tensor, kv: Tensor) -> Tensor:  # noqa: D102
        return place.each(q.to(kv.dtype), new, kv, 0).float()

    def faded(self, log_decay: Tensor) -> Tensor:  # noqa: D102
        return self.each(torch.exp, log_decay)

    def recall(  # noqa: D102
        self, state: Tensor, mixed: Mixed, decay: Tensor, beta: Tensor, parents: Items[int] | None
    ) -> tuple[Tensor, Tensor]:
        return delta.rows(state, mixed, decay, beta, range(-1, len(mixed.v) - 1) if parents is None else parents)


class Native(Even):
    """The native library's blocks; torch does what is exact whichever way it is cut: sums and products of two."""

    chains = True

    def silu(self, x: Tensor) -> Tensor:
        """A convolution of one tap, which is 1."""
        return blocks.conv(x, None, torch.ones(1, x.shape[1]))

    def normed(self, stream: Stream, weight: Tensor) -> Tensor:  # noqa: D102
        return blocks.norm(stream.x, weight, stream.eps)

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> None:  # noqa: D102
        width = heads.shape[-1]
        heads.copy_(blocks.norm(heads.reshape(-1, width), weight, eps * width).view(heads.shape))

    def rotate(self, heads: Tensor, turn: Tensor) -> None:
        """Torch's product of complex numbers rounds those that no vector holds in another way: in real ones here."""
        turned = 2 * turn.shape[-1]
        one, other, cos, sin = heads[..., 0:turned:2], heads[..., 1:turned:2], turn.real, turn.imag
        first, second = (one * cos).sub_(other * sin), (one * sin).add_(other * cos)
        one.copy_(first)
        other.copy_(second)

    def attend(self, place: Place, q: Tensor, new: Tensor, kv: Tensor) -> Tensor:  # noqa: D102
        kv[:, place.start : place.stop].copy_(new)
        return blocks.attend(q, kv, place.part, q.shape[-1] ** -0.5)

    def conv(self, inputs: Tensor, seen: Tensor | None, weight: Tensor) -> Tensor:  # noqa: D102
        return blocks.conv(inputs, seen, weight)

    def unit(self, x: Tensor, size: float) -> Tensor:  # noqa: D102
        width = x.shape[-1]
        return blocks.norm(x.reshape(-1, width), torch.full((width,), size), delta.EPS).view(x.shape)

    def recall(  # noqa: D102
        self, state: Tensor, mixed: Mixed, decay: Tensor, beta: Tensor, parents: Items[int] | None
    ) -> tuple[Tensor, Tensor]:
        return blocks.recall(state, mixed, decay, beta, parents)

    def fold(self, state: Tensor, mixed: Mixed, decay: Tensor, beta: Tensor) -> Tensor:  # noqa: D102
        return blocks.recall(state, mixed, decay, beta, seen=False)[1]

    def share(self, scores: Tensor, active: int) -> tuple[Tensor, Tensor]:
        """The same by the picked ones alone, summed one after the other."""
        best, picked = scores.topk(active, -1)
        weights = self.each(torch.exp, best - best[:, :1])
        total = weights[:, 0].clone()
        for column in weights[:, 1:].unbind(1):
            total.add_(column)
        return weights / total[:, None], picked


WHOLE, EVEN, NATIVE = Way(), Even(), Native()


def native(linears: Iterable[Linear]) -> bool:
    """Whether ``NATIVE`` can be gone: the library is there, and has every matrix."""
    return lib.kernels() is not None and all(_packed(linear) for linear in linears)


def _packed(linear: Linear) -> bool:
    return all(_packed(part) for part in linear.parts) if isinstance(linear, Side) else isinstance(linear, Matrix)
