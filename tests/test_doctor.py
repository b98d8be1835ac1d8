"""engine/doctor.py and `tandem doctor`: what runs here, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from engine import doctor
from engine.native.build import Native, cpu_flags, instructions
from engine.weights.checkpoint import open_checkpoint
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


def test_the_window_is_told_by_what_it_takes(tmp_path: Path) -> None:
    """I8: the chosen window, half and double of it, before a weight is read; what cannot be served has none."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": "F16"})
    native = open_checkpoint(path).config.window
    asked = doctor.Asked(max_len=native // 2, parallel=2, side_max_len=8)
    titles, *told = doctor.windows(path, asked)
    assert [label for label, _ in told] == [str(native // 2), str(native // 4), str(native)]
    assert titles[0] == "window" and all(words.endswith("fits") for _, words in told)
    assert [label for label, _ in doctor.windows(path, doctor.Asked())][1:] == [
        str(native), str(native // 2), str(2 * native)
    ]  # fmt: skip
    long = doctor.windows(path, doctor.Asked(max_len=native + 1))[1]
    assert long[0] == str(native + 1) and long[1].endswith("longer than the model's window")
    path.write_bytes(b"GGUF")
    assert doctor.windows(path, doctor.Asked()) == []


def test_the_window_is_told_under_the_ceiling_that_is_asked_for(tmp_path: Path) -> None:
    """I8, J1: what would be cut or refused at a start is cut or refused here."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": "F16"})
    native = open_checkpoint(path).config.window
    told = doctor.windows(path, doctor.Asked(mem_ceiling=1))[1]
    assert told[0] == str(native) and told[1].endswith("does not fit")


def test_the_commands_flags_choose_the_window(tmp_path: Path) -> None:
    """I8: as those of a start do."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": "F16"})
    given = "--max-len 48 --parallel 2 --side-max-len 9 --mem-ceiling-gib 1000"
    flags = ["--model", str(path), *given.split()]
    result = CliRunner().invoke(command.main, ["doctor", *flags])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()][-4:] == ["window", "48", "24", "96"]
