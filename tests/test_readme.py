"""The README says what is true: its drawing, its commands, its flags."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.settings import FLAGS
from pipeline.table import drawing

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FIRST_SCREEN = "\n".join(README.splitlines()[:40])


def test_the_drawing_is_the_tables() -> None:
    """R1: the README's drawing is printed by code."""
    assert f"```\n{drawing()}\n```" in FIRST_SCREEN


def test_the_first_screen_shows_what_a_stranger_needs() -> None:
    """R1: what it is, both commands, one curl, three lines of the openai package."""
    for words in ("make serve", "make test", "curl ", "from openai import OpenAI", "For people who run local models"):
        assert words in FIRST_SCREEN, words


def test_every_make_target_exists() -> None:
    """R1: every `make …` the README names is in the Makefile, and CI calls the README's test command."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make check" in (ROOT / ".ci" / "run").read_text()


def test_every_flag_it_names_exists() -> None:
    """P4: a flag the README names is a flag of the command."""
    known = {"--" + flag.name.replace("_", "-") for flag in FLAGS} | {"--settings", "--help", "--extra-index-url"}
    assert set(re.findall(r"--[a-z][a-z-]+", README)) <= known


def test_every_dependency_has_its_line() -> None:
    """N1: each pinned package is justified in a line of docs/dependencies.md."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["test"]]
    pins.append(project["tool"]["tandem"]["embedded"])
    text = (ROOT / "docs" / "dependencies.md").read_text()
    for pin in pins:
        name, version = pin.split("==")
        assert re.search(rf"\b{name}\b", text), name
        assert version, pin
