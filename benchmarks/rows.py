"""What a step costs by its rows: the engine's model alone, rows to be verified as a draft's are (row K4).

A draft of three tokens is checked in a step of four rows. The mark: at most 1.4 times a step of one. With one thread
the times are the processor's own, so that a neighbour does not count.

    python -m benchmarks.rows [--rounds 5] [--context 100] [--threads 0] [--model FILE]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from rich.table import Table

from benchmarks.bench import TEXT, Mark, Setting, interleaved, options, ratios, report, spread
from engine.link import environment
from engine.models import registry
from engine.models.batch import Rows
from engine.models.registry import Model
from engine.weights.checkpoint import open_checkpoint

SIZES = (1, 2, 4, 8, 16, 32)
STEPS = 8
"""Steps of a size in a round; their median counts."""


def loaded(setting: Setting) -> Model:
    """The served model, in this process."""
    model: Model = registry.build(
        open_checkpoint(Path(setting.model)), device=torch.device("cpu"), threads=setting.threads, rows=0,
        progress=lambda *_: None,
    )  # fmt: skip
    model.use(setting.threads)
    setting.say(f"path {model.path}, up to {model.alike} rows of a step come out alike")
    return model


def measure(setting: Setting, model: Model, context: int) -> tuple[Table, list[Mark]]:
    """Milliseconds of steps behind ``context`` rows."""
    ids = [token % model.vocab for token in setting.tokenizer.encode(TEXT, add_special_tokens=False).ids]
    ids *= (context + SIZES[-1]) // len(ids) + 1
    cache = model.new_cache(context + SIZES[-1])
    clock = time.thread_time if setting.threads == 1 else time.perf_counter
    with torch.inference_mode():
        model.forward([Rows(cache, ids[:context], 0)])

        def step(rows: int) -> float:
            began = clock()
            part = Rows(cache, ids[context : context + rows], context, wanted=rows, draft=True)
            model.forward([part])
            took = clock() - began
            cache.keep(context, [0])
            cache.rewind(context)
            return took

        def side(rows: int) -> Callable[[], float]:
            return lambda: 1000 * statistics.median(step(rows) for _ in range(STEPS))

        times = interleaved(setting, {str(rows): side(rows) for rows in SIZES if rows <= model.alike})
    shown = Table("rows", "ms", "of one row", "rows/s", title=f"steps behind {context} rows, median (range)")
    for name, each in times.items():
        rate = [1000 * int(name) / ms for ms in each]
        shown.add_row(name, spread(each, 2), spread(ratios(each, times["1"]), 2), spread(rate, 0))
    if "4" not in times:
        return shown, []
    return shown, [Mark("a step of 4 rows, of one of 1", ratios(times["4"], times["1"]), 1.4, most=True)]


@click.command()
@options
@click.option("--context", default=100, show_default=True, help="Rows that each new row sees.")
def main(setting: Setting, context: int) -> None:
    """Measure and print."""
    shown, found = measure(setting, loaded(setting), context)
    report(setting, shown, marks=found)


def as_the_engine(module: str) -> None:
    """Start this process again with the environment of an engine's: OpenMP reads it when it is loaded."""
    wanted = environment(os.environ)
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], wanted)


if __name__ == "__main__":
    as_the_engine("benchmarks.rows")
    main()
