"""The answering routes through Quart's test client: shapes, refusals, usage, finish words."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from pipeline.http.app import create_app
from tests.fake_runner import CHAT, COMPLETIONS, NAME, PIECES, FakeCall, FakeRunner, events
from tests.openai_schemas import check

TEXT = "".join(PIECES)


def post(runner: FakeRunner, body: Any, route: str = CHAT, **more: Any) -> Any:
    """Ask once; the response, with its body read into ``.raw``."""

    async def ask() -> Any:
        response = await create_app(runner).test_client().post(route, data=json.dumps(body), **more)
        response.raw = await response.get_data()
        return response

    return asyncio.run(ask())


def test_whole_chat() -> None:
    """A1: a whole chat answer has every key OpenAI's schema requires."""
    response = post(FakeRunner(), {"messages": []})
    answer = json.loads(response.raw)
    assert response.status_code == 200 and response.headers["X-Request-Id"] == answer["id"] == "chatcmpl-" + NAME
    assert response.content_type == "application/json"
    assert answer["choices"] == [
        {
            "index": 0, "finish_reason": "stop", "logprobs": None,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
        }
    ]  # fmt: skip
    assert answer["object"] == "chat.completion" and answer["model"] == "smol/fake-1" and "error" not in answer
    check(answer, "CreateChatCompletionResponse")


def test_whole_completion() -> None:
    """A1: a whole completion has every key OpenAI's schema requires."""
    answer = json.loads(post(FakeRunner(), {"prompt": "x"}, COMPLETIONS).raw)
    assert answer["id"] == "cmpl-" + NAME and answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    check(answer, "CreateCompletionResponse")


def test_usage_and_timings_of_a_whole_answer() -> None:
    """F4: timings stand beside usage; cached and read rows are the prompt."""
    answer = json.loads(post(FakeRunner(), {"messages": []}).raw)
    assert answer["usage"]["prompt_tokens"] == 11 and answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == 11


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_stream(route: str) -> None:
    """F1: one chunk a token, the role on the first, the finish chunk, then [DONE]."""
    response = post(FakeRunner(), {"stream": True}, route)
    *chunks, done = events(response.raw)
    assert done == "[DONE]" and response.content_type.startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache" and response.headers["X-Accel-Buffering"] == "no"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    if route == CHAT:
        assert [choice["delta"].get("content") for choice in choices] == [*PIECES, None]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * 4
    else:
        assert [choice["text"] for choice in choices] == [*PIECES, ""]
    # OpenAI's completions have no schema of a chunk; null before the end is what it and everyone sends.
    for chunk in chunks if route == CHAT else chunks[-1:]:
        check(chunk, "CreateChatCompletionStreamResponse" if route == CHAT else "CreateCompletionResponse")


@pytest.mark.parametrize(
    ("default", "asked", "where"),
    [
        (True, None, "finish"),
        (False, None, "nowhere"),
        (True, True, "own"),
        (False, True, "own"),
        (True, False, "nowhere"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_usage_stands_in_one_place(route: str, default: bool, asked: bool | None, where: str) -> None:
    """F1: usage on the finish chunk by default, on an own last chunk where asked for, nowhere where declined."""
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    *chunks, _done = events(post(FakeRunner(usage_default=default), {"stream": True, **options}, route).raw)
    counted = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(counted) == (0 if where == "nowhere" else 1)
    assert all(("timings" in chunk) == (chunk in counted) for chunk in chunks)
    if where == "finish":
        assert counted == [chunks[-1]] and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    if where == "own":
        assert counted == [chunks[-1]] and chunks[-1]["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks if chunk not in counted)


def test_one_take_is_one_write() -> None:
    """F1: what is pending reaches the socket together."""

    async def run() -> None:
        client = create_app(FakeRunner()).test_client()
        async with client.request(CHAT, method="POST") as connection:
            await connection.send(b'{"stream": true}')
            await connection.send_complete()
            first = await connection.receive()
        assert events(first)[-1] == "[DONE]" and len(events(first)) == 6

    asyncio.run(run())


def test_lines_open_the_stream() -> None:
    """F10: a stream opens with the first thing there is to say; a refusal after it is one finish chunk."""

    def answer(call: FakeCall, _body: bytes) -> None:
        call.line("waiting, position 1,\n10 s so far")
        call.end("timeout", "queue_timeout", opened=True)

    response = post(FakeRunner(answer), {"stream": True})
    line, chunk, done = events(response.raw)
    assert response.status_code == 200 and line == ": waiting, position 1, 10 s so far" and done == "[DONE]"
    assert chunk["choices"][0]["finish_reason"] == "timeout" and chunk["error"]["code"] == "queue_timeout"
    assert chunk["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("stream", [True, False])
def test_refusal_keeps_its_status(stream: bool) -> None:
    """A9: before anything was sent a refusal is a status with the error object, and says when to come back."""

    def answer(call: FakeCall, _body: bytes) -> None:
        call.end("timeout", "queue_timeout", message="Nobody came.", param=None)

    response = post(FakeRunner(answer), {"stream": stream})
    assert response.status_code == 429 and response.headers["Retry-After"] == "10"
    error = json.loads(response.raw)
    assert error == {
        "error": {"message": "Nobody came.", "type": "server_busy", "param": None, "code": "queue_timeout"}
    }
    check(error, "ErrorResponse")


def test_refused_on_arrival() -> None:
    """I5: a draining server answers at once, without reading the body into anything."""
    runner = FakeRunner()
    runner.refuse = "draining"
    response = post(runner, {"messages": ["x" * 100]})
    assert response.status_code == 503 and response.headers["Retry-After"] == "30"
    assert runner.bodies == [] and runner.told == []


@pytest.mark.parametrize(
    ("words", "finish", "code", "said", "has_error"),
    [
        ("chapter", "timeout", "request_timeout", "timeout", True),
        ("chapter", "error", "engine_restarting", "error", True),
        ("openai", "timeout", "request_timeout", "length", False),
        ("openai", "error", "engine_restarting", "stop", True),
        ("openai", "length", "", "length", False),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_finish_words(words: str, finish: str, code: str, said: str, has_error: bool, stream: bool) -> None:
    """F5: with timeout and error the text so far stands, the object rides along; openai has no such words."""

    def answer(call: FakeCall, _body: bytes) -> None:
        call.text("so far")
        call.end(finish, code, opened=True)

    raw = post(FakeRunner(answer, finish_words=words), {"stream": stream}).raw
    end = events(raw)[-2] if stream else json.loads(raw)
    assert end["choices"][0]["finish_reason"] == said and ("error" in end) == has_error
    assert b"so far" in raw and end["usage"]["completion_tokens"] == 4
    if has_error:
        assert end["error"]["code"] == code


def test_timeout_before_the_first_token() -> None:
    """I3: an answer that timed out is an answer: a stream opens for its one chunk, a whole one is a 200."""

    def answer(call: FakeCall, _body: bytes) -> None:
        call.end("timeout", "request_timeout")

    chunk, _done = events(post(FakeRunner(answer), {"stream": True}).raw)
    assert chunk["choices"][0]["finish_reason"] == "timeout" and chunk["error"]["code"] == "request_timeout"
    response = post(FakeRunner(answer), {})
    assert response.status_code == 200 and json.loads(response.raw)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_fault_of_ours(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """P1: an exception of ours is a 500, its class is posted, its text goes nowhere."""

    def answer(call: FakeCall, _body: bytes) -> None:
        raise ZeroDivisionError("the prompt was SECRET")

    runner = FakeRunner(answer)
    response = post(runner, {"stream": stream})
    assert response.status_code == 500 and json.loads(response.raw)["error"]["code"] == "internal_error"
    assert runner.told == [("fault", 1, "http", "ZeroDivisionError")]
    assert "SECRET" not in caplog.text + response.raw.decode()


def test_fault_on_an_open_stream(caplog: pytest.LogCaptureFixture) -> None:
    """P1: on an open stream the fault is its finish chunk."""

    def answer(call: FakeCall, _body: bytes) -> None:
        call.text("fine")
        asyncio.get_running_loop().call_soon(call.end, "error", "SECRET: no such code", True)

    async def run() -> None:
        runner = FakeRunner(answer)
        client = create_app(runner).test_client()
        async with client.request(CHAT, method="POST") as connection:
            await connection.send(b'{"stream": true}')
            await connection.send_complete()
        raw = await (await connection.as_response()).get_data()
        _text, chunk, done = events(raw)
        assert chunk["choices"][0]["finish_reason"] == "error" and chunk["error"]["code"] == "internal_error"
        assert done == "[DONE]" and "usage" not in chunk
        assert runner.told == [("fault", 1, "http", "KeyError")] and "SECRET" not in caplog.text + raw.decode()

    asyncio.run(run())


@pytest.mark.parametrize("chunked", [True, False])
def test_body_too_large(chunked: bool) -> None:
    """A14: a body over the limit is a 413: by its declared size before a record exists, else where it gets there."""

    async def run() -> None:
        runner = FakeRunner(max_body_mb=1)
        client = create_app(runner).test_client()
        headers = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(2 << 20)}
        async with client.request(CHAT, method="POST", headers=headers) as connection:
            for _ in range(20):
                await connection.send(b"x" * (100 << 10))
            await connection.send_complete()
        response = await connection.as_response()
        assert response.status_code == 413
        assert json.loads(await response.get_data())["error"]["code"] == "body_too_large"
        assert runner.bodies == [] and runner.told == ([("cut", 1, "body_too_large")] if chunked else [])
        assert len(runner.calls) == chunked

    asyncio.run(run())


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_that_nobody_declared_is_told_as_it_comes(chunked: bool) -> None:
    """A14: bytes in flight are known while they come, each step of them; declared ones are known before."""

    async def run() -> None:
        runner = FakeRunner()
        client = create_app(runner).test_client()
        part = b" " * (256 << 10)
        headers = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(20 * len(part))}
        async with client.request(CHAT, method="POST", headers=headers) as connection:
            for _ in range(20):
                await connection.send(part)
                await asyncio.sleep(0)
            await connection.send_complete()
        assert (await connection.as_response()).status_code == 200
        assert runner.bodies == [20 * part]
        assert bool(runner.grown) == chunked
        assert all(later - sooner > 1 << 20 for sooner, later in itertools.pairwise([0, *runner.grown]))

    asyncio.run(run())


def test_a_body_that_grows_too_large_for_the_server() -> None:
    """A14: over --bodies-mb is a 503 that says when to come back, before the body is whole; it is not handed over."""

    async def run() -> None:
        runner = FakeRunner()
        runner.bodies_full = 3 << 20
        client = create_app(runner).test_client()
        async with client.request(CHAT, method="POST", headers={"Transfer-Encoding": "chunked"}) as connection:
            for _ in range(20):
                await connection.send(b" " * (256 << 10))
            await connection.send_complete()
        response = await connection.as_response()
        assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
        assert json.loads(await response.get_data())["error"]["code"] == "live_full"
        assert runner.bodies == [] and runner.told == []

    asyncio.run(run())


def test_verdict_before_the_body() -> None:
    """I2: a body that never comes is not waited for once the request is over."""

    async def run() -> None:
        runner = FakeRunner()
        client = create_app(runner).test_client()
        async with client.request(CHAT, method="POST", headers={"Content-Length": "10"}) as connection:
            await connection.send(b"{")
            while not runner.calls:
                await asyncio.sleep(0)
            runner.calls[0].end("timeout", "queue_timeout")
        assert connection.status_code == 429 and runner.told == []

    asyncio.run(run())


@pytest.mark.parametrize("when", ["body", "wait", "stream"])
def test_client_leaves(when: str) -> None:
    """F6: whenever the client leaves, the hang-up is posted, once."""

    def answer(call: FakeCall, _body: bytes) -> None:
        if when == "stream":
            call.text("a", "b")

    async def run() -> None:
        runner = FakeRunner(answer)
        client = create_app(runner).test_client()
        async with client.request(CHAT, method="POST") as connection:
            await connection.send(b'{"stream": true}')
            if when != "body":
                await connection.send_complete()
            if when == "stream":
                await connection.receive()
            while not runner.calls:
                await asyncio.sleep(0)
            await connection.disconnect()
        await runner.gone.wait()
        assert runner.told == [("left", 1, "closed")] and runner.calls[0].task is None

    asyncio.run(run())


def test_runner_cuts_a_client_off() -> None:
    """G4: the runner cancels the call's task; the stream ends."""

    async def run() -> None:
        runner = FakeRunner(lambda call, _body: call.text("a") and None)
        client = create_app(runner).test_client()
        async with client.request(CHAT, method="POST") as connection:
            await connection.send(b'{"stream": true}')
            await connection.send_complete()
            await connection.receive()
            task = runner.calls[0].task
            assert task is not None
            task.cancel()
        assert runner.told == [("left", 1, "closed")]

    asyncio.run(run())
