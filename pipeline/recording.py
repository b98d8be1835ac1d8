"""What a server's recording says of it: the recorder as it was asked for, and what its engine can do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from engine import protocol as wire
from pipeline import __version__
from pipeline.settings import Settings, policy
from pipeline.trace import Header, Recorder
from stages.wait import History, flat


def recorder(settings: Settings, salt: bytes, history: History) -> Recorder | None:
    """The recorder, None where no trace was asked for. The hashes' salt stands in a trace at level full alone.

    ``history``: what the core's estimates begin with.
    """
    if not settings.trace:
        return None
    header = Header(
        tandem=__version__, engine="scripted" if settings.script else "torch", torch=str(torch.__version__),
        level=settings.trace_level, wall=time.time(), recorded_by=settings.trace_note,
        policy=policy(settings), settings=settings.public(), history=flat(history),
        salt=salt.hex() if settings.trace_level == "full" else "",
    )  # fmt: skip
    return Recorder(Path(settings.trace), header, int(settings.trace_rotate_mb * (1 << 20)))


def capabilities(described: wire.Described | None, ready: wire.Ready) -> dict[str, Any]:
    """What the engine can do, for the header of a trace: no path, no name of a person's file."""
    about = {"safe_rows": ready.safe_rows, "device": ready.device, "threads": ready.threads}
    about |= {"path": ready.path, "alike": ready.alike}
    if described is not None:
        about |= {"architecture": described.architecture, "window": described.window, "vocab": described.vocab}
    return about
