"""Frames on a byte stream, and the engine's end of the pipe. Knows bytes, not what messages mean."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, NoReturn

from engine.protocol import MAX_FRAME, FromEngine, Stop, ToEngine, frame, to_engine
from engine.sender import Sender


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

    The thread that computes reads the pipe itself, at its safe points: a reader thread would be woken in the middle of
    a step by every ``Seen``, and take a core from it. The process leaves at once when its parent is gone or has closed
    its end (a watcher thread sleeps until then, so that holds in the middle of a load or a step too); at a safe point
    when it is told to ``Stop``, or hears something that is no message.
    """

    def __init__(self, source: int, sink: int) -> None:
        os.set_blocking(source, False)
        self._source, self._buffer = source, bytearray()
        self._news = select.poll()
        self._news.register(source, select.POLLIN)
        self._sender = Sender(sink, lambda: os._exit(1))  # an engine that cannot speak must not stay
        threading.Thread(target=self._watch, name="pipe-watch", daemon=True).start()

    def post(self, message: FromEngine) -> None:
        """Send a message."""
        self._sender.send(frame(message))

    def take(self, timeout: float | None) -> list[ToEngine]:
        """Everything that has arrived, in order. While there is nothing, wait ``timeout`` seconds; None: for ever."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            taken = self._arrived()
            left = None if end is None else end - time.monotonic()
            if taken or (left is not None and left <= 0):
                return taken
            self._news.poll(None if left is None else math.ceil(left * 1_000))

    def flush(self, timeout: float = 5.0) -> None:
        """Wait until everything posted is written, for at most ``timeout`` seconds."""
        self._sender.flush(timeout)

    def leave(self, code: int) -> NoReturn:
        """Write what was posted, then exit at once, whatever other threads do."""
        self.flush()
        os._exit(code)

    def _arrived(self) -> list[ToEngine]:
        """The whole messages among what the pipe holds; the rest waits for its end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._source, 1 << 16):
                self._buffer += data
            os._exit(0)  # end of stream: the parent is gone
        try:
            messages = [to_engine.decode(body) for body in self._frames()]
        except Exception:  # an engine that hears no messages must not stay
            os._exit(1)
        if any(isinstance(message, Stop) for message in messages):
            os._exit(0)
        return messages

    def _frames(self) -> Iterator[bytes]:
        """Cut whole frames off the buffer. Raises ``BrokenFrame``."""
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "little")
            if length > MAX_FRAME:
                raise BrokenFrame
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            yield body

    def _watch(self) -> None:
        """Sleep until the other end is closed. Nothing is read here."""
        gone = select.poll()
        gone.register(self._source, 0)
        while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in gone.poll()):
            pass
        os._exit(0)  # not sys.exit: the main thread may be in the middle of a step


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
    return Pipe(source, sink)
