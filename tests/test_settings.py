"""Flags: one list, three ways in."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from pipeline.settings import FLAGS, Settings, failpoints, policy, settings_options


@click.command()
@settings_options
def show(**flags: object) -> None:
    click.echo(msgspec.json.encode(msgspec.convert(flags, Settings)))


def given(*args: str, env: dict[str, str] | None = None) -> Settings:
    result = CliRunner().invoke(show, list(args), env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.output, type=Settings)


@pytest.mark.parametrize("content", [b"port =", b"\xff = 1"])
def test_a_broken_file_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    """P4: a settings file that is no TOML, or a port that is none, is a sentence and no traceback."""
    file = tmp_path / "tandem.toml"
    file.write_bytes(content)
    for args in (["--settings", str(file)], ["--port", "65536"]):
        result = CliRunner().invoke(show, args)
        assert result.exit_code == 2
        assert "Error: Invalid value" in result.output


def test_every_setting_is_a_flag() -> None:
    """I1: every setting has one flag, with a feature row; defaults are the settings' own."""
    assert [f.name for f in FLAGS] == list(Settings.__struct_fields__)
    assert given() == Settings()


def test_flag_environment_and_file(tmp_path: Path) -> None:
    """P4: a flag beats the environment, which beats the settings file."""
    file = tmp_path / "tandem.toml"
    file.write_text('max-queue = 3\nqueue-timeout = 5.5\napi-key = ["a", "b"]\n')
    settings = given("--settings", str(file), "--max-queue", "4")
    assert (settings.max_queue, settings.queue_timeout, settings.api_key) == (4, 5.5, ("a", "b"))
    assert given(env={"TANDEM_MAX_QUEUE": "7"}).max_queue == 7
    assert given("--settings", str(file), env={"TANDEM_MAX_QUEUE": "7"}).max_queue == 7
    assert policy(settings).max_queue == 4


@pytest.mark.parametrize(
    ("args", "word"),
    [(["--max-queue", "-1"], "--max-queue"), (["--device", "tpu"], "--device"), (["--port", "x"], "--port")],
)
def test_a_wrong_flag_is_named(args: list[str], word: str) -> None:
    """I1: a wrong value names its flag."""
    result = CliRunner().invoke(show, args)
    assert result.exit_code == 2
    assert word in result.output


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    """I1: a key the file should not have is named."""
    file = tmp_path / "t.toml"
    file.write_text("max-que = 3\n")
    result = CliRunner().invoke(show, ["--settings", str(file)])
    assert result.exit_code == 2
    assert "max-que" in result.output


def test_keys_and_paths_stay_out_of_what_is_shown() -> None:
    """P1: the trace's header and the Dev view hold no key and no path."""
    shown = Settings(api_key=("secret",), trace="/tmp/t", model="/home/me/m.gguf").public()
    assert not {"api_key", "api_key_file", "trace", "model", "script"} & set(shown)
    assert "secret" not in str(shown)
    assert "/home" not in str(shown)


def test_failpoints() -> None:
    """I11: the hidden flag for tests."""
    assert failpoints("a=1,b=22") == {"a": 1, "b": 22}
    with pytest.raises(ValueError):
        failpoints("a")
