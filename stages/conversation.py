"""A request's messages as a template sees them, and in plain text what a template does not render (rows A7, A10, D1).

What this file knows: OpenAI's messages, and the chapter's written form of a call. What it does not: how a template is
run, and which forms an answer's calls are read in (``toolcall``).
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import msgspec

from stages.schema import MAX_DEPTH, Message, ToolCall, deeper_than
from stages.template import Abilities
from stages.validate import SYSTEM

TOOLS_TEXT = """# Tools

You can call functions. Each line here is one function:

<tools>
{tools}
</tools>

To call one, end your answer with its name and a value for each parameter in this form:

<tool_call>
<function=NAME>
<parameter=PARAMETER>
VALUE
</parameter>
</function>
</tool_call>"""

Entry = dict[str, Any]
BARE: Entry = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""What a tool that says nothing of itself is given, for templates that ask."""


def entries(messages: list[Message]) -> list[Entry]:
    """The messages as dicts, the system and developer ones at the start merged into one (rows A7, A10)."""
    heads = next((index for index, entry in enumerate(messages) if entry.role not in SYSTEM), len(messages))
    rest = [_entry(message) for message in messages[heads:]]
    if heads == 0:
        return rest
    texts = [text for message in messages[:heads] for text in _texts(message)]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def told(entries: list[Entry], tools: list[Entry], can: Abilities) -> list[Entry]:
    """The same conversation for a template that ``can`` only so much: the rest stands in the messages' text."""
    if tools and not can.tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        entries = _with_system(entries, TOOLS_TEXT.replace("{tools}", lines))
    entries = [_for(entry, can) for entry in entries]
    if not can.ids:
        entries = _renamed(entries)
    if not can.mid_system:
        entries = entries[:1] + [_user(entry) if entry["role"] == "system" else entry for entry in entries[1:]]
    if not can.system and entries[0]["role"] == "system":
        entries = [_user(entries[0]), *entries[1:]]
    return entries if can.doubles else _joined(entries)


def shown(tools: list[Entry], can: Abilities) -> list[Entry] | None:
    """The tools as the template gets them; None: it gets none."""
    if not tools or not can.tools:
        return None
    return tools if can.bare_tools else [tool | {"function": BARE | tool["function"]} for tool in tools]


def _renamed(entries: list[Entry]) -> list[Entry]:
    """The same calls and results under ids of nine letters and digits, in the order they come in."""
    ids: dict[str | None, str] = {}

    def new(id: str | None) -> str:
        return ids.setdefault(id, f"call{len(ids):05d}")

    renamed = []
    for entry in entries:
        if "tool_calls" in entry:
            entry = entry | {"tool_calls": [call | {"id": new(call.get("id"))} for call in entry["tool_calls"]]}
        if "tool_call_id" in entry:
            entry = entry | {"tool_call_id": new(entry["tool_call_id"])}
        renamed.append(entry)
    return renamed


def _entry(message: Message) -> Entry:
    role = "system" if message.role in SYSTEM else message.role
    entry: Entry = {"role": role, "content": "\n".join(_texts(message))}
    if message.tool_calls:
        entry["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            entry[name] = value
    return entry


def _texts(message: Message) -> list[str]:
    if isinstance(message.content, list):
        return [text for part in message.content if (text := part.text or part.refusal)]
    return [message.content] if message.content else []


def _call(call: ToolCall) -> Entry:
    """A call of the history. Templates walk its arguments: an object sent as text is given as one, nothing as {}."""
    function = call.function
    if function is None:
        return {"id": call.id, "type": call.type}
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        read = _object(arguments)
        arguments = arguments if read is None else read
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _object(text: str) -> Entry | None:
    """The object that a text is, None where it is none or nested deeper than a body may be."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return value if isinstance(value, dict) and not deeper_than(value, MAX_DEPTH) else None


# -- what a template does not render ---------------------------------------------------------------------------------


def _with_system(entries: list[Entry], text: str) -> list[Entry]:
    """With ``text`` at the end of the system prompt, or as one."""
    if entries[0]["role"] != "system":
        return [{"role": "system", "content": text}, *entries]
    head = entries[0]["content"]
    return [entries[0] | {"content": f"{head}\n\n{text}" if head else text}, *entries[1:]]


def _for(entry: Entry, can: Abilities) -> Entry:
    calls = entry.get("tool_calls")
    if calls and can.calls:
        return entry | {"tool_calls": [_as_taken(call, can) for call in calls]}
    if calls:
        written = [_written(call["function"]) for call in calls if "function" in call]
        texts = [text for text in (entry["content"], *written) if text]
        kept = {name: value for name, value in entry.items() if name != "tool_calls"}
        return kept | {"content": "\n".join(texts)}
    if entry["role"] == "tool" and not can.results:
        return {"role": "user", "content": f"<tool_response>\n{entry['content']}\n</tool_response>"}
    return entry


def _as_taken(call: Entry, can: Abilities) -> Entry:
    """With arguments of the kind that the template walks. A text that is no object goes in one where it must."""
    function = call.get("function")
    if function is None:
        return call
    arguments = function["arguments"]
    if isinstance(arguments, str) and not can.texts:
        arguments = {"arguments": arguments}
    elif isinstance(arguments, dict) and not can.objects:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def _written(function: Entry) -> str:
    """A call in the chapter's form; as a JSON object where its arguments are none."""
    name, arguments = function["name"], function["arguments"]
    if not isinstance(arguments, dict):
        return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
    values = [f"<parameter={key}>\n{_value(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _user(entry: Entry) -> Entry:
    return entry | {"role": "user"}


def _joined(entries: list[Entry]) -> list[Entry]:
    """User messages in a row as one, and an assistant's without calls: for templates that want turns by turns."""
    out: list[Entry] = []
    for _, run in groupby(entries, key=_kind):
        members = list(run)
        content = "\n\n".join(entry["content"] for entry in members if entry["content"])
        out += [members[0] | {"content": content}] if _kind(members[0]) else members
    return out


def _kind(entry: Entry) -> str:
    """The role of a message that may be joined with the next of the same, "" of one that may not."""
    return entry["role"] if entry["role"] in ("user", "assistant") and "tool_calls" not in entry else ""
