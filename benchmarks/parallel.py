"""Several answers at once against one: tokens a second of all together, and whether each reads as alone (M6, M10, N5).

Speed: other prompts each, short ones, so that what is measured is decoding: the weights are read once for all. The
time is from the first request to the last one's end. Of the rounds that came while another answer was being decoded too
``/health`` counts those whose step was shared; under 90 % of them it is no joint decoding: the benchmark fails.

Texts: mixed prompts, each alone and then two and four at once, on the same server. Where a text parts from its text
alone, the gap between the two likeliest tokens there says how near a tie it was.

    python -m benchmarks.parallel [--rounds 5] [--tokens 128] [--prompts 8] [--drafts] [--threads 0] [--model FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import click
import httpx
from rich.table import Table

from benchmarks.bench import (
    COUNTING,
    PATIENCE_S,
    PLAIN,
    TEXT,
    Mark,
    Place,
    Setting,
    ask,
    interleaved,
    options,
    ratios,
    report,
    serving,
    spread,
)

PROMPTS = (
    "The old harbour of the town was built by fishermen who",
    "To bake a good loaf of bread you begin with",
    "In the first lecture of the course the professor explained",
    "A small company that repairs bicycles had decided to",
)
MIXED = (
    "What is the capital of France, and what is it known for?",
    f"Go on counting: {COUNTING}",
    f"Repeat this text word for word:\n\n{TEXT[:600]}",
    "Write a Python function that finds the prime numbers under 100, with a test.",
    'Answer with a JSON object with the keys "name", "kind" and "sights": a town at the sea.',
    "Tell me a story about a lighthouse keeper and his dog.",
    f"Say in three sentences what this is about:\n\n{TEXT[600:1600]}",
    "List ten animals, each with its food and its place.",
)
"""Questions whose answers are copied, counted, code, a form, a list and free: drafts are good for some and not for
others."""
MARKS = {2: 1.7, 4: 2.5}

Sample = tuple[float, float, float]
"""Tokens a second of all, processor ms a token, the share of joint rounds."""


class Rounds(NamedTuple):
    """Rounds of answers so far: those while another answer was being decoded, and those whose step it shared."""

    overlap: int
    joint: int


class Token(NamedTuple):
    """A token of an answer, and how much likelier it was than the next likely one, in nats."""

    text: str
    gap: float


class Apart(NamedTuple):
    """Where a text with others beside it parts from its text alone: the prompt, the token, its gap alone."""

    prompt: int
    token: int
    gap: float


def measure(setting: Setting, tokens: int, drafts: bool, prompts: int) -> tuple[Table, list[Mark]]:
    """One, two and four at once on a server of four slots; then the texts."""
    most = max(MARKS)
    with (
        serving(setting, "--parallel", str(most), *(() if drafts else PLAIN)) as place,
        ThreadPoolExecutor(most) as pool,
    ):
        samples = interleaved(setting, {str(count): speed(place, pool, tokens, count) for count in (1, *MARKS)})
        found = texts(place, pool, tokens, [MIXED[number % len(MIXED)] for number in range(prompts)])
    return table(samples), marks(samples) + same(setting, found, prompts)


# -- speed -----------------------------------------------------------------------------------------------------------


def rounds(place: Place) -> Rounds:
    """By ``/health``."""
    counted = place.health()["parallel"]
    return Rounds(counted["overlap_rounds"], counted["joint_rounds"])


def share(before: Rounds, after: Rounds) -> float:
    """Of the rounds that could be joint, those that were; 1 where none could be."""
    possible = after.overlap - before.overlap
    return (after.joint - before.joint) / possible if possible else 1.0


def speed(place: Place, pool: ThreadPoolExecutor, tokens: int, count: int) -> Callable[[], Sample]:
    """So many answers at once."""

    def sample() -> Sample:
        used, before, began = place.processor_s(), rounds(place), time.perf_counter()
        running = [pool.submit(ask, place.url, tokens, prompt) for prompt in PROMPTS[:count]]
        for run in running:
            run.result()
        took, all_tokens = time.perf_counter() - began, count * tokens
        used_ms = 1000 * (place.processor_s() - used) / all_tokens
        return all_tokens / took, used_ms, share(before, rounds(place))

    return sample


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


# -- texts -----------------------------------------------------------------------------------------------------------


def texts(place: Place, pool: ThreadPoolExecutor, tokens: int, prompts: list[str]) -> dict[int, list[Apart]]:
    """Of every number at once, the texts that part from their text alone."""
    alone = [written(place, tokens, prompt) for prompt in prompts]
    found: dict[int, list[Apart]] = {}
    for count in MARKS:
        beside: list[list[Token]] = []
        for start in range(0, len(prompts), count):
            running = [pool.submit(written, place, tokens, prompt) for prompt in prompts[start : start + count]]
            beside += [run.result() for run in running]
        found[count] = [
            Apart(number, at, one[at].gap if at < len(one) else 0.0)
            for number, (one, other) in enumerate(zip(alone, beside, strict=True))
            if (at := parted(one, other)) is not None
        ]
    return found


def written(place: Place, tokens: int, prompt: str) -> list[Token]:
    """A greedy answer, token by token."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    response = httpx.post(f"{place.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    if response.status_code != 200:
        raise SystemExit(f"a prompt was refused: status {response.status_code}")
    return [
        Token(one["token"], gap(one["top_logprobs"])) for one in response.json()["choices"][0]["logprobs"]["content"]
    ]


def gap(top: list[dict[str, Any]]) -> float:
    """Nats between the two likeliest tokens; infinite where there is one."""
    values = sorted((one["logprob"] for one in top), reverse=True)
    return values[0] - values[1] if len(values) > 1 else float("inf")


def parted(one: list[Token], other: list[Token]) -> int | None:
    """The first token at which two answers differ; None: nowhere."""
    if [token.text for token in one] == [token.text for token in other]:
        return None
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a.text != b.text), min(len(one), len(other)))


def same(setting: Setting, found: dict[int, list[Apart]], prompts: int) -> list[Mark]:
    """Tell each difference, and judge: rows come out alike by construction, so every text is to be its text alone."""
    for count, apart in found.items():
        for one in apart:
            setting.say(
                f"{count} at once: prompt {one.prompt + 1} parts from its text alone at token {one.token}, where the "
                f"two likeliest are {one.gap:.3f} nats apart"
            )
    return [
        Mark(f"{count} at once: texts as alone, of {prompts}", [float(prompts - len(apart))], float(prompts))
        for count, apart in found.items()
    ]


@click.command()
@options
@click.option("--tokens", default=128, show_default=True, help="Tokens of each answer.")
@click.option("--prompts", default=len(MIXED), show_default=True, help="Texts to compare.")
@click.option("--drafts", is_flag=True, help="With drafts, which help one alone the most.")
def main(setting: Setting, **what: Any) -> None:
    """Measure and print."""
    shown, found = measure(setting, **what)
    report(setting, shown, marks=found)


if __name__ == "__main__":
    main()
