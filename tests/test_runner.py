"""The runner without an engine process: what it does with what breaks, and with what comes too late."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import protocol as wire
from engine.link import Died
from pipeline import events as ev
from pipeline import prepare
from pipeline import runner as module
from pipeline.call import Call
from pipeline.faults import unhandled
from pipeline.outbox import End, Text
from pipeline.runner import Runner
from pipeline.settings import Settings
from stages.calls import Content
from tests.world import DESCRIBED

SECRET = "the prompt said: xyzzy"
BODY = b'{"messages":[{"role":"user","content":"Hello"}]}'


class Panic(BaseException):
    """As a Rust library raises it: no ``Exception``."""


class Link:
    """In the place of the engine's link."""

    def __init__(self, config: wire.Config, post: Callable[[Any], None]) -> None:
        self.config, self.post, self.killed = config, post, False
        LINKS.append(self)

    def start(self) -> None: ...

    def send(self, message: wire.ToEngine) -> None: ...

    def kill(self) -> None:
        self.killed = True

    def close(self, timeout: float) -> None:
        self.post(Died(self.config.epoch, 0))


LINKS: list[Link] = []


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> list[Link]:
    LINKS.clear()
    monkeypatch.setattr(module, "EngineLink", Link)
    return LINKS


def run(test: Callable[[Runner], Any], **settings: Any) -> None:
    async def live() -> None:
        runner = Runner(Settings(**settings), "model.gguf", "model")
        runner.begin()
        try:
            await asyncio.wait_for(test(runner), 30)
        finally:
            await runner.close()

    asyncio.run(live())


async def ended(call: Call) -> End:
    [item] = await call.outbox.take()
    assert isinstance(item, End)
    return item


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize("error", [ValueError(SECRET), Panic(SECRET)])
def test_a_broken_stage_ends_its_request(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A9, P1: whatever a stage raises, a library's panic too, the request ends as ours; only the class is said."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(prepare, "judge", raising(error))

    async def test(runner: Runner) -> None:
        call = runner.receive("chat", 0)
        runner.body(call, BODY)
        assert (await ended(call)).figures.code == "internal_error"
        assert not runner.core.memory.requests

    run(test)
    assert f"in judge: {type(error).__name__}" in caplog.text
    assert "xyzzy" not in caplog.text


def test_an_unusable_tokenizer_stops_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I11, R1: a checkpoint whose prompts cannot be rendered is said and ends the server; nobody waits for ever."""
    monkeypatch.setattr(prepare, "Renderer", raising(ValueError(SECRET)))

    async def test(runner: Runner) -> None:
        call = runner.receive("chat", 0)
        runner.body(call, BODY)
        runner._from_engine(DESCRIBED)
        await runner.exiting.wait()
        assert runner.exit_status == 1
        assert LINKS[0].killed
        assert (await ended(call)).figures.code == "shutting_down"
        assert (await ended(runner.receive("chat", 0))).figures.code == "draining"

    run(test)
    assert "tokenizer cannot be used: ValueError" in caplog.text
    assert "xyzzy" not in caplog.text


def test_the_end_of_the_engine_at_the_end_is_no_loss() -> None:
    """R1, I5: the engine that is told to leave is not started again."""

    async def test(runner: Runner) -> None:
        runner.post(ev.Draining())
        await runner.exiting.wait()
        await runner.close()
        await asyncio.sleep(0.05)
        assert runner.core.memory.engine.row == ""

    run(test)
    assert len(LINKS) == 1


def test_a_leaver_takes_its_work_along() -> None:
    """G1: what is prepared for a client that left is dropped, also while the checkpoint is not known yet."""

    async def test(runner: Runner) -> None:
        call = runner.receive("chat", 0)
        runner.body(call, BODY)
        while not runner.core.memory.requests or runner.core.memory.requests[1].state.value != "image_fetched":
            await asyncio.sleep(0.01)
        tasks = len(runner._tasks)
        runner.left(call)
        await asyncio.sleep(0.05)
        assert len(runner._tasks) == tasks - 1
        assert not runner._calls

    run(test)


def test_a_piece_is_held_until_it_is_sent() -> None:
    """R4: handles are counted, texts that were sent or were empty are not kept."""

    async def test(runner: Runner) -> None:
        call = runner.receive("chat", 0)
        one, two = [[Content("a")]], [[Content("b")], [Content("c")]]
        assert [call.keep(one, []), call.keep([], []), call.keep(two, [])] == [0, 1, 2]
        assert call.release(2) == Text(two)
        assert call.release(0) == Text(one)
        assert not call._pieces

    run(test)


def test_the_loop_says_no_text(caplog: pytest.LogCaptureFixture) -> None:
    """P1: an exception nobody took is told by its class and place; its text and a callback's arguments are not."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(unhandled)
        loop.call_soon(raising(ValueError(SECRET)), SECRET)
        task = asyncio.ensure_future(_fails())
        await asyncio.sleep(0.05)
        del task
        unhandled(loop, {"message": SECRET})

    async def _fails() -> None:
        raise KeyError(SECRET)

    asyncio.run(main())
    assert "[fault] on the loop: ValueError at test_runner.py:" in caplog.text
    assert "[fault] on the loop: KeyError at test_runner.py:" in caplog.text
    assert "xyzzy" not in caplog.text


def test_a_recording_at_facts_does_not_read_bodies(tmp_path: Path) -> None:
    """R5: a body is decoded for the trace at level full only."""

    class Body(bytes):
        def decode(self, *_: Any) -> str:
            raise AssertionError

    async def test(runner: Runner) -> None:
        runner.body(runner.receive("chat", 0), Body(BODY))

    run(test, trace=str(tmp_path))
