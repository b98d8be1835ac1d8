"""What the core hears of the engine's caches and drafts, and what a client and the log are told of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeline import effects as do
from pipeline import events as ev
from pipeline import view
from pipeline.core import Core
from pipeline.http.shapes import figures
from pipeline.request import Drafts, Memory
from pipeline.settings import Policy
from stages.hashes import hashes

SALT = b"salt"
PROMPT = list(range(300))


class Told:
    """A core with a ready engine; ``tell`` posts facts one after another and keeps the effects."""

    def __init__(self) -> None:
        self.core, self.effects = Core(Policy()), []
        self.core.begin(0.0)
        self.tell(ev.EngineDescribed(1, 1_000), ev.EngineReady(1, 1.0, 64))

    def tell(self, *events: ev.Event) -> None:
        for event in events:
            sent = msgspec.json.decode(msgspec.json.encode(event), type=ev.Event)
            self.effects += self.core.handle(sent, float(len(self.effects)))

    def admit(self, id: int = 1, choices: int = 1, tokens: list[int] = PROMPT) -> int:
        """A request up to its first run; the run's number."""
        self.tell(
            ev.Received(id, f"{id:024x}", "chat", 10, 0, 0.0), ev.Checked(id, stream=True, choices=choices),
            ev.Fetched(id), ev.Prepared(id, len(tokens), hashes=hashes(tokens, SALT)),
        )  # fmt: skip
        run = self.core.memory.next_run - 1
        self.tell(ev.MemoryRead(1, run, 0, 0, 0, 0))
        return run

    def only(self, kind: type) -> Any:
        [found] = [effect for effect in self.effects if isinstance(effect, kind)]
        return found

    def line(self) -> str:
        """The one log line of the one request."""
        [line] = [effect.text for effect in self.effects if isinstance(effect, do.Log) and "[req]" in effect.text]
        return line


def resident(where: str, slot: int, tokens: list[int], nbytes: int = 0, epoch: int = 1) -> ev.Resident:
    return ev.Resident(epoch, where, slot, len(tokens), hashes(tokens, SALT), nbytes)


@pytest.mark.parametrize("source", ["slot", "park", "disk", "end"])
def test_resumed_rows_are_cached_tokens(source: str) -> None:
    """F3, F4: what was resident is cached_tokens and cache_n; the rest of the prompt is prompt_n. The log has both."""
    told = Told()
    run = told.admit()
    told.tell(ev.RunResumed(1, run, 256, source))
    assert told.core.memory.requests[1].rows_done == 256
    told.tell(ev.ChunkDone(1, run, 300, 300, 1.0), ev.Progress(1, 1, run, 1), ev.RunEnded(1, run, "stop", 300, 1))
    end = told.only(do.Finish)
    shown = figures(end)
    assert shown["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}
    assert (shown["timings"]["cache_n"], shown["timings"]["prompt_n"]) == (256, 44)
    assert " cached=256 " in told.line()
    assert f" from={source}" in told.line()


def test_nothing_resident_says_nothing() -> None:
    """P1: a request that read its whole prompt has cached=0 and no place it came from, and none without drafts."""
    told = Told()
    run = told.admit()
    told.tell(ev.RunResumed(1, run, 0, "none"), ev.Progress(1, 1, run, 1), ev.RunEnded(1, run, "stop", 300, 1))
    assert " cached=0 " in told.line()
    assert "from=" not in told.line()
    assert "accept=" not in told.line()


def test_later_choices_count_the_prompt_once() -> None:
    """F11: the second choice begins at the prompt's kept end; the request's cached tokens are the first one's."""
    told = Told()
    run = told.admit(choices=2)
    told.tell(ev.RunResumed(1, run, 128, "slot"), ev.Progress(1, 1, run, 1), ev.RunEnded(1, run, "stop", 300, 1))
    told.tell(
        ev.RunResumed(1, run + 1, 300, "end"), ev.Progress(1, 1, run + 1, 1), ev.RunEnded(1, run + 1, "stop", 300, 1)
    )
    assert told.only(do.Finish).cached_tokens == 128
    assert " from=slot " in told.line()


def test_drafts_are_counted_over_choices() -> None:
    """F4: draft_n and draft_n_accepted sum rounds and choices; the engine's totals at a run's end stand."""
    told = Told()
    run = told.admit(choices=3)
    told.tell(ev.Progress(1, 1, run, 3, drafted=4, accepted=2), ev.Progress(1, 1, run, 4, drafted=4, accepted=0))
    assert told.core.memory.requests[1].drafts == Drafts(2, 8, 2)
    told.tell(ev.RunEnded(1, run, "stop", 300, 4, rounds=3, drafted=10, accepted=2))
    # The second is stopped in its text: what its run did behind that is not counted.
    told.tell(ev.Progress(1, 1, run + 1, 2, drafted=3, accepted=1, stopped=True, keep=1))
    told.tell(ev.RunEnded(1, run + 1, "cancelled", 301, 2, rounds=2, drafted=6, accepted=1))
    told.tell(ev.Progress(1, 1, run + 2, 1), ev.RunEnded(1, run + 2, "length", 301, 1))
    timings = figures(told.only(do.Finish))["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (13, 3)
    assert " rounds=5 drafted=13 accept=0.23 " in told.line()


def test_the_newest_word_on_a_place_stands() -> None:
    """M3: what each slot, parked conversation and file holds is known by hashes; a word of no rows clears it."""
    told = Told()
    told.tell(resident("slot", 0, PROMPT[:70]), resident("park", 1, PROMPT[:200], 5), resident("park", 2, [7] * 64, 6))
    told.tell(resident("disk", 1, PROMPT[:64], 9), resident("slot", 0, PROMPT[:140]), resident("park", 2, []))
    told.tell(resident("slot", 0, [], epoch=2))
    assert view.cache(told.core.memory) == {
        "slots": [{"slot": 0, "rows": 140}],
        "park": {"entries": 1, "rows": 200, "bytes": 5},
        "disk": {"entries": 1, "rows": 64, "bytes": 9},
    }
    told.admit()
    request = told.core.memory.requests[1]
    assert request.shared_rows == 192
    assert view.request_view(request, told.core.memory, 9.0)["shared_rows"] == 192


def test_what_was_held_is_lost_with_the_engine() -> None:
    """I11: a new engine says anew what it holds and does; the snapshot of all that goes through JSON."""
    told = Told()
    told.tell(resident("slot", 0, PROMPT), ev.OwnWork(1, "disk write", True), ev.OwnWork(1, "park copy", True))
    told.tell(ev.OwnWork(1, "disk write", False))
    memory = told.core.memory
    assert memory.engine.own_work == ["park copy"]
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory
    told.tell(ev.EngineDied(1, -9), ev.OwnWork(1, "late", True))
    assert (memory.residents, memory.engine.own_work) == ([], [])


def test_hashes_leave_with_their_request() -> None:
    """P1: an ended request keeps no hashes."""
    told = Told()
    told.admit()
    assert len(told.core.memory.requests[1].hashes) == 4
    told.tell(ev.HungUp(1))
    assert told.core.memory.recent[0].hashes == []
