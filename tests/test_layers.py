"""Imports run one way, and the pure rooms stay pure: read from the source, so nobody can forget."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE = ("time", "random", "os", "asyncio", "threading", "secrets", "socket", "uuid")
CORE = (
    "core",
    "firing",
    "forecast",
    "waiting",
    "offers",
    "gate",
    "lane",
    "engine_life",
    "table",
    "machine",
    "states",
    "request",
    "events",
    "effects",
    "outcomes",
    "journal",
    "summary",
)

WORKERS = {"judging.py": ("engine.grammar",), "pools.py": ("engine.pipe",)}
"""What a worker process of the server's own runs, or talks by."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Full names of everything a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: no relative imports"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def outside(path: Path, allowed: tuple[str, ...]) -> list[str]:
    """Imports of this project's packages that are not allowed here."""
    ours = [name for name in imports(path) if name.split(".")[0] in ("pipeline", "stages", "engine")]
    return [name for name in ours if not any(name == a or name.startswith(a + ".") for a in allowed)]


def test_imports_run_one_way() -> None:
    """R4: pipeline → stages → engine/protocol; the engine imports neither, and is reached by messages only."""
    for path in sources("engine"):
        assert not outside(path, ("engine",)), path
    for path in sources("stages"):
        assert not outside(path, ("stages", "engine.protocol")), path
    for path in sources("pipeline"):
        allowed = ("pipeline", "stages", "engine.protocol", "engine.link", "engine.weights.embedded")
        assert not outside(path, (*allowed, "engine")), path
        assert not outside(path, (*allowed, *WORKERS.get(path.name, ()))), path


def test_only_http_knows_quart_and_only_the_machine_transitions() -> None:
    """R4: one room each for the web framework and for the machine's library."""
    for package in ("pipeline", "stages", "engine"):
        for path in sources(package):
            tops = {name.split(".")[0] for name in imports(path)}
            if "http" not in path.parts:
                assert not tops & {"quart", "hypercorn"}, path
            if path.name != "machine.py":
                assert "transitions" not in tops, path
            if package != "engine":
                assert "torch" not in tops or path.name == "recording.py", path


@pytest.mark.parametrize(
    "path", [ROOT / "pipeline" / f"{n}.py" for n in CORE] + sources("stages"), ids=lambda p: p.name
)
def test_core_and_stages_are_pure(path: Path) -> None:
    """R3: no clock, chance, environment, thread or loop in core and stages, and no iteration over a set."""
    assert not [name for name in imports(path) if name.split(".")[0] in PURE]
    for node in ast.walk(ast.parse(path.read_text())):
        iterated = node.iter if isinstance(node, ast.For | ast.comprehension) else None
        assert not isinstance(iterated, ast.Set | ast.SetComp), f"{path.name} iterates a set"
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
            assert iterated.func.id not in ("set", "frozenset"), f"{path.name} iterates a set"


def test_no_rooms_without_a_name() -> None:
    """R1: no `utils`, `common`, `helpers` or `base`: a file is named by the word a user would use."""
    for package in ("pipeline", "stages", "engine"):
        for path in sources(package):
            assert path.stem not in ("utils", "util", "common", "helpers", "helper", "base", "misc"), path
