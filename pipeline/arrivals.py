"""Public serving traces as arrivals (row R7): what comes when, with how long a prompt and how long an answer.

Three formats, told by what a file holds: Mooncake's JSON lines, Azure's table, and coding agents' sessions. A session's
requests share a prefix, which stands here as blocks with names, never as text. An agent sends its next request when the
last one was answered and it has thought; everybody else sends at the trace's own times.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import random
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from struct import pack
from typing import Any

import msgspec

from stages.hashes import BLOCK

HASHED = 512
"""Tokens of one of Mooncake's blocks."""
SIDE_PROMPT, SIDE_TOKENS = (64, 2_048), (8, 64)
"""A side request's prompt and answer, from … to."""
SIDE_S = 1.0
MISFITS = 8
"""Sessions too large for what is left of a load, before the drawing ends: more would leave small ones alone."""


class NoTrace(ValueError):
    """A sentence that says what is wrong with a file."""


class Asked(msgspec.Struct, frozen=True):
    """One request. ``blocks``: runs of its prompt's whole blocks, each of a named origin from an index to another.

    ``shared``: rows it has in common with an earlier one of its session. ``think``: seconds between the end of the one
    before and this one, of a session that waits for its answers; -1: it comes at ``at``. ``lane``: as what it may be
    served in the side lane.
    """

    at: float
    prompt: int
    written: int
    shared: int = 0
    blocks: tuple[tuple[int, int, int], ...] = ()
    think: float = -1.0
    lane: str = ""

    def hashes(self) -> list[bytes]:
        """One name a block, as the prompt stage would give."""
        return [pack("<II", origin, index) for origin, first, stop in self.blocks for index in range(first, stop)]

    def work(self, prefill: float, decode: float) -> float:
        """Seconds it takes alone, with its session's rows still there."""
        return (self.prompt - self.shared) / prefill + self.written / decode


class Session(msgspec.Struct, frozen=True):
    """Requests that belong together, in order. ``kind``: whether it thinks, which is known when it comes."""

    requests: tuple[Asked, ...]
    kind: str = "plain"

    def work(self, prefill: float, decode: float) -> float:
        """Seconds its requests take alone."""
        return sum(asked.work(prefill, decode) for asked in self.requests)


def read(path: Path) -> list[Session]:
    """The sessions of a trace, by first arrival; times from 0. Raises ``NoTrace``."""
    try:
        lines = _text(path).splitlines()
        if lines and lines[0].startswith("TIMESTAMP"):
            return _azure(lines)
        first = msgspec.json.decode(lines[0]) if lines else {}
        if "hash_ids" in first:
            return _mooncake([msgspec.json.decode(line) for line in lines])
        if "requests" in first:
            return [s for number, line in enumerate(lines) for s in _agent(number, msgspec.json.decode(line))]
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError):
        raise NoTrace(f"{path.name} cannot be read as a trace.") from None
    raise NoTrace(f"{path.name} is of no known format: Mooncake, Azure 2023 or agent sessions.")


def thinned(
    sessions: Iterable[Session], load: float, seconds: float, prefill: float, decode: float, seed: int
) -> list[Session]:
    """Whole sessions, drawn until they are the ``load`` of what one slot can serve in ``seconds``."""
    drawn = list(sessions)
    random.Random(seed).shuffle(drawn)
    kept, work, misfits = [], 0.0, 0
    for session in drawn:
        takes = session.work(prefill, decode)
        if work + takes <= load * seconds:
            kept.append(session)
            work += takes
        else:
            misfits += 1
        if misfits == MISFITS:
            break
    return sorted(kept, key=lambda session: session.requests[0].at)


def spread(sessions: Iterable[Session], seconds: float, seed: int) -> list[Session]:
    """Sessions that have no common clock, begun evenly over the time; what would come later than that is left out."""
    chance, out = random.Random(seed), []
    for session in sessions:
        begin = chance.uniform(0, seconds)
        moved = [msgspec.structs.replace(asked, at=asked.at + begin) for asked in session.requests]
        inside = tuple(asked for asked in moved if asked.at < seconds)
        out += [Session(inside, session.kind)] if inside else []
    return out


def sided(sessions: Iterable[Session], share: float, seed: int) -> list[Session]:
    """A share of the requests brings a side request along, a title or tags: drawn by seed, for the side lane.

    It comes ``SIDE_S`` after the trace's time of the one it belongs to. Public traces have next to none of their own.
    """
    chance, out = random.Random(seed), list(sessions)
    for asked in [asked for session in out for asked in session.requests]:
        if chance.random() < share:
            prompt, written = chance.randint(*SIDE_PROMPT), chance.randint(*SIDE_TOKENS)
            out.append(Session((Asked(asked.at + SIDE_S, prompt, written, lane="raw"),)))
    return sorted(out, key=lambda session: session.requests[0].at)


def duration(sessions: Iterable[Session]) -> float:
    """Seconds to the last arrival."""
    return max((session.requests[-1].at for session in sessions), default=0.0)


def _text(path: Path) -> str:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, Path.open)
    with opener(path, "rb") as file:
        raw: bytes = file.read()
    return raw.decode()


def _azure(lines: list[str]) -> list[Session]:
    """Nothing says what belongs together: each request is a session."""
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    asked = [
        Asked(time - times[0], max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))
        for row, time in zip(rows, times, strict=True)
    ]
    return [Session((one,)) for one in asked]


def _mooncake(rows: list[dict[str, Any]]) -> list[Session]:
    """A request goes on a session when it shares a block with it beyond the first, which is everybody's."""
    of_block: dict[int, int] = {}
    sessions: list[list[Asked]] = []
    for row in rows:
        ids: list[int] = row["hash_ids"]
        known = next((i for i in range(len(ids) - 1, 0, -1) if ids[i] in of_block), 0)
        if known:
            session = of_block[ids[known]]
        else:
            session = len(sessions)
            sessions.append([])
        for id in ids[1:]:
            of_block.setdefault(id, session)
        prompt, each = max(1, row["input_length"]), HASHED // BLOCK
        whole = [(id, i * each, min((i + 1) * each, prompt // BLOCK)) for i, id in enumerate(ids)]
        blocks = tuple(block for block in whole if block[1] < block[2])
        shared = min((known + 1) * HASHED, prompt - 1) if known else 0
        asked = Asked(row["timestamp"] / 1_000, prompt, max(1, row["output_length"]), shared, blocks)
        sessions[session].append(asked)
    return [Session(tuple(session)) for session in sessions]


def _agent(number: int, row: dict[str, Any]) -> Iterator[Session]:
    """A session and those of its sub-agents, which run beside it. Its prompts are the last one's, gone on."""
    lists = [(0.0, [one for one in row["requests"] if "in" in one])]
    lists += [(one["t"], one["sub"]) for one in row["requests"] if "sub" in one]
    for part, (begin, requests) in enumerate(lists):
        out: list[Asked] = []
        held: tuple[tuple[int, int, int], ...] = ()
        for turn, one in enumerate(requests):
            prompt = max(1, one["in"])
            origin = (number << 20 | part << 12 | turn) & 0xFFFFFFFF
            shared = min(one["shared"], prompt - 1, (held[-1][2] if held else 0) * BLOCK) // BLOCK
            held = tuple((o, first, min(stop, shared)) for o, first, stop in held if first < shared)
            if prompt // BLOCK > shared:
                held = (*held, (origin, shared, prompt // BLOCK))
            think = (one["think"] or 0.0) if turn else -1.0
            out.append(Asked(begin + one["t"], prompt, max(1, one["out"]), shared * BLOCK, held, think))
        if out:
            yield Session(tuple(out), "thinking")
