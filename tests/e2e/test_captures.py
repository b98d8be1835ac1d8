"""What real clients sent, sent again: each request is served, and its client can read the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.clients import kind
from tests.captures import Sent, sent
from tests.server import Server

pytestmark = pytest.mark.e2e
TEMPLATE = Path(__file__).resolve().parent / "tools.jinja"
ANSWER = "Hello there."
"""Three tokens: some requests ask for no more than four."""
WINDOW = 262_144
SMALL, LARGE = 4_096, 12_000
"""Characters of a body: up to here each set of fields is tried with the model; beyond there none is."""
JSON = {"content-type": "application/json"}

REFUSED_BY_DESIGN: dict[tuple[str, int], str] = {}
"""File and line of what is refused by design, and the feature row that says so. These and no other get a 400."""

UNSENT = ("host", "content-length", "connection", "accept-encoding", "authorization", "content-type")
"""Headers of a capture that belong to its own connection."""


def served_by_route() -> list[Sent]:
    return [one for one in sent() if one.route]


def post(server: Server, one: Sent, **changes: Any) -> httpx.Response:
    """The request as it was sent; ``changes`` to its body, None removes a field."""
    body = {name: value for name, value in (one.body | changes).items() if value is not None or name not in changes}
    headers = {name: value for name, value in one.headers.items() if name.lower() not in UNSENT}
    return server.http.post(one.path, content=json.dumps(body).encode(), headers=headers | JSON)


def read(one: Sent, response: httpx.Response) -> str:
    """The answer's text, with what a client relies on held on the way."""
    return streamed(one, response.text) if one.body.get("stream") else whole(one, response.json())


def whole(one: Sent, body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    if one.route == "chat":
        assert choice["message"]["role"] == "assistant"
    text = choice["text"] if one.route == "completions" else choice["message"]["content"]
    return text or ""


def streamed(one: Sent, text: str) -> str:
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    usages = [chunk for chunk in chunks if chunk.get("usage")]
    asked = (one.body.get("stream_options") or {}).get("include_usage")
    assert len(usages) == 1
    assert usages[0] is chunks[-1]
    assert (usages[0]["choices"] == []) == bool(asked)
    if one.route == "completions":
        return "".join(choice["text"] for choice in choices)
    assert choices[0]["delta"]["role"] == "assistant"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = tmp_path_factory.mktemp("captures") / "script.json"
    script.write_text(json.dumps({"answers": [{"text": ANSWER}]}))
    flags = ("--script", str(script), "--chat-template", str(TEMPLATE), "--max-len", str(WINDOW))
    with Server(*flags) as server:
        yield server.ready()


def test_every_captured_request_is_served(scripted: Server) -> None:
    """A10: every captured chat and completion, through a template with tools: a 200 its client can read."""
    refused = {}
    wrong = []
    for one in served_by_route():
        place = (one.file, one.line)
        response = post(scripted, one)
        if response.status_code == 400:
            refused[place] = response.json()["error"]
        elif response.status_code != 200 or read(one, response) != ANSWER:
            wrong.append((place, response.status_code, response.text[:200]))
    assert len(served_by_route()) > 150
    assert wrong == []
    assert {place: error for place, error in refused.items() if place not in REFUSED_BY_DESIGN} == {}
    assert sorted(refused) == sorted(REFUSED_BY_DESIGN)


def sample() -> list[Sent]:
    """The shortest request of each client kind, and of each set of fields where that is small.

    Not all: prompts of some thousand tokens take the embedded model seconds each, and tell nothing that the script's
    answers did not.
    """
    chosen: dict[Any, Sent] = {}
    sized = [(len(json.dumps(one.body)), one) for one in served_by_route()]
    for size, one in sorted(sized, key=lambda pair: (pair[0], pair[1].file, pair[1].line)):
        if (one.file, one.line) in REFUSED_BY_DESIGN or size > LARGE:
            continue
        chosen.setdefault(kind(one.body, one.headers).kind, one)
        if size < SMALL:
            chosen.setdefault((one.route, *sorted(one.body)), one)
    return list({(one.file, one.line): one for one in chosen.values()}.values())


def test_a_sample_by_the_model(served: Server) -> None:
    """A10: the same by the embedded model, through its own template, a few tokens each."""
    kinds = set()
    for one in sample():
        response = post(served, one, max_tokens=4, max_completion_tokens=None)
        assert response.status_code == 200, (one.file, one.line, response.text)
        read(one, response)
        kinds.add(kind(one.body, one.headers).kind)
    assert kinds >= {"aider", "benchmark", "continue", "hermes", "open-webui", "openai-sdk", "opencode", "other"}
