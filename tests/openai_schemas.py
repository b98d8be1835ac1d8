"""OpenAI's schemas as far as answers need them: types, required keys, enums, references. Skips without the data."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

OURS = {"timeout", "error"}
"""Finish words that OpenAI's enum lacks (F5)."""
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@cache
def _schemas() -> dict[str, Any]:
    data = Path(os.environ.get("TANDEM_DATA", Path(__file__).parents[1] / "../shared/data"))
    path = data / "openai/chat_completions_schemas.json"
    if not path.exists():
        pytest.skip("OpenAI's schemas are not here: set TANDEM_DATA")
    schemas: dict[str, Any] = json.loads(path.read_text())["$defs"]
    return schemas


def check(value: Any, name: str) -> None:
    """Assert that a value is as the schema of that name says."""
    fault = _fault(value, _schemas()[name], name)
    assert fault is None, fault


def _fault(value: Any, schema: dict[str, Any], where: str) -> str | None:
    if "$ref" in schema:
        return _fault(value, _schemas()[schema["$ref"].rpartition("/")[2]], where)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            faults = [_fault(value, option, where) for option in schema[word]]
            return None if None in faults else faults[0]
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return f"{where} is no {kind}"
    if "enum" in schema and value not in schema["enum"] and value not in OURS:
        return f"{where} is {value!r}"
    if isinstance(value, dict):
        missing = [key for key in schema.get("required", ()) if key not in value]
        if missing:
            return f"{where} lacks {missing}"
        parts = [(key, value[key], part) for key, part in schema.get("properties", {}).items() if key in value]
    elif isinstance(value, list):
        parts = [(str(i), item, schema.get("items", {})) for i, item in enumerate(value)]
    else:
        parts = []
    return next((fault for key, item, part in parts if (fault := _fault(item, part, f"{where}.{key}"))), None)
