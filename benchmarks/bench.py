"""What the measurements of speed share: servers to ask, a streamed answer with its times, marks and how they are told.

Every side of a comparison is measured once a round, one after the other, so that a busy machine slows them alike.
Ratios are taken within a round and judged by their median.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import httpx
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from engine.native import build
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model
from pipeline.http.shapes import public_id
from tests.server import Server, until

T = TypeVar("T")

TEXT = (Path(__file__).resolve().parent.parent / "fixtures" / "texts" / "accuracy.txt").read_text()
COUNTING = ", ".join(str(number) for number in range(1, 40)) + ","
"""Read greedily the embedded model counts on and never stops by itself."""
PLAIN = ("--speculate", "off")
"""Flags of a server whose rounds are one row each."""
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Setting:
    """What a measurement runs with. ``flags``: more for every server of ours."""

    model: str
    threads: int
    rounds: int
    console: Console
    flags: tuple[str, ...] = ()
    peer: str = ""
    """A Python with llama-cpp-python's server; without one there is no peer."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The served model's."""
        return Tokenizer.from_str(open_checkpoint(Path(self.model)).tokenizer_json)

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(text, markup=False, highlight=False)


def options(command: Callable[..., None], rounds: int = 5) -> Callable[..., None]:
    """``--rounds``, ``--threads``, ``--model`` and ``--peer-python`` of a command that takes a ``Setting`` first."""
    usual = rounds

    @click.pass_context
    def run(context: click.Context, /, rounds: int, threads: int, model: str, peer_python: str, **rest: Any) -> None:
        path = model or str(embedded_model() or "")
        if not path:
            raise click.UsageError("the embedded model is not installed: --model FILE")
        count = threads or len(os.sched_getaffinity(0))
        setting = Setting(path, count, rounds, Console(width=118), peer=peer_python)
        setting.say(machine(count))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are stopped then too
        context.invoke(command, setting, **rest)

    run.__doc__ = command.__doc__
    run.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option("--peer-python", default="", help="A Python that has llama-cpp-python[server]; default: no peer."),
        click.option("--model", default="", help="GGUF file or folder; default: the embedded model."),
        click.option("--threads", default=0, show_default=True, help="0: all cores."),
        click.option("--rounds", default=usual, show_default=True),
    ):
        run = option(run)
    return run


def machine(threads: int) -> str:
    """What this runs on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    torch = version("torch")
    return (
        f"{name}, {os.cpu_count()} cores, {build.flags() or 'no AVX2'}, {threads} threads; torch {torch}, Python "
        f"{platform.python_version()}; load {os.getloadavg()[0]:.1f}"
    )


# -- servers ---------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A server: its address and its process."""

    url: str
    pid: int

    def processor_s(self) -> float:
        """Processor seconds that it and its children have used, whatever else the machine does."""
        ours = psutil.Process(self.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (ours, *ours.children(recursive=True)))

    def health(self) -> dict[str, Any]:
        """What ``/health`` says."""
        body: dict[str, Any] = httpx.get(f"{self.url}/health").json()
        return body

    def recent(self) -> dict[str, dict[str, Any]]:
        """What the Dev view says of the last ended requests, by the ids their clients know."""
        state = httpx.get(f"{self.url}/dev/state").json()
        return {public_id(one["route"], one["name"]): one for one in state["recent"]}


@contextlib.contextmanager
def serving(setting: Setting, *flags: str, native: bool = True) -> Iterator[Place]:
    """Our server on the setting's model and threads, loaded; it says what path it computes by."""
    env = {"TANDEM_SAFE_ROWS": "0", **({} if native else {"TANDEM_NATIVE": "off"})}
    every = ("--model", setting.model, "--threads", str(setting.threads), *setting.flags, *flags)
    with Server(*every, env=env) as server:
        engine = server.ready().health()["engine"]
        path, rows = engine.get("path") or "unknown", engine["safe_rows"]
        setting.say(f"ours {' '.join(flags) or 'as started'}: path {path}, prefill steps of up to {rows} rows")
        yield Place(server.url, server.process.pid)


@contextlib.contextmanager
def peer_server(setting: Setting, window: int = 2048) -> Iterator[Place]:
    """llama-cpp-python's server on the same file and threads. A new request does not cut the one it is at."""
    python = shutil.which(setting.peer)
    if python is None or not setting.model.endswith(".gguf"):
        raise SystemExit("the peer needs an interpreter with llama-cpp-python[server] and a GGUF file")
    asked = [python, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(setting.threads)
    process = subprocess.Popen(
        [python, "-m", "llama_cpp.server", "--model", setting.model, "--n_threads", threads,
         "--n_threads_batch", threads, "--n_ctx", str(window), "--port", str(port), "--verbose", "false",
         "--interrupt_requests", "false"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or _answers(url))
        if process.poll() is not None:
            raise SystemExit(f"the peer's server ended with status {process.returncode}")
        setting.say(f"peer: llama-cpp-python {found}, its server, {threads} threads")
        yield Place(url, process.pid)
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models").status_code == 200
    return False


# -- an answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A streamed answer: seconds to its first text and from there to its last, and what it was."""

    first_s: float
    rest_s: float
    tokens: int
    text: str
    usage: dict[str, Any]
    used_s: float = 0.0
    """Processor seconds of the server after the first text, where they were asked for."""
    times: tuple[float, ...] = ()
    """When each chunk with text came."""

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / max(self.rest_s, 1e-9)


def ask(
    url: str,
    tokens: int,
    prompt: str = "",
    messages: list[dict[str, str]] | None = None,
    processor_s: Callable[[], float] = lambda: 0.0,
    more: Mapping[str, Any] | None = None,
) -> Answer:
    """Stream a greedy answer of ``tokens`` tokens: a completion of ``prompt``, or to ``messages``; ``more`` fields.

    One that ends before its limit is no measurement: SystemExit. The rate counts tokens by that limit, not by chunks:
    a chunk holds all tokens of its round.
    """
    route = "/v1/completions" if messages is None else "/v1/chat/completions"
    what = {"prompt": prompt} if messages is None else {"messages": messages}
    fields = {"model": "m", "max_tokens": tokens, "temperature": 0, "stream": True}
    body = {**what, **fields, "stream_options": {"include_usage": True}, "ignore_eos": True, **(more or {})}
    begun, came, before = time.perf_counter(), [], None
    with httpx.stream("POST", url + route, json=body, timeout=PATIENCE_S) as response:
        if response.status_code != 200:
            raise SystemExit(f"{route}: status {response.status_code}")
        for data in response.iter_raw():  # read afterwards: a client that is busy takes from the server's processors
            came.append((time.perf_counter(), data))
            before = processor_s() if before is None else before
    return answer(begun, list(events(came)), tokens, processor_s() - (before or 0.0))


def events(came: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """A stream's chunks, each with the second its last byte came at, of the pieces the socket gave."""
    rest = b""
    for at, data in came:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at, line[6:].decode()


def answer(begun: float, lines: list[tuple[float, str]], tokens: int, used_s: float = 0.0) -> Answer:
    """Read a stream's chunks, each with the second it came at."""
    chunks = [(at, json.loads(line)) for at, line in lines]
    pieces = [(at, text) for at, chunk in chunks for one in chunk.get("choices", []) if (text := said(one))]
    ends = [one["finish_reason"] for _, chunk in chunks for one in chunk.get("choices", []) if one["finish_reason"]]
    if ends != ["length"] or not pieces:
        raise SystemExit(f"an answer of {tokens} tokens ended early: {', '.join(ends) or 'no end'}")
    usage: dict[str, Any] = next((chunk["usage"] for _, chunk in reversed(chunks) if chunk.get("usage")), {})
    first, last = pieces[0][0], pieces[-1][0]
    return Answer(
        first - begun,
        last - first,
        tokens,
        "".join(text for _, text in pieces),
        usage,
        used_s,
        tuple(at for at, _ in pieces),
    )


def said(choice: dict[str, Any]) -> str:
    """The text of a chunk's choice, by either route."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


# -- rounds and marks ------------------------------------------------------------------------------------------------


def interleaved(setting: Setting, sides: dict[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Each side once a round, after one try that does not count. An interrupt leaves the rounds that are whole."""
    for side in sides.values():
        side()
    rounds: list[dict[str, T]] = []
    with contextlib.suppress(KeyboardInterrupt, httpx.TransportError):  # what was measured is worth printing
        for _ in track(range(setting.rounds), "measuring", console=setting.console, transient=True):
            rounds.append({name: side() for name, side in sides.items()})
    if not rounds:
        raise SystemExit("no round was finished")
    return {name: [one[name] for one in rounds] for name in sides}


@dataclass(frozen=True)
class Mark:
    """A figure that is to be reached: the median of ``values`` at least (or ``most``: at most) ``mark``."""

    what: str
    values: list[float]
    mark: float
    most: bool = False

    @property
    def median(self) -> float:
        """What is judged."""
        return statistics.median(self.values)

    @property
    def held(self) -> bool:
        """Whether it is reached."""
        return self.median <= self.mark if self.most else self.median >= self.mark


def ratios(over: list[float], under: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values: list[float], digits: int = 1) -> str:
    """Median, and least to most."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def report(setting: Setting, *tables: Table, marks: list[Mark]) -> None:
    """Print the tables and how the marks came out; leaves with status 1 where one is not reached."""
    for table in tables:
        setting.console.print(table)
    judged = Table("", "median (range)", "mark", "", title=f"marks, load {os.getloadavg()[0]:.1f} at the end")
    for one in marks:
        sign = "at most" if one.most else "at least"
        judged.add_row(one.what, spread(one.values, 2), f"{sign} {one.mark:g}", "held" if one.held else "missed")
    if marks:
        setting.console.print(judged)
    if any(not one.held for one in marks):
        raise SystemExit(1)
