"""The error table: words, statuses, sizes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import outcomes


@given(
    code=st.sampled_from(sorted(outcomes.CODES)), message=st.text(max_size=5_000),
    param=st.none() | st.text(min_size=1, max_size=5_000),
)  # fmt: skip
def test_error_bodies_are_small_and_shaped(code: str, message: str, param: str | None) -> None:
    """A9: OpenAI's error object, at most 2 KB, `code` a word of the table."""
    body = outcomes.error_object(code, message, param)
    assert len(msgspec.json.encode(body)) <= outcomes.OVERSIZE
    error = body["error"]
    assert isinstance(error, dict)
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["message"]
    assert error["type"] == outcomes.CODES[code].type


def test_an_unknown_code_is_a_fault_of_ours() -> None:
    """A9: the table is closed."""
    with pytest.raises(KeyError):
        outcomes.error_object("no_such_code")


@pytest.mark.parametrize(
    ("row", "opened", "status", "finish", "code"),
    [
        ("refused_queue_full", False, 503, "error", "queue_full"),
        ("waited_out", False, 429, "timeout", "queue_timeout"),
        ("waited_out", True, 200, "timeout", "queue_timeout"),
        ("ran_out", False, 200, "timeout", "request_timeout"),
        ("engine_lost", False, 503, "error", "engine_restarting"),
        ("engine_lost", True, 200, "error", "engine_restarting"),
        ("faulted", False, 500, "error", "internal_error"),
        ("stopped", True, 200, "stop", ""),
        ("at_limit", False, 200, "length", ""),
        ("called", True, 200, "tool_calls", ""),
        ("bad_schema", False, 400, "error", "invalid_type"),
        ("bad_shape", False, 400, "error", "invalid_type"),
    ],
)
def test_the_map(row: str, opened: bool, status: int, finish: str, code: str) -> None:
    """F5, F10: one map from the row and whether the stream is open to what the client gets."""
    outcome = outcomes.of(row, opened, "invalid_type")
    assert (outcome.status, outcome.finish, outcome.code) == (status, finish, code)
    assert outcome.retry_after == (0 if opened or not code else outcomes.CODES[code].retry_after)
