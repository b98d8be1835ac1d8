"""Who is calling and for what (row Q2): the body's tells first, headers second, and no tell at all is ``other``.

What this file knows: how known clients begin their prompts, name their tools and sign their headers. What it does not:
what follows from a kind, but for the two flags whose values name kinds.

The tables are the specification as data; the first row that fits decides. Texts are compared with blanks folded, and
only their first ``HEAD`` characters are read, so a megabyte of conversation costs no more than a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

KINDS = (
    "open-webui", "opencode", "hermes", "cline", "roo", "qwen-code", "codex", "claude-code", "continue", "aider", "zed",
    "openai-sdk", "curl", "benchmark", "other",
)  # fmt: skip
SIDES = (
    "title", "tags", "follow-ups", "emoji", "queries", "autocomplete", "compaction", "mixture", "review",
    "image-prompt",
)  # fmt: skip
RECOGNISED = ("title", "tags", "follow-ups", "emoji", "queries", "autocomplete")
"""The side requests that K1's lane takes whatever their max_tokens, and that think nothing under a plan (Q7)."""
NEVER_NOTED = ("curl", "openai-sdk", "other", "benchmark")
"""Kinds whose prompt is as sent under a plan too (row Q1), and that get no progress lines (Q6)."""
FORMATS = ("tags", "reasoning_content", "both")
CLIENT_REASONING = "*=reasoning_content,hermes=tags"
"""The default of ``--client-reasoning``."""

HEAD = 400
"""Characters of a text that are read."""
PARTS = 4
"""Text parts of a message, and system messages, that are read: Claude Code's name stands in its second block."""
TOOLS = 128
"""Offered tools whose names are read."""


class Tell(msgspec.Struct, frozen=True):
    """A prompt that begins with ``opening``. Several clients share some: then ``kind`` is "" and other tells decide."""

    where: Literal["system", "alone", "turn"]
    """A system text; the only message beside system texts, with no tools offered; a user message that stands last."""
    opening: str
    kind: str
    side: str = ""


TELLS: tuple[Tell, ...] = (
    Tell("alone", "### Task: Generate a concise title", "open-webui", "title"),
    Tell("alone", "### Task: Generate a concise, 3-5 word title", "open-webui", "title"),
    Tell("alone", "### Task: Generate 1-3 broad tags", "open-webui", "tags"),
    Tell("alone", "### Task: Predict 3-5 useful messages", "open-webui", "follow-ups"),
    Tell("alone", "### Task: Suggest 3-5 relevant follow-up", "open-webui", "follow-ups"),
    Tell("alone", "Your task is to reflect the speaker's likely facial expression", "open-webui", "emoji"),
    Tell("alone", "### Task: Analyze the chat history to determine the necessity", "open-webui", "queries"),
    Tell("alone", "### Task: Based on the chat history, determine whether a search", "open-webui", "queries"),
    Tell("alone", "### Task: You are an autocompletion system", "open-webui", "autocomplete"),
    Tell("alone", "### Task: Generate a detailed prompt for a", "open-webui", "image-prompt"),
    Tell("alone", "You have been provided with a set of responses from various models", "open-webui", "mixture"),
    Tell("system", "Generate a short, descriptive title (3-7 words) for a conversation that starts", "hermes", "title"),
    Tell("alone", "You are a summarization agent creating a context checkpoint", "hermes", "compaction"),
    Tell("turn", "Review the conversation above and consider saving", "hermes", "review"),
    Tell("turn", "Review the conversation above and update the skill library", "hermes", "review"),
    Tell("system", "You are Hermes Agent", "hermes"),
    Tell("system", "You are a title generator. You output ONLY a thread title", "opencode", "title"),
    Tell("system", "You are a context summarization agent", "opencode", "compaction"),
    Tell("system", "You are an anchored context summarization assistant", "opencode", "compaction"),
    Tell("system", "You are opencode", "opencode"),
    Tell("system", "You are OpenCode", "opencode"),
    Tell("system", "*Briefly* summarize this partial conversation about programming", "aider", "compaction"),
    Tell("system", "Act as an expert software developer. Take requests for changes", "aider"),
    Tell("system", "Act as an expert software developer. Always use best practices", "aider"),
    Tell("system", "Act as an expert code analyst. Answer questions about the supplied code", "aider"),
    Tell("system", "Act as an expert architect engineer and provide direction to your editor", "aider"),
    Tell("alone", "Given the following... please reply with a title for the chat", "continue", "title"),
    Tell("system", "You are an agent in the Continue CLI", "continue"),
    Tell("system", "You are Cline,", "cline"),
    Tell("system", "You are Roo,", "roo"),
    Tell("system", "You are Qwen Code,", "qwen-code"),
    Tell("system", "You are a coding agent running in the Codex CLI", "codex"),
    Tell("system", "You are Codex,", "codex"),
    Tell("system", "You are Claude Code,", "claude-code"),
    Tell("system", "x-anthropic-billing-header:", "claude-code"),
    # Prompts that several clients took from each other: they name the task, not the client.
    Tell("turn", "You are performing a CONTEXT CHECKPOINT COMPACTION", "", "compaction"),
    Tell("system", "You are a helpful AI assistant tasked with summarizing conversations", "", "compaction"),
    Tell("system", "You are the component that summarizes internal chat history", "", "compaction"),
    Tell("turn", "Your task is to create a detailed summary of the conversation", "", "compaction"),
    Tell("turn", "Generate a detailed summary of this conversation. Include:", "", "compaction"),
    Tell("turn", "Generate a concise 3-7 word title for this conversation, omitting punctuation", "", "title"),
)


class Toolbox(msgspec.Struct, frozen=True):
    """Tool names only one client offers: ``least`` of them together are a tell."""

    kind: str
    names: tuple[str, ...]
    least: int = 2


TOOLBOXES: tuple[Toolbox, ...] = (
    Toolbox("open-webui", (
        "get_current_timestamp", "calculate_timestamp", "list_knowledge_bases", "search_knowledge_bases",
        "query_knowledge_bases", "query_knowledge_files", "view_knowledge_file", "search_chats", "view_chat",
        "search_notes", "view_note", "write_note", "replace_note_content", "toggle_automation",
        "search_calendar_events", "delete_calendar_event",
    )),
    Toolbox("hermes", (
        "cronjob", "delegate_task", "session_search", "skill_manage", "skill_view", "skills_list", "text_to_speech",
        "vision_analyze",
    ), least=3),
    Toolbox("opencode", ("todowrite", "todoread", "webfetch")),
    Toolbox("cline", (
        "read_files", "run_commands", "search_codebase", "fetch_web_content", "team_spawn_teammate", "team_run_task",
        "team_await_runs", "team_mission_log",
    ), least=3),
    Toolbox("continue", ("CheckBackgroundJob", "Checklist", "AskQuestion")),
    Toolbox("codex", ("exec_command", "write_stdin")),
    Toolbox("claude-code", ("BashOutput", "ExitPlanMode", "NotebookEdit", "TodoWrite")),
)  # fmt: skip

BENCHMARK_FIELDS = ("ignore_eos",)
"""True in the bodies of benchmarks alone: nobody who reads the answer wants it to run past its end."""


class Signature(msgspec.Struct, frozen=True):
    """Headers that all begin so, names and values in lower case; "" is any value."""

    kind: str
    headers: tuple[tuple[str, str], ...]


def _agent(kind: str, opening: str) -> Signature:
    return Signature(kind, (("user-agent", opening),))


SIGNATURES: tuple[Signature, ...] = (
    _agent("opencode", "opencode/"),
    _agent("qwen-code", "qwencode/"),
    _agent("codex", "codex_"),
    _agent("codex", "codex-"),
    _agent("claude-code", "claude-cli/"),
    _agent("roo", "roocode/"),
    _agent("zed", "zed/"),
    _agent("cline", "cline/"),
    Signature("codex", (("originator", "codex"),)),
    Signature("claude-code", (("x-claude-code-session-id", ""),)),
    Signature("open-webui", (("x-openwebui-chat-id", ""),)),
    Signature("open-webui", (("x-openwebui-user-id", ""),)),
    Signature("cline", (("x-client-type", ""),)),
    Signature("open-webui", (("x-title", "open webui"),)),
    Signature("roo", (("x-title", "roo code"),)),
    Signature("cline", (("x-title", "cline"),)),
    Signature("aider", (("x-title", "aider"),)),
    # Its name goes in no header. The pair is its pinned SDK and its read timeout; either alone is anybody's.
    Signature("hermes", (("user-agent", "openai/python 2.24.0"), ("x-stainless-read-timeout", "1800.0"))),
    _agent("continue", "ls/js"),  # a class name that its build made short
    Signature("benchmark", (("x-promptfoo-version", ""),)),
    _agent("benchmark", "guidellm"),
    _agent("curl", "curl/"),
    _agent("openai-sdk", "openai/"),
    _agent("openai-sdk", "asyncopenai/"),
    _agent("openai-sdk", "azureopenai/"),
    _agent("openai-sdk", "asyncazureopenai/"),
    Signature("openai-sdk", (("x-stainless-lang", ""),)),
)


class Client(msgspec.Struct, frozen=True):
    """Who asks, of ``KINDS``, and the side request it is, of ``SIDES``; "" is a turn of a conversation."""

    kind: str
    side: str


# -- reading ---------------------------------------------------------------------------------------------------------


class Heads(msgspec.Struct, frozen=True):
    """The beginnings of a request's texts, by where they stand."""

    system: list[str]
    alone: list[str]
    turn: list[str]


def kind(body: Mapping[str, Any], headers: Mapping[str, str]) -> Client:
    """Who sent a body with these headers. The body is a stranger's: whatever it holds, there is an answer."""
    tools = _tools(body)
    heads = _heads(body, bool(tools))
    told = [tell for tell in TELLS if any(text.startswith(tell.opening) for text in getattr(heads, tell.where))]
    side = next((tell.side for tell in told if tell.side), "")
    named = next((tell.kind for tell in told if tell.kind), "")
    return Client(named or _by_tools(tools) or _by_fields(body) or _by_headers(headers) or "other", side)


def _heads(body: Mapping[str, Any], tools: bool) -> Heads:
    messages = _messages(body)
    first = next((i for i, m in enumerate(messages) if not _is(m, "system", "developer")), len(messages))
    system = _texts(body.get("system")) + _texts(body.get("instructions"))  # of other routes' bodies
    for message in messages[: min(first, PARTS)]:
        system += _texts(message.get("content"))
    last = messages[-1] if messages else None
    turn = _texts(last.get("content")) if isinstance(last, dict) and _is(last, "user") else []
    return Heads(system, turn if len(messages) - first == 1 and not tools else [], turn)


def _messages(body: Mapping[str, Any]) -> list[Any]:
    """The conversation, under the name either route gives it."""
    for name in ("messages", "input"):
        value = body.get(name)
        if isinstance(value, list):
            return value
    return []


def _is(message: object, *roles: str) -> bool:
    return isinstance(message, dict) and message.get("role") in roles


def _texts(content: object) -> list[str]:
    """The heads of a text, or of the first text parts of a list."""
    parts = content[:PARTS] if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [" ".join(text[:HEAD].split()) for text in texts if isinstance(text, str)]


def _tools(body: Mapping[str, Any]) -> list[str]:
    """The names of the offered tools, in either form."""
    tools = body.get("tools")
    names = []
    for tool in tools[:TOOLS] if isinstance(tools, list) else []:
        inner = tool.get("function") if isinstance(tool, dict) else None
        name = inner.get("name") if isinstance(inner, dict) else tool.get("name") if isinstance(tool, dict) else None
        names.append(name if isinstance(name, str) else "")
    return names


def _by_tools(tools: list[str]) -> str:
    offered = frozenset(tools)
    return next((box.kind for box in TOOLBOXES if sum(name in offered for name in box.names) >= box.least), "")


def _by_fields(body: Mapping[str, Any]) -> str:
    return "benchmark" if any(body.get(name) is True for name in BENCHMARK_FIELDS) else ""


def _by_headers(headers: Mapping[str, str]) -> str:
    values = {name.lower(): value[:HEAD].strip().lower() for name, value in headers.items()}
    for signature in SIGNATURES:
        if all(name in values and values[name].startswith(opening) for name, opening in signature.headers):
            return signature.kind
    return ""


# -- the flags that name kinds ---------------------------------------------------------------------------------------


def reasoning_formats(text: str) -> dict[str, str]:
    """``--client-reasoning``: format by kind, ``*`` for every other one. Raises ``ValueError`` with a sentence."""
    table: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, form = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"{item} is not KIND=FORMAT.")
        _known(name, "*", *KINDS)
        if form not in FORMATS:
            raise ValueError(f"There is no reasoning format {form}; the formats are {', '.join(FORMATS)}.")
        if name in table:
            raise ValueError(f"{name} has two formats.")
        table[name] = form
    return table


def format_for(client: Client, table: Mapping[str, str]) -> str:
    """The client's format. The table holds only where the server's is ``tags`` (row Q2), so that is what is left."""
    return table.get(client.kind, table.get("*", "tags"))


def progress_kinds(text: str) -> tuple[str, ...]:
    """``--progress-lines``: kinds, or ``none``. Raises ``ValueError``; some kinds never get a line (row Q6)."""
    names = [name for name in (item.strip() for item in text.split(",")) if name not in ("", "none")]
    for name in names:
        _known(name, *KINDS)
        if name in NEVER_NOTED:
            raise ValueError(f"{name} never gets progress lines.")
    return tuple(dict.fromkeys(names))


def _known(name: str, *names: str) -> None:
    if name not in names:
        raise ValueError(f"There is no client kind {name}; the kinds are {', '.join(names)}.")
