"""Work that may never end, in processes that can be killed: ``python -m pipeline.pools`` is one of them.

A worker does one task at a time and stays for the next. It is killed when its task runs out of time or is cancelled,
and another is started when there is work again. Tasks are functions of a module, sent by name, and what they return is
sent back; of what they raise only the class comes back, for the text could hold a prompt.

A worker is in a session of its own, so the terminal's interrupt does not reach it, and leaves when its parent is gone.
Knows processes and frames, not what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any, TypeVar

from engine.pipe import BrokenFrame, read_frame
from engine.protocol import MAX_FRAME

WORKERS = 2
START_S = 60.0
"""What a worker may take to start; it counts against no task."""

_HELLO = b"ready"
_Result = TypeVar("_Result")


class WorkFailed(Exception):
    """The task gave no answer."""


class TookTooLong(WorkFailed):
    """It ran out of time; its worker was killed."""


class WorkerDied(WorkFailed):
    """Its worker ended in the middle of it, or could not be started. ``code``: of the exit, or minus the signal."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"a worker ended with {code}")
        self.code = code


class Raised(WorkFailed):
    """The function raised. ``name``: the class of what it raised."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class TooLarge(WorkFailed):
    """The task, with its arguments, or its answer is larger than a frame may be."""


class Pool:
    """At most ``size`` workers, each started when it is needed. Used from one event loop.

    ``modules``: what a worker imports as it starts, so that no task's time goes into it.
    """

    def __init__(self, size: int = WORKERS, modules: Sequence[str] = ()) -> None:
        self._size, self._modules = size, modules
        self._places = asyncio.Semaphore(size)
        self._free: list[_Worker] = []
        self._ends: dict[_Worker, asyncio.Task[None]] = {}  # killed, to be reaped
        self._all: list[_Worker] = []
        self._closed = False

    async def call(self, function: Callable[..., _Result], *args: Any, timeout: float) -> _Result:
        """What ``function(*args)`` returns, run in a worker for at most ``timeout`` seconds.

        Waiting for a worker takes no time from it. Raises a ``WorkFailed``; a call that is cancelled kills its worker.
        """
        task = pickle.dumps((function.__module__, function.__qualname__, args), pickle.HIGHEST_PROTOCOL)
        if len(task) > MAX_FRAME:
            raise TooLarge
        async with self._places:
            worker = await self._worker()
            try:
                async with asyncio.timeout(timeout):
                    fine, value = await worker.ask(task)
            except TimeoutError:
                self._kill(worker)
                raise TookTooLong from None
            except BaseException:  # cancelled, or it died: in neither case is it where it should be
                self._kill(worker)
                raise
            self._free.append(worker)
        if not fine:
            raise Raised(value)
        result: _Result = value
        return result

    async def close(self) -> None:
        """Kill every worker and wait until they are gone. A call in progress raises ``WorkerDied``."""
        if self._closed:
            return
        self._closed = True
        for worker in list(self._all):
            self._kill(worker)
        for _ in range(self._size):  # whoever starts one has noticed, and killed it
            await self._places.acquire()
        for _ in range(self._size):
            self._places.release()
        await asyncio.gather(*self._ends.values())

    async def _worker(self) -> _Worker:
        """A free one that lives, else a new one."""
        while self._free:
            worker = self._free.pop()
            if worker.lives:
                return worker
            self._kill(worker)
        if self._closed:
            raise WorkerDied(None)
        worker = _Worker(await _spawned(self._modules))
        self._all.append(worker)
        try:
            if self._closed:
                raise WorkerDied(None)
            async with asyncio.timeout(START_S):
                await worker.ready()
        except BaseException as error:
            self._kill(worker)
            if isinstance(error, TimeoutError):
                raise WorkerDied(None) from None
            raise
        return worker

    def _kill(self, worker: _Worker) -> None:
        """End it at once; the loop reaps it."""
        if worker not in self._all:
            return
        self._all.remove(worker)
        if worker in self._free:
            self._free.remove(worker)
        worker.kill()
        end = asyncio.get_running_loop().create_task(worker.gone())
        self._ends[worker] = end
        end.add_done_callback(lambda _: self._ends.pop(worker, None))


class _Worker:
    """The parent's side of one process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def lives(self) -> bool:
        """Asked of the system: the loop hears of an end only later."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    async def ready(self) -> None:
        """Wait for its first word."""
        await self._frame()

    async def ask(self, task: bytes) -> tuple[bool, Any]:
        """Send a task and wait for its answer: whether it returned, and what; or the class of what it raised."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: reading says so
            self._process.stdin.write(len(task).to_bytes(4, "little"))
            self._process.stdin.write(task)
            await self._process.stdin.drain()
        answer: tuple[bool, Any] = pickle.loads(await self._frame())
        return answer

    async def _frame(self) -> bytes:
        assert self._process.stdout is not None
        try:
            length = int.from_bytes(await self._process.stdout.readexactly(4), "little")
            return await self._process.stdout.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            raise WorkerDied(await self._process.wait()) from None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def gone(self) -> None:
        """Wait until it is reaped and its pipes are closed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()


async def _spawned(modules: Sequence[str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pipeline.pools",
            *modules,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback could hold a prompt
            start_new_session=True,
        )
    except OSError:
        raise WorkerDied(None) from None


# -- in the worker -----------------------------------------------------------------------------------------------


def main(modules: Sequence[str]) -> None:
    """Do tasks until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as sink, os.fdopen(0, "rb") as source:
        os.dup2(2, 1)  # what a function prints is no answer
        threading.Thread(target=_leave_with_parent, args=(source.fileno(),), daemon=True).start()
        for module in modules:
            importlib.import_module(module)
        _say(sink, _HELLO)
        with contextlib.suppress(BrokenFrame, BrokenPipeError):
            while (task := read_frame(source)) is not None:
                _say(sink, _done(task))


def _done(task: bytes) -> bytes:
    try:
        module, name, args = pickle.loads(task)
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        answer = pickle.dumps((True, function(*args)), pickle.HIGHEST_PROTOCOL)
        if len(answer) > MAX_FRAME:
            raise TooLarge
    except Exception as error:
        return pickle.dumps((False, type(error).__name__))
    return answer


def _say(sink: IO[bytes], body: bytes) -> None:
    sink.write(len(body).to_bytes(4, "little") + body)
    sink.flush()


def _leave_with_parent(source: int) -> None:
    """Exit as soon as the other end is closed, whatever is being computed."""
    watched = select.poll()
    watched.register(source, 0)  # a hang-up is told without being asked for
    watched.poll()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
