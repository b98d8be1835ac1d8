"""A what-if after its parting (row R6): the changed core, recorded clients, a modelled engine, virtual time.

Clients do and ask what they did, at their recorded times; the engine has the trace's own costs, answers their recorded
lengths. What the trace cannot tell is assumed, and said: a body that a refusal left unread, an answer never begun or
cut. The modelled engine is never lost and never silent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

import msgspec

from pipeline import effects as do
from pipeline import events as ev
from pipeline.measured import Answer, Choice, Facts, answers, asking, expected
from pipeline.modelled import Costs, ModelledEngine, Run, Wanted
from pipeline.request import Held, due
from pipeline.states import EngineState, RequestState
from pipeline.watched import ASKS, Live, Watched

ARRIVING = ("arrive", "grow", "check", "fetch", "enqueue")
"""Triggers at which the core alone decides that a request goes no further: what would have come was not recorded."""
AWAITS = {
    RequestState.received: "Checked",
    RequestState.validated: "Fetched",
    RequestState.image_fetched: "Prepared",
}
ENDLESS = 1 << 30
"""Tokens: only its limit ends such an answer."""


class Model:
    """The changed core from the parting on. ``left``: the recorded facts behind it."""

    def __init__(self, facts: Facts, left: Facts, old: Watched, new: Watched, costs: Costs) -> None:
        self.costs, self.now = costs, 0.0
        self._old, self._new, self._left = old, new, left
        self._answers = answers((event for _, event in facts), old.runs)
        self._others = list(self._answers.values())
        self._usual = asking(facts)
        self._engine = ModelledEngine(costs, self._wanted)
        self._given = {(type(event).__name__, getattr(event, "request", -1)): True for _, event in facts}
        self._shared = any(isinstance(event, ev.Progress) and event.shared > 1 for _, event in facts)
        self._next_id = 1 + max(old.received, default=0)
        self._heap: list[tuple[float, int, ev.Event]] = []
        self._posted = 0
        self._wake = inf
        self._exited = False
        self._bodies: dict[int, bool] = {}  # whose body is assumed
        self._lengths: dict[Choice, Answer | None] = {}  # whose answer's length is

    def run(self, now: float, effects: Sequence[do.Effect]) -> None:
        """From the parting at ``now``, whose effects are not carried out yet, until nobody is left."""
        new, memory = self._new, self._new.core.memory
        self.now, self._wake, new.modelled = now, due(memory.wake), True
        for effect in effects:
            if isinstance(effect, do.Finish | do.Forget):
                new.ends[effect.request] = msgspec.structs.replace(new.ends[effect.request], modelled=True)
            if isinstance(effect, do.Spread):
                new.spread.pop(effect.request)  # until it is carried out
        self._post([(time, event) for time, event in self._left if self._stays(event)])
        self._take_over(now)
        self._carry_out([effect for effect in effects if not isinstance(effect, ASKS) or isinstance(effect, do.Spawn)])
        for request in list(memory.requests.values()):
            if request.state in AWAITS:
                self._fact(AWAITS[request.state], request.id)
        while not self._exited and self._turn():
            pass

    def assumed(self) -> list[str]:
        """What the trace does not tell, a sentence each."""
        usual, out = self._usual, []
        if self._bodies:
            asked = usual.checked.max_tokens
            body = f"{usual.prepared.prompt_tokens} prompt tokens, {f'limit {asked}' if asked else 'no limit'}"
            out.append(f"{_count(self._bodies, 'body was', 'bodies were')} never read: as is usual here, {body}.")
        never = [answer for answer in self._lengths.values() if answer is None]
        cut = [answer for answer in self._lengths.values() if answer is not None]
        if never:
            length = f"{expected(None, self._others, 0)} tokens, the median, or its limit"
            out.append(f"{_count(never, 'answer was', 'answers were')} never begun: {length}.")
        if cut:
            length = "as those that went on beyond it, or its limit"
            out.append(f"{_count(cut, 'answer was', 'answers were')} cut in the recording: {length}.")
        if self._new.core.policy.slots > 1 and not self._shared:
            table = ", ".join(f"{part:g}" for part in self.costs.joint[1:])
            out.append(f"No two answers were written at once: 2, 3, … are taken to write {table} times one's tokens.")
        return out

    # -- what is due ---------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """The next thing that is due; False when there is none."""
        posted, engine = self._heap[0][0] if self._heap else inf, self._engine.due()
        first = min(posted, engine, self._wake)
        if first == inf:
            return False
        self.now = max(self.now, first)
        if posted <= first:
            self._handle(heapq.heappop(self._heap)[2])
        elif engine <= first:
            self._post(self._engine.advance(self.now))
        else:
            self._wake = inf
            self._handle(ev.Tick())
        return True

    def _handle(self, event: ev.Event) -> None:
        self._carry_out(self._new.take(event, self.now)[1])

    def _post(self, events: Sequence[tuple[float, ev.Event]]) -> None:
        for time, event in events:
            self._posted += 1
            heapq.heappush(self._heap, (time, self._posted, event))

    def _carry_out(self, effects: Sequence[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.ReadBody(id):
                    self._fact("Checked", id)
                case do.Fetch(id):
                    self._fact("Fetched", id)
                case do.Prepare(id):
                    self._fact("Prepared", id)
                case do.Spread(id):
                    self._further(id)
                case do.Spawn(epoch):
                    self._post(self._engine.start(epoch, self.now))
                case do.WakeAt(time):
                    self._wake = time
                case do.Exit():
                    self._exited = True
                case _:
                    self._post(self._engine.take(effect, self.now))

    # -- what clients do -----------------------------------------------------------------------------------------------

    def _stays(self, event: ev.Event) -> bool:
        """Whether a recorded fact is right in the changed run too: those of clients, and of a load under way."""
        match event:
            case ev.Received() | ev.BodyGrew() | ev.Checked() | ev.Fetched() | ev.Prepared() | ev.HungUp():
                received = self._old.received.get(event.request)
                return received is None or received.parent < 0 or received.parent in self._new.spread
            case ev.Draining() | ev.Shutdown():
                return True
            case ev.Faulted():  # before its prompt was there; behind that it is of the recorded answer
                return ("Prepared", event.request) not in self._given
            case ev.EngineLoading() | ev.EngineDescribed() | ev.EngineReady() | ev.EngineDied():
                engine = self._new.core.memory.engine
                return engine.state is EngineState.starting and event.epoch == engine.epoch
            case _:
                return False

    def _fact(self, kind: str, id: int) -> None:
        """What the core waits for of a request, where it was not recorded."""
        end = self._old.ends.get(id)
        if (kind, id) in self._given or (end is not None and end.trigger not in ARRIVING):
            return  # it comes; or its client never brought it
        self._given[kind, id] = self._bodies[id] = True
        usual, parent = self._usual, self._new.received[id].parent
        checked = self._new.checked.get(parent, usual.checked)
        prepared = self._new.prepared.get(parent, usual.prepared)
        facts: dict[str, tuple[float, ev.Event]] = {
            "Checked": (usual.to_checked, msgspec.structs.replace(checked, request=id)),
            "Fetched": (usual.to_fetched, ev.Fetched(id)),
            "Prepared": (usual.to_prepared, msgspec.structs.replace(prepared, request=id, prompts=1)),
        }
        after, fact = facts[kind]
        self._post([(self.now + after, fact)])

    def _further(self, parent: int) -> None:
        """The further prompts of a list: as they were recorded, or each as its first."""
        children = [id for id, received in self._old.received.items() if received.parent == parent]
        self._new.spread[parent] = True
        of = [(time, event) for time, event in self._left if getattr(event, "request", -1) in children]
        self._post([(max(time, self.now), event) for time, event in of if self._stays(event)])
        first = self._new.received[parent]
        for _ in range(0 if children else self._new.prepared[parent].prompts - 1):
            id, self._next_id = self._next_id, self._next_id + 1
            self._post([(self.now, msgspec.structs.replace(first, request=id, name=f"{id:024x}", parent=parent))])

    # -- the engine's part ---------------------------------------------------------------------------------------------

    def _take_over(self, now: float) -> None:
        """The modelled engine in place of the recorded one: its runs, what it holds, what it had yet to answer."""
        new, engine = self._new, self._new.core.memory.engine
        runs = [self._begun(live) for live in new.live.values() if live.inside]
        held = [Held(where=h.where, slot=h.slot, rows=h.rows, hashes=h.hashes) for h in new.core.memory.residents]
        self._post(self._engine.take_over(engine.epoch, runs, held, min(new.since, now), now))
        self._post([(now, ev.OwnWork(engine.epoch, what, begun=False)) for what in engine.own_work])
        for run, reading in new.readings.items():
            self._engine.take(new.measures[run], now)
            self._post(self._engine.take(reading, now))
        for live in [live for live in new.live.values() if not live.inside]:
            self._post(self._engine.take(live.start, now))
            if live.over:
                self._post(self._engine.take(do.CancelRun(engine.epoch, live.start.run), now))

    def _begun(self, live: Live) -> Run:
        """A run the recorded engine had begun."""
        start = live.start
        guest = isinstance(start, do.StartGuest)
        slot, choice = (0, 0) if isinstance(start, do.StartGuest) else (start.slot, start.choice)
        wanted = self._wanted(start.request, choice)
        rows = wanted.prompt if live.written else wanted.prompt - 1 if choice else live.rows
        return Run(
            start.request, start.run, slot, wanted, start.max_tokens, rows, live.written, guest=guest, over=live.over
        )

    def _wanted(self, id: int, choice: int) -> Wanted:
        prepared, answer = self._new.prepared[id], self._answers.get((id, choice))
        written = expected(answer, self._others, ENDLESS)
        if answer is not None and answer.whole:
            return Wanted(prepared.prompt_tokens, written, prepared.hashes, answer.calls)
        self._lengths[id, choice] = answer
        return Wanted(prepared.prompt_tokens, written, prepared.hashes)


def _count(of: Sequence[object] | dict[int, bool], one: str, more: str) -> str:
    return f"{len(of)} {one if len(of) == 1 else more}"
