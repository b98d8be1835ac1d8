"""Prefixes of conversations in files, for the time after a restart (``--disk-cache-gb``, G2).

A prefix is a chain of files, one for each chunk of the prefill grid, each named by a keyed hash of all tokens up to its
end: conversations that begin alike share files, and one that grew writes its new chunks alone. What the files are good
for (``identity``: the model, what computes it and how its prompts are cut; the cache's own layout) is part of every
name and stands in every file. A file that is not what was written is deleted and named in a line, never used.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from engine import prefix_file
from engine.models.cache import Cache, Mark
from engine.prefix import BLOCK, Prefix, last_place
from engine.prefix_file import Damaged, Kept

VERSION = "1"
HASH = 8
"""Bytes of a block's hash."""
_ENDING = ".safetensors"


@dataclass(slots=True)
class File:
    """A file of ours. ``parent``: the name of the chunk before it, "" for a first one. ``facts``: what it says itself.

    ``hashes``: of the blocks that end in it, where a prompt told them.
    """

    name: str
    parent: str
    chunk: int
    number: int
    kept: Kept
    hashes: list[bytes]


class Disk:
    """The files of one folder, at most ``limit`` bytes, the longest unused deleted first, other models' too.

    ``cache``: one nobody uses yet, to learn what rows and states look like. ``report`` is told in a sentence what is
    wrong. Raises OSError where the folder cannot be made or read.
    """

    def __init__(
        self, folder: Path, limit: int, identity: str, grid: int, cache: Cache, report: Callable[[str], None]
    ) -> None:
        self._folder, self._limit, self.grid, self._report = folder, limit, grid, report
        self._rows = prefix_file.layout(cache.copy(0, 1), rows=True)
        cache.go_back(None)  # no commit stands beside the state then
        mark = cache.mark()
        self._recurrent = mark is not None
        self._state = {} if mark is None else prefix_file.layout(mark.tensors, rows=False)
        told = repr((VERSION, identity, grid, self._rows, self._state))
        self.fingerprint = sha256(told.encode()).hexdigest()
        self._sizes: dict[str, int] = {}  # every file's, the longest unused first
        self._files: dict[str, File] = {}  # those of this fingerprint
        self._numbers = self._stamp = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._scan()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes.values())

    def find(self, tokens: Sequence[int]) -> list[File]:
        """The chain of files that a run over ``tokens`` can begin with, in order. One row is always left."""
        chain: list[File] = []
        for name, block in self._names(tokens, (len(tokens) - 1) // self.grid):
            file = self._files.get(name)
            if file is None or file.kept.tokens != block:
                break
            chain.append(file)
        while self._recurrent and chain and not chain[-1].kept.marked:
            chain.pop()
        return chain

    def load(self, chain: Sequence[File], cache: Cache) -> Prefix:
        """Write the rows of ``chain`` to ``cache``. The prefix that is there then: it ends before a damaged file.

        Nothing of a file is written before all of it was checked. Only the last mark is given.
        """
        prefix = Prefix([], [])
        for file in chain:
            try:
                kept, rows, mark = prefix_file.read(self._folder / file.name, self._rows, self._state)
                if kept != file.kept:
                    raise Damaged
            except (Damaged, OSError) as error:
                self._damaged(file.name, error)
                break
            cache.put(len(prefix.tokens), rows)
            prefix.tokens += file.kept.tokens
            prefix.hashes = self._hashes(chain[: file.chunk + 1])
            if mark:
                prefix.marks = [Mark(len(prefix.tokens), mark)]
        self._touch(chain[: len(prefix.tokens) // self.grid])
        return prefix

    def missing(self, prefix: Prefix) -> int:
        """Rows up to which ``prefix`` is worth writing and is not written; 0: all is there, or too short."""
        rows = self._worth(prefix)
        chain = self.find([*prefix.tokens[:rows], 0])
        self.learn(chain, prefix.hashes)
        return rows if len(chain) * self.grid < rows else 0

    def learn(self, chain: Sequence[File], hashes: Sequence[bytes]) -> None:
        """``hashes`` are those of a prompt that begins with ``chain``."""
        for file in chain:
            told = list(hashes[self._blocks(file.chunk)])
            file.hashes = told if len(told) >= len(file.hashes) else file.hashes

    def save(self, prefix: Prefix, cache: Cache) -> Generator[None]:
        """Write what is missing of ``prefix``, whose rows ``cache`` holds; at each stop a piece is done.

        Those rows must stay as they are until it is over or closed. It ends early where there is no room.
        """
        chain: list[File] = []
        marks = {mark.rows: mark for mark in self._settled(prefix)}
        parent = ""
        for name, block in self._names(prefix.tokens, self._worth(prefix) // self.grid):
            chunk = len(chain)
            mark = marks.get((chunk + 1) * self.grid)
            file = self._files.get(name)
            if file is None or (mark is not None and not file.kept.marked):
                file = self._new(name, parent, chunk, block, mark is not None, prefix.hashes)
                size = prefix_file.size(file.kept.facts, len(block), self._rows, mark)
                if not self._room(size, {one.name for one in chain}):
                    return
                try:
                    first = chunk * self.grid
                    yield from prefix_file.write(self._folder / name, file.kept.facts, block, cache, first, mark)
                    self._sizes[name] = size
                except OSError as error:
                    self._report(f"The prefix file {name} could not be written: {type(error).__name__}.")
                    return
                self._files[name] = file
            chain.append(file)
            parent = name
            self.learn([file], prefix.hashes)
            self._touch(chain)

    def held(self) -> list[tuple[int, int, list[bytes], int]]:
        """Number, rows, block hashes and bytes of every chain's end whose files are all there."""
        told = []
        parents = {file.parent for file in self._files.values()}
        for file in self._files.values():
            if file.name in parents:
                continue
            chain = self._chain(file)
            size = sum(self._sizes[one.name] for one in chain)
            while self._recurrent and chain and not chain[-1].kept.marked:
                chain.pop()
            if chain:
                told.append((file.number, len(chain) * self.grid, self._hashes(chain), size))
        return told

    def _worth(self, prefix: Prefix) -> int:
        """Rows of whole chunks, with recurrent layers up to the last that has its state."""
        whole = len(prefix.tokens) // self.grid * self.grid
        if not self._recurrent:
            return whole
        ends = [mark.rows for mark in self._settled(prefix) if mark.rows % self.grid == 0]
        return last_place(whole, ends)

    def _settled(self, prefix: Prefix) -> list[Mark]:
        """Marks that hold a state and no more; what stood behind a round has its commit beside it."""
        return [mark for mark in prefix.marks if prefix_file.layout(mark.tensors, rows=False) == self._state]

    def _names(self, tokens: Sequence[int], chunks: int) -> Iterator[tuple[str, list[int]]]:
        """Name and tokens of each of the first ``chunks`` chunks."""
        name = ""
        for at in range(chunks):
            block = list(tokens[at * self.grid : (at + 1) * self.grid])
            name = self._name(name, block)
            yield name, block

    def _name(self, parent: str, block: list[int]) -> str:
        told = f"{parent}\n".encode() + struct.pack(f"<{len(block)}i", *block)
        key = blake2b(told, digest_size=16, key=bytes.fromhex(self.fingerprint)).hexdigest()
        return f"{self.fingerprint[:16]}-{key}{_ENDING}"

    def _chain(self, file: File) -> list[File]:
        """The files from the first to this one; [] where one is missing."""
        chain = [file]
        while chain[-1].parent:
            before = self._files.get(chain[-1].parent)
            if before is None or before.chunk != chain[-1].chunk - 1:
                return []
            chain.append(before)
        return chain[::-1]

    def _scan(self) -> None:
        """Learn what the folder holds; what a killed writer left there goes."""
        for left in self._folder.glob("*.part"):
            left.unlink(missing_ok=True)
        stamps = {path: path.stat() for path in self._folder.glob("*" + _ENDING)}
        for path, told in sorted(stamps.items(), key=lambda one: (one[1].st_mtime_ns, one[0].name)):
            self._sizes[path.name] = told.st_size
            self._stamp = max(self._stamp, told.st_mtime_ns)
            if path.name.startswith(self.fingerprint[:16] + "-"):
                self._look(path)
        self._room(0, set())

    def _look(self, path: Path) -> None:
        try:
            kept = prefix_file.look(path, self._rows, self._state)
            facts = kept.facts
            chunk, hashes = int(facts["chunk"]), bytes.fromhex(facts["hashes"])
            if path.name != self._name(facts["parent"], kept.tokens) or facts["fingerprint"] != self.fingerprint:
                raise Damaged
        except (Damaged, OSError, KeyError, ValueError, TypeError, struct.error) as error:
            self._damaged(path.name, error)
            return
        told = [hashes[at : at + HASH] for at in range(0, len(hashes), HASH)]
        self._files[path.name] = File(path.name, facts["parent"], chunk, self._number(), kept, told)

    def _new(
        self, name: str, parent: str, chunk: int, tokens: list[int], marked: bool, hashes: Sequence[bytes]
    ) -> File:
        told = list(hashes[self._blocks(chunk)])
        facts = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "parent": parent,
            "chunk": str(chunk),
            "hashes": b"".join(told).hex(),
        }
        return File(name, parent, chunk, self._number(), Kept(facts, tokens, marked), told)

    def _blocks(self, chunk: int) -> slice:
        """Those of a conversation's blocks that end in one of its chunks."""
        return slice(chunk * self.grid // BLOCK, (chunk + 1) * self.grid // BLOCK)

    def _hashes(self, chain: Sequence[File]) -> list[bytes]:
        """Those of all whole blocks of a chain, as far as they are known."""
        known: list[bytes] = []
        for file in chain:
            if len(known) == self._blocks(file.chunk).start:
                known += file.hashes
        return known

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _room(self, nbytes: int, spared: set[str]) -> bool:
        """Delete so many that ``nbytes`` fit, the longest unused first, those of ``spared`` never."""
        for name in list(self._sizes):
            if self.nbytes + nbytes <= self._limit:
                break
            if name not in spared:
                self._delete(name)
        return self.nbytes + nbytes <= self._limit

    def _touch(self, chain: Sequence[File]) -> None:
        """They were used now. A chain's first file is needed by all behind it, so it counts as used last."""
        for file in reversed(chain):
            if file.name in self._sizes:
                self._sizes[file.name] = self._sizes.pop(file.name)
                self._stamp = max(self._stamp + 1, time.time_ns())
                self._stamped(self._folder / file.name)

    def _stamped(self, path: Path) -> None:
        with suppress(OSError):
            os.utime(path, ns=(self._stamp, self._stamp))

    def _damaged(self, name: str, error: Exception) -> None:
        self._report(f"The prefix file {name} cannot be used ({type(error).__name__}): it is deleted.")
        self._delete(name)

    def _delete(self, name: str) -> None:
        self._sizes.pop(name, None)
        self._files.pop(name, None)
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._report(f"The prefix file {name} could not be deleted: {type(error).__name__}.")
