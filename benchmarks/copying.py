"""What drafts bring where an answer repeats its prompt: decode with and without them, the same texts (row F8).

The model is given a passage, the passage again, and its beginning a third time: read greedily it goes on copying. Both
servers must write the same text; another one is a fault, not a figure.

    python -m benchmarks.copying [--rounds 5] [--tokens 160] [--threads 0] [--model FILE]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import (
    PLAIN,
    TEXT,
    Answer,
    Mark,
    Setting,
    ask,
    interleaved,
    options,
    ratios,
    report,
    serving,
    spread,
)

BEGINNING = 12
"""Tokens of the third copy that the prompt has."""


def prompts(setting: Setting, tokens: int, count: int = 3) -> list[str]:
    """Passages of the text, twice and begun a third time, each longer than the answer."""
    tokenizer = setting.tokenizer
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False).ids
    length = min(tokens + 2 * BEGINNING, len(ids))
    apart = (len(ids) - length) // max(count - 1, 1)
    found = []
    for start in (apart * number for number in range(count)):
        passage, begun = (tokenizer.decode(ids[start : start + size]).strip() for size in (length, BEGINNING))
        found.append(f"{passage}\n\n{passage}\n\n{begun}")
    return found


def copied(prompt: str, answer: str) -> float:
    """The share of an answer that is what the passage goes on with."""
    passage, _, begun = prompt.split("\n\n") if prompt.count("\n\n") == 2 else prompt.rpartition("\n\n")
    rest = passage[len(begun) :][: len(answer)]
    same = next(
        (at for at, (a, b) in enumerate(zip(rest, answer, strict=False)) if a != b), min(len(rest), len(answer))
    )
    return same / max(len(answer), 1)


def measure(setting: Setting, tokens: int) -> tuple[Table, list[Mark]]:
    """Both servers over all prompts. Raises SystemExit where the texts differ."""
    asked = prompts(setting, tokens)
    with contextlib.ExitStack() as stack:
        servers = {
            "no drafts": stack.enter_context(serving(setting, *PLAIN)).url,
            "as started": stack.enter_context(serving(setting)).url,
        }

        def side(url: str) -> Callable[[], list[Answer]]:
            return lambda: [ask(url, tokens, prompt) for prompt in asked]

        answers = interleaved(setting, {name: side(url) for name, url in servers.items()})
    texts = {tuple(one.text for one in each) for side_answers in answers.values() for each in side_answers}
    if len(texts) != 1:
        raise SystemExit("the texts with and without drafts differ")
    rates = {
        name: [sum(a.tokens - 1 for a in each) / sum(a.rest_s for a in each) for each in side_answers]
        for name, side_answers in answers.items()
    }
    shares = [copied(prompt, text) for prompt, text in zip(asked, texts.pop(), strict=True)]
    setting.say(f"copied from the prompt: {', '.join(f'{share:.0%}' for share in shares)} of the answers")
    shown = Table("", "decode tok/s", title="median over the rounds (range)")
    for name, each in rates.items():
        shown.add_row(name, spread(each))
    gained = ratios(rates["as started"], rates["no drafts"])
    return shown, [Mark("copying with drafts, of without", gained, 2.0)]


@click.command()
@options
@click.option("--tokens", default=160, show_default=True, help="Tokens to write.")
def main(setting: Setting, **what: Any) -> None:
    """Measure and print."""
    shown, found = measure(setting, **what)
    report(setting, shown, marks=found)


if __name__ == "__main__":
    main()
