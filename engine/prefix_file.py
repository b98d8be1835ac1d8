"""One file of the disk tier: a grid chunk's tokens, rows and the state behind it, as safetensors with a checksum.

The checksum is of the whole file with its own place blanked, so no changed byte goes unseen, the header's included.
Files are read by nobody but their owner: they hold token ids. A file is written under another name and then renamed,
in pieces, so that the engine can compute between them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from engine.models.cache import Cache, Mark

PIECE = 8 << 20
"""Bytes written or read before the engine may compute a step again."""

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors by name: type and shape, without the row dimension where there is one."""

_OPENING = b'{"__metadata__":{"checksum":"'
_PLACE = slice(8 + len(_OPENING), 8 + len(_OPENING) + 64)
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


class Damaged(Exception):
    """The file is not what was written. No text: it could hold what the file holds."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a file holds besides rows. ``facts``: what its writer said of it."""

    facts: dict[str, str]
    tokens: list[int]
    marked: bool


def layout(tensors: Mapping[str, Tensor], *, rows: bool) -> Layout:
    """What tensors look like; ``rows``: their first dimension is rows."""
    return {name: (one.dtype, tuple(one.shape[1 if rows else 0 :])) for name, one in sorted(tensors.items())}


def size(facts: Mapping[str, str], tokens: int, rows: Layout, mark: Mark | None) -> int:
    """Bytes of the file that ``write`` makes."""
    header, _, total = _header(facts, tokens, rows, {} if mark is None else layout(mark.tensors, rows=False))
    return len(header) + total


def write(
    path: Path, facts: Mapping[str, str], tokens: list[int], cache: Cache, first: int, mark: Mark | None
) -> Generator[None]:
    """Write ``tokens``, their rows from row ``first`` of ``cache`` on, and ``mark``; at each stop a piece is done.

    Closed before its end it leaves nothing. Raises OSError.
    """
    rows = layout(cache.copy(first, first + 1), rows=True)
    header, places, total = _header(facts, len(tokens), rows, {} if mark is None else layout(mark.tensors, rows=False))
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        handle = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        with os.fdopen(handle, "w+b") as file:
            file.write(header)
            for place, tensor in _pieces(tokens, cache, first, mark, places, total):
                file.seek(len(header) + place)
                file.write(_bytes(tensor))
                yield
            digest = sha256()
            for piece in _read_back(file):
                digest.update(piece)
                yield
            file.seek(_PLACE.start)
            file.write(digest.hexdigest().encode())
        partial.replace(path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def look(path: Path, rows: Layout, state: Layout) -> Kept:
    """A file's facts and tokens, by its word alone, but for the names in it. Raises Damaged, OSError.

    A mark that is not there by its name would be missed silently: such a file is of no use to recurrent layers.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names, metadata, tokens = set(file.keys()), file.metadata(), file.get_tensor("tokens").tolist()
        facts = _facts(metadata)
    except (safetensors.SafetensorError, TypeError, ValueError, RuntimeError, UnicodeDecodeError):
        raise Damaged from None
    plain = {"tokens", *(f"rows.{name}" for name in rows)}
    marked = plain | {f"mark.{name}" for name in state}
    if names not in (plain, marked):
        raise Damaged
    return Kept(facts, tokens, bool(state) and names == marked)


def read(path: Path, rows: Layout, state: Layout) -> tuple[Kept, dict[str, Tensor], dict[str, Tensor]]:
    """What a file holds, its rows and its mark's tensors, once all of it is known to be as written.

    Raises Damaged where it is not, or not laid out as ``rows`` and ``state`` (which may be absent); OSError.
    """
    data = path.read_bytes()
    told, whole = data[_PLACE], memoryview(data)
    digest = sha256(whole[: _PLACE.start])
    digest.update(b"0" * len(told))
    digest.update(whole[_PLACE.stop :])
    if digest.hexdigest().encode() != told:
        raise Damaged
    try:
        tensors = safetensors.torch.load(data)
        facts = _facts(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError):
        raise Damaged from None
    tokens = tensors.pop("tokens", torch.zeros(0, dtype=torch.int32)).tolist()
    marks = {name[5:]: tensors[name] for name in tensors if _is_mark(name)}
    kept = {name[5:]: tensors[name] for name in tensors if not _is_mark(name)}
    lengths = {one.shape[0] if one.dim() else -1 for one in kept.values()}
    alike = layout(kept, rows=True) == rows and layout(marks, rows=False) in (state, {})
    if not alike or lengths != {len(tokens)}:
        raise Damaged
    return Kept(facts, tokens, bool(marks)), kept, marks


def _is_mark(name: str) -> bool:
    return name.startswith("mark.")


def _facts(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError
    return {key: value for key, value in metadata.items() if key != "checksum"}


def _header(
    facts: Mapping[str, str], tokens: int, rows: Layout, state: Layout
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The file's begin with a blank checksum, where each tensor's bytes begin and end behind it, and their number."""
    told: dict[str, Any] = {}
    places: dict[str, tuple[int, int]] = {}
    whole: Layout = {"tokens": (torch.int32, (tokens,))}
    whole |= {f"rows.{name}": (dtype, (tokens, *shape)) for name, (dtype, shape) in rows.items()}
    whole |= {f"mark.{name}": (dtype, shape) for name, (dtype, shape) in state.items()}
    end = 0
    for name, (dtype, shape) in whole.items():
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        places[name] = begin, end
        told[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = {"__metadata__": {"checksum": "0" * 64, **facts}} | told
    body = json.dumps(text, separators=(",", ":")).encode()
    assert body.startswith(_OPENING)
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body, places, end


def _pieces(
    tokens: list[int], cache: Cache, first: int, mark: Mark | None, places: dict[str, tuple[int, int]], total: int
) -> Iterator[tuple[int, Tensor]]:
    """Tensors and where their bytes begin, in pieces of rows; a mark's are one each."""
    yield places["tokens"][0], torch.tensor(tokens, dtype=torch.int32)
    step = max(1, PIECE * len(tokens) // max(total, 1))
    for at in range(0, len(tokens), step):
        stop = min(at + step, len(tokens))
        for name, tensor in cache.copy(first + at, first + stop).items():
            begin, end = places[f"rows.{name}"]
            yield begin + at * (end - begin) // len(tokens), tensor
    for name, tensor in (mark.tensors if mark is not None else {}).items():
        yield places[f"mark.{name}"][0], tensor


def _read_back(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(PIECE):
        yield piece


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
