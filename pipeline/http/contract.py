"""What the HTTP side needs from the runner, and nothing more of it.

Facts and text go in through these methods; answers come out of a call's ``outbox``. Nothing here touches a state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from pipeline.outbox import Outbox
from pipeline.settings import Settings


class Call(Protocol):
    """One client's request, from ``Runner.receive`` to the ``End`` in its outbox."""

    task: asyncio.Task[Any] | None
    """The task that serves the client. The runner cancels it when the client stopped reading."""

    @property
    def request(self) -> int:
        """Its number in the core."""

    @property
    def name(self) -> str:
        """24 hex digits; the public id without its prefix."""

    @property
    def created(self) -> int:
        """Unix time in seconds."""

    @property
    def alternatives(self) -> int:
        """That each token's log-probability comes with; -1: none is wanted."""

    @property
    def route(self) -> str:
        """``chat`` or ``completions``."""

    @property
    def stream(self) -> bool:
        """Whether the client asked for a stream; known once the body was judged."""

    @property
    def include_usage(self) -> bool | None:
        """``stream_options.include_usage``; None: the client does not say."""

    @property
    def outbox(self) -> Outbox:
        """What goes to the client."""

    async def wants_body(self) -> bool:
        """False: it was refused on arrival, the ``End`` with the error is in the outbox."""


class Runner(Protocol):
    """The runner as its HTTP handlers see it. Calls are ``Any``: a runner's own call type has more to it."""

    @property
    def settings(self) -> Settings:
        """What the server was told."""

    @property
    def model(self) -> str:
        """The served model's id; "" until the checkpoint is described."""

    @property
    def window(self) -> int:
        """Rows; 0 while unknown."""

    @property
    def engine_state(self) -> str:
        """starting, ready, silent, lost or failed."""

    @property
    def draining(self) -> bool:
        """Whether the server is stopping."""

    def receive(self, route: str, body_bytes: int, headers: Mapping[str, str] | None = None) -> Any:
        """A request arrived: its ``Call``. ``body_bytes`` as declared, 0 when the body is chunked."""

    def reading(self, call: Any, size: int) -> None:
        """So many bytes of its body are here, more than were declared. It may be refused for them."""

    def body(self, call: Any, body: bytes) -> None:
        """Its body came whole. Never raises; what is wrong with it comes as an ``End``."""

    def cut(self, call: Any, code: str) -> None:
        """Its body was too large: it is over, and its client was told ``code``."""

    def left(self, call: Any, why: str = "closed") -> None:
        """Its client is gone. May be called at any time, again, and after the end."""

    def fault(self, call: Any, where: str, error: str) -> None:
        """A handler of ours raised: ``error`` is the exception's class."""

    def view(self) -> dict[str, Any]:
        """The live state, for the figures of ``/health`` and for the Dev view."""

    def now(self) -> float:
        """The core's clock, in seconds."""
