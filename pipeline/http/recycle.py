"""Hypercorn's HTTP/1.1, with one wait less.

A connection whose client sent bytes behind its request is *paused* until the answer is over. Where it cannot serve
another request after it (the client left, the answer was cut short, the server stops), Hypercorn closes it, finds it
paused still and waits for ever: its task and memory are never freed, and a stop waits out its whole grace for it. Told
that the sending failed, h11 reads no further, and the wait is over.
"""

from __future__ import annotations

import h11
import hypercorn.protocol
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol


class Recycled(H11Protocol):
    """A connection that ends when it cannot be used again."""

    async def handle(self, event: Event) -> None:
        """Bytes, or that the connection is closed."""
        await super().handle(event)
        if isinstance(event, Closed):
            self._give_up()
            await self.can_read.set()

    async def _maybe_recycle(self) -> None:
        done = self.connection.our_state is h11.DONE and self.connection.their_state is h11.DONE
        if not done or self.context.terminated.is_set():
            self._give_up()
        await super()._maybe_recycle()

    def _give_up(self) -> None:
        if isinstance(self.connection, h11.Connection):  # else it is a web socket's
            self.connection.send_failed()


def install() -> None:
    """Have Hypercorn use it."""
    setattr(hypercorn.protocol, "H11Protocol", Recycled)  # noqa: B010 - a name of another module
