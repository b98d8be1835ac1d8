"""A dense decoder's whole step in the native library: rows of several sequences in, logits out.

Every row comes out with the same bits whatever stands beside it: other rows, sequences, chunks, threads.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from engine.models.batch import Rows
from engine.models.cache import KV
from engine.native import build, lib
from engine.native.lib import CacheStruct, LayerStruct, MatrixStruct, ModelStruct
from engine.native.matrix import GROUP, STRIP, Matrix
from engine.weights.config import Config
from engine.weights.linear import Linear, Side

ALIKE = 1 << 20
"""Rows of a step that come out alike: all."""

TILE = 64
"""Rows that are computed together."""

MOST_THREADS = 64

DESCRIBED = 56
"""Bytes that say what a row is, with what an array keeps to grow."""


class Layer(Protocol):
    """What a layer of :mod:`engine.models.dense` has."""

    @property
    def attn_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def out(self) -> Linear: ...
    @property
    def ffn_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...
    @property
    def qkv_bias(self) -> Tensor | None: ...
    @property
    def q_norm(self) -> Tensor | None: ...
    @property
    def k_norm(self) -> Tensor | None: ...
    @property
    def window(self) -> int: ...


def path() -> str:
    """What a model that runs here calls its path."""
    return f"native {build.flags()}"


def step_for(
    config: Config,
    layers: Items[Layer],
    table: Linear,
    norm: Tensor,
    head: Linear,
    turns: Tensor,
    device: torch.device,
    exact: bool,
) -> Step | None:
    """The step of a model, None where torch must do it: no library, another device, a shape it has no form for."""
    if exact or device.type != "cpu" or lib.kernels() is None:
        return None
    if any(size % GROUP for size in (config.hidden, config.ff, config.heads * config.head_dim)):
        return None
    if not isinstance(table, Matrix) or not isinstance(head, Matrix) or config.head_dim % 2:
        return None
    structs = [_layer(config, layer) for layer in layers]
    if any(struct is None for struct in structs):
        return None
    return Step(config, [s for s in structs if s is not None], table, norm, head, turns, list(layers))


def _layer(config: Config, layer: Layer) -> LayerStruct | None:
    """The structure of one layer; the tensors it points to are the layer's own."""
    qkv, gated = _parts(layer.qkv), _gated(layer.gate_up, config.ff)
    out, down = layer.out, layer.down
    if not qkv or len(qkv) > 3 or gated is None or not isinstance(out, Matrix) or not isinstance(down, Matrix):
        return None
    vectors = (layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm, layer.qkv_bias)
    if any(v is not None and (v.dtype != torch.float32 or not v.is_contiguous()) for v in vectors):
        return None
    struct = LayerStruct(*(None if v is None else v.data_ptr() for v in vectors))
    for i, part in enumerate(qkv):
        struct.qkv[i] = part.struct
    struct.gate, struct.up = gated
    struct.out, struct.down, struct.window = out.struct, down.struct, layer.window
    return struct


def _parts(linear: Linear) -> list[Matrix]:
    """The matrices side by side in ``linear``; none where one is of another form."""
    parts = linear.parts if isinstance(linear, Side) else [linear]
    return [p for p in parts if isinstance(p, Matrix)] if all(isinstance(p, Matrix) for p in parts) else []


def _gated(linear: Linear, ff: int) -> tuple[MatrixStruct, MatrixStruct] | None:
    """Gate and up, apart."""
    parts = _parts(linear)
    if len(parts) == 2 and ff % STRIP == 0:
        return parts[0].struct, parts[1].struct
    if len(parts) == 1 and ff % STRIP == 0:
        return parts[0].part(0, ff), parts[0].part(ff, ff)
    return None


class Step:
    """The native step of one model. ``threads``: processors of the steps from here on, 0: torch's."""

    def __init__(
        self,
        config: Config,
        structs: list[LayerStruct],
        table: Matrix,
        norm: Tensor,
        head: Matrix,
        turns: Tensor,
        layers: list[Layer],
    ) -> None:
        library = lib.kernels()
        assert library is not None
        self._run = library.tandem_step_run
        self._vocab, self._turns = config.vocab, turns.contiguous()
        self._window = turns.shape[0]
        model = ModelStruct(
            config.layers,
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            2 * turns.shape[-1],
            config.ff,
            config.vocab,
            config.hidden * config.eps,
            0.0,
            self._turns.data_ptr(),
            norm.data_ptr(),
            table.struct,
            head.struct,
        )
        array_of = (LayerStruct * len(structs))(*structs)
        model.layer = array_of
        self._kept = (model, array_of, structs, table, norm, head, layers)
        self._step = library.tandem_step_new(ctypes.byref(model), MOST_THREADS)
        if not self._step:
            raise MemoryError("There is no memory for the native step.")
        weakref.finalize(self, library.tandem_step_free, self._step)
        self.threads = 0
        self._config = config
        out, down = (any(isinstance(m, Matrix) and m.struct.scale for m in some) for some in _outputs(layers))
        self._rounded = max(config.hidden, config.ff * down, config.heads * config.head_dim * out)

    def workspace(self, rows: int) -> int:
        """Bytes of memory that a step of ``rows`` rows, of the last of which logits are wanted, makes use of.

        Most of it is the step's own room, which is written to first by the first steps and never given back.
        """
        config, threads = self._config, min(self.threads or torch.get_num_threads(), MOST_THREADS)
        attended, share = config.heads * config.head_dim, config.heads // config.kv_heads
        wide, most = attended + 2 * config.kv_heads * config.head_dim, max(config.ff, config.hidden, attended)
        # As step.h allots it: the stream, what is mixed, seen and gated, and activations with their codes and sums.
        row = 4 * (config.hidden + wide + attended + config.ff + most) + self._rounded * 3 // 2
        padded, together = -(-config.head_dim // STRIP) * STRIP, max(1, min(16, 64 // share)) * share
        bench = 4 * (2 * (TILE + together) * padded + together * 2 * STRIP + 3 * TILE)
        gated = 2 * TILE * 4 * STRIP * 4  # on the stack
        return row * min(rows, TILE) + (bench + gated) * threads + rows * DESCRIBED + config.vocab * 4

    def forward(self, parts: Items[Rows]) -> Tensor:
        """Logits, float32 ``[sum of wanted, vocab]``, part by part. Raises ValueError as the model does."""
        numbers, ancestors, wanted = array("q"), array("q"), bytearray()
        caches = (CacheStruct * len(parts))()
        for index, part in enumerate(parts):
            caches[index] = self._cache(part)
            describe(part, index, numbers, ancestors)
            n = len(part.tokens)
            wanted += bytes(n - part.wanted) + b"\1" * part.wanted
        logits = torch.empty(sum(part.wanted for part in parts), self._vocab)
        self._run(
            self._step,
            numbers.buffer_info()[0],
            (ctypes.c_char * len(wanted)).from_buffer(wanted),
            len(wanted),
            ancestors.buffer_info()[0],
            caches,
            logits.data_ptr(),
            self.threads or torch.get_num_threads(),
        )
        return logits

    def _cache(self, part: Rows) -> CacheStruct:
        cache, start, end = part.cache, part.start, part.start + len(part.tokens)
        assert isinstance(cache, KV) and cache.all.dtype == torch.float16
        if not 0 <= start < end <= min(cache.rows, self._window):
            raise ValueError(f"rows {start} to {end} do not fit into {min(cache.rows, self._window)}")
        if not all(0 <= token < self._vocab for token in part.tokens):
            raise ValueError("a token that is not in the vocabulary")
        return CacheStruct(cache.all.data_ptr(), cache.all.shape[2])


def _outputs(layers: list[Layer]) -> tuple[list[Linear], list[Linear]]:
    """The matrices whose activations are rounded only where they are quantised themselves."""
    return [layer.out for layer in layers], [layer.down for layer in layers]


def describe(part: Rows, index: int, numbers: array[int], ancestors: array[int]) -> None:
    """Append a ``Row`` for each row of ``part``, and the ancestors that do not lie one behind the other."""
    start, parents = part.start, part.parents
    lines: list[tuple[int, ...]] = []
    for i, token in enumerate(part.tokens):
        parent = i - 1 if parents is None else parents[i]
        line: tuple[int, ...] | None = None
        if parents is not None:
            line = (*(lines[parent] if parent >= 0 else ()), i)
            lines.append(line)
        if line is None or len(line) == i + 1:
            numbers.extend((token, index, start + i, start + i + 1, 0, 0))
        else:
            numbers.extend((token, index, start + i, start, len(ancestors), len(line)))
            ancestors.extend(start + j for j in line)


__all__ = ["ALIKE", "Step", "path", "step_for"]
