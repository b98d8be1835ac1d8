"""The server on a real socket: clients that leave, do not read, send too much; and what it refuses to bind."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pipeline.http import wire
from pipeline.http.serve import CannotServe, listen
from pipeline.http.wire import Connections, Wire
from pipeline.settings import Settings
from tests.fake_runner import CHAT, PIECES, FakeCall, FakeRunner, events, served, served_app

LONG = 20.0
"""Seconds: a bound against hanging, never an expectation."""


def raw(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    return ("\r\n".join(lines) + f"\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body


async def until(true: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(LONG):
        while not true():
            await asyncio.sleep(0.005)


def silent(call: FakeCall, _body: bytes) -> None:
    """An answer that does not come."""


def test_openai_package_whole_and_streamed() -> None:
    """A1: the openai package reads both forms."""

    async def run() -> None:
        async with (
            served(FakeRunner()) as port,
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
        ):
            ask: Any = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
            whole = await client.chat.completions.create(**ask)
            assert (
                whole.choices[0].message.content == "".join(PIECES) and whole.usage and whole.usage.prompt_tokens == 11
            )
            text, usages = "", 0
            stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usages += chunk.usage is not None
            assert text == "".join(PIECES) and usages == 1
            assert [model.id async for model in client.models.list()] == ["smol/fake-1"]
            assert (await client.models.retrieve("smol/fake-1")).owned_by == "tandemllm"
            done = await client.completions.create(model="x", prompt="y")
            assert done.choices[0].text == "".join(PIECES)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_client_closes(stream: bool) -> None:
    """F6: a closed connection is seen while nothing is sent, streamed or whole."""

    async def run() -> None:
        runner = FakeRunner(silent)
        async with served(runner) as port:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(json.dumps({"stream": stream}).encode()))
            await until(lambda: bool(runner.bodies))
            writer.close()
            await asyncio.wait_for(runner.gone.wait(), LONG)
            await until(lambda: runner.calls[0].task is None)
        assert runner.told == [("left", 1, "closed")]

    asyncio.run(run())


def test_hang_up_behind_stray_bytes() -> None:
    """F6: bytes behind the body hide a hang-up from Hypercorn, not from us."""

    async def run() -> None:
        runner = FakeRunner(silent)
        async with served(runner) as port:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(b"{}") + b"\r\nGET / HTTP/1.1\r\n")
            await until(lambda: bool(runner.bodies))
            writer.close()
            await asyncio.wait_for(runner.gone.wait(), LONG)
        assert runner.told == [("left", 1, "closed")]

    asyncio.run(run())


def test_client_that_never_reads() -> None:
    """G4: a client that reads nothing is cut off by the runner: its socket closes, its task ends, little was held."""

    async def run() -> None:
        runner = FakeRunner(silent)
        async with served_app(runner) as (port, app):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(raw(b'{"stream": true}'))
            await until(lambda: bool(runner.bodies))
            call, written = runner.calls[0], 0
            while call.text("x" * 1_000):
                written += 1_000
                await asyncio.sleep(0)
            assert written >= call.outbox.limit and call.task is not None
            call.task.cancel()
            await asyncio.wait_for(runner.gone.wait(), LONG)
            await until(lambda: call.task is None and not len(app.connections))
            with pytest.raises(ConnectionError):
                while client.recv(1 << 20):
                    pass
            client.close()
        assert runner.told == [("left", 1, "closed")]

    asyncio.run(run())


def test_write_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: nobody has to put more text for a stalled write to be seen, not even after the answer's end."""
    monkeypatch.setattr(wire, "LOOK_S", 0.01)
    monkeypatch.setattr(Wire.__init__, "__defaults__", (0.05,))

    async def run() -> None:
        runner = FakeRunner(silent)
        async with served_app(runner) as (port, app):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(raw(b'{"stream": true}'))
            await until(lambda: bool(runner.bodies))
            for _ in range(64):
                runner.calls[0].outbox.pending = 0
                runner.calls[0].text("x" * (1 << 20))
            runner.calls[0].end()
            await until(lambda: runner.calls[0].task is None and not len(app.connections))
            client.close()
        assert runner.told == [("left", 1, "closed")]

    asyncio.run(run())


def test_slow_reader_gets_everything() -> None:
    """G4: one who reads slowly is served, in larger writes."""

    async def run() -> None:
        runner = FakeRunner(silent)
        pieces = [f"{i:07d} " for i in range(200_000)]
        async with served(runner) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(b'{"stream": true}', "Connection: close"))
            await until(lambda: bool(runner.bodies))
            for piece in pieces:
                assert runner.calls[0].text(piece)
            runner.calls[0].end()
            body = b""
            while data := await reader.read(1 << 16):
                body += data
                await asyncio.sleep(0)
            writer.close()
        text = "".join(part.split(b'"', 1)[0].decode() for part in body.split(b'"content":"')[1:])
        assert text == "".join(pieces) and b"[DONE]" in body and runner.told == []

    asyncio.run(run())


def test_too_large_body_gets_its_answer() -> None:
    """A14: who sends too much reads a 413, declared or chunked."""

    async def chunks() -> Any:
        for _ in range(24):
            yield b"x" * (64 << 10)

    async def run() -> None:
        async with served(FakeRunner(max_body_mb=1)) as port, httpx.AsyncClient(timeout=LONG) as client:
            url = f"http://127.0.0.1:{port}{CHAT}"
            for content in (b"x" * (3 << 20), chunks()):
                assert (await client.post(url, content=content)).status_code == 413

    asyncio.run(run())


def test_connection_is_kept() -> None:
    """A1: one connection serves many requests, refusals among them."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=1)
        async with served_app(FakeRunner()) as (port, app), httpx.AsyncClient(limits=limits, timeout=LONG) as client:
            base = f"http://127.0.0.1:{port}"
            for _ in range(20):
                assert events((await client.post(base + CHAT, json={"stream": True})).content)[-1] == "[DONE]"
                assert (await client.get(base + "/nowhere")).status_code == 404
                assert (await client.head(base + "/v1/models")).content == b""
            assert len(app.connections) == 1

    asyncio.run(run())


def connection_tasks() -> int:
    """Hypercorn's tasks of connections."""
    return sum("_server_callback" in repr(task.get_coro()) for task in asyncio.all_tasks())


@pytest.mark.parametrize("body", [b'{"stream": true}', b"{}"])
@pytest.mark.parametrize("behind", [b"\r\n", raw(b"{}"), b"\r\n" * 400_000], ids=["line", "request", "much"])
@pytest.mark.parametrize("writes", [False, True], ids=["waits", "writes"])
def test_a_leaver_with_bytes_behind_its_body_is_freed(body: bytes, behind: bytes, writes: bool) -> None:
    """G1: a connection cut short ends, also when bytes behind its request wait to be read; a stop does not wait."""

    async def run() -> None:
        runner = FakeRunner(lambda call, _body: call.text("Hel") and None)
        async with served(runner) as port:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(body) + behind)
            await until(lambda: bool(runner.bodies))
            writer.close()
            while writes and not runner.gone.is_set():
                runner.calls[0].text("lo")
                await asyncio.sleep(0.02)
            await asyncio.wait_for(runner.gone.wait(), LONG)
            await until(lambda: connection_tasks() == 0)

    asyncio.run(run())


def test_bytes_behind_the_last_request_do_not_hold_a_stop() -> None:
    """I5: a connection that is answered while the server stops is closed, whatever its client sent ahead."""

    async def run() -> None:
        runner = FakeRunner(silent)
        async with served(runner) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(b"{}") * 2)
            await until(lambda: bool(runner.bodies))
            asyncio.get_running_loop().call_later(0.2, runner.calls[0].end)
        assert b"chat.completion" in await reader.read()
        assert len(runner.bodies) == 1
        writer.close()

    asyncio.run(asyncio.wait_for(run(), LONG))


def test_requests_sent_ahead_are_answered() -> None:
    """A1: several requests sent at once over one connection are answered in turn."""

    async def run() -> None:
        runner = FakeRunner()
        async with served(runner) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(b"{}") * 3)
            for _ in range(3):
                await asyncio.wait_for(reader.readuntil(b'"total_ms":30.0}}'), LONG)
            writer.close()
        assert len(runner.bodies) == 3

    asyncio.run(run())


def test_no_web_sockets() -> None:
    """P5: there is no web socket here, so no page opens one."""

    async def run() -> None:
        async with served(FakeRunner()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            upgrade = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
            lines = ["GET /dev/events HTTP/1.1", "Host: localhost", *upgrade, "Sec-WebSocket-Key: " + "A" * 22 + "=="]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            status = await reader.readuntil(b"\r\n")
            writer.close()
        assert status.split()[1][:1] == b"4"

    asyncio.run(run())


def test_stop_ends_live_readers() -> None:
    """R8: readers of the live events do not hold a stopping server."""

    async def run() -> None:
        async with served(FakeRunner()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /dev/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"data: ")
        assert b"HTTP/1.1" not in await reader.read()
        writer.close()

    asyncio.run(run())


def test_grace_that_runs_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """I5: a client that is still there when the grace is over is cut, quietly."""
    monkeypatch.setattr("pipeline.http.serve.GRACE_S", 0.05)

    async def run() -> None:
        runner = FakeRunner(silent, drain_timeout=0.0)
        async with served(runner) as port:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(b"{}"))
            await until(lambda: bool(runner.bodies))
        writer.close()
        assert runner.told == [("left", 1, "closed")] and caplog.text == ""

    asyncio.run(run())


def test_reset_connection() -> None:
    """F6: a reset is a hang-up too."""

    async def run() -> None:
        runner = FakeRunner(silent)
        async with served(runner) as port:
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(raw(b'{"stream": true}'))
            await until(lambda: bool(runner.bodies))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            await asyncio.wait_for(runner.gone.wait(), LONG)
        assert runner.told == [("left", 1, "closed")]

    asyncio.run(run())


def test_binds_beyond_loopback_only_with_a_key(tmp_path: Path) -> None:
    """P4: without a key the server is this machine's own, unless the user says otherwise."""
    keys = tmp_path / "keys"
    keys.write_text("\n  \n")
    for host in ("0.0.0.0", "::"):
        with pytest.raises(CannotServe, match="--api-key, or say --allow-no-key"):
            listen(Settings(host=host, port=0), Connections())
    with pytest.raises(CannotServe, match="--allow-no-key"):
        listen(Settings(host="0.0.0.0", port=0, api_key_file=str(keys)), Connections())
    keys.write_text("secret\n")
    for more in ({"api_key": ("k",)}, {"allow_no_key": True}, {"api_key_file": str(keys)}):
        listen(Settings(host="0.0.0.0", port=0, **more), Connections()).close()  # type: ignore[arg-type]
    listen(Settings(host="localhost", port=0), Connections()).close()


def test_one_sentence_where_it_cannot_bind(tmp_path: Path) -> None:
    """P4: a taken port, a foreign address and a missing key file are told in a sentence."""
    taken = listen(Settings(port=0), Connections())
    taken.listen()
    with pytest.raises(CannotServe, match="Choose another --port"):
        listen(Settings(port=taken.getsockname()[1]), Connections())
    taken.close()
    with pytest.raises(CannotServe, match="not an address of this machine"):
        listen(Settings(host="no.such.host.invalid"), Connections())
    with pytest.raises(CannotServe, match="cannot be read"):
        listen(Settings(api_key_file=str(tmp_path / "none")), Connections())


def test_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: connections inherit the listener's limits where the system has them."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no TCP_USER_TIMEOUT")
    listener = listen(Settings(port=0), Connections())
    listener.setblocking(True)
    listener.listen()
    client = socket.create_connection(listener.getsockname())
    connection, _peer = listener.accept()
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
    assert not wire.hung_up(connection)
    client.close()
    connection.settimeout(LONG)
    connection.recv(1)
    assert wire.hung_up(connection)
    connection.close()
    listener.close()
