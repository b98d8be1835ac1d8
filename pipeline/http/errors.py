"""Refusals as HTTP answers: OpenAI's error object, its status, ``Retry-After``. Their words are in ``outcomes``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
from quart import Response, g, has_request_context, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from pipeline.outcomes import CODES, error_object

DROP = 1 << 20
"""Bytes of a refused body that are read and dropped, so that its sender gets to read the answer."""
DROP_S = 2.0

log = logging.getLogger("tandem")
encode = msgspec.json.Encoder().encode


def as_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encode(value), status, headers, content_type="application/json")


def refusal(
    code: str, message: str = "", param: str | None = None, retry_after: int = 0, headers: dict[str, str] | None = None
) -> Response:
    """The answer to a request that is refused. ``retry_after`` 0 takes the table's."""
    entry = CODES[code]
    headers = dict(headers or {})
    if wait := retry_after or entry.retry_after:
        headers["Retry-After"] = str(wait)
    return as_json(error_object(code, message, param), entry.status, headers)


async def drop_body() -> None:
    """Read and drop what a refused client sends, up to ``DROP`` bytes and ``DROP_S`` seconds.

    Of a larger body the rest stands on the connection: it ends with the answer, and its client is told so.
    """
    g.unread = True

    async def drop() -> None:
        left = DROP
        async for data in request.body:
            left -= len(data)
            if left <= 0:
                return
        g.unread = False

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(drop(), DROP_S)


async def from_http(error: HTTPException) -> Response:
    """Unknown routes and wrong methods; anything else werkzeug refuses is a malformed request."""
    if has_request_context():  # there is none for a web socket, of which there is none here
        await drop_body()
    if isinstance(error, NotFound):
        return refusal("not_found")
    if isinstance(error, MethodNotAllowed):
        return refusal("method_not_allowed", headers={"Allow": ", ".join(sorted(error.valid_methods or ()))})
    return refusal("invalid_value", "The request is malformed.")


async def from_exception(error: Exception) -> Response:
    """A fault of ours outside a request's own handler. Its text goes nowhere."""
    log.error("[fault] in http: %s", last_word(error))
    return refusal("internal_error")


def last_word(value: Any) -> str:
    """An exception's class name: all that is ever said of it."""
    return type(value).__name__
