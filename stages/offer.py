"""Which tools a request offers, and which of them the answer must call (rows A6, D5, D6).

What this file knows: OpenAI's forms of ``tools`` and ``tool_choice``. What it does not: how a tool is rendered
(``conversation``), how a choice is forced (``constraint``) and how a call is read (``toolcall``).

``allowed_tools`` is read as the offer cut to the tools it names, with its ``mode`` as the choice: a tool that is not
allowed is not shown to the model either.
"""

from __future__ import annotations

from typing import Any

from stages.refusal import Refusal, quoted, refuse
from stages.schema import ChatRequest, Request

WORDS = ("none", "auto", "required")
MODES = ("auto", "required")


def malformed(request: ChatRequest) -> Refusal | None:
    """The first fault of ``tools``, then of ``tool_choice``. Types of the tools were settled by ``schema``."""
    return _tools(request.tools or []) or _choice(request)


def offered(request: Request) -> list[dict[str, Any]] | None:
    """The tools the model may call, as the client wrote them; [] where it offered none, None where it said nothing."""
    if not isinstance(request, ChatRequest) or request.tools is None:
        return None
    if request.tool_choice == "none":
        return []
    allowed = _allowed(request.tool_choice)
    return request.tools if allowed is None else [tool for tool in request.tools if _name(tool) in allowed]


def chosen(request: Request) -> str | dict[str, Any]:
    """``none``, ``auto``, ``required`` or OpenAI's object that names a function."""
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        mode: str = choice["allowed_tools"]["mode"]
        return mode
    return "auto" if choice is None else choice


def parallel(request: Request) -> bool:
    """Whether the answer may hold more than one call: a call that is asked for is one, unless more are (row D5)."""
    asked = request.parallel_tool_calls if isinstance(request, ChatRequest) else None
    return chosen(request) in ("none", "auto") if asked is None else asked


def _tools(tools: list[dict[str, Any]]) -> Refusal | None:
    for index, tool in enumerate(tools):
        name = f"tools[{index}].function.name"
        if tool.get("function") is None:
            return refuse("missing_required_parameter", name, f"{name} is missing.")
        if not _name(tool):
            return refuse("invalid_value", name, f"{name} is empty.")
    return None


def _name(tool: dict[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


# -- the choice ----------------------------------------------------------------------------------------------------


def _choice(request: ChatRequest) -> Refusal | None:
    choice, names = request.tool_choice, [_name(tool) for tool in request.tools or []]
    if choice is None or choice in ("none", "auto"):
        return None
    if isinstance(choice, str):
        if choice not in WORDS:
            text = f"{quoted(choice)} is not a tool choice: use one of {', '.join(WORDS)}, or an object."
            return refuse("invalid_value", "tool_choice", text)
        return None if names else _nothing_offered()
    match choice.get("type"):
        case "function":
            return _named("tool_choice", choice, names)
        case "allowed_tools":
            return _subset(choice.get("allowed_tools"), names)
        case None:
            return refuse("missing_required_parameter", "tool_choice.type", "tool_choice.type is missing.")
        case str(kind):
            text = f"{quoted(kind)} is not a type of tool choice: use 'function' or 'allowed_tools'."
            return refuse("invalid_value", "tool_choice.type", text)
    return refuse("invalid_type", "tool_choice.type", "tool_choice.type must be a string.")


def _nothing_offered() -> Refusal:
    return refuse("invalid_value", "tool_choice", "tool_choice asks for a tool, but tools offers none.")


def _named(place: str, choice: object, names: list[str]) -> Refusal | None:
    """The fault of an object that names one function; ``names`` are those offered."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    path = f"{place}.function.name"
    if name is None:
        return refuse("missing_required_parameter", path, f"{path} is missing.")
    if not isinstance(name, str):
        return refuse("invalid_type", path, f"{path} must be a string.")
    if not names:
        return _nothing_offered()
    return None if name in names else refuse("invalid_value", path, f"tools offers no function {quoted(name)}.")


def _subset(allowed: object, names: list[str]) -> Refusal | None:
    place = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        return refuse("invalid_type", place, f"{place} must be an object.")
    if allowed.get("mode") not in MODES:
        return refuse("invalid_value", f"{place}.mode", f"{place}.mode must be one of {', '.join(MODES)}.")
    tools = allowed.get("tools")
    if not isinstance(tools, list):
        return refuse("invalid_type", f"{place}.tools", f"{place}.tools must be a list.")
    if not tools and allowed["mode"] == "required":
        return _nothing_offered()
    faults = (_named(f"{place}.tools[{index}]", tool, names) for index, tool in enumerate(tools))
    return next((fault for fault in faults if fault), None)


def _allowed(choice: str | dict[str, Any] | None) -> list[str] | None:
    """The names that a well-formed ``allowed_tools`` leaves, None where it is none."""
    if not isinstance(choice, dict) or choice["type"] != "allowed_tools":
        return None
    return [_name(tool) for tool in choice["allowed_tools"]["tools"]]
