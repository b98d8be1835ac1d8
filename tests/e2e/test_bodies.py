"""Row A14: how large, how deep and how odd a body may be, in front of the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.record import heads_only
from tests.server import Server, until

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
TEXT = "Hello there."
MB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps({"answers": [{"text": TEXT}]}))
    flags = ("--max-body-mb", "1", "--bodies-mb", "1", "--max-len", "262144", "--script", str(script))
    with Server(*flags) as server:
        yield server.ready()


def body(text: str = "Hi", **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 16, **fields}).encode()


def judges(server: Server) -> list[int]:
    """The processes that do what may never end."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child.pid for child in children if "pipeline.pools" in " ".join(child.cmdline())]


def test_a_large_body_is_served(server: Server) -> None:
    """A14: size is no fault: a body of 700 kB is judged in a process of its own and answered, whole and streamed."""
    small = server.http.post(CHAT, content=body())
    assert small.status_code == 200 and judges(server) == []
    large = body("word " * 140_000)
    assert len(large) > 600_000
    whole = server.http.post(CHAT, content=large)
    assert whole.status_code == 200, whole.text
    assert whole.json()["choices"][0]["message"]["content"] == TEXT
    assert whole.json()["usage"]["prompt_tokens"] > 140_000
    assert judges(server)
    with server.http.stream("POST", CHAT, content=body("word " * 140_000, stream=True)) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == TEXT


def test_a_large_body_is_refused_as_a_small_one(server: Server) -> None:
    """A14, A9: its faults are told as those of any other."""
    response = server.http.post(CHAT, content=body("word " * 100_000, temperature=3))
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("invalid_value", "temperature")


@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize(
    "odd",
    ['"metadata": ' + '{"a":' * 128 + "1" + "}" * 128, '"metadata": {"a": "\\ud800"}', '"metadata": {"\\udc00": 1}'],
    ids=["deep", "surrogate", "surrogate name"],
)
def test_what_is_no_body(server: Server, odd: str, padding: int) -> None:
    """A14: over 128 levels and lone surrogates are a 400 on the whole body, small and large."""
    text = f'{{"messages": [{{"role": "user", "content": "{"x" * padding}Hi"}}], {odd}}}'
    response = server.http.post(CHAT, content=text.encode())
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("invalid_json", None)


def test_128_levels_pass(server: Server) -> None:
    """A14: the deepest body there may be, and a pair of surrogates."""
    deep = '{"a":' * 126 + '"\\ud83d\\ude42"' + "}" * 126
    text = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "x": {{"y": {deep}}}}}'
    response = server.http.post(CHAT, content=text.encode())
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large(server: Server, chunked: bool) -> None:
    """A14: a body over the limit is a 413, by its declared size and by what came; the server goes on."""
    large = body("x" * (2 * MB))

    def parts() -> Iterator[bytes]:
        for start in range(0, len(large), 65_536):
            yield large[start : start + 65_536]

    response = server.http.post(CHAT, content=parts() if chunked else large)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert server.http.post(CHAT, content=body()).status_code == 200
    server.idle()


def test_bodies_in_flight(server: Server) -> None:
    """A14: what is being read counts by its declared size; over the bound it is a 503 at once, until that is gone."""
    reading = heads_only(server, 700_000)
    server.request_in("received")
    over = server.http.post(CHAT, content=body("word " * 100_000))
    assert (over.status_code, over.json()["error"]["code"]) == (503, "live_full")
    assert 1 <= int(over.headers["retry-after"]) <= 60
    assert server.http.post(CHAT, content=body()).status_code == 200
    reading.close()
    until(lambda: not server.state()["requests"])
    assert server.http.post(CHAT, content=body("word " * 100_000)).status_code == 200


def test_a_refused_connection_is_not_used_again(server: Server) -> None:
    """A14: where the rest of a refused body stands on the connection, its client is told that it closes."""
    large = server.http.post(CHAT, content=b"x" * (3 << 20))
    assert large.status_code == 413 and large.headers["connection"] == "close"
    small = server.http.post(CHAT, content=b"{}")
    assert small.status_code == 400 and small.headers.get("connection") != "close"
