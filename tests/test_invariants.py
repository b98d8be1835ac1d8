"""Any life in virtual time: Hypothesis drives clients, engine deaths, memory and signals against ``tests/laws.py``.

What is common and what is rare is ``tests/storm.py``'s business; this one is here to find the shortest way to a fault.
"""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.protocol import LEVELS
from engine.scripted import Answer, Script
from pipeline.events import BodyGrew, Draining, EngineLoading, Faulted, HungUp, OwnWork, Shutdown
from pipeline.firing import root
from pipeline.request import Request
from pipeline.states import RequestState, SlotState
from tests.box import Store
from tests.storm import Storm
from tests.weather import Talk
from tests.world import Plan

LIMITS = {"queue_timeout": 30.0, "request_timeout": 60.0, "drain_timeout": 20.0, "max_queue": 3, "max_live": 5,
          "side_lane_side_tokens": 8, "side_margin": 64, "prefix_chunk": 128, "resident_guest_max": 64,
          "keepalive_s": 25.0, "early_headers_s": 15.0}  # fmt: skip

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
    lane=st.sampled_from(["", "raw", "side"]),
    images=st.sampled_from([0, 0, 0, 1]),
    planned=st.booleans(),
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
points = st.sampled_from(
    [{}, {}, {"die_at_load": 1}, {"stall_load": 1}, {"decline_start": 1}, {"fault_at_chunk": 1}, {"decline_guest": 1}]
)
levels = st.dictionaries(st.sampled_from(LEVELS), st.sampled_from([20, 100, 400]), max_size=3)
stores = st.builds(Store, free=st.just(100_000)) | st.builds(
    Store,
    free=st.sampled_from([90, 300, 2_000]),
    a_run=st.sampled_from([0, 100]),
    ceiling=st.sampled_from([0, 300]),
    peak=st.sampled_from([0, 600]),
    most_rows=st.sampled_from([0, 600]),
    levels=levels,
    garbage=st.sampled_from([0, 100]),
    device=st.sampled_from(["cpu", "cuda"]),
)


class Life(RuleBasedStateMachine):
    """R1, R3: the core under anything that can happen to it."""

    @initialize(answers=st.lists(answers, min_size=1, max_size=4), points=st.lists(points, min_size=1, max_size=4),
                load_ms=st.sampled_from([0.0, 0.0, 5_000.0]), slots=st.integers(1, 4),
                side=st.sampled_from([65_536, 320, 20]), lane=st.sampled_from(["on", "on", "decode", "off"]),
                store=stores, floor=st.sampled_from([-1, 0, 500]), seed=st.integers(0, 9))  # fmt: skip
    def begin(self, answers, points, load_ms, slots, side, lane, store, floor, seed) -> None:  # type: ignore[no-untyped-def]
        """The window is 1,000 rows: a side slot has all of them, or too few for some."""
        self.chance = Random(seed)
        self.world = Storm(
            self.chance, {}, 0.0, store, Script(answers=answers, load_ms=load_ms), points, slots=slots,
            side_max_len=side, side_lane=lane, parallel_floor=floor, default_max_tokens=30, **LIMITS,
        )  # fmt: skip
        self.talks = [Talk("a", 0), Talk("b", 1)]

    @rule(plan=plans)
    def arrive(self, plan: Plan) -> None:
        if self.world.exited is None:
            self.world.arrive(plan)

    @rule(plan=plans, seconds=st.sampled_from([0.003, 0.02, 0.5, 2.5]))
    def arrive_and_wait(self, plan: Plan, seconds: float) -> None:
        self.arrive(plan)
        self.world.run_until(self.world.now + seconds)

    @rule(which=st.integers(0, 1), limit=st.sampled_from([1, 10]))
    def a_conversation_goes_on(self, which: int, limit: int) -> None:
        """M3, M5: what slot 0, the park or a file may hold."""
        self.arrive(Plan(max_tokens=limit, **self.talks[which].next(self.chance)))

    @rule(lanes=st.lists(st.sampled_from(["raw", "side"]), min_size=1, max_size=3), limit=st.integers(1, 40),
          stop_at=st.sampled_from([0, 0, 2]), calls=st.sampled_from([0, 0, 1]),
          seconds=st.sampled_from([0.004, 0.1, 0.7]))  # fmt: skip
    def short_ones_behind_a_long_one(
        self, lanes: list[str], limit: int, stop_at: int, calls: int, seconds: float
    ) -> None:
        """What the side lane is for."""
        for _ in self.world.core.memory.slots:
            self.arrive(Plan(prompt=300, max_tokens=40))
        for lane in lanes:
            self.arrive_and_wait(Plan(lane=lane, max_tokens=limit, stop_at=stop_at, calls=calls), seconds)

    @rule(which=st.integers(1, 6))
    def hang_up(self, which: int) -> None:
        self.leaves(len(self.world.clients) - which, "closed")

    @rule(what=st.sampled_from(["guest", "offered", "holder", "gate", "running"]))
    def one_of_them_hangs_up(self, what: str) -> None:
        """In the queue, at the gate, in prefill and answer, as a guest, as the holder with a guest inside."""
        memory = self.world.core.memory
        lent = memory.slots[0].state is SlotState.lent

        def meant(request: Request) -> bool:
            return {
                "guest": request.state is RequestState.guest,
                "offered": request.offered,
                "holder": request.slot == 0 and lent,
                "gate": request.state is RequestState.admitted,
                "running": request.state in (RequestState.prefilling, RequestState.decoding),
            }[what]

        self.leaves(next((id for id, request in memory.requests.items() if meant(request)), 0), "stalled")

    def leaves(self, id: int, why: str) -> None:
        memory = self.world.core.memory
        request = memory.requests.get(id)
        self.world.post(HungUp(id, why))
        if request is not None:
            assert request.state is RequestState.abandoned
            assert id not in memory.queue
            assert not [r.id for r in memory.requests.values() if root(r) == root(request)], "a list is one client's"

    @rule(which=st.integers(0, 6), size=st.sampled_from([1, 5_000, 1 << 31]))
    def body_grows(self, which: int, size: int) -> None:
        self.world.post(BodyGrew(len(self.world.clients) - which, size))

    @rule(free=st.sampled_from([90, 300, 2_000, 100_000]), levels=levels, garbage=st.sampled_from([0, 100]))
    def memory_is_another(self, free: int, levels: dict[str, int], garbage: int) -> None:
        """J1, J2, M7: others took of it or gave some back, and caches grew."""
        store = self.world.store
        store.free, store.levels, store.garbage, store.allocated = free, dict(levels), garbage, 100

    @rule(what=st.sampled_from(["warm-up", "graph capture", "disk write", "park copy"]), begun=st.booleans())
    def own_work(self, what: str, begun: bool) -> None:
        """L6: the engine's own, begun or over."""
        self.world.post(OwnWork(self.world.core.memory.engine.epoch, what, begun))

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

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_until(self.world.now + 2_000)
            self.world.over()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
