"""Several answers at once from the real engine: each reads as it does alone, whoever runs beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from tests.server import Server

pytestmark = pytest.mark.e2e
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("What is the capital of France?", {"temperature": 0}),
    ("Tell me about rivers and the sea.", {"temperature": 0.9, "seed": 11}),
    ("Repeat after me: one two three one two three one two three.", {"temperature": 0}),
    ("Write a list of ten animals." * 8, {"temperature": 1.1, "seed": 5, "top_p": 0.9}),
]
"""Greedy and sampled, short and longer, one whose drafts are good."""


@pytest.fixture(scope="module")
def four() -> Iterator[Server]:
    with Server("--parallel", "4") as server:
        yield server.ready()


def streamed(server: Server, number: int, gate: Barrier | None = None) -> tuple[str, str]:
    """The text of one of the requests, by its stream, and its finish word."""
    question, fields = ASKED[number]
    said, finish = [], ""
    if gate is not None:
        gate.wait()
    with server.streamed(question, max_tokens=64, ignore_eos=True, **fields) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                said.append(choice["delta"].get("content") or "")
                finish = choice["finish_reason"] or finish
    return "".join(said), finish


@pytest.mark.parametrize("count", [2, 4])
def test_each_reads_as_it_does_alone(count: int, four: Server) -> None:
    """M1, M6, F8: streams at once give the texts they give alone; their steps were joint where rows come out alike."""
    alone = [streamed(four, number) for number in range(count)]
    before = four.health()["parallel"]
    gate = Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        together = list(pool.map(lambda number: streamed(four, number, gate), range(count)))
    assert together == alone
    assert all(finish == "length" and text for text, finish in alone)
    health = four.health()
    after = health["parallel"]
    assert after["slots"] == 4 and after["max_running"] >= count
    assert (after["joint_rounds"] > before["joint_rounds"]) == (health["engine"]["alike"] > 1)
    slots = {request["slot"] for request in four.idle()["recent"][:count]}
    assert slots == set(range(count))


def test_one_after_another_is_slot_0s(four: Server) -> None:
    """M1, M2: a request alone is slot 0's, and nothing of it is joint."""
    four.idle()
    before = four.health()["parallel"]["joint_rounds"]
    streamed(four, 0)
    assert four.idle()["recent"][0]["slot"] == 0
    assert four.health()["parallel"]["joint_rounds"] == before
