"""Row Q6: waiting lines in the field of the thinking, for the kinds that were named and no other."""

from __future__ import annotations

import json
import threading
from typing import Any, NamedTuple

import pytest

from tests.record import held
from tests.server import Server

pytestmark = pytest.mark.e2e

WEBUI = {"x-openwebui-chat-id": "c"}
FORM = {"response_format": {"type": "json_object"}}
ASKED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "open-webui": (WEBUI, {}),
    "open-webui in tags": (WEBUI, {"reasoning_format": "tags"}),
    "a form": (WEBUI, FORM),
    "zed": ({"user-agent": "Zed/0.200.1 (linux; x86_64)"}, {}),
    "nobody": ({}, {}),
}
"""Headers and fields of who waits."""


class Heard(NamedTuple):
    comments: list[str]
    reasoning: str
    content: str
    roles: list[str]


def listen(server: Server, headers: dict[str, str], fields: dict[str, Any], lines: threading.Semaphore) -> Heard:
    """A stream from its waiting to its end; ``lines`` counts those it was told."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 4, **fields}
    heard = Heard([], "", "", [])
    with server.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith(": "):
                heard.comments.append(line[2:])
                lines.release()
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
                delta = choice["delta"]
                heard = heard._replace(
                    reasoning=heard.reasoning + (delta.get("reasoning_content") or ""),
                    content=heard.content + (delta.get("content") or ""),
                    roles=heard.roles + ([delta["role"]] if "role" in delta else []),
                )
    return heard


@pytest.fixture(scope="module")
def heard() -> dict[str, Heard]:
    """What each was told while all of them waited."""
    found: dict[str, Heard] = {}
    told = {name: threading.Semaphore(0) for name in ASKED}
    with Server("--progress-lines", "open-webui", "--line-every-s", "0.5") as server:
        server.ready()

        def wait(name: str) -> None:
            found[name] = listen(server, *ASKED[name], told[name])

        threads = [threading.Thread(target=wait, args=(name,)) for name in ASKED]
        with held(server) as first:
            for thread in threads:
                thread.start()
            for lines in told.values():
                assert lines.acquire(timeout=60) and lines.acquire(timeout=60)
            first.close()
        for thread in threads:
            thread.join(60)
    return found


@pytest.mark.parametrize("name", ASKED)
def test_a_line_in_the_field_of_the_thinking(heard: dict[str, Heard], name: str) -> None:
    """Q6: each sentence stands there for the kind that was named, but not beside a form, and never in the content."""
    comments, reasoning, content, roles = heard[name]
    assert len(comments) >= 2 and all(comment.startswith("waiting, position ") for comment in comments)
    assert reasoning == ("".join(f"{comment}\n" for comment in comments) if name.startswith("open-webui") else "")
    assert content and "waiting" not in content and roles == ["assistant"]


@pytest.mark.parametrize("flag", ["curl", "open-webui,openai-sdk", "pirate"])
def test_kinds_that_get_no_lines(flag: str) -> None:
    """Q6: some kinds never get a line: naming them is a sentence at the start."""
    with pytest.raises(RuntimeError, match=flag.split(",")[-1]):
        Server("--progress-lines", flag)
