"""The runner without an engine process: what it does with what breaks, and with what comes too late."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
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
from stages.prompt import Prompt
from tests.world import DESCRIBED

SECRET = "the prompt said: xyzzy"
BODY = b'{"messages":[{"role":"user","content":"Hello"}]}'


class Panic(BaseException):
    """As a Rust library raises it: no ``Exception``."""


class Link:
    """In the place of the engine's link."""

    def __init__(self, config: wire.Config, post: Callable[[Any], None]) -> None:
        self.config, self.post, self.killed = config, post, False
        self.sent: list[wire.ToEngine] = []
        LINKS.append(self)

    def start(self) -> None: ...

    def send(self, message: wire.ToEngine) -> None:
        self.sent.append(message)

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


READY = wire.Ready(1, 0.1, 1, 0.0, 1.0, 1.0, 1, 1, 1, 1, "cpu", 1, "native avx2", 32, 7)


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


def fails(*_: Any) -> Any:
    raise ValueError(SECRET)


def dies(*_: Any) -> Any:
    os._exit(7)


def hangs(*_: Any) -> Any:
    time.sleep(3_600)


@pytest.mark.parametrize(
    ("work", "seconds", "said"), [(fails, 60, "ValueError"), (dies, 60, "WorkerDied"), (hangs, 0.1, "TookTooLong")]
)
def test_a_large_body_whose_worker_fails(
    work: Callable[..., Any], seconds: float, said: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A14, A9: whatever happens in the worker, its request ends as ours, and the next large one is served."""
    caplog.set_level(logging.INFO)
    large = BODY[:-1] + b" " * prepare.LARGE + b"}"

    async def test(runner: Runner) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "judge", work)
            patch.setattr(prepare, "JUDGE_S", seconds)
            call = runner.receive("chat", 0)
            runner.body(call, large)
            end = await ended(call)
        assert (end.figures.code, end.figures.status) == ("internal_error", 500)
        following = runner.receive("chat", 0)
        runner.body(following, large)
        while following.checked is None:
            await asyncio.sleep(0.01)
        assert following.checked.code == ""

    run(test)
    assert f"in judge: {said}" in caplog.text
    assert "xyzzy" not in caplog.text


def test_a_leaver_takes_its_worker_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """G1, A14: a large body that is being judged is dropped when its client leaves, and when the server stops."""
    monkeypatch.setattr(prepare, "judge", hangs)
    large = BODY[:-1] + b" " * prepare.LARGE + b"}"

    async def test(runner: Runner) -> None:
        calls = [runner.receive("chat", 0) for _ in range(3)]  # two are judged, one waits for a place
        for call in calls:
            runner.body(call, large)
        while len(runner._preparation._processes._all) < 2:
            await asyncio.sleep(0.01)
        tasks = len(runner._tasks)
        runner.left(calls[0])
        while len(runner._tasks) == tasks:
            await asyncio.sleep(0.01)
        assert [call.request in runner._calls for call in calls] == [False, True, True]

    before = psutil.Process().children()
    run(test)
    assert psutil.Process().children() == before


def test_large_prompts_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A14, I9: while large prompts are rendered, which may take minutes, small requests are judged and rendered."""
    go = threading.Event()

    def rendered(_renderer: Any, judged: Any, *_: Any) -> list[Prompt]:
        if judged.request.messages[0].content != "Hello":
            go.wait(30)
        return [Prompt([1], "off")]

    monkeypatch.setattr(prepare, "Renderer", lambda _described: SimpleNamespace(pieces=[], thinks=False))
    monkeypatch.setattr(prepare, "_rendered", rendered)
    large = BODY.replace(b"Hello", b"Hello " * (prepare.LARGE // 5))

    async def test(runner: Runner) -> None:
        runner._from_engine(DESCRIBED)
        calls = [runner.receive("chat", 0) for _ in range(3)]
        for call in calls:
            runner.body(call, large)
        while sum(r.state.value == "image_fetched" for r in runner.core.memory.requests.values()) < 3:
            await asyncio.sleep(0.01)
        small = runner.receive("chat", 0)
        runner.body(small, BODY)
        try:
            while runner.core.memory.requests[small.request].state.value != "queued":
                assert not go.is_set()
                await asyncio.sleep(0.01)
        finally:
            go.set()
        assert runner.core.memory.requests[calls[0].request].state.value == "image_fetched"

    run(test)


def test_a_body_that_comes_too_late_is_not_judged() -> None:
    """A14: the last bytes of a body whose request was refused meanwhile are nobody's work."""

    async def test(runner: Runner) -> None:
        call = runner.receive("chat", 0)
        runner.reading(call, 3 << 20)
        assert (await ended(call)).figures.code == "live_full"
        tasks = len(runner._tasks)
        runner.body(call, BODY)
        runner.reading(call, 5 << 20)
        assert len(runner._tasks) == tasks
        assert not runner._calls

    run(test, bodies_mb=1)


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


def test_a_prompts_hashes_reach_the_engine_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """G2, R5: a prompt's blocks go to the engine as salted hashes, and what it holds is known by the same ones."""
    tokens = list(range(130))
    prompt = SimpleNamespace(pieces=[], thinks=False, prompt=lambda *_: Prompt(tokens, "off"))
    monkeypatch.setattr(prepare, "Renderer", lambda _described: prompt)

    async def test(runner: Runner) -> None:
        [link] = LINKS
        runner._from_engine(DESCRIBED)
        runner._from_engine(READY)
        starts: list[wire.Start] = []
        for number in range(2):
            runner.body(runner.receive("chat", 0), BODY)
            while not (reads := [m for m in link.sent if isinstance(m, wire.Measure)][number:]):
                await asyncio.sleep(0.001)
            runner._from_engine(wire.Memory(1, reads[0].run, 0, 0, 0, 0))
            starts = [m for m in link.sent if isinstance(m, wire.Start)]
            runner._from_engine(wire.Ended(1, starts[number].run, "stop", 130, 0))
            runner._from_engine(wire.Resident(1, "slot", 0, 130, starts[0].hashes))
        assert [start.tokens for start in starts] == [tokens, tokens]
        assert starts[0].hashes == starts[1].hashes and len(starts[0].hashes) == 2
        runner._from_engine(wire.OwnWork(1, "disk write", True))
        seen = runner.view()
        assert [request["shared_rows"] for request in seen["recent"]] == [128, 0]
        assert seen["cache"]["slots"] == [{"slot": 0, "rows": 130}]
        assert seen["engine"]["own_work"] == ["disk write"]
        assert [seen["engine"][name] for name in ("path", "alike", "state_bytes")] == ["native avx2", 32, 7]
        salted.append(starts[0].hashes)

    salted: list[list[bytes]] = []
    for _ in range(2):
        LINKS.clear()
        run(test)
    assert not set(salted[0]) & set(salted[1])


def test_flags_reach_the_engine() -> None:
    """F8: what the flags say of drafts is what an engine is started with."""

    async def test(runner: Runner) -> None:
        assert (LINKS[0].config.speculate, LINKS[0].config.draft_shape) == (False, "fixed")

    run(test, speculate="off", draft_shape="fixed")
