"""Packed weights on disk: a checkpoint is packed once, later starts map the file.

A file a checkpoint and layout: a header that names every tensor, then their bytes. It is written whole, under another
name first, and read with every tensor's checksum: a file that is cut short or damaged is passed over and written
anew. Where nothing can be written the weights are packed at every start, as they would be without this.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from engine.native import build
from engine.pipe import complain
from engine.weights import quants
from engine.weights.stored import Stored

Progress = Callable[[str, int, int], None]

VERSION = 1
ALIGNED = 64
KEPT_FILES = 3
KEPT_BYTES = 20 << 30
LEAST = 32 << 20
"""Less is packed faster than it is worth a file, and would push a large model's out."""

_MAGIC = b"TANDEMPK"
_HEAD = len(_MAGIC) + 8
_HEADER = 64 << 20
"""No header is longer; the length in a damaged file may be anything."""
_SPARE = 1 << 30
"""What must stay free on the disk."""
_MIB = 1 << 20
_DEAD_S = 3600.0


class Place(msgspec.Struct, frozen=True):
    """Where a tensor lies behind the header."""

    offset: int
    size: int
    crc: int


class Header(msgspec.Struct, frozen=True):
    """What a file holds and how long its tensors are together; offsets count from the first one."""

    identity: str
    length: int
    places: dict[str, Place]


class Packed:
    """The packed tensors of one checkpoint: those of its file, and those made now."""

    def __init__(self, path: Path | None, identity: str, progress: Progress) -> None:
        """``path`` None: nothing is kept."""
        self._path, self._identity, self._progress = path, identity, progress
        self._places: dict[str, Place] = {}
        self._map: mmap.mmap | None = None
        self._start = 0
        self._fresh: dict[str, Tensor] = {}

    @classmethod
    def open(cls, identity: str, progress: Progress, environ: Mapping[str, str] = os.environ) -> Packed:
        """What was kept under ``identity`` (see ``identity_of``); nothing when there is no such file."""
        folder = build.private_folder(environ, "packed")
        packed = cls(folder / f"{identity}.bin" if folder else None, identity, progress)
        try:
            packed._read()
        except (OSError, ValueError, msgspec.MsgspecError):
            packed._places, packed._map = {}, None
        return packed

    def take(self, name: str, nbytes: int) -> tuple[Tensor, bool]:
        """A uint8 tensor of ``nbytes``, and whether it holds what was packed under ``name``; else it is to be filled.

        The same name is the same bytes, however often it is taken. The kept ones share the file's pages and may be
        written to without changing it.
        """
        kept = self._kept(name)
        if kept is not None and kept.numel() == nbytes:
            return kept, True
        self._places.pop(name, None)
        room = torch.empty(nbytes + ALIGNED, dtype=torch.uint8)
        first = -room.data_ptr() % ALIGNED
        self._fresh[name] = room[first : first + nbytes]
        return self._fresh[name], False

    def done(self) -> None:
        """Every tensor taken is filled: keep those that were not, beside those that the file has."""
        made, self._fresh = self._fresh, {}
        if self._path is None or not made:
            return
        tensors = {name: kept for name in self._places if (kept := self._kept(name)) is not None} | made
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not LEAST <= size <= KEPT_BYTES:
            return
        try:
            if shutil.disk_usage(self._path.parent).free < size + _SPARE:
                complain("The disk has no room to keep the packed weights: every start packs them anew.")
                return
            self._write(self._path, tensors)
        except OSError:
            complain("The packed weights could not be written: every start packs them anew.")
        try:
            prune(self._path)
        except OSError:
            complain("Old packed weights could not be removed.")

    def _read(self) -> None:
        """Map the file and check all that its header promises. Raises what a damaged file leads to."""
        if self._path is None:
            return
        with self._path.open("rb") as file:
            header, start = read_header(file)
            if header.identity != self._identity or start + header.length != os.fstat(file.fileno()).st_size:
                raise ValueError
            if any(not 0 <= p.offset <= p.offset + p.size <= header.length for p in header.places.values()):
                raise ValueError
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED)
        self._places, self._start = header.places, start
        os.utime(self._path)  # the file that was not used for longest goes first

    def _kept(self, name: str) -> Tensor | None:
        """The tensor in the file, None where there is none or its bytes are not those that were written."""
        place = self._places.get(name)
        if place is None or self._map is None or place.size == 0:
            return None
        kept = torch.frombuffer(self._map, dtype=torch.uint8, count=place.size, offset=self._start + place.offset)
        return kept if checksum(kept) == place.crc else None

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        handle, partial = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                write(file, self._identity, tensors, self._progress)
                file.flush()
                os.fsync(file.fileno())  # a name must not outlive a power cut that its bytes did not
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)


def identity_of(files: Iterable[Path], layout: str) -> str:
    """What a checkpoint's files are packed under, wherever they lie: sizes, times, their ends, and the layout."""
    digest = hashlib.sha256(f"{VERSION} {layout}".encode())
    for path in files:
        status = path.stat()
        digest.update(f" {status.st_size} {status.st_mtime_ns} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_MIB))
            file.seek(max(0, status.st_size - _MIB))
            digest.update(file.read(_MIB))
    return digest.hexdigest()[:32]


def name_of(stored: Stored) -> str:
    """What a matrix is packed under: its form and its very bytes, so that nothing but itself is found under it."""
    digest = hashlib.sha256(stored.data.contiguous().numpy().data).hexdigest()[:32]
    return f"{stored.kind} {stored.rows}x{stored.cols} {digest}"


def layout(sources: Path = build.SOURCES) -> str:
    """Which code packs here, and for which instructions: another version of it never reads what this one wrote."""
    digest = hashlib.sha256(build.flags().encode() + Path(quants.__file__).read_bytes())
    for path in sorted(path for path in sources.iterdir() if path.suffix in (".py", ".cpp", ".h")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.numpy().data)


def read_header(file: BinaryIO) -> tuple[Header, int]:
    """The header, and where the tensors begin. Raises ValueError or MsgspecError for one not written here."""
    head = file.read(_HEAD)
    if len(head) < _HEAD or not head.startswith(_MAGIC):
        raise ValueError
    length, crc = (int.from_bytes(head[at : at + 4], "little") for at in (len(_MAGIC), len(_MAGIC) + 4))
    if length > _HEADER:
        raise ValueError
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != crc:
        raise ValueError
    return msgspec.json.decode(text, type=Header), up(_HEAD + length)


def write(file: BinaryIO, identity: str, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Header and tensors, each at a multiple of ``ALIGNED``."""
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = Place(up(end), tensor.nbytes, checksum(tensor))
        end = up(end) + tensor.nbytes
    text = msgspec.json.encode(Header(identity, end, places))
    file.write(_MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text)
    for name, tensor in tensors.items():
        file.write(bytes(-file.tell() % ALIGNED))
        file.write(tensor.numpy().data)
        progress("packed weights", places[name].offset + tensor.nbytes, end)


def up(size: int) -> int:
    """The next multiple of ``ALIGNED``."""
    return size + -size % ALIGNED


def prune(newest: Path) -> None:
    """Remove the files unused for longest beyond what may be kept, and what writers that were killed left.

    One that another process has mapped stays there for it.
    """
    files = sorted((p for p in newest.parent.glob("*.bin") if p != newest), key=_used, reverse=True)
    size = newest.stat().st_size if newest.exists() else 0
    for count, path in enumerate(files, 2):
        size += path.stat().st_size if path.exists() else 0
        if count > KEPT_FILES or size > KEPT_BYTES:
            path.unlink(missing_ok=True)
    for path in newest.parent.glob("*.part"):
        if time.time() - _used(path) > _DEAD_S:
            path.unlink(missing_ok=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
