"""The runner with several slots: answers that come at the same time, each to its own client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine import protocol as wire
from pipeline import runner as module
from pipeline.outbox import ChoiceEnd, End
from pipeline.runner import Runner
from pipeline.settings import Settings
from tests.test_runner_choices import READY, RUN, Engine, Prepared, text, whole
from tests.world import DESCRIBED

Test = Callable[[Runner, Engine], Awaitable[None]]


def live(monkeypatch: pytest.MonkeyPatch, test: Test, prompts: list[list[int]] | None = None, **flags: Any) -> None:
    """A runner whose engine runs nothing by itself, with a checkpoint that is loaded."""
    engine = Engine([[1]], hold=True)
    monkeypatch.setattr(module, "EngineLink", engine.link)

    async def main() -> None:
        runner = Runner(Settings(**flags), "model.gguf", "model")
        await runner._preparation.close()
        runner._preparation = Prepared(RUN, prompts or [[1, 1]], 1, False, 7)  # type: ignore[assignment]
        runner.begin()
        try:
            runner._from_engine(DESCRIBED)
            runner._from_engine(READY)
            await asyncio.wait_for(test(runner, engine), 30)
        finally:
            await runner.close()

    asyncio.run(main())


async def begun(engine: Engine, count: int) -> list[wire.Start]:
    """The starts, once there are so many."""
    while len(engine.starts) < count:
        await asyncio.sleep(0.001)
    return engine.starts


@pytest.mark.parametrize("count", [2, 4])
def test_each_client_gets_its_own_answer(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1, M6: rounds of several runs arrive in turn; every text is whole and its own, the figures say how they ran."""

    async def test(runner: Runner, engine: Engine) -> None:
        calls = [runner.receive("completions", 0) for _ in range(count)]
        for call in calls:
            runner.body(call, b"{}")
        starts = await begun(engine, count)
        assert sorted(start.slot for start in starts) == list(range(count))
        assert runner.view()["parallel"]["running"] == count
        answers = {start.run: [1 + i % 2, 2, 1 + i // 2] for i, start in enumerate(starts)}
        for at in range(3):
            for start in starts:
                round_ = wire.Tokens(1, start.run, at, [answers[start.run][at]], 1.0, shared=count)
                runner._from_engine(round_)
        for start in reversed(starts):
            runner._from_engine(wire.Ended(1, start.run, "stop", 5, 3))
        heads = {r.id: r.served_by for r in runner.core.memory.recent}
        for call in calls:
            start = next(start for start in starts if start.slot == heads[call.request])
            assert text(await whole(call), 0) == "".join(" ab"[token] for token in answers[start.run])
        assert runner.view()["parallel"] == {
            "slots": count, "running": 0, "max_running": count, "max_running_reason": "slots", "spill_waits": 0,
            "slot0_gave_up": 0, "joint_rounds": 3 * count, "overlap_rounds": 3 * count - 1,
        }  # fmt: skip
        assert {request["slot"] for request in runner.view()["recent"]} == set(range(count))

    live(monkeypatch, test, parallel=count)


def test_a_side_slots_run_is_bounded_by_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """M1, M2: the engine is told the flags; one that fits is started in slot 1, one that does not waits for slot 0."""

    async def test(runner: Runner, engine: Engine) -> None:
        for _ in range(2):
            runner.body(runner.receive("completions", 0), b"{}")
        assert [start.slot for start in await begun(engine, 2)] == [0, 1]
        assert engine.starts[1].max_tokens == 9  # what ``Prepared`` says was asked for

    live(monkeypatch, test, parallel=2, side_max_len=11)

    async def too_long(runner: Runner, engine: Engine) -> None:
        calls = [runner.receive("completions", 0) for _ in range(2)]
        for call in calls:
            runner.body(call, b"{}")
        await begun(engine, 1)
        while len(runner.core.memory.queue) < 1:
            await asyncio.sleep(0.001)
        assert [start.slot for start in engine.starts] == [0]
        runner._from_engine(wire.Ended(1, engine.starts[0].run, "stop", 2, 0))
        assert [start.slot for start in await begun(engine, 2)] == [0, 0]

    live(monkeypatch, too_long, parallel=2, side_max_len=10)


def test_a_list_of_prompts_in_several_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """M1, A13: prompts of one body run beside one another, end in any order, and are one answer in theirs."""

    async def test(runner: Runner, engine: Engine) -> None:
        call = runner.receive("completions", 0)
        runner.body(call, b"{}")
        starts = await begun(engine, 3)
        assert [start.slot for start in starts] == [0, 1, 2]
        for start in reversed(starts):
            ids = [1, 2] if len(start.tokens) == 2 else [2] * len(start.tokens)
            runner._from_engine(wire.Tokens(1, start.run, 0, ids, 1.0))
            runner._from_engine(wire.Ended(1, start.run, "stop", 5, len(ids)))
        items = await whole(call)
        assert [text(items, choice) for choice in range(3)] == ["b", "ab", "bbb"]
        assert len([item for item in items if isinstance(item, ChoiceEnd)]) == 3
        assert isinstance(items[-1], End) and items[-1].figures.completion_tokens == 6

    live(monkeypatch, test, [[1], [1, 1], [1, 1, 1]], parallel=3)
