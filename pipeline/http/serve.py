"""Hypercorn under the application: one worker, one listening socket of our own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from hypercorn.asyncio import serve as hypercorn
from hypercorn.config import Config, Sockets

from pipeline.http import recycle
from pipeline.http.app import App
from pipeline.http.auth import is_loopback, read_keys
from pipeline.http.wire import Connections, Listener
from pipeline.settings import Settings

BACKLOG = 256
KEEP_ALIVE_S = 75.0
GRACE_S = 10.0
"""Added to ``--drain-timeout``: who is inside ends by the core's clock, not by a cut connection."""
LAST_S = 5.0
"""And this until Hypercorn would cancel what is left: a connection cut before ends in order."""
HEADERS = 64 << 10
"""Bytes of a request's line and headers."""


class CannotServe(Exception):
    """The server cannot be started as told. The text is one sentence for the person who told it."""


class _Bound(Config):
    """A Hypercorn configuration around a socket that is bound already."""

    def __init__(self, listener: socket.socket, settings: Settings) -> None:
        self._listener = listener
        self.workers = 1
        self.backlog = BACKLOG
        self.keep_alive_timeout = KEEP_ALIVE_S
        self.graceful_timeout = settings.drain_timeout + GRACE_S + LAST_S
        self.h11_max_incomplete_size = HEADERS
        self.include_server_header = False
        # Its logs name paths and exceptions' texts: ours say what there is to say.
        self.accesslog = self.errorlog = None

    def create_sockets(self) -> Sockets:
        """The one socket there is."""
        return Sockets([], [self._listener], [])


async def serve(app: App, settings: Settings, shutdown: asyncio.Event, ready: Callable[[int], None]) -> None:
    """Serve until ``shutdown``, then let those inside finish. ``ready`` gets the port once it takes connections."""
    recycle.install()
    listener = listen(settings, app.connections)
    cut: list[asyncio.TimerHandle] = []

    async def until() -> None:
        ready(int(listener.getsockname()[1]))
        await shutdown.wait()
        app.live.close()
        cut.append(asyncio.get_running_loop().call_later(settings.drain_timeout + GRACE_S, app.connections.abort))

    with contextlib.closing(listener):
        try:
            served: Any = hypercorn(app, _Bound(listener, settings), shutdown_trigger=until)
            await served
        finally:
            for timer in cut:
                timer.cancel()


def listen(settings: Settings, connections: Connections) -> Listener:
    """The listening socket. Beyond loopback only with a key, or where the user said that none is wanted."""
    family, address = _resolve(settings)
    try:
        guarded = bool(read_keys(settings)) or settings.allow_no_key
    except OSError:
        raise CannotServe(f"The key file {settings.api_key_file} cannot be read.") from None
    if not guarded and not is_loopback(str(address[0])):
        raise CannotServe(
            f"--host {settings.host} is open to other machines and there is no key: give one with --api-key, "
            "or say --allow-no-key."
        )
    try:
        return Listener.bind_to(family, address, connections)
    except OSError:
        raise CannotServe(
            f"{settings.host}:{settings.port} cannot be bound: is another server running there? Choose another --port."
        ) from None


def _resolve(settings: Settings) -> tuple[int, tuple[Any, ...]]:
    """The address to bind: the first the name stands for, IPv4 before IPv6."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise CannotServe(f"--host {settings.host} is not an address of this machine.") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return found[0][0], found[0][4]
