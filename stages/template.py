"""A checkpoint's chat template: running it, and finding out what it can do.

What this file knows: how Hugging Face's checkpoints expect their template to be run. What it does not: requests.

Templates differ in what they render, and none of them says so. So each is asked once, with a few words: what does not
come back in its text, or makes it raise, it cannot do, and ``conversation`` writes it another way.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

MARK = "\ufdd0\ufdd1"
"""Two noncharacters, which Unicode gives to no text: they keep a spelling from being read as a control token."""
OWN_WORDS = 300
"""Characters of a template's own complaint that a client sees."""
PROBE = "QzProbeQz"
"""A word no template writes of its own accord."""


class Abilities(msgspec.Struct, frozen=True):
    """What a template renders. What it does not is written in plain text (``conversation``)."""

    tools: bool = False
    """The offered tools."""
    calls: bool = False
    """``tool_calls`` of an assistant message."""
    results: bool = False
    """Messages of the role ``tool``."""
    objects: bool = True
    """A call's arguments as an object; else as JSON text."""
    texts: bool = True
    """A call's arguments as a text, too: those that are no object."""
    system: bool = True
    """A system prompt."""
    mid_system: bool = True
    """System messages after the conversation began."""
    doubles: bool = True
    """Two messages of one role in a row."""
    bare_tools: bool = True
    """A tool that says no more than its name."""
    ids: bool = True
    """Ids of calls as they are; else of nine letters and digits."""


class Unrendered(msgspec.Struct, frozen=True):
    """A template does not take these messages; ``said`` is its own complaint, cut, or empty."""

    said: str = ""


class Template:
    """One checkpoint's template. ``special``: the names of control tokens it may use."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._compiled = _compiled(source)
        self._special = dict(special)
        self.usable = self._compiled is not None
        self._no_tools: list[dict[str, Any]] | None = None
        if self.usable and not self._takes([_ASKED]):  # made for tools alone: it may take an empty list of them
            self._no_tools = []
        self.can = self._abilities() if self.usable else Abilities()

    def run(
        self,
        messages: list[dict[str, Any]],
        *,
        header: bool,
        wall: float = 0.0,
        tools: list[dict[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str | Unrendered:
        """The text. It is the checkpoint's program: whatever it raises is about these messages.

        ``header``: with the beginning of an answer at the end. ``extra``: a client's own variables, which hide none of
        ours. ``wall``, in seconds since 1970, is the day a template may name, in UTC.
        """
        assert self._compiled is not None
        ours = {
            "messages": messages,
            "tools": tools or self._no_tools,
            "documents": None,
            "add_generation_prompt": header,
        }
        names = {**(extra or {}), **ours, "strftime_now": _strftime(wall), "raise_exception": _raise, **self._special}
        try:
            return self._compiled.render(names)
        except jinja2.TemplateError as error:
            return Unrendered((error.message or "").replace(MARK, "")[:OWN_WORDS])
        except Exception:
            return Unrendered()

    def _abilities(self) -> Abilities:
        asked, said = _ASKED, {"role": "assistant", "content": "b"}
        arguments = {"p": "v"}
        objects = self._shows([asked, _calling(arguments)])
        texts = self._shows([asked, _calling(msgspec.json.encode(arguments).decode())])
        calls = objects or texts
        calling = _calling(arguments if objects else "{}", PROBE[::-1]) if calls else said
        result = {"role": "tool", "tool_call_id": CALL_ID, "name": "f", "content": PROBE}
        system = {"role": "system", "content": PROBE}
        return Abilities(
            tools=self._shows([asked], [_TOOL]),
            calls=calls,
            results=self._shows([asked, calling, result]),
            objects=objects or not texts,
            texts=texts or not calls,
            system=self._shows([system, asked]) or not self._takes([asked]),
            mid_system=self._shows([asked, said, system, asked]),
            doubles=self._takes([asked, asked]) or not self._takes([asked]),
            bare_tools=self._shows([asked], [_BARE]) or not self._shows([asked], [_TOOL]),
            ids=self._shows([asked, _with_id(calling, "call_0"), _with_id(result, "call_0")])
            or not self._shows([asked, calling, result]),
        )

    def _shows(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> bool:
        text = self.run(messages, header=False, tools=tools)
        return isinstance(text, str) and PROBE in text

    def _takes(self, messages: list[dict[str, Any]]) -> bool:
        return isinstance(self.run(messages, header=True), str)


def _with_id(message: dict[str, Any], id: str) -> dict[str, Any]:
    """The message with another id of its call."""
    if "tool_calls" in message:
        return message | {"tool_calls": [call | {"id": id} for call in message["tool_calls"]]}
    return message | {"tool_call_id": id}


_ASKED = {"role": "user", "content": "a"}
CALL_ID = "abcdefghi"
"""Nine letters and digits: some templates refuse any other length."""
_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "d",
        "parameters": {"type": "object", "properties": {"p": {"type": "string", "description": "d"}}, "required": []},
    },
}
_BARE = {"type": "function", "function": {"name": PROBE}}


def _calling(arguments: Any, name: str = PROBE) -> dict[str, Any]:
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# -- its environment -------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a trainer learns from; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(source: str) -> jinja2.Template | None:
    """The template, None for none or one that is no Jinja."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(source) if source else None
    except jinja2.TemplateError:
        return None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja2's own filter would escape HTML and sort keys. A mark stays a mark, escaped or not."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_ESCAPED, MARK) if ensure_ascii else text


_ESCAPED = json.dumps(MARK)[1:-1]


def _strftime(wall: float) -> Callable[[str], str]:
    return datetime.datetime.fromtimestamp(wall, datetime.UTC).strftime
