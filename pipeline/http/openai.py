"""The two answering routes: a request's body in, its outbox out as a stream or as one JSON.

How a client's leaving is seen: Quart cancels the task that serves it, whatever that task is doing. A ``finally`` in a
generator does not cover it all (a stream cancelled before its first byte never enters its generator), so the hang-up is
posted by the task's own end: over without the ``End`` of its answer means that the client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from quart import Response, request

from pipeline.effects import Finish
from pipeline.http.chunks import Stream
from pipeline.http.contract import Call, Runner
from pipeline.http.errors import as_json, drop_body, encode, last_word, refusal
from pipeline.http.shapes import Shape, Whole, public_id
from pipeline.http.wire import Connections, Wire
from pipeline.outbox import Blank, ChoiceEnd, End, Item, Text

STEP = 1 << 20
"""Bytes of a body that nobody declared come uncounted; then each such step is told."""


class Answers:
    """Serves ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, runner: Runner, connections: Connections) -> None:
        self._runner, self._connections = runner, connections

    async def chat(self) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer("chat")

    async def completions(self) -> Response:
        """POST /v1/completions"""
        return await self._answer("completions")

    async def _answer(self, route: str) -> Response:
        declared = request.content_length or 0
        if declared > self._runner.settings.max_body_mb << 20:
            await drop_body()
            return refusal("body_too_large")
        call: Call = self._runner.receive(route, declared, dict(request.headers))
        exchange = Exchange(self._runner, call, self._connections, declared)
        try:
            response = await exchange.respond()
        except Exception as error:
            response = exchange.broke(error)
        response.headers["X-Request-Id"] = public_id(route, call.name)
        return response


class Exchange:
    """One request and its answer. It lives as long as the task that made it."""

    def __init__(self, runner: Runner, call: Call, connections: Connections, declared: int) -> None:
        self._runner, self._call, self._declared = runner, call, declared
        self._over = False  # its end is known here: nothing is left to hang up
        self._sent = True  # what was begun was written: a connection that keeps something back is not worth keeping
        task = asyncio.current_task()
        assert task is not None
        call.task = task
        self._wire = Wire(connections.find(request.scope), task.cancel)
        task.add_done_callback(self._done)

    def _done(self, _task: asyncio.Task[Any]) -> None:
        """The task is over: whole, broken, or cut because its client left or reads nothing."""
        self._wire.close()
        self._call.task = None
        if not (self._over and self._sent):
            self._wire.abort()
        if not self._over:
            self._runner.left(self._call)

    async def respond(self) -> Response:
        """The answer; a stream's headers leave with the first thing there is to say."""
        call = self._call
        first = asyncio.ensure_future(call.outbox.take())
        try:
            if not await call.wants_body():
                await drop_body()
            elif not await self._read_body(first):
                return refusal("body_too_large")
            items = await first
        finally:
            first.cancel()
        if isinstance(items[0], End) and _has_status(items[0].figures):
            return self._refused(items[0])
        return self._streamed(items) if call.stream else await self._whole(items)

    def broke(self, error: Exception) -> Response:
        """A fault of ours before the answer began. The exception's text goes nowhere."""
        self._over = True
        self._runner.fault(self._call, "http", last_word(error))
        return refusal("internal_error")

    async def _read_body(self, verdict: asyncio.Future[list[Item]]) -> bool:
        """Read the body and hand it over, unless the request is over first. False when it is too large."""
        reading = asyncio.ensure_future(self._body(self._runner.settings.max_body_mb << 20))
        try:
            either: set[asyncio.Future[Any]] = {reading, verdict}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            body = reading.result() if reading.done() else b""
        finally:
            reading.cancel()
        if verdict.done():
            await drop_body()
            return True
        if body is None:
            self._over = True
            self._runner.cut(self._call, "body_too_large")
            await drop_body()
            return False
        self._runner.body(self._call, body)
        return True

    async def _body(self, limit: int) -> bytes | None:
        """The request's body; None when it is over ``limit`` bytes. What comes undeclared is told as it comes (A14)."""
        parts: list[bytes] = []
        size, known = 0, max(self._declared, STEP)
        async for data in request.body:
            parts.append(data)
            size += len(data)
            if size > limit:
                return None
            if size > known:
                known = size + STEP
                self._runner.reading(self._call, size)
        return b"".join(parts)

    def _refused(self, end: End) -> Response:
        self._over = True
        figures = end.figures
        return refusal(figures.code, end.message, end.param, figures.retry_after)

    async def _whole(self, items: list[Item]) -> Response:
        """Everything, once its end is there, or from the first blank on. Waiting clients' lines have no place here."""
        call = self._call
        whole = Whole(self._shape(), call.alternatives >= 0)
        while True:
            end = _added(whole, items)
            if end is not None:
                return self._refused(end) if _has_status(end.figures) else self._as_whole(whole, end)
            if any(isinstance(item, Blank) for item in items):
                return self._early(whole)
            items = await call.outbox.take()

    def _as_whole(self, whole: Whole, end: End) -> Response:
        self._over = True
        return as_json(self._json(whole, end))

    def _json(self, whole: Whole, end: End) -> dict[str, Any]:
        runner = self._runner
        return whole.answer(end, self._call.created, runner.model, runner.settings.finish_words)

    def _early(self, whole: Whole) -> Response:
        """A 200 before the answer is there: blanks, then its JSON whatever the end is (row I6b)."""
        response = Response(self._blanks(whole), 200, content_type="application/json")
        response.timeout = None
        self._sent = False
        return response

    async def _blanks(self, whole: Whole) -> AsyncIterator[bytes]:
        call = self._call
        call.task = asyncio.current_task()
        data, end = b" ", None
        try:
            while True:
                self._over = end is not None
                call.outbox.sent(self._runner.now())
                self._wire.writing()
                yield data
                self._wire.written()
                if end is not None:
                    self._sent = True
                    return
                data = b""
                while not data:
                    items = await call.outbox.take()
                    end = _added(whole, items)
                    blank = b" " if any(isinstance(item, Blank) for item in items) else b""
                    data = blank if end is None else encode(self._json(whole, end))
        except Exception as error:
            self.broke(error)
            yield encode(self._json(Whole(self._shape(), False), End(_gone())))
            self._sent = True

    def _shape(self) -> Shape:
        call = self._call
        return Shape(call.route, call.name, self._runner.settings.reasoning_key == "both")

    def _streamed(self, items: list[Item]) -> Response:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = Response(self._pieces(items), 200, headers, content_type="text/event-stream; charset=utf-8")
        response.timeout = None
        self._sent = False
        return response

    async def _pieces(self, items: list[Item]) -> AsyncIterator[bytes]:
        """The stream, one write a take. Quart's handler task runs this too, so the call's task stays the same."""
        call, runner, settings = self._call, self._runner, self._runner.settings
        call.task = asyncio.current_task()
        stream = Stream(
            shape=self._shape(), created=call.created, model=runner.model,
            include_usage=call.include_usage, usage_default=settings.usage_default, words=settings.finish_words,
        )  # fmt: skip
        try:
            while True:
                for block in stream.blocks(items):
                    # Known over when its end is being written: what the core forgets then is no hang-up.
                    self._over = stream.over
                    call.outbox.sent(runner.now())
                    self._wire.writing()
                    yield block
                    self._wire.written()
                if stream.over:
                    self._sent = True
                    return
                items = await call.outbox.take()
        except Exception as error:
            self.broke(error)
            yield stream.broken()
            self._sent = True


def _added(whole: Whole, items: list[Item]) -> End | None:
    """What came, added to a whole answer; its end, if that was among it."""
    for item in items:
        if isinstance(item, Text | ChoiceEnd):
            whole.add(item)
        elif isinstance(item, End):
            return item
    return None


def _gone() -> Finish:
    """The end of an answer whose handler broke: no figures are known of it."""
    return Finish(request=0, finish="error", opened=True, code="internal_error")


def _has_status(end: Finish) -> bool:
    """Whether an end is a refusal with a status of its own: nothing was sent yet, and no answer timed out."""
    return bool(end.code) and not end.opened and end.status != 200
