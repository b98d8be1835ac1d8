"""What this machine gives a model, for people: ``python -m engine.doctor [MODEL]``, run by ``tandem doctor``.

Opens what a start would open, the weights excepted, and says what it found; it never fails for what it finds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from engine import memory
from engine.load import processors
from engine.models import registry
from engine.native import build
from engine.weights.checkpoint import Checkpoint, open_checkpoint
from engine.weights.errors import CheckpointError

_TOLD = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")

Line = tuple[str, str]


def lines(model: Path | None) -> list[Line]:
    """The report, a pair of label and words a line. ``model``: what would be served, None when there is nothing."""
    cpu = build.cpu_flags()
    native = build.opened()
    return [
        ("device", device()),
        ("processors", str(processors())),
        ("cpu flags", " ".join(flag for flag in _TOLD if flag in cpu) or "none of those that kernels here use"),
        ("compiler", compiler()),
        ("path", path(native, build.flags())),
        ("memory", f"{memory.gib(memory.free('cpu'))} free"),
        ("cache", cache()),
        ("model", "none: give one with --model, or run `make model`" if model is None else checkpoint(model)),
    ]


def device() -> str:
    """What ``--device auto`` takes."""
    if not torch.cuda.is_available():
        return "cpu (torch sees no CUDA device)"
    return f"cuda ({torch.cuda.get_device_name()}, {memory.gib(memory.free('cuda'))} free)"


def compiler() -> str:
    """The compiler that a build takes, by the name it gives itself."""
    found = next(build.compilers(os.environ), None)
    return found.version.splitlines()[0] if found else "none"


def path(native: build.Native, words: str) -> str:
    """How steps are computed on the CPU, and why so."""
    return f"native {words}" if native.library is not None else f"torch, not the native step: {native.why}"


def cache() -> str:
    """Where the built step and packed weights are kept, and how much that is."""
    home = build.cache_home(os.environ)
    if home is None or not home.exists():
        return "nothing kept yet" if home else "no home folder: nothing is kept"
    try:
        size = sum(file.stat().st_size for folder in ("native", "packed") for file in (home / folder).glob("*.*"))
    except OSError:
        return f"{home} (it cannot be read)"
    return f"{home} ({memory.gib(size)})"


def checkpoint(model: Path) -> str:
    """What the checkpoint says of itself, or what is wrong with it."""
    try:
        found = open_checkpoint(model)
        registry.builder(found.architecture)
        return described(found)
    except CheckpointError as error:
        return str(error)


def described(found: Checkpoint) -> str:
    """Name, architecture, size and window."""
    return f"{found.name}: {found.architecture}, {memory.gib(found.file_bytes)}, window {found.config.window} tokens"


def main() -> None:
    """Print the report."""
    for label, words in lines(Path(sys.argv[1]) if len(sys.argv) > 1 else None):
        sys.stdout.write(f"{label:<11} {words}\n")


if __name__ == "__main__":
    main()
