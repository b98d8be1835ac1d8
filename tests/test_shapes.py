"""pipeline/http/shapes.py and chunks.py: thinking, calls and several choices, by OpenAI's schemas."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from pipeline.http.chunks import Stream
from pipeline.http.shapes import Shape, Whole, call_id
from pipeline.outbox import ChoiceEnd, Comment, End, Item, Text
from pipeline.summary import join
from stages.calls import Arguments, CallClosed, CallOpened, Content, Delta, Reasoning
from tests.fake_runner import CHAT, COMPLETIONS, NAME, FakeCall, FakeRunner, events
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
    """B2, B4: thinking stands in reasoning_content alone; with both keys under the name reasoning too."""
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


def listed(call: FakeCall, _body: bytes) -> None:
    """Three prompts: the second one's time runs out, the others are whole."""
    for choice, (finish, code) in enumerate([("stop", ""), ("timeout", "request_timeout"), ("stop", "")]):
        put(call, [[Content(f"{choice}")]], choice)
        call.outbox.put(ChoiceEnd(choice, finish, code=code), time.monotonic())
    call.end()
    end = call.outbox._items[-1]
    assert isinstance(end, End)
    end.choice, end.closed = 2, True


@pytest.mark.parametrize(("words", "said", "told"), [("chapter", "timeout", True), ("openai", "length", False)])
def test_an_error_of_one_prompt(words: str, said: str, told: bool) -> None:
    """A13, F5: the error object rides on the finish of the prompt it ended, in the words the server speaks."""
    *chunks, _done = events(post(FakeRunner(listed, finish_words=words), {"stream": True}, COMPLETIONS).raw)
    finishes = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in finishes] == ["stop", said, "stop"]
    assert ["error" in chunk for chunk in finishes] == [False, told, False]
    assert ["usage" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    if told:
        assert finishes[1]["error"]["code"] == "request_timeout"


@pytest.mark.parametrize(("words", "said", "told"), [("chapter", "timeout", True), ("openai", "length", False)])
def test_an_error_of_one_prompt_in_a_whole_answer(words: str, said: str, told: bool) -> None:
    """A13, F5: the body has the error object of the first prompt that one ended, and each choice its own finish."""

    def answer(call: FakeCall, body: bytes) -> None:
        listed(call, body)
        end = call.outbox._items[-1]
        assert isinstance(end, End)
        bad = msgspec.structs.replace(end.figures, request=2, finish="timeout", code="request_timeout")
        end.figures = join([end.figures, bad, end.figures])

    whole = json.loads(post(FakeRunner(answer, finish_words=words), {}, COMPLETIONS).raw)
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", said, "stop"]
    assert (whole.get("error") or {}).get("code") == ("request_timeout" if told else None)


def test_a_finish_goes_out_when_its_prompt_is_over() -> None:
    """A13, F1: nobody waits for the next prompt to hear that the one before it is complete."""
    shape = Shape("completions", NAME)
    stream = Stream(shape=shape, created=1, model="m", include_usage=None, usage_default=True, words="chapter")
    [chunk] = events(b"".join(stream.blocks([ChoiceEnd(0, "stop")])))
    assert (chunk["choices"][0]["index"], chunk["choices"][0]["finish_reason"], "usage" in chunk) == (0, "stop", False)
    end = End(_figures(), choice=1, closed=True)
    last: list[Item] = [Text([[Content("b")]], choice=1), ChoiceEnd(1, "length"), end]
    *_text, chunk, done = events(b"".join(stream.blocks(last)))
    assert (chunk["choices"][0]["finish_reason"], "usage" in chunk, done) == ("length", True, "[DONE]")


@pytest.mark.parametrize("text", [True, False])
def test_a_stream_that_breaks_between_prompts(text: bool) -> None:
    """A13, R1: a stream that breaks says so on the choice it was at; none is ended twice."""
    shape = Shape("completions", NAME)
    stream = Stream(shape=shape, created=1, model="m", include_usage=None, usage_default=True, words="chapter")
    items: list[Item] = [Text([[Content("a")]]), ChoiceEnd(0, "stop")]
    items += [Text([[Content("b")]], choice=1)] if text else []
    *chunks, done = events(b"".join([*stream.blocks(items), stream.broken()]))
    ends = [(chunk["choices"][0]["index"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]
    assert [end for end in ends if end[1]] == [(0, "stop"), (1, "error")]
    assert (chunks[-1]["error"]["code"], done) == ("internal_error", "[DONE]")


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
