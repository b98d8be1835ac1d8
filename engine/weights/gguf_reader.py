"""Reads a GGUF file: short metadata at once, long arrays and tensors when asked.

``gguf.GGUFReader`` makes two numpy views for each string of each array, 3.8 s for a vocabulary of 49,152. The subclass
below only walks over arrays (0.1 s) and notes where they lie; their values are decoded when asked and not kept, or a
vocabulary would add a sixth to the memory of a small model. The reader maps the file; this module closes that map as
soon as the metadata is copied, so that no page of it stays resident, and reads arrays and tensors with plain reads.
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


@dataclass(frozen=True, slots=True)
class Span:
    """An array's values: ``count`` of type ``item`` in ``size`` bytes from ``offset`` on."""

    item: GGUFValueType
    count: int
    offset: int
    size: int

    def values(self, raw: bytes) -> list[Any]:
        """The values in ``raw``, the span's own bytes."""
        if self.item != GGUFValueType.STRING:
            plain: list[Any] = np.frombuffer(raw, QuickReader.gguf_scalar_to_np[self.item]).tolist()
            return plain
        strings, offset = [], 0
        for _ in range(self.count):
            end = offset + 8 + LENGTH.unpack_from(raw, offset)[0]
            strings.append(raw[offset + 8 : end].decode())
            offset = end
        return strings


class QuickReader(GGUFReader):
    """``GGUFReader`` that leaves a :class:`Span` in place of an array's values. Little-endian files only."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            parsed: tuple[int, list[Any], list[int], list[GGUFValueType]] = super()._get_field_parts(
                orig_offs, raw_type
            )
            return parsed
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        size = self._strings_size(start, count) if item == GGUFValueType.STRING else self._plain_size(item, count)
        return 12 + size, [Span(item, count, start, size)], [0], [GGUFValueType.ARRAY, item]

    def _plain_size(self, item: GGUFValueType, count: int) -> int:
        if item not in self.gguf_scalar_to_np:
            raise CheckpointError(f"The GGUF file holds an array of {item.name}, which is not supported.")
        return int(np.dtype(self.gguf_scalar_to_np[item]).itemsize) * count

    def _strings_size(self, start: int, count: int) -> int:
        """Bytes of ``count`` length-prefixed strings from ``start`` on."""
        raw, offset = self.data.data, start
        for _ in range(count):
            offset += 8 + LENGTH.unpack_from(raw, offset)[0]
        return offset - start


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: ``offset`` and ``size`` in bytes. ``rows`` × ``cols`` elements, a vector has one row."""

    kind: str
    rows: int
    cols: int
    offset: int
    size: int


class GgufFile:
    """Metadata by key, and a :class:`~engine.weights.stored.Source` of tensors."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when ``path`` is no GGUF file this can read."""
        self.path = path
        try:
            reader = QuickReader(path)
            if reader.byte_order == "S":
                raise CheckpointError(f"{path.name} is a big-endian GGUF file; convert it to little-endian.")
            self._meta = {name: _content(field) for name, field in reader.fields.items()}
            self._places = {str(t.name): _place(t) for t in reader.tensors}
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.") from error
        except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            raise CheckpointError(
                f"{path.name} is not a GGUF file that can be read ({error}); download it again or convert it anew."
            ) from error
        ends = [value.offset + value.size for value in self._meta.values() if isinstance(value, Span)]
        ends += [place.offset + place.size for place in self._places.values()]
        if max(ends, default=0) > path.stat().st_size:
            raise CheckpointError(f"{path.name} is shorter than its own tables say; download it again.")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a plain Python value; an array is read and decoded anew each time."""
        value = self._meta.get(key, default)
        if not isinstance(value, Span):
            return value
        with self.path.open("rb") as file:
            file.seek(value.offset)
            raw = file.read(value.size)
        try:
            return value.values(raw)
        except (UnicodeDecodeError, struct.error) as error:
            raise CheckpointError(f"{self.path.name} holds no readable text in {key}; download it again.") from error

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
            if file.readinto(data.numpy().data) != place.size:
                raise CheckpointError(f"{self.path.name} ends inside tensor {name}; download it again.")
        return Stored(place.kind, place.rows, place.cols, data.view(place.rows, -1))


def _content(field: Any) -> Any:
    """``field`` is gguf's ReaderField."""
    return field.parts[-1] if isinstance(field.parts[-1], Span) else field.contents()


def _place(tensor: Any) -> Place:
    """``tensor`` is gguf's ReaderTensor, whose shape has the fastest dimension first. Raises ValueError when empty."""
    shape = [int(n) for n in tensor.shape]
    if 0 in shape or not shape:
        raise ValueError("a tensor of no elements")
    if len(shape) > 2:
        # The matrices of all experts, one below the other.
        shape = [shape[0], int(np.prod(shape[1:]))]
    rows = shape[1] if len(shape) == 2 else 1
    return Place(tensor.tensor_type.name, rows, shape[0], int(tensor.data_offset), int(tensor.n_bytes))
