"""Side requests as real clients send them, into a long answer of the same server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stages.clients import RECOGNISED, kind
from tests.captures import Sent, needed, sent
from tests.e2e.test_captures import TEMPLATE, post, read
from tests.record import COUNTING, LONG
from tests.server import Server, until

pytestmark = pytest.mark.e2e
FILES = ("open-webui.jsonl", "opencode.jsonl", "hermes-title.jsonl")
SAID = {
    "title": '{ "title": "Transformer Models" }',
    "tags": '{ "tags": ["Technology", "Science", "Neural Networks"] }',
    "follow-ups": '{ "follow_ups": ["How does attention work?", "Show me a small example."] }',
    "emoji": ":)",
    "queries": '{"queries": ["transformer architecture"]}',
}
"""What the script answers a side request; nothing else of ours reads it."""
TOO_LONG = json.dumps({"follow_ups": [f"Tell me more about layer number {number}." for number in range(1, 40)]})
"""More tokens than the lane writes."""
ENDLESS = "One two three four five six seven eight nine ten. " * 600


def sides() -> list[Sent]:
    """Every captured side request of the kinds the lane knows."""
    needed("captures")
    return [one for one in sent() if one.route and one.file in FILES and side(one) in RECOGNISED]


def side(one: Sent) -> str:
    return kind(one.body, one.headers).side


class Long:
    """A long streamed completion in a thread of its own. ``leave`` hangs up."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self._server, self._left = server, threading.Event()
        self._body = {"prompt": COUNTING, "temperature": 0, "stream": True, **fields}
        self._said: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._server.http.stream("POST", "/v1/completions", json=self._body) as response:
            for line in response.iter_lines():
                if self._left.is_set():
                    return
                if line.startswith("data: {"):
                    self._said += [choice["text"] for choice in json.loads(line[6:])["choices"]]

    def leave(self) -> str:
        self._left.set()
        return self.text()

    def text(self) -> str:
        """All that came, once it is over."""
        self._thread.join()
        return "".join(self._said)


@contextmanager
def scripted(folder: Path, *answers: dict[str, Any]) -> Iterator[Server]:
    """A server whose first answer is the long one."""
    script = folder / "script.json"
    long = {"text": ENDLESS, "decode_ms": 10, "prefill_ms_per_row": 0.01}
    script.write_text(json.dumps({"answers": [long, *answers]}))
    with Server(
        "--script", str(script), "--chat-template", str(TEMPLATE), "--max-len", "65536", "--side-lane", "on"
    ) as server:
        yield server.ready()


def record(server: Server, id: str) -> dict[str, Any]:
    """What the server says of an ended request, by its client's id."""
    found: dict[str, Any] = until(lambda: next((r for r in server.state()["recent"] if id.endswith(r["name"])), None))
    return found


def test_captured_side_requests_are_served_inside(tmp_path: Path) -> None:
    """K1, K7, K8: into a long answer go Open WebUI's, opencode's and Hermes' side requests; at least 80 % are served
    inside it, none is lost, and the one that outgrows the lane is served whole behind it."""
    asked = sides()
    assert {"title", "tags", "follow-ups"} <= {side(one) for one in asked} <= set(SAID)
    last = next(at for at, one in enumerate(asked) if side(one) == "follow-ups")
    asked.append(asked.pop(last))
    texts = [*(SAID[side(one)] for one in asked[:-1]), TOO_LONG]
    with scripted(tmp_path, *({"text": text, "decode_ms": 2} for text in [*texts, TOO_LONG])) as server:
        long = Long(server, max_tokens=60_000)
        server.request_in("decoding")
        for one, text in zip(asked[:-1], texts, strict=False):
            assert read(one, post(server, one)) == text
        with ThreadPoolExecutor(1) as pool:
            outgrown = pool.submit(post, server, asked[-1])
            until(lambda: [r for r in server.state()["requests"] if r["outgrown"] and r["state"] == "queued"])
            said = long.leave()
            assert read(asked[-1], outgrown.result()) == TOO_LONG
        assert said and ENDLESS.startswith(said)
        server.idle()
        lane = server.health()["lane"]
        inside = [r for r in server.state()["recent"] if r["inside"] and not r["outgrown"]]
        assert (lane["served"], lane["outgrown"], lane["guest"]) == (len(inside), 1, -1)
        assert len(inside) >= 0.8 * len(asked)
        behind = record(server, outgrown.result().json()["id"])
        assert behind["outgrown"] and behind["outcome"] == "stop"


def test_a_streamed_one_is_held_whole(tmp_path: Path) -> None:
    """K8: when a guest's stream opens its request is over, for until then it might have outgrown the lane."""
    one = next(one for one in sides() if one.body.get("stream"))
    body = json.dumps(one.body).encode()
    with scripted(tmp_path, {"text": SAID["title"], "decode_ms": 60}) as server:
        long = Long(server, max_tokens=60_000)
        server.request_in("decoding")
        headers = {"content-type": "application/json"}
        with server.http.stream("POST", one.path, content=body, headers=headers) as response:
            id, live = response.headers["X-Request-Id"], server.state()["requests"]
            assert response.read() and read(one, response) == SAID["title"]
        assert not any(id.endswith(r["name"]) for r in live)
        assert record(server, id)["inside"]
        long.leave()


# -- the model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on() -> Iterator[Server]:
    with Server("--draft-shape", "fixed", "--safe-rows", "64", "--side-lane", "on") as server:
        yield server.ready()


@pytest.fixture(scope="module")
def off() -> Iterator[Server]:
    with Server("--draft-shape", "fixed", "--safe-rows", "64", "--side-lane", "off") as server:
        yield server.ready()


def both(server: Server, state: str, prompt: str, tokens: int) -> tuple[str, str, str]:
    """A short request into a long one that is in ``state``: the long text, the short text and its id."""
    long = Long(server, prompt=prompt, max_tokens=tokens, ignore_eos=True)
    server.request_in(state)
    answer = server.chat("What is the capital of Norway?", max_tokens=12, temperature=0).json()
    return long.text(), answer["choices"][0]["message"]["content"], answer["id"]


MOMENTS = [("prefilling", LONG * 10, 40), ("decoding", COUNTING, 300)]


@pytest.mark.parametrize(("state", "prompt", "tokens"), MOMENTS, ids=[state for state, *_ in MOMENTS])
def test_the_long_text_is_its_text_alone(state: str, prompt: str, tokens: int, on: Server, off: Server) -> None:
    """K2, K3, K4: inside the prefill or the decode of a long one a short one is answered, and neither text differs from
    what the server without a lane says, where the short one waits for the long one's end."""
    beside, guest, inside = both(on, state, prompt, tokens)
    alone, waiter, behind = both(off, state, prompt, tokens)
    assert (beside, guest) == (alone, waiter)
    assert guest and beside
    lane = on.health()["lane"]
    assert lane["served"] >= 1 and lane["copied_bytes"] > 0
    assert record(on, inside)["inside"] and not record(off, behind)["inside"]
    for server, id, last in ((on, inside, False), (off, behind, True)):
        assert id.endswith(server.idle()["recent"][0]["name"]) == last
