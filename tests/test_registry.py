"""engine/models/registry.py: the configuration picks the builder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from engine.models import registry
from engine.weights.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoints import build, write_gguf
from tests.test_folder import folder

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("llama", "smollm", "qwen", "mistral", "gemma", "phi")


def test_the_architecture_picks_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: a builder put into the table is used for its architecture, with nothing else changed."""
    made = []

    def spy(checkpoint: object, loader: object, **kwargs: object) -> str:
        made.append(kwargs)
        return "a model"

    monkeypatch.setitem(registry.BUILDERS, "newcomer", spy)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {}, arch="newcomer"))
    assert build(checkpoint, rows=64) == "a model"
    assert made[0]["rows"] == 64 and made[0]["exact"] is False


def test_an_unknown_architecture_is_named_with_those_known(tmp_path: Path) -> None:
    """N1: from both formats."""
    said = r"architecture mamba is not supported; supported are llama, mistral, qwen2, qwen3,"
    with pytest.raises(CheckpointError, match=said):
        build(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {}, arch="mamba")))
    with pytest.raises(CheckpointError, match=said):
        build(open_checkpoint(folder(tmp_path, model_type="mamba")))


def _compared(path: Path) -> list[str]:
    """Text that a file compares with or matches on."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare | ast.MatchValue):
            found += [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return found


def test_no_branch_on_a_models_name() -> None:
    """N1: no file of ours compares anything with the name of a model or its family, the registry included."""
    files = [path for room in ("engine", "pipeline", "stages") for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 10
    for path in files:
        # "llama3" is also the name of a way to scale rotary angles, whatever model uses it.
        names = [t for t in _compared(path) if t != "llama3" and any(f in t.lower() for f in FAMILIES)]
        assert not names, f"{path.relative_to(ROOT)} compares with {names}"
