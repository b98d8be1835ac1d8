"""The `tandem` command: what it says when something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline import __main__ as command
from pipeline.table import TABLES


def said(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(command.main, list(args))
    return result.exit_code, result.output


def test_no_model_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: without --model and without the embedded one, the server says in one sentence what to do."""
    monkeypatch.setattr(command, "embedded_model", lambda: None)
    code, text = said("serve")
    assert code == 1
    assert "--model" in text
    assert "make model" in text
    assert text.count("\n") <= 2


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    """N1: a path without a checkpoint is named."""
    code, text = said("serve", "--model", str(tmp_path / "none.gguf"))
    assert code == 1
    assert "none.gguf" in text


def test_the_table_command_prints_every_row() -> None:
    """R1: `tandem table` prints the three tables."""
    code, text = said("table")
    assert code == 0
    for rows in TABLES.values():
        for row in rows:
            assert f" {row.name}: {row.says}" in text


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    """R6: `tandem replay` names what is wrong with a file."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"t":1}\n')
    code, text = said("replay", str(path))
    assert code == 1
    assert "no header" in text


def test_failpoints_are_checked_at_the_start() -> None:
    """I11: a misspelt hidden flag is named before anything starts."""
    code, text = said("serve", "--failpoints", "x")
    assert code == 2
    assert "--failpoints" in text
