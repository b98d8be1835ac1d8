"""Bodies that real clients sent, from the data folder; where it is absent the tests that need it skip and say so."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("TANDEM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


def needed(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: set TANDEM_DATA to the data folder")
    return path


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
