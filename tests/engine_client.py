"""What a test needs to talk to an engine process: a link whose messages land in a queue."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable

import msgspec

from engine.link import Died, EngineLink
from engine.protocol import Config, Ended, FromEngine, OwnWork, Ready, Resident, Seen, Start, Tokens

PATIENCE = 90.0
"""Seconds a test waits for a message. Generous: the machine may be busy, and no test is about time."""


class Client:
    """An engine process and all it said; what it says of what is resident stands apart, in ``resident``."""

    def __init__(self, config: Config, module: str = "") -> None:
        self.inbox: queue.Queue[FromEngine | Died] = queue.Queue()
        self.said: list[FromEngine | Died] = []
        self.resident: list[FromEngine | Died] = []
        command = [sys.executable, "-m", module, msgspec.json.encode(config).decode()] if module else None
        self.link = EngineLink(config, self.post, command)
        self.link.start()

    def post(self, message: FromEngine | Died) -> None:
        """A message of the engine, on the link's thread."""
        if isinstance(message, Resident | OwnWork):
            self.resident.append(message)
        else:
            self.inbox.put(message)

    def next(self) -> FromEngine | Died:
        message = self.inbox.get(timeout=PATIENCE)
        self.said.append(message)
        return message

    def until(self, kind: type, each: Callable[[FromEngine | Died], None] = lambda m: None) -> list[FromEngine | Died]:
        """All messages up to the first of ``kind``, which is the last of them. ``Died`` ends it too."""
        got = []
        while True:
            got.append(message := self.next())
            each(message)
            if isinstance(message, kind | Died):
                return got

    def ready(self) -> Ready:
        last = self.until(Ready)[-1]
        assert isinstance(last, Ready), last
        return last

    def answer(self, start: Start) -> tuple[list[int], Ended]:
        """Run it to its end, acknowledging every round."""
        self.link.send(start)
        got = self.until(Ended, self.acknowledge)
        assert isinstance(got[-1], Ended), got[-1]
        return [i for m in got if isinstance(m, Tokens) for i in m.ids], got[-1]

    def acknowledge(self, message: FromEngine | Died) -> None:
        if isinstance(message, Tokens):
            self.link.send(Seen(message.epoch, message.run, message.start + len(message.ids)))

    def close(self) -> list[FromEngine | Died]:
        self.link.close(PATIENCE)
        rest = []
        while not self.inbox.empty():
            rest.append(self.inbox.get())
        self.said += rest
        return rest
