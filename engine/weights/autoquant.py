"""Folders whose matrices AWQ or GPTQ brought to four bits: unpacked on reading into the forms of ``grouped.py``.

Both keep, for each matrix, ``qweight`` and ``qzeros``, eight codes in each int32 from its lowest bits up, ``scales``,
and a weight is ``scale * (code - zero)``. Sources: AutoAWQ's ``gemm.py`` and ``packing_utils.py``, AutoGPTQ's and
GPTQModel's ``qlinear``.

====================  ===========================================  ============================================
..                    AWQ ("gemm")                                 GPTQ
====================  ===========================================  ============================================
qweight               ``[in, out / 8]``, outputs 0 2 4 6 1 3 5 7   ``[in / 8, out]``, inputs in order
                      of each eight
qzeros                the same, ``[groups, out / 8]``              ``[groups, out / 8]``, outputs in order; one
                                                                   less than the zero, in four bits, but for
                                                                   ``gptq_v2``
scales                float16 ``[groups, out]``                    the same
g_idx                 none                                         the group of each input
====================  ===========================================  ============================================

GPTQ with eight bits (four codes in an int32) is read as well where its zeros are the middle code. Matrices that are
not in this form lie beside the others as they are. Any other way to quantise is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.weights import grouped
from engine.weights.errors import CheckpointError
from engine.weights.stored import Source, Stored

PARTS = ("qweight", "qzeros", "scales", "g_idx")
NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where each of eight outputs lies in AWQ's int32."""
BIASED = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
"""Biases that architectures here have."""


class Scheme(NamedTuple):
    """``one``: what is to be added to a zero as it is stored. ``shuffled``: inputs may have been reordered."""

    awq: bool
    bits: int = 4
    one: int = 0
    shuffled: bool = False


class Tensors(Source, Protocol):
    """A folder's tensors, raw ones too."""

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it lies there."""
        ...


def scheme(said: Mapping[str, Any]) -> Scheme:
    """How a folder is quantised, from ``quantization_config``. Raises CheckpointError that names what is not read."""
    method = str(said.get("quant_method") or "an unnamed method").lower()
    bits = said.get("bits") or said.get("w_bit")
    if method == "awq":
        version = str(said.get("version") or "gemm").lower()
        if version != "gemm":
            raise _refused(f"AWQ in its form {version}")
        if bits != 4:
            raise _refused(f"AWQ with {bits} bits")
        if not said.get("zero_point", True):
            raise _refused("AWQ without zero points")
        return Scheme(awq=True)
    if method == "gptq":
        form = str(said.get("checkpoint_format") or "gptq").lower()
        if form not in ("gptq", "gptq_v2"):
            raise _refused(f"GPTQ in its form {form}")
        if bits not in (4, 8):
            raise _refused(f"GPTQ with {bits} bits")
        return Scheme(awq=False, bits=int(bits), one=int(form == "gptq"), shuffled=bool(said.get("desc_act")))
    raise _refused(method)


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"Quantised safetensors of this kind are not supported: {what}; use AWQ (gemm) or GPTQ with 4 bits, "
        "a GGUF file, or the plain weights."
    )


class Unpacked:
    """A folder's tensors with its quantised matrices under their usual names. A ``Source``."""

    def __init__(self, tensors: Tensors, scheme: Scheme, canonical: Callable[[str], str | None]) -> None:
        """``canonical``: GGUF's name for one of the folder's."""
        self._tensors, self._scheme = tensors, scheme
        there = tensors.names()
        modules = sorted(name.removesuffix(".qweight") for name in there if name.endswith(".qweight"))
        self._modules = {canonical(f"{module}.weight") or module: module for module in modules}
        parts = {f"{module}.{part}" for module in modules for part in PARTS}
        unused = {name for module in modules if self._unused(name := canonical(f"{module}.bias") or "", there)}
        self._names = (there - parts - unused) | set(self._modules)

    def _unused(self, bias: str, there: set[str]) -> bool:
        """Whether ``bias`` is one of those, all zeros, that quantisers write whether there was one or not."""
        if bias not in there or bias.endswith(BIASED):
            return False
        return not self._tensors.tensor(bias).any()

    def names(self) -> set[str]:
        """Canonical names."""
        return set(self._names)

    def read(self, name: str) -> Stored:
        """One tensor, unpacked."""
        module = self._modules.get(name)
        if module is None:
            return self._tensors.read(name)
        there = self._tensors.names()
        packed, zeros, scales = (self._tensors.tensor(f"{module}.{part}") for part in PARTS[:3])
        order = self._tensors.tensor(f"{module}.g_idx") if f"{module}.g_idx" in there else None
        if packed.dtype != torch.int32 or zeros.dtype != torch.int32 or not scales.is_floating_point():
            raise CheckpointError(f"{module} has parts of types that its way to quantise does not have.")
        return _unpacked(self._scheme, module, packed, zeros, scales, order)


def _unpacked(
    scheme: Scheme, module: str, packed: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None
) -> Stored:
    if {packed.dim(), zeros.dim(), scales.dim()} != {2} or not scales.numel():
        raise _odd(module)
    groups, rows = scales.shape
    if scheme.awq:
        codes, zero = (_outputs(each, NIBBLE_OF) for each in (packed, zeros))
    else:
        codes = _inputs(packed, scheme.bits)
        zero = (_outputs(zeros, list(range(32 // scheme.bits))) + scheme.one) & ((1 << scheme.bits) - 1)
    cols = codes.shape[1]
    if codes.shape[0] != rows or zero.shape != (rows, groups) or not cols or cols % groups:
        raise _odd(module)
    if order is not None and order.shape != (cols,):
        raise _odd(module)
    scale, group = scales.t(), cols // groups
    natural = torch.arange(cols) // group
    if scheme.shuffled and order is None:
        raise CheckpointError(f"{module} has no g_idx; the checkpoint is incomplete.")
    if order is not None and not torch.equal(order.long(), natural):
        scale, zero, group = _ordered(module, order.long(), scale, zero)
    if not (ours := grouped.widest(group)):
        raise CheckpointError(f"{module} has groups of {group} columns; supported are multiples of 32.")
    scale, zero = (each.repeat_interleave(group // ours, -1) for each in (_half(module, scale), zero))
    codes = codes.reshape(rows, -1, ours)
    if scheme.bits == 4:
        return grouped.four(codes, scale, zero)
    if not bool((zero == 128).all()):
        raise _refused("GPTQ with 8 bits that is not symmetric")
    return grouped.eight((codes ^ 128).view(torch.int8), scale)


def _odd(module: str) -> CheckpointError:
    return CheckpointError(f"{module}'s codes, zeros and scales do not fit together; download the weights again.")


def _ordered(module: str, order: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, int]:
    """Scales and zeros of neighbouring columns, where the inputs of each group still lie together."""
    if order.numel() % 32 or int(order.min()) < 0 or int(order.max()) >= scale.shape[1]:
        raise _odd(module)
    of = order.view(-1, 32)
    if not torch.equal(of, of[:, :1].expand_as(of)):
        raise _refused("GPTQ with reordered inputs (desc_act)")
    return scale[:, of[:, 0]], zero[:, of[:, 0]], 32


def _turned(packed: Tensor) -> Tensor:
    """int32 ``[a, b]`` as the bytes of its transposed, ``[b, 4 · a]``."""
    return packed.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _inputs(packed: Tensor, bits: int) -> Tensor:
    """The codes of int32 ``[a, b]`` that hold neighbours of the first dimension: uint8 ``[b, a · n]``."""
    octets = _turned(packed)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def _outputs(packed: Tensor, places: list[int]) -> Tensor:
    """The codes of int32 ``[a, b]`` that hold ``n`` neighbours of the second dimension: uint8 ``[b · n, a]``.

    ``places``: where each of the ``n`` lies, counted from the lowest bits.
    """
    octets = _turned(packed).view(packed.shape[1], packed.shape[0], 4)
    codes = torch.empty(packed.shape[1], len(places), packed.shape[0], dtype=torch.uint8)
    bits = 32 // len(places)
    for output, place in enumerate(places):
        octet = octets[..., place * bits // 8]
        codes[:, output] = octet if bits == 8 else (octet >> place * bits % 8) & 15
    return codes.flatten(0, 1)


def _half(module: str, scale: Tensor) -> Tensor:
    """Scales as float16, the type they nearly always have; a bfloat16 one from 2^-17 up is the same number in it."""
    half = scale.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise CheckpointError(f"{module} has a scale that float16 cannot hold; download the weights again.")
    return half
