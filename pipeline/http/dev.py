"""The Dev view's page and its data: a snapshot, and live events shared by all readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from quart import Response, request

from pipeline.http.contract import Runner
from pipeline.http.errors import as_json, encode, refusal
from pipeline.http.wire import Connections, Wire

READERS = 4
BUSY_S, IDLE_S, PING_S = 0.25, 1.0, 15.0
VOLATILE = ("now", "uptime_s", "lag_ms")
"""What changes without anything happening: no reason to send."""
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
)


class Live:
    """The live state for all readers: looked at once a tick, encoded once a change, and only while someone reads."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.readers = 0
        self.version = 0
        self.data = b""
        self.closed = False
        self._seen: dict[str, Any] = {}
        self._news = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    def join(self) -> bool:
        """One reader more; False when there are enough."""
        if self.readers >= READERS or self.closed:
            return False
        self.readers += 1
        self.look()
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.ensure_future(self._tick())
        return True

    def leave(self) -> None:
        """One reader less; nobody looks when nobody reads."""
        self.readers -= 1
        if not self.readers and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def close(self) -> None:
        """The server stops: every reader's stream ends."""
        self.closed = True
        self._tell()

    def look(self) -> bool:
        """Look at the state and encode it if it changed. True while something runs or loads."""
        view = self._runner.view()
        seen = {name: value for name, value in view.items() if name not in VOLATILE}
        if seen != self._seen:
            self._seen = seen
            self.data = b"data: " + encode(view) + b"\n\n"
            self.version += 1
            self._tell()
        return bool(view["requests"]) or self._runner.engine_state == "starting"

    async def wait(self, version: int, timeout: float) -> bool:
        """Wait for something newer than ``version``; False when the time is over first."""
        if version != self.version or self.closed:
            return True
        try:
            await asyncio.wait_for(self._news.wait(), max(timeout, 0.0))
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(BUSY_S if self.look() else IDLE_S)


class Dev:
    """Serves ``/dev`` and what is below it."""

    def __init__(self, runner: Runner, live: Live, connections: Connections) -> None:
        self._runner, self._live, self._connections = runner, live, connections
        self._files = {
            item.name: item.read_bytes()
            for item in files("pipeline.devview").iterdir()
            if item.name.rpartition(".")[2] in TYPES
        }

    async def page(self) -> Response:
        """GET /dev"""
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        """GET /dev/{file}: the page's own style and script."""
        if name not in self._files:
            return refusal("not_found")
        headers = {
            "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
        }  # fmt: skip
        kind = TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], 200, headers, content_type=f"{kind}; charset=utf-8")

    async def state(self) -> Response:
        """GET /dev/state: the live state once."""
        return as_json(self._runner.view(), headers={"Cache-Control": "no-store"})

    async def events(self) -> Response:
        """GET /dev/events: the live state whenever it changed, as server-sent events."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        kind = "text/event-stream; charset=utf-8"
        if request.method == "HEAD":
            return Response("", 200, headers, content_type=kind)
        if not self._live.join():
            return refusal("too_many_viewers")
        task = asyncio.current_task()
        assert task is not None
        wire = Wire(self._connections.find(request.scope), task.cancel)
        # By the task's end, for the reason ``openai.py`` gives.
        task.add_done_callback(lambda _task: self._left(wire))
        response = Response(self._events(wire), 200, headers, content_type=kind)
        response.timeout = None
        return response

    def _left(self, wire: Wire) -> None:
        self._live.leave()
        if self._live.closed:
            wire.close()
        else:
            wire.abort()

    async def _events(self, wire: Wire) -> AsyncIterator[bytes]:
        live, version, clock = self._live, -1, asyncio.get_running_loop().time
        ping_at = clock() + PING_S
        while not live.closed:
            data = b""
            if await live.wait(version, ping_at - clock()) and version != live.version:
                data, version = live.data, live.version
            if clock() >= ping_at:
                data, ping_at = data + b": ping\n\n", clock() + PING_S
            wire.writing()
            yield data
            wire.written()
