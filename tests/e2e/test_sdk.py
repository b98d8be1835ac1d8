"""The packages people use, and curl, through the session of ``tests/sessions.py``: what they read is what counts."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server import Server
from tests.sessions import (
    CLIENTS,
    PERSON_SCHEMA,
    RESULT,
    STEPS,
    TOOL,
    Step,
    seek,
    streamed_turn,
    whole_turn,
    write_script,
)

pytestmark = pytest.mark.e2e
HERE = Path(__file__).resolve().parent / "sdk"
INSTALL_S = 120
"""How long npm may take; after it the session is skipped."""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = write_script(tmp_path_factory.mktemp("sdk") / "script.json")
    with Server("--script", str(script)) as server:
        yield server.ready()


@pytest.fixture(scope="session")
def node_session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's file beside an installed openai package, kept in pytest's cache. Skips where that cannot be had."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    cache = request.config.cache
    folder = tmp_path_factory.mktemp("openai-node") if cache is None else cache.mkdir("openai-node")
    wanted = json.loads((HERE / "package.json").read_text())["dependencies"]["openai"]
    found = folder / "node_modules" / "openai" / "package.json"
    if not found.exists() or json.loads(found.read_text())["version"] != wanted:
        shutil.copy(HERE / "package.json", folder)
        command = ["npm", "install", "--prefer-offline", "--fetch-retries=1", "--ignore-scripts"]
        command += ["--no-audit", "--no-fund", "--loglevel=error"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not bring the openai package in time")
        if done.returncode:
            pytest.skip(f"npm cannot bring openai {wanted}: {done.stderr[-300:]!r}")
    shutil.copy(HERE / "session.mjs", folder)
    return folder / "session.mjs"


# -- the openai package for Python -----------------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    age: int


def adds(usage: Any) -> bool:
    """Whether usage is there and adds up."""
    total: bool = usage["completion_tokens"] > 0
    return total and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def joined(client: OpenAI, ask: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A streamed answer and its usage."""
    chunks = list(client.chat.completions.create(**{**ask, "stream_options": {"include_usage": True}}))
    dumped = [chunk.model_dump() for chunk in chunks]  # type: ignore[union-attr]
    return streamed_turn(dumped), dumped[-1]["usage"]


def python_tools(client: OpenAI, ask: dict[str, Any]) -> list[dict[str, Any]]:
    """A call, its result sent back beside the package's own message object, and the answer."""
    messages: list[Any] = list(ask["messages"])
    if ask.get("stream"):
        first, _ = joined(client, ask)
        called = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(first["calls"])
        ]
        messages.append({"role": "assistant", "content": first["text"], "tool_calls": called})
        results = [call["id"] for call in called]
    else:
        choice = client.chat.completions.create(**ask).choices[0]
        first = whole_turn(choice.model_dump())
        messages.append(choice.message)
        results = [call.id for call in choice.message.tool_calls or []]
    messages += [{"role": "tool", "tool_call_id": call, "content": RESULT} for call in results]
    again = {**ask, "messages": messages}
    if ask.get("stream"):
        return [first, joined(client, again)[0]]
    return [first, whole_turn(client.chat.completions.create(**again).choices[0].model_dump())]


def play_python(server: Server, step: Step) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return python_way(client, step)


def python_way(client: OpenAI, step: Step) -> Any:
    chat, ask = client.chat.completions, step.ask
    match step.way:
        case "models":
            model = client.models.list().data[0]
            return {"model": model.object == "model" and (model.model_extra or {})["context_length"] > 0}
        case "whole":
            whole = chat.create(**ask).model_dump()
            return [whole_turn(choice, usage=adds(whole["usage"])) for choice in whole["choices"]]
        case "stream":
            read, usage = joined(client, ask)
            return [{**read, "usage": adds(usage)}]
        case "helper":
            with chat.stream(**ask) as stream:
                return [whole_turn(stream.get_final_completion().choices[0].model_dump())]
        case "completion":
            choice = client.completions.create(**ask).choices[0]
            return [whole_turn({"message": {"content": choice.text}, "finish_reason": choice.finish_reason})]
        case "logprobs":
            return [with_logprobs(chat.create(**ask).choices[0].model_dump())]
        case "error":
            with pytest.raises(openai.BadRequestError) as caught:
                chat.create(**ask)
            return {"status": caught.value.status_code, "code": caught.value.code, "param": caught.value.param}
        case "tools":
            return python_tools(client, ask)
        case "parse":
            parsed = chat.parse(**ask, response_format=Person).choices[0].message.parsed
            return parsed and parsed.model_dump()
    raise AssertionError(step.way)


def with_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    entries = choice["logprobs"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    certain = all(entry["logprob"] == 0.0 and len(entry["top_logprobs"]) == 1 for entry in entries)
    return whole_turn(choice, bytes=text, certain=certain)


# -- curl ------------------------------------------------------------------------------------------------------------


def curl(server: Server, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """What curl prints for a request, and the status."""
    command = ["curl", "-sS", "-N", "-w", "\n%{http_code}", f"{server.url}{path}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    sent = None if body is None else json.dumps(body)
    done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=60, check=True)
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def curled(server: Server, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """An answer as a turn, and its usage."""
    status, text = curl(server, "/v1/chat/completions", body)
    assert status == 200, text
    if not body.get("stream"):
        whole = json.loads(text)
        return whole_turn(whole["choices"][0]), whole["usage"]
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return streamed_turn(chunks), chunks[-1]["usage"]


def play_curl(server: Server, step: Step) -> Any:
    ask = step.ask
    match step.way:
        case "models":
            model = json.loads(curl(server, "/v1/models")[1])["data"][0]
            return {"model": model["object"] == "model" and model["context_length"] > 0}
        case "whole" | "logprobs":
            status, text = curl(server, "/v1/chat/completions", ask)
            assert status == 200, text
            whole = json.loads(text)
            if step.way == "logprobs":
                return [with_logprobs(whole["choices"][0])]
            return [whole_turn(choice, usage=adds(whole["usage"])) for choice in whole["choices"]]
        case "stream":
            read, usage = curled(server, ask)
            return [{**read, "usage": adds(usage)}]
        case "completion":
            choice = json.loads(curl(server, "/v1/completions", ask)[1])["choices"][0]
            return [whole_turn({"message": {"content": choice["text"]}, "finish_reason": choice["finish_reason"]})]
        case "error":
            status, text = curl(server, "/v1/chat/completions", ask)
            error = json.loads(text)["error"]
            return {"status": status, "code": error["code"], "param": error["param"]}
        case "tools":
            first, _ = curled(server, ask)
            called = [
                {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for name, arguments in first["calls"]
            ]
            message = {"role": "assistant", "content": None, "tool_calls": called}
            result = {"role": "tool", "tool_call_id": "call_1", "content": RESULT}
            return [first, curled(server, {**ask, "messages": [*ask["messages"], message, result]})[0]]
    raise AssertionError(step.way)


# -- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture
def play(request: pytest.FixtureRequest, scripted: Server) -> Callable[[str, Step], Any]:
    """Play a step as a client."""

    def node(step: Step) -> Any:
        session = request.getfixturevalue("node_session")
        result = {"text": RESULT, "tool": TOOL} if step.way == "run-tools" else RESULT
        asked = {"url": f"{scripted.url}/v1", "way": step.way, "ask": step.ask, "result": result}
        sent = json.dumps(asked | {"schema": PERSON_SCHEMA})
        done = subprocess.run(["node", session], input=sent, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-2_000:]
        return json.loads(done.stdout)

    def played(client: str, step: Step) -> Any:
        if client == "curl" and shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        ways = {"python": lambda: play_python(scripted, step), "node": lambda: node(step)}
        if client == "node":
            request.getfixturevalue("node_session")  # before the script is drawn from: it may skip
        seek(scripted, client, step)
        return ways[client]() if client in ways else play_curl(scripted, step)

    return played


@pytest.mark.parametrize(
    ("client", "step"),
    [(client, step) for client in CLIENTS for step in STEPS if client in step.clients],
    ids=lambda value: value if isinstance(value, str) else f"{value.row}-{value.name}",
)
def test_a_session(play: Callable[[str, Step], Any], client: str, step: Step) -> None:
    """A1: each step of the session (its row stands in the test's id) is read by each client as it should be."""
    assert play(client, step) == step.reads
