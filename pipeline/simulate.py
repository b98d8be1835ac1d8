"""Simulation (row R7): the same core in virtual time, driven by a trace's arrivals and a modelled engine.

A run is made twice. The first gives the holds: from when to when each request had its slot. The second, which is the
same event for event, stops at 10, 30, 50, 70 and 90 % of each and asks the stage ``wait`` what it would tell: a waiter
right behind the holders, one at the end of the line, and each that waits. What then happened is its judge. The estimate
is the core's own: it sees prompts' lengths, kinds and ended requests; no limit is asked for, so all have the server's
default.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

import msgspec

from pipeline import effects as do
from pipeline import events as ev
from pipeline.arrivals import SIDE_TOKENS, Asked, Session
from pipeline.core import Core
from pipeline.forecast import ended, said
from pipeline.modelled import Costs, ModelledEngine, Wanted
from pipeline.request import LaneCounts
from pipeline.settings import Policy
from pipeline.states import RequestState, SlotState
from pipeline.table import ENDED
from stages.wait import History

ASKED_AT = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of each hold."""
BODY_BYTES = 100
PLACES = ("next", "last", "waits")
"""Who is told: one right behind the holders, one at the end of the line, each that waits."""

Progress = Callable[[float], None]
"""Told the virtual time, now and then."""


class Told(msgspec.Struct):
    """What somebody was told at a time, and how long it really was; -1: it never came to a slot."""

    place: str
    at: float
    estimate: float | None
    real: float = -1.0


class Served(msgspec.Struct, frozen=True):
    """A request's times, in seconds."""

    queued: float
    ttft: float
    total: float
    side: bool = False


class Outcome(msgspec.Struct):
    """What a run came to. ``rows``: how requests ended, by the row; ``queue``: its length when it changed.

    ``lane``: what came of offers to the side lane.
    """

    requests: int = 0
    rows: dict[str, int] = {}
    served: list[Served] = []
    told: list[Told] = []
    holds: list[tuple[float, float]] = []
    queue: list[tuple[float, int]] = []
    lane: LaneCounts = msgspec.field(default_factory=LaneCounts)
    first_end: float = inf
    ends_at: float = 0.0


class _Probe(msgspec.Struct):
    """Somebody who is not there: the slot that nobody of those ``ahead`` takes would be its own."""

    told: Told
    ahead: list[int]


class Simulation:
    """One run. ``ask`` are the times to ask at; ``history`` is what the server knew before."""

    def __init__(
        self, sessions: list[Session], policy: Policy, costs: Costs, ask: list[float], history: History | None = None
    ) -> None:
        self.policy, self.costs = policy, costs
        self.core = Core(policy)
        self.outcome = Outcome()
        self.core.memory.history = history or History()
        self.now = 0.0
        self._engine = ModelledEngine(costs, self._wanted)
        self._ask = ask[::-1]
        self._sessions = sessions
        self._asked: dict[int, tuple[Asked, int, int]] = {}  # by request: what, of which session, its place there
        self._heap: list[tuple[float, int, ev.Event]] = []
        self._posted = 0
        self._wake = inf
        self._begun: dict[int, float] = {}  # by slot
        self._probes: list[_Probe] = []
        self._waiters: dict[int, list[Told]] = {}  # by request

    def run(self, progress: Progress | None = None) -> Outcome:
        """Until nobody is left."""
        self._carry_out(self.core.begin(0.0))
        for number, session in enumerate(self._sessions):
            for place, asked in enumerate(session.requests):
                if asked.think < 0:
                    self._arrive(asked, number, place, asked.at)
        count = 0
        while self._turn():
            count += 1
            if progress is not None and count % 1_000 == 0:
                progress(self.now)
        self.outcome.ends_at, self.outcome.lane = self.now, self.core.memory.lane
        return self.outcome

    def _turn(self) -> bool:
        """The next thing that is due; False when there is none."""
        posted, engine = self._heap[0][0] if self._heap else inf, self._engine.due()
        first = min(posted, engine, self._wake)
        asked = self._ask[-1] if self._ask else inf
        if asked < first or (asked == inf and first == inf):
            return self._question(asked)
        self.now = max(self.now, first)
        if posted <= first:
            self._handle(heapq.heappop(self._heap)[2])
        elif engine <= first:
            self._post(self._engine.advance(self.now))
        else:
            self._wake = inf
            self._handle(ev.Tick())
        return True

    # -- the runner's part -----------------------------------------------------------------------------------------

    def _arrive(self, asked: Asked, session: int, place: int, at: float) -> None:
        id = self.outcome.requests = self.outcome.requests + 1
        self._asked[id] = asked, session, place
        self._post([(at, ev.Received(id, f"{id:024x}", "chat", BODY_BYTES, id, at))])

    def _wanted(self, id: int, _choice: int = 0) -> Wanted:
        asked = self._asked[id][0]
        return Wanted(asked.prompt, asked.written, asked.hashes())

    def _post(self, events: list[tuple[float, ev.Event]]) -> None:
        for time, event in events:
            self._posted += 1
            heapq.heappush(self._heap, (time, self._posted, event))

    def _handle(self, event: ev.Event) -> None:
        effects = self.core.handle(event, self.now)
        self._note()
        self._carry_out(effects)

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.ReadBody(id):
                    most = SIDE_TOKENS[1] if self._asked[id][0].lane else 0
                    checked = ev.Checked(id, stream=True, messages=1, body_bytes=BODY_BYTES, max_tokens=most)
                    self._post([(self.now, checked)])
                case do.Fetch(id):
                    self._post([(self.now, ev.Fetched(id))])
                case do.Prepare(id):
                    asked, session, _ = self._asked[id]
                    thinks = self._sessions[session].kind == "thinking"
                    hashes, lane = asked.hashes(), asked.lane
                    prepared = ev.Prepared(id, asked.prompt, hashes=hashes, thinks=thinks, lane=lane)
                    self._post([(self.now, prepared)])
                case do.Spawn(epoch):
                    self._post(self._engine.start(epoch, self.now))
                case do.WakeAt(time):
                    self._wake = time
                case do.Finish():
                    self._finished(effect)
                case _:
                    self._post(self._engine.take(effect, self.now))

    def _finished(self, end: do.Finish) -> None:
        """A session goes on after its answer, also after a refusal: its client thinks, then asks the next."""
        asked, session, place = self._asked[end.request]
        if not end.code:
            times = end.queue_ms / 1_000, end.ttft_ms / 1_000, end.total_ms / 1_000
            self.outcome.served.append(Served(*times, asked.lane != ""))
        following = self._sessions[session].requests[place + 1 : place + 2]
        if following and following[0].think >= 0:
            self._arrive(following[0], session, place + 1, self.now + following[0].think)

    # -- what is seen ------------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """The rows an event fired, as what a judge needs of them."""
        memory = self.core.memory
        for step in self.core.take_steps():
            if step.life == "slot":
                self._slot(step.id, step.dest)
            elif step.life == "request" and step.source != step.dest:
                if step.source == RequestState.queued.value:
                    self._left_queue(step.id, step.dest == RequestState.admitted.value)
                if step.dest in (state.value for state in ENDED):
                    self._ended(step.id, step.row)
        if any(slot.state is SlotState.free for slot in memory.slots):
            self._resolve(self._probes)
        length = len(memory.queue)
        if not self.outcome.queue or self.outcome.queue[-1][1] != length:
            self.outcome.queue.append((self.now, length))

    def _slot(self, slot: int, state: str) -> None:
        if state == SlotState.free.value:
            self.outcome.holds.append((self._begun.pop(slot), self.now))
        elif slot not in self._begun:
            self._begun[slot] = self.now

    def _left_queue(self, id: int, admitted: bool) -> None:
        for told in self._waiters.pop(id, []):
            told.real = self.now - told.at if admitted else -1.0
        had_turn = [probe for probe in self._probes if admitted and id not in probe.ahead]
        self._resolve(had_turn)  # somebody behind them has a slot
        for probe in self._probes:
            probe.ahead = [other for other in probe.ahead if other != id]

    def _resolve(self, probes: list[_Probe]) -> None:
        for probe in probes:
            probe.told.real = self.now - probe.told.at
        self._probes = [probe for probe in self._probes if probe.told.real < 0]

    def _ended(self, id: int, row: str) -> None:
        outcome = self.outcome
        outcome.rows[row] = outcome.rows.get(row, 0) + 1
        request = next((r for r in self.core.memory.recent if r.id == id), None)
        if request is not None and ended(request) is not None:
            outcome.first_end = min(outcome.first_end, self.now)

    # -- what would be said --------------------------------------------------------------------------------------------

    def _question(self, at: float) -> bool:
        """Ask at a time; False when there is none left."""
        if not self._ask:
            return False
        self._ask.pop()
        self.now = max(self.now, at)
        memory = self.core.memory
        queue = list(memory.queue)
        free = any(slot.state is SlotState.free for slot in memory.slots)
        if free and not queue:
            return True
        told = said(memory, self.policy, self.now)
        if not free:  # else those who wait cannot take it, and somebody who is not there needs no turn
            self._probes.append(_Probe(self._tell("next", told.next), []))
            self._probes.append(_Probe(self._tell("last", told.last), queue))
        for id, estimate in zip(queue, told.waits, strict=True):
            self._waiters.setdefault(id, []).append(self._tell("waits", estimate))
        return True

    def _tell(self, place: str, estimate: float | None) -> Told:
        told = Told(place, self.now, estimate)
        self.outcome.told.append(told)
        return told


def simulate(
    sessions: list[Session],
    policy: Policy,
    costs: Costs,
    history: History | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Both runs: the second asks at ``ASKED_AT`` of the first one's holds."""
    holds = Simulation(sessions, policy, costs, [], history).run(progress).holds
    ask = sorted(begin + part * (end - begin) for begin, end in holds for part in ASKED_AT)
    return Simulation(sessions, policy, costs, ask, history).run(progress)
