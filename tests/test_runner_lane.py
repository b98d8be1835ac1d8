"""The runner with a guest: what the engine is told of it, and that its client gets its text whole or anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine import protocol as wire
from pipeline import events as ev
from pipeline import runner as module
from pipeline.call import Call
from pipeline.outbox import End, Text
from pipeline.runner import Runner
from pipeline.settings import Settings
from stages.calls import Content
from tests.test_runner_choices import PIECES, READY, RUN, Engine
from tests.world import DESCRIBED

A, B = 1, 2
"""Tokens that write their own letter."""


class Prepared:
    """In the place of the preparation: the first request is long, the second a recognised side request."""

    async def judge(self, call: Call, body: bytes) -> ev.Checked:
        call.stream = True
        return ev.Checked(call.request, "", "", len(body), True, 1, 500)

    async def prepare(self, call: Call) -> ev.Prepared:
        call.pieces, call.prompts, call.run = PIECES, [[1, 1]], RUN
        return ev.Prepared(call.request, 2, lane="side" if call.request > 1 else "")

    async def renderer(self) -> None: ...

    async def describe(self, described: wire.Described) -> None: ...

    async def close(self) -> None: ...


def live(monkeypatch: pytest.MonkeyPatch, test: Callable[[Runner, Engine, Call], Any]) -> None:
    """A runner whose slot 0 writes the first request's answer, and a second one that was offered to it as a guest."""
    engine = Engine([[A]], hold=True)
    monkeypatch.setattr(module, "EngineLink", engine.link)

    async def main() -> None:
        runner = Runner(Settings(), "model.gguf", "model")
        await runner._preparation.close()
        runner._preparation = Prepared()  # type: ignore[assignment]
        runner.begin()
        engine.post(DESCRIBED)
        engine.post(READY)
        calls = []
        for _ in range(2):
            call = runner.receive("completions", 10)
            runner.body(call, b"{}")
            calls.append(call)
            await until(lambda: len(engine.told) > len(calls))
        try:
            await asyncio.wait_for(test(runner, engine, calls[1]), 30)
        finally:
            await runner.close()

    asyncio.run(main())


async def until(said: Callable[[], bool]) -> None:
    while not said():
        await asyncio.sleep(0.001)


def guest_of(engine: Engine) -> wire.Guest:
    [guest] = [message for message in engine.told if isinstance(message, wire.Guest)]
    return guest


def speak(engine: Engine, run: int, ids: list[int], reason: str) -> None:
    engine.post(wire.Tokens(1, run, 0, ids, 1.0))
    engine.post(wire.Ended(1, run, reason, 0, len(ids)))


async def got(call: Call) -> tuple[str, End]:
    """The text its client got, and the end behind it."""
    items: list[Any] = []
    while not (items and isinstance(items[-1], End)):
        items += await call.outbox.take()
    deltas = [delta for item in items if isinstance(item, Text) for part in item.parts for delta in part]
    return "".join(delta.text for delta in deltas if isinstance(delta, Content)), items[-1]


def test_a_guest_is_a_start_inside_a_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """K2, K8: the engine gets the whole start with the holder's run and the cap; the text comes whole, with the end."""

    async def test(runner: Runner, engine: Engine, call: Call) -> None:
        guest, [holder] = guest_of(engine), engine.starts
        assert (guest.holder, guest.start.slot, guest.start.max_tokens) == (holder.run, 0, 192)
        assert guest.start.run != holder.run and guest.start.tokens == [1, 1] and guest.start.sampling.seed == 7
        engine.post(wire.GuestStarted(1, guest.start.run, holder.run, 194, 1_000))
        engine.post(wire.Tokens(1, guest.start.run, 0, [A, B], 1.0))
        await until(lambda: any(isinstance(m, wire.Seen) and m.run == guest.start.run for m in engine.told))
        assert runner.view()["lane"]["guest"] == call.request
        assert not call.outbox._items
        engine.post(wire.Ended(1, guest.start.run, "stop", 0, 2))
        text, end = await got(call)
        assert (text, end.figures.finish, end.figures.completion_tokens) == ("ab", "stop", 2)

    live(monkeypatch, test)


def test_a_guest_that_outgrew_the_lane_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """K8: nothing of what it wrote as a guest reaches its client."""

    async def test(runner: Runner, engine: Engine, call: Call) -> None:
        guest, [holder] = guest_of(engine), engine.starts
        engine.post(wire.GuestStarted(1, guest.start.run, holder.run, 194, 1_000))
        speak(engine, guest.start.run, [A] * 10, "length")
        await until(lambda: runner.core.memory.lane.outgrown == 1)
        speak(engine, holder.run, [A], "stop")
        await until(lambda: len(engine.starts) == 2)
        speak(engine, engine.starts[1].run, [B, B], "stop")
        text, end = await got(call)
        assert (text, end.figures.finish, end.figures.completion_tokens) == ("bb", "stop", 2)
        assert engine.starts[1].max_tokens == 500

    live(monkeypatch, test)
