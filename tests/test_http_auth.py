"""Keys, the fence against web pages, CORS."""

from __future__ import annotations

import asyncio
import socket
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from pipeline.http.app import create_app
from pipeline.http.auth import Attempts, Keys, fence_passes, from_box, host_passes, key_of, own_names, same_origin
from pipeline.settings import Settings
from tests.fake_runner import BOX, CHAT, REMOTE, FakeRunner

KEY = "sk-right"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def get(client: Any, path: str, headers: dict[str, str] | None = None, method: str = "GET", **more: Any) -> Any:
    return client.open(path, method=method, headers=headers or {}, **{**REMOTE, **more})


def test_v1_needs_the_key() -> None:
    """P4: /v1 needs a key when one is set, from the box too; the health status does not."""

    async def run() -> None:
        client = create_app(FakeRunner(api_key=(KEY, "sk-second"))).test_client()
        for path in ("/v1/models", "/v1/models/x", "/v1/nowhere"):
            response = await get(client, path, **BOX)
            assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.get_json())["error"]["code"] == "invalid_api_key"
        for key in (KEY, "sk-second"):
            assert (await get(client, "/v1/models", bearer(key))).status_code == 200
        response = await get(client, CHAT, bearer("sk-wrong"), "POST", data=b"{}")
        assert response.status_code == 401
        for path in ("/health", "/healthz", "/v1/health", "/readyz"):
            response = await get(client, path)
            assert response.status_code == 200 and await response.get_json() == {"status": "ok"}

    asyncio.run(run())


def test_without_a_key_v1_is_open() -> None:
    """P4: no key set, none asked for."""

    async def run() -> None:
        client = create_app(FakeRunner()).test_client()
        assert (await get(client, "/v1/models")).status_code == 200
        assert (await get(client, "/v1/models", bearer("anything"))).status_code == 200

    asyncio.run(run())


def test_five_failed_keys() -> None:
    """P4: five failed keys a minute from one address close its door to keys it did not have right before."""
    keys, attempts = Keys([KEY, "sk-other"]), Attempts()
    assert attempts.judge(keys, "a", KEY, 0.0) == ""
    for _ in range(20):
        assert attempts.judge(keys, "a", None, 0.0) == "invalid_api_key"
    assert [attempts.judge(keys, "a", f"guess {i}", float(i)) for i in range(6)] == [
        *["invalid_api_key"] * 5,
        "too_many_attempts",
    ]
    assert attempts.judge(keys, "a", "sk-other", 6.0) == "too_many_attempts"
    assert attempts.judge(keys, "a", KEY, 6.0) == ""
    assert attempts.judge(keys, "b", "guess", 6.0) == "invalid_api_key"
    assert attempts.judge(keys, "a", "sk-other", 60.0) == ""


def test_too_many_attempts_is_a_429() -> None:
    """P4: the sixth wrong key is told to wait a minute."""

    async def run() -> None:
        client = create_app(FakeRunner(api_key=(KEY,))).test_client()
        codes = [(await get(client, "/v1/models", bearer("no"))).status_code for _ in range(5)]
        response = await get(client, "/v1/models", bearer(KEY))
        assert codes == [401] * 5 and response.status_code == 429 and response.headers["Retry-After"] == "60"

    asyncio.run(run())


def test_memory_of_addresses_is_bounded() -> None:
    """P4: many addresses do not fill the memory."""
    keys, attempts = Keys([KEY]), Attempts()
    for i in range(5_000):
        attempts.judge(keys, f"a{i}", "no", 0.0)
        attempts.judge(keys, f"b{i}", KEY, 0.0)
    assert len(attempts._failed) <= 4_096 and len(attempts._known) <= 4_096


@pytest.mark.parametrize(
    ("header", "basic", "key"),
    [
        ("Bearer k", False, "k"),
        ("bearer  k ", False, "k"),
        ("", False, None),
        ("Basic " + b64encode(b"any:k").decode(), False, None),
        ("Basic " + b64encode(b"any:k").decode(), True, "k"),
        ("Basic !", True, ""),
        ("Digest x", True, None),
    ],
)
def test_key_of(header: str, basic: bool, key: str | None) -> None:
    """P4: a key is a bearer's; a browser's password where a browser asks."""
    assert key_of(header, basic) == key


def test_key_file(tmp_path: Path) -> None:
    """P4: keys come from a file too, one a line."""
    path = tmp_path / "keys"
    path.write_bytes(f"\n{KEY}\n  sk-two  \n".encode() + b"\xff\n")  # bytes that are no text are no reason to show them

    async def run() -> None:
        client = create_app(FakeRunner(api_key_file=str(path))).test_client()
        assert (await get(client, "/v1/models", bearer("sk-two"))).status_code == 200
        assert (await get(client, "/v1/models", bearer(""))).status_code == 401

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "remote", "key", "status"),
    [
        ("/dev", False, "", 200),
        ("/dev/state", False, "", 200),
        ("/dev", True, "", 401),
        ("/dev/state", True, "", 401),
        ("/dev/events", True, "", 401),
        ("/dev/state", True, KEY, 200),
        ("/", False, "", 302),
        ("/", True, "", 404),
        ("/", True, KEY, 404),
    ],
)
def test_dev_view_needs_the_key_or_the_box(path: str, remote: bool, key: str, status: int) -> None:
    """P4: the Dev view is for the key or the box."""

    async def run() -> None:
        client = create_app(FakeRunner(api_key=(KEY,))).test_client()
        more = REMOTE if remote else BOX
        response = await get(client, path, bearer(key) if key else {}, **more)
        assert response.status_code == status
        if status == 401:
            assert response.headers["WWW-Authenticate"].startswith("Basic")
        if status == 302:
            assert response.headers["Location"] == "/dev"

    asyncio.run(run())


def test_browser_gives_the_key_as_a_password() -> None:
    """P4: a browser elsewhere opens the Dev view with the key as password; /v1 takes no password."""

    async def run() -> None:
        client = create_app(FakeRunner(api_key=(KEY,))).test_client()
        password = {"Authorization": "Basic " + b64encode(f"me:{KEY}".encode()).decode()}
        assert (await get(client, "/dev/state", password)).status_code == 200
        assert (await get(client, "/v1/models", password)).status_code == 401
        client = create_app(FakeRunner(allow_no_key=True)).test_client()
        response = await get(client, "/dev")
        assert response.status_code == 401 and "--api-key" in (await response.get_json())["error"]["message"]

    asyncio.run(run())


def test_figures_need_the_key_or_the_box() -> None:
    """P4: the health figures too; a proxy's word is not the box."""

    async def run() -> None:
        client = create_app(FakeRunner(api_key=(KEY,))).test_client()
        shown = {
            "box": await get(client, "/health", **BOX),
            "key": await get(client, "/health", bearer(KEY)),
            "anyone": await get(client, "/health"),
            "proxy": await get(client, "/health", {"X-Forwarded-For": "127.0.0.1"}, **BOX),
            "wrong": await get(client, "/health", bearer("no")),
        }
        assert {name for name, response in shown.items() if "uptime_s" in await response.get_json()} == {"box", "key"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("peer", "headers", "box"),
    [
        ("127.0.0.1", {}, True),
        ("127.9.9.9", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("10.0.0.1", {}, False),
        ("", {}, False),
        ("127.0.0.1", {"Forwarded": "for=1.2.3.4"}, False),
        ("127.0.0.1", {"X-Forwarded-For": ""}, False),
    ],
)
def test_from_box(peer: str, headers: dict[str, str], box: bool) -> None:
    """P4: the box is a loopback peer that speaks for nobody else."""
    assert from_box(peer, headers.get) == box


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.1.5", True),
        ("llm.home:443", True),
        (socket.gethostname(), True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example:8000", False),
        ("[::1", False),
        ("1.2.3.4.evil.example", False),
        ("a@localhost.evil", False),
    ],
)
def test_host_names(host: str, passes: bool) -> None:
    """P5: a Host name other than localhost, the machine's own or an allowed one does not pass; addresses do."""
    assert host_passes(host, own_names(Settings(allowed_host=("llm.home",)))) == passes


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("https://llm.home", "llm.home", True),
        ("https://llm.home", "llm.home:443", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://127.0.0.1:8000", "localhost:8000", False),
        ("null", "localhost", False),
        ("chrome-extension://abc", "abc", False),
        ("http://localhost:x", "localhost", False),
        ("", "localhost", False),
    ],
)
def test_same_origin(origin: str, host: str, same: bool) -> None:
    """P5: the server's own origin is its own scheme, name and port."""
    assert same_origin(origin, host) == same


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"Host": "localhost"}, True),
        ({}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": "localhost", "Origin": "https://evil.example"}, False),
        ({"Host": "localhost", "Origin": "https://app.example"}, True),
        ({"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, False),
        (
            {"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate",
             "Sec-Fetch-Dest": "document"},
            True,
        ),
        (
            {"Host": "localhost", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate",
             "Sec-Fetch-Dest": "iframe"},
            False,
        ),
        ({"Host": "localhost", "Sec-Fetch-Site": "same-origin"}, True),
    ],
)  # fmt: skip
def test_fence(headers: dict[str, str], passes: bool) -> None:
    """P5: what a browser says of the page that asks decides."""
    settings = Settings(cors_origin=("https://app.example/",))
    assert fence_passes(headers.get, settings, own_names(settings)) == passes


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/health", "/dev", "/", "/nowhere"])
@pytest.mark.parametrize("bad", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
def test_fence_on_every_route(path: str, bad: dict[str, str]) -> None:
    """P5: a 403 on every route, with the key or without."""

    async def run() -> None:
        runner = FakeRunner(api_key=(KEY,))
        client = create_app(runner).test_client()
        for headers in (bad, {**bad, **bearer(KEY)}):
            for method in ("GET", "POST", "OPTIONS"):
                response = await get(client, path, headers, method, **BOX)
                assert response.status_code == 403
                assert (await response.get_json())["error"]["code"] == "origin_not_allowed"
                assert "Access-Control-Allow-Origin" not in response.headers
        assert runner.calls == []

    asyncio.run(run())


def test_cors() -> None:
    """A11: cross-origin headers and preflights only for a listed origin."""
    origin = {"Origin": "https://app.example"}
    asked = {**origin, "Access-Control-Request-Headers": "authorization, x-stainless-os"}

    async def run() -> None:
        client = create_app(FakeRunner(cors_origin=("https://app.example",), api_key=(KEY,))).test_client()
        response = await get(client, CHAT, {**asked, "Access-Control-Request-Private-Network": "true"}, "OPTIONS")
        assert response.status_code == 204
        assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert response.headers["Access-Control-Allow-Headers"] == asked["Access-Control-Request-Headers"]
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert response.headers["Access-Control-Allow-Private-Network"] == "true"
        for headers, status in (({**origin, **bearer(KEY)}, 200), (origin, 401)):
            response = await get(client, "/v1/models", headers)
            assert response.status_code == status and response.headers["Vary"] == "Origin"
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
        response = await get(client, "/v1/models", bearer(KEY))
        assert "Access-Control-Allow-Origin" not in response.headers
        client = create_app(FakeRunner()).test_client()
        assert (await get(client, CHAT, asked, "OPTIONS")).status_code == 403
        assert (await get(client, CHAT, {}, "OPTIONS")).status_code == 405

    asyncio.run(run())
