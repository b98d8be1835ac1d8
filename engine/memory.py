"""What memory there is, what is taken, and whether a window fits. Sizes in bytes.

On the CPU the numbers are the process's and the machine's (``/proc``, and the control group's limit where there is
one); on ``cuda`` they are the allocator's and the device's.

============  ========================================================================================================
of a message  counts
============  ========================================================================================================
weights       matrices and vectors in the form they are kept in, a tied head once; not the table of rotary angles
kv            every slot's rows and both of its recurrent states, whether a run is in it or not
allocated     weights, kv, and what is parked, marked, kept or lent: copies of rows, checkpoints of states, logits after
              a prompt. What stands in two places counts once; what lies in another memory than the device's does not
reserved      the process's resident memory, interpreter and libraries among it; of a device what its allocator holds
peak          the most that was ever reserved
workspace     what the dearest step of a prefill takes beside what is allocated (:func:`of_prefill`). Some of it may be
              held already: the native step's own room stays, and an allocator gives back late
ceiling       what may be taken between requests; caches grow only below it
peak_limit    what may be taken during a prefill
slack         of an allocator's free blocks so many stay its own between requests
============  ========================================================================================================
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

_LARGE = 1 << 60  # control groups write a huge number, or "max", for no limit
_KIB = 1024
_SLACK = 2 << 30
_FIRST = (1, 64, 256)
_DOUBLED = 1024
_LEAST_SPARE = 256 << 20


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


def whole(device: str) -> int:
    """The device's memory; on the CPU what is free and what this process holds."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return free(device) + reserved(device)


def apart(device: str) -> bool:
    """Whether the device's memory is another than the machine's: what is copied to the machine takes none of it."""
    return device == "cuda" and not getattr(torch.cuda.get_device_properties(0), "is_integrated", 0)


def loose(device: str) -> int:
    """Free blocks that a device's allocator holds. What the CPU's could give back is not known beforehand: 0."""
    return max(0, int(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())) if device == "cuda" else 0


def empty(device: str) -> None:
    """Give an allocator's free blocks back to the driver or the system."""
    if device == "cuda":
        torch.cuda.empty_cache()
    else:
        trim()


def trim() -> None:
    """Hand memory that was freed back to the system: glibc keeps it otherwise, and it would count as ours."""
    if sys.platform == "linux":
        give = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give is not None:
            give(0)


def collect(device: str) -> None:
    """Collect what nobody uses, and empty the allocators."""
    gc.collect()
    empty(device)
    if device != "cpu":
        trim()


class Bounds(NamedTuple):
    """What may be taken between requests and during a prefill, and what free blocks may stay between requests."""

    ceiling: int
    peak: int
    slack: int


def ceiling_of(whole: int, asked: int = 0) -> int:
    """What may be taken between requests of so much memory: as ``asked``, else four fifths."""
    return asked or whole * 4 // 5


def bounds(whole: int, longest: int, ceiling: int = 0, peak: int = 0, slack: int = -1) -> Bounds:
    """As asked for; what is not asked for (0, of ``slack`` -1) from the ``whole`` memory.

    ``longest``: what the prefill of a whole window takes.
    """
    ceiling = ceiling_of(whole, ceiling)
    return Bounds(ceiling, peak or ceiling + longest, min(_SLACK, whole // 50) if slack < 0 else slack)


def room(free: int, left: int) -> int:
    """What rows may take of the ``free`` memory: steps need some of their own. ``left``: up to the ceiling."""
    return min(free - max(_LEAST_SPARE, free // 10), left)


def heights(window: int, of: Callable[[int], int]) -> list[tuple[int, int]]:
    """What prefills ``of`` 1, 64, 256, 1024 rows take, then doubling up to the window. Never falling."""
    rows = [*_FIRST, *(_DOUBLED << n for n in range(window.bit_length()))]
    told: list[tuple[int, int]] = []
    for count in [*(count for count in rows if count < window), window]:
        told.append((count, max(of(count), told[-1][1] if told else 0)))
    return told


def longest(window: int, room: int, of: Callable[[int], int]) -> int:
    """The most rows whose prefill takes at most ``room``, up to the window; ``of`` says what one takes. 0: none."""
    low, high = 0, window
    while low < high:
        middle = (low + high + 1) // 2
        if of(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def fit(asked: int, native: int, per_row: int, room: int, sides: int = 0, side: int = 0) -> tuple[int, str]:
    """The window in rows and, where the checkpoint's had to be cut, a sentence that says so ("" otherwise).

    ``asked`` is ``--max-len`` (0: the ``native`` window of the checkpoint), ``per_row`` what a row of KV takes and
    ``room`` what KV may take. Beside slot 0 there are so many ``sides``, each as long as it but no longer than ``side``
    rows. Raises ``DoesNotFit`` for an asked one that is too long, or when nothing fits.
    """
    if asked > native:
        raise DoesNotFit(f"--max-len {asked} is longer than the model's window of {native} tokens.")
    rows = asked or native
    needed = (rows + sides * min(side, rows)) * per_row
    if needed <= room:
        return rows, ""
    held = max(room, 0) // per_row
    alike = held // (1 + sides)  # rows of each, were all as long as slot 0
    most = (alike if alike <= side else held - sides * side) // 64 * 64
    whose = "its KV rows and those of the side slots" if sides else "its KV rows"
    sizes = f"needs {gib(needed)} of memory for {whose}, {gib(room)} are free"
    if asked:
        raise DoesNotFit(f"--max-len {asked} {sizes}: at most {most} tokens fit.")
    if most == 0:
        raise DoesNotFit(f"A window of {rows} tokens {sizes}: not even 64 tokens fit.")
    return most, f"The model's window of {rows} tokens {sizes}: it is cut to {most} tokens."


def of_prefill(rows: int, grid: int, size: Callable[[int], int], workspace: Callable[[int, int], int]) -> int:
    """What the dearest step of a prefill of ``rows`` rows takes.

    ``size(start)``: rows of the step that begins there, one size in a block of ``grid`` rows. ``workspace(rows,
    start)``: a step's. Steps of one size take more the deeper they stand, so of each size the last is asked for.
    """
    last: dict[int, int] = {}
    for block in range(0, rows, grid):
        step, end = size(block), min(block + grid, rows)
        rest = (end - block) % step
        if end - block >= step:
            last[step] = end - rest - step
        if rest:
            last[rest] = end - rest
    return max(workspace(step, start) for step, start in last.items())


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
