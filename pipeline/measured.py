"""What a recorded trace says of its engine and its clients: what work cost, how long answers were, how bodies came.

A what-if (row R6) and a simulation (row R7) run by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from pipeline import events as ev
from pipeline.modelled import Costs, Store

Facts = Sequence[tuple[float, ev.Event]]
Choice = tuple[int, int]
"""A request and which of its choices."""


class Answer(msgspec.Struct, frozen=True):
    """How long an answer was. Not ``whole``: its limit, its client or a time-out cut it, so it had more to say."""

    tokens: int
    whole: bool
    calls: int = 0


class Asking(msgspec.Struct, frozen=True):
    """What is usual of a request here, for one whose body was never read: its facts, and seconds between them."""

    checked: ev.Checked
    prepared: ev.Prepared
    to_checked: float = 0.0
    to_fetched: float = 0.0
    to_prepared: float = 0.0


class Joint(msgspec.Struct):
    """Tokens and seconds of the rounds that so many answers shared."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second of all together."""
        return self.tokens / self.seconds


class _Work:
    """What runs cost, event by event. By run: rows ``done``, tokens ``written``, the workspace ``read`` for it."""

    def __init__(self) -> None:
        self.about = Costs(told_s=0.0)
        self.rows, self.reading, self.most = 0, 0.0, 0
        self.rounds: dict[int, Joint] = {}
        self.took: dict[int, int] = {}  # workspaces by rows
        self._done: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._places: dict[tuple[str, int], bool] = {}
        self._guests: dict[int, bool] = {}

    def add(self, event: ev.Event) -> None:
        """One more event. Of a guest its copy's size alone: its steps are no sample (row K6)."""
        match event:
            case ev.EngineDescribed():
                self._know(window=event.window)
            case ev.EngineReady():
                store = _store(self.about.store, event)
                self._know(load_s=event.load_s, safe_rows=event.safe_rows, store=store)
            case ev.MemoryRead():
                self._know(store=_store(self.about.store, event))
                self._read[event.run] = event.workspace
            case ev.GuestStarted():
                self._guests[event.run] = True
                if event.rows:
                    self._know(row_bytes=event.nbytes // event.rows)
            case ev.RunResumed():
                self._done[event.run] = event.rows
            case ev.ChunkDone() if event.ms and event.run not in self._guests:
                self.rows += event.done - self._done.get(event.run, 0)
                self.reading += event.ms / 1_000
                self._done[event.run] = event.done
                self.took[event.total] = self._read.get(event.run, 0)
            case ev.Progress() if event.run not in self._guests:
                self._round(event)
            case ev.Resident():
                self._places.pop((event.where, event.slot), None)
                if event.rows:
                    self._places[event.where, event.slot] = True
                self.most = max(self.most, len(self._places))
            case _:
                pass

    def _know(self, **what: Any) -> None:
        self.about = msgspec.structs.replace(self.about, **what)

    def _round(self, event: ev.Progress) -> None:
        """What several shared took as long for each. An answer's first token came with its prompt's last row."""
        if event.ms and event.run in self._written:
            joint = self.rounds.setdefault(event.shared, Joint())
            joint.tokens += event.n - self._written[event.run]
            joint.seconds += event.ms / 1_000 / event.shared
        self._written[event.run] = event.n


def costs(events: Iterable[ev.Event]) -> Costs | None:
    """What the engine's work cost; None where no prompt was read and answered."""
    work = _Work()
    for event in events:
        work.add(event)
    rounds = {shared: joint for shared, joint in work.rounds.items() if joint.tokens > 0 and joint.seconds > 0}
    if not rounds or work.rows <= 0 or work.reading <= 0:
        return None
    decode, table = _joint(rounds, work.about.joint)
    store = work.about.store
    if not store.workspaces:  # the engine said nothing of them when it started
        store = msgspec.structs.replace(store, workspaces=tuple(sorted(work.took.items())))
    return msgspec.structs.replace(
        work.about, prefill=work.rows / work.reading, decode=decode, joint=table, held=max(0, work.most - 1),
        store=store,
    )  # fmt: skip


def _joint(rounds: Mapping[int, Joint], usual: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """Tokens/s of one alone, and of several by how many: measured where they were seen together, else as is usual."""
    fewest = min(rounds)
    decode = rounds[fewest].rate / usual[min(fewest, len(usual)) - 1]
    table = [
        rounds[n].rate / decode if n in rounds else usual[min(n, len(usual)) - 1]
        for n in range(1, max(len(usual), *rounds) + 1)
    ]
    return decode, tuple(table)


def _store(before: Store, event: ev.EngineReady | ev.MemoryRead) -> Store:
    """Memory by the newest word on it."""
    if isinstance(event, ev.EngineReady):
        return msgspec.structs.replace(
            before, ceiling=event.ceiling, peak_limit=event.peak_limit, slack=event.slack,
            workspaces=tuple(event.workspaces), most_rows=event.most_rows, device=event.device,
        )  # fmt: skip
    return msgspec.structs.replace(
        before, allocated=event.allocated, reserved=event.reserved, peak=event.peak, free=event.free,
        levels=tuple(event.levels), growth=event.growth,
    )  # fmt: skip


def answers(events: Iterable[ev.Event], runs: Mapping[int, Choice]) -> dict[Choice, Answer]:
    """How long each answer was, by its last run. ``runs``: whose each run was."""
    out: dict[Choice, Answer] = {}
    for event in events:
        if not isinstance(event, ev.Progress | ev.RunEnded) or event.run not in runs:
            continue
        of = runs[event.run]
        before = out.get(of, Answer(0, False))
        if isinstance(event, ev.Progress):
            out[of] = Answer(event.n, event.stopped, event.closed_calls)
        elif event.reason == "cancelled":  # a stop in the text ended it, or it was cut
            out[of] = msgspec.structs.replace(before, tokens=max(before.tokens, event.n))
        else:
            out[of] = Answer(event.n, event.reason == "stop", event.closed_calls)
    return out


def expected(answer: Answer | None, others: Sequence[Answer], most: int) -> int:
    """Tokens of an answer when nothing cuts it.

    One that was never begun: the median of the others. One that was cut: of those that went on beyond it, without any
    as many as it may.
    """
    known = sorted(one.tokens for one in others if one.whole) or sorted(one.tokens for one in others)
    if answer is None:
        return int(median(known)) if known else most
    if answer.whole:
        return answer.tokens
    longer = [tokens for tokens in known if tokens > answer.tokens]
    return int(median(longer)) if longer else most


def asking(facts: Facts) -> Asking:
    """What is usual of the trace's requests; of a trace without any that was read, a stream of one token's prompt."""
    received: dict[int, float] = {}
    at: dict[str, dict[int, float]] = {"Checked": {}, "Fetched": {}, "Prepared": {}}
    checked, prepared = [], []
    for time, event in facts:
        match event:
            case ev.Received():
                received[event.request] = time
            case ev.Checked(code=""):
                at["Checked"][event.request] = time
                checked.append(event)
            case ev.Fetched():
                at["Fetched"][event.request] = time
            case ev.Prepared(code=""):
                at["Prepared"][event.request] = time
                prepared.append(event)
            case _:
                pass
    streams = sum(event.stream for event in checked) * 2 >= len(checked)
    return Asking(
        ev.Checked(
            0, body_bytes=_middle([event.body_bytes for event in checked]), stream=streams,
            messages=_middle([event.messages for event in checked]),
            max_tokens=_middle([event.max_tokens for event in checked]),
        ),
        ev.Prepared(0, prompt_tokens=max(1, _middle([event.prompt_tokens for event in prepared]))),
        _between(received, at["Checked"]), _between(at["Checked"], at["Fetched"]),
        _between(at["Fetched"], at["Prepared"]),
    )  # fmt: skip


def _between(first: Mapping[int, float], then: Mapping[int, float]) -> float:
    return median([time - first[request] for request, time in then.items() if request in first] or [0.0])


def _middle(numbers: Sequence[int]) -> int:
    return int(median(numbers)) if numbers else 0
