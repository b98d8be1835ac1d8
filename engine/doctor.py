"""What this machine gives a model, for people: run by ``tandem doctor``, the flags of a start as numbers.

    python -m engine.doctor [MODEL [MAX_LEN PARALLEL SIDE_MAX_LEN MEM_CEILING]]

Opens what a start would open, the weights excepted, and says what it found; it never fails for what it finds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from engine import memory, sizes
from engine.load import marks_bytes, processors
from engine.models import cache_bytes, registry
from engine.native import build
from engine.weights.checkpoint import Checkpoint, open_checkpoint
from engine.weights.errors import CheckpointError

_TOLD = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")

Line = tuple[str, str]


class Asked(NamedTuple):
    """Flags that decide how long sequences are; ``max_len`` 0: as long as the checkpoint's and memory allow.

    ``mem_ceiling`` in bytes, 0: from the device.
    """

    max_len: int = 0
    parallel: int = 1
    side_max_len: int = 65_536
    mem_ceiling: int = 0


UNASKED = Asked()


def lines(model: Path | None, asked: Asked = UNASKED) -> list[Line]:
    """The report, a pair of label and words a line. ``model``: what would be served, None when there is nothing."""
    cpu = build.cpu_flags()
    native = build.opened()
    return [
        ("device", device()),
        ("processors", str(processors())),
        ("cpu flags", " ".join(flag for flag in _TOLD if flag in cpu) or "none of those that kernels here use"),
        ("compiler", compiler()),
        ("path", path(native, build.flags())),
        ("memory", room()),
        ("cache", cache()),
        ("model", "none: give one with --model, or run `make model`" if model is None else checkpoint(model)),
        *([] if model is None else windows(model, asked)),
    ]


def device() -> str:
    """What ``--device auto`` takes."""
    if not torch.cuda.is_available():
        return "cpu (torch sees no CUDA device)"
    return f"cuda ({torch.cuda.get_device_name()}, {memory.gib(memory.free('cuda'))} free)"


def room() -> str:
    """What is free, and what a start would take at most between requests where nobody says (J1)."""
    held = "cuda" if torch.cuda.is_available() else "cpu"
    ceiling = memory.gib(memory.ceiling_of(memory.whole(held)))
    return f"{memory.gib(memory.free('cpu'))} free; --mem-ceiling-gib is {ceiling} of {held} memory where not given"


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


def windows(model: Path, asked: Asked) -> list[Line]:
    """What the chosen window, half and double of it take and leave (row I8); nothing for what cannot be served.

    Weights are taken to be as large as their file.
    """
    try:
        found = open_checkpoint(model)
        registry.builder(found.architecture)
        native, state = found.config.window, cache_bytes.state(found.config)
    except CheckpointError:
        return []
    held = "cuda" if torch.cuda.is_available() else "cpu"
    bound = memory.ceiling_of(memory.whole(held), asked.mem_ceiling) - memory.reserved(held)
    machine = sizes.Machine(memory.free(held), bound)
    about = sizes.Model(found.file_bytes, cache_bytes.row(found.config), state, marks_bytes(state))
    sides = asked.parallel - 1, asked.side_max_len
    try:
        chosen, _ = memory.fit(asked.max_len, native, about.row, sizes.room(about, machine, asked.parallel), *sides)
    except memory.DoesNotFit:
        chosen = asked.max_len or native
    return sizes.table(sizes.around(about, chosen, asked.parallel, asked.side_max_len), machine, native)


def described(found: Checkpoint) -> str:
    """Name, architecture, size and window."""
    return f"{found.name}: {found.architecture}, {memory.gib(found.file_bytes)}, window {found.config.window} tokens"


def main() -> None:
    """Print the report."""
    model, *numbers = sys.argv[1:] or [""]
    for label, words in lines(Path(model) if model else None, Asked(*map(int, numbers))):
        sys.stdout.write(f"{label:<11} {words}\n")


if __name__ == "__main__":
    main()
