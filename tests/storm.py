"""Thousands of requests through the core in virtual time, each world another weather: ``python -m tests.storm``.

A *world* is one server with its clients, made and driven from a seed and a number alone, so that any of them can be had
again (``--world``). Its weather (``tests/weather.py``) says what is rare elsewhere and common there: memory that is
short, an engine that dies, the side lane, conversations that go on, crowds, a drain. The laws (``tests/laws.py``) are
looked at after every event; counted is how often each row fired, and which fired after which on the same record.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from heapq import heappush
from random import Random
from typing import Any

import msgspec

from engine import protocol as wire
from engine.scripted import Script
from engine.sequence import Sequence
from engine.slots import Keeper
from pipeline import events as ev
from pipeline.request import Request
from pipeline.states import RequestState, SlotState
from pipeline.table import TABLES
from stages.hashes import BLOCK
from tests import weather
from tests.box import Store
from tests.laws import Watched

ROWS = [(life, row.name) for life, rows in TABLES.items() for row in rows]
BATCH = 50
"""Worlds that a process is given at once."""


class Shelf:
    """What an engine keeps from run to run, told as ``Resident``: rows of slot 0, side slots' in the park, files.

    ``blocks``: of a run's prompt. What was evicted is told too.
    """

    def __init__(self, epoch: int, blocks: Any, chance: Random) -> None:
        self._epoch, self._blocks, self._chance = epoch, blocks, chance
        self.held: dict[tuple[str, int], list[bytes]] = {}
        self.said: list[wire.Resident] = []

    def begin(self, slot: int, start: wire.Start, at_end: bool) -> tuple[int, str]:
        """The longest that is held of the prompt, wherever it is."""
        own = self._blocks(start.run)
        best, source = 0, "none"
        for (where, at), blocks in self.held.items():
            rows = BLOCK * next((i for i, (a, b) in enumerate(zip(own, blocks, strict=False)) if a != b),
                                min(len(own), len(blocks)))  # fmt: skip
            if rows > best and (where != "slot" or at == slot):
                best, source = rows, where
        best = min(best, len(start.tokens) - 1)
        if slot == 0 and not at_end:
            self.tell("slot", 0, own[: best // BLOCK], best)
        return best, source

    def end(self, slot: int, run: Sequence) -> int:
        """Rows of slot 0 stay; they are parked, and a side slot's too, where there is room."""
        blocks, parks = self._blocks(run.start.run)[: run.rows // BLOCK], self._chance.random() < 0.8
        if slot == 0:
            self.tell("slot", 0, blocks, run.rows)
        if blocks and parks:
            self.tell(self._chance.choice(("park", "park", "disk")), self._chance.randrange(4), blocks, run.rows)
        return run.rows if parks or not slot else 0

    def tell(self, where: str, slot: int, blocks: list[bytes], rows: int) -> None:
        """A place holds something else now."""
        self.held.pop((where, slot), None)
        if rows:
            self.held[where, slot] = blocks
        self.said.append(wire.Resident(self._epoch, where, slot, rows, blocks, rows))


class Storm(Watched):
    """One world. Acts follow events by chance: ``acts`` and their weights are the weather's, ``often`` an event."""

    def __init__(
        self, chance: Random, acts: dict[str, int], often: float, store: Store, script: Script,
        points: list[dict[str, int]], **policy: Any,
    ) -> None:  # fmt: skip
        self._chance, self._acts, self._often = chance, acts, often
        self._shelf: Shelf | None = None
        self._at_work: list[str] = []
        super().__init__(script, store=store, failpoints=points, **policy)

    def _keeper(self, epoch: int) -> Keeper | None:
        self._shelf = Shelf(epoch, lambda run: list(self.clients[self._runs[run]].plan.hashes), self._chance)
        return self._shelf

    def _hear(self, said: list[tuple[float, Any]]) -> None:
        super()._hear(said)
        if self._shelf is not None and self._shelf.said:
            told, self._shelf.said = self._shelf.said, []
            super()._hear([(self.now, message) for message in told])

    def _tell(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.GiveBack):
            there, stuck = self.store.levels.get(message.level, 0), message.level == "allocator"
            if there and not (stuck and self._chance.random() < 0.85):
                message = wire.GiveBack(message.epoch, message.run, message.level, min(there, message.nbytes))
            else:  # others took it meanwhile, or its blocks are in use
                message = wire.Measure(message.epoch, message.run, self.store.rows)
        super()._tell(message)

    def _handle(self, event: ev.Event) -> None:
        super()._handle(event)
        if self._acts and self._chance.random() < self._often:
            self._act()

    def _now(self, event: ev.Event, after: float = 0.0) -> None:
        """It happens next, before anything else of this time, or so much later."""
        self._count += 1
        heappush(self._heap, (self.now + after, self._count if after else -self._count, event))

    # -- what chance does ------------------------------------------------------------------------------------------

    def _act(self) -> None:
        chance, memory = self._chance, self.core.memory
        act = chance.choices(list(self._acts), list(self._acts.values()))[0]
        live = list(memory.requests.values())
        epoch = memory.engine.epoch
        match act:
            case "leave" | "leave_running" | "leave_gate" | "leave_lane" | "leave_holder":
                of = [request for request in live if _is_in(act, request, self)]
                if of:
                    why = chance.choice(("closed", "closed", "stalled", "cut"))
                    self._now(ev.HungUp(chance.choice(of).id, why), chance.choice((0.0, 0.0, 0.002)))
            case "fault":
                if live:
                    self._now(ev.Faulted(chance.choice(live).id, "text", "KeyError"))
            case "grow":
                reading = [request.id for request in live if request.state is RequestState.received]
                if reading:
                    self._now(ev.BodyGrew(chance.choice(reading), chance.choice((200, 5_000, 1 << 21))))
            case "kill":
                self._now(ev.EngineDied(epoch, -9))
            case "freeze":
                self.freeze()
                if chance.random() < 0.4:  # it comes round once
                    self._now(ev.EngineLoading(epoch, 1, 2), chance.uniform(5.0, 30.0))
            case "work":
                what = chance.choice(("warm-up", "graph capture", "disk write", "park copy", "cache clear"))
                self._now(ev.OwnWork(epoch, what, True))
                self._now(ev.OwnWork(epoch, what, False), chance.choice((0.05, 1.0, 12.0, 25.0)))
            case "evict":
                shelf = self._shelf
                if shelf is not None and shelf.held and self._engine is not None:
                    where, slot = chance.choice(list(shelf.held))
                    if where != "slot":
                        shelf.tell(where, slot, [], 0)
            case "memory":
                self.store.free = chance.choice((90, 150, 250, 400, 2_000))
                self.store.levels, self.store.allocated = weather.levels(chance), chance.choice((100, 300))
                self.store.garbage = chance.choice((0, 0, 100))
            case "drain":
                self._now(ev.Draining())
                if chance.random() < 0.5:
                    self._now(ev.Shutdown(), chance.uniform(0.0, 4.0))


def _is_in(act: str, request: Request, world: Storm) -> bool:
    """Whether that one is meant to leave by this act."""
    lent = world.core.memory.slots[0].state is SlotState.lent
    match act:
        case "leave_running":
            return request.state in (RequestState.prefilling, RequestState.decoding)
        case "leave_gate":
            return request.state is RequestState.admitted
        case "leave_lane":
            return request.state is RequestState.guest or request.offered
        case "leave_holder":
            return request.slot == 0 and (lent or world.core.memory.guest is not None)
    return True


def made(seed: int, number: int) -> Storm:
    """The world of that number, with what its clients send; ``played`` plays it."""
    chance = Random(f"{seed}/{number}")
    kind = weather.TURN[number % len(weather.TURN)]
    loads = (0.0, 3_000.0, 9_000.0) if kind == "memory" else (0.0, 0.0, 3_000.0)
    script = Script(
        answers=weather.answers(chance, kind), load_ms=chance.choice(loads),
        warm_up_ms=chance.choice((0.0, 0.0, 2_000.0)),
    )  # fmt: skip
    world = Storm(
        chance, weather.ACTS[kind], weather.OFTEN[kind], weather.store(chance, kind), script,
        weather.points(chance, kind), **weather.policy(chance, kind),
    )  # fmt: skip
    for at, plan in weather.clients(chance, kind):
        world.arrive(plan, at)
    return world


def played(world: Storm) -> None:
    """Until everybody had an end, and the laws of the end."""
    while world._heap and world.exited is None:
        world.run_until(world.now + 100.0)
    world.run_until(world.now + 1_000.0)
    world._acts = {}
    world.run_until(world.now + 1_000.0)
    world.over()


class Tally(msgspec.Struct):
    """What fired: rows, and rows after rows on one record."""

    requests: int = 0
    worlds: int = 0
    events: int = 0
    rows: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    pairs: Counter[tuple[str, str, str]] = msgspec.field(default_factory=Counter)

    def add(self, world: Storm) -> None:
        """One world more."""
        self.worlds += 1
        self.requests += sum(client.received for client in world.clients.values())
        self.events += len(world.events)
        last: dict[tuple[str, int], str] = {}
        for step in world.steps:
            key = (step.life, step.id)
            self.rows[step.life, step.row] += 1
            if key in last:
                self.pairs[step.life, last[key], step.row] += 1
            last[key] = step.row

    def join(self, other: Tally) -> None:
        """With another's."""
        self.worlds, self.requests = self.worlds + other.worlds, self.requests + other.requests
        self.events += other.events
        self.rows.update(other.rows)
        self.pairs.update(other.pairs)

    def rare(self, least: int) -> dict[str, int]:
        """Rows that fired less often."""
        return {f"{life} {name}": self.rows[life, name] for life, name in ROWS if self.rows[life, name] < least}

    def said(self) -> str:
        """In one line."""
        life, name = min(ROWS, key=lambda key: self.rows[key])
        return (
            f"storm: {self.requests} requests in {self.worlds} worlds, {self.events} events, {self.rows.total()} "
            f"steps, {len(self.pairs)} pairs of rows; the rarest row of {len(ROWS)}: {name} of {life}, "
            f"{self.rows[life, name]} times"
        )

    def table(self) -> str:
        """Every row and every pair with its count."""
        rows = [f"{self.rows[key]:>8} {key[0]:<8} {key[1]}" for key in ROWS]
        pairs = [f"{n:>8} {life:<8} {one} → {other}" for (life, one, other), n in sorted(self.pairs.items())]
        return "\n".join(["rows", *rows, "pairs", *pairs])


class Broken(Exception):
    """A law was broken in a world; the message says how to have it again."""


def storm(seed: int, numbers: Iterable[int], requests: int = sys.maxsize) -> Tally:
    """Play worlds, until so many requests were served."""
    tally = Tally()
    for number in numbers:
        world = made(seed, number)
        try:
            played(world)
        except Exception as error:
            raise Broken(f"python -m tests.storm --seed {seed} --world {number}: {error!r}") from error
        tally.add(world)
        if tally.requests >= requests:
            break
    return tally


def _batch(job: tuple[int, int]) -> Tally:
    seed, first = job
    return storm(seed, range(first, first + BATCH))


def main() -> int:
    """A storm of any size."""
    parser = argparse.ArgumentParser(description="Random requests through the core in virtual time.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--world", type=int, help="one world alone, with its journal's end where a law is broken")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", action="store_true", help="every row and pair with its count")
    args = parser.parse_args()
    if args.world is not None:
        return _one(args.seed, args.world)
    tally = _many(args.seed, args.requests, args.jobs)
    print(tally.table() if args.table else tally.said())
    return 1 if tally.rare(1) else 0


def _one(seed: int, number: int) -> int:
    world = made(seed, number)
    try:
        played(world)
    except AssertionError:
        print(*world.steps[-60:], sep="\n")
        print(*[f"{time:>10.3f} {event}" for time, event in world.events[-20:]], sep="\n")
        raise
    tally = Tally()
    tally.add(world)
    print(tally.said())
    return 0


def _many(seed: int, requests: int, jobs: int) -> Tally:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tally = Tally()
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, ProcessPoolExecutor(jobs) as pool:
        bar = progress.add_task("", total=requests)
        for done in _batches(pool, seed, jobs):
            tally.join(done)
            progress.update(bar, completed=min(tally.requests, requests))
            if tally.requests >= requests:
                pool.shutdown(cancel_futures=True)
                break
    return tally


def _batches(pool: ProcessPoolExecutor, seed: int, jobs: int) -> Iterator[Tally]:
    """One after the other, two a process ahead."""
    waiting = [pool.submit(_batch, (seed, BATCH * i)) for i in range(2 * jobs)]
    first = BATCH * len(waiting)
    while True:
        yield waiting.pop(0).result()
        waiting.append(pool.submit(_batch, (seed, first)))
        first += BATCH


if __name__ == "__main__":
    raise SystemExit(main())
