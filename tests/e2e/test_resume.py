"""What a prompt shares with an earlier one is not read again: the slot, the park, files, and a prefill that was cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.record import LONG, asked, sent
from tests.server import Server, until

pytestmark = pytest.mark.e2e
STEP = 64
"""Rows of a prefill step, and of the grid."""
FLAGS = ("--safe-rows", str(STEP), "--prefix-chunk", str(STEP))
FOXES = LONG.replace("rivers", "foxes")


@pytest.fixture(scope="module")
def resuming() -> Iterator[Server]:
    with Server(*FLAGS) as server:
        yield server.ready()


def say(server: Server, *texts: str, **fields: Any) -> dict[str, Any]:
    """A whole answer to a chat in which user and assistant speak in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"messages": turns, "max_tokens": 24, "temperature": 0, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    usage, timings = answer["usage"], answer["timings"]
    assert timings["cache_n"] == cached(answer)
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    return answer


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def reached(server: Server, rows: int) -> int:
    """How many of ``rows`` resident rows may be gone on from: all, or whole steps where a row's bits hang on its."""
    engine = server.health()["engine"]
    return rows if engine["alike"] >= STEP else rows - rows % STEP


def test_the_next_turn_reaches_the_stop(resuming: Server) -> None:
    """G5, F3: after a stop string found in the text, the next turn's cached_tokens reaches what was sent."""
    tokens = say(resuming, LONG, logprobs=True)["choices"][0]["logprobs"]["content"]
    written = [token["token"] for token in tokens]
    at = next(i for i in range(6, len(written)) if written[i] not in "".join(written[:i]))
    first = say(resuming, LONG, stop=[written[at]])
    assert texts(first) == ["".join(written[:at])] and first["choices"][0]["finish_reason"] == "stop"
    second = say(resuming, LONG, texts(first)[0], "Go on.")
    assert cached(second) == reached(resuming, first["usage"]["prompt_tokens"] + at)
    slots = resuming.idle()["cache"]["slots"]
    assert slots[0]["rows"] >= second["usage"]["prompt_tokens"]
    assert any(" from=slot" in line for line in resuming.log)


def test_choices_from_resident_rows(resuming: Server) -> None:
    """F8, F11: choices of a prompt that is resident are those of one that is read anew, and count it once."""
    fields = {"n": 2, "seed": 11, "temperature": 0.9, "max_tokens": 12}
    fresh = say(resuming, FOXES, **fields)
    again = say(resuming, FOXES, **fields)
    assert texts(fresh) == texts(again)
    assert again["usage"]["prompt_tokens"] == fresh["usage"]["prompt_tokens"]
    assert cached(again) > 0
    say(resuming, "Something else altogether.", max_tokens=1)


def test_two_conversations_take_turns(resuming: Server) -> None:
    """G2: a conversation that another one pushed out of the slot is put back from the park, with the same answer."""
    first = say(resuming, f"One. {LONG * 3}")
    say(resuming, f"Two. {LONG * 3}")
    parked = resuming.idle()["cache"]["park"]
    assert parked["entries"] > 0 and parked["bytes"] > 0
    again = say(resuming, f"One. {LONG * 3}")
    assert texts(first) == texts(again)
    assert cached(again) >= first["usage"]["prompt_tokens"] - 2 * STEP
    assert any(" from=park" in line for line in resuming.log)
    assert resuming.state()["recent"][0]["shared_rows"] >= cached(again) - 2 * STEP


def test_a_retry_goes_on_where_its_prefill_was_cut() -> None:
    """G2: rows read for a client that left in its prefill stay; its retry begins there and answers as one unresumed."""
    with Server(*FLAGS) as server:
        server.ready()
        connection = sent(server, asked(LONG * 20))
        until(lambda: [r for r in server.state()["requests"] if r["done"] >= 2 * STEP])
        connection.close()
        left = server.idle()["recent"][0]
        kept = server.state()["cache"]["slots"][0]["rows"]
        retry = say(server, LONG * 20, max_tokens=8)
        assert left["outcome"] == "abandoned"
        assert 2 * STEP <= left["done"] <= kept < left["total"]
        assert cached(retry) == kept
    with Server(*FLAGS) as server:
        fresh = say(server.ready(), LONG * 20, max_tokens=8)
        assert cached(fresh) == 0
        assert texts(fresh) == texts(retry)


def test_a_prefix_outlives_the_server(tmp_path: Path) -> None:
    """G2, R5: with --disk-cache-gb a prompt's prefix is read from a file after a restart; files are the owner's."""
    flags = (*FLAGS, "--disk-cache-gb", "1", "--data-dir", str(tmp_path))
    prompt = LONG * 6
    with Server(*flags) as server:
        fresh = say(server.ready(), prompt)
        until(lambda: server.state()["cache"]["disk"]["entries"] and not server.state()["engine"]["own_work"])
        server.signal()
        assert server.wait() == 0
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"rivers" not in path.read_bytes()
    with Server(*flags) as server:
        say(server.ready(), "Hi.", max_tokens=1)
        assert server.idle()["cache"]["disk"]["entries"] > 0
        again = say(server, prompt)
        request = server.idle()["recent"][0]
        assert (request["source"], request["shared_rows"] > 0) == ("disk", True)
    assert cached(again) >= fresh["usage"]["prompt_tokens"] - 2 * STEP
    assert texts(again) == texts(fresh)
