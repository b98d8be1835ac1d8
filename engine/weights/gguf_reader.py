"""Reads a GGUF file: metadata at once, tensors one by one when asked.

``gguf.GGUFReader`` makes two numpy views for each string of each array, 3.8 s for a vocabulary of 49,152. The subclass
below walks arrays with ``struct`` instead (0.1 s) and hands back parts that ``ReaderField.contents`` reads all the same.
It maps the file; this module closes that map as soon as the metadata is copied, so that no page of it stays resident,
and reads tensors with plain reads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.constants import GGUFValueType

from engine.weights.errors import CheckpointError
from engine.weights.stored import Stored

LENGTH = struct.Struct("<Q")


class QuickReader(GGUFReader):  # type: ignore[misc]
    """``GGUFReader`` with arrays parsed in bulk. Little-endian files only."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            parsed: tuple[int, list[Any], list[int], list[GGUFValueType]] = super()._get_field_parts(
                orig_offs, raw_type
            )
            return parsed
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        types = [GGUFValueType.ARRAY, item]
        start = orig_offs + 12
        if item == GGUFValueType.STRING:
            end, strings = self._strings(start, count)
            return end - orig_offs, strings, list(range(count)), types
        if item not in self.gguf_scalar_to_np:
            raise CheckpointError(f"The GGUF file holds an array of {item.name}, which is not supported.")
        values = self._get(start, self.gguf_scalar_to_np[item], count)
        return 12 + int(values.nbytes), [values], [0], types

    def _strings(self, offset: int, count: int) -> tuple[int, list[memoryview]]:
        """``count`` length-prefixed strings from byte ``offset`` on; returns the byte behind them too."""
        raw = memoryview(self.data)
        parts = []
        for _ in range(count):
            (length,) = LENGTH.unpack_from(raw, offset)
            offset += 8
            parts.append(raw[offset : offset + length])
            offset += length
        return offset, parts


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: ``offset`` and ``size`` in bytes. ``rows`` × ``cols`` elements, a vector has one row."""

    kind: str
    rows: int
    cols: int
    offset: int
    size: int


class GgufFile:
    """``meta``: every metadata value as a plain Python value. A :class:`~engine.weights.stored.Source` of tensors."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when ``path`` is no GGUF file this can read."""
        self.path = path
        try:
            reader = QuickReader(path)
        except (ValueError, IndexError, KeyError, struct.error) as error:
            raise CheckpointError(
                f"{path.name} is not a GGUF file that can be read ({error}); download it again or convert it anew."
            ) from error
        if reader.byte_order == "S":
            raise CheckpointError(f"{path.name} is a big-endian GGUF file; convert it to little-endian.")
        self.meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._places = {str(t.name): _place(t) for t in reader.tensors}
        end = max((p.offset + p.size for p in self._places.values()), default=0)
        if end > path.stat().st_size:
            raise CheckpointError(f"{path.name} is shorter than its own table of tensors says; download it again.")

    def names(self) -> set[str]:
        """GGUF's own names; they are the canonical ones."""
        return set(self._places)

    def read(self, name: str) -> Stored:
        """One tensor's bytes. Raises CheckpointError when the file has no tensor of that name."""
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{self.path.name} has no tensor {name}; the file is incomplete.")
        data = torch.empty(place.size, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(place.offset)
            if file.readinto(memoryview(data.numpy())) != place.size:
                raise CheckpointError(f"{self.path.name} ends inside tensor {name}; download it again.")
        return Stored(place.kind, place.rows, place.cols, data.view(place.rows, -1))


def _place(tensor: Any) -> Place:
    """``tensor`` is gguf's ReaderTensor, whose shape has the fastest dimension first."""
    shape = [int(n) for n in tensor.shape]
    if len(shape) > 2:
        # Experts and convolutions; no builder here asks for one, and a file that has them is refused by name there.
        shape = [shape[0], int(np.prod(shape[1:]))]
    rows = shape[1] if len(shape) == 2 else 1
    return Place(tensor.tensor_type.name, rows, shape[0], int(tensor.data_offset), int(tensor.n_bytes))
