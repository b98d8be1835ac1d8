"""A schema once it is read: what can never be finished becomes ``false``, ``oneOf`` becomes ``anyOf`` where it may.

Works on the form that ``jsonschema`` makes: references lead to ``$defs`` and nothing else is left to resolve.
"""

from __future__ import annotations

from typing import Any

from stages.keywords import MANY, NAMED, ONE, TYPES

DEFS = "#/$defs/"
HOPS = 8
"""Steps taken to see that two options of ``oneOf`` rule each other out."""
MOST_OPTIONS = 64

Schema = dict[str, Any] | bool
Paths = dict[int, tuple[str | int, ...]]
"""Where each object of a schema stood in the client's, by ``id``."""


def finishable(defs: dict[str, Schema]) -> dict[str, Schema]:
    """The definitions for which some document ends: the least set that is closed under what each needs."""
    known: dict[str, Schema] = {}
    grown = True
    while grown:
        names = frozenset(known)
        found = {name: node for name, node in defs.items() if name in names or can_finish(node, names)}
        grown, known = len(found) > len(known), found
    return known


def can_finish(node: Schema, known: frozenset[str]) -> bool:
    """Whether some document may fit ``node``, as far as recursion goes, if ``known`` definitions can be finished."""
    if isinstance(node, bool):
        return node
    if "$ref" in node and node["$ref"].removeprefix(DEFS) not in known:
        return False
    if not all(can_finish(one, known) for one in node.get("allOf", [])):
        return False
    for word in ("anyOf", "oneOf"):
        if word in node and not any(can_finish(one, known) for one in node[word]):
            return False
    named = node.get("type", TYPES)
    return any(_type_can_finish(one, node, known) for one in listed(named))


def _type_can_finish(name: str, node: dict[str, Any], known: frozenset[str]) -> bool:
    if name == "object":
        properties, others = node.get("properties", {}), node.get("additionalProperties", True)
        others = True if "patternProperties" in node else others  # a pattern may speak of the name instead
        needed = [properties.get(one, others) for one in node.get("required", [])]
        return all(can_finish(one, known) for one in needed)
    if name == "array":
        first, rest, least = node.get("prefixItems", []), node.get("items", True), node.get("minItems", 0)
        return all(can_finish(one, known) for one in first[:least]) and (least <= len(first) or can_finish(rest, known))
    return True


def resolved(node: Any, defs: dict[str, Schema], paths: Paths) -> Any:
    """``node`` with ``false`` where a reference leads to what cannot be finished, and ``oneOf`` as ``anyOf`` where no
    document fits two of its options."""
    if isinstance(node, bool):
        return node
    if "$ref" in node and node["$ref"].removeprefix(DEFS) not in defs:
        return False
    found: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword == "oneOf" and "anyOf" not in node and _all_apart(value, defs):
            found["anyOf"] = [resolved(one, defs, paths) for one in value]
        elif keyword in ONE:
            found[keyword] = resolved(value, defs, paths)
        elif keyword in MANY:
            found[keyword] = [resolved(one, defs, paths) for one in value]
        elif keyword in NAMED:
            found[keyword] = {name: resolved(one, defs, paths) for name, one in value.items()}
        else:
            found[keyword] = value
    paths[id(found)] = paths[id(node)]
    return found


def _all_apart(options: list[Schema], defs: dict[str, Schema]) -> bool:
    if len(options) > MOST_OPTIONS:
        return False
    pairs = [(a, b) for i, a in enumerate(options) for b in options[i + 1 :]]
    return all(_apart(a, b, defs, HOPS) for a, b in pairs)


def _apart(a: Schema, b: Schema, defs: dict[str, Schema], hops: int) -> bool:
    """Whether it is plain that no value fits both: other types, other constants, or such a property both require."""
    a, b = _direct(a, defs), _direct(b, defs)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is False or b is False
    if not hops:
        return False
    if (ours := _constants(a)) is not None and (others := _constants(b)) is not None:
        return not any(one in others for one in ours)
    theirs = _kinds(b, defs, hops)
    shared = [kind for kind in _kinds(a, defs, hops) if kind in theirs]
    if shared != ["object"]:
        return not shared
    left, right = a.get("properties", {}), b.get("properties", {})
    both = [name for name in a.get("required", []) if name in b.get("required", []) and name in left and name in right]
    return any(_apart(left[name], right[name], defs, hops - 1) for name in both)


def _direct(node: Schema, defs: dict[str, Schema]) -> Schema:
    """What a schema that is only a reference leads to."""
    for _ in range(HOPS):
        if isinstance(node, bool) or list(node) != ["$ref"] or node["$ref"].removeprefix(DEFS) not in defs:
            break
        node = defs[node["$ref"].removeprefix(DEFS)]
    return node


def _constants(node: dict[str, Any]) -> list[Any] | None:
    return [node["const"]] if "const" in node else node.get("enum")


def _kinds(node: Schema, defs: dict[str, Schema], hops: int) -> list[str]:
    """The types a value that fits may have, integers among the numbers."""
    node = _direct(node, defs)
    constants = None if isinstance(node, bool) else _constants(node)
    if constants is not None:
        return list(dict.fromkeys(_kind(one) for one in constants))
    named = TYPES if isinstance(node, bool) else node.get("type", TYPES)
    kinds = list(dict.fromkeys("number" if name == "integer" else name for name in listed(named)))
    for word in ("anyOf", "oneOf"):
        if hops and isinstance(node, dict) and word in node:
            options = [name for one in node[word] for name in _kinds(one, defs, hops - 1)]
            kinds = [name for name in kinds if name in options]
    return kinds


def listed(value: Any) -> Any:
    """The types of ``type``, which may be one word."""
    return [value] if isinstance(value, str) else value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")
