"""The runner with several choices and several prompts: one outbox, an end for each choice, one end for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine import protocol as wire
from pipeline import events as ev
from pipeline import runner as module
from pipeline.call import Call
from pipeline.outbox import ChoiceEnd, End, Item, Text, said
from pipeline.runner import Runner
from pipeline.settings import Settings
from stages.calls import Reasoning
from stages.judge import Ending
from stages.run import Run
from stages.text import Reading
from tests.world import DESCRIBED

PIECES = [b"", b"a", b"b", b"</think>", b'<tool_call>{"name": "f", "arguments": {}}</tool_call>']
RUN = Run(sampling=wire.Sampling(seed=7), ending=Ending())


class Engine:
    """In the place of the link: every run says its ``answers`` in one round each, and ends."""

    def __init__(self, answers: list[list[int]], hold: bool = False) -> None:
        self.answers, self.hold, self.ends = answers, hold, True
        self.starts: list[wire.Start] = []
        self.told: list[wire.ToEngine] = []
        self.turns: list[wire.Turn] = []
        self.resumed = 0
        self.post: Callable[[Any], None] = lambda message: None

    def link(self, config: wire.Config, post: Callable[[Any], None]) -> Engine:
        self.post = post
        return self

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def close(self, timeout: float) -> None: ...

    def send(self, message: wire.ToEngine) -> None:
        self.told.append(message)
        if isinstance(message, wire.Measure):
            self.post(wire.Memory(message.epoch, message.run, 0, 0, 0, 0))
        elif isinstance(message, wire.Start):
            self.starts.append(message)
            if not self.hold:
                self.speak(message)
        elif isinstance(message, wire.Cancel):
            self.post(wire.Ended(message.epoch, message.run, "cancelled", 1, 1))

    def speak(self, start: wire.Start) -> None:
        ids = self.answers[min(len(self.starts), len(self.answers)) - 1]
        if self.resumed:
            self.post(wire.Resumed(start.epoch, start.run, self.resumed, "end" if start.choice else "slot"))
        self.post(wire.Chunk(start.epoch, start.run, len(start.tokens), len(start.tokens), 1.0))
        logprobs = [wire.TokenLogprob(0.0, [], []) for _ in ids] if start.logprobs >= 0 else []
        self.post(wire.Tokens(start.epoch, start.run, 0, ids, 1.0, logprobs, self.turns))
        if self.ends:
            self.post(wire.Ended(start.epoch, start.run, "stop", 1, len(ids)))


class Prepared:
    """In the place of the preparation: what a body asks for is known beforehand."""

    def __init__(self, run: Run, prompts: list[list[int]], choices: int, stream: bool, seed: int | None) -> None:
        self.run, self.prompts, self.choices, self.stream, self.seed = run, prompts, choices, stream, seed

    async def judge(self, call: Call, body: bytes) -> ev.Checked:
        call.stream = self.stream
        return ev.Checked(call.request, "", "", len(body), self.stream, 1, 9, self.choices)

    async def prepare(self, call: Call) -> ev.Prepared:
        call.pieces, call.prompts = PIECES, self.prompts
        seed = call.seed if self.seed is None else self.seed
        call.run = msgspec.structs.replace(self.run, sampling=wire.Sampling(seed=seed))
        sizes = [len(prompt) for prompt in self.prompts]
        return ev.Prepared(call.request, sizes[0], prompts=len(sizes), longest=max(sizes))

    async def renderer(self) -> None: ...

    async def describe(self, described: wire.Described) -> None: ...

    async def close(self) -> None: ...


READY = wire.Ready(1, 0.1, 1, 0.0, 1.0, 1.0, 1, 1, 1, 1, "cpu", 1)


def live(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, test: Callable[[Runner, Call], Any], *, run: Run = RUN,
    prompts: list[list[int]] | None = None, choices: int = 1, stream: bool = False, seed: int | None = None,
    route: str = "completions",
) -> None:  # fmt: skip
    """A runner with one request in it, whose body came whole, and a checkpoint that is loaded."""
    monkeypatch.setattr(module, "EngineLink", engine.link)

    async def main() -> None:
        runner = Runner(Settings(), "model.gguf", "model")
        await runner._preparation.close()
        runner._preparation = Prepared(run, prompts or [[1, 1]], choices, stream, seed)  # type: ignore[assignment]
        runner.begin()
        try:
            call = runner.receive(route, 0)
            runner.body(call, b"{}")
            runner._from_engine(DESCRIBED)
            runner._from_engine(READY)
            await asyncio.wait_for(test(runner, call), 30)
        finally:
            await runner.close()

    asyncio.run(main())


async def whole(call: Call) -> list[Item]:
    items: list[Item] = []
    while not items or not isinstance(items[-1], End):
        items += await call.outbox.take()
    return items


def text(items: list[Item], choice: int) -> str:
    texts = [item for item in items if isinstance(item, Text) and item.choice == choice]
    return "".join(said(delta) for item in texts for part in item.parts for delta in part)


def test_choices_of_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: each choice has its own text and end; the engine is told which it is and whether another follows."""
    engine = Engine([[1, 1], [2], [1]])

    async def test(runner: Runner, call: Call) -> None:
        items = await whole(call)
        assert [text(items, choice) for choice in range(3)] == ["aa", "b", "a"]
        assert [(i.choice, i.finish) for i in items if isinstance(i, ChoiceEnd)] == [
            (0, "stop"),
            (1, "stop"),
            (2, "stop"),
        ]
        [end] = [item for item in items if isinstance(item, End)]
        assert (end.closed, end.choice, end.figures.prompt_tokens, end.figures.completion_tokens) == (True, 2, 2, 4)
        assert [(start.choice, start.keep_end) for start in engine.starts] == [(0, True), (1, True), (2, False)]
        assert len({start.sampling.seed for start in engine.starts}) == 1
        assert not runner._calls and not runner._runs

    live(engine, monkeypatch, test, choices=3)


def test_one_choice_has_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a request alone with one choice is told its finish once."""

    async def test(runner: Runner, call: Call) -> None:
        items = await whole(call)
        assert [type(item) for item in items] == [Text, End]
        end = items[-1]
        assert isinstance(end, End)
        assert (end.closed, end.choice, end.figures.finish, len(end.logprobs)) == (False, 0, "stop", 1)

    run = msgspec.structs.replace(RUN, alternatives=0)
    live(Engine([[1, 0]]), monkeypatch, test, run=run)  # its second token writes nothing: it is the finish's


@pytest.mark.parametrize("seed", [None, 7])
def test_prompts_of_one_body(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A13, F8: in the prompts' order, ``index`` over prompts and choices; chance differs unless a seed was sent."""
    engine = Engine([[1], [2], [1, 1], [2, 2], [1, 2], [2, 1]])

    async def test(runner: Runner, call: Call) -> None:
        items = await whole(call)
        assert [text(items, choice) for choice in range(6)] == ["a", "b", "aa", "bb", "ab", "ba"]
        assert [item.choice for item in items if isinstance(item, ChoiceEnd)] == [0, 1, 2, 3, 4, 5]
        [end] = [item for item in items if isinstance(item, End)]
        assert (end.closed, end.figures.prompt_tokens, end.figures.completion_tokens) == (True, 6, 10)
        assert [start.tokens for start in engine.starts[::2]] == [[1], [2, 2], [3, 3, 3]]
        assert len({start.sampling.seed for start in engine.starts}) == (3 if seed is None else 1)
        assert [r.name for r in reversed(runner.core.memory.recent)] == [call.name, f"{call.name}-1", f"{call.name}-2"]
        assert not runner._calls and not runner._runs

    live(engine, monkeypatch, test, prompts=[[1], [2, 2], [3, 3, 3]], choices=2, seed=seed)


def test_the_prompt_that_is_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A13, A8: the 400 names the first prompt that does not fit, and how long it is."""

    async def test(runner: Runner, call: Call) -> None:
        [end] = await whole(call)
        assert isinstance(end, End)
        assert (end.figures.status, end.param) == (400, "prompt[1]")
        assert "1001 tokens" in end.message

    live(Engine([[1]]), monkeypatch, test, prompts=[[1], [1] * 1_001, [1] * 2_000])


def test_a_client_leaves_when_its_first_prompt_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A13, G1: the others hang up too, and a stalled reader is found once."""
    engine = Engine([[1]], hold=True)

    async def test(runner: Runner, call: Call) -> None:
        while not engine.starts:
            await asyncio.sleep(0.001)
        engine.speak(engine.starts[0])
        while len(engine.starts) < 2:
            await asyncio.sleep(0.001)
        assert call.request not in runner.core.memory.requests and len(runner.core.memory.requests) == 2
        runner.left(call)
        assert not runner.core.memory.requests and not runner._calls
        runner.left(call)
        runner.fault(call, "http", "KeyError")
        assert [r.end_reason for r in runner.core.memory.recent[:2]] == ["closed", "closed"]

    live(engine, monkeypatch, test, prompts=[[1], [2], [3]], stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stage_that_breaks_for_one_prompt(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A13, A9: before anything was sent the whole answer is that error; on an open stream it is one choice's."""
    read = Call.read

    def breaks(call: Call, message: wire.Tokens, counters: dict[str, int]) -> ev.Progress:
        if call.index == 1:
            raise KeyError
        return read(call, message, counters)

    async def test(runner: Runner, call: Call) -> None:
        items = await whole(call)
        end = items[-1]
        assert isinstance(end, End)
        finishes = [(item.choice, item.finish, item.code) for item in items if isinstance(item, ChoiceEnd)]
        if stream:
            assert finishes == [(0, "stop", ""), (1, "error", "internal_error"), (2, "stop", "")]
            assert (end.figures.completion_tokens, end.closed) == (2, True)
        else:
            assert finishes == [(0, "stop", "")]
            assert (end.figures.code, end.figures.status, end.closed) == ("internal_error", 500, False)
        assert not runner._calls and not runner.core.memory.requests

    monkeypatch.setattr(Call, "read", breaks)
    live(Engine([[1], [2], [1]]), monkeypatch, test, prompts=[[1], [2], [3]], stream=stream)


def test_where_thinking_ends_is_the_engines_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6, F3: turns go to the text stage, anew for each choice; the core hears why it closed and of how many tokens."""
    engine = Engine([[1, 3, 2]])
    engine.turns = [wire.Turn("closed", 1, 8, 0, "budget")]

    async def test(runner: Runner, call: Call) -> None:
        items = await whole(call)
        for choice in (0, 1):
            texts = [item for item in items if isinstance(item, Text) and item.choice == choice]
            deltas = [delta for item in texts for part in item.parts for delta in part]
            assert "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)) == "a"
            assert "".join(said(delta) for delta in deltas) == "ab"
        [request] = runner.core.memory.recent
        assert (request.closed, request.closed_at, request.reasoning_tokens) == ("budget", 1, 4)
        assert [row for _, row in request.history].count("reasoning_closed") == 2

    run = msgspec.structs.replace(RUN, reading=Reading(shape="reasoning_content", state="open"))
    live(engine, monkeypatch, test, run=run, choices=2, route="chat")


def test_calls_that_are_not_sent_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1, D7: a call nobody offered is cut and counted, once for each choice; it makes no ``tool_calls``."""

    async def test(runner: Runner, call: Call) -> None:
        items = await whole(call)
        end = items[-1]
        assert isinstance(end, End) and end.figures.finish == "stop"
        assert text(items, 0) == text(items, 1) == "a"
        assert runner.counters == {"dropped_calls": 2, "lost_calls": 0}
        assert runner.view()["counters"] == runner.counters

    run = msgspec.structs.replace(RUN, reading=Reading(tools=[], plan=True))
    live(Engine([[1, 4]]), monkeypatch, test, run=run, choices=2, route="chat")


def test_rows_that_were_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: what the first run found resident is its client's cached tokens; what a later choice takes over is not."""
    engine = Engine([[1]])
    engine.resumed = 2

    async def test(runner: Runner, call: Call) -> None:
        end = (await whole(call))[-1]
        assert isinstance(end, End)
        assert (end.figures.prompt_tokens, end.figures.cached_tokens) == (3, 2)

    live(engine, monkeypatch, test, prompts=[[1, 1, 1]], choices=3)


HELD = msgspec.structs.replace(RUN, reading=Reading(stops=["ab!"]), alternatives=0)


@pytest.mark.parametrize("trouble", ["time", "engine", "fault", "shutdown"])
@pytest.mark.parametrize("stream", [True, False])
def test_held_text_stands(trouble: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5: what was held as a possible stop goes out, with its log-probabilities, when an error ends the answer."""
    engine = Engine([[2, 1, 2]], hold=True)
    engine.ends = False

    async def test(runner: Runner, call: Call) -> None:
        while not engine.starts:
            await asyncio.sleep(0.001)
        engine.speak(engine.starts[0])
        while not [m for m in engine.told if isinstance(m, wire.Seen)]:
            await asyncio.sleep(0.001)
        request = runner.core.memory.requests[call.request]
        if trouble == "time":
            request.deadline_at = 0.0
        facts = {
            "time": ev.Tick(), "engine": ev.EngineDied(1, -9), "fault": ev.Faulted(1, "http", "KeyError"),
            "shutdown": ev.Shutdown(),
        }  # fmt: skip
        runner.post(facts[trouble])
        items = await whole(call)
        end = items[-1]
        assert isinstance(end, End) and end.figures.code
        if stream or trouble == "time":
            assert text(items, 0) == "bab"
            entries = [e for item in items if isinstance(item, Text) for group in item.logprobs for e in group]
            assert [entry.data for entry in [*entries, *end.logprobs]] == [b"b", b"a", b"b"]
        else:
            assert text(items, 0) == "b" and end.figures.status >= 500

    live(engine, monkeypatch, test, run=HELD, stream=stream)


def test_what_a_broken_text_stage_held_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: after a fault in the text stage only what was sent before it stands."""
    engine = Engine([[2, 1]], hold=True)
    engine.ends = False

    async def test(runner: Runner, call: Call) -> None:
        while not engine.starts:
            await asyncio.sleep(0.001)
        engine.speak(engine.starts[0])
        while not [m for m in engine.told if isinstance(m, wire.Seen)]:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(Call, "read", broken)
        engine.post(wire.Tokens(1, engine.starts[0].run, 2, [2], 1.0))
        items = await whole(call)
        end = items[-1]
        assert isinstance(end, End) and end.figures.code == "internal_error"
        assert text(items, 0) == "b"

    def broken(call: Call, message: wire.Tokens, counters: dict[str, int]) -> ev.Progress:
        raise KeyError

    run = msgspec.structs.replace(RUN, reading=Reading(stops=["ab!"]))
    live(engine, monkeypatch, test, run=run, stream=True)


def test_held_text_of_a_choice_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """F5, F11: the choice that is written when the time is over keeps its held text; the one before it is complete."""
    engine = Engine([[1], [2, 1, 2]], hold=True)

    async def test(runner: Runner, call: Call) -> None:
        while not engine.starts:
            await asyncio.sleep(0.001)
        engine.speak(engine.starts[0])
        while len(engine.starts) < 2:
            await asyncio.sleep(0.001)
        engine.ends = False
        engine.speak(engine.starts[1])
        while not [m for m in engine.told if isinstance(m, wire.Seen) and m.n == 3]:
            await asyncio.sleep(0.001)
        runner.core.memory.requests[call.request].deadline_at = 0.0
        runner.post(ev.Tick())
        items = await whole(call)
        end = items[-1]
        assert isinstance(end, End) and (end.figures.code, end.choice, end.closed) == ("request_timeout", 1, False)
        assert [text(items, choice) for choice in (0, 1)] == ["a", "bab"]

    run = msgspec.structs.replace(RUN, reading=Reading(stops=["ab!"]))
    live(engine, monkeypatch, test, run=run, choices=2)
