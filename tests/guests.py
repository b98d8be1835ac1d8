"""Guests inside a run, for tests: an engine driven turn by turn, a holder and who asks to be served inside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.drafting import Drafting
from engine.load import Loaded
from engine.protocol import (
    Declined,
    Ended,
    FromEngine,
    Guest,
    Sampling,
    Seen,
    Start,
    ToEngine,
    TokenLogprob,
    Tokens,
)  # fmt: skip
from engine.speculate.shape import Shapes
from engine.worker import Engine
from tests.drafters import Forced
from tests.fake_engine import FakeModel, StateModel
from tests.test_worker import FAKE, GREEDY, Bench, Line

HOLDER, GUEST = 1, 50
PROMPT = [(7 * n * n + 3 * n) % 40 + 3 for n in range(30)]
ASKED = [(11 * n) % 40 + 4 for n in range(13)]
Answer = tuple[list[int], list[TokenLogprob]]


def holder(max_tokens: int = 14, **more: Any) -> Start:
    sampling = more.pop("sampling", Sampling(temperature=0.9, seed=4))
    return Start(1, more.pop("run", HOLDER), 0, more.pop("tokens", PROMPT), sampling, max_tokens, [], **more)


def guest(run: int = GUEST, of: int = HOLDER, max_tokens: int = 5, **more: Any) -> Guest:
    tokens, stop_ids = more.pop("tokens", ASKED), more.pop("stop_ids", [])
    return Guest(1, Start(1, run, 0, tokens, more.pop("sampling", GREEDY), max_tokens, stop_ids, **more), of)


@dataclass
class Drive:
    """An engine's turns; every round is judged at once, but those of ``deaf`` runs."""

    engine: Engine
    line: Line
    said: list[FromEngine] = field(default_factory=list)
    deaf: tuple[int, ...] = ()

    def turns(self, count: int, *messages: ToEngine) -> list[FromEngine]:
        self.line.inbox += messages
        before = len(self.said)
        for _ in range(count):
            at = len(self.line.said)
            self.engine.turn()
            fresh = self.line.said[at:]
            self.said += fresh
            heard = [m for m in fresh if isinstance(m, Tokens) and m.run not in self.deaf]
            self.line.inbox += [Seen(1, m.run, m.start + len(m.ids)) for m in heard]
        return self.said[before:]

    def until(self, *runs: int, most: int = 400) -> None:
        """Until those have ended."""
        for _ in range(most):
            if all(any(isinstance(m, Ended | Declined) and m.run == run for m in self.said) for run in runs):
                return
            self.turns(1)
        raise AssertionError(f"of {runs} not all ended")

    def answer(self, run: int) -> Answer:
        rounds = [m for m in self.said if isinstance(m, Tokens) and m.run == run]
        return [i for m in rounds for i in m.ids], [entry for m in rounds for entry in m.logprobs]

    def end(self, run: int) -> Ended:
        [ended] = [m for m in self.said if isinstance(m, Ended) and m.run == run]
        return ended

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.said if isinstance(m, kind)]


def forced(loaded: Loaded) -> Drafting:
    """Every round has drafts, right and wrong ones."""
    shapes = Shapes({1: 1.0}, learned=False, always=True)
    return Drafting(shapes, 32, lambda *_: Forced(loaded.model.vocab, PROMPT, TRUTH))


TRUTH: list[int] = []
"""What the holder writes, where a test has found it out: some of its drafts are right then."""


def fake(
    model: type[FakeModel] = FakeModel,
    drafts: bool = True,
    parallel: int = 1,
    config: Any = FAKE,
    **points: int,
) -> Drive:
    def build(*_: Any, **__: Any) -> FakeModel:
        return model()

    bench = Bench(parallel, config, build, forced if drafts else None, **points)
    if isinstance(bench.loaded.model, StateModel):
        bench.loaded.model.strict = True
    return Drive(bench.engine, bench.line)


def uninterrupted(model: type[FakeModel], asked: Start, drafts: bool = False) -> Answer:
    drive = fake(model, drafts)
    drive.turns(1, asked)
    drive.until(asked.run)
    return drive.answer(asked.run)
