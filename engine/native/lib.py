"""The native library's functions and structures, as ctypes sees them. The one place that knows its signatures."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache

from engine.native import build

FOUR, EIGHT, BRAIN, HALF, FLOAT = 4, 8, 16, 17, 32
"""Forms of a matrix's weights."""

NO_SCALE, SHORT, SHORT_OFFSET, LONG, LONG_OFFSET = range(5)
"""Forms of its scales: float16 or float32, alone or with an offset."""


class MatrixStruct(Structure):
    """``Matrix`` of matrix.h."""

    _fields_ = (
        ("form", c_int32),
        ("scale", c_int32),
        ("group", c_int32),
        ("centre", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("data", c_void_p),
    )


class LayerStruct(Structure):
    """``Layer`` of step.h."""

    _fields_ = (
        ("attn_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("out_bias", c_void_p),
        ("qkv", MatrixStruct * 3),
        ("out", MatrixStruct),
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
        ("window", c_int64),
    )


class ModelStruct(Structure):
    """``Model`` of step.h."""

    _fields_ = (
        ("layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary", c_int64),
        ("ff", c_int64),
        ("vocab", c_int64),
        ("eps", c_float),
        ("reserved", c_float),
        ("turns", c_void_p),
        ("norm", c_void_p),
        ("table", MatrixStruct),
        ("head", MatrixStruct),
        ("layer", POINTER(LayerStruct)),
    )


class CacheStruct(Structure):
    """``Cache`` of step.h."""

    _fields_ = (("data", c_void_p), ("rows", c_int64))


ROW = 6
"""Whole numbers that ``Row`` of attention.h is made of: token, sequence, row, prefix, first, count."""

_STRUCTURES: tuple[type[Structure | ctypes.Array[c_int64]], ...] = (
    MatrixStruct,
    LayerStruct,
    ModelStruct,
    c_int64 * ROW,
    CacheStruct,
)

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "tandem_sizes": (c_int64, (c_int64,)),
    "tandem_matrix_bytes": (c_int64, (c_void_p,)),
    "tandem_matrix_pack": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p)),
    "tandem_matrix_pack_plain": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "tandem_matrix_gather": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "tandem_matrix_multiply": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "tandem_step_new": (c_void_p, (c_void_p, c_int64)),
    "tandem_step_free": (None, (c_void_p,)),
    "tandem_norm": (None, (c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p)),
    "tandem_attend": (
        None,
        (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 5, c_float, c_int64, c_void_p, c_int64),
    ),
    "tandem_convolve": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64)),
    "tandem_recall": (None, (*[c_void_p] * 7, *[c_int64] * 4, c_void_p, c_void_p, c_int64)),
    "tandem_step_run": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64)),
}


@cache
def kernels() -> ctypes.CDLL | None:
    """The library with its signatures set; None where it cannot be had (``build.why()``)."""
    library = build.library()
    return None if library is None else signed(library)


def signed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the signatures, and see that both sides mean the same structures."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for index, structure in enumerate(_STRUCTURES):
        if library.tandem_sizes(index) != ctypes.sizeof(structure):
            raise RuntimeError(f"The native library and lib.py differ in structure {index}.")
    return library
