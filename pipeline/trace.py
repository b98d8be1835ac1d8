"""Recording: the posted facts with their times, and the transitions they caused, as JSON lines in files of mode 0600.

A file opens with a header (version, level, policy, settings, what records it again) and, when it follows another, a
snapshot of the core. Each event line is followed by its step lines. At level ``facts`` there is no text in it; ``full``
adds lines with bodies and tokens. A writer that cannot keep up drops and says so: the file then *replays
to* that point.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipeline.events import Event
from pipeline.journal import Step
from pipeline.request import Memory
from pipeline.settings import Policy
from stages.wait import Ended

VERSION = 1
BACKLOG = 100_000
"""Lines the writer may be behind before it drops."""
LAST_S = 10.0
"""Seconds it gets at the end."""

log = logging.getLogger("tandem")


class Header(msgspec.Struct, kw_only=True):
    """The first line. ``recorded_by`` names the script that records it again; ``history`` is the estimator's at the
    start, as ends in order: counts and times, a snapshot has its own.

    ``salt``: the hashes' in hex, at level full alone.
    """

    version: int = VERSION
    tandem: str
    engine: str
    torch: str = ""
    level: str = "facts"
    number: int = 0
    wall: float = 0.0
    recorded_by: str = ""
    policy: Policy
    settings: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    history: list[Ended] = []
    salt: str = ""
    snapshot: Memory | None = None


class Line(msgspec.Struct, omit_defaults=True):
    """One line: exactly one of the fields is set. ``lost`` counts lines dropped here."""

    header: Header | None = None
    t: float = 0.0
    event: Event | None = None
    step: Step | None = None
    full: dict[str, Any] | None = None
    lost: int = 0


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


class TraceError(Exception):
    """The file is no trace this version reads; the text says why."""


class Recorder:
    """Writes a trace from its own thread; the caller never waits. ``rotate_at`` in bytes."""

    def __init__(self, folder: Path, header: Header, rotate_at: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.header, self.rotate_at = folder, header, rotate_at
        self.lost = 0
        self._size = self._number = 0
        self._lines: queue.Queue[Line | None] = queue.Queue(BACKLOG)
        self._open(header)
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether bodies and tokens are wanted."""
        return self.header.level == "full"

    def know(self, capabilities: dict[str, Any]) -> None:
        """What the engine turned out to be able to do: for the headers of the files to come."""
        self.header = msgspec.structs.replace(self.header, capabilities=capabilities)

    def event(self, event: Event, now: float, steps: list[Step]) -> None:
        """Record one fact and what it caused."""
        self._put(Line(t=now, event=event))
        for step in steps:
            self._put(Line(step=step))

    def text(self, what: dict[str, Any]) -> None:
        """Record a body or tokens, at level full only."""
        if self.full:
            self._put(Line(full=what))

    def wants_rotation(self) -> bool:
        """Whether the file is long enough: the caller then gives a snapshot between two events."""
        return self._size > self.rotate_at

    def rotate(self, memory: Memory) -> None:
        """Begin the next file with a snapshot of the core."""
        copy = msgspec.json.decode(_encoder.encode(memory), type=Memory)
        self._size = 0
        self._number += 1
        self._put(Line(header=msgspec.structs.replace(self.header, number=self._number, snapshot=copy, history=[])))

    def close(self) -> None:
        """Write what is left, and how much is not: for at most ``LAST_S`` seconds."""
        with contextlib.suppress(queue.Full):
            if self.lost:
                self._lines.put(Line(lost=self.lost), timeout=LAST_S)
            self._lines.put(None, timeout=LAST_S)
        self._thread.join(LAST_S)

    def _put(self, line: Line) -> None:
        if self.lost:
            try:
                self._lines.put_nowait(Line(lost=self.lost))
            except queue.Full:
                self.lost += 1
                return
            self.lost = 0
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def _open(self, header: Header) -> None:
        name = f"trace-{header.wall:.0f}-{os.getpid()}-{header.number}.jsonl"
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._file.write(_encoder.encode(Line(header=header)) + b"\n")
        self._file.flush()

    def _write(self) -> None:
        """The thread. A disk that takes no more ends the recording, not the server."""
        try:
            while (line := self._lines.get()) is not None:
                self._write_line(line)
            self._file.close()
        except OSError as error:
            log.error("[trace] the recording ends here: %s", errno.errorcode.get(error.errno or 0, "OSError"))
            with contextlib.suppress(OSError):
                self._file.close()
            while self._lines.get() is not None:
                pass

    def _write_line(self, line: Line) -> None:
        if line.header is not None:
            self._file.close()
            self._open(line.header)
            return
        raw = _encoder.encode(line) + b"\n"
        self._file.write(raw)
        self._size += len(raw)
        if self._lines.empty():
            self._file.flush()


def read(path: Path) -> Iterator[Line]:
    """The lines of a trace, the header first. Raises TraceError with what is wrong and where."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = _decoder.decode(raw)
            except msgspec.MsgspecError as error:
                if not raw.endswith(b"\n"):
                    yield Line(lost=1)  # cut by a crash in mid-line: what came before replays
                    return
                raise TraceError(f"{path}: line {number} is no trace line: {error}") from None
            if number == 1 and line.header is None:
                raise TraceError(f"{path}: the first line is no header")
            if line.header is not None and line.header.version != VERSION:
                raise TraceError(f"{path}: version {line.header.version}; this program reads {VERSION}")
            yield line
            if not raw.endswith(b"\n"):
                yield Line(lost=1)  # cut exactly here
