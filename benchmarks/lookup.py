"""The lookup drafter alone: how often it is right by what matched, what it takes, what it would bring.

Replays texts as if a model had written them: no model is run. An *edit* is a source file, then the same file with one
name changed and every seventh line left out; a *text* is prose that nothing came before.

    python -m benchmarks.lookup [--model FILE]
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.speculate.lookup import PRIOR, Lookup
from engine.speculate.shape import Shapes
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model

ROOT = Path(__file__).resolve().parent.parent
COSTS = {1: 1.0, 2: 1.15, 4: 1.3, 8: 1.6, 16: 2.6, 32: 4.6}
"""A step's cost by its rows, one row's as 1: about what a 4-bit model has where weights are read, not computed."""


def edits() -> list[tuple[str, str, str]]:
    """Name, prompt and answer."""
    found = []
    for path in (ROOT / "engine" / "sequence.py", ROOT / "engine" / "sampling.py", ROOT / "stages" / "text.py"):
        text = path.read_text()
        lines = [line for at, line in enumerate(re.sub(r"\bself\b", "this", text).splitlines(True)) if at % 7]
        found.append((f"edit of {path.name}", f"Change this file.\n{text}\nThe file:\n", "".join(lines)))
    prose = (ROOT / "docs" / "architecture.md").read_text()
    return [*found, ("text", prose[:2000], prose[2000:12_000])]


def replay(prompt: list[int], answer: list[int]) -> tuple[dict[int, list[bool]], int, int, list[float]]:
    """Right or wrong by tokens matched, of each place's first guess; rounds, accepted tokens, seconds of look-ups."""
    lookup, shapes = Lookup(), Shapes(COSTS)
    lookup.tell(prompt)
    right: dict[int, list[bool]] = defaultdict(list)
    rounds, accepted, took = 0, 0, []
    at = 0
    while at < len(answer):
        begun = time.thread_time()
        draft = lookup.draft(31)
        took.append(time.thread_time() - begun)
        tree = lookup._tree
        path = draft.walk(answer[at:])
        for place in range(min(len(path) + 1, len(answer) - at)):
            parent = path[place - 1] if place else -1
            first = draft.parents.index(parent) if parent in draft.parents else None
            if first is not None and tree is not None:
                right[tree.kinds[first]].append(draft.tokens[first] == answer[at + place])
        shapes.saw(*draft.judged(answer[at:]))
        used = shapes.cut(draft, draft.chances, 31).walk(answer[at:])
        lookup.tell(answer[at : at + len(used) + 1])
        rounds, accepted, at = rounds + 1, accepted + len(used), at + len(used) + 1
    return right, rounds, accepted, took


@click.command()
@click.option("--model", default=None, help="A checkpoint whose tokenizer is used; the embedded one without.")
def main(model: str | None) -> None:
    path = Path(model) if model else embedded_model()
    if path is None:
        raise click.UsageError("the embedded model is not installed: --model FILE")
    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    table = Table("answer", "tokens", "rounds", "tokens a round", "look-up ms, median", "95 %")
    judged: dict[int, list[bool]] = defaultdict(list)
    for name, prompt, answer in edits():
        before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, answer))
        right, rounds, accepted, took = replay(before, after)
        for kind, each in right.items():
            judged[kind] += each
        slow = sorted(took)[int(len(took) * 0.95)]
        figures = (f"{(rounds + accepted) / rounds:.2f}", f"{statistics.median(took) * 1e3:.3f}", f"{slow * 1e3:.3f}")
        table.add_row(name, str(len(after)), str(rounds), *figures)
    console = Console()
    console.print(table)
    kinds = Table("tokens matched", "guesses", "right", "prior")
    for kind in sorted(judged):
        share = sum(judged[kind]) / len(judged[kind])
        kinds.add_row(str(kind), str(len(judged[kind])), f"{share:.2f}", f"{PRIOR[kind]}")
    console.print(kinds)


if __name__ == "__main__":
    main()
