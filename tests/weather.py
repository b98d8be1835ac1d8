"""The weather of a storm (``tests/storm.py``): by chance alone, what is rare elsewhere and common in a world.

A kind of weather says what acts upon the server and how often, how much memory there is, how answers read, where the
engine fails, what the flags are and what clients send.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from engine.protocol import LEVELS
from engine.scripted import Answer
from stages.hashes import BLOCK
from tests.box import Store
from tests.world import Plan

KINDS = {"fair": 2, "lane": 8, "talk": 3, "memory": 4, "engine": 3, "start": 2, "crowd": 2, "odd": 1, "drain": 2}
"""How many worlds of each there are in turn."""
TURN = [kind for kind, count in KINDS.items() for _ in range(count)]

LEAVE = {"leave": 6, "leave_running": 2, "leave_gate": 1}
ACTS: dict[str, dict[str, int]] = {
    "fair": {**LEAVE, "fault": 1, "work": 2},
    "lane": {**LEAVE, "leave_lane": 6, "leave_holder": 14, "fault": 2, "work": 1},
    "talk": {**LEAVE, "evict": 4, "work": 6},
    "memory": {**LEAVE, "memory": 30, "fault": 1},
    "engine": {"leave": 4, "kill": 2, "freeze": 2, "work": 1},
    "start": {"leave": 2, "kill": 2},
    "crowd": {**LEAVE, "grow": 12},
    "odd": {**LEAVE, "grow": 4, "fault": 4},
    "drain": {**LEAVE, "leave_lane": 2, "drain": 3},
}
"""What happens (``Storm._act``), with its weight."""
OFTEN = {"fair": 0.01, "lane": 0.02, "talk": 0.02, "memory": 0.05, "engine": 0.006, "start": 0.02, "crowd": 0.05,
         "odd": 0.05, "drain": 0.01}  # fmt: skip
"""After how many of the events."""
LANES = {"lane": ("raw", "side", "side", ""), "drain": ("side", "", "")}
CODES = ("", "", "", "invalid_json", "invalid_type", "unsupported_parameter", "model_not_found")
PROMPT_CODES = ("", "", "unsupported_schema", "unsupported_schema", "invalid_value")


def levels(chance: Random) -> dict[str, int]:
    """What could be given back."""
    names = [name for name in LEVELS if chance.random() < (0.7 if name == "allocator" else 0.3)]
    return {name: chance.choice((20, 100, 400) if name != "allocator" else (100, 400, 700)) for name in names}


def store(chance: Random, kind: str) -> Store:
    """Memory: plenty of it, but in one weather."""
    if kind != "memory":
        return Store(free=100_000)
    return Store(
        free=chance.choice((90, 300, 800, 2_000)), per_row=1, a_run=chance.choice((0, 50, 200)),
        ceiling=chance.choice((0, 0, 300, 2_000)), peak=chance.choice((0, 0, 600, 1_200)), levels=levels(chance),
        garbage=chance.choice((0, 100)), workspaces=chance.choice(([], [(100, 100), (1_000, 1_000)])),
        most_rows=chance.choice((0, 250, 600)), device=chance.choice(("cpu", "cuda")),
    )  # fmt: skip


def answers(chance: Random, kind: str) -> list[Answer]:
    """One a run; the last repeats."""
    ends = ["stop"] * 20 + ["length"] * 4 + (["fault", "die", "silent"] if kind in ("engine", "lane", "odd") else [])
    pace = chance.choice({"drain": (4.0,), "talk": (1.0, 4.0)}.get(kind, (0.2, 1.0, 4.0)))
    out = [
        Answer(
            ids=[1] * chance.choice((0, 1, 3, 8, 20)), prefill_ms_per_row=pace * chance.choice((0.0, 0.2, 2.0, 10.0)),
            decode_ms=pace * chance.choice((1.0, 20.0, 200.0, 1_000.0)), round=chance.choice((1, 2, 4)),
            then=chance.choice(ends),
        )
        for _ in range(60)
    ]  # fmt: skip
    return [*out, Answer(ids=[1] * 12, prefill_ms_per_row=pace, decode_ms=20.0 * pace)]


def points(chance: Random, kind: str) -> list[dict[str, int]]:
    """Where each epoch's engine fails; the last repeats."""
    if kind == "start":
        ways = ["die_at_load"] * 5 + ["stall_load"]
        fails = [{chance.choice(ways): 1} for _ in range(chance.randint(2, 4))]
        return [*fails, {}, *fails, {}, *fails, {}]
    if kind == "engine":
        places = ("fault_at_chunk", "die_at_chunk", "fault_at_token", "silent_at_token", "decline_start")
        return [*({chance.choice(places): chance.randint(1, 3)} for _ in range(6)), {}]
    return [{"decline_guest": chance.randint(1, 4)} if kind == "lane" else {}]


def policy(chance: Random, kind: str) -> dict[str, Any]:
    """The flags."""
    least, most = {"crowd": (1, 1), "talk": (2, 4), "memory": (2, 4), "lane": (1, 3)}.get(kind, (1, 4))
    crowd = kind == "crowd"
    return {
        "slots": chance.randint(least, most), "side_max_len": chance.choice((65_536, 400, 120)),
        "default_max_tokens": 30, "side_margin": 64, "prefix_chunk": 128, "resident_guest_max": 64,
        "side_slot0_wait": chance.choice((0.5, 3.0)),
        "parallel_floor": chance.choice((0, 0, 500)) if kind == "memory" else -1,
        "side_lane": chance.choice(("on", "decode") if kind == "lane" else ("on", "on", "decode", "off")),
        "side_lane_prompt": 120, "side_lane_tokens": chance.choice((4, 64)), "side_lane_side_tokens": 5,
        "max_queue": 3 if crowd else chance.choice((4, 8, 30)), "max_live": 3 if crowd else 20,
        "bodies": 1 << (20 if kind in ("crowd", "odd") else 30),
        "queue_timeout": 30.0, "request_timeout": chance.choice((0.0, 12.0, 40.0, 120.0)), "drain_timeout": 8.0,
        "keepalive_s": chance.choice((0.0, 4.0, 15.0)), "early_headers_s": chance.choice((0.0, 3.0, 10.0)),
        "prefill_heartbeat_s": chance.choice((0.0, 1.0)), "quiet_s": 6.0, "give_up_s": 8.0, "retry_failed_s": 8.0,
    }  # fmt: skip


class Talk(msgspec.Struct):
    """A conversation that goes on. ``head``: blocks that all of its client's begin with; ``length``: blocks so far."""

    name: str
    head: int
    length: int = 0

    def next(self, chance: Random) -> dict[str, Any]:
        """Its next turn, as fields of a plan."""
        self.length = min(max(self.length, self.head) + chance.randint(1, 4), 13)
        names = [f"{'head' if block < self.head else self.name}{block}" for block in range(self.length)]
        return {
            "prompt": self.length * BLOCK + chance.randint(0, 40),
            "hashes": tuple(name.encode().ljust(8) for name in names),
            "head": self.head * BLOCK, "opening": self.head * BLOCK + 55, "first": f"open{self.name}".encode(),
        }  # fmt: skip


def plan(chance: Random, kind: str, talks: list[Talk]) -> Plan:
    """What one client sends."""
    lane = chance.choice(LANES.get(kind, ("",)))
    fields: dict[str, Any] = {
        "prompt": chance.choice((1, 30, 100) if lane else (1, 30, 100, 300, 700)),
        "max_tokens": chance.choice((0, 2, 3, 4, 40) if lane else (0, 3, 10, 40)),
        "stream": chance.random() < 0.6, "progress": chance.random() < 0.2, "lane": lane,
        "stop_at": chance.choice((0, 0, 0, 1, 5)), "closes_at": chance.choice((0, 0, 2)),
        "calls": chance.choice((0, 1, 1) if lane else (0, 0, 0, 1, 2)), "call_at": 1 if lane else chance.randint(1, 4),
        "images": int(chance.random() < 0.05), "planned": chance.random() < 0.1,
        "body_s": chance.choice((0.001, 0.3, 2.0) if kind in ("crowd", "odd") else (0.001, 0.001, 0.3)),
        "prepare_s": chance.choice((0.002, 0.002, 0.2)),
    }  # fmt: skip
    if kind == "talk" and chance.random() < 0.85:
        fields |= chance.choice(talks).next(chance)
    if not lane and chance.random() < 0.12:
        fields["choices"] = chance.randint(2, 3)
    if not lane and chance.random() < 0.06:
        fields["others"] = chance.choice(((10,), (30, 1, 300), (10, 1_000)))
    if kind == "odd":
        fields |= {"code": chance.choice(CODES), "prompt_code": chance.choice(PROMPT_CODES)}
        fields["prompt"] = chance.choice((0, 1, 30, 999, 1_000))
    return Plan(**fields)


def clients(chance: Random, kind: str) -> list[tuple[float, Plan]]:
    """Who comes when."""
    talks = [Talk(name, chance.choice((0, 1, 2))) for name in "abcd"]
    every = chance.choice((1.0, 4.0) if kind in ("start", "engine") else (0.02, 0.3, 1.0, 4.0))
    at, out = 0.0, []
    for _ in range(chance.randint(30, 90)):
        at += chance.expovariate(1.0) * every * chance.choice((0.1, 1.0, 1.0))
        out.append((at, plan(chance, kind, talks)))
    return out
