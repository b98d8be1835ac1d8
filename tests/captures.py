"""Bodies that real clients sent, from the data folder; where it is absent the tests that need it skip and say so."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DATA = Path(os.environ.get("TANDEM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


class Sent(NamedTuple):
    """One captured request with a JSON body. ``route``: chat, completions, or "" for one of another route."""

    route: str
    file: str
    line: int
    path: str
    body: dict[str, Any]
    headers: dict[str, str]


def needed(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: set TANDEM_DATA to the data folder")
    return path


@cache
def sent() -> tuple[Sent, ...]:
    """Every captured request with a JSON object as its body, with the file and the line it stands in, from 0."""
    found = []
    for file in sorted(needed("captures").rglob("*.jsonl")):
        for line, text in enumerate(file.read_text().splitlines()):
            entry = json.loads(text)
            path, body = entry.get("path", ""), entry.get("body")
            if isinstance(body, dict) and "_raw" not in body:
                route = ROUTES.get(path, "")
                found.append(Sent(route, file.name, line, path, body, dict(entry["headers"])))
    return tuple(found)


@cache
def captured() -> tuple[tuple[str, str, Any], ...]:
    """Route, file and body of every captured chat and completions request."""
    found = []
    for file in sorted(needed("captures").rglob("*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            body = entry.get("body")
            if entry.get("path") in ROUTES and isinstance(body, dict) and "_raw" not in body:
                found.append((ROUTES[entry["path"]], file.name, body))
    return tuple(found)
