"""How soon a conversation goes on: the first token of its second turn against that of reading it cold (row N5).

python -m benchmarks.continued [--rounds 5] [--prompt 2500] [--threads 0] [--model FILE]
"""

from __future__ import annotations

import itertools
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import TEXT, Answer, Mark, Setting, ask, interleaved, options, ratios, report, serving, spread

ANSWER = 24
"""Tokens of an answer."""

Turns = tuple[Answer, Answer]


def measure(setting: Setting, prompt: int) -> tuple[Table, list[Mark]]:
    """A new conversation of ``prompt`` tokens a round: its first turn, read cold, then its second."""
    tokenizer, numbers = setting.tokenizer, itertools.count(1)
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False).ids
    long: str = tokenizer.decode((ids * (prompt // len(ids) + 1))[:prompt])
    with serving(setting) as server:

        def turns() -> Turns:
            # The number stands in front, in the system message: nothing of the round before is its beginning.
            messages = [
                {"role": "system", "content": f"{next(numbers)} are the notes you know."},
                {"role": "user", "content": f"{long}\nWhat is this about?"},
            ]
            cold = ask(server.url, ANSWER, messages=messages)
            messages += [{"role": "assistant", "content": cold.text}, {"role": "user", "content": "Go on."}]
            return cold, ask(server.url, ANSWER, messages=messages)

        rounds = interleaved(setting, {"turns": turns})["turns"]
    shown = Table("", "first token, ms", "prompt tokens", "of them kept", title="median over the rounds (range)")
    for name, turn in (("cold", 0), ("continued", 1)):
        each = [one[turn] for one in rounds]
        usage = each[-1].usage
        kept = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        shown.add_row(name, spread([1000 * one.first_s for one in each]), str(usage.get("prompt_tokens")), str(kept))
    times = ratios([cold.first_s for cold, _ in rounds], [warm.first_s for _, warm in rounds])
    return shown, [Mark(f"a conversation of {prompt} tokens goes on, times sooner than cold", times, 20.0)]


@click.command()
@options
@click.option("--prompt", default=2500, show_default=True, help="Tokens of the conversation.")
def main(setting: Setting, **what: Any) -> None:
    """Measure and print."""
    shown, found = measure(setting, **what)
    report(setting, shown, marks=found)


if __name__ == "__main__":
    main()
