"""engine/worker.py: the loop with the fake model, then the process, then the process with the embedded model."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from engine.drafting import Drafting
from engine.failpoints import EXIT_CODE, Failpoints
from engine.link import Died, command_for
from engine.load import Loaded, load
from engine.models.batch import Rows
from engine.protocol import (
    Cancel,
    Chunk,
    Config,
    Declined,
    Described,
    Ended,
    FromEngine,
    Loading,
    Measure,
    Memory,
    OwnWork,
    Ready,
    Resident,
    Sampling,
    Seen,
    Start,
    ToEngine,
    Tokens,
)
from engine.threads import Threads
from engine.weights.embedded import embedded_model
from engine.worker import Engine
from tests.engine_client import PATIENCE, Client
from tests.fake_engine import POISON, SECRET, build, checkpoint

FAKE = Config(1, "fake", device="cpu", threads=1, prefix_chunk=64, safe_rows=8, speculate=False)
GREEDY = Sampling(temperature=0)


def start(run: int = 1, prompt: int = 20, max_tokens: int = 5, stop_ids: list[int] | None = None, **more: Any) -> Start:
    tokens = [3 + i % 40 for i in range(prompt)]
    return Start(1, run, more.pop("slot", 0), tokens, more.pop("sampling", GREEDY), max_tokens, stop_ids or [], **more)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- the loop, in this process -------------------------------------------------------------------------------------


class Line:
    """The pipe's place: ``inbox`` is where the next safe point finds messages. What is resident is told apart."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.said: list[FromEngine] = []
        self.resident: list[FromEngine] = []

    def post(self, message: FromEngine) -> None:
        (self.resident if isinstance(message, Resident | OwnWork) else self.said).append(message)

    def take(self, timeout: float | None) -> list[ToEngine]:
        taken, self.inbox = self.inbox, []
        return taken

    def leave(self, code: int) -> Any:
        raise AssertionError(code)


class Bench:
    """An engine whose turns the test counts. ``drafting`` is asked of what was loaded, where drafts are forced."""

    def __init__(
        self,
        parallel: int = 1,
        config: Config = FAKE,
        made: Callable[..., Any] = build,
        drafting: Callable[[Loaded], Drafting] | None = None,
        **points: int,
    ) -> None:
        torch.manual_seed(0)
        self.line = Line()
        failpoints = Failpoints(points)
        config = msgspec.structs.replace(config, parallel=parallel, threads=torch.get_num_threads())
        self.loaded = load(config, checkpoint(), made, self.line, failpoints)  # type: ignore[arg-type]
        drafts = drafting(self.loaded) if drafting else None
        self.engine = Engine(config, self.loaded, self.line, failpoints, drafts)
        self.line.said.clear()

    @property
    def said(self) -> list[FromEngine]:
        return self.line.said

    def turns(self, count: int, *messages: ToEngine, ack: bool = False) -> list[FromEngine]:
        """So many turns; what was said in them."""
        self.line.inbox += messages
        before = len(self.said)
        for _ in range(count):
            at = len(self.said)
            self.engine.turn()
            if ack:
                for said in self.said[at:]:
                    if isinstance(said, Tokens):
                        self.line.inbox.append(Seen(1, said.run, said.start + len(said.ids)))
        return self.said[before:]

    def answer(self, message: Start) -> list[int]:
        said = self.turns(60, message, ack=True)
        return [i for m in said if isinstance(m, Tokens) and m.run == message.run for i in m.ids]


def test_a_run_from_start_to_end() -> None:
    bench = Bench()
    said = bench.turns(60, start(), ack=True)
    assert [type(m) for m in said] == [Chunk, Chunk, Chunk, Tokens, Tokens, Tokens, Tokens, Tokens, Ended]
    assert [(m.done, m.total) for m in said if isinstance(m, Chunk)] == [(8, 20), (16, 20), (20, 20)]
    assert [m.start for m in said if isinstance(m, Tokens)] == [0, 1, 2, 3, 4]
    ended = said[-1]
    assert isinstance(ended, Ended) and (ended.reason, ended.generated, ended.kept) == ("length", 5, 24)
    assert ended.prefill_ms > 0 and ended.decode_ms > 0


def test_the_model_sees_every_row_once_and_in_order() -> None:
    bench = Bench()
    bench.loaded.model.steps.clear()
    bench.answer(start())
    assert bench.loaded.model.steps == [(8, 0), (8, 8), (4, 16), (1, 20), (1, 21), (1, 22), (1, 23)]


def test_the_answer_does_not_hang_on_what_came_before() -> None:
    """F8: same prompt, same seed, same tokens; sampled too, and in another slot beside another run."""
    sampled = start(sampling=Sampling(seed=9), max_tokens=12)
    alone = Bench(parallel=2).answer(sampled)
    other = Bench(parallel=2)
    other.answer(start(7, prompt=33))
    other.line.inbox.append(start(8, prompt=30, slot=1, sampling=Sampling(seed=1), max_tokens=20))
    assert other.answer(msgspec.structs.replace(sampled, run=9)) == alone
    assert len(set(alone)) > 3
    assert other.answer(msgspec.structs.replace(sampled, run=10, choice=1)) != alone


def test_it_computes_one_round_ahead_and_commits_none() -> None:
    bench = Bench()
    said = bench.turns(30, start())
    assert [type(m) for m in said] == [Chunk, Chunk, Chunk, Tokens]
    assert bench.loaded.model.steps[-1] == (1, 20)  # the second round is computed, and waits
    assert [type(m) for m in bench.turns(30, Seen(1, 1, 1))] == [Tokens]


def test_a_cancel_lands_between_two_prefill_steps() -> None:
    """G1: after every prefill step the engine learns of a client that left, and stops there."""
    bench = Bench()
    bench.turns(2, start())
    said = bench.turns(1, Cancel(1, 1))
    assert [(m.reason, m.kept, m.generated) for m in said if isinstance(m, Ended)] == [("cancelled", 16, 0)]
    assert len(said) == 1 and bench.turns(3) == []


def test_a_cancel_lands_between_two_rounds() -> None:
    """G1: and after every decode round; at most the round under way is computed for nobody."""
    bench = Bench()
    bench.turns(5, start(), ack=True)
    sent = sum(isinstance(m, Tokens) for m in bench.said)
    said = bench.turns(5, Cancel(1, 1, keep=1))
    assert [(m.reason, m.kept, m.generated) for m in said if isinstance(m, Ended)] == [("cancelled", 21, sent)]
    assert len(said) == 1


def test_a_stop_id_and_the_window_end_a_run() -> None:
    bench = Bench()
    first = bench.answer(start(1))
    assert bench.answer(start(2, stop_ids=[first[2]])) == first[: first.index(first[2])]
    assert len(bench.answer(start(3, prompt=90, max_tokens=50))) == 6
    assert [m.reason for m in bench.said if isinstance(m, Ended)] == ["length", "stop", "length"]
    assert bench.turns(2, start(4, prompt=96)) == [Declined(1, 4, "memory")]


def test_a_fault_ends_its_run_alone_and_its_text_reaches_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """F6, I6: the class is told, never the text; the slot is emptied and the engine goes on."""
    bench = Bench(parallel=2)
    poisoned = Start(1, 5, 0, [3, 4, POISON], GREEDY, 5, [])
    said = bench.turns(60, start(4, slot=1), poisoned, ack=True)
    ends = {m.run: m for m in said if isinstance(m, Ended)}
    assert (ends[5].reason, ends[5].why, ends[5].kept, ends[5].generated) == ("fault", "RuntimeError", 0, 0)
    assert ends[4].reason == "length"
    assert len(bench.answer(start(6))) == 5
    assert SECRET not in repr(bench.said) and "xyzzy" not in capsys.readouterr().err


def test_a_device_that_is_lost_ends_the_engine() -> None:
    """I11: a fault that would meet every later run too is for a new start to mend; the run hears of it first."""
    bench = Bench()
    bench.engine._loaded = dataclasses.replace(bench.loaded, device="meta")  # a device that gives no number back
    poisoned = Start(1, 1, 0, [3, POISON], GREEDY, 5, [])  # any fault asks whether the device is still there
    with pytest.raises(AssertionError, match="1"):
        bench.turns(1, poisoned)
    assert [m.reason for m in bench.said if isinstance(m, Ended)] == ["fault"]


def test_an_empty_prompt_is_a_fault() -> None:
    said = Bench().turns(3, Start(1, 1, 0, [], GREEDY, 5, []))
    assert [(m.reason, m.why) for m in said if isinstance(m, Ended)] == [("fault", "ValueError")] and len(said) == 1


def test_threads_follow_the_neighbour_in_decode_and_never_in_prefill() -> None:
    """F8: a prefill step's bits hang on its thread count, so that never changes."""
    torch.set_num_threads(2)
    bench = Bench()
    used: list[tuple[bool, int]] = []
    forward = bench.loaded.model.forward

    def spy(parts: list[Rows]) -> torch.Tensor:
        used.append((parts[0].draft, torch.get_num_threads()))
        return forward(parts)

    bench.loaded.model.forward = spy  # type: ignore[method-assign]
    bench.engine._threads = Threads(2, 1e-12)  # any step is far over what one thread is said to take
    bench.answer(start(1, max_tokens=6))
    bench.answer(start(2, max_tokens=3))
    assert {threads for decoded, threads in used if not decoded} == {2}
    assert [threads for decoded, threads in used if decoded] == [2, 1, 1, 1, 1, 1, 1]


def test_memory_is_answered_at_the_next_safe_point() -> None:
    bench = Bench()
    bench.turns(1, start())
    memory, *_ = bench.turns(1, Measure(1, 7, 50), Measure(2, 8, 50))
    assert isinstance(memory, Memory) and memory.run == 7
    assert memory.allocated == 1000 + 96 * 8 and memory.reserved > 0 and memory.peak > 0
    assert memory.workspace == 8 * 48  # of a prefill of 50 rows the last whole step: 8 rows behind 40
    assert sum(isinstance(m, Memory) for m in bench.said) == 1


def test_failpoints_of_a_run() -> None:
    bench = Bench(fault_at_token=3, fault_at_chunk=4)
    assert len(bench.answer(start(1))) == 2
    assert bench.answer(start(2, prompt=40)) == []
    assert len(bench.answer(start(3, prompt=40))) == 5
    assert [m.why for m in bench.said if isinstance(m, Ended)] == ["FailpointFault", "FailpointFault", ""]


# -- the process, with the fake model --------------------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[Any]:
    clients: list[Client] = []

    def make(**changes: Any) -> Client:
        clients.append(Client(msgspec.structs.replace(FAKE, **changes), "tests.fake_engine"))
        return clients[-1]

    yield make
    for client in clients:
        client.link.close(PATIENCE)


def test_a_process_loads_answers_and_leaves(fake: Any) -> None:
    client = fake()
    client.ready()
    kinds = [type(m) for m in client.said]
    assert kinds[0] is Described and kinds[-1] is Ready and set(kinds[1:-1]) == {Loading}
    ids, ended = client.answer(start())
    assert len(ids) == 5 and ended.reason == "length"
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to handle: it may want to drain first
        os.kill(client.link.pid, number)
    assert client.answer(start(2))[0] == ids
    assert client.close() == [Died(1, 0)]


def test_a_process_that_cannot_understand_leaves(fake: Any) -> None:
    """I11: what is no message ends it, for an engine that hears nothing more must not look alive."""
    client = fake()
    client.ready()
    client.link._sender.send(b"\x01\x00\x00\x00\xc1")
    assert client.next() == Died(1, 1)


def test_a_process_that_dies_has_died_once(fake: Any) -> None:
    client = fake(failpoints={"die_at_token": 3})
    client.ready()
    client.link.send(start())
    got = client.until(Ended, client.acknowledge)
    assert [m.ids for m in got if isinstance(m, Tokens)] and got[-1] == Died(1, EXIT_CODE)
    assert client.close() == []


def test_a_load_can_die_and_can_stand_still(fake: Any) -> None:
    dead = fake(failpoints={"die_at_load": 1})
    assert [type(m) for m in dead.until(Ready)] == [Described, Died]
    still = fake(failpoints={"stall_load": 1})
    assert isinstance(still.next(), Described)
    still.link.close(30)  # even so it leaves when told to
    assert still.next() == Died(1, 0)


def test_a_window_too_long_ends_the_process_with_3(fake: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """I6: an error at start with the sizes, never later."""
    assert fake(max_len=97).next() == Died(1, 3)
    assert "--max-len 97 is longer than the model's window of 96 tokens." in capfd.readouterr().err


def test_the_engine_leaves_with_its_parent() -> None:
    """A parent that is killed closes nothing itself; the end of its pipe is what the engine sees."""
    parent = (
        "import sys, time, msgspec; from engine.link import EngineLink; from engine.protocol import Config, Ready\n"
        "c = msgspec.json.decode(sys.argv[1], type=Config)\n"
        "def post(m):\n    if isinstance(m, Ready): print(link.pid, flush=True)\n"
        "link = EngineLink(c, post, [sys.executable, '-m', 'tests.fake_engine', sys.argv[1]]); link.start()\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", parent, msgspec.json.encode(FAKE).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        engine = psutil.Process(int(process.stdout.readline()))
        process.kill()
        engine.wait(timeout=PATIENCE)  # raises when it is still there


# -- the process, with the embedded model ----------------------------------------------------------------------------

EMBEDDED = embedded_model()
needs_model = pytest.mark.skipif(EMBEDDED is None, reason="the embedded model is not installed")


@pytest.fixture(scope="module")
def real() -> Iterator[Client]:
    client = Client(Config(1, str(EMBEDDED), device="cpu", threads=1, max_len=1024, safe_rows=64))
    client.ready()
    yield client
    client.link.close(PATIENCE)


def prompt(run: int, rows: int = 150, max_tokens: int = 8, **more: Any) -> Start:
    return Start(1, run, 0, [100 + i % 900 for i in range(rows)], more.pop("sampling", GREEDY), max_tokens, [2], **more)


@pytest.mark.e2e
@needs_model
def test_the_embedded_model_loads_and_answers(real: Client) -> None:
    """N2, I6: described first, checked at load, KV allocated for the whole window."""
    described = real.said[0]
    assert isinstance(described, Described) and described.window == 1024 and described.engine == "torch"
    ready = next(m for m in real.said if isinstance(m, Ready))
    assert ready.safe_rows == 64 and ready.selfcheck_ms > 0 and ready.kv_bytes > 0 and ready.device == "cpu"
    real.link.send(Measure(1, 1, 500))
    memory = real.until(Memory)[-1]
    assert isinstance(memory, Memory) and memory.allocated == ready.weights_bytes + ready.kv_bytes
    before = len(real.said)
    _, ended = real.answer(prompt(1, rows=150))
    said = real.said[before:]
    assert [m.done for m in said if isinstance(m, Chunk)] == [64, 128, 150]
    assert ended.reason in ("length", "stop") and sum(isinstance(m, Ended) for m in said) == 1


@pytest.mark.e2e
@needs_model
def test_the_same_seed_gives_the_same_answer(real: Client) -> None:
    """F8: same seed, same request, same tokens; greedy too; another seed another answer."""
    sampled = Sampling(temperature=1.5, seed=11)
    first, _ = real.answer(prompt(20, max_tokens=12, sampling=sampled))
    assert real.answer(prompt(21, max_tokens=12, sampling=sampled))[0] == first
    others = [real.answer(prompt(22 + s, max_tokens=12, sampling=Sampling(1.5, seed=s)))[0] for s in range(2)]
    assert any(other != first for other in others)
    assert real.answer(prompt(30))[0] == real.answer(prompt(31))[0]


@pytest.mark.e2e
@needs_model
def test_a_run_is_left_at_a_prefill_step_and_at_a_round(real: Client) -> None:
    """G1: it stops at the next safe point and the slot is free at once."""
    real.link.send(prompt(40, rows=1000))
    real.until(Chunk)
    real.link.send(Cancel(1, 40))
    ended = real.until(Ended)[-1]
    assert isinstance(ended, Ended) and ended.reason == "cancelled" and 64 <= ended.kept < 1000
    real.link.send(prompt(41, rows=64, max_tokens=200))
    real.until(Tokens)
    real.link.send(Cancel(1, 41, keep=1))
    got = real.until(Ended)
    assert not [m for m in got if isinstance(m, Tokens)]
    assert isinstance(got[-1], Ended) and (got[-1].reason, got[-1].kept) == ("cancelled", 65)
    assert real.answer(prompt(42))[1].reason in ("length", "stop")


@pytest.mark.e2e
@needs_model
def test_without_seen_it_is_never_two_rounds_ahead(real: Client) -> None:
    real.link.send(prompt(50, rows=64, max_tokens=50))
    real.until(Tokens)
    with pytest.raises(queue.Empty):
        real.inbox.get(timeout=2.0)
    real.link.send(Seen(1, 50, 1))
    assert isinstance(real.until(Tokens)[-1], Tokens)
    real.link.send(Cancel(1, 50))
    real.until(Ended)


@pytest.mark.e2e
@needs_model
def test_the_scripted_process_speaks_as_the_real_one(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": [{"text": "Hello there"}, {"text": "Hi", "then": "die"}]}))
    client = Client(Config(1, str(EMBEDDED), safe_rows=64, script=str(script)))
    assert client.ready().device == "script"
    described = client.said[0]
    assert isinstance(described, Described) and described.engine == "scripted" and described.template
    ids, ended = client.answer(prompt(1, max_tokens=50))
    assert ids and ended.reason == "stop"
    client.link.send(prompt(2, max_tokens=50))
    assert client.until(Ended, client.acknowledge)[-1] == Died(1, EXIT_CODE)
    assert client.close() == []


def test_the_scripted_process_says_why_it_cannot_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    client = Client(Config(1, str(tmp_path / "none.gguf"), script="none.json"))
    assert client.next() == Died(1, 2) and client.close() == []
    assert "There is no model" in capfd.readouterr().err
    assert "engine.scripted" in command_for(Config(1, "m", script="s"))
