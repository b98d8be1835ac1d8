"""Public traces as arrivals: their three forms, sessions, and what is drawn from them."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.arrivals import Asked, NoTrace, Session, duration, read, spread, thinned
from tests.captures import needed


def test_mooncake(tmp_path: Path) -> None:
    """R7: times in seconds; who shares a block beyond the first goes on that session, and reads what is new."""
    rows = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 700, "output_length": 6, "hash_ids": [0, 3]},
        {"timestamp": 9_000, "input_length": 2_000, "output_length": 7, "hash_ids": [0, 1, 4, 5]},
    ]
    path = tmp_path / "m.jsonl.xz"
    path.write_bytes(lzma.compress(b"\n".join(map(msgspec.json.encode, rows))))
    first, second = read(path)
    assert [(a.at, a.prompt, a.written, a.shared) for a in first.requests] == [(0, 1_100, 5, 0), (9, 2_000, 7, 1_024)]
    assert [(a.at, a.prompt) for a in second.requests] == [(0.5, 700)]
    old, new = first.requests[0].hashes(), first.requests[1].hashes()
    assert (len(old), len(new)) == (1_100 // 64, 2_000 // 64)
    assert old[:16] == new[:16]
    assert old[16] != new[16]


def test_azure(tmp_path: Path) -> None:
    """R7: each request stands alone; nothing is shared."""
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n"
    )
    first, second = read(path)
    assert first.requests == (Asked(0.0, 374, 44),)
    assert second.requests[0].at == pytest.approx(4.314579)
    assert second.requests[0].written == 1  # nobody writes nothing


def test_agents(tmp_path: Path) -> None:
    """R7: turns wait for the last one's answer and share its prompt; a sub-agent's are a session beside it."""
    turn = {"t": 0.0, "in": 640, "out": 9, "shared": 0, "think": 0.0}
    later = {"t": 30.0, "in": 1_000, "out": 8, "shared": 630, "think": 4.0}
    nested = {"t": 12.0, "type": "subagent", "sub": [{**turn, "t": 1.0, "in": 200}]}
    path = tmp_path / "g.jsonl.gz"
    path.write_bytes(gzip.compress(msgspec.json.encode({"id": "x", "requests": [turn, nested, later]})))
    main, sub = read(path)
    assert main.kind == sub.kind == "thinking"
    assert [(a.prompt, a.shared, a.think) for a in main.requests] == [(640, 0, -1), (1_000, 576, 4)]
    assert [(a.at, a.prompt, a.think) for a in sub.requests] == [(13, 200, -1)]
    old, new = (a.hashes() for a in main.requests)
    assert (len(old), len(new)) == (10, 15)
    assert old[:9] == new[:9]
    assert old[9] != new[9]


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"requests": 5}', "TIMESTAMP,x\n1,2"])
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    """R7: a file of another form is a sentence that names it."""
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(NoTrace, match=r"x\.jsonl"):
        read(path)


sessions = st.lists(
    st.builds(
        Session,
        st.lists(st.builds(Asked, st.floats(0, 50), st.integers(1, 900), st.integers(1, 90)), min_size=1).map(
            lambda many: tuple(sorted(many, key=lambda one: one.at))
        ),
    ),
    max_size=30,
)


@given(sessions, st.floats(0.1, 2), st.integers(0, 9))
def test_thinning(all_of_them: list[Session], load: float, seed: int) -> None:
    """R7: whole sessions, by seed, at most the load of one slot, in order of arrival."""
    kept = thinned(all_of_them, load, 60.0, 100.0, 10.0, seed)
    assert kept == thinned(all_of_them, load, 60.0, 100.0, 10.0, seed)
    assert sum(session.work(100.0, 10.0) for session in kept) <= load * 60 + 1e-6
    assert all(session in all_of_them for session in kept)
    begins = [session.requests[0].at for session in kept]
    assert begins == sorted(begins)


@given(sessions, st.integers(0, 9))
def test_spreading(all_of_them: list[Session], seed: int) -> None:
    """R7: sessions without a common clock begin inside the time, and what would come later is left out."""
    out = spread(all_of_them, 60.0, seed)
    assert out == spread(all_of_them, 60.0, seed)
    assert duration(out) < 60
    assert len(out) <= len(all_of_them)


def test_the_public_traces() -> None:
    """R7: the three public traces are read whole."""
    counts = []
    for name in ("mooncake_conversation.jsonl.xz", "azure_2023_conversation.csv.xz", "agent_sessions.jsonl.gz"):
        found = read(needed(f"traces/{name}"))
        counts.append(sum(len(session.requests) for session in found))
        assert all(0 <= asked.shared < asked.prompt for session in found for asked in session.requests)
        assert all(asked.at >= 0 and asked.think >= -1 for session in found for asked in session.requests)
    assert counts[:2] == [12_031, 19_366]
    assert counts[2] > 45_000
