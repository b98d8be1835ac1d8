"""Clients that leave, do not read, or come when it is full; engines that die; servers that stop."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model
from pipeline.replay import replay
from tests.record import LONG, Background, asked, heads_only, held, leave_in, record, sent
from tests.server import Server, until

pytestmark = pytest.mark.e2e


def last(server: Server) -> dict[str, object]:
    """The request that ended last."""
    entry: dict[str, object] = server.idle()["recent"][0]
    return entry


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["decoding", "queued"])
def test_leaves(served: Server, state: str, stream: bool) -> None:
    """G1, F6: in decode and in the queue, streamed and whole: abandoned, never an error, the engine free at once."""
    errors = served.health()["inflight"]["errors"]
    body = asked(LONG, max_tokens=4_000, stream=stream)
    if state == "queued":
        with held(served):
            leave_in(served, state, body)
            history = served.state()["recent"][0]["history"]
            assert [row for _, row in history][-3:] == ["queued", "must_wait", "hung_up"]
    else:
        leave_in(served, state, body)
    assert served.idle()["recent"][0]["outcome"] == "abandoned"
    assert served.health()["inflight"]["errors"] == errors


def test_leaves_before_its_body_came(served: Server) -> None:
    """G1: a client that leaves before its body came whole."""
    early = heads_only(served)
    served.request_in("received")
    early.close()
    assert last(served)["row"] == "hung_up"


def test_leaves_during_prefill() -> None:
    """G1: the engine is free within one safe step."""
    with Server("--safe-rows", "64") as server:
        server.ready()
        leave_in(server, "prefilling", asked(LONG * 40))
        entry = last(server)
        assert entry["outcome"] == "abandoned"
        assert 0 <= int(str(entry["done"])) < int(str(entry["total"]))


def test_a_killed_engine_mid_stream() -> None:
    """I11: the stream ends with error and the object, what waits is served by the next engine."""
    with Server() as server:
        server.ready()
        with held(server) as stream:
            waiting = Background(server, text="Say hi.")
            server.request_in("queued")
            server.kill_engine()
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        end = json.loads(events[-2])
        assert end["choices"][0]["finish_reason"] == "error"
        assert end["error"]["code"] == "engine_restarting"
        response = waiting.join()
        assert response is not None
        assert response.status_code == 200
        assert server.ready().state()["engine"]["epoch"] == 2


def test_a_crash_loop() -> None:
    """I11: three failed starts are `failed`; requests are refused with 503, the server stays up and says so."""
    with Server("--failpoints", "die_at_load=1") as server:
        until(lambda: server.state()["engine"]["state"] == "failed")
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        response = server.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_restarting"
        assert 1 <= int(response.headers["retry-after"]) <= 60


def test_loading_is_told() -> None:
    """I10: HTTP answers before the model is loaded; a stream waits and is told."""
    with Server("--line-every-s", "0.3", "--failpoints", "stall_load=1") as server:
        assert server.http.get("/health").status_code == 503
        with server.streamed() as stream:
            assert next(stream.iter_lines()).startswith(": waiting, position 1, the model is loading")


def test_a_silent_engine_is_noticed() -> None:
    """L9, I3: a stopped engine turns health red, and the request's own time ends it."""
    with Server("--quiet-s", "3", "--give-up-s", "100", "--request-timeout", "15") as server:
        server.ready()
        with held(server) as stream:
            server.kill_engine(signal.SIGSTOP)
            until(lambda: server.http.get("/health").status_code == 503)
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "timeout"
        assert json.loads(events[-2])["error"]["code"] == "request_timeout"


def test_a_full_queue_and_a_timeout() -> None:
    """I1, I2: 503 with Retry-After at once when full; 429 after --queue-timeout."""
    with Server("--max-queue", "1", "--queue-timeout", "2") as server:
        server.ready()
        with held(server):
            waiting = Background(server, text="Second")
            server.request_in("queued")
            full = server.chat("Third")
            assert (full.status_code, full.headers["retry-after"]) == (503, "5")
            assert full.json()["error"]["code"] == "queue_full"
            late = waiting.join()
            assert late is not None
            assert (late.status_code, late.headers["retry-after"]) == (429, "10")


def test_waiting_lines() -> None:
    """L1, F10: a waiting stream opens with its position and time so far; comments disturb no client."""
    with Server("--line-every-s", "1") as server:
        server.ready()
        with held(server) as first, server.streamed("Second", max_tokens=4) as waiting:
            lines = waiting.iter_lines()
            assert next(lines) == ": waiting, position 1, 1 s so far"
            first.close()
            rest = list(lines)
            assert rest[-2] == "data: [DONE]"


def test_drain() -> None:
    """I5: on SIGTERM those inside finish, new ones are refused, the exit status is 0."""
    with Server() as server:
        server.ready()
        inside = Background(server, text="Tell me about rivers.", max_tokens=60)
        server.request_in("decoding")
        server.signal()
        until(lambda: server.http.get("/health").json()["status"] == "draining")
        refused = server.chat("Late")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        response = inside.join()
        assert response is not None
        assert response.status_code == 200
        assert server.wait() == 0


def test_a_key_and_a_foreign_page() -> None:
    """P4, P5: with a key /v1 needs it; a foreign Origin or Host is a 403."""
    with Server("--api-key", "sesame") as server:
        server.ready()
        assert server.chat().status_code == 401
        server.http.headers["authorization"] = "Bearer sesame"
        assert server.chat(max_tokens=2).status_code == 200
        assert server.http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
        assert server.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_a_client_that_does_not_read(tmp_path: Path) -> None:
    """G4: the engine never waits for a client that does not read, and its answer costs a bounded amount."""
    script = tmp_path / "script.json"
    ids = [1_000] * 8_000
    script.write_text(json.dumps({"answers": [{"ids": ids, "decode_ms": 0, "round": 64, "then": "length"}]}))
    with Server("--script", str(script), "--max-len", "8192") as server:
        server.ready()
        before = psutil.Process(server.process.pid).memory_info().rss
        connection = sent(server, {"prompt": "x", "stream": True, "max_tokens": 8_000}, "/v1/completions")
        server.idle()
        grown = psutil.Process(server.process.pid).memory_info().rss - before
        assert grown < 32 << 20
        connection.close()


def test_an_emoji_answer_cut_at_every_length(tmp_path: Path) -> None:
    """F2: every character sent is final: no replacement character at any cut, the text a prefix of the whole."""
    from tokenizers import Tokenizer

    from stages.prompt import Renderer

    path = embedded_model()
    assert path is not None
    checkpoint = open_checkpoint(path)
    text = "Sure! 🦊🌊🚀 — 漢字 and 👩‍👩‍👧 or 🇫🇷, naïve 🫠🪿. Done 🎉🎉"
    ids = Tokenizer.from_str(checkpoint.tokenizer_json).encode(text, add_special_tokens=False).ids
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": [{"ids": ids, "decode_ms": 0, "then": "stop"}]}))
    with Server("--script", str(script)) as server:
        server.ready()
        pieces = Renderer(described(checkpoint)).pieces
        inside = 0
        for length in range(1, len(ids) + 1):
            raw = b"".join(pieces[i] for i in ids[:length])
            whole = server.chat(max_tokens=length).json()["choices"][0]["message"]["content"] or ""
            with server.streamed(max_tokens=length) as stream:
                events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
            streamed = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
            assert whole == streamed == raw.decode("utf-8", "ignore")
            assert "�" not in whole
            assert text.startswith(whole)
            inside += raw.decode("utf-8", "ignore").encode() != raw
        assert inside >= 5


def described(checkpoint):  # type: ignore[no-untyped-def]
    """What the engine would say of a checkpoint."""
    from engine.pieces import vocabulary
    from engine.protocol import Described

    return Described(
        epoch=1, model=checkpoint.name, architecture=checkpoint.architecture, engine="torch",
        tokenizer=checkpoint.tokenizer_json, template=checkpoint.template, special=checkpoint.special,
        end_ids=checkpoint.end_ids, add_bos=checkpoint.add_bos, bos_id=checkpoint.bos_id, window=8192,
        vocab=checkpoint.config.vocab,
        pieces=vocabulary(checkpoint.tokenizer_json, checkpoint.config.vocab).pieces,
    )  # fmt: skip


def test_fifty_leavers_then_one(served: Server) -> None:
    """G1: fifty random closes, then one plain request is answered."""
    for number in range(50):
        connection = sent(served, asked("Hi", stream=number % 2 == 0)) if number % 3 else heads_only(served)
        time.sleep(0.005 * (number % 7))
        connection.close()
    served.idle()
    assert served.chat("Say hi.").status_code == 200


def test_another_host_needs_a_key() -> None:
    """P4: beyond loopback without a key the server does not start, and says what to do."""
    with pytest.raises(RuntimeError, match="--api-key"), Server("--host", "0.0.0.0"):
        pass


@pytest.mark.parametrize("flags", [("--max-len", "999999"), ("--safe-rows", "3")])
def test_settings_the_engine_cannot_serve(flags: tuple[str, ...]) -> None:
    """I6, I4: what cannot be served is a sentence at the start and the server's end, never a loop of starts."""
    with Server(*flags) as server:
        assert server.wait() == 1
        assert any(flags[0] in line for line in server.log)


def test_a_trace_at_full_and_at_facts(tmp_path: Path) -> None:
    """R5, P1: facts hold no text; full holds bodies and tokens; both are for the owner's eyes only."""
    for level in ("facts", "full"):
        with Server("--trace", str(tmp_path / level), "--trace-level", level) as server:
            server.ready().chat("Say xylophone.")
            server.signal()
            assert server.wait() == 0
        [path] = (tmp_path / level).glob("*.jsonl")
        assert path.stat().st_mode & 0o777 == 0o600
        assert ("xylophone" in path.read_text()) == (level == "full")
        assert ('"ids"' in path.read_text()) == (level == "full")
        assert replay(path).difference is None


def test_three_scenes_recorded_anew(tmp_path: Path) -> None:
    """R6: three of the fixture traces are recorded again by this run, and replay."""
    for name in ("chat", "crash", "queue_filled"):
        report = replay(record(name, tmp_path))
        assert report.difference is None, str(report.difference)
        assert report.recorded > 10
