"""Rows L1, L8 and I6b on the real server: empty chunks and figures for who waits, a whole answer's early headers."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.record import held
from tests.server import Server

pytestmark = pytest.mark.e2e

FLAGS = ("--line-every-s", "0.5", "--keepalive-chunk-s", "0.5", "--early-headers-s", "0.5", "--side-lane", "off")
"""The lane is off: it would serve the one who is to wait."""
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def test_signs_of_a_real_server() -> None:
    """L1, L8, I6b: a waiter's chunks before its role, its figures, blanks in front of JSON; both answers are whole."""
    with Server(*FLAGS) as server:
        server.ready()
        chunks: list[dict[str, Any]] = []
        heard = threading.Semaphore(0)

        def wait() -> None:
            body = {**ASK, "stream": True, "stream_options": {"include_progress": True}}
            with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        chunks.append(json.loads(line[6:]))
                        heard.release()

        waiter = threading.Thread(target=wait)
        with held(server) as first:
            waiter.start()
            for _ in range(4):
                assert heard.acquire(timeout=60)
            first.close()
        waiter.join(60)
        early = server.http.post("/v1/completions", json={"prompt": "1, 2, 3,", "max_tokens": 200, "ignore_eos": True})
    waited = chunks[: next(i for i, chunk in enumerate(chunks) if "role" in chunk["choices"][0]["delta"])]
    assert all(chunk["choices"][0]["delta"] == {} for chunk in waited)
    figures = [chunk["progress"] for chunk in waited if "progress" in chunk]
    assert {frozenset(figure) for figure in figures} == {frozenset(("position", "estimate_s", "waited_s"))}
    assert len(figures) < len(waited)  # the others are the keep-alive's
    assert "usage" in chunks[-1]
    assert early.status_code == 200
    assert early.text.startswith(" ")
    assert early.json()["usage"]["completion_tokens"] == 200
