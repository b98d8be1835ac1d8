"""Do the calls of an agent's session satisfy a strict validator, with typing on and with typing off (rows D4 and D9).

Two sessions, each written the way a model writes: the parameters of a call as text between tags. One is a coding
agent's, scripted here; the other every item of the Berkeley function-calling subset of the data folder, whose
ground truth is written out and read back. ``jsonschema`` judges every call; with typing off every value is a string.

    python -m benchmarks.typed_calls
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click
import jsonschema
import msgspec
from rich.console import Console
from rich.table import Table

from stages.calls import Arguments, CallClosed, CallOpened
from stages.toolcall import CallReader
from tests.captures import DATA

Tool = dict[str, Any]
BFCL = DATA / "toolcalls" / "bfcl" / "bfcl_subset.jsonl"


class Item(msgspec.Struct):
    """One answer of a session: the offered tools and what the model wrote."""

    tools: list[Tool]
    text: str


class Result(msgspec.Struct):
    """Of one session: calls read, calls the validator refused, calls that never came out whole."""

    calls: int = 0
    refused: int = 0
    lost: int = 0


def _tool(tool: str, required: str = "", **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": required.split()}
    return {"type": "function", "function": {"name": tool, "parameters": {**parameters, "additionalProperties": False}}}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
AGENT_TOOLS = [
    _tool("read", "path", path=TEXT, offset=NUMBER, limit={"type": ["integer", "null"]}),
    _tool("write", "path content", path=TEXT, content=TEXT),
    _tool("edit", "path old new", path=TEXT, old=TEXT, new=TEXT, all=FLAG),
    _tool("bash", "command", command=TEXT, timeout={"type": "number"}, background=FLAG, env={"type": "object"}),
    _tool("grep", "pattern", pattern=TEXT, paths={"type": "array", "items": TEXT}, context={"anyOf": [NUMBER, TEXT]}),
    _tool(
        "todo", "items",
        items={"type": "array", "items": {"type": "object", "required": ["text", "done"], "properties": {
            "text": TEXT, "done": FLAG, "rank": NUMBER}}},
    ),
    _tool("finish", "status", status={"enum": ["done", "blocked", 0, None]}, cost={"type": "number"}),
]  # fmt: skip


def written(tool: str, **values: str) -> str:
    """A call as the model writes it."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={tool}>\n{body}</function>\n</tool_call>"


AGENT_CALLS = [
    written("todo", items='[{"text": "look around", "done": false, "rank": 1}]'),
    written("read", path="README.md"),
    written("read", path="src/main.py", offset="0", limit="200"),
    written("read", path="src/main.py", offset="200.0", limit="null"),
    written("read", path="00123", offset="1", limit="None"),
    written("grep", pattern="def main", paths='["src", "tests"]', context="3"),
    written("grep", pattern="null", paths='["src"]', context="all"),
    written("grep", pattern="</parameter> in a value", paths="[]"),
    written("bash", command="ls -la && echo 'x < y'", timeout="30"),
    written("bash", command="make test", timeout="0.5", background="True"),
    written("bash", command="true", background="false", env='{"A": "1"}'),
    written("edit", path="a.py", old="x = 1", new="x = 2"),
    written("edit", path="a.py", old="if x:\n    y()\n", new="if x:\n    z()\n", all="true"),
    written("edit", path="b.py", old="{}", new='{"a": [1, 2]}', all="False"),
    written("write", path="data.json", content='{"a": 1, "b": [true, null]}'),
    written("write", path="page.html", content="<html>\n<body>1 &lt; 2</body>\n</html>"),
    written("write", path="empty.txt", content=""),
    written("write", path="number.txt", content="42"),
    written("bash", command="python data.py", timeout="1e2"),
    written("todo", items='[{"text": "write", "done": true}, {"text": "test", "done": false, "rank": 2}]'),
    written("todo", items="[]"),
    written("todo", items='"[{\\"text\\": \\"twice encoded\\", \\"done\\": true}]"'),
    written("finish", status="0", cost="0.25"),
    written("finish", status="null", cost="1"),
    written("finish", status="done"),
    written("finish", status="blocked", cost="-3.5"),
]
"""What a coding agent's model wrote, one call an answer."""


def agent_session() -> Iterator[Item]:
    """The scripted session."""
    return (Item(AGENT_TOOLS, text) for text in AGENT_CALLS)


def bfcl_session() -> Iterator[Item]:
    """The ground truth of the items, the first accepted values, written out.

    Left out: a call that by the ground truth itself does not satisfy its schema, and one that only repeats the call
    before it (row D6 drops those).
    """
    for line in BFCL.read_text().splitlines():
        entry = json.loads(line)
        texts: list[str] = []
        for call in entry.get("ground_truth") or []:
            for name, accepted in call.items():
                values = {key: chosen(options[0]) for key, options in accepted.items() if "" not in options}
                text = written(name, **{key: _plain(value) for key, value in values.items()})
                if _holds(entry["tools"], name, values) and text not in texts[-1:]:
                    texts.append(text)
        if texts:
            yield Item(entry["tools"], "\n".join(texts))


def chosen(value: Any) -> Any:
    """A value of the ground truth: what objects hold are lists of accepted values themselves."""
    if isinstance(value, dict):
        return {name: chosen(options[0]) if isinstance(options, list) else options for name, options in value.items()}
    return [chosen(entry) for entry in value] if isinstance(value, list) else value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _holds(tools: list[Tool], name: str, values: dict[str, Any]) -> bool:
    """Whether the values satisfy the tool's schema; not when that is no valid schema."""
    try:
        jsonschema.validate(values, schema_of(tools, name))
    except (jsonschema.ValidationError, jsonschema.SchemaError):
        return False
    return True


def schema_of(tools: list[Tool], name: str) -> dict[str, Any]:
    """The schema of a tool's parameters."""
    return next(tool["function"].get("parameters") or {} for tool in tools if tool["function"]["name"] == name)


def read(item: Item, typed: bool) -> list[tuple[str, str]]:
    """Name and arguments of the calls that come out whole."""
    tools = item.tools if typed else [_untyped(tool) for tool in item.tools]
    reader = CallReader(tools)
    names: dict[int, str] = {}
    pieces: dict[int, str] = {}
    whole: list[tuple[str, str]] = []
    for delta in [*reader.push(item.text), *reader.finish()]:
        match delta:
            case CallOpened(index, name):
                names[index], pieces[index] = name, ""
            case Arguments(index, piece):
                pieces[index] += piece
            case CallClosed(index, True):
                whole.append((names[index], pieces[index]))
    return whole


def _untyped(tool: Tool) -> Tool:
    """The tool with every parameter a string, as a reader without types has it."""
    function = tool["function"]
    names = (function.get("parameters") or {}).get("properties", {})
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return {"type": "function", "function": {"name": function["name"], "parameters": parameters}}


def measure(session: Iterator[Item], typed: bool) -> Result:
    """Read a session and judge each of its calls strictly."""
    result = Result()
    for item in session:
        calls = read(item, typed)
        result.lost += item.text.count("<tool_call>") - len(calls)
        for name, arguments in calls:
            result.calls += 1
            try:
                jsonschema.validate(json.loads(arguments), schema_of(item.tools, name))
            except jsonschema.ValidationError:
                result.refused += 1
    return result


@click.command()
def main() -> None:
    """Print both sessions, with typing on and off."""
    table = Table("session", "typing", "calls", "refused", "lost", title="calls under a strict validator")
    faults = 0
    sessions = {"coding agent": agent_session}
    if BFCL.exists():
        sessions["Berkeley subset"] = bfcl_session
    for label, session in sessions.items():
        for typed in (True, False):
            result = measure(session(), typed)
            faults += typed and result.refused + result.lost
            table.add_row(label, "on" if typed else "off", *map(str, msgspec.structs.astuple(result)))
    Console().print(table)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
