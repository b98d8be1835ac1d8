"""Logprobs as the answering routes send them, streamed and whole, against OpenAI's schemas."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pipeline.effects import Finish
from pipeline.outbox import End, Text
from stages.calls import Content
from stages.logprobs import Entry
from tests.fake_runner import CHAT, COMPLETIONS, FakeCall, FakeRunner, events
from tests.openai_schemas import check
from tests.test_http_openai import post

FIRST, OPEN, CLOSE, LEFT = (
    Entry(b"Hel", -0.25, [(b"Hel", -0.25), (b"Bye", -1.5)], 0),
    Entry(b"\xe2\x82", -0.5, [(b"\xe2\x82", -0.5)], 3),
    Entry(b"\xac", 0.0, [(b"\xac", 0.0)], 3),
    Entry(b"\xff", -9999.0, [(b"!", -0.125)], 4),
)


def answer(call: FakeCall, _body: bytes) -> None:
    """Three pieces; the second token is told with the last of them, one token with the end."""
    call.alternatives = 2
    call.outbox.put(Text([[Content("Hel")], [Content("€")]], [[FIRST], [OPEN, CLOSE]]), time.monotonic())
    call.outbox.put(Text([[Content("!")]], [[]]), time.monotonic())
    figures = Finish(request=call.request, finish="stop", opened=True, prompt_tokens=1, completion_tokens=4)
    call.outbox.put(End(figures, logprobs=[LEFT]), time.monotonic())


def asked(route: str, stream: bool) -> Any:
    raw = post(FakeRunner(answer), {"stream": stream}, route).raw
    return events(raw)[:-1] if stream else json.loads(raw)


def test_whole_chat() -> None:
    """F7: every entry with its bytes, the alternatives as they came, and OpenAI's null for refusals."""
    body = asked(CHAT, stream=False)
    check(body, "CreateChatCompletionResponse")
    told = body["choices"][0]["logprobs"]
    assert told["refusal"] is None
    assert [(one["token"], one["logprob"], bytes(one["bytes"])) for one in told["content"]] == [
        ("Hel", -0.25, b"Hel"), ("", -0.5, b"\xe2\x82"), ("", 0.0, b"\xac"), ("", -9999.0, b"\xff"),
    ]  # fmt: skip
    assert told["content"][0]["top_logprobs"][1] == {"token": "Bye", "logprob": -1.5, "bytes": [66, 121, 101]}


def test_whole_completion() -> None:
    """F7: the four lists of a completion."""
    body = asked(COMPLETIONS, stream=False)
    check(body, "CreateCompletionResponse")
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Hel", "", "", ""], "token_logprobs": [-0.25, -0.5, 0.0, -9999.0], "text_offset": [0, 3, 3, 4],
        "top_logprobs": [{"Hel": -0.25, "Bye": -1.5}, {"": -0.5}, {"": 0.0}, {"!": -0.125, "": -9999.0}],
    }  # fmt: skip


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_streamed_equals_whole(route: str) -> None:
    """F7: each chunk tells of its own tokens, the finish of those left; joined they are the whole answer's."""
    chunks = asked(route, stream=True)
    for chunk in chunks if route == CHAT else chunks[-1:]:
        check(chunk, "CreateChatCompletionStreamResponse" if route == CHAT else "CreateCompletionResponse")
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    key = "content" if route == CHAT else "tokens"
    assert [len(one[key]) if one else 0 for one in told] == [1, 2, 0, 1]
    if route == CHAT:
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant", None, None, None]
    whole = asked(route, stream=False)["choices"][0]["logprobs"]
    for name in set(whole) - {"refusal"}:
        assert [value for one in told if one for value in one[name]] == whole[name]


def test_asked_for_and_nothing_to_tell() -> None:
    """F7: an empty answer tells of no token; null is for who did not ask."""

    def nothing(call: FakeCall, _body: bytes) -> None:
        call.alternatives = 0
        call.end()

    [choice] = json.loads(post(FakeRunner(nothing), {}).raw)["choices"]
    assert choice["logprobs"] == {"content": [], "refusal": None}
