"""pipeline/http/shapes.py and chunks.py: thinking, calls and several choices, by OpenAI's schemas."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pipeline.http.chunks import Stream
from pipeline.http.shapes import Shape, Whole, call_id
from pipeline.outbox import ChoiceEnd, Comment, End, Item, Text
from stages.calls import Arguments, CallClosed, CallOpened, Content, Delta, Reasoning
from tests.fake_runner import CHAT, NAME, FakeCall, FakeRunner, events
from tests.openai_schemas import check
from tests.test_http_openai import post

THOUGHT: list[list[Delta]] = [[Reasoning("I ")], [Reasoning("think."), Content("So")], [Content(" be it.")]]
CALLS: list[list[Delta]] = [
    [Content("Now:")],
    [CallOpened(0, "write"), Arguments(0, '{"path": "')],
    [Arguments(0, "a")],
    [Arguments(0, '"}'), CallClosed(0, True), CallOpened(1, "list")],
    [Arguments(1, "{}"), CallClosed(1, True)],
]


def put(call: FakeCall, parts: list[list[Delta]], choice: int = 0) -> None:
    call.outbox.put(Text(parts, choice=choice), time.monotonic())


def answered(parts: list[list[Delta]], finish: str = "stop", route: str = CHAT, **settings: Any) -> tuple[Any, Any]:
    """The whole answer and the stream's chunks of the same parts."""

    def answer(call: FakeCall, _body: bytes) -> None:
        put(call, parts)
        call.end(finish)

    whole = json.loads(post(FakeRunner(answer, **settings), {}, route).raw)
    *chunks, done = events(post(FakeRunner(answer, **settings), {"stream": True}, route).raw)
    assert done == "[DONE]"
    return whole, chunks


def deltas(chunks: list[Any]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize(("key", "keys"), [("reasoning_content", 1), ("both", 2)])
def test_thinking_in_its_own_field(key: str, keys: int) -> None:
    """B2: thinking stands in reasoning_content alone. B4: with both keys under the name reasoning too."""
    whole, chunks = answered(THOUGHT, reasoning_key=key)
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "I think." and message["content"] == "So be it."
    names = [name for name in ("reasoning_content", "reasoning") if name in message]
    assert len(names) == keys
    for name in names:
        assert message[name] == "".join(delta.get(name) or "" for delta in deltas(chunks)) == "I think."
    assert "".join(delta.get("content") or "" for delta in deltas(chunks)) == "So be it."
    check(whole, "CreateChatCompletionResponse")
    for chunk in chunks:
        check(chunk, "CreateChatCompletionStreamResponse")


def test_calls() -> None:
    """D3: id and name go first, the pieces joined are the arguments. D2: ids are the same streamed and whole."""
    whole, chunks = answered(CALLS, "tool_calls")
    calls = whole["choices"][0]["message"]["tool_calls"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
        ("write", '{"path": "a"}'), ("list", "{}"),
    ]  # fmt: skip
    assert [call["id"] for call in calls] == [call_id(NAME, 0, 0), call_id(NAME, 0, 1)]
    joined: dict[int, dict[str, str]] = {}
    for delta in deltas(chunks):
        for call in delta.get("tool_calls", []):
            entry = joined.setdefault(call["index"], {"id": call.get("id", ""), "name": "", "arguments": ""})
            assert call.get("type", "function") == "function"
            entry["name"] += call["function"].get("name", "")
            entry["arguments"] += call["function"]["arguments"]
    assert [joined[i] for i in range(2)] == [
        {"id": call["id"], **call["function"]} for call in calls
    ]  # fmt: skip
    assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    check(whole, "CreateChatCompletionResponse")
    for chunk in chunks:
        check(chunk, "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize(("parts", "content"), [(CALLS[1:], None), (CALLS, "Now:"), ([[Content("a")]], "a"), ([], "")])
def test_content_beside_calls(parts: list[list[Delta]], content: str | None) -> None:
    """D2: content is null beside calls without text, else the text."""
    whole, chunks = answered(parts)
    assert whole["choices"][0]["message"]["content"] == content
    assert deltas(chunks)[0]["role"] == "assistant" and deltas(chunks)[0].get("content", "") == content


def test_an_unfinished_call() -> None:
    """F9: a call left unfinished is not in a whole answer, while what a stream sent of it stays."""
    whole, chunks = answered([*CALLS[:2], [CallClosed(0, False)]], "length")
    assert "tool_calls" not in whole["choices"][0]["message"]
    assert any("tool_calls" in delta for delta in deltas(chunks))


def several(call: FakeCall, _body: bytes) -> None:
    """Three choices, the last ends with the request."""
    for choice, finish in enumerate(["stop", "length", "stop"]):
        put(call, [[Content(f"{choice}")], [Content("!")]], choice)
        call.outbox.put(ChoiceEnd(choice, finish), time.monotonic())
    call.end()
    end = call.outbox._items[-1]
    assert isinstance(end, End)
    end.choice, end.closed = 2, True


def test_several_choices() -> None:
    """F11: each choice has its index and its own finish; usage stands once, on the last."""
    whole = json.loads(post(FakeRunner(several), {}).raw)
    told = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in whole["choices"]]
    assert told == [(0, "0!", "stop"), (1, "1!", "length"), (2, "2!", "stop")]
    *chunks, _done = events(post(FakeRunner(several), {"stream": True}).raw)
    finishes = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert [(c["index"], c["finish_reason"]) for c in finishes] == [(0, "stop"), (1, "length"), (2, "stop")]
    assert [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]] == [0, 1, 2]
    assert ["usage" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_an_error_between_choices() -> None:
    """F11: what was complete stands; the choice that runs when the time is over ends with it."""

    def answer(call: FakeCall, _body: bytes) -> None:
        put(call, [[Content("a")]], 0)
        call.outbox.put(ChoiceEnd(0, "stop"), time.monotonic())
        put(call, [[Content("b")]], 1)
        call.end("timeout", "request_timeout", opened=True)
        end = call.outbox._items[-1]
        assert isinstance(end, End)
        end.choice = 1

    whole = json.loads(post(FakeRunner(answer), {}).raw)
    assert [(c["message"]["content"], c["finish_reason"]) for c in whole["choices"]] == [
        ("a", "stop"),
        ("b", "timeout"),
    ]
    assert whole["error"]["code"] == "request_timeout"
    *chunks, _done = events(post(FakeRunner(answer), {"stream": True}).raw)
    finishes = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert [(c["index"], c["finish_reason"]) for c in finishes] == [(0, "stop"), (1, "timeout")]
    assert chunks[-1]["error"]["code"] == "request_timeout"


def test_a_line_shown_as_thinking() -> None:
    """Q6: a waiting line for a kind that shows it stands in the reasoning field, beside the comment."""
    shape = Shape("chat", NAME)
    stream = Stream(shape=shape, created=1, model="m", include_usage=None, usage_default=True, words="chapter")
    items: list[Item] = [Comment("waiting, position 1", True), Text([[Content("a")]])]
    comment, line, text = events(b"".join(stream.blocks(items)))
    assert comment == ": waiting, position 1"
    assert line["choices"][0]["delta"] == {"role": "assistant", "reasoning_content": "waiting, position 1\n"}
    assert text["choices"][0]["delta"] == {"content": "a"}


def test_completions_have_text_alone() -> None:
    """A1: the completions route knows no reasoning and no calls: its text is the content."""
    whole, chunks = answered(THOUGHT, route="/v1/completions")
    assert whole["choices"][0]["text"] == "So be it." == "".join(c["choices"][0]["text"] for c in chunks)
    assert (
        Whole(Shape("completions", NAME), False).answer(End(_figures()), 1, "m", "chapter")["choices"][0]["text"] == ""
    )


def _figures() -> Any:
    call = FakeCall(1, "completions")
    call.end()
    end = call.outbox._items[-1]
    assert isinstance(end, End)
    return end.figures
