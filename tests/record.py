"""Record the fixture traces again: real servers, the real engine, one scene a trace.

    python -m tests.record NAME [FOLDER]      # NAME: a scene, or all; FOLDER: fixtures/traces

Each scene drives the server into its rows; together they hit every row of the three tables (tests/test_replay.py).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.server import ROOT, Server, until

LONG = "Tell me everything you know about rivers. " * 12
COUNTING = ", ".join(str(number) for number in range(1, 60)) + ","
Scene = Callable[[Server], None]
SCENES: dict[str, tuple[tuple[str, ...], Scene]] = {}


def scene(*flags: str) -> Callable[[Scene], Scene]:
    """Register a scene with the server's flags."""

    def register(play: Scene) -> Scene:
        SCENES[play.__name__] = (flags, play)
        return play

    return register


class Background:
    """A request in a thread: ``response`` is there when it ended."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server, fields), daemon=True)
        self._thread.start()

    def _run(self, server: Server, fields: dict[str, Any]) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self.response = server.chat(**fields)

    def join(self) -> httpx.Response | None:
        """Wait for it."""
        self._thread.join(120)
        return self.response


@contextlib.contextmanager
def held(server: Server, **fields: Any) -> Iterator[httpx.Response]:
    """A stream that holds the slot: counting greedily, the embedded model does not stop by itself."""
    body = {"prompt": COUNTING, "temperature": 0, "stream": True, "max_tokens": 6_000, **fields}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        server.request_in("decoding")
        yield response


def heads_only(server: Server, length: int = 200) -> socket.socket:
    """A connection that sent its headers and no body: the request has arrived and is no further."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {length}\r\n\r\n".encode()
    )
    return connection


def sent(server: Server, body: dict[str, Any], route: str = "/v1/chat/completions") -> socket.socket:
    """A connection that sent a whole request; closing it hangs up."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return connection


def asked(text: str, **fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def rows(server: Server) -> list[str]:
    """Every row in the histories the server still shows."""
    state = server.state()
    records = [*state["requests"], *state["recent"], state["engine"]]
    return [row for record in records for _, row in record["history"]]


def seen(server: Server, row: str) -> None:
    """Wait until a row has fired."""
    until(lambda: row in rows(server))


def leave_in(server: Server, state: str, body: dict[str, Any]) -> None:
    """A client that hangs up when its request is in that state."""
    before = [entry["id"] for entry in server.state()["recent"]]
    connection = sent(server, body)
    until(lambda: [r for r in server.state()["requests"] if r["state"] == state])
    connection.close()
    until(lambda: [e for e in server.state()["recent"] if e["id"] not in before and e["outcome"] == "abandoned"])


# -- the scenes --------------------------------------------------------------------------------------------------------


@scene("--strict-model")
def chat(server: Server) -> None:
    """Answers of every kind, and every refusal of a body."""
    model = server.ready().state()["engine"]["model"]
    server.chat("What is the capital of France? Answer in one sentence.", model=model)
    with server.streamed("Say hello.", model=model, temperature=0) as response:
        response.read()
    server.http.post("/v1/completions", json={"model": model, "prompt": "Once upon a time", "max_tokens": 5})
    server.chat("Count: one two three four", model=model, max_tokens=40, stop=["e"], temperature=0)
    server.chat("What is 1+1? Answer with one word.", model=model, max_tokens=200, temperature=0)
    server.http.post("/v1/chat/completions", content=b"{nonsense")
    server.chat(model=model, messages=[])
    server.chat(model=model, functions=[{"name": "f"}])
    server.chat(model="another-model")
    server.http.post("/v1/completions", json={"model": model, "prompt": [999_999_999]})
    server.chat("word " * 9_000, model=model)
    server.idle()


@scene("--max-queue", "1", "--line-every-s", "0.5", "--queue-timeout", "3")
def queue(server: Server) -> None:
    """Waiting, waiting lines, a full queue at both places, a time-out, a leaver."""
    server.ready()
    with held(server):
        with server.streamed("Second") as waiting:
            lines = waiting.iter_lines()  # held: a dropped iterator closes its response
            next(lines)
            seen(server, "waiting_line")
            server.chat("Third")
        until(lambda: not server.state()["queue"])
        whole = Background(server, text="Fourth")
        server.request_in("queued")
        whole.join()
    server.idle()


@scene("--max-queue", "1")
def queue_filled(server: Server) -> None:
    """A request whose body comes late finds that the queue filled meanwhile."""
    server.ready()
    body = b'{"messages":[{"role":"user","content":"Late"}]}'
    with held(server):
        late = heads_only(server, len(body))
        server.request_in("received")
        second = Background(server, text="Second")
        server.request_in("queued")
        late.sendall(body)
        seen(server, "queue_filled")
        late.close()
    second.join()
    server.idle()


@scene("--max-live", "1", "--request-timeout", "2")
def limits(server: Server) -> None:
    """Too many before the queue; a run that is out of time."""
    server.ready()
    first = heads_only(server)
    server.request_in("received")
    server.chat("Second")
    first.close()
    server.idle()
    server.chat(LONG, max_tokens=4_000)
    with server.streamed(LONG, max_tokens=4_000) as response:
        response.read()
    server.idle()


@scene("--bodies-mb", "2")
def bodies(server: Server) -> None:
    """A body that nobody declared grows over what may be in flight."""
    server.ready()

    def parts() -> Iterator[bytes]:
        for _ in range(64):
            yield b"x" * 65_536

    server.http.post("/v1/chat/completions", content=parts())
    server.idle()


@scene("--safe-rows", "64")
def leavers(server: Server) -> None:
    """Clients leave before their body came, in admission, in prefill, in decode and in the queue."""
    server.ready()
    before = heads_only(server)
    server.request_in("received")
    before.close()
    server.idle()
    server.kill_engine(signal.SIGSTOP)
    leave_in(server, "admitted", asked("Hi"))
    server.kill_engine(signal.SIGCONT)
    server.idle()
    leave_in(server, "prefilling", asked(LONG * 40))
    leave_in(server, "decoding", asked(LONG, max_tokens=4_000))
    with held(server):
        leave_in(server, "queued", asked("Hi"))
    server.idle()


@scene("--quiet-s", "1.5", "--give-up-s", "2.5", "--line-every-s", "0.5")
def silent(server: Server) -> None:
    """The engine falls silent, is heard again, falls silent for good and starts again."""
    server.ready()
    with held(server) as stream:
        with server.streamed("Second") as waiting:
            server.kill_engine(signal.SIGSTOP)
            seen(server, "waits_silently")
            server.kill_engine(signal.SIGCONT)
            seen(server, "heard_again")
            server.kill_engine(signal.SIGSTOP)
            seen(server, "given_up")
            waiting.read()
        stream.read()
    server.idle()


@scene("--line-every-s", "0.5")
def crash(server: Server) -> None:
    """The engine is killed with one request running and one waiting, then with one admitted."""
    server.ready()
    with held(server) as stream, server.streamed("Second") as waiting:
        server.kill_engine()
        stream.read()
        waiting.read()
    server.ready()
    server.kill_engine(signal.SIGSTOP)
    again = Background(server, text="Third")
    server.request_in("admitted")
    server.kill_engine()
    again.join()
    server.idle()


@scene("--failpoints", "die_at_load=1", "--retry-failed-s", "10")
def crash_loop(server: Server) -> None:
    """Three failed starts: the queue ends, new ones are refused, one tries again."""
    server.chat("First")
    until(lambda: server.state()["engine"]["state"] == "failed")
    server.chat("Too soon")
    time.sleep(10.2)
    server.chat("Tries again")
    until(lambda: server.state()["engine"]["state"] == "failed")


@scene("--failpoints", "fault_at_token=3,decline_start=2")
def faults(server: Server) -> None:
    """A fault in a run, and a start the engine declines."""
    server.ready()
    server.chat("First")
    server.chat("Second")
    server.chat("Third")
    server.idle()


@scene("--drain-timeout", "2")
def drain(server: Server) -> None:
    """Stopped with one running and one waiting: a new one is refused, and the time runs out."""
    server.ready()
    with held(server) as stream:
        waiting = Background(server, text="Second")
        server.request_in("queued")
        server.signal()
        until(lambda: server.http.get("/health").json()["status"] == "draining")
        server.chat("Too late")
        stream.read()
        waiting.join()
    server.wait()


@scene("--safe-rows", "64", "--prefill-heartbeat-s", "0.2")
def prefill(server: Server) -> None:
    """A long prompt says how far it is."""
    server.ready()
    with server.streamed(LONG * 40) as response:
        response.read()
    server.idle()


@scene("--chat-template", "fixtures/templates/thinking.jinja")
def contract(server: Server) -> None:
    """Thinking that is closed, a forced call, several choices, a list of prompts, a schema that is not served."""
    server.ready()
    server.chat("What is 12 times 12?", max_tokens=24, max_reasoning_tokens=8, ignore_eos=True)
    properties = {"city": {"type": "string", "maxLength": 12}}
    parameters = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    server.chat("Hello!", tools=[tool], tool_choice="required", reasoning_effort="none", max_tokens=64, seed=1)
    server.chat("Name a color.", n=2, max_tokens=6, seed=1)
    server.http.post("/v1/completions", json={"prompt": ["1, 2, 3,", "The sky is"], "max_tokens": 4})
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "pattern": "("}}}
    server.chat("Hello!", response_format=form)
    server.idle()


@scene(
    "--script", "fixtures/scripts/memory.json", "--parallel", "2", "--max-len", "1024", "--side-max-len", "1024",
    "--parallel-floor-gb", "0",
)  # fmt: skip
def memory(server: Server) -> None:
    """The gate: fits, gives back, collects, fits in the reserve, waits for memory, is refused, can never fit."""

    def ask(rows: int) -> int:
        return server.http.post("/v1/completions", json={"prompt": [9] * rows}).status_code

    assert ask(200) == 400  # the engine is still starting
    for rows in (8, 20, 40, 200):
        ask(rows)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, 8)
        server.request_in("decoding")
        assert pool.submit(ask, 50).result() == 503 and first.result() == 200
    server.idle()


@scene("--parallel", "2", "--prefix-chunk", "128", "--side-slot0-wait", "0.5",
       "--parallel-floor-gb", "0", "--park-gb", "1")  # fmt: skip
def side_slots(server: Server) -> None:
    """Which slot and why: slot 0, a side slot, one that gave slot 0 up, a short guest of what slot 0 holds.

    What the short ones left in the side slot is lost, what the long one left is parked.
    """
    server.ready()
    said = asked(LONG * 4)["messages"]
    answer = server.chat(messages=said, max_tokens=8, temperature=0).json()["choices"][0]["message"]["content"]
    server.chat("What is 1+1?", max_tokens=4)
    with held(server):
        server.chat("Beside it", max_tokens=4)
        more = [*said, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        server.chat(messages=more, max_tokens=4)
    server.idle()


@scene("--script", "fixtures/scripts/slots.json", "--parallel", "2",
       "--parallel-floor-gb", "1000")  # fmt: skip
def slots(server: Server) -> None:
    """Waits for the engine, for its own work, for memory beside one that runs."""
    first = Background(server)
    server.ready()
    server.request_in("decoding")
    server.chat("Second")
    first.join()
    server.idle()


TITLE = "### Task:\nGenerate a concise, 3-5 word title for the chat history.\n"
"""What Open WebUI asks beside a chat."""


@scene("--script", "fixtures/scripts/lane.json", "--failpoints", "decline_guest=2",
       "--side-lane", "on", "--side-lane-side-tokens", "8")  # fmt: skip
def lane(server: Server) -> None:
    """Guests inside one long answer: at their limit, stopped, with a call, declined, outgrown, left by the holder."""
    server.ready()
    tool = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
    with held(server):
        server.chat("First", max_tokens=5)
        server.chat("Second", max_tokens=30)
        server.chat("Third", max_tokens=60, tools=[tool])
        title = Background(server, text=TITLE)
        seen(server, "outgrown")
        last = Background(server, text="Last", max_tokens=60)
        server.request_in("guest")
    last.join()
    title.join()
    server.idle()


@scene("--quiet-s", "1", "--give-up-s", "30", "--keepalive-chunk-s", "0.3", "--early-headers-s", "0.3")
def signs(server: Server) -> None:
    """Signs of life of a stream and of a whole answer, and none while the engine stands still."""
    server.ready()
    server.chat(LONG, max_tokens=400, ignore_eos=True)
    with held(server) as stream:
        server.kill_engine(signal.SIGSTOP)
        seen(server, "not_due")
        server.kill_engine(signal.SIGCONT)
        stream.close()
    server.idle()


def record(name: str, folder: Path) -> Path:
    """Play one scene and keep its trace as ``folder/NAME.jsonl``."""
    flags, play = SCENES[name]
    with tempfile.TemporaryDirectory() as scratch:
        note = ("--trace-note", f"python -m tests.record {name}")
        with Server("--trace", scratch, *note, *flags) as server:
            play(server)
            if server.process.poll() is None:
                server.signal()
            server.wait()
        [trace] = Path(scratch).glob("*.jsonl")
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{name}.jsonl"
        shutil.copyfile(trace, target)
        return target


def main() -> None:
    """The command line."""
    name, folder = sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "fixtures" / "traces"
    for each in SCENES if name == "all" else [name]:
        print(f"{each} …", flush=True)
        print(f"  {record(each, folder)}", flush=True)


if __name__ == "__main__":
    main()
