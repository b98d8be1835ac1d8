"""One session that every SDK plays against the scripted engine: what each step asks, writes and must be read as.

The script is one list of answers for all clients and steps, used in order. In front of each step's answers stands its
mark, a text of its own: ``seek`` draws answers until it reads the mark, so a step that failed spoils no other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.server import Server

CLIENTS = ("python", "node", "curl")

GREETING = "Hello there. Žluťoučký 你好 🙂"
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
WEATHER = "It is sunny in Paris."
PERSON = '{"name": "Ada", "age": 36}'
THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."

PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city for some days",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
RESULT = "sunny"
"""What a client answers a call with."""


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def turn(text: str | None = None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """How an answer is read: by its text, reasoning, calls with parsed arguments, and finish."""
    return {"text": text, "reasoning": None, "calls": [], "finish": finish, **more}


CALLED = turn(None, "tool_calls", calls=[["get_weather", {"city": "Paris", "days": 3}]])
THOUGHT_READ = turn("Four.", reasoning="Two and two.", usage=True)


class Step(NamedTuple):
    """``way``: how it is asked and read; ``reads``: one entry a turn or choice; ``clients``: who has that way."""

    name: str
    row: str
    way: str
    ask: dict[str, Any]
    answers: tuple[str, ...]
    reads: Any
    clients: tuple[str, ...] = CLIENTS


SDKS = ("python", "node")
FORMAT = {"type": "json_schema", "json_schema": {"name": "Person", "strict": True, "schema": PERSON_SCHEMA}}
STEPS = (
    Step("models", "A11", "models", {}, (), {"model": True}),
    Step("chat", "A1", "whole", asked("Hi"), (GREETING,), [turn(GREETING, usage=True)]),
    Step("stream", "F1", "stream", asked("Hi", stream=True), (GREETING,), [turn(GREETING, usage=True)]),
    Step("helper", "F1", "helper", asked("Hi"), (GREETING,), [turn(GREETING)], SDKS),
    Step("completion", "A1", "completion", {"model": "m", "prompt": "Once"}, (GREETING,), [turn(GREETING)]),
    Step(
        "logprobs", "F7", "logprobs", asked("Hi", logprobs=True, top_logprobs=1), (GREETING,),
        [turn(GREETING, bytes=GREETING, certain=True)],
    ),
    Step(
        "refused", "A9", "error", asked("Hi", temperature=3), (),
        {"status": 400, "code": "invalid_value", "param": "temperature"},
    ),
    Step("tools", "D2", "tools", asked("Weather?", tools=[TOOL]), (CALL, WEATHER), [CALLED, turn(WEATHER)]),
    Step(
        "tools-streamed", "D3", "tools", asked("Weather?", tools=[TOOL], stream=True), (CALL, WEATHER),
        [CALLED, turn(WEATHER)],
    ),
    Step("tools-helper", "D3", "helper", asked("Weather?", tools=[TOOL]), (CALL,), [CALLED], SDKS),
    Step("run-tools", "D2", "run-tools", asked("Weather?"), (CALL, WEATHER), [turn(WEATHER)], ("node",)),
    Step(
        "schema", "E1", "whole", asked("Who?", response_format=FORMAT), (PERSON,), [turn(PERSON, usage=True)]
    ),
    Step(
        "schema-streamed", "E1", "stream", asked("Who?", response_format=FORMAT, stream=True), (PERSON,),
        [turn(PERSON, usage=True)],
    ),
    Step("parse", "E1", "parse", asked("Who?"), (PERSON,), {"name": "Ada", "age": 36}, SDKS),
    Step(
        "choices", "F11", "whole", asked("Hi", n=3), ("one", "two", "three"),
        [turn(text, usage=True) for text in ("one", "two", "three")],
    ),
    Step("thinking", "B2", "whole", asked("2+2?"), (THOUGHT,), [THOUGHT_READ]),
    Step("thinking-streamed", "B2", "stream", asked("2+2?", stream=True), (THOUGHT,), [THOUGHT_READ]),
)  # fmt: skip


def mark(client: str, step: Step) -> str:
    return f"mark of {client} {step.name}"


def write_script(path: Path) -> Path:
    """The script file of all sessions."""
    texts = [text for client in CLIENTS for step in STEPS for text in (mark(client, step), *step.answers)]
    path.write_text(json.dumps({"answers": [{"text": text} for text in texts]}))
    return path


def seek(server: Server, client: str, step: Step) -> None:
    """Draw answers up to a step's mark; the script only runs forward, so steps are played in its order."""
    for _ in range(len(CLIENTS) * len(STEPS) * 4):
        read = server.chat("next", max_tokens=200).json()["choices"][0]["message"]["content"]
        if read == mark(client, step):
            return
    raise AssertionError(f"the script is past {mark(client, step)!r}: play the steps in order")


def whole_turn(choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A choice of a whole answer, as JSON, read as every session reads it."""
    message = choice["message"]
    calls = [[c["function"]["name"], json.loads(c["function"]["arguments"])] for c in message.get("tool_calls") or []]
    read = turn(message.get("content"), choice["finish_reason"], calls=calls, **more)
    return {**read, "reasoning": message.get("reasoning_content")}


def streamed_turn(chunks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The chunks of one choice, as JSON, joined as clients join them: calls by index, name and id from the first."""
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0].get("role") == "assistant"
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or []):
        if piece["index"] == len(calls):
            assert piece["id"].startswith("call_")
            calls.append([piece["function"]["name"], ""])
        calls[piece["index"]][1] += piece["function"].get("arguments") or ""
    finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert len(finishes) == 1
    text, thought = ("".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content"))
    read = turn(text or None, finishes[0], calls=[[name, json.loads(text)] for name, text in calls], **more)
    return {**read, "reasoning": thought or None}
