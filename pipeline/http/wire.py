"""The sockets under the requests: what Hypercorn does not show its application, and a stalled client makes necessary.

Hypercorn closes a connection by flushing it first. A client that never reads keeps that flush waiting for ever, so
such a connection is *aborted*: its socket is shut down and what it still holds is dropped. Two more things are seen
here alone: a write that does not come back, and a hang-up behind bytes that nobody reads (bytes after a body stop
Hypercorn's reading, and with it the news that the client left).
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from pipeline.outbox import STALL_S

LOOK_S = 1.0
"""Seconds between two looks at a live request's connection."""
UNSENT = 128 << 10
"""Bytes the kernel takes ahead of the network for one connection, where it can be told."""
RDHUP: int = getattr(select, "POLLRDHUP", 0)
"""The system's word for a peer that closed; it stands behind no unread byte. Linux has one."""


class Connections:
    """The open sockets, by the peer's address and port."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[tuple[Any, ...], socket.socket] = WeakValueDictionary()

    def note(self, peer: tuple[Any, ...], connection: socket.socket) -> None:
        """Remember an accepted connection for as long as it is open."""
        self._open[peer[:2]] = connection

    def __len__(self) -> int:
        """How many are open."""
        return sum(connection.fileno() >= 0 for connection in list(self._open.values()))

    def abort(self) -> None:
        """Drop them all."""
        for connection in list(self._open.values()):
            abort(connection)

    def find(self, scope: Any) -> socket.socket | None:
        """The socket under a request; None for HTTP/2, where it carries other requests too, and in tests."""
        if scope.get("http_version", "").startswith("2"):
            return None
        return self._open.get(tuple(scope.get("client") or ())[:2])


class Listener(socket.socket):
    """A listening socket that notes what it accepts. Its options pass to the connections."""

    connections: Connections

    @classmethod
    def bind_to(cls, family: int, address: tuple[Any, ...], connections: Connections) -> Listener:
        """Bind to an address. Raises OSError when it is taken or not ours."""
        listener = cls(family, socket.SOCK_STREAM)
        listener.connections = connections
        try:
            listener._tune()
            listener.bind(address)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def _tune(self) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Named by the system, not by us: a peer that vanished or takes nothing is dropped by the kernel as well.
        tcp = {"TCP_USER_TIMEOUT": int(STALL_S * 1000), "TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
        for name, value in {**tcp, "TCP_NOTSENT_LOWAT": UNSENT}.items():
            if hasattr(socket, name):
                self.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection and note it."""
        connection, peer = super().accept()
        self.connections.note(peer, connection)
        return connection, peer


def abort(connection: socket.socket) -> None:
    """Drop a connection and what it still holds, at once."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


def hung_up(connection: socket.socket) -> bool:
    """Whether the peer closed, also when nobody reads the connection, or what it sent ahead is still unread."""
    try:
        if RDHUP:
            poll = select.poll()
            poll.register(connection, RDHUP)
            if poll.poll(0):
                return True
        return connection.recv(1, socket.MSG_PEEK | getattr(socket, "MSG_DONTWAIT", 0)) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except (OSError, ValueError):  # a closed socket has no descriptor
        return True


class Wire:
    """One live request's connection under watch. ``give_up`` is called once, when its client left or reads nothing."""

    def __init__(
        self, connection: socket.socket | None, give_up: Callable[[], object], stall_s: float = STALL_S
    ) -> None:
        self._connection, self._give_up, self._stall_s = connection, give_up, stall_s
        self._loop = asyncio.get_running_loop()
        self._writing: float | None = None
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def writing(self) -> None:
        """A write begins."""
        self._writing = self._loop.time()

    def written(self) -> None:
        """It came back."""
        self._writing = None

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def abort(self) -> None:
        """Drop the connection."""
        self.close()
        if self._connection is not None:
            abort(self._connection)

    def _look(self) -> None:
        stalled = self._writing is not None and self._loop.time() - self._writing > self._stall_s
        if stalled or (self._connection is not None and hung_up(self._connection)):
            self._give_up()
        else:
            self._timer = self._loop.call_later(LOOK_S, self._look)
