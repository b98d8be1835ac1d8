"""Frames on a byte stream, and the engine's end of the pipe. Knows bytes and threads, not what messages mean.

The engine's end is two threads and two queues, so that the thread that computes never waits for the pipe: a reader
fills the inbox, a writer drains the outbox.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import Empty, SimpleQueue
from typing import IO, NoReturn

from engine.protocol import MAX_FRAME, FromEngine, Stop, ToEngine, frame, to_engine


class BrokenFrame(Exception):
    """What arrived is not a frame: too long, or cut off in its middle."""


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame's body, or None at the end of the stream. Raises ``BrokenFrame``."""
    head = stream.read(4)
    if not head:
        return None
    length = int.from_bytes(head, "little")
    if len(head) < 4 or length > MAX_FRAME:
        raise BrokenFrame
    body = stream.read(length)
    if len(body) < length:
        raise BrokenFrame
    return body


class Pipe:
    """The engine's end: ``post`` never blocks, ``take`` gives what has arrived.

    The process leaves at once when its parent is gone (end of stdin), sends something that is no message, or says
    ``Stop``; that holds while a load or a step is under way too, as the reader thread sees to it.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="pipe-out", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="pipe-in", daemon=True).start()

    def post(self, message: FromEngine) -> None:
        """Send a message."""
        self._outbox.put(frame(message))

    def take(self, timeout: float | None) -> list[ToEngine]:
        """Everything that has arrived, in order. While there is nothing, wait ``timeout`` seconds; None: for ever."""
        taken: list[ToEngine] = []
        try:
            taken.append(self._inbox.get(timeout=timeout) if timeout != 0 else self._inbox.get_nowait())
            while True:
                taken.append(self._inbox.get_nowait())
        except Empty:
            return taken

    def flush(self, timeout: float = 5.0) -> None:
        """Wait until everything posted is written, for at most ``timeout`` seconds. Nothing can be sent after it."""
        self._outbox.put(None)
        self._writer.join(timeout)

    def leave(self, code: int) -> NoReturn:
        """Write what was posted, then exit at once, whatever other threads do."""
        self.flush()
        os._exit(code)

    def _read(self) -> None:
        code = 0
        try:
            while (body := read_frame(self._source)) is not None:
                message = to_engine.decode(body)
                if isinstance(message, Stop):
                    break
                self._inbox.put(message)
        except Exception:  # also what nobody thought of: an engine that hears nothing must not stay
            code = 1
        os._exit(code)  # not sys.exit: the main thread may be in the middle of a step

    def _write(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._sink.write(data)
                self._sink.flush()
        except Exception:  # nor one that cannot speak
            os._exit(1)


def complain(text: str) -> None:
    """A line for whoever reads the engine's stderr. It must hold no token, no text and no exception's text."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def open_pipe() -> Pipe:
    """Take stdin and stdout for frames; whatever prints to stdout from now on lands on stderr.

    Ctrl-C reaches the whole terminal group, a service manager's SIGTERM the whole service: the parent handles both and
    tells us, so they are ignored here, or a drain would end what it waits for. When the parent is gone, so are we.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return Pipe(os.fdopen(source, "rb"), os.fdopen(sink, "wb"))
