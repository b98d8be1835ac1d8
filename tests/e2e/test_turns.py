"""Two agents' sessions take turns on slot 0, each of them where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.captures import needed
from tests.e2e.test_resume import reached
from tests.server import Server

pytestmark = pytest.mark.e2e
STEP = 64
"""Rows of a prefill step, and of the grid."""
HEAD = 2_400
"""Characters of the client's system prompt that both sessions begin with."""
TASKS = (
    "The tests of the parser fail since yesterday; find out why. "
    + "A line that begins with a blank is read twice. " * 20,
    "Write a program that reads a table of tides and prints the next one. " + "High water comes at noon in May. " * 25,
)
NEXT = ("Good. What is the next step?", "And then? Keep it short.")


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    steps = ("--safe-rows", str(STEP), "--prefix-chunk", str(STEP))
    flags = ("--parallel", "2", "--side-slot0-wait", "60", "--side-margin", "0", *steps)
    with Server(*flags) as server:
        yield server.ready()


def system() -> dict[str, Any]:
    """The system message of a coding agent, as captured, cut to what a test has time for."""
    entry = json.loads(needed("captures/opencode.jsonl").read_text().splitlines()[1])
    message: dict[str, Any] = entry["body"]["messages"][0]
    return {"role": message["role"], "content": message["content"][:HEAD]}


COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


class Session:
    """One conversation: its messages, and of every turn what it read, wrote and had kept."""

    def __init__(self, server: Server, task: str) -> None:
        self._server, self.messages = server, [system(), {"role": "user", "content": task}]
        self.turns: list[dict[str, Any]] = []

    def turn(self, then: str) -> None:
        """Ask, and put the answer and what is said next behind it."""
        body = {"messages": self.messages, "max_tokens": 24, "temperature": 0}
        response = self._server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        record = next(r for r in self._server.state()["recent"] if answer["id"].endswith(r["name"]))
        waited = any(row == "waits_slot0" for _, row in record["history"])
        self.turns.append({name: record[name] for name in ("slot", "source", *COUNTS)} | {"waited": waited})
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": then},
        ]


def test_two_sessions_take_turns(two: Server) -> None:
    """M3, M11, G2: two sessions of one client share slot 0: whoever comes next goes on where it ended, in place or out
    of the park, though a side slot is free; the head they share does not make one the other."""
    sessions = [Session(two, task) for task in TASKS]
    for session in sessions:
        session.turn(NEXT[0])
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda session: session.turn(NEXT[1]), sessions))
    for number, session in enumerate(sessions):
        print(f"\nsession {number + 1}:")
        for turn in session.turns:
            print("  " + ", ".join(f"{name} {value}" for name, value in turn.items()))
    for session in sessions:
        assert [turn["slot"] for turn in session.turns] == [0, 0, 0]
        for before, turn in zip(session.turns, session.turns[1:], strict=False):
            end = before["prompt_tokens"] + before["completion_tokens"]
            assert turn["source"] in ("slot", "park")
            assert turn["cached_tokens"] >= reached(two, end - 1)  # the last token of an answer was never read
    turns = [turn for session in sessions for turn in session.turns[1:]]
    assert any(turn["source"] == "park" for turn in turns)
    assert any(turn["waited"] for turn in turns)
