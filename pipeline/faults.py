"""What is said of an exception (P1): its class and its place in the code, never its text, which could hold a prompt."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("tandem")


def told(error: BaseException) -> str:
    """The class, and the file and line that raised it."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    name = type(error).__name__
    return f"{name} at {Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else name


def unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The loop's handler for what nobody took: its own words hold the text and the arguments of calls."""
    error = context.get("exception")
    if isinstance(error, asyncio.CancelledError):
        return  # a connection's task that was cut: asyncio's streams ask it for its exception
    log.error("[fault] on the loop: %s", told(error) if isinstance(error, BaseException) else "no exception")
