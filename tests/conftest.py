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
