"""engine/weights/embedded.py: found, not imported."""

from __future__ import annotations

import sys

import pytest

from engine.weights import embedded


def test_found_without_importing_the_package() -> None:
    path = embedded.embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    assert path.suffix == ".gguf" and path.is_file()
    assert embedded.PACKAGE not in sys.modules


def test_none_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_here")
    assert embedded.embedded_model() is None
