"""engine/scripted.py in virtual time. The process is tested in test_worker.py beside the real one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.failpoints import EXIT_CODE
from engine.link import Died
from engine.protocol import (
    Cancel,
    Chunk,
    Config,
    Declined,
    Described,
    Ended,
    Loading,
    Measure,
    Memory,
    Ready,
    Sampling,
    Seen,
    Start,
    Stop,
    ToEngine,
    Tokens,
)
from engine.scripted import Answer, Script, ScriptedEngine, Timed, encoded

DESCRIBED = Described(1, "m", "llama", "scripted", "{}", "", {}, [0], False, None, 64, 100)


class Driver:
    """Virtual time: messages at their times, the engine whenever it is due; ``ack`` answers Tokens with Seen."""

    def __init__(
        self, *answers: Answer, load_ms: float = 0.0, ack: bool = True, parallel: int = 1, **points: int
    ) -> None:
        config = Config(1, "", safe_rows=4, failpoints=points, parallel=parallel)
        self.engine = ScriptedEngine(config, DESCRIBED, Script(list(answers) or [Answer()], load_ms))
        self.ack, self.now = ack, 0.0
        self.said: list[Timed] = []
        self._note(self.engine.start(0.0))

    def send(self, message: ToEngine, at: float | None = None) -> None:
        self.run(self.now if at is None else at)
        self._note(self.engine.handle(message, self.now))

    def run(self, until: float = 1e9) -> list[Timed]:
        while (due := self.engine.due()) is not None and due <= until:
            self.now = max(self.now, due)
            self._note(self.engine.advance(self.now))
        self.now = max(self.now, until if until < 1e9 else self.now)
        return self.said

    def of(self, kind: type) -> list:
        return [message for _, message in self.said if isinstance(message, kind)]

    def _note(self, said: list[Timed]) -> None:
        self.said += said
        for _, message in said:
            if self.ack and isinstance(message, Tokens):
                self._note(self.engine.handle(Seen(1, message.run, message.start + len(message.ids)), self.now))


def start(
    run: int = 1, prompt: int = 10, max_tokens: int = 50, slot: int = 0, stop_ids: list[int] | None = None
) -> Start:
    return Start(1, run, slot, list(range(prompt)), Sampling(), max_tokens, stop_ids or [])


ABC = Answer(ids=[11, 12, 13], prefill_ms_per_row=100, decode_ms=1000)


def test_an_answer_comes_with_its_times() -> None:
    driver = Driver(ABC, load_ms=500)
    driver.send(start())
    assert driver.run() == [
        (0.0, DESCRIBED),
        (0.0, Loading(1, "script", 0, 1)),
        (0.5, Loading(1, "script", 1, 1)),
        (0.5, driver.of(Ready)[0]),
        (pytest.approx(0.9), Chunk(1, 1, 4, 10, pytest.approx(400))),
        (pytest.approx(1.3), Chunk(1, 1, 8, 10, pytest.approx(400))),
        (pytest.approx(1.5), Chunk(1, 1, 10, 10, pytest.approx(200))),
        (pytest.approx(1.5), Tokens(1, 1, 0, [11], 0.0)),
        (pytest.approx(2.5), Tokens(1, 1, 1, [12], 1000)),
        (pytest.approx(3.5), Tokens(1, 1, 2, [13], 1000)),
        (pytest.approx(4.5), Ended(1, 1, "stop", 13, 3, pytest.approx(1000), 3000)),
    ]


def test_answers_come_in_order_and_the_last_repeats() -> None:
    driver = Driver(Answer(ids=[1]), Answer(ids=[2, 3], round=2))
    for run in (1, 2, 3):
        driver.send(start(run))
        driver.run()
    assert [t.ids for t in driver.of(Tokens)] == [[1], [2, 3], [2, 3]]
    assert [e.run for e in driver.of(Ended)] == [1, 2, 3]


def test_without_seen_it_is_one_round_ahead_and_waits() -> None:
    driver = Driver(ABC, ack=False)
    driver.send(start())
    driver.run()
    assert [t.ids for t in driver.of(Tokens)] == [[11]] and driver.engine.due() is None
    driver.send(Seen(1, 1, 1), at=60)
    driver.run()
    assert [(t, m.ids) for t, m in driver.said if isinstance(m, Tokens)][-1] == (60, [12])


def test_a_cancel_lands_at_the_next_safe_point() -> None:
    """G1: at the end of the prefill step or of the round under way, whichever it is."""
    driver = Driver(ABC)
    driver.send(start(), at=0.0)
    driver.send(Cancel(1, 1), at=0.5)
    driver.run()
    assert driver.said[-1] == (pytest.approx(0.8), Ended(1, 1, "cancelled", 8, 0, pytest.approx(800)))
    driver.send(start(2), at=1.0)
    driver.send(Cancel(1, 2, keep=1), at=3.5)
    driver.run()
    assert driver.said[-1] == (pytest.approx(4.0), Ended(1, 2, "cancelled", 11, 2, pytest.approx(1000), 2000))
    assert len(driver.of(Ended)) == 2


def test_the_limit_and_stop_ids_hold_as_in_the_real_engine() -> None:
    driver = Driver(ABC)
    driver.send(start(1, max_tokens=2))
    driver.run()
    driver.send(start(2, stop_ids=[12]))
    driver.run()
    assert [(e.reason, e.generated) for e in driver.of(Ended)] == [("length", 2), ("stop", 1)]


def test_the_ends_a_script_can_ask_for() -> None:
    fault = Driver(Answer(ids=[5], then="fault"), Answer(ids=[5], then="length"))
    for run in (1, 2):
        fault.send(start(run))
        fault.run()
    assert [(e.reason, e.kept, e.why) for e in fault.of(Ended)] == [("fault", 0, "ScriptedFault"), ("length", 11, "")]
    dead = Driver(Answer(ids=[5], then="die"))
    dead.send(start())
    dead.run()
    assert dead.said[-1][1] == Died(1, EXIT_CODE) and dead.engine.due() is None
    dead.send(start(2))
    assert dead.of(Died) == [Died(1, EXIT_CODE)] and dead.of(Ended) == []
    silent = Driver(Answer(ids=[5], then="silent"))
    silent.send(start())
    silent.run()
    silent.send(Cancel(1, 1))
    assert isinstance(silent.run()[-1][1], Tokens)


def test_failpoints_work_here_too() -> None:
    assert Driver(die_at_load=1).said[-1][1] == Died(1, EXIT_CODE)
    assert Driver(stall_load=1).run()[-1][1] == DESCRIBED
    driver = Driver(ABC, decline_start=1, fault_at_chunk=2)
    for run in (1, 2, 3):
        driver.send(start(run))
        driver.run()
    assert driver.of(Declined) == [Declined(1, 1, "memory")]
    assert [(e.reason, e.why) for e in driver.of(Ended)] == [("fault", "ScriptedFault"), ("stop", "")]


@pytest.mark.parametrize(("point", "ends"), [("fault_at_token", 1), ("die_at_token", 0), ("silent_at_token", 0)])
def test_a_failpoint_at_a_token_leaves_those_before_it(point: str, ends: int) -> None:
    driver = Driver(ABC, **{point: 3})
    driver.send(start())
    driver.run()
    assert [t.ids for t in driver.of(Tokens)] == [[11], [12]] and len(driver.of(Ended)) == ends


def test_an_empty_prompt_is_a_fault_and_a_long_one_declined() -> None:
    driver = Driver(ABC)
    driver.send(start(1, prompt=0))
    driver.run()
    driver.send(start(2, prompt=64))
    assert [e.reason for e in driver.of(Ended)] == ["fault"] and driver.of(Declined) == [Declined(1, 2, "memory")]


def test_memory_is_read_at_a_safe_point() -> None:
    driver = Driver(ABC)
    driver.send(Measure(1, 5, 100))
    assert driver.of(Memory)[0].run == 5
    driver.send(start())
    driver.send(Measure(1, 6, 100), at=0.1)
    driver.send(Measure(9, 7, 100), at=0.1)
    driver.run(0.2)
    assert len(driver.of(Memory)) == 1
    driver.run()
    assert [t for t, m in driver.said if isinstance(m, Memory)][1:] == [pytest.approx(0.4)]


def test_slots_take_turns_on_one_engine() -> None:
    driver = Driver(ABC, parallel=2)
    driver.send(start(1, prompt=4))
    driver.send(start(2, prompt=4, slot=1))
    driver.run()
    assert len(driver.of(Ended)) == 2
    times = [t for t, m in driver.said if isinstance(m, Chunk | Tokens) and m.ms > 0]
    assert all(b - a > 0.3 for a, b in pairwise(times))


def test_stop_ends_the_engine() -> None:
    driver = Driver(ABC)
    driver.send(Stop(0))
    driver.send(Stop(1))
    assert driver.said[-1][1] == Died(1, 0)


def test_texts_are_encoded_once() -> None:
    script = encoded(Script([Answer(text="ab"), Answer(ids=[7])]), lambda text: [ord(c) for c in text])
    assert [a.ids for a in script.answers] == [[97, 98], [7]]
    with pytest.raises(ValueError, match="answer"):
        encoded(Script([]), lambda text: [])


moves = st.lists(
    st.tuples(st.floats(0, 3), st.sampled_from(["start", "cancel", "seen", "measure"]), st.integers(1, 4)), max_size=25
)


@given(moves, st.integers(1, 3), st.sampled_from(["stop", "length", "fault"]))
def test_every_start_is_answered_once_whatever_comes(
    walk: list[tuple[float, str, int]], round_: int, then: str
) -> None:
    """G1: one Ended or Declined a Start, never two rounds ahead, times never run back."""
    driver = Driver(Answer([1, 2, 3, 4, 5], "", 50, 100, round_, then), ack=False, parallel=2)  # type: ignore[arg-type]
    started, now = 0, 0.0
    for wait, move, n in walk:
        now += wait
        if move == "start":
            started += 1
            driver.send(start(started, prompt=n * 3, slot=n % 2), at=now)
        elif move == "cancel":
            driver.send(Cancel(1, n, None), at=now)
        elif move == "seen":
            driver.send(Seen(1, n, 5), at=now)
        else:
            driver.send(Measure(1, n, 9), at=now)
    for run in range(1, started + 1):
        driver.send(Cancel(1, run), at=now)
    driver.run()
    over = sorted([m.run for m in driver.of(Ended)] + [m.run for m in driver.of(Declined)])
    assert over == list(range(1, started + 1))
    assert len(driver.of(Memory)) == sum(move == "measure" for _, move, _ in walk)
    times = [t for t, _ in driver.said]
    assert times == sorted(times)
