"""engine/scripted.py in virtual time. The process is tested in test_worker.py beside the real one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
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
    Resumed,
    Sampling,
    Seen,
    Start,
    Stop,
    Thinking,
    ToEngine,
    Tokens,
    Turn,
)
from engine.scripted import Answer, Script, ScriptedEngine, Timed, encoded
from tests.checkpoints import tokenizer

DESCRIBED = Described(1, "m", "llama", "scripted", "{}", "", {}, [0], False, None, 64, 100)


class Driver:
    """Virtual time: messages at their times, the engine whenever it is due; ``ack`` answers Tokens with Seen."""

    def __init__(
        self, *answers: Answer, load_ms: float = 0.0, ack: bool = True, parallel: int = 1,
        described: Described = DESCRIBED, **points: int,
    ) -> None:  # fmt: skip
        config = Config(1, "", safe_rows=4, failpoints=points, parallel=parallel)
        self.engine = ScriptedEngine(config, described, Script(list(answers) or [Answer()], load_ms))
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
        (pytest.approx(4.5), Ended(1, 1, "stop", 13, 3, pytest.approx(1000), 3000, rounds=4)),
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
    assert driver.said[-1] == (pytest.approx(4.0), Ended(1, 2, "cancelled", 11, 2, pytest.approx(1000), 2000, rounds=2))
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


# -- thinking ----------------------------------------------------------------------------------------------------------


def tagged(*added: str, special: bool = True) -> tuple[Described, dict[str, int]]:
    """A byte vocabulary of 280 ids, with these tags behind it; what is described of it, and the ids by text."""
    spec = tokenizer(280)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    spec["added_tokens"] += [{"id": 280 + i, "content": tag} | plain for i, tag in enumerate(added)]
    described = msgspec.structs.replace(DESCRIBED, tokenizer=json.dumps(spec), vocab=280 + len(added))
    return described, spec["model"]["vocab"] | {tag: 280 + i for i, tag in enumerate(added)}


def thought(described: Described, answer: Answer, *how: Any, max_tokens: int = 50) -> tuple[list[int], list[Turn], str]:
    driver = Driver(answer, described=described)
    asked = msgspec.structs.replace(start(max_tokens=max_tokens), thinking=Thinking(*how))
    driver.send(asked)
    driver.run()
    said = driver.of(Tokens)
    return [i for m in said for i in m.ids], [turn for m in said for turn in m.turns], driver.of(Ended)[0].reason


@pytest.mark.parametrize("round_", [1, 2, 5])
@pytest.mark.parametrize("state", ["open", "may"])
def test_a_budget_is_kept_whoever_opens_the_block(round_: int, state: str) -> None:
    """C3: field report 10: the same cut for any depth of a round, and the answer is there."""
    described, ids = tagged("<think>", "</think>")
    thinking, text = [ids["<think>"]] * (state == "may") + [60 + i for i in range(30)], [50, 51, 52]
    script = Answer(ids=thinking + text, round=round_)
    answer, turns, end = thought(described, script, state, 20)
    assert answer == [*thinking[:20], ids["</think>"], *thinking[20:], *text] and end == "stop"
    assert turns[-1] == Turn("closed", 20, 0, 0, "budget") and len(turns) == (2 if state == "may" else 1)


@pytest.mark.parametrize("round_", [1, 2, 5])
def test_the_closing_is_spelled_where_there_is_no_token_of_it(round_: int) -> None:
    """C3, C6: as eight tokens of a byte vocabulary; of one that the script has begun the rest is enough."""
    described, ids = tagged()
    close = [ids[letter] for letter in "</think>"]
    script = [60 + i for i in range(12)]
    answer, turns, _ = thought(described, Answer(ids=script, round=round_), "open", 5)
    assert answer == script[:5] + close + script[5:] and turns == [Turn("closed", 12, 8, 0, "budget")]
    begun = script[:3] + close[:2] + script[3:]
    answer, turns, _ = thought(described, Answer(ids=begun, round=round_), "open", 5)
    assert answer == script[:3] + close + script[3:] and turns == [Turn("closed", 10, 8, 0, "budget")]


@pytest.mark.parametrize("round_", [1, 2, 5, 9])
@pytest.mark.parametrize("tags", [("<think>", "</think>"), ()])
def test_a_closing_that_the_script_has_where_it_is_forced_is_written_once(round_: int, tags: tuple[str, ...]) -> None:
    """C3: as of a tag that is begun: what the script would say there is what is forced, for any depth of a round."""
    described, ids = tagged(*tags)
    close = [ids["</think>"]] if tags else [ids[letter] for letter in "</think>"]
    for own in (close, close[:3]):
        script = Answer(ids=[60, 61, *own, 62, 63], round=round_)
        answer, turns, _ = thought(described, script, "open", 2)
        assert answer == [60, 61, *close, 62, 63] and [turn.reason for turn in turns] == ["budget"]


def test_what_the_script_closes_itself_is_the_models() -> None:
    """C6: by the token or spelled, also as the very first; a budget and a reserve have nothing to do then."""
    described, ids = tagged("<think>", "</think>", special=False)
    spelled = [ids[letter] for letter in "</think>"]
    for close, size in (([ids["</think>"]], 8), (spelled, 8)):
        for before in ([], [60, 61]):
            script = Answer(ids=[*before, *close, 62], round=3)
            answer, turns, _ = thought(described, script, "open", 30, -1, True)
            assert answer == script.ids
            assert turns == [Turn("closed", len(before) + len(close) - 1, size, 0, "model")]


def test_thinking_leaves_the_reserve_to_the_answer() -> None:
    """C4: field report 11: with max_tokens 40 at most 30 are reasoning, the closing among them."""
    described, _ = tagged("<think>", "</think>")
    script = [60 + i % 50 for i in range(60)]
    answer, turns, end = thought(described, Answer(ids=script, round=4), "open", -1, -1, max_tokens=40)
    assert (len(answer), end) == (40, "length") and turns == [Turn("closed", 29, 0, 0, "reserve")]
    answer, turns, end = thought(described, Answer(ids=script), "open", max_tokens=20)
    assert (answer, turns, end) == (script[:20], [], "length")


def test_a_stall_is_closed_and_a_script_without_tags_is_left_alone() -> None:
    """C8, C5: a block that repeats is closed; a checkpoint that cannot spell the tag forces nothing."""
    described, ids = tagged("</think>")
    script = Answer(ids=[60, 61, *[62, 63, 64] * 6], round=2)
    answer, turns, _ = thought(described, script, "open", -1, 0, True)
    assert answer == [*script.ids[:14], ids["</think>"], *script.ids[14:]]
    assert turns == [Turn("closed", 14, 0, 0, "stall")]
    assert thought(described, script, "open")[0] == script.ids
    assert thought(DESCRIBED, script, "open", 3, -1, True)[:2] == (script.ids, [])


def test_a_kept_end_is_taken_up() -> None:
    """F11: the next choice reads no prompt and takes no time for it; without the wish it does."""
    driver = Driver(ABC)
    for run, keep in ((1, True), (2, False), (3, False)):
        driver.send(msgspec.structs.replace(start(run), keep_end=keep, choice=run))
        driver.run()
    assert driver.of(Resumed) == [Resumed(1, 2, 10, "end")]
    assert [(c.run, c.done) for c in driver.of(Chunk)] == [(1, 4), (1, 8), (1, 10), (2, 10), (3, 4), (3, 8), (3, 10)]
    assert [(e.reason, e.prefill_ms > 0, e.decode_ms) for e in driver.of(Ended)] == [
        ("stop", True, 3000), ("stop", False, 3000), ("stop", True, 3000),
    ]  # fmt: skip


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
