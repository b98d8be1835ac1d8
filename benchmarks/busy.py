"""Decode while another process holds a core, beside llama.cpp's server in the same trouble (row N5).

A step of two threads waits for the slower one; ours goes on with one thread while a neighbour is busy
(``engine/threads.py``). Drafts are off on our side.

    python -m benchmarks.busy --peer-python PYTHON [--neighbours 1] [--rounds 5] [--tokens 96]
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import (
    COUNTING,
    PLAIN,
    Mark,
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


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(setting: Setting, tokens: int, count: int) -> tuple[Table, list[Mark]]:
    """Both servers, quiet and with ``count`` neighbours; the mark where there is a peer."""
    with contextlib.ExitStack() as stack:
        servers = {"ours": stack.enter_context(serving(setting, *PLAIN)).url}
        if setting.peer:
            servers["llama.cpp's"] = stack.enter_context(peer_server(setting)).url

        def quiet(url: str) -> Callable[[], float]:
            return lambda: ask(url, tokens, COUNTING).rate

        def beside(url: str) -> Callable[[], float]:
            def rate() -> float:
                with neighbours(count):
                    return ask(url, tokens, COUNTING).rate

            return rate

        sides = {f"{name} server": quiet(url) for name, url in servers.items()}
        sides |= {f"{name} server, busy": beside(url) for name, url in servers.items()}
        rates = interleaved(setting, sides)
    shown = Table("", "decode tok/s", title=f"{count} neighbours, median over the rounds (range)")
    for name, each in rates.items():
        shown.add_row(name, spread(each))
    if not setting.peer:
        return shown, []
    beaten = ratios(rates["ours server, busy"], rates["llama.cpp's server, busy"])
    return shown, [Mark("decode beside a busy core, of llama.cpp's server", beaten, 4.0)]


@click.command()
@options
@click.option("--tokens", default=96, show_default=True, help="Tokens to write.")
@click.option("--neighbours", "count", default=1, show_default=True, help="Processes that never rest.")
def main(setting: Setting, **what: Any) -> None:
    """Measure and print."""
    shown, found = measure(setting, **what)
    report(setting, shown, marks=found)


if __name__ == "__main__":
    main()
