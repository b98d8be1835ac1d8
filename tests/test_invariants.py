"""Any life in virtual time: Hypothesis drives clients, engine deaths and signals against the invariants."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.scripted import Answer, Script
from pipeline.events import BodyGrew, Draining, EngineLoading, Faulted, Shutdown
from pipeline.firing import root
from pipeline.request import Request
from pipeline.states import EngineState, RequestState, SlotState
from pipeline.table import BEFORE_SLOT, ENDED
from tests.world import Plan, World, replayed

LIMITS = {"queue_timeout": 30.0, "request_timeout": 60.0, "drain_timeout": 20.0, "max_queue": 3, "max_live": 5}

plain = st.builds(
    Plan,
    prompt=st.sampled_from([1, 30, 300]),
    max_tokens=st.integers(0, 40),
    stream=st.booleans(),
    stop_at=st.sampled_from([0, 0, 1, 5]),
    others=st.sampled_from([(), (10,), (30, 1, 300)]),
    choices=st.sampled_from([1, 2, 3]),
    closes_at=st.sampled_from([0, 1, 4]),
    calls=st.sampled_from([0, 1, 3]),
    call_at=st.integers(1, 6),
)
odd = st.builds(
    Plan,
    prompt=st.sampled_from([0, 1, 30, 300, 700, 999, 1_000]),
    max_tokens=st.integers(0, 40),
    stream=st.booleans(),
    code=st.sampled_from(["", "", "", "", "invalid_json", "invalid_type", "unsupported_parameter", "model_not_found"]),
    prompt_code=st.sampled_from(["", "", "", "", "unsupported_schema", "invalid_value"]),
    stop_at=st.sampled_from([0, 0, 1, 5]),
    others=st.sampled_from([(), (), (), (10,), (30, 1, 300), (10, 1_000), (0, 10)]),
    choices=st.sampled_from([1, 1, 1, 2, 3]),
    closes_at=st.sampled_from([0, 0, 1, 4]),
    calls=st.sampled_from([0, 0, 1, 3]),
    call_at=st.integers(1, 6),
)
plans = plain | odd
answers = st.builds(
    Answer,
    ids=st.lists(st.integers(1, 9), max_size=50),
    prefill_ms_per_row=st.sampled_from([0.0, 1.0, 30.0]),
    decode_ms=st.sampled_from([1.0, 50.0, 2_000.0]),
    round=st.integers(1, 4),
    then=st.sampled_from(["stop", "stop", "stop", "length", "fault", "die", "silent"]),
)
points = st.sampled_from([{}, {}, {"die_at_load": 1}, {"stall_load": 1}, {"decline_start": 1}, {"fault_at_chunk": 1}])


class Life(RuleBasedStateMachine):
    """R1, R3: the core under anything that can happen to it."""

    @initialize(answers=st.lists(answers, min_size=1, max_size=4), points=st.lists(points, min_size=1, max_size=4),
                load_ms=st.sampled_from([0.0, 0.0, 5_000.0]), slots=st.integers(1, 3),
                side=st.sampled_from([65_536, 320, 20]))  # fmt: skip
    def begin(self, answers: list[Answer], points: list[dict[str, int]], load_ms: float, slots: int, side: int) -> None:
        """The window is 1,000 rows: a side slot has all of them, or too few for some."""
        script = Script(answers=answers, load_ms=load_ms)
        self.world = World(script, points, slots=slots, side_max_len=side, default_max_tokens=30, **LIMITS)

    @rule(plan=plans)
    def arrive(self, plan: Plan) -> None:
        if self.world.exited is None:
            self.world.arrive(plan)

    @rule(plan=plans, seconds=st.sampled_from([0.003, 0.02, 0.5, 2.5]))
    def arrive_and_wait(self, plan: Plan, seconds: float) -> None:
        self.arrive(plan)
        self.world.run_until(self.world.now + seconds)

    @rule(which=st.integers(1, 6))
    def hang_up(self, which: int) -> None:
        id = len(self.world.clients) - which
        request = self.world.core.memory.requests.get(id)
        self.world.hang_up(id)
        if request is not None:
            memory = self.world.core.memory
            assert request.state is RequestState.abandoned
            assert id not in memory.queue
            assert not [r.id for r in memory.requests.values() if root(r) == root(request)], "a list is one client's"

    @rule(which=st.integers(0, 6), size=st.sampled_from([1, 5_000, 1 << 31]))
    def body_grows(self, which: int, size: int) -> None:
        self.world.post(BodyGrew(len(self.world.clients) - which, size))

    @rule(seconds=st.sampled_from([0.001, 0.1, 1.0, 11.0, 45.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.run_until(self.world.now + seconds)

    @rule(seconds=st.sampled_from([0.002, 0.05, 1.0, 8.0]))
    def pass_a_little(self, seconds: float) -> None:
        self.world.run_until(self.world.now + seconds)

    @rule(trouble=st.sampled_from(["", "", "", "", "", "", "kill", "freeze", "unfreeze", "fault", "drain", "shutdown"]))
    def trouble(self, trouble: str) -> None:
        world = self.world
        if trouble == "kill":
            world.kill()
        elif trouble == "freeze":
            world.freeze()
        elif trouble == "unfreeze":
            world.post(EngineLoading(world.core.memory.engine.epoch, 1, 2))
        elif trouble == "fault" and world.clients:
            world.post(Faulted(len(world.clients), "text", "KeyError"))
        elif trouble == "drain":
            world.post(Draining())
        elif trouble == "shutdown":
            world.post(Shutdown())

    @invariant()
    def one_holder_a_slot(self) -> None:
        memory = self.world.core.memory
        held = [s.request for s in memory.slots if s.state is SlotState.busy]
        assert len(held) == len(set(held))
        for slot in memory.slots:
            if slot.state is SlotState.busy:
                assert memory.requests[slot.request].slot == slot.id
        for request in memory.requests.values():
            assert (request.slot >= 0) == (
                request.state in (RequestState.admitted, RequestState.prefilling, RequestState.decoding)
            )

    @invariant()
    def live_means_live(self) -> None:
        memory = self.world.core.memory
        assert all(r.state not in ENDED for r in memory.requests.values())
        queued = sorted(i for i, r in memory.requests.items() if r.state is RequestState.queued)
        assert sorted(memory.queue) == queued

    @invariant()
    def the_queue_is_in_order_of_entry(self) -> None:
        memory = self.world.core.memory
        places = [memory.requests[id].place for id in memory.queue]
        assert places == sorted(places)

    @invariant()
    def nobody_waits_for_a_free_slot(self) -> None:
        """M2, R3: a free slot that holds one who waits is taken at once; who is in a side slot fits in it."""
        memory = self.world.core.memory
        free = [s.id for s in memory.slots if s.state is SlotState.free]
        if memory.engine.state is EngineState.ready:
            for id in memory.queue:
                assert 0 not in free
                assert not free or self.rows(memory.requests[id]) > self.side
        for request in memory.requests.values():
            assert request.slot <= 0 or self.rows(request) <= self.side

    @property
    def side(self) -> int:
        """Rows of a side slot."""
        return min(self.world.policy.side_max_len, 1_000)

    @staticmethod
    def rows(request: Request) -> int:
        """Rows of a request with its whole answer."""
        return min(request.prompt_tokens + (request.asked_tokens or 30), 1_000)

    @invariant()
    def every_request_ends_once(self) -> None:
        for id, client in self.world.clients.items():
            assert client.ends == (0 if id in self.world.core.memory.requests or not client.received else 1)

    @invariant()
    def choices_follow_one_another(self) -> None:
        """F11: each choice starts once, after the one before it has its own finish; nothing starts for who is over."""
        for client in self.world.clients.values():
            starts, n = [choice for choice, _ in client.starts], client.plan.choices
            ended = [choice for choice, _ in client.choices]
            assert starts == list(range(len(starts)))
            assert client.starts == [(choice, choice + 1 < n) for choice in starts]
            assert ended == list(range(len(ended)))
            assert len(starts) - 1 <= len(ended) or not starts
            assert len(ended) <= len(starts) <= n
            if client.end is not None and not client.end.code:
                assert (len(starts), len(ended)) == (n, n - 1)

    @invariant()
    def figures_are_sums(self) -> None:
        for request in self.world.core.memory.requests.values():
            assert request.completion_tokens == sum(request.choice_tokens)
            assert request.reasoning_tokens == sum(request.choice_reasoning) <= request.completion_tokens
            assert request.closed_calls <= request.opened_calls <= request.closed_calls + 1

    @invariant()
    def a_list_has_one_answer(self) -> None:
        """A13: what one member opened is open for all; a refusal is all's; who waits for another has no deadline."""
        memory = self.world.core.memory
        for request in memory.requests.values():
            family = [r for r in memory.requests.values() if root(r) == root(request)]
            assert len({member.opened for member in family}) == 1
            held = any(member.slot >= 0 for member in family)
            if request.state in BEFORE_SLOT and held:
                assert request.deadline_at is None
            if request.state is RequestState.queued and not request.stream and not held:
                assert request.deadline_at is not None
            parent = self.world.clients[root(request)]
            if parent.end is not None and request.id != root(request):
                assert parent.end.code == "" or parent.end.opened or parent.end.status == 200

    @invariant()
    def a_waiting_stream_hears_every_ten_seconds_while_the_engine_advances(self) -> None:
        """L1: from 10 s on, while the engine advances or starts."""
        world = self.world
        for id, request in world.core.memory.requests.items():
            if request.state is RequestState.queued and request.stream and request.parent < 0:
                lines = [t for t, _ in world.clients[id].lines]
                due = request.received_at + 10.0 * (1 + int((world.now - request.received_at) / 10 - 1))
                if due > request.received_at + 9 and world.core._advancing(world.now) and world.now - due > 0:
                    silent = [s for s in world.steps if s.row == "waits_silently" and s.id == id]
                    assert lines or silent

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run_until(world.now + 2_000)
        assert not world.core.memory.requests, "something never ended"
        assert all(client.ends == 1 for client in world.clients.values())
        assert replayed(world) == world.steps
        moved: dict[tuple[str, int], str] = {}
        told: dict[int, str] = {}
        for step in world.steps:
            key = (step.life, step.id)
            if step.row in ("call_opened", "call_closed", "choice_ended"):
                before, told[step.id] = told.get(step.id, ""), step.row
                assert (step.row == "call_closed") <= (before == "call_opened"), "a call ended that did not begin"
                assert (step.row, before) != ("call_opened", "call_opened"), "a call began inside another"
            assert moved.setdefault(key, step.source) == step.source, "a record moved without a row"
            assert moved[key] not in ("finished", "abandoned"), "an ended request moved"
            moved[key] = step.dest


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
