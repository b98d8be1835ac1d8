"""Which part of a schema a compiler refused, found by compiling parts of it: what it says itself names no place.

Follows the parts that are refused on their own as deep as they go, then looks for the keyword without which the last
one is taken. ``refused(schema)`` compiles; it is called a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stages.jsonschema import Fault, Read
from stages.jsonschema_close import DEFS, Schema
from stages.keywords import MANY, NAMED, ONE

TRIALS = 400
"""Parts compiled at most, beside the keywords of the last one."""

REGEX = "it is not valid, or has look-around, back-references or anchors inside."
_WHY = {
    "pattern": f"is not supported: {REGEX}",
    "patternProperties": "is not supported: a pattern is not valid, or two of them fit the same name.",
    "oneOf": "is not supported: it is not plain that no value fits two of its options.",
    "allOf": "is not supported: its parts cannot be joined.",
    "minProperties": "is not supported beside optional properties.",
    "maxProperties": "is not supported beside optional properties.",
    "multipleOf": "is not supported with this value or these limits.",
}


def at_fault(read: Read, refused: Callable[[Schema], bool]) -> Fault:
    """The keyword at fault, as near as compiling parts can tell."""
    node = _deepest(read, refused)
    path = read.paths.get(id(node), ())
    if isinstance(node, dict):
        for keyword in sorted((word for word in node if word != "type"), key=lambda word: word not in _WHY):
            rest: Schema = {word: value for word, value in node.items() if word != keyword}
            if not refused(read.alone(rest)):
                why = _WHY.get(keyword, "cannot be met, or not beside the others there.")
                return Fault(keyword, (*path, keyword), why)
    return Fault("", path, "no value fits it, or it is too complex.")


def _deepest(read: Read, refused: Callable[[Schema], bool]) -> Schema:
    node, followed, trials = read.schema, [id(read.schema)], TRIALS
    while True:
        inner = [one for one in _inside(node, read) if isinstance(one, dict) and id(one) not in followed]
        trials -= len(inner)
        found = next((one for one in inner if refused(read.alone(one))), None) if trials >= 0 else None
        if found is None:
            return node
        node = found
        followed.append(id(node))


def _inside(node: Schema, read: Read) -> list[Schema]:
    """The schemas directly inside one, and what it refers to."""
    found: list[Any] = []
    for keyword, value in node.items() if isinstance(node, dict) else ():
        if keyword == "$ref":
            found.append(node)
        elif keyword in ONE:
            found.append(value)
        elif keyword in MANY:
            found += value
        elif keyword in NAMED:
            found += value.values()
    return [read.defs[one["$ref"].removeprefix(DEFS)] if _refers(one) else one for one in found]


def _refers(node: Schema) -> bool:
    """Whether it leads to another schema, which is where a fault would be."""
    return isinstance(node, dict) and "$ref" in node
