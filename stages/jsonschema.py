"""A client's JSON Schema, read once: what the masks hold is kept, what they cannot hold is a fault (row E5).

The schema that comes out says the same as the one that went in, with nothing in it that a grammar compiler could pass
over: annotations are gone, references lead to ``$defs`` of our own naming, old spellings are the newest draft's, and
what can never be finished is ``false``. Knows JSON Schema's keywords; compiles nothing.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import msgspec

from stages.jsonschema_close import DEFS, Paths, Schema, can_finish, finishable, listed, resolved
from stages.keywords import (
    COUNTS,
    FORMAT_LENGTHS,
    FORMAT_PATTERNS,
    FORMATS,
    LIMITS,
    MANY,
    NAMED,
    NUMBER_FORMATS,
    OLD_DRAFTS,
    ONE,
    TYPES,
    UNENFORCED,
)

EXACT = 1 << 53
"""Beyond it a number is not told from its neighbours."""


class Fault(msgspec.Struct, frozen=True):
    """What of a schema is not served: the keyword, where it stands (names and indices), and why."""

    keyword: str
    path: tuple[str | int, ...]
    text: str


class Unserved(Exception):
    """Carries a :class:`Fault` out of the walk; it never leaves this file."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.keyword)
        self.fault = fault


class Read(msgspec.Struct, frozen=True):
    """A schema as it will be compiled. ``paths``: where each of its objects stood in the client's, by ``id``."""

    schema: Schema
    defs: dict[str, Schema]
    paths: Paths

    def alone(self, node: Schema) -> Schema:
        """``node`` with the definitions it may refer to."""
        return {**node, "$defs": self.defs} if isinstance(node, dict) and self.defs else node


class _Place(msgspec.Struct, frozen=True):
    """Where the walk stands: the path so far, the resource that ``#`` means there, and that one's path."""

    path: tuple[str | int, ...]
    base: Any
    home: tuple[str | int, ...] = ()

    def at(self, *steps: str | int) -> _Place:
        return _Place((*self.path, *steps), self.base, self.home)

    def fault(self, keyword: str, text: str) -> Unserved:
        return Unserved(Fault(keyword, (*self.path, keyword), text))


def read(schema: Any) -> Read | Fault:
    """The schema to compile, or the first fault found."""
    walk = _Walk(schema)
    try:
        whole = walk.node(schema, _Place((), schema))
        walk.definitions()
    except Unserved as unserved:
        return unserved.fault
    defs = finishable(walk.defs)
    found = resolved(whole, defs, walk.paths)
    if not can_finish(found, frozenset(defs)):
        return Fault("", (), "no document of finite length fits it.")
    return Read(found, {name: resolved(node, defs, walk.paths) for name, node in defs.items()}, walk.paths)


class _Walk:
    """Reads each object of the schema that counts, once: what only a reference leads to, when one does."""

    def __init__(self, root: Any) -> None:
        self._root = root
        named = root.get("$schema") if isinstance(root, dict) else None
        self._old = isinstance(named, str) and named.rstrip("#") in OLD_DRAFTS
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Any, _Place]] = []
        self.defs: dict[str, Schema] = {}
        self.paths: Paths = {}

    def definitions(self) -> None:
        """Read what references lead to, and what those refer to."""
        while self._waiting:
            name, node, place = self._waiting.pop()
            self.defs[name] = self.node(node, place)

    def node(self, schema: Any, place: _Place) -> Schema:
        """One schema, and those inside it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Unserved(Fault("", place.path, "a schema is an object, true or false."))
        if "$ref" in schema and self._old:
            schema = {"$ref": schema["$ref"]}
        elif _names_resource(schema):
            place = _Place(place.path, schema, place.path)
        found: dict[str, Any] = {}
        for keyword, value in schema.items():
            found.update(self._keyword(keyword, value, schema, place))
        if "format" in found:
            self._tighten(found, place.at("format"))
        self.paths[id(found)] = place.path
        return found

    def _keyword(self, keyword: str, value: Any, schema: dict[str, Any], place: _Place) -> dict[str, Any]:
        """What a keyword becomes: nothing, if it binds nothing."""
        if keyword in UNENFORCED:
            if _binds(keyword, value, schema):
                raise place.fault(keyword, "is not supported.")
            return {}
        if keyword in ("items", "additionalItems") and isinstance(schema.get("items"), list):
            return self._old_items(keyword, value, place)
        if keyword in ONE:
            return {keyword: self.node(value, place.at(keyword))}
        if keyword in MANY:
            if not isinstance(value, list) or (not value and keyword != "prefixItems"):
                raise place.fault(keyword, "must be a list of schemas.")
            return {keyword: [self.node(one, place.at(keyword, i)) for i, one in enumerate(value)]}
        if keyword in NAMED:
            if not isinstance(value, dict):
                raise place.fault(keyword, "must be an object of schemas.")
            return {keyword: {name: self.node(one, place.at(keyword, name)) for name, one in value.items()}}
        if keyword == "$ref":
            return {"$ref": DEFS + self._reference(value, place)}
        return _leaf(keyword, value, schema, place)

    def _tighten(self, found: dict[str, Any], place: _Place) -> None:
        """Check of a format what its library's pattern leaves open."""
        parts: list[dict[str, Any]] = [{"pattern": pattern} for pattern in FORMAT_PATTERNS.get(found["format"], [])]
        if found["format"] in FORMAT_LENGTHS:
            parts.append({"maxLength": FORMAT_LENGTHS[found["format"]]})
        self.paths.update((id(part), place.path) for part in parts)
        if parts:
            found["allOf"] = [*found.get("allOf", []), *parts]

    def _old_items(self, keyword: str, value: Any, place: _Place) -> dict[str, Any]:
        """``items`` as a list is what ``prefixItems`` is today, and ``additionalItems`` what ``items`` is."""
        if keyword == "additionalItems":
            return {"items": self.node(value, place.at(keyword))}
        return {"prefixItems": [self.node(one, place.at(keyword, i)) for i, one in enumerate(value)]}

    def _reference(self, ref: Any, place: _Place) -> str:
        """The name under ``$defs`` of what ``ref`` leads to."""
        if not isinstance(ref, str):
            raise place.fault("$ref", "must be a string.")
        if not ref.startswith("#"):
            raise place.fault("$ref", "leads out of the schema: only references that begin with # are read.")
        found = self._pointed(ref, place) if ref == "#" or ref.startswith("#/") else _anchored(place, ref[1:])
        if found is None:
            raise place.fault("$ref", "leads nowhere.")
        target, there = found
        if id(target) not in self._names:
            self._names[id(target)] = f"d{len(self._names)}"
            self._waiting.append((self._names[id(target)], target, there))
        return self._names[id(target)]

    def _pointed(self, ref: str, place: _Place) -> tuple[Any, _Place] | None:
        """The node a pointer leads to, its path, and the resource it stands in."""
        node, path = place.base, place.home
        base, home = node, path
        for step in ref[1:].split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node, path = node[key], (*path, key)
            elif isinstance(node, list) and key.isascii() and key.isdigit() and int(key) < len(node):
                node, path = node[int(key)], (*path, int(key))
            else:
                return None
            base, home = (node, path) if _names_resource(node) else (base, home)
        return node, _Place(path, base, home)


def _names_resource(node: Any) -> bool:
    """Whether ``#`` means this object inside it."""
    named = node.get("$id") if isinstance(node, dict) else None
    return isinstance(named, str) and not named.startswith("#")


def _anchored(place: _Place, name: str) -> tuple[Any, _Place] | None:
    """The object of a resource that carries the anchor, and where it stands."""
    stack: list[tuple[Any, tuple[str | int, ...]]] = [(place.base, place.home)]
    while stack:
        node, path = stack.pop()
        if isinstance(node, dict):
            if node.get("$anchor") == name or node.get("$id") == f"#{name}":
                return node, _Place(path, place.base, place.home)
            inside = [(value, (*path, key)) for key, value in node.items() if key not in ("enum", "const")]
            stack += [entry for entry in inside if not _names_resource(entry[0])]
        elif isinstance(node, list):
            stack += [(value, (*path, i)) for i, value in enumerate(node) if not _names_resource(value)]
    return None


def _binds(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword that is not enforced would rule anything out here."""
    match keyword:
        case "uniqueItems":
            return value is not False
        case "if":
            return "then" in schema or "else" in schema
        case "then" | "else":
            return "if" in schema
        case "minContains" | "maxContains":
            return "contains" in schema
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return bool(value != {})
        case "propertyNames" | "unevaluatedItems" | "unevaluatedProperties":
            return value not in (True, {})
        case "not":
            return value is not False
    return True


def _leaf(keyword: str, value: Any, schema: dict[str, Any], place: _Place) -> dict[str, Any]:
    """A keyword without schemas inside; what is none of ours is an annotation."""
    match keyword:
        case "type":
            return {"type": _types(value, place)}
        case "const":
            return {"const": _exact(value, keyword, place)}
        case "enum":
            if not isinstance(value, list) or not value:
                raise place.fault("enum", "must be a list of at least one value.")
            return {"enum": [_exact(one, keyword, place) for one in value]}
        case "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise place.fault("required", "must be a list of names.")
            return {"required": value}
        case "pattern":
            if not isinstance(value, str):
                raise place.fault("pattern", "must be a string.")
            return {"pattern": _blanks_as_ecma(value)}
        case "format":
            return _format(value, schema, place)
    if keyword in COUNTS:
        return _count(keyword, value, schema, place)
    if keyword in LIMITS:
        flag = isinstance(value, bool) and keyword.startswith("exclusive")
        if not flag and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise place.fault(keyword, "must be a number.")
        return {keyword: value if flag else _exact(value, keyword, place)}
    return {}


_ESCAPE = re.compile(r"\\.|\[|\]", re.DOTALL)
_BLANK = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"


def _blanks_as_ecma(pattern: str) -> str:
    r"""A pattern with \s and \S as JSON Schema's dialect means them: the library's own leave one blank out."""
    inside = False

    def written(found: re.Match[str]) -> str:
        nonlocal inside
        inside = {"[": True, "]": False}.get(found[0], inside)
        if found[0] == r"\s":
            return _BLANK if inside else f"[{_BLANK}]"
        return f"[^{_BLANK}]" if found[0] == r"\S" else found[0]

    return _ESCAPE.sub(written, pattern)


def _types(value: Any, place: _Place) -> Any:
    names = listed(value)
    if not isinstance(names, list) or not names or not all(name in TYPES for name in names):
        raise place.fault("type", f"must be one or more of {', '.join(TYPES)}.")
    return value


def _exact(value: Any, keyword: str, place: _Place) -> Any:
    """``value``, if no number in it is too large to be told from its neighbours."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict | list):
            stack += node.values() if isinstance(node, dict) else node
        elif isinstance(node, int | float) and not isinstance(node, bool) and not -EXACT <= node <= EXACT:
            raise place.fault(keyword, "holds a number beyond 2^53, which cannot be checked exactly.")
    return value


def _format(value: Any, schema: dict[str, Any], place: _Place) -> dict[str, Any]:
    types = schema.get("type")
    if types is not None and types != "string" and "string" not in types and value in NUMBER_FORMATS:
        return {}
    if not isinstance(value, str) or value not in FORMATS:
        raise place.fault("format", f"is not one of those enforced: {', '.join(FORMATS)}.")
    return {"format": value}


def _count(keyword: str, value: Any, schema: dict[str, Any], place: _Place) -> dict[str, Any]:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(whole, int) or isinstance(whole, bool) or whole < 0:
        raise place.fault(keyword, "must be an integer from 0.")
    if keyword == "minProperties":
        required = schema.get("required")
        named = len(dict.fromkeys(required)) if isinstance(required, list) else 0
        if whole <= named:
            return {}
        if whole > 1:  # a name may come twice, and counts once: the grammar could not tell
            raise place.fault(keyword, "over 1 is supported up to the number of required properties only.")
    return {keyword: whole}
