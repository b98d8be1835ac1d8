"""Tokens a second: the engine alone, the same engine through HTTP, and llama.cpp on the same file when it is installed.

Each round measures every side once, one after the other, so that a busy machine slows them alike; the ratios are taken
within a round, and the median over the rounds is what counts. A run prints what it ran on.

    python -m benchmarks.decode [--rounds 5] [--tokens 128] [--prompt 512] [--threads 0] [--model FILE]
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine import protocol as wire
from engine.link import Died, EngineLink
from engine.weights.embedded import embedded_model
from tests.server import Server, until

Sample = tuple[float, float]
"""Decode tokens a second (after the first token), prefill tokens a second."""
TEXT = (Path(__file__).resolve().parent.parent / "fixtures" / "texts" / "accuracy.txt").read_text()
COUNTING = ", ".join(str(number) for number in range(1, 40)) + ","
"""Read greedily the embedded model counts on and never stops by itself."""


class Engine:
    """The engine process, driven directly: what HTTP is measured against."""

    def __init__(self, model: str, threads: int) -> None:
        self._inbox: queue.SimpleQueue[wire.FromEngine | Died] = queue.SimpleQueue()
        self._link = EngineLink(wire.Config(epoch=1, model=model, threads=threads), self._inbox.put)
        self._link.start()
        self.ready = self._wait(wire.Ready)
        self._run = 0

    def _wait(self, kind: type) -> Any:
        while True:
            message = self._inbox.get(timeout=300)
            if isinstance(message, kind):
                return message
            if isinstance(message, Died):
                raise SystemExit(f"the engine ended with status {message.code}")

    def run(self, tokens: list[int], count: int) -> tuple[float, float]:
        """Seconds to the first token and from it to the last of ``count``."""
        self._run += 1
        begun = time.perf_counter()
        self._link.send(wire.Start(1, self._run, 0, tokens, wire.Sampling(temperature=0.0), count, []))
        first = 0.0
        while True:
            message = self._inbox.get(timeout=300)
            if isinstance(message, wire.Tokens):
                first = first or time.perf_counter()
                self._link.send(wire.Seen(1, self._run, message.start + len(message.ids)))
            elif isinstance(message, wire.Ended):
                return first - begun, time.perf_counter() - first

    def close(self) -> None:
        """Stop the process."""
        self._link.close(10)


def http_run(url: str, prompt: str, count: int) -> tuple[float, float, int]:
    """A streamed completion: seconds to the first text, from it to the last, and how many chunks held text."""
    body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True}
    begun, lines = time.perf_counter(), []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                lines.append((time.perf_counter(), line))
    times = [at for at, line in lines if any(c["text"] for c in json.loads(line[6:])["choices"])]
    return times[0] - begun, times[-1] - times[0], len(times)


class Bench:
    """What every side is asked: one text of ``prompt`` tokens to read, one answer of ``tokens`` tokens to write."""

    def __init__(self, model: str, tokens: int, prompt: int) -> None:
        from tokenizers import Tokenizer

        from engine.weights.checkpoint import open_checkpoint

        self.tokenizer = Tokenizer.from_str(open_checkpoint(Path(model)).tokenizer_json)
        self.tokens, self.short = tokens, self.ids(COUNTING)
        self.long = (self.ids(TEXT) * 9)[:prompt]
        self.salt = 0

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def fresh(self) -> list[int]:
        """The long prompt with a new first token: nobody reads it from a cache."""
        self.salt += 1
        return [1_000 + self.salt, *self.long[1:]]

    def engine(self, engine: Engine) -> Sample:
        """The engine alone."""
        _, decode = engine.run(self.short, self.tokens)
        first, _ = engine.run(self.fresh(), 1)
        return (self.tokens - 1) / decode, len(self.long) / first

    def http(self, url: str) -> Sample:
        """A server."""
        _, decode, chunks = http_run(url, COUNTING, self.tokens)
        first, _, _ = http_run(url, self.tokenizer.decode(self.fresh()), 1)
        return (chunks - 1) / decode, len(self.long) / first

    def peer(self, llama: Any) -> Sample:
        """llama.cpp in this process."""
        llama.reset()
        begun = first = 0.0
        for number, _ in enumerate(llama.generate(self.short, temp=0.0, reset=True)):
            first = first or time.perf_counter()
            if number == self.tokens - 1:
                break
        decode = time.perf_counter() - first
        begun = time.perf_counter()
        llama.reset()
        llama.eval(self.fresh())
        return (self.tokens - 1) / decode, len(self.long) / (time.perf_counter() - begun)


@contextlib.contextmanager
def peer_server(model: str, threads: int) -> Iterator[str]:
    """llama-cpp-python's own server on the same file and threads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "llama_cpp.server", "--model", model, "--n_threads", str(threads), "--n_ctx", "2048",
         "--n_threads_batch", str(threads), "--port", str(port), "--verbose", "false"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models").status_code == 200
    return False


def machine(threads: int) -> str:
    """What this runs on."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return (
        f"{name}, {os.cpu_count()} cores, {threads} threads; torch {torch.__version__}, Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


def _cpuinfo() -> list[str]:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text().splitlines()
    return []


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="Tokens to write.")
@click.option("--prompt", default=512, show_default=True, help="Tokens to read.")
@click.option("--threads", default=0, show_default=True, help="0: all cores.")
@click.option("--model", default="", help="GGUF file; default: the embedded model.")
@click.option("--peer/--no-peer", default=True, help="Measure llama.cpp too, when it is installed.")
def main(rounds: int, tokens: int, prompt: int, threads: int, model: str, peer: bool) -> None:
    """Measure and print."""
    console = Console(width=110)
    model = model or str(embedded_model() or "")
    threads = threads or len(os.sched_getaffinity(0))
    console.print(machine(threads))
    bench = Bench(model, tokens, prompt)
    with contextlib.ExitStack() as stack:
        engine = Engine(model, threads)
        stack.callback(engine.close)
        rows = engine.ready.safe_rows  # chosen by measuring: both have to take the same
        flags = ("--model", model, "--threads", str(threads), "--safe-rows", str(rows))
        server = stack.enter_context(Server(*flags)).ready()
        console.print(f"prefill steps of {rows} rows")
        sides: dict[str, Callable[[], Sample]] = {
            "engine alone": lambda: bench.engine(engine),
            "through HTTP": lambda: bench.http(server.url),
        }
        if peer and importlib.util.find_spec("llama_cpp") and model.endswith(".gguf"):
            from llama_cpp import Llama

            llama = Llama(model, n_threads=threads, n_threads_batch=threads, n_ctx=2048, verbose=False)
            stack.callback(llama.close)
            sides["llama.cpp in process"] = lambda: bench.peer(llama)
            if importlib.util.find_spec("uvicorn"):
                url = stack.enter_context(peer_server(model, threads))
                sides["llama.cpp's server"] = lambda: bench.http(url)
        else:
            console.print("no peer in this run: llama-cpp-python is not installed, or not asked for")
        for side in sides.values():
            side()  # warm
        samples: dict[str, list[Sample]] = {name: [] for name in sides}
        for _ in track(range(rounds), "measuring", console=console):
            for name, side in sides.items():
                samples[name].append(side())
    report(console, samples)


def report(console: Console, rows: dict[str, list[Sample]]) -> None:
    """Medians, and ratios taken within each round."""
    table = Table("", "decode tok/s", "of the engine", "prefill tok/s", "of the engine", title="median over the rounds")
    base = rows["engine alone"]
    for name, samples in rows.items():
        cells = [name]
        for kind in (0, 1):
            ratios = [sample[kind] / alone[kind] for sample, alone in zip(samples, base, strict=True)]
            values = [sample[kind] for sample in samples]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.0f}-{max(values):.0f})")
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
