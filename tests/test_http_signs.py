"""Signs of life over HTTP: empty chunks, lines as figures, a whole answer's headers and blanks in front of it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

from pipeline.http.openai import Exchange
from pipeline.outbox import Beat, Blank, Comment, Text
from stages.calls import Content
from tests.fake_runner import CHAT, COMPLETIONS, FakeCall, FakeRunner, events, served
from tests.openai_schemas import check
from tests.test_http_openai import post
from tests.test_http_serve import LONG, raw, silent, until

FIGURES: dict[str, float | None] = {"position": 1.0, "estimate_s": None, "waited_s": 60.0}


def put(call: FakeCall, *items: Beat | Blank | Comment | Text) -> None:
    for item in items:
        call.outbox.put(item, time.monotonic())


def beats(call: FakeCall, _body: bytes) -> None:
    put(call, Comment("waiting, position 1, 60 s so far"), Beat())
    call.text("a")
    call.end()


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_an_empty_chunk(route: str) -> None:
    """L1: it says nothing: it may precede the role, which stands on the first text as ever; no line is an ``id:``."""
    response = post(FakeRunner(beats), {"stream": True}, route)
    line, beat, text, finish, done = events(response.raw)
    assert (line, done) == (": waiting, position 1, 60 s so far", "[DONE]")
    content: dict[str, Any] = {"delta": {}} if route == CHAT else {"text": ""}
    assert beat["choices"] == [{"index": 0, **content, "logprobs": None, "finish_reason": None}]
    assert "usage" not in beat
    assert "usage" in finish
    if route == CHAT:
        assert text["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
        check(beat, "CreateChatCompletionStreamResponse")
    assert not any(row.startswith(b"id:") for row in response.raw.split(b"\n"))


def test_an_empty_chunk_has_the_usage_of_every_other() -> None:
    """F1, L1: with ``include_usage`` it carries ``usage: null``."""
    body = {"stream": True, "stream_options": {"include_usage": True}}
    _line, beat, *_rest = events(post(FakeRunner(beats), body).raw)
    assert beat["usage"] is None


def test_no_sign_while_text_is_pending() -> None:
    """L1: an empty chunk behind text that was not taken is dropped, as a line is."""

    def both(call: FakeCall, _body: bytes) -> None:
        call.text("a")
        put(call, Beat(), Comment("prefill 1/2"))
        call.end()

    said = events(post(FakeRunner(both), {"stream": True}).raw)
    assert [chunk["choices"][0]["delta"] for chunk in said[:-1]] == [{"role": "assistant", "content": "a"}, {}]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_figures_of_a_line(route: str) -> None:
    """L8: beside the comment a chunk with nothing in it but the figures; who did not ask for them gets none."""

    def lines(call: FakeCall, _body: bytes) -> None:
        put(
            call, Comment("waiting", progress=FIGURES), Comment("prefill 5/10", progress={"rows_done": 5}), Comment("x")
        )
        call.end()

    first, waits, second, reads, third, _finish, _done = events(post(FakeRunner(lines), {"stream": True}, route).raw)
    assert (first, second, third) == (": waiting", ": prefill 5/10", ": x")
    assert (waits["progress"], reads["progress"]) == (FIGURES, {"rows_done": 5})
    choice = waits["choices"][0]
    assert (choice["delta"] if route == CHAT else choice["text"]) == ({} if route == CHAT else "")


class Early:
    """A request without a stream whose headers and first blank are here, as ``head``."""

    async def begin(self, port: int, runner: FakeRunner) -> FakeCall:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.writer.write(raw(b"{}", "Connection: close"))
        await until(lambda: bool(runner.bodies))
        put(runner.calls[0], Text([[Content("Hel")]]), Blank())
        self.head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n1\r\n \r\n"), LONG)
        return runner.calls[0]

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), LONG)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@pytest.mark.parametrize(("finish", "code"), [("stop", ""), ("timeout", "request_timeout"), ("error", "memory")])
def test_headers_before_the_answer(finish: str, code: str) -> None:
    """I6b: a 200 and white space leave first; every end then is a 200 whose JSON has the finish reason, F5's error."""

    async def run() -> tuple[bytes, bytes]:
        runner, client = FakeRunner(silent), Early()
        async with served(runner) as port:
            call = await client.begin(port, runner)
            put(call, Blank(), Text([[Content("lo")]]))
            await asyncio.sleep(0)
            call.end(finish, code, opened=True)
            rest = await client.rest()
            assert not runner.told
        await client.close()
        return client.head, rest

    head, rest = asyncio.run(run())
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id" in head.lower()
    answer = json.loads(rest[rest.index(b"{") : rest.rindex(b"}") + 1])
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", finish)
    assert answer.get("error", {}).get("code", "") == code
    assert answer["usage"]["completion_tokens"] == 4


def test_a_client_that_leaves_between_blanks() -> None:
    """I6b: its leaving is seen as that of a stream's client."""

    async def run() -> list[tuple[Any, ...]]:
        runner, client = FakeRunner(silent), Early()
        async with served(runner) as port:
            await client.begin(port, runner)
            await client.close()
            await asyncio.wait_for(runner.gone.wait(), LONG)
        return runner.told

    assert asyncio.run(run()) == [("left", 1, "closed")]


def test_clients_read_it() -> None:
    """I6b: JSON parsers skip white space in front: the openai package and httpx read the answer."""

    def early(call: FakeCall, _body: bytes) -> None:
        put(call, Blank())
        asyncio.get_running_loop().call_later(0.05, call.text, "hi")
        asyncio.get_running_loop().call_later(0.06, put, call, Blank())
        asyncio.get_running_loop().call_later(0.1, call.end)

    async def run() -> None:
        async with served(FakeRunner(early)) as port, httpx.AsyncClient(timeout=LONG) as plain:
            base = f"http://127.0.0.1:{port}"
            response = await plain.post(base + CHAT, json={"messages": []})
            assert response.text.startswith("  {")
            assert response.json()["choices"][0]["message"]["content"] == "hi"
            async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="none") as client:
                whole = await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
                assert whole.choices[0].message.content == "hi"

    asyncio.run(run())


def test_a_fault_behind_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6b, F5: what breaks once the headers left is a 200 with finish ``error`` and the error object."""
    json_of, broken = Exchange._json, [True]

    def breaks(self: Exchange, *arguments: Any) -> dict[str, Any]:
        if broken.pop() if broken else False:
            raise KeyError("secret")
        return json_of(self, *arguments)

    def early(call: FakeCall, _body: bytes) -> None:
        put(call, Blank())
        asyncio.get_running_loop().call_later(0.05, call.end)

    monkeypatch.setattr(Exchange, "_json", breaks)
    runner = FakeRunner(early)
    response = post(runner, {"messages": []})
    answer = json.loads(response.raw)
    assert response.status_code == 200
    assert answer["choices"][0]["finish_reason"] == "error"
    assert answer["error"]["code"] == "internal_error"
    assert runner.told == [("fault", 1, "http", "KeyError")]
