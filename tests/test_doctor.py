"""engine/doctor.py and `tandem doctor`: what runs here, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from engine import doctor
from engine.native.build import Native, cpu_flags, instructions
from pipeline import __main__ as command
from tests.checkpoints import write_gguf


def report(model: Path | None) -> dict[str, str]:
    return dict(doctor.lines(model))


def test_the_command_says_what_runs_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """N5: `tandem doctor` ends with 0 and tells device, processors, compiler, CPU, path, memory and model."""
    monkeypatch.setenv("TANDEM_NATIVE", "off")
    result = CliRunner().invoke(command.main, ["doctor", "--model", "/no/such.gguf"])
    assert result.exit_code == 0
    said = dict(line.split(maxsplit=1) for line in result.output.splitlines() if not line.startswith("cpu flags"))
    assert {"device", "processors", "compiler", "path", "memory", "cache", "model"} <= set(said)
    assert "TANDEM_NATIVE is off" in said["path"]
    assert said["path"].startswith("torch")
    assert "no model" in said["model"]
    assert int(said["processors"]) >= 1


def test_the_path_is_the_one_that_was_opened() -> None:
    """N5: the native step by its instructions, or torch with the reason."""
    assert doctor.path(Native(None, "There is no C++ compiler."), "avx2") == (
        "torch, not the native step: There is no C++ compiler."
    )
    told = report(None)["path"]
    words = instructions(cpu_flags())
    assert told == f"native {words}" if told.startswith("native") else told.startswith("torch, ")


def test_the_model_is_described_or_what_is_wrong_with_it(tmp_path: Path) -> None:
    """N5: the checkpoint by name, architecture, size and window; a damaged one by what to do."""
    words = report(write_gguf(tmp_path / "tiny.gguf", {"": "F16"}))["model"]
    assert words.startswith("tiny: llama") and "window" in words
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert "broken" in report(broken)["model"] or "download" in report(broken)["model"]
    assert "--model" in report(None)["model"]
