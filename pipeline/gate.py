"""The memory gate: what is decided between a slot and the prefill, one request at a time (rows J1 to J3, J5, M7).

A request that was admitted asks for a reading of memory; the stage ``memory_gate`` decides on it and the row it names
fires. What a row has given back or collected is answered by the next reading, on which it is decided again. Who is
admitted meanwhile asks when it is over. What cannot fit while others run leaves its slot and waits for one of them to
end: it keeps its place, and those behind it may go first.
"""

from __future__ import annotations

from abc import abstractmethod

from pipeline import effects as do
from pipeline import events as ev
from pipeline.offers import Offers
from pipeline.request import Decision, Engine, Request
from pipeline.states import RequestState, SlotState, Trigger
from pipeline.table import BEFORE_SLOT
from stages.memory_gate import Snapshot, decide, default_floor, floor_held, held, workspace_at

MIB, GIB = 1 << 20, 1 << 30


class Gate(Offers):
    """Decides on memory before every prefill."""

    @abstractmethod
    def _hear(self, epoch: int, now: float) -> Engine | None:
        """Note a sign of life of the engine (``engine_life.py``)."""

    # -- one at a time ---------------------------------------------------------------------------------------------

    def _at_gate(self, request: Request) -> None:
        """It has a slot: it asks for memory, unless another one is at it."""
        request.gate_collected, request.gate_asked = False, []
        if self.memory.gate < 0:
            self._measure(request)

    def _measure(self, request: Request) -> None:
        self.memory.gate = request.run
        self._effects.append(do.Measure(self.memory.engine.epoch, request.run, request.prompt_tokens))

    def _next_at_gate(self) -> None:
        """Whoever was at the gate has passed it, or is gone: the next one, in the order they were admitted."""
        memory = self.memory
        if memory.gate < 0:
            return
        request = self._running(memory.gate)
        if request is not None and request.state is RequestState.admitted:
            return
        memory.gate = -1
        slots = [slot for slot in memory.slots if slot.state is SlotState.busy and not slot.started]
        if slots:
            self._measure(memory.requests[min(slots, key=lambda slot: slot.run).request])

    # -- the decision ----------------------------------------------------------------------------------------------

    def _memory_read(self, event: ev.MemoryRead, now: float) -> None:
        engine = self._hear(event.epoch, now)
        if engine is None:
            return
        engine.allocated, engine.reserved, engine.peak = event.allocated, event.reserved, event.peak
        engine.free, engine.levels, engine.growth = event.free, event.levels, event.growth
        request = self._running(event.run)
        if request is not None and event.run == self.memory.gate and request.state is RequestState.admitted:
            self._decide(request, event.workspace, now)

    def _decide(self, request: Request, workspace: int, now: float) -> None:
        """One step of the gate, and what follows from the row."""
        engine = self.memory.engine
        self._verdict = verdict = decide(self._snapshot(request, workspace))
        figures = f"needs {_said(workspace)}, allocated {_said(engine.allocated)}, reserved {_said(engine.reserved)}"
        given = f"{verdict.level} gives back {verdict.nbytes} bytes"
        read = f"needs {workspace}, allocated {engine.allocated}, reserved {engine.reserved} bytes"
        row = self._fire(request, Trigger.gate, now, given if verdict.level else read)
        decision = self.memory.decision = Decision(
            request=request.id, name=request.name, row=row.name, at=now, level=verdict.level, nbytes=verdict.nbytes,
            workspace=workspace, allocated=engine.allocated, reserved=engine.reserved,
        )  # fmt: skip
        match row.name:
            case "level_given":
                request.gate_asked = [*request.gate_asked, verdict.level]
                self._effects.append(do.GiveBack(engine.epoch, request.run, verdict.level, verdict.nbytes))
                self._effects.append(do.Log(f"[memory] {request.name} {given}: {figures}"))
            case "collects":
                request.gate_collected = True
                self._effects.append(do.Collect(engine.epoch, request.run))
            case "waits_for_memory":
                self._effects.append(do.Log(f"[memory] {request.name} waits: {figures}"))
                self._leave_slot(request, now, None)
                self._wait_again(request)
                request.waits_memory, request.why = True, "memory"
                self._offer_waiting(now)
            case "refused_memory":
                self._effects.append(do.Log(f"[memory] refused: {request.name} {figures}"))
                self.memory.memory_refused += 1
                self.memory.last_refused = decision
                self._leave_slot(request, now, None)
                self._offer_waiting(now)
            case "unfit_after_all":
                self._leave_slot(request, now, None)
                self._offer_waiting(now)
            case _:
                self._begin(request, now)

    def _snapshot(self, request: Request, workspace: int) -> Snapshot:
        """The last reading, as the stage takes it."""
        engine = self.memory.engine
        return Snapshot(
            allocated=engine.allocated, reserved=engine.reserved, free=engine.free, workspace=workspace,
            ceiling=engine.ceiling, peak=engine.peak_limit, levels=engine.levels, device=engine.device == "cuda",
            asked=request.gate_asked, collected=request.gate_collected, others=self._others_run(request),
        )  # fmt: skip

    def _others_run(self, request: Request) -> bool:
        """Whether a run of another slot is under way, whose end will give memory back."""
        return any(s.started and s.state is not SlotState.free for s in self.memory.slots if s.id != request.slot)

    def _wait_again(self, request: Request) -> None:
        """Back to its place in the queue: nothing had run. Its lines go on as they were due."""
        request.admitted_at = None
        for member in [request, *(other for other in self._siblings(request) if other.state in BEFORE_SLOT)]:
            line_at = member.line_at
            self._start_waiting_clock(member)
            member.line_at = line_at
        self._queue(request)

    # -- through ---------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, now: float) -> None:
        """It fits: its prefill begins."""
        policy = self.policy
        room = self._windows()[request.slot] - request.prompt_tokens
        request.max_tokens = min(request.asked_tokens or policy.default_max_tokens, room)
        request.prefill_at = now
        heartbeat = policy.prefill_heartbeat_s
        request.line_at = now + heartbeat if request.stream and heartbeat else None
        self._start(request)

    def _start(self, request: Request) -> None:
        """Start the run of its next choice."""
        self.memory.slots[request.slot].started = True
        more = request.choice + 1 < request.choices
        self._effects.append(
            do.StartRun(
                self.memory.engine.epoch, request.run, request.id, request.slot, request.max_tokens, request.choice,
                more,
            )
        )  # fmt: skip

    # -- the floor -------------------------------------------------------------------------------------------------

    def _offer_floor(self, now: float) -> None:
        """Somebody has read its prompt: whom the floor held may fit beside it without that workspace."""
        memory = self.memory
        if any(memory.requests[id].why == "memory" for id in memory.queue):
            self._offer_waiting(now)

    def _holds_floor(self, request: Request) -> bool:
        """Whether enough memory stays available when it is admitted beside the others, by the last reading (row M7)."""
        memory, engine = self.memory, self.memory.engine
        busy = [slot for slot in memory.slots if slot.state is not SlotState.free]
        if not busy or not engine.free:
            return True
        beside = [memory.requests.get(slot.request) for slot in busy]
        rows = [r.prompt_tokens for r in beside if r and r.state in (RequestState.admitted, RequestState.prefilling)]
        now = held(self._snapshot(request, 0))
        floor = self.policy.parallel_floor
        below = max(engine.ceiling - now, 0)
        return floor_held(
            own=workspace_at(engine.workspaces, request.prompt_tokens),
            others=sum(workspace_at(engine.workspaces, count) for count in rows),
            growth=below if engine.growth < 0 else min(engine.growth, below),
            available=engine.free,
            floor=floor if floor >= 0 else default_floor(engine.ceiling),
            room_to_peak=engine.peak_limit - now if engine.peak_limit else None,
            alone=False,
        )


def _said(size: int) -> str:
    """A size for people."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
