"""The parent's side of the engine process: start it, send to it, hear it, notice its death.

A thread reads frames and calls ``post``; ``send`` writes at once what the pipe has room for (``sender.py``). Knows
messages and a process, not what they are about.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

from engine.pipe import BrokenFrame, read_frame
from engine.protocol import Config, FromEngine, Stop, ToEngine, frame, from_engine
from engine.sender import Sender

NOT_STARTED = 127
"""``Died.code`` when the process could not even be started (what a shell says for a command it cannot run)."""

SPIN = "1000"
"""Turns of the waiting loop before an OpenMP thread sleeps: some microseconds, about what a small kernel takes."""

_LAST_WORDS_S = 5.0  # between the end of its output and its exit; a process that takes longer is killed


class Died(msgspec.Struct, tag="died", frozen=True):
    """The engine process of ``epoch`` is gone. ``code`` is its exit code, or minus the signal that ended it."""

    epoch: int
    code: int


def command_for(config: Config) -> list[str]:
    """The command line of the engine ``config`` asks for: the scripted one when it names a script."""
    module = "engine.scripted" if config.script else "engine.worker"
    return [sys.executable, "-m", module, msgspec.json.encode(config).decode()]


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: ours, and OpenMP threads that spin only briefly while they wait for one another.

    Long spinning, which is the default, keeps the processor from the very thread that is waited for: beside a busy
    neighbour a step of two threads then takes many times as long. Never spinning costs a third of the speed when all is
    quiet. A short spin costs neither (GNU OpenMP reads the count). What the user has set stays.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & ours.keys()
    return dict(ours) if chosen else {"GOMP_SPINCOUNT": SPIN, **ours}


class EngineLink:
    """One engine process. A link is used once; the next start is a new one with the next epoch.

    ``post`` is called from the reader thread with every message in order and at last, exactly once, with ``Died``, also
    when the process could not be started. It must not block. Its stderr is ours.
    """

    def __init__(
        self, config: Config, post: Callable[[FromEngine | Died], None], command: list[str] | None = None
    ) -> None:
        self._epoch = config.epoch
        self._post = post
        self._command = command or command_for(config)
        self._sender: Sender | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._run, name=f"engine-in-{config.epoch}", daemon=True)

    def start(self) -> None:
        """Start the process. A failure is told by ``Died``, not raised."""
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(os.environ)
            )
            assert self._process.stdin is not None
            self._sender = Sender(self._process.stdin.fileno(), broken=lambda: None)  # the reader tells of a death
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """The process's id, None when it could not be started."""
        return self._process.pid if self._process else None

    def send(self, message: ToEngine) -> None:
        """Send a message; returns at once, from any thread. To a dead engine it is lost."""
        data = frame(message)
        if self._sender is not None:
            self._sender.send(data)

    def kill(self) -> None:
        """End the process now; ``Died`` follows."""
        if self._process is not None:
            self._process.kill()

    def close(self, timeout: float) -> None:
        """Ask the engine to leave, kill it after ``timeout`` seconds, and wait for its ``Died``. Blocks."""
        if self._reader.ident is None:
            return
        self.send(Stop(self._epoch))
        self._hang_up(timeout)
        self._reader.join(timeout)
        if self._reader.is_alive():
            self.kill()
            self._reader.join()

    def _run(self) -> None:
        process = self._process
        if process is None:
            self._post(Died(self._epoch, NOT_STARTED))
            return
        assert process.stdin is not None and process.stdout is not None
        try:
            self._listen(process.stdout)
        finally:  # whatever went wrong, nobody listens any more: the process goes, and that is told
            code = _reap(process)
            self._hang_up(0.0)
            process.stdout.close()
            self._post(Died(self._epoch, code))

    def _hang_up(self, timeout: float) -> None:
        """Close our end once it is written, or after ``timeout`` seconds: an engine in mid-load leaves then too."""
        if self._sender is not None and self._process is not None and self._process.stdin is not None:
            self._sender.flush(timeout)
            self._sender.close()
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _listen(self, stream: IO[bytes]) -> None:
        """Post message after message until the stream ends; kill a process that sends something else."""
        try:
            while (body := read_frame(stream)) is not None:
                self._post(from_engine.decode(body))
        except (BrokenFrame, msgspec.MsgspecError, OSError):
            self.kill()
        except BaseException:
            self.kill()
            raise


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code; a process that closed its output but does not leave is killed."""
    try:
        return process.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
