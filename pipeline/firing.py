"""Firing: the one place where a trigger is fired, its step written and what always follows from a row carried out.

Knows the records and their facts; which posted fact fires what is the business of the classes above (``core.py``).
"""

from __future__ import annotations

from engine.protocol import windows
from pipeline import effects as do
from pipeline import outcomes, summary
from pipeline.effects import Effect
from pipeline.journal import Step
from pipeline.machine import LIFE, Record, fire
from pipeline.request import RECENT, Facts, Memory, Request, Slot
from pipeline.settings import Policy
from pipeline.states import EngineState, RequestState, SlotState, Trigger
from pipeline.table import BEFORE_SLOT, ENDED, Row
from stages.slots import placed, rows_needed

FAILURE_WINDOW_S = 60.0
LINES = ("waiting_line", "prefill_line")


def root(request: Request) -> int:
    """The request that was sent: itself, or the first of its list of prompts."""
    return request.parent if request.parent >= 0 else request.id


def is_member(request: Request) -> bool:
    """Whether it is one of a list of prompts."""
    return request.parent >= 0 or request.prompts > 1


class Firing:
    """The records, the journal and the effects of one event. ``memory`` is everything that is remembered."""

    def __init__(self, policy: Policy, memory: Memory | None = None) -> None:
        self.policy = policy
        self.memory = memory or Memory(slots=[Slot(id=i) for i in range(policy.slots)])
        self.steps: list[Step] = []
        self._effects: list[Effect] = []
        self._left: list[int] = []  # lists of prompts of which one has ended in this event
        self._ran: list[int] = []  # those of them where that one had a slot
        self._refused: list[int] = []  # those of them that are refused as a whole

    def _fire(self, record: Record, trigger: Trigger, now: float, line: str = "") -> Row:
        """Fire, write the journal step, and carry out what follows from the row."""
        source = record.state
        row = fire(record, trigger, self._facts(record, now))
        self.memory.steps += 1
        said = line if row.name in LINES else ""
        self.steps.append(
            Step(
                self.memory.steps, now, LIFE[type(record)], record.id, trigger.value, row.name,
                source.value, record.state.value, said,
            )
        )  # fmt: skip
        if isinstance(record, Request):
            if said:
                record.line = said
                self._open(record)
                self._effects.append(do.Line(record.id, said))
            if record.state in ENDED:
                self._end(record, row, now)
        return row

    def _facts(self, record: Record, now: float) -> Facts:
        """What guards may read, computed before the firing."""
        memory, policy, engine = self.memory, self.policy, self.memory.engine
        before = [r for r in memory.requests.values() if r.state in BEFORE_SLOT and r.state is not RequestState.queued]
        return Facts(
            now=now,
            draining=memory.draining,
            inside=isinstance(record, Request) and record.parent >= 0,
            before_queue=len({root(r) for r in before}),
            bodies=sum(r.body_bytes for r in before),
            waiting=len({root(memory.requests[id]) for id in memory.queue}),
            slot=self._next_slot(record) if isinstance(record, Request) else -1,
            engine=engine.state,
            window=engine.window,
            advancing=self._advancing(now),
            failures=sum(now - t <= FAILURE_WINDOW_S for t in engine.failures),
            since_start=now - engine.started_at,
            max_live=policy.max_live,
            max_bodies=policy.bodies,
            max_queue=policy.max_queue,
            retry_after=policy.retry_failed_s,
        )

    def _position(self, record: Record) -> int:
        """A waiter's place, from 1; an admitted one stands first; 0 for everything else."""
        if not isinstance(record, Request):
            return 0
        if record.state is RequestState.admitted:
            return 1
        return self.memory.queue.index(record.id) + 1 if record.id in self.memory.queue else 0

    def _windows(self) -> list[int]:
        """Rows of each slot."""
        return windows(self.memory.engine.window, len(self.memory.slots), self.policy.side_max_len)

    def _needs(self, request: Request) -> int:
        """Rows it takes with its whole answer; 0 before its prompt is known."""
        if not request.prompt_tokens:
            return 0
        asked, default = request.asked_tokens, self.policy.default_max_tokens
        return rows_needed(request.prompt_tokens, asked, default, self.memory.engine.window)

    def _next_slot(self, request: Request) -> int:
        """The free slot that is its own once those in front have theirs, -1: none. Who is not queued stands last."""
        memory, rows = self.memory, self._windows()
        free = [(slot.id, rows[slot.id]) for slot in memory.slots if slot.state is SlotState.free]
        if not free:
            return -1
        queue = memory.queue
        front = queue[: queue.index(request.id)] if request.id in queue else queue
        return placed([*(self._needs(memory.requests[id]) for id in front), self._needs(request)], free)[-1]

    def _limit(self) -> float:
        """Seconds without a message after which a working engine counts as silent."""
        return max(self.policy.quiet_s, 3 * self.memory.engine.step_s)

    def _advancing(self, now: float) -> bool:
        """Whether status lines would be true: the engine was heard in time, or it is starting."""
        engine = self.memory.engine
        if engine.state is EngineState.starting:
            return True
        return engine.state is EngineState.ready and now - engine.heard_at <= self._limit()

    def _end(self, request: Request, row: Row, now: float) -> None:
        """The request is over: count it, tell its client, log it, forget it."""
        memory = self.memory
        del memory.requests[request.id]
        if is_member(request):
            self._left = [*self._left, root(request)]
            self._ran = [*self._ran, root(request)] if request.admitted_at is not None else self._ran
        memory.recent = [request, *memory.recent[: RECENT - 1]]
        request.ended_at, request.hashes = now, []
        if request.state is RequestState.abandoned:
            request.outcome = "abandoned"
            memory.counts.abandoned += 1
            self._effects.append(do.Forget(request.id, request.end_reason))
            self._effects.append(do.Log(summary.log_line(request, now)))
            return
        outcome = outcomes.of(row.name, request.opened, request.code)
        request.outcome = outcome.code or outcome.finish
        summary.count(memory.counts, request, outcome)
        end = summary.finish(request, outcome, now)
        if is_member(request) and summary.refused(end):
            self._refused = [*self._refused, root(request)]
        elif is_member(request) and request.stream:  # its finish is sent: the others have no status of their own now
            self._open(request)
        self._effects.append(end)
        self._effects.append(do.Log(summary.log_line(request, now)))

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
        """The live request of a run; None when it is over."""
        slot = self._slot(run)
        request = self.memory.requests.get(slot.request) if slot is not None else None
        return request if request is not None and request.run == run else None
