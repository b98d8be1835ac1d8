"""The real server as a process of its own, for the end-to-end tests, the recordings and the benchmarks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 120.0
"""How long a test waits for something that should come; never asserted."""


def until(what: Callable[[], Any], patience: float = PATIENCE_S) -> Any:
    """Wait until ``what()`` is true and return it. Raises TimeoutError naming it."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        value = what()
        if value:
            return value
        time.sleep(0.05)
    raise TimeoutError(f"never true: {what}")


CALM = {"TANDEM_THREADS": "1", "TANDEM_SAFE_ROWS": "128", "TANDEM_SIDE_LANE": "off"}
"""A step of two threads is a hundred times slower while a neighbour holds a processor; one thread loses nothing. Steps
of a given size need not be measured at every load. A short request behind a long one waits, unless a test is about the
side lane (``--side-lane on``)."""


class Server:
    """One server process. ``flags`` as on the command line; one engine thread unless they or ``env`` say more."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "serve", "--port", "0", *flags],
            cwd=ROOT, env={**CALM, **os.environ, **(env or {})}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(timeout=PATIENCE_S)
        try:
            self.port = int(until(self._listening)[1])
        except BaseException:
            self.stop()
            raise
        self.url = f"http://127.0.0.1:{self.port}"
        self.http.base_url = httpx.URL(self.url)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def _listening(self) -> re.Match[str] | None:
        if self.process.poll() is not None:
            raise RuntimeError("the server ended: " + "\n".join(self.log))
        return next((m for line in self.log if (m := re.search(r"\[server\] http://.*:(\d+)/v1", line))), None)

    # -- looking at it -----------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """The body of ``/health``, whatever its status."""
        body: dict[str, Any] = self.http.get("/health").json()
        return body

    def state(self) -> dict[str, Any]:
        """The Dev view's state."""
        body: dict[str, Any] = self.http.get("/dev/state").json()
        return body

    def ready(self) -> Server:
        """Wait until the model is loaded."""
        until(lambda: self.http.get("/health").status_code == 200)
        return self

    def request_in(self, state: str, patience: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for a live request in that state."""
        found: dict[str, Any] = until(
            lambda: next((r for r in self.state()["requests"] if r["state"] == state), None), patience
        )
        return found

    def idle(self) -> dict[str, Any]:
        """Wait until nothing is inside and every slot is free."""

        def free() -> dict[str, Any] | None:
            state = self.state()
            busy = state["requests"] or any(slot["state"] != "free" for slot in state["slots"])
            return None if busy else state

        found: dict[str, Any] = until(free)
        return found

    # -- doing things to it --------------------------------------------------------------------------------------------

    def chat(self, text: str = "Hello!", **fields: Any) -> httpx.Response:
        """A whole chat completion."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 16, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    @contextlib.contextmanager
    def streamed(self, text: str = "Hello!", **fields: Any) -> Iterator[httpx.Response]:
        """A streamed chat completion; leaving the block hangs up."""
        body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 16, **fields}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            yield response

    def engine_pid(self) -> int:
        """The engine's process id."""
        child: int = until(
            lambda: next((c.pid for c in psutil.Process(self.process.pid).children() if c.is_running()), None)
        )
        return child

    def kill_engine(self, number: int = signal.SIGKILL) -> None:
        """Send the engine process a signal."""
        os.kill(self.engine_pid(), number)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send the server a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end and return the exit status."""
        return self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        """Stop it, whatever it does."""
        self.http.close()
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
