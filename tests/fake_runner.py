"""A runner without a core: it keeps what HTTP tells it and says what a test lets it say."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pipeline.effects import Finish
from pipeline.http.app import App, create_app
from pipeline.http.serve import serve
from pipeline.outbox import Comment, End, Outbox, Text
from pipeline.outcomes import CODES
from pipeline.settings import Settings
from stages.calls import Content

NAME = "0123456789abcdef01234567"
PIECES = ["Hel", "lo", " wörld", '\n\u2028"x"']


class FakeCall:
    """As ``pipeline.call.Call``, for HTTP."""

    def __init__(self, request: int, route: str) -> None:
        self.request, self.route, self.name, self.created = request, route, NAME, 1_700_000_000
        self.stream = False
        self.include_usage: bool | None = None
        self.outbox = Outbox()
        self.task: asyncio.Task[Any] | None = None
        self.wanted = True
        self.alternatives = -1

    async def wants_body(self) -> bool:
        return self.wanted

    def text(self, *pieces: str) -> bool:
        return self.outbox.put(Text([[Content(piece)] for piece in pieces]), time.monotonic())

    def line(self, text: str) -> None:
        self.outbox.put(Comment(text), time.monotonic())

    def end(self, finish: str = "stop", code: str = "", opened: bool = False, message: str = "", **more: Any) -> None:
        entry = CODES.get(code)
        status = 200 if opened or entry is None else entry.status
        wait = 0 if opened or entry is None else entry.retry_after
        figures = Finish(
            request=self.request, finish=finish, opened=opened, status=status, code=code, retry_after=wait,
            prompt_tokens=11, completion_tokens=4, cached_tokens=5, prompt_ms=12.0, predicted_ms=8.0, total_ms=30.0,
        )  # fmt: skip
        self.outbox.put(End(figures, message, more.get("param")), time.monotonic())


def answer(call: FakeCall, _body: bytes) -> None:
    """The answer every test gets that asks for no other."""
    call.text(*PIECES)
    call.end()


class FakeRunner:
    """As ``pipeline.runner.Runner``, for HTTP. ``answer`` runs when a body came whole."""

    def __init__(self, answer: Callable[[FakeCall, bytes], None] = answer, **settings: Any) -> None:
        self.settings = Settings(**{"port": 0, **settings})
        self.model, self.window, self.engine_state, self.draining = "smol/fake-1", 4_096, "ready", False
        self.answer = answer
        self.refuse = ""
        self.calls: list[FakeCall] = []
        self.bodies: list[bytes] = []
        self.told: list[tuple[Any, ...]] = []
        self.grown: list[int] = []
        self.bodies_full = 1 << 40
        self.gone = asyncio.Event()
        self.more: dict[str, Any] = {}

    def receive(self, route: str, body_bytes: int, headers: Any = None) -> FakeCall:
        call = FakeCall(len(self.calls) + 1, route)
        self.calls.append(call)
        if self.refuse:
            call.wanted = False
            call.end("error", self.refuse)
        return call

    def body(self, call: FakeCall, body: bytes) -> None:
        self.bodies.append(body)
        asked = json.loads(body) if body[:1] == b"{" else {}
        call.stream = asked.get("stream", False)
        call.include_usage = (asked.get("stream_options") or {}).get("include_usage")
        self.answer(call, body)

    def reading(self, call: FakeCall, size: int) -> None:
        self.grown.append(size)
        if size > self.bodies_full:
            call.end("error", "live_full")

    def cut(self, call: FakeCall, code: str) -> None:
        self.told.append(("cut", call.request, code))

    def left(self, call: FakeCall, why: str = "closed") -> None:
        self.told.append(("left", call.request, why))
        self.gone.set()

    def fault(self, call: FakeCall, where: str, error: str) -> None:
        self.told.append(("fault", call.request, where, error))

    def view(self) -> dict[str, Any]:
        return {
            "now": time.monotonic(), "uptime_s": 1.0, "engine": {"state": self.engine_state}, "slots": [], "queue": [],
            "requests": [], "recent": [], "counts": {"waiting": 0, "running": 0}, "settings": {}, "lag_ms": 0.0,
            "cache": {}, "parallel": {}, "memory": {}, "lane": {}, **self.more,
        }  # fmt: skip

    def now(self) -> float:
        return time.monotonic()


@asynccontextmanager
async def served(runner: FakeRunner) -> AsyncIterator[int]:
    """The runner behind a real Hypercorn; the port."""
    async with served_app(runner) as (port, _app):
        yield port


@asynccontextmanager
async def served_app(runner: FakeRunner) -> AsyncIterator[tuple[int, App]]:
    """The same, with the application."""
    app, stop = create_app(runner), asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(serve(app, runner.settings, stop, port.set_result))
    try:
        await asyncio.wait([task, port], return_when=asyncio.FIRST_COMPLETED)
        yield (await port if port.done() else await task or 0), app
    finally:
        stop.set()
        await task


def events(body: bytes) -> list[Any]:
    """A stream's chunks; its comments as plain strings, the last line as ``[DONE]``."""
    out: list[Any] = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: {"):
            out.append(json.loads(block[6:]))
        elif block:
            out.append(block.removeprefix("data: "))
    return out


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REMOTE = {"scope_base": {"client": ("192.0.2.7", 5_000)}}
"""Arguments of a request that comes from another machine."""
BOX = {"scope_base": {"client": ("127.0.0.1", 5_000)}}
