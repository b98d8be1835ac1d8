"""Thinking end to end: a template that opens the block in front of the real model, and a script that thinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import Server

pytestmark = pytest.mark.e2e

ASK = {"messages": [{"role": "user", "content": "What is 12 times 12?"}], "temperature": 0}
RAMBLE: dict[str, Any] = {"ignore_eos": True}
"""The embedded model does not think: left alone it ends in the middle of the block."""


def asked(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Usage but for what was cached (row F9)."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def streamed(server: Server, **fields: Any) -> tuple[dict[str, str], str, dict[str, Any]]:
    """The fields of all deltas joined, the finish word and the usage."""
    joined: dict[str, str] = {}
    finish, usage = "", {}
    with server.http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True, **fields}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                finish = choice["finish_reason"] or finish
                for name, value in choice["delta"].items():
                    if isinstance(value, str):
                        joined[name] = joined.get(name, "") + value
    return joined, finish, usage


def reasoning_tokens(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return count


@pytest.mark.parametrize(
    "shape",
    [
        {"max_reasoning_tokens": 12},
        {"thinking": {"type": "enabled", "budget_tokens": 12}},
        {"chat_template_kwargs": {"thinking_budget": 12}},
        {"extra_body": {"google": {"thinking_config": {"thinking_budget": 12}}}},
    ],
)
def test_a_budget_closes_the_block(thinking: Server, shape: dict[str, Any]) -> None:
    """C3: whatever the shape, at the cap the engine closes the block with real tokens, and an answer follows."""
    answer = asked(thinking, max_tokens=48, reasoning_format="reasoning_content", **RAMBLE, **shape)
    message = answer["choices"][0]["message"]
    closing = reasoning_tokens(answer) - 12
    assert 1 <= closing <= 8  # `</think>` in this vocabulary
    assert message["reasoning_content"] and message["content"].strip()
    assert "think>" not in message["content"] and "think>" not in message["reasoning_content"]


def test_formats(thinking: Server) -> None:
    """B1, B2, B3, B10: the same thinking in each format; streamed and whole give the same message and usage (F9)."""
    budget = {"max_reasoning_tokens": 12, "max_tokens": 32, **RAMBLE}
    parted = asked(thinking, **budget, reasoning_format="deepseek")
    message = parted["choices"][0]["message"]
    for name in ("tags", "reasoning_content", "both", "hidden"):
        whole = asked(thinking, **budget, reasoning_format=name)
        joined, finish, usage = streamed(thinking, **budget, reasoning_format=name)
        told = whole["choices"][0]["message"]
        assert joined.get("content", "") == told["content"] and finish == whole["choices"][0]["finish_reason"]
        assert joined.get("reasoning_content") == told.get("reasoning_content")
        assert counts(usage) == counts(whole["usage"]) and reasoning_tokens(whole) == reasoning_tokens(parted)
        if name in ("tags", "both"):
            assert told["content"].startswith("<think>\n") and told["content"].count("</think>") == 1
            assert told["content"].rpartition("</think>")[2].lstrip("\n") == message["content"]
        else:
            assert told["content"] == message["content"]
        assert ("reasoning_content" in told) == (name in ("both", "reasoning_content"))
        assert told.get("reasoning_content", message["reasoning_content"]) == message["reasoning_content"]


def test_thinking_turned_off(thinking: Server) -> None:
    """C2, B5: an off form reaches the template; the answer is plain content with no reasoning key."""
    answer = asked(thinking, max_tokens=16, reasoning_effort="none")
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message and "think>" not in message["content"] and message["content"]
    assert reasoning_tokens(answer) == 0


def test_the_reserve(thinking: Server) -> None:
    """C4: a budget without a number that fits still leaves a quarter of the limit for the answer."""
    answer = asked(thinking, max_tokens=60, reasoning_effort="high", reasoning_format="reasoning_content", **RAMBLE)
    assert reasoning_tokens(answer) <= 45
    assert answer["choices"][0]["message"]["content"].strip()


def test_without_a_budget_the_limit_is_the_limit(thinking: Server) -> None:
    """C5: nothing asked: the thinking runs into the limit, all of it in the reasoning field, streamed and whole."""
    fields = {"max_tokens": 20, "reasoning_format": "reasoning_content", **RAMBLE}
    answer = asked(thinking, **fields)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert reasoning_tokens(answer) == 20
    joined, finish, _usage = streamed(thinking, **fields)
    assert joined["reasoning_content"] == choice["message"]["reasoning_content"] and finish == "length"


def test_a_document_after_thinking(thinking: Server) -> None:
    """E4, B8: the constraint binds the answer, not the thinking; the answer parses and keeps its reserve."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = asked(thinking, max_tokens=100, response_format=form)
    message = answer["choices"][0]["message"]
    assert isinstance(json.loads(message["content"])["n"], int)
    assert message["reasoning_content"] and reasoning_tokens(answer) <= 75


# -- a script that thinks ----------------------------------------------------------------------------------------


def scripted(tmp_path: Path, *answers: str, **flags: str) -> Server:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": [{"text": text} for text in answers]}))
    return Server("--script", str(script), *(part for name, value in flags.items() for part in (f"--{name}", value)))


def test_a_model_that_opens_the_block_itself(tmp_path: Path) -> None:
    """B0: the first output is the opening tag: the block is thinking; a later tag is text of the answer."""
    text = "<think>\nLet me see: <tool_call> is only a word.\n</think>\n\nIt is 144, not <think>."
    with scripted(tmp_path, text) as server:
        server.ready()
        answer = asked(server, reasoning_format="reasoning_content")
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"].strip() == "Let me see: <tool_call> is only a word."
        assert message["content"] == "It is 144, not <think>."
        journal = server.state()["recent"][0]["history"]
        assert "reasoning_closed" in [row for _time, row in journal]
        tags = asked(server, reasoning_format="tags")["choices"][0]["message"]["content"]
        assert tags == "<think>\nLet me see: <tool_call> is only a word.\n</think>\n\nIt is 144, not <think>."


def test_the_format_of_a_kind(tmp_path: Path) -> None:
    """Q2: a client's kind says where it reads thinking; its own word wins, and the raw path keeps the server's."""
    hermes = {"messages": [{"role": "system", "content": "You are Hermes Agent, a helper."}, *ASK["messages"]]}  # type: ignore[misc]
    text = "<think>\nHm.\n</think>\n\nYes."
    with scripted(tmp_path, text) as server:
        server.ready()
        assert asked(server)["choices"][0]["message"]["reasoning_content"]
        assert asked(server, **hermes)["choices"][0]["message"]["content"].startswith("<think>\n")
        assert asked(server, reasoning_format="raw")["choices"][0]["message"]["content"].startswith("<think>\n")
    with scripted(tmp_path, text, conductor="off") as server:
        server.ready()
        assert asked(server)["choices"][0]["message"]["content"].startswith("<think>\n")
    with scripted(tmp_path, text, **{"reasoning-format": "both", "reasoning-key": "both"}) as server:
        server.ready()
        message = asked(server)["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] and message["content"].startswith("<think>\n")


def test_stops_act_on_the_answer(tmp_path: Path) -> None:
    """B6: a stop string inside the thinking, or in the blank lines behind it, stops nothing under a plan."""
    text = "<think>\nQuestion: what?\n\nHm.\n</think>\n\nA first part.\n\nQuestion: more?"
    with scripted(tmp_path, text) as server:
        server.ready()
        choice = asked(server, stop=["Question:"])["choices"][0]
        assert choice["message"]["content"] == "A first part.\n\n" and choice["finish_reason"] == "stop"
        assert asked(server, stop=["\n\n"])["choices"][0]["message"]["content"] == "A first part."
        raw = httpx.post(f"{server.url}/v1/chat/completions", json={**ASK, "stop": ["nothing like it"]}, timeout=60)
        assert raw.json()["choices"][0]["message"]["content"].endswith("more?")
    with scripted(tmp_path, text, conductor="off") as server:
        server.ready()
        content = asked(server, stop=["Question:"])["choices"][0]["message"]["content"]
        assert content.startswith("<think>") and "what" not in content
