"""Writes frames to a pipe without ever blocking the caller, and mostly without a thread.

A frame is written at once when the pipe has room, which it nearly always has; only what it does not take is left to a
thread. A thread woken for every token costs more than the write: on two cores it takes one from the step under way.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class Sender:
    """One writer of a file descriptor, in order, from any thread. ``broken`` is called once when nobody reads it."""

    def __init__(self, descriptor: int, broken: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._broken = descriptor, broken
        self._backlog = bytearray()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, data: bytes) -> None:
        """Write, or queue, one frame. To a pipe that is broken or closed it is lost."""
        with self._lock:
            if self._closed:
                return
            if not self._backlog:
                data = data[self._write(data) :]
            if data and not self._closed:
                self._backlog += data
                self._start()
                self._changed.notify_all()

    def flush(self, timeout: float) -> None:
        """Wait until everything is written, for at most ``timeout`` seconds."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed or not self._backlog, timeout)

    def close(self) -> None:
        """Let go: what is not written by now is lost. The descriptor stays the caller's to close."""
        with self._lock:
            self._closed = True
            self._backlog.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _write(self, data: bytes | bytearray) -> int:
        """Bytes the pipe took. The lock is held."""
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            return 0
        except OSError:
            self._closed = True
            self._changed.notify_all()
            self._broken()
            return 0

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="pipe-out", daemon=True)
            self._thread.start()

    def _drain(self) -> None:
        """Write the backlog whenever the pipe has room again."""
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._backlog)
                if self._closed:
                    return
            room.poll(1_000)
            with self._lock:
                if not self._closed:
                    del self._backlog[: self._write(self._backlog[: 1 << 16])]
                    if not self._backlog:
                        self._changed.notify_all()
