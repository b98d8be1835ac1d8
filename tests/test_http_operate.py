"""The routes around the answers, and the Dev view's data."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from pipeline.http import dev
from pipeline.http.app import create_app
from tests.fake_runner import BOX, CHAT, FakeRunner, served
from tests.openai_schemas import check


def ask(runner: FakeRunner, path: str, method: str = "GET", **more: Any) -> Any:
    """Ask once from the box; the response, with its body read into ``.raw``."""

    async def run() -> Any:
        response = await create_app(runner).test_client().open(path, method=method, **BOX, **more)
        response.raw = await response.get_data()
        return response

    return asyncio.run(run())


def test_models() -> None:
    """A11: the served model with its window under both names agents read."""
    models = json.loads(ask(FakeRunner(), "/v1/models").raw)
    check(models, "ListModelsResponse")
    (model,) = models["data"]
    assert model["context_length"] == model["max_model_len"] == 4_096
    assert json.loads(ask(FakeRunner(), "/v1/models/smol/fake-1").raw)["id"] == model["id"] == "smol/fake-1"
    response = ask(FakeRunner(), "/v1/models/gpt-4")
    assert response.status_code == 404 and json.loads(response.raw)["error"]["code"] == "model_not_found"


def test_models_while_nothing_is_known() -> None:
    """A11: no window is better than a wrong one, no model better than none."""
    runner = FakeRunner()
    runner.window = 0
    assert "context_length" not in json.loads(ask(runner, "/v1/models/smol/fake-1").raw)
    runner.model = ""
    assert json.loads(ask(runner, "/v1/models").raw)["data"] == []
    assert ask(runner, "/v1/models/x").status_code == 404


@pytest.mark.parametrize(
    ("state", "draining", "status", "code"),
    [
        ("ready", False, "ok", 200),
        ("starting", False, "loading", 503),
        ("silent", False, "silent", 503),
        ("lost", False, "lost", 503),
        ("failed", False, "failed", 503),
        ("ready", True, "draining", 503),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/healthz", "/v1/health", "/readyz"])
def test_health(path: str, state: str, draining: bool, status: str, code: int) -> None:
    """I10: health says whether a request would be served now, and if not, why."""
    runner = FakeRunner()
    runner.engine_state, runner.draining = state, draining
    response = ask(runner, path)
    assert response.status_code == code and json.loads(response.raw)["status"] == status


def test_health_tells_how_requests_ran_beside_one_another() -> None:
    """M8: how many slots there are, how many requests run and ran at once, and their joint rounds."""
    runner = FakeRunner()
    runner.more["parallel"] = {"slots": 4, "running": 2, "max_running": 3, "joint_rounds": 17}
    assert json.loads(ask(runner, "/health").raw)["parallel"] == runner.more["parallel"]


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/props", "/api/tags", "/v1/models/", "/health/"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_unknown_routes(path: str, method: str) -> None:
    """A11: agents tell servers apart by which probes answer 200: unknown ones are 404."""
    response = ask(FakeRunner(), path, method)
    assert response.status_code == 404
    assert response.raw == b"" if method == "HEAD" else json.loads(response.raw)["error"]["code"] == "not_found"


@pytest.mark.parametrize(("path", "method", "allow"), [(CHAT, "GET", "POST"), ("/v1/models", "POST", "GET")])
def test_wrong_method(path: str, method: str, allow: str) -> None:
    """A9: a wrong method is a 405 that says which is right."""
    response = ask(FakeRunner(), path, method)
    assert response.status_code == 405 and allow in response.headers["Allow"]
    error = json.loads(response.raw)
    assert error["error"]["code"] == "method_not_allowed"
    check(error, "ErrorResponse")


@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/dev", "/dev/events", "/", "/nowhere"])
def test_head(path: str) -> None:
    """A11: HEAD is GET without the body."""

    async def run() -> None:
        async with served(FakeRunner()) as port, httpx.AsyncClient(base_url=f"http://localhost:{port}") as client:
            head = await client.head(path)
            assert head.content == b""
            if path != "/dev/events":
                get = await client.get(path)
                assert head.status_code == get.status_code and head.headers.keys() == get.headers.keys()
                assert head.headers["Content-Length"] == str(len(get.content))

    asyncio.run(run())


def test_fault_outside_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """P1: a fault in any route is a 500 and its class a log line."""
    runner = FakeRunner()
    runner.view = lambda: 1 / 0  # type: ignore[assignment, return-value]
    response = ask(runner, "/dev/state")
    assert response.status_code == 500 and json.loads(response.raw)["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text and "division" not in caplog.text


def test_page_and_its_files() -> None:
    """R8: the page comes with its own style and script and may load nothing else."""
    page = ask(FakeRunner(), "/dev")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["Content-Security-Policy"]
    text = page.raw.decode()
    assert "http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text
    for name in ("dev.css", "dev.js"):
        assert name in text and ask(FakeRunner(), f"/dev/{name}").status_code == 200
    assert ask(FakeRunner(), "/dev/__init__.py").status_code == 404


def test_state() -> None:
    """R8: the live state once, for a script."""
    assert json.loads(ask(FakeRunner(), "/dev/state").raw)["counts"] == {"waiting": 0, "running": 0}


def test_live_state_is_looked_at_once_for_all() -> None:
    """R8: one look and one encode a change, however many read; nothing is sent when only the clock moved."""

    async def run() -> None:
        runner = FakeRunner()
        live = dev.Live(runner)
        assert live.join() and live.join()
        assert live.version == 1 and live.readers == 2
        assert not live.look() and live.version == 1
        runner.more = {"requests": [{"id": 1}]}
        waiting = asyncio.ensure_future(live.wait(1, 10.0))
        await asyncio.sleep(0)
        assert live.look() and await waiting and live.version == 2
        assert not await live.wait(2, 0.0)
        assert json.loads(live.data[6:])["requests"] == [{"id": 1}]
        live.leave()
        live.leave()
        assert live._ticker is None

    asyncio.run(run())


def test_events_and_the_fifth_reader() -> None:
    """R8: a reader gets the state at once and every change; a fifth one is a 429; a place is free again."""

    async def read(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /dev/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return reader, writer, await reader.readuntil(b"\r\n")

    async def run() -> None:
        runner = FakeRunner()
        async with asyncio.timeout(20), served(runner) as port:
            readers = [await read(port) for _ in range(4)]
            assert all(b" 200 " in status for *_, status in readers)
            *_, writer, status = await read(port)
            assert b" 429 " in status
            writer.close()
            for reader, *_ in readers:
                assert b'"requests":[]' in await reader.readuntil(b"\n\n")
            runner.more = {"requests": [{"id": 7}]}
            for reader, *_ in readers:
                assert b'"id":7' in await reader.readuntil(b"\n\n")
            readers[0][1].close()
            status = b" 429 "
            while b" 429 " in status:
                *_, writer, status = await read(port)
                if b" 429 " in status:
                    writer.close()
                    await asyncio.sleep(0.01)
            for each in [writer, *(writer for _, writer, _ in readers)]:
                each.close()

    asyncio.run(run())


def test_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8: a comment now and then keeps an idle reader's connection alive."""
    monkeypatch.setattr(dev, "PING_S", 0.02)

    async def run() -> None:
        async with asyncio.timeout(20), served(FakeRunner()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /dev/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for _ in range(3):
                await reader.readuntil(b": ping\n\n")
            writer.close()

    asyncio.run(run())
