"""Firing: the one place where a trigger is fired, its step written and what always follows from a row carried out.

Knows the records and their facts; which posted fact fires what is the business of the classes above (``core.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from engine.protocol import windows
from pipeline import effects as do
from pipeline import outcomes, summary
from pipeline.effects import Effect
from pipeline.forecast import ended, said
from pipeline.journal import Step
from pipeline.machine import LIFE, Record, fire
from pipeline.request import RECENT, Facts, Memory, Request, Slot
from pipeline.settings import Policy
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from pipeline.table import BEFORE_SLOT, ENDED, Row
from stages.memory_gate import Verdict
from stages.slots import Route
from stages.wait import OWN_KEPT, remembered

FAILURE_WINDOW_S = 60.0
LINES = ("waiting_line", "prefill_line")
NOTED = (*LINES, "level_given", "waits_for_memory", "refused_memory")
"""Rows whose step has figures: what the client was told, or what the memory gate read."""
MEMORY_WAITS = ("waits_memory", "waits_for_memory")
RUN_OVER = (Trigger.ended, Trigger.declined, Trigger.returned, Trigger.epoch)
"""After these a slot's memory is another."""


def root(request: Request) -> int:
    """The request that was sent: itself, or the first of its list of prompts."""
    return request.parent if request.parent >= 0 else request.id


def is_member(request: Request) -> bool:
    """Whether it is one of a list of prompts."""
    return request.parent >= 0 or request.prompts > 1


class Firing(ABC):
    """The records, the journal and the effects of one event. ``memory`` is everything that is remembered."""

    def __init__(self, policy: Policy, memory: Memory | None = None) -> None:
        self.policy = policy
        self.memory = memory or Memory(slots=[Slot(id=i) for i in range(policy.slots)])
        self.steps: list[Step] = []
        self._effects: list[Effect] = []
        self._left: list[int] = []  # lists of prompts of which one has ended in this event
        self._ran: list[int] = []  # those of them where that one had a slot
        self._refused: list[int] = []  # those of them that are refused as a whole
        self._verdict = Verdict()  # of the memory gate, in this event

    def _fire(self, record: Record, trigger: Trigger, now: float, line: str | do.Line = "") -> Row:
        """Fire, write the journal step, and carry out what follows from the row."""
        source = record.state
        figures, line = (line, line.text) if isinstance(line, do.Line) else (None, line)
        row = fire(record, trigger, self._facts(record, now))
        self.memory.steps += 1
        said = line if row.name in LINES else ""
        self.steps.append(
            Step(
                self.memory.steps, now, LIFE[type(record)], record.id, trigger.value, row.name,
                source.value, record.state.value, line if row.name in NOTED else "",
            )
        )  # fmt: skip
        if isinstance(record, Request):
            if said:
                record.line = said
                self._open(record)
                self._effects.append(figures or do.Line(record.id, said))
            self._count_memory_wait(record, row, now)
            if row.dest is not None:
                self._arm(record, now)
            if record.state in ENDED:
                self._end(record, row, now)
        elif trigger in RUN_OVER:
            for id in self.memory.queue:
                self.memory.requests[id].waits_memory = False
        return row

    def _count_memory_wait(self, request: Request, row: Row, now: float) -> None:
        """From the row that says so to the next that is no line."""
        if row.name in MEMORY_WAITS:
            request.mem_since = now if request.mem_since is None else request.mem_since
        elif request.mem_since is not None and row.trigger is not Trigger.tick:
            request.mem_wait_s, request.mem_since = request.mem_wait_s + now - request.mem_since, None

    def _facts(self, record: Record, now: float) -> Facts:
        """What guards may read, computed before the firing."""
        memory, policy, engine = self.memory, self.policy, self.memory.engine
        before = [r for r in memory.requests.values() if r.state in BEFORE_SLOT and r.state is not RequestState.queued]
        asks = record if isinstance(record, Request) and record.state in BEFORE_SLOT else None
        route = Route() if asks is None else self._route(asks, now)
        return Facts(
            now=now,
            draining=memory.draining,
            inside=isinstance(record, Request) and record.parent >= 0,
            before_queue=len({root(r) for r in before}),
            bodies=sum(r.body_bytes for r in before),
            waiting=len({root(memory.requests[id]) for id in memory.queue}),
            slot=route.slot,
            why=route.why,
            lane_open=isinstance(record, Request) and self._lane_open(record, now),
            engine=engine.state,
            window=engine.window,
            advancing=self._advancing(now),
            failures=sum(now - t <= FAILURE_WINDOW_S for t in engine.failures),
            since_start=now - engine.started_at,
            max_live=policy.max_live,
            max_bodies=policy.bodies,
            max_queue=policy.max_queue,
            retry_after=policy.retry_failed_s,
            most_rows=engine.most_rows,
            gate=self._verdict.action,
        )

    def _position(self, record: Record) -> int:
        """A waiter's place, from 1; an admitted one or a guest stands first; 0 for everything else."""
        if not isinstance(record, Request):
            return 0
        if record.state in (RequestState.admitted, RequestState.guest):
            return 1
        return self.memory.queue.index(record.id) + 1 if record.id in self.memory.queue else 0

    def _windows(self) -> list[int]:
        """Rows of each slot."""
        return windows(self.memory.engine.window, len(self.memory.slots), self.policy.side_max_len)

    @abstractmethod
    def _route(self, request: Request, now: float) -> Route:
        """The free slot that is its own once those in front have theirs, or what it waits for (``offers.py``)."""

    @abstractmethod
    def _lane_open(self, request: Request, now: float) -> bool:
        """Whether the run of slot 0 takes it as a guest."""

    def _limit(self) -> float:
        """Seconds without a message after which a working engine counts as silent."""
        return max(self.policy.quiet_s, 3 * self.memory.engine.step_s)

    def _advancing(self, now: float) -> bool:
        """Whether status lines would be true: the engine was heard in time, or it is starting."""
        engine = self.memory.engine
        if engine.state is EngineState.starting:
            return True
        return engine.state is EngineState.ready and now - engine.heard_at <= self._limit()

    def _arm(self, request: Request, now: float) -> None:
        """When the next sign of life is due: a stream's clock begins with its arrival, a whole one's with its run."""
        policy = self.policy
        if request.stream:
            if request.state is RequestState.queued and request.beat_at is None and policy.keepalive_s:
                request.beat_at = max(now, request.received_at + policy.keepalive_s)
        elif request.state is RequestState.prefilling and policy.early_headers_s:
            request.beat_at = max(now, request.received_at + policy.early_headers_s)

    def _retry_after(self, now: float) -> int:
        """Seconds until one who would come now had a slot, as far as it is known; else the table's."""
        engine, longest = self.memory.engine, outcomes.LONGEST_RETRY
        starts = max(engine.load_s - (now - engine.started_at), 0.0)
        if engine.state not in (EngineState.starting, EngineState.ready):
            return 0
        if engine.state is EngineState.starting and not engine.load_s:
            return 0
        last = said(self.memory, self.policy, now).last
        if last is None:
            return 0
        wait = last + (starts if engine.state is EngineState.starting else 0.0)
        return round(min(max(wait, outcomes.SHORTEST_RETRY), longest))

    def _own_over(self, request: Request, now: float) -> None:
        """It waits no longer behind the engine's own work, if it did: how long that was is remembered."""
        if request.own_since is None:
            return
        memory, waited = self.memory, now - request.own_since
        request.own_wait_s += waited
        memory.own_waits[request.own_what] = [*memory.own_waits.get(request.own_what, []), waited][-OWN_KEPT:]
        memory.behind_own = [id for id in memory.behind_own if id != request.id]
        request.own_since = None

    def _remember(self, request: Request) -> None:
        """An end of its own says how long answers of its kind are."""
        end = ended(request)
        if end is not None:
            self.memory.history = remembered(self.memory.history, end)

    def _end(self, request: Request, row: Row, now: float) -> None:
        """The request is over: count it, tell its client, log it, forget it."""
        memory = self.memory
        del memory.requests[request.id]
        if is_member(request):
            self._left = [*self._left, root(request)]
            self._ran = [*self._ran, root(request)] if request.admitted_at is not None else self._ran
        memory.recent = [request, *memory.recent[: RECENT - 1]]
        request.ended_at, request.hashes = now, []
        self._own_over(request, now)
        if request.state is RequestState.abandoned:
            request.outcome = "abandoned"
            memory.counts.abandoned += 1
            self._effects.append(do.Forget(request.id, request.end_reason))
            self._effects.append(do.Log(summary.log_line(request, now)))
            return
        outcome = outcomes.of(row.name, request.opened, request.code)
        self._settle_held(request, sent=outcome.status == 200)
        memory.lane.served += request.inside and not outcome.code
        if outcome.code in outcomes.ESTIMATED and outcome.retry_after:
            wait = self._retry_after(now) or outcome.retry_after
            outcome = msgspec.structs.replace(outcome, retry_after=wait)
        request.outcome = outcome.code or outcome.finish
        self._remember(request)
        summary.count(memory.counts, request, outcome)
        end = summary.finish(request, outcome, now)
        if is_member(request) and summary.refused(end):
            self._refused = [*self._refused, root(request)]
        elif is_member(request) and request.stream:  # its finish is sent: the others have no status of their own now
            self._open(request)
        self._effects.append(end)
        self._effects.append(do.Log(summary.log_line(request, now)))

    def _settle_held(self, request: Request, *, sent: bool) -> None:
        """What a guest wrote is sent whole at its end, unless that is a status of its own: its client asks anew."""
        if request.held and sent:
            if request.stream:
                self._open(request)
            self._effects.extend(do.Send(request.id, handle) for handle in request.held)
        request.held = []

    def _open(self, request: Request) -> None:
        """Something is sent: the client's stream is open, for every prompt of its list."""
        for member in self._family(root(request)) if is_member(request) else [request]:
            member.opened = True

    def _leave_slot(self, request: Request, now: float, keep: int | None) -> None:
        """Let go of the slot; the engine is told if it had started."""
        if request.slot < 0:
            return
        slot = self.memory.slots[request.slot]
        if slot.started:
            self._effects.append(do.CancelRun(self.memory.engine.epoch, slot.run, keep))
        self._fire(slot, Trigger.let_go, now)
        request.slot = request.run = -1

    def _exit(self, status: int) -> None:
        """Stop the server; who comes in the meantime is refused."""
        if not self.memory.exiting:
            self.memory.exiting = self.memory.draining = True
            self._effects.append(do.Exit(status))

    # -- looking things up -----------------------------------------------------------------------------------------

    def _family(self, parent: int) -> list[Request]:
        """The live requests of one body: a request and, where it is the first of a list, the others."""
        return [r for r in self.memory.requests.values() if root(r) == parent]

    def _live(self, id: int, state: RequestState) -> Request | None:
        """The live request in that state; None when it is over or elsewhere (the fact came too late)."""
        request = self.memory.requests.get(id)
        return request if request is not None and request.state is state else None

    def _slot(self, run: int) -> Slot | None:
        """The slot that holds a run."""
        return next((s for s in self.memory.slots if s.run == run and s.state is not SlotState.free), None)

    def _running(self, run: int) -> Request | None:
        """The live request of a run, in a slot or a guest; None when it is over."""
        slot, guest = self._slot(run), self.memory.guest
        id = slot.request if slot is not None else guest.request if guest is not None and guest.run == run else -1
        request = self.memory.requests.get(id)
        return request if request is not None and request.run == run else None
