"""Shared fixtures: Hypothesis profiles and where the data lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of traces, captures and suites; tests that need it skip where it is absent."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(os.environ.get("TANDEM_DATA") or root.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no data folder: set TANDEM_DATA")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a test recorded as its ``summary`` stands at the end of the run, whether it passed or not."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "summary":
                    terminalreporter.write_line(str(value))
