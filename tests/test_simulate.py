"""The simulation: the core against a modelled engine, and that its judge sees nothing before it happened."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pipeline.__main__ import main
from pipeline.arrivals import Asked, Session, sided
from pipeline.figures import estimates, printed
from pipeline.modelled import Costs
from pipeline.plot import svg
from pipeline.settings import Policy
from pipeline.simulate import Outcome, Simulation, Told, simulate
from stages.wait import Ended, History
from tests.captures import needed

COSTS = Costs(prefill=1_000.0, decode=100.0)
KNOWN = History({"plain": tuple(Ended("plain", 100 * n, n + 1.0) for n in range(1, 20))})
SIMULATE = [sys.executable, "-m", "pipeline", "simulate"]
ROOT = Path(__file__).resolve().parents[1]


def traffic(answers: list[int], every: float = 2.0, prompt: int = 500) -> list[Session]:
    return [Session((Asked(i * every, prompt, written),)) for i, written in enumerate(answers)]


def test_one_alone_takes_what_it_costs() -> None:
    """R7: a prompt at the prefill rate and an answer at the decode rate, from its arrival on, and nothing else."""
    served = simulate(traffic([200], prompt=3_000), Policy(), COSTS).served
    assert len(served) == 1
    assert served[0].queued == 0
    assert served[0].ttft == pytest.approx(3.0)
    assert served[0].total == pytest.approx(3.0 + 199 / 100)  # the prompt's last row gives the first token


def test_a_second_waits_for_the_first() -> None:
    """L7: one slot, one turn: the second begins when the first is over."""
    outcome = simulate(traffic([1_000, 10], every=1.0), Policy(), COSTS)
    (first, second) = outcome.holds
    assert first[1] == second[0] == pytest.approx(0.5 + 9.99)
    assert max(one.queued for one in outcome.served) == pytest.approx(first[1] - 1.0)


def test_joint_rounds_cost_what_the_table_says() -> None:
    """M6: two that write at once write together what the table says, each half of it."""
    costs = msgspec.structs.replace(COSTS, joint=(1.0, 1.6))
    outcome = simulate(traffic([1_001, 1_001], every=0.0, prompt=1), Policy(slots=2), costs)
    assert outcome.ends_at == pytest.approx(2_000 / 160, rel=0.01)


def test_a_prefill_does_not_stop_an_answer() -> None:
    """M6: behind a prefill step those that write have a round, so an answer goes on beside a long prompt."""
    sessions = [Session((Asked(0.0, 10, 50),)), Session((Asked(0.1, 100_000, 5),))]
    short, long = sorted(simulate(sessions, Policy(slots=2), COSTS).holds, key=lambda hold: hold[1])
    assert short[1] < long[1]


def test_a_full_queue_is_an_outcome() -> None:
    """I1: who finds the queue full is told at once; outcomes are counted by the row that fired."""
    outcome = simulate(traffic([5_000] + [1] * 6, every=0.1), Policy(max_queue=2), COSTS)
    assert outcome.rows == {"stopped": 3, "refused_queue_full": 4}
    assert outcome.requests == sum(outcome.rows.values())


def test_a_conversation_goes_on_from_what_is_held() -> None:
    """G2: a session's next prompt reads only what is new, as long as its conversation is held."""
    first = Asked(0.0, 6_400, 10, blocks=((1, 0, 100),))
    second = Asked(1.0, 7_040, 10, 6_400, ((1, 0, 100), (2, 100, 110)), think=5.0)
    held = simulate([Session((first, second))], Policy(), COSTS)
    assert held.holds[1][0] == pytest.approx(held.holds[0][1] + 5.0)
    assert held.served[1].ttft == pytest.approx(0.64)
    others = [Session((Asked(7.0 + i, 640, 1, blocks=((9 + i, 0, 10),)),)) for i in range(3)]
    lost = simulate([Session((first, second)), *others], Policy(), msgspec.structs.replace(COSTS, held=1))
    assert max(one.ttft for one in lost.served[1:]) >= 7.04


def test_estimates_know_nothing_before_the_first_end() -> None:
    """L3: other answers behind the same arrivals: every estimate is the same until the first end, then not."""
    answers = [300, 900, 400, 700, 1_200, 500, 800, 600]
    sessions, ask = traffic(answers, every=0.2), [0.2 * n + 0.15 for n in range(200)]
    for seed in range(3):
        shuffled = answers[:]
        random.Random(seed).shuffle(shuffled)
        one, other = (
            Simulation(s, Policy(), COSTS, ask, KNOWN).run() for s in (sessions, traffic(shuffled, every=0.2))
        )
        until = min(one.first_end, other.first_end)
        before = [[(t.place, t.at, t.estimate) for t in run.told if t.at < until] for run in (one, other)]
        assert before[0] == before[1]
        assert sum(estimate is not None for _, _, estimate in before[0]) > 10
        after = [[(t.place, t.at, t.estimate) for t in run.told if t.at >= until] for run in (one, other)]
        assert after[0] != after[1]


def test_asking_changes_nothing() -> None:
    """R7: the run that is asked is event for event the run that is not."""
    answers = [random.Random(3).randrange(1, 900) for _ in range(40)]
    plain = Simulation(traffic(answers, every=3.0), Policy(), COSTS, []).run()
    asked = Simulation(traffic(answers, every=3.0), Policy(), COSTS, [i * 0.7 for i in range(200)]).run()
    assert (plain.holds, plain.rows, plain.served, plain.queue) == (asked.holds, asked.rows, asked.served, asked.queue)
    assert asked.told


def test_answers_all_alike_are_told_exactly() -> None:
    """L2: where every request is the same, the estimate is the wait, but for the step that is under way."""
    outcome = simulate(traffic([400] * 30, every=1.0), Policy(max_queue=30), COSTS)
    ratios = [t.estimate / t.real for t in outcome.told if t.estimate is not None and t.real > 2]
    assert len(ratios) > 500
    assert 0.8 < min(ratios) < max(ratios) < 1.25


def test_a_judge_waits_as_one_in_the_line_does() -> None:
    """L5: a waiter at the end of the line gets its turn when all who stood there have had theirs."""
    outcome = Simulation(traffic([1_000, 100, 100], every=1.0), Policy(), COSTS, [5.0], KNOWN).run()
    real = {told.place: told.real for told in outcome.told if told.place != "waits"}
    ends = [stop for _, stop in outcome.holds]
    assert real == {"next": pytest.approx(ends[0] - 5.0), "last": pytest.approx(ends[2] - 5.0)}
    waits = [told.real for told in outcome.told if told.place == "waits"]
    assert waits == [pytest.approx(ends[0] - 5.0), pytest.approx(ends[1] - 5.0)]


def test_who_needs_slot_0_is_asked_beside_a_free_slot() -> None:
    """L5, M2: prompts too long for a side slot wait beside a free one; what they are told is judged all the same."""
    sessions = traffic([1_000, 100, 100], every=1.0, prompt=3_000)
    outcome = Simulation(sessions, Policy(slots=2, side_max_len=2_000), COSTS, [5.0], KNOWN).run()
    first, second, _ = sorted(stop for _, stop in outcome.holds)
    assert [(told.place, told.real) for told in outcome.told] == [
        ("waits", pytest.approx(first - 5.0)),
        ("waits", pytest.approx(second - 5.0)),
    ]
    assert all(told.estimate for told in outcome.told)


def test_side_requests_are_served_inside() -> None:
    """K2, R7: drawn side requests come beside a long answer; the lane serves them at once, without it they wait."""
    sessions = sided(traffic([3_000], prompt=5_000) * 2, 1.0, 0)
    assert [session.requests[0].lane for session in sessions] == ["", "", "raw", "raw"]
    costs = msgspec.structs.replace(COSTS, told_s=0.0)
    runs = [Simulation(sessions, Policy(side_lane=lane), costs, []).run() for lane in ("on", "off")]
    waits = [[one.ttft for one in run.served if one.side] for run in runs]
    assert [len(wait) for wait in waits] == [2, 2]
    assert max(waits[0]) < 10 < min(waits[1])
    assert (runs[0].lane.served, runs[1].lane.offered) == (2, 0)
    told = [printed([run], 0.8, 60.0, 1) for run in runs]
    assert "side lane: 2 of 2 offers served inside" in told[0]
    assert "side lane" not in told[1]
    assert all("side: total" in text for text in told)


def test_drawn_side_requests() -> None:
    """R7: the same seed draws the same ones, short as the lane wants them, about the share that was asked for."""
    sessions = traffic([10] * 400)
    drawn = [session for session in sided(sessions, 0.25, 3) if session.requests[0].lane]
    assert drawn == [session for session in sided(sessions, 0.25, 3) if session.requests[0].lane]
    assert drawn != [session for session in sided(sessions, 0.25, 4) if session.requests[0].lane]
    assert 60 < len(drawn) < 140
    assert all(asked.prompt <= 2_048 and asked.written <= 64 for session in drawn for asked in session.requests)
    assert sided(sessions, 0.0, 3) == sessions


def test_figures() -> None:
    """L5: the ratio's median and spread by class of the real wait; who was told nothing is counted, not judged."""
    told = [Told("waits", 0.0, e, 20.0) for e in (10.0, 20.0, 22.0, 60.0, None)]
    told += [Told("waits", 0.0, 1.0, 1.0), Told("waits", 0.0, 5.0, -1.0)]  # under a line's time; never served
    (row,) = estimates(told)
    assert (row.words, row.count, row.silent, row.median, row.p10, row.p90) == ("10-60 s", 5, 1, 1.0, 0.5, 3.0)
    assert row.within == 0.75
    text = printed([Outcome(requests=2, rows={"stopped": 2}, told=told)], 0.8, 60.0, 1)
    assert "load 0.8, 1 slot: 2 requests" in text
    assert "stopped 2" in text


def test_a_picture() -> None:
    """R7: --plot writes one well-formed SVG with a point for each estimate and the queue as a line."""
    from xml.etree import ElementTree

    outcome = simulate(traffic([400] * 12, every=1.0), Policy(), COSTS)
    drawn = ElementTree.fromstring(svg(outcome, "a <b> & c"))
    kinds = [element.tag.rpartition("}")[2] for element in drawn]
    told = [t for t in outcome.told if t.place == "waits" and t.estimate is not None and t.real >= 1]
    assert kinds.count("circle") == len(told) > 0
    assert kinds.count("polyline") == 1
    assert any(element.text == "a <b> & c" for element in drawn)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trace of Mooncake's form: bursts of five, each with a conversation of its own."""
    chance, ids = random.Random(5), itertools.count(1)
    rows = []
    for index in range(60):
        prompt = chance.randrange(600, 4_000)
        blocks = [0, *(next(ids) for _ in range(prompt // 512))]
        row = {"timestamp": index // 5 * 20_000, "input_length": prompt, "output_length": chance.randrange(5, 600)}
        rows.append(msgspec.json.encode({**row, "hash_ids": blocks}))
    path = tmp_path / "small.jsonl"
    path.write_bytes(b"\n".join(rows))
    return path


def test_the_command_prints_the_same_in_another_process(small: Path, tmp_path: Path) -> None:
    """R3: the same seed gives the same output under another hash seed, picture included; another seed another one."""
    said = []
    for hash_seed, seed in (("1", "4"), ("2", "4"), ("1", "5")):
        plot = tmp_path / f"{hash_seed}-{seed}.svg"
        done = subprocess.run(
            [*SIMULATE, str(small), "--load", "0.5,0.9", "--seed", seed, "--plot", plot],
            env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True, cwd=ROOT,
        )  # fmt: skip
        said.append((done.stdout, plot.read_text()))
    assert said[0] == said[1]
    assert said[0][0] != said[2][0]
    assert "load 0.9" in said[0][0]
    assert "each that waits" in said[0][0]


def test_the_lane_on_the_command_line(small: Path) -> None:
    """R7: --side-share brings side requests along, and what the lane did with them is printed."""
    args = ["simulate", str(small), "--load", "0.9"]
    sides = ["--side-share", "0.5", "--side-lane"]
    on, off, none = (CliRunner().invoke(main, [*args, *more]).output for more in ([*sides, "on"], [*sides, "off"], []))
    assert "side lane on, 50% bring a side request" in on
    assert "served inside" in on
    assert "side lane off" in off
    assert "served inside" not in off
    assert "side" not in none


def test_rates_of_a_measured_run(small: Path) -> None:
    """R7: --measured takes the rates from what a recorded run of this server did."""
    recorded = sorted((ROOT / "fixtures" / "traces").glob("*.jsonl"))
    texts = [
        CliRunner().invoke(main, ["simulate", str(small), "--load", "0.5", "--measured", str(p)]) for p in recorded
    ]
    well = [result.output for result in texts if result.exit_code == 0]
    assert well
    assert all("2000 prompt rows/s" not in text for text in well)


@pytest.mark.parametrize(
    ("args", "named"),
    [(["--load", "0"], "--load"), (["--load", "x"], "--load"), (["--joint", "1,-1"], "--joint"), ([], "known format")],
)
def test_a_wrong_flag_is_named(small: Path, tmp_path: Path, args: list[str], named: str) -> None:
    """R7: what cannot be read is a sentence."""
    path = small if args else tmp_path / "x.jsonl"
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    result = CliRunner().invoke(main, ["simulate", str(path), *args])
    assert result.exit_code != 0
    assert named in result.output


def test_an_hour_of_real_traffic() -> None:
    """R7: a tenth of an hour of each public trace runs to its end, and every request ends once."""
    names = ("mooncake_conversation.jsonl.xz", "azure_2023_conversation.csv.xz", "agent_sessions.jsonl.gz")
    for name in names:
        path = needed(f"traces/{name}")
        result = CliRunner().invoke(main, ["simulate", str(path), "--load", "0.8", "--minutes", "6", "--parallel", "2"])
        assert result.exit_code == 0, result.output
        assert "2 slots" in result.output
