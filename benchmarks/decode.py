"""Tokens a second through HTTP, written and read, beside llama.cpp's server on the same file and threads (row N5).

The marks are judged without drafts, for those depend on the text: what counts numbers is easily guessed. The server as
it starts is measured beside it, and the engine alone, which says what HTTP takes. With ``--fallback`` the path without
a compiler is measured too.

    python -m benchmarks.decode [--peer-python PYTHON] [--fallback] [--rounds 5] [--tokens 128] [--prompt 512]
"""

from __future__ import annotations

import contextlib
import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import (
    COUNTING,
    PLAIN,
    TEXT,
    Mark,
    Place,
    Setting,
    ask,
    interleaved,
    options,
    peer_server,
    ratios,
    report,
    serving,
    spread,
)
from engine import protocol as wire
from engine.link import Died, EngineLink

Sample = tuple[float, float, float, float]
"""Tokens a second, written (after the first) and read, and processor ms of the server for each of them."""
ALONE, OURS, DRAFTED = "engine alone", "our server, no drafts", "our server as started"
FALLBACK, PEER = "our server, no drafts, no compiler", "llama.cpp's server"


class Engine:
    """The engine process, driven directly, without drafts: what HTTP is measured against."""

    def __init__(self, setting: Setting) -> None:
        self._inbox: queue.SimpleQueue[wire.FromEngine | Died] = queue.SimpleQueue()
        config = wire.Config(epoch=1, model=setting.model, threads=setting.threads, speculate=False)
        self._link = EngineLink(config, self._inbox.put)
        self._link.start()
        while not isinstance(self._next(), wire.Ready):
            pass
        self._run = 0

    def _next(self) -> wire.FromEngine:
        message = self._inbox.get(timeout=300)
        if isinstance(message, Died):
            raise SystemExit(f"the engine ended with status {message.code}")
        return message

    def run(self, tokens: list[int], count: int) -> tuple[float, float]:
        """Seconds to the first token and from it to the last of ``count``."""
        self._run += 1
        begun = time.perf_counter()
        self._link.send(wire.Start(1, self._run, 0, tokens, wire.Sampling(temperature=0.0), count, []))
        times: list[float] = []
        while not isinstance(message := self._next(), wire.Ended):
            if isinstance(message, wire.Tokens):
                times.append(time.perf_counter())
                self._link.send(wire.Seen(1, self._run, message.start + len(message.ids)))
        return times[0] - begun, times[-1] - times[0]

    def close(self) -> None:
        """Stop the process."""
        self._link.close(10)


class Asked:
    """What every side is asked: one text of ``prompt`` tokens to read, one answer of ``tokens`` tokens to write."""

    def __init__(self, setting: Setting, tokens: int, prompt: int) -> None:
        self._tokenizer, self._tokens, self._salt = setting.tokenizer, tokens, 0
        ids = self._ids(TEXT)
        self._long = (ids * (prompt // len(ids) + 1))[:prompt]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def fresh(self) -> str:
        """The long prompt with a new beginning: nobody has its rows."""
        self._salt += 1
        text: str = self._tokenizer.decode(self._long)
        return f"{self._salt + 1000} {text}"

    def engine(self, engine: Engine) -> Sample:
        """The engine alone."""
        _, rest = engine.run(self._ids(COUNTING), self._tokens)
        fresh = self._ids(self.fresh())
        first, _ = engine.run(fresh, 1)
        return (self._tokens - 1) / rest, len(fresh) / first, 0.0, 0.0

    def server(self, place: Place) -> Sample:
        """A server."""
        fresh = self.fresh()
        wrote = ask(place.url, self._tokens, COUNTING, processor_s=place.processor_s)
        length, before = len(self._ids(fresh)), place.processor_s()
        read = ask(place.url, 1, fresh)
        used = (wrote.used_s / (self._tokens - 1), (place.processor_s() - before) / length)
        return wrote.rate, length / read.first_s, 1000 * used[0], 1000 * used[1]


def measure(setting: Setting, tokens: int, prompt: int, fallback: bool) -> tuple[Table, list[Mark]]:
    """All sides, and the marks where there is a peer."""
    asked = Asked(setting, tokens, prompt)
    with contextlib.ExitStack() as stack:
        engine = None if setting.flags else Engine(setting)  # a server's flags are not the engine's
        sides: dict[str, Callable[[], Sample]] = {}
        if engine is not None:
            stack.callback(engine.close)
            sides[ALONE] = lambda: asked.engine(engine)

        def add(name: str, place: Place) -> None:
            sides[name] = lambda: asked.server(place)

        add(OURS, stack.enter_context(serving(setting, *PLAIN)))
        add(DRAFTED, stack.enter_context(serving(setting)))
        if fallback:
            add(FALLBACK, stack.enter_context(serving(setting, *PLAIN, native=False)))
        if setting.peer:
            add(PEER, stack.enter_context(peer_server(setting)))
        samples = interleaved(setting, sides)
    return table(samples), marks(samples)


def table(samples: dict[str, list[Sample]]) -> Table:
    """Tokens a second, what each side is of our server's, and what a token takes of the processors, HTTP included."""
    heads = ("", "decode tok/s", "of ours", "prefill tok/s", "of ours", "CPU ms, written", "read")
    shown = Table(*heads, title="median over the rounds (range)")
    for name, each in samples.items():
        cells = [name]
        for kind in (0, 1):
            values, ours = [sample[kind] for sample in each], [sample[kind] for sample in samples[OURS]]
            cells += [spread(values), f"{statistics.median(ratios(values, ours)):.2f}"]
        for kind in (2, 3):
            used = [sample[kind] for sample in each]
            cells.append(spread(used) if any(used) else "")
        shown.add_row(*cells)
    return shown


def marks(samples: dict[str, list[Sample]]) -> list[Mark]:
    """What is to be reached beside the peer."""
    if PEER not in samples:
        return []
    rates = {name: [[sample[kind] for sample in each] for kind in (0, 1)] for name, each in samples.items()}
    (theirs, theirs_read), (ours, ours_read) = rates[PEER], rates[OURS]
    found = [
        Mark("decode, of llama.cpp's server", ratios(ours, theirs), 2.0),
        Mark("prefill, of llama.cpp's server", ratios(ours_read, theirs_read), 4.5),
    ]
    if FALLBACK in samples:
        found.append(Mark("decode without a compiler, of llama.cpp's", ratios(rates[FALLBACK][0], theirs), 0.95))
    return found


@click.command()
@options
@click.option("--tokens", default=128, show_default=True, help="Tokens to write.")
@click.option("--prompt", default=512, show_default=True, help="Tokens to read.")
@click.option("--fallback", is_flag=True, help="The path without a compiler too.")
def main(setting: Setting, **what: Any) -> None:
    """Measure and print."""
    shown, found = measure(setting, **what)
    report(setting, shown, marks=found)


if __name__ == "__main__":
    main()
