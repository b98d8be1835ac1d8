"""Several answers at once against one: tokens a second of all of them together (rows M6, M10, N5).

Other prompts each, short ones, so that what is measured is decoding: the weights are read once for all. The time is
from the first request to the last one's end. ``/health`` counts the rounds whose step was another's too; when they are
under 90 % of those that came while another answer was being written, it is no joint decoding: the benchmark fails.

    python -m benchmarks.together [--rounds 5] [--tokens 128] [--drafts] [--threads 0] [--model FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import PLAIN, Mark, Setting, ask, interleaved, options, ratios, report, serving, spread

PROMPTS = (
    "The old harbour of the town was built by fishermen who",
    "To bake a good loaf of bread you begin with",
    "In the first lecture of the course the professor explained",
    "A small company that repairs bicycles had decided to",
)
MARKS = {2: 1.7, 4: 2.5}

Sample = tuple[float, float, float]
"""Tokens a second of all, processor ms a token, the share of joint rounds."""


def overlapping(times: list[tuple[float, ...]]) -> int:
    """Of chunks of several answers, those that came between another one's first and last."""
    spans = [(each[0], each[-1]) for each in times]
    return sum(
        any(first < at < last for other, (first, last) in enumerate(spans) if other != mine)
        for mine, each in enumerate(times)
        for at in each[1:]
    )


def measure(setting: Setting, tokens: int, drafts: bool) -> tuple[Table, list[Mark]]:
    """One, two and four at once on a server of four slots."""
    most = len(PROMPTS)
    flags = ("--parallel", str(most), *(() if drafts else PLAIN))
    with serving(setting, *flags) as place, ThreadPoolExecutor(most) as pool:

        def joint() -> int:
            count: int = place.health()["parallel"]["joint_rounds"]
            return count

        def at_once(count: int) -> Callable[[], Sample]:
            def sample() -> Sample:
                used, rounds, began = place.processor_s(), joint(), time.perf_counter()
                runs = [pool.submit(ask, place.url, tokens, prompt) for prompt in PROMPTS[:count]]
                answers = [run.result() for run in runs]
                took, all_tokens = time.perf_counter() - began, count * tokens
                possible = overlapping([answer.times for answer in answers])
                share = (joint() - rounds) / possible if possible else 1.0
                return all_tokens / took, 1000 * (place.processor_s() - used) / all_tokens, share

            return sample

        samples = interleaved(setting, {str(count): at_once(count) for count in (1, *MARKS)})
    return table(samples), marks(samples)


def table(samples: dict[str, list[Sample]]) -> Table:
    """Tokens a second of all, of one's, what a token takes of a processor, and how many rounds were joint."""
    shown = Table(
        "at once", "tok/s of all", "of one", "CPU ms a token", "joint", title="median over the rounds (range)"
    )
    for name, each in samples.items():
        rates, used, shares = ([sample[kind] for sample in each] for kind in range(3))
        gained = ratios(rates, [sample[0] for sample in samples["1"]])
        shown.add_row(name, spread(rates), spread(gained, 2), spread(used), "" if name == "1" else spread(shares, 2))
    return shown


def marks(samples: dict[str, list[Sample]]) -> list[Mark]:
    """What is to be reached."""
    one = [sample[0] for sample in samples["1"]]
    found = []
    for count, mark in MARKS.items():
        each = samples[str(count)]
        found.append(Mark(f"{count} at once, of one", ratios([sample[0] for sample in each], one), mark))
        found.append(Mark(f"{count} at once: joint rounds, of those that could be", [s[2] for s in each], 0.9))
    return found


@click.command()
@options
@click.option("--tokens", default=128, show_default=True, help="Tokens of each answer.")
@click.option("--drafts", is_flag=True, help="With drafts, which help one alone the most.")
def main(setting: Setting, **what: Any) -> None:
    """Measure and print."""
    shown, found = measure(setting, **what)
    report(setting, shown, marks=found)


if __name__ == "__main__":
    main()
