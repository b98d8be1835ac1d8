"""What memory there is, what is taken, and whether a window fits. Sizes in bytes.

On the CPU the numbers are the process's and the machine's (``/proc``, and the control group's limit where there is
one); on ``cuda`` they are the allocator's and the device's.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import torch

_LARGE = 1 << 60  # control groups write a huge number, or "max", for no limit
_KIB = 1024


class DoesNotFit(Exception):
    """The window that was asked for is too long. Its text is a sentence with the sizes."""


def resident() -> int:
    """Bytes of memory this process holds now."""
    return _status("VmRSS") or peak()


def peak() -> int:
    """The most this process ever held."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def reserved(device: str) -> int:
    """What is taken from the machine: the process's memory, or what the device's allocator holds."""
    return int(torch.cuda.memory_reserved()) if device == "cuda" else resident()


def high_water(device: str) -> int:
    """The most ``reserved`` ever was."""
    return int(torch.cuda.max_memory_reserved()) if device == "cuda" else peak()


def free(device: str) -> int:
    """What can still be taken."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return min([_available(), *_group_room()])


def fit(asked: int, native: int, per_row: int, room: int) -> tuple[int, str]:
    """The window in rows and, where the checkpoint's had to be cut, a sentence that says so ("" otherwise).

    ``asked`` is ``--max-len`` (0: the ``native`` window of the checkpoint), ``per_row`` what a row of KV takes over all
    slots, ``room`` what KV may take. Raises ``DoesNotFit`` for an asked one that is too long, or when nothing fits.
    """
    if asked > native:
        raise DoesNotFit(f"--max-len {asked} is longer than the model's window of {native} tokens.")
    rows = asked or native
    if rows * per_row <= room:
        return rows, ""
    most = max(room, 0) // per_row // 64 * 64
    sizes = f"needs {gib(rows * per_row)} of memory for its KV rows, {gib(room)} are free"
    if asked:
        raise DoesNotFit(f"--max-len {asked} {sizes}: at most {most} tokens fit.")
    if most == 0:
        raise DoesNotFit(f"A window of {rows} tokens {sizes}: not even 64 tokens fit.")
    return most, f"The model's window of {rows} tokens {sizes}: it is cut to {most} tokens."


def gib(size: int) -> str:
    """A size for people."""
    return f"{max(size, 0) / (1 << 30):.2f} GiB"


def _status(field: str) -> int:
    return _kib_line(Path("/proc/self/status"), field)


def _available() -> int:
    return _kib_line(Path("/proc/meminfo"), "MemAvailable") or _LARGE


def _kib_line(path: Path, field: str) -> int:
    """The value of ``Field:  123 kB`` in bytes, 0 where there is none."""
    if not path.exists():
        return 0
    for line in path.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * _KIB
    return 0


def _group_room(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What the control group still allows, versions 2 and 1: the files stand so inside a container.

    Pages of files that were read and are not in use (a model's, once it is loaded) count as usage there; the kernel
    takes them back when memory is asked for, so they are free.
    """
    old = root / "memory"
    for limit, usage, field in (
        (root / "memory.max", root / "memory.current", "inactive_file"),
        (old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if limit.exists() and usage.exists():
            most = limit.read_text().strip()
            if most.isdigit() and int(most) < _LARGE:
                yield int(most) - int(usage.read_text()) + _plain_line(limit.parent / "memory.stat", field)


def _plain_line(path: Path, field: str) -> int:
    """The value of ``field 123``, 0 where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(field + " ")), 0)
