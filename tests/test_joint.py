"""Several runs in one step: each answers as it would alone, and none waits for another's prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.drafting import Drafting, drafters
from engine.failpoints import Failpoints
from engine.load import Loaded, load
from engine.models import registry
from engine.models.batch import Rows
from engine.protocol import Config, Ended, Sampling, Seen, Start, TokenLogprob, Tokens
from engine.speculate.draft import Draft, from_branches
from engine.speculate.shape import Shapes
from engine.threads import Threads
from engine.weights.checkpoint import open_checkpoint
from engine.worker import Engine
from tests import hybrids
from tests.checkpoints import write_gguf
from tests.fake_engine import POISON, FakeModel
from tests.test_worker import FAKE, GREEDY, Bench, Line


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Noting(FakeModel):
    """Notes which parts each step had: rows, start and whether they are drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[tuple[int, int, bool]]] = []

    def forward(self, parts: Sequence[Rows]) -> Tensor:
        self.batches.append([(len(part.tokens), part.start, part.draft) for part in parts])
        return super().forward(parts)


class Repeating:
    """A drafter of the last token, again and again, beside two others."""

    def __init__(self) -> None:
        self.last = 0

    def tell(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1] if tokens else self.last

    def draft(self, most: int) -> Draft:
        return from_branches([([self.last] * 9, 2.0), ([self.last, 7], 1.0), ([8] * 9, 1.0)], most)


def forced(most: int = 32, by_share: bool = True) -> Any:
    shapes = Shapes({1: 1.0}, learned=False, always=True)
    return lambda _: Drafting(shapes, most, lambda *_: Repeating(), by_share)


def asked(slot: int, prompt: int = 9, max_tokens: int = 12, **more: Any) -> Start:
    sampling = Sampling(temperature=0.8, seed=slot, logit_bias={5 + slot: 3.0})
    return Start(1, slot, slot, [(3 + slot * 7 + i) % 40 for i in range(prompt)], sampling, max_tokens, [], **more)


def answers(line: Line) -> dict[int, tuple[list[int], list[TokenLogprob]]]:
    """Tokens and log-probabilities, by run."""
    said: dict[int, tuple[list[int], list[TokenLogprob]]] = {}
    for message in line.said:
        if isinstance(message, Tokens):
            ids, entries = said.setdefault(message.run, ([], []))
            ids += message.ids
            entries += message.logprobs
    return said


def alone(message: Start) -> list[int]:
    return Bench(parallel=4, config=msgspec.structs.replace(FAKE, speculate=False)).answer(message)


@pytest.mark.parametrize("by_share", [True, False])
def test_together_each_answers_as_alone(by_share: bool) -> None:
    """M6, F8: two to four runs of different lengths, with drafts, in steps of at most 32 rows."""
    bench = Bench(parallel=4, made=lambda *_, **__: Noting(), drafting=forced(by_share=by_share))
    starts = [asked(slot, prompt=4 + 9 * slot, max_tokens=12 + 3 * slot) for slot in range(4)]
    bench.turns(120, *starts, ack=True)
    for start in starts:
        assert answers(bench.line)[start.run][0] == alone(start)
    model: Any = bench.loaded.model
    rounds = [batch for batch in model.batches if all(draft for *_, draft in batch)]
    told = [message.shared for message in bench.said if isinstance(message, Tokens)]
    assert set(told) >= {1, 4} and set(told) <= {len(batch) for batch in rounds}
    assert max(len(batch) for batch in rounds) == 4
    assert max(sum(rows for rows, *_ in batch) for batch in rounds) <= 32
    assert max(rows for batch in rounds for rows, *_ in batch if len(batch) == 4) > 1
    if by_share:
        assert max(rows for batch in rounds for rows, *_ in batch if len(batch) == 4) <= 8


def test_steps_of_a_prompt_and_rounds_take_turns() -> None:
    """M6, G1: an answer goes on while another prompt is read, and the prompt does too."""
    bench = Bench(parallel=2, made=lambda *_, **__: Noting())
    bench.turns(4, asked(0, prompt=8, max_tokens=60), ack=True)
    model: Any = bench.loaded.model
    model.batches.clear()
    bench.turns(12, asked(1, prompt=60), ack=True)
    kinds = [batch[0][2] for batch in model.batches]
    assert sum(kinds[:10]) == 5 and all(one != other for one, other in pairwise(kinds[:10]))


@pytest.mark.parametrize("speculate", [True, False])
def test_company_is_no_busy_neighbour(speculate: bool) -> None:
    """M6, F8: a joint step may take as long as its rows cost; without drafts nobody measured them, and it may too."""
    config = msgspec.structs.replace(FAKE, speculate=speculate)
    bench = Bench(parallel=4, config=config)
    costs = {1: 10.0, 4: 30.0, 32: 240.0}
    if speculate:
        bench.engine._drafting = Drafting(Shapes(costs, learned=False), 32, lambda *_: Repeating(), True)
    threads = bench.engine._threads = Threads(2, 0.01)
    for _ in range(9):
        threads.took(0.03 / bench.engine._drafting.dearer(4))
    assert threads.count == 2
    bench.engine._drafting.stop()
    for _ in range(9):
        threads.took(0.03 / bench.engine._drafting.dearer(4))
    assert threads.count == 2


def test_a_fault_in_a_joint_step_ends_its_run_alone() -> None:
    """F6, I6: the others' rows are computed again, and their answers are what they are alone."""
    bench = Bench(parallel=3, made=lambda *_, **__: Noting())
    likes = Sampling(temperature=0, logit_bias={POISON: 99.0})  # its second step raises
    starts = [asked(0), msgspec.structs.replace(asked(1), sampling=likes), asked(2)]
    bench.turns(80, *starts, ack=True)
    ends = {m.run: m.reason for m in bench.said if isinstance(m, Ended)}
    assert ends == {0: "length", 1: "fault", 2: "length"}
    for start in (starts[0], starts[2]):
        assert answers(bench.line)[start.run][0] == alone(start)


def test_a_fault_at_a_choice_ends_its_run_alone() -> None:
    """F6: what comes behind the joint step is each run's own."""
    bench = Bench(parallel=2, fault_at_token=5)
    bench.turns(60, asked(0), asked(1), ack=True)
    ends = [m.reason for m in bench.said if isinstance(m, Ended)]
    assert sorted(ends) == ["fault", "length"]
    left = next(m.run for m in bench.said if isinstance(m, Ended) and m.reason == "length")
    assert answers(bench.line)[left][0] == alone(asked(left))


# -- a model -----------------------------------------------------------------------------------------------------------


def made(path: Path, parallel: int, speculate: bool, drafting: Any = None) -> tuple[Engine, Line]:
    line, failpoints = Line(), Failpoints({})
    config = Config(
        1, str(path), device="cpu", threads=1, prefix_chunk=64, safe_rows=16, parallel=parallel, speculate=speculate
    )
    loaded = load(config, open_checkpoint(path), registry.build, line, failpoints)
    line.said.clear()
    if loaded.model.alike == 1:
        pytest.skip("rows do not come out alike here")
    return Engine(config, loaded, line, failpoints, drafting(loaded) if drafting else None), line


def driven(engine: Engine, line: Line, *starts: Start) -> dict[int, tuple[list[int], list[TokenLogprob]]]:
    line.said.clear()
    line.inbox += starts
    while sum(isinstance(m, Ended) for m in line.said) < len(starts):
        at = len(line.said)
        engine.turn()
        line.inbox += [Seen(1, m.run, m.start + len(m.ids)) for m in line.said[at:] if isinstance(m, Tokens)]
    return answers(line)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_model_answers_together_as_alone(tmp_path: Path, kind: str) -> None:
    """M6, F8, F7: a tiny model, bit for bit: log-probabilities are equal, for 2 and 4 runs with drafts."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": kind})
    plain, engine = made(path, 1, False), made(path, 4, True, forced())
    starts = [asked(slot, prompt=20 + 3 * slot, max_tokens=24, logprobs=2) for slot in range(4)]
    expected = {start.run: driven(*plain, msgspec.structs.replace(start, slot=0))[start.run] for start in starts}
    for count in (1, 2, 4):
        got = driven(*engine, *starts[:count])
        assert got == {run: expected[run] for run in range(count)}
    ended = [m for m in engine[1].said if isinstance(m, Ended)]
    assert sum(m.accepted for m in ended) > 0 and sum(m.drafted - m.accepted for m in ended) > 0


@pytest.mark.parametrize("mtp", [False, True])
def test_a_hybrid_model_answers_together_as_alone(tmp_path: Path, mtp: bool) -> None:
    """M6, F8, F7: with recurrent layers too, and with what its own draft layer proposes."""
    path = hybrids.save(hybrids.reference(), tmp_path, mtp=mtp)
    plain, engine = made(path, 1, False), made(path, 3, True, layer_drafts if mtp else forced())
    starts = [asked(slot, prompt=20 + 3 * slot, max_tokens=16, logprobs=1) for slot in range(3)]
    expected = {start.run: driven(*plain, msgspec.structs.replace(start, slot=0))[start.run] for start in starts}
    assert driven(*engine, *starts) == expected
    assert sum(m.drafted for m in engine[1].said if isinstance(m, Ended)) > 0


@pytest.mark.parametrize("mtp", [False, True])
def test_a_joint_step_that_failed_is_computed_again(tmp_path: Path, mtp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6, F8: where states were led on before it failed, nobody's answer is another: each run is tried alone."""
    path = hybrids.save(hybrids.reference(), tmp_path, mtp=mtp)
    plain, engine = made(path, 1, False), made(path, 2, True, layer_drafts if mtp else forced())
    starts = [asked(slot, prompt=20 + 3 * slot, max_tokens=16, logprobs=1) for slot in range(2)]
    expected = {start.run: driven(*plain, msgspec.structs.replace(start, slot=0))[start.run] for start in starts}
    model, failed = engine[0]._loaded.model, []
    forward = model.forward

    def failing(parts: list[Rows]) -> Tensor:
        logits = forward(parts)
        if len(parts) > 1:
            failed.append(len(parts))
            if len(failed) % 2:
                raise RuntimeError
        return logits

    monkeypatch.setattr(model, "forward", failing)
    assert driven(*engine, *starts) == expected and len(failed) > 2


def layer_drafts(loaded: Loaded) -> Drafting:
    shapes = Shapes({1: 1.0}, learned=False, always=True)
    return Drafting(shapes, 32, drafters(loaded.model, loaded.caches, False))


def test_greedy_and_sampled_side_by_side(tmp_path: Path) -> None:
    """F8: what one run asks for moves nothing in another's answer."""
    path = write_gguf(tmp_path / "tiny.gguf", {})
    engine = made(path, 2, True)
    first = driven(*engine, msgspec.structs.replace(asked(0), sampling=GREEDY))
    both = driven(*engine, msgspec.structs.replace(asked(0), sampling=GREEDY), asked(1))
    assert both[0] == first[0]
