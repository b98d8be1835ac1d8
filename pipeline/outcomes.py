"""How a request ends for its client: every error code with its status and ``Retry-After``, and what each row says.

``of(row, opened)`` is the one map from the row that ended a request to what its client gets. Before the stream opened
that is a status with OpenAI's error object; after it, one finish chunk with the same object.
"""

from __future__ import annotations

import msgspec

from pipeline.request import Facts, Request
from pipeline.states import RequestState, Trigger
from pipeline.table import ROWS

INVALID, BUSY, RATE, INTERNAL = "invalid_request_error", "server_busy", "rate_limit_error", "internal_error"


class Code(msgspec.Struct, frozen=True):
    """One word of the error table. ``retry_after`` in seconds, 0: none. ``text`` when nobody says it better."""

    status: int
    type: str
    retry_after: int = 0
    text: str = ""


CODES: dict[str, Code] = {
    "invalid_json": Code(400, INVALID, text="The body is not a JSON object."),
    "missing_required_parameter": Code(400, INVALID, text="A required field is missing."),
    "invalid_type": Code(400, INVALID, text="A field has the wrong type."),
    "invalid_value": Code(400, INVALID, text="A field has a value that is not allowed."),
    "unsupported_parameter": Code(400, INVALID, text="A field is not supported."),
    "unsupported_value": Code(400, INVALID, text="A field has a value that is not supported."),
    "unsupported_schema": Code(400, INVALID, text="The schema uses something that cannot be enforced."),
    "context_length_exceeded": Code(400, INVALID, text="The prompt is too long for the model's window."),
    "invalid_api_key": Code(401, INVALID, text="The API key is missing or wrong: send `Authorization: Bearer KEY`."),
    "origin_not_allowed": Code(
        403, INVALID,
        text="This web origin or host name may not use the server. Allow it with --cors-origin or --allowed-host.",
    ),
    "model_not_found": Code(404, INVALID, text="This model is not served here. GET /v1/models lists what is."),
    "not_found": Code(404, INVALID, text="There is no such route here."),
    "method_not_allowed": Code(405, INVALID, text="This route does not take that method."),
    "body_too_large": Code(413, INVALID, text="The body is over --max-body-mb."),
    "queue_timeout": Code(429, BUSY, 10, "No slot became free in time. Try again later."),
    "too_many_attempts": Code(429, RATE, 60, "Too many wrong keys from this address. Wait a minute."),
    "too_many_viewers": Code(429, RATE, 5, "Four readers watch the live events already. Close one."),
    "internal_error": Code(500, INTERNAL, text="Something broke on our side. The server's log names the place."),
    "queue_full": Code(503, BUSY, 5, "The queue is full. Try again in a moment."),
    "live_full": Code(503, BUSY, 5, "Too many requests are being read. Try again in a moment."),
    "draining": Code(503, BUSY, 30, "The server is stopping and takes no new requests."),
    "shutting_down": Code(503, BUSY, 30, "The server stopped before the answer was complete."),
    "memory": Code(503, BUSY, 30, "There is not enough memory for this prompt now. Try again later."),
    "engine_restarting": Code(503, BUSY, 30, "The engine was lost and starts again. Try again in a moment."),
    "request_timeout": Code(200, BUSY, text="The request's time is over; what was written stands."),
}  # fmt: skip

ESTIMATED = ("memory", "engine_restarting")
"""Codes whose ``Retry-After`` is the wait estimate where there is one, within these bounds; else the table's."""
SHORTEST_RETRY, LONGEST_RETRY = 5, 60

OVERSIZE = 2_048
"""Bytes. No error body is larger."""


def error_object(code: str, message: str = "", param: str | None = None) -> dict[str, object]:
    """OpenAI's error object, at most ``OVERSIZE`` bytes of JSON. Unknown codes raise KeyError: the table is closed."""
    entry = CODES[code]
    inner = {"message": (message or entry.text)[:900], "type": entry.type, "param": param and param[:300], "code": code}
    while len(msgspec.json.encode({"error": inner})) > OVERSIZE:
        inner["message"] = str(inner["message"])[: len(str(inner["message"])) * 3 // 4]
        inner["param"] = param and param[:100]
    return {"error": inner}


class Outcome(msgspec.Struct, frozen=True):
    """What a client gets: a good end has no code. ``finish`` is the word on an open stream or a whole 200."""

    finish: str
    code: str = ""
    status: int = 200
    retry_after: int = 0


# The row that ended the request -> (finish word, code). "" as a code: the one the facts carry (a 400's own).
ENDS: dict[str, tuple[str, str]] = {
    "refused_draining": ("error", "draining"),
    "refused_live_full": ("error", "live_full"),
    "refused_queue_full": ("error", "queue_full"),
    "refused_engine_failed": ("error", "engine_restarting"),
    "refused_bodies_full": ("error", "live_full"),
    "bad_json": ("error", "?"),
    "unknown_model": ("error", "model_not_found"),
    "bad_shape": ("error", "?"),
    "refused_field": ("error", "?"),
    "no_token": ("error", "?"),
    "bad_schema": ("error", "?"),
    "over_window": ("error", "context_length_exceeded"),
    "never_fits": ("error", "context_length_exceeded"),
    "unfit_after_all": ("error", "context_length_exceeded"),
    "queue_filled": ("error", "queue_full"),
    "waited_out": ("timeout", "queue_timeout"),
    "ran_out": ("timeout", "request_timeout"),
    "refused_memory": ("error", "memory"),
    "engine_failed": ("error", "engine_restarting"),
    "engine_lost": ("error", "engine_restarting"),
    "faulted": ("error", "internal_error"),
    "shut_down": ("error", "shutting_down"),
    "called": ("tool_calls", ""),
    "at_limit": ("length", ""),
    "stopped": ("stop", ""),
    "guest_called": ("tool_calls", ""),
    "guest_at_limit": ("length", ""),
    "guest_stopped": ("stop", ""),
}


def of(row: str, opened: bool, code: str = "") -> Outcome:
    """What the client of a request gets that ended by ``row``. ``code`` is the one its facts carry, for a 400."""
    finish, word = ENDS[row]
    word = (code or "invalid_value") if word == "?" else word
    if not word:
        return Outcome(finish)
    entry = CODES[word]
    status = 200 if opened else entry.status
    return Outcome(finish, word, status, 0 if opened else entry.retry_after)


def finish_word(request: Request) -> str:
    """How its answer would end as it stands, by the row that ``end`` would fire: each choice has a word of its own."""
    rows = (row for row in ROWS if row.trigger is Trigger.end and RequestState.decoding in row.sources)
    return ENDS[next(row.name for row in rows if row.guard is None or row.guard(request, Facts()))][0]
