"""The types of a call's arguments: what a tool's schema makes of a value that the model wrote as text (row D4).

What this file knows: JSON Schema as far as types go, and the ways models write JSON values. What it does not: how a
call is written, and whether a value is valid beyond its type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:True|False|None)\b')
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_WORD = {"True": "true", "False": "false", "None": "null"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Kind(msgspec.Struct, frozen=True):
    """What a parameter may be. ``types``: none means any; ``members``: what an ``enum`` or ``const`` lists."""

    types: tuple[str, ...] = ()
    members: tuple[Any, ...] = ()

    @property
    def text(self) -> bool:
        """Whether a string is allowed."""
        return not self.types or "string" in self.types

    @property
    def streams(self) -> bool:
        """Whether every value stays the text it is, so that nothing needs to be held."""
        return "string" in self.types and all(isinstance(member, str) for member in self.members)


TEXT = Kind(("string",))
"""What an undeclared parameter is."""


def kinds(parameters: Any) -> dict[str, Kind]:
    """The declared parameters of a tool, by name; ``parameters`` is the tool's schema."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    refs: dict[str, Kind] = {}
    return {name: _kind(schema, parameters, refs) for name, schema in properties.items()}


def _kind(schema: Any, root: Mapping[str, Any], refs: dict[str, Kind]) -> Kind:
    """``refs``: what references lead to. Each is followed once, so a cycle ends and a fan of them costs nothing."""
    if not isinstance(schema, Mapping):
        return Kind()
    if "$ref" in schema:
        ref = str(schema["$ref"])
        if ref not in refs:
            refs[ref] = Kind()
            refs[ref] = _kind(_resolve(ref, root), root, refs)
        return refs[ref]
    members = _members(schema)
    types = _types(schema) or tuple(dict.fromkeys(_type(member) for member in members))
    if types:
        return Kind(types, members)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            options = [_kind(option, root, refs) for option in schema[word]]
            return _all(options) if word == "allOf" else _any(options)
    return Kind()


def _resolve(ref: str, root: Mapping[str, Any]) -> Any:
    """What a pointer into the same schema leads to; nothing for any other reference."""
    if not ref.startswith("#"):
        return None
    node: Any = root
    for step in ref[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _members(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    if "const" in schema:
        return (schema["const"],)
    return tuple(schema["enum"]) if isinstance(schema.get("enum"), list) else ()


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if types and schema.get("nullable") is True:
        types = [*types, "null"]
    return tuple(name for name in types if isinstance(name, str))


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def _any(options: list[Kind]) -> Kind:
    """One of several. An option without a type allows everything."""
    if any(not option.types for option in options):
        return Kind()
    types = dict.fromkeys(name for option in options for name in option.types)
    return Kind(tuple(types), tuple(member for option in options for member in option.members))


def _all(options: list[Kind]) -> Kind:
    """All of several: those without a type add nothing, and of the others the first one speaks."""
    return next((option for option in options if option.types), Kind())


def written(text: str, kind: Kind) -> str:
    """The JSON of a value that was written as ``text``."""
    if kind.members and (member := _member(text, kind)) is not None:
        return member
    bare = text.strip()
    if kind.text and (kind.types or not bare.startswith(("{", "["))):
        return quoted(text)
    return _parsed(bare, kind) or quoted(text)


def given(value: Any, kind: Kind) -> Any:
    """A value that came as JSON already: text becomes what its schema asks for, and ``5.0`` an integer."""
    if isinstance(value, str):
        return json.loads(written(value, kind))
    return _whole(value, kind)


def quoted(text: str) -> str:
    """A JSON string; joined, the insides of two are the inside of the whole."""
    return dumped(text)


def dumped(value: Any) -> str:
    """JSON that can be sent: half a surrogate pair stays escaped. A ``ValueError`` for what JSON cannot say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _member(text: str, kind: Kind) -> str | None:
    """The JSON of the member that ``text`` names; a string member comes before all others."""
    if text in [member for member in kind.members if isinstance(member, str)]:
        return quoted(text)
    value = _loose(text.strip())
    for member in kind.members:
        same = not isinstance(member, str) and value is not None and member == value[0]
        if same and value is not None and isinstance(member, bool) == isinstance(value[0], bool):
            return dumped(member)
    return None


def _parsed(text: str, kind: Kind) -> str | None:
    """The JSON of a typed value: as written where it is JSON already, so that no digit is lost."""
    value = _loose(text)
    if value is not None and isinstance(value[0], str) and "string" not in kind.types:
        text = value[0].strip()  # encoded twice: what is inside counts, if it is no text again
        value = _loose(text)
    if value is None or isinstance(value[0], str):
        return None
    fixed = _whole(value[0], kind)
    if type(fixed) is type(value[0]) and _strict(text) is not None:
        return text
    try:
        return dumped(fixed)
    except (ValueError, RecursionError):
        return None


def _whole(value: Any, kind: Kind) -> Any:
    wanted = "integer" in kind.types and "number" not in kind.types
    return int(value) if wanted and isinstance(value, float) and value.is_integer() else value


def _loose(text: str) -> tuple[Any] | None:
    """The value of JSON text, Python's three words allowed; none if it cannot be read."""
    return _strict(text) or _strict(_WORDS.sub(lambda word: _JSON_WORD.get(word[0], word[0]), text))


def _strict(text: str) -> tuple[Any] | None:
    try:
        return (json.loads(text, parse_constant=no_constant),)
    except (ValueError, RecursionError):
        return None


def no_constant(word: str) -> Any:
    """``NaN`` and ``Infinity`` are no JSON."""
    raise ValueError(word)


class Value:
    """One argument as it is written. What its schema lets be text goes out at once, the rest when it is whole (D3)."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._parts: list[str] = []
        self._begun = False  # a character that is no blank is here
        self._streaming = False

    def add(self, text: str) -> str:
        """The next characters of the value; the JSON that they let go."""
        if self._streaming:
            return quoted(text)[1:-1]
        self._parts.append(text)
        self._streaming = self._kind.streams or self._proves_text(text)
        return quoted("".join(self._parts))[:-1] if self._streaming else ""

    def _proves_text(self, text: str) -> bool:
        """Whether a value without a type turns out to be text: it begins here, and not like an object or a list."""
        first = "" if self._begun else text.lstrip()[:1]
        self._begun = self._begun or bool(first)
        return self._kind == Kind() and first not in ("", "{", "[")

    def end(self) -> str:
        """The value is whole; the JSON still to come."""
        return '"' if self._streaming else written("".join(self._parts), self._kind)
