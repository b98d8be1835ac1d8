"""A request's figures at its end, and the live state as the Dev view gets it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import msgspec

from engine.scripted import Answer, Script
from pipeline import view
from pipeline.settings import Settings
from tests.world import Plan, World


def test_one_log_line_a_request() -> None:
    """P1: id, stream or json, prompt=, completion=, finish=, ms, tok/s, slot, cached, tools; one each, of any end."""
    world = World(Script(answers=[Answer(ids=[1] * 11, decode_ms=100.0)]))
    done = world.arrive(Plan(prompt=30))
    world.run_until(5.0)
    refused = world.arrive(Plan(code="invalid_type", stream=False))
    left = world.arrive()
    world.hang_up(left)
    world.run_until(9.0)
    lines = [line for line in world.logs if line.startswith("[req]")]
    assert [line.split()[1] for line in lines] == [f"{id:024x}" for id in (done, left, refused)]
    assert re.fullmatch(
        r"\[req\] \w{24} chat stream prompt=30 completion=11 finish=stop ms=\d+ tok/s=10\.0 queue_ms=\d+ "
        r"cached=0 reasoning=0 tools=0 slot=0",
        lines[0],
    )
    assert "finish=abandoned" in lines[1]
    assert "why=closed" in lines[1]
    assert "json prompt=0 completion=0 finish=invalid_type" in lines[2]


def test_figures_add_up() -> None:
    """F4: queue, prompt and answer times of a request that waited, in milliseconds."""
    world = World(Script(answers=[Answer(ids=[1] * 11, decode_ms=100.0, prefill_ms_per_row=1.0)]))
    world.arrive(Plan(prompt=100))
    second = world.arrive(Plan(prompt=200))
    world.run_until(10.0)
    end = world.clients[second].end
    assert end is not None
    assert abs(end.queue_ms - 1_200) < 250
    assert abs(end.prompt_ms - 300) < 150
    assert abs(end.predicted_ms - 1_000) < 150
    rest = end.total_ms - (end.queue_ms + end.prompt_ms + end.predicted_ms)
    assert 0 <= rest <= 101  # the round in which the model ended it


def test_counts_of_every_end() -> None:
    """F6: served, refused, abandoned, timed out and broken are told apart."""
    world = World(Script(answers=[Answer(ids=[1] * 300, decode_ms=100.0)]), queue_timeout=3.0)
    running = world.arrive()
    world.arrive(Plan(code="invalid_json"))
    world.arrive(Plan(stream=False))
    world.run_until(5.0)
    world.hang_up(world.arrive())
    world.kill()
    world.run_until(50.0)
    assert world.clients[running].end is not None
    counts = world.core.memory.counts
    assert (counts.refused, counts.timeouts, counts.abandoned, counts.errors, counts.served) == (1, 1, 1, 1, 0)


def test_the_view_holds_what_the_page_shows() -> None:
    """R8: live requests with state, last row and history; slots, queue, recent ends; it is plain JSON."""
    world = World(Script(answers=[Answer(ids=[1] * 300, decode_ms=100.0)]))
    world.arrive(Plan(code="invalid_json"))
    running, waiting = world.arrive(), world.arrive()
    world.run_until(12.0)
    runner = SimpleNamespace(
        core=world.core, now=lambda: world.now, loaded=None, model="m", settings=Settings(), lag_ms=0.0,
        counters={"dropped_calls": 2},
    )  # fmt: skip
    seen = msgspec.json.decode(msgspec.json.encode(view.view(runner)))  # type: ignore[arg-type]
    first, second = seen["requests"]
    assert (first["id"], first["state"], first["row"]) == (running, "decoding", "answering")
    assert (second["id"], second["position"], second["line"]) == (waiting, 1, "waiting, position 1, 10 s so far")
    assert [row for _, row in second["history"]][-2:] == ["must_wait", "waiting_line"]
    assert seen["queue"] == [waiting]
    assert seen["slots"] == [{"slot": 0, "state": "busy", "row": "taken", "request": running}]
    assert [(r["outcome"], r["row"]) for r in seen["recent"]] == [("invalid_json", "bad_json")]
    assert seen["counters"] == {"dropped_calls": 2}
    assert list(seen["cache"]) == ["slots", "park", "disk"]
    assert (first["drafts"], first["source"]) == (
        {"rounds": first["completion_tokens"], "drafted": 0, "accepted": 0},
        "",
    )
    assert (first["choice"], first["choices"], first["parent"], first["calls"]) == (0, 1, -1, 0)
    assert (seen["counts"]["running"], seen["counts"]["waiting"]) == (1, 1)
