"""What real clients sent, sent again: by the embedded model, or by a script through a template of your own.

The tests send a sample to the model and everything to a script (``tests/e2e/test_captures.py``); this sends all there
is. A request whose prompt does not fit the window is counted as too long, by its own error code; any other refusal is a
fault.

    python -m benchmarks.captures                            # the model, 4 tokens each
    python -m benchmarks.captures --scripted --template FILE # a script, prompts by a real checkpoint's template
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.e2e.test_captures import ANSWER, WINDOW, post, read, served_by_route
from tests.server import Server


@click.command()
@click.option("--scripted", is_flag=True, help="Answers from a script, at a window of 262,144 rows.")
@click.option("--template", default="", help="Chat template in place of the checkpoint's own.")
@click.option("--threads", default=0, help="Of the engine; 0: all processors.")
def main(scripted: bool, template: str, threads: int) -> None:
    """Send every captured chat and completion."""
    flags = ["--threads", str(threads), *(["--chat-template", template] if template else [])]
    with tempfile.TemporaryDirectory() as folder:
        if scripted:
            script = Path(folder) / "script.json"
            script.write_text(json.dumps({"answers": [{"text": ANSWER}]}))
            flags += ["--script", str(script), "--max-len", str(WINDOW)]
        with Server(*flags) as server:
            server.ready()
            counts, faults = measure(server, scripted)
    table = Table("captured from", "served", "too long", "wrong")
    for file, count in sorted(counts.items()):
        table.add_row(file, *(str(count[word] or "") for word in ("served", "too long", "wrong")))
    total = sum(counts.values(), Counter[str]())
    table.add_row("all", *(str(total[word]) for word in ("served", "too long", "wrong")))
    console = Console()
    console.print(table)
    for fault in faults:
        console.print(fault, markup=False)
    sys.exit(1 if faults else 0)


def measure(server: Server, scripted: bool) -> tuple[dict[str, Counter[str]], list[str]]:
    """How the requests of each file ended, and what was wrong."""
    counts: dict[str, Counter[str]] = {}
    faults: list[str] = []
    for one in track(served_by_route(), "sending"):
        changes = {} if scripted else {"max_tokens": 4, "max_completion_tokens": None, "min_tokens": None}
        response = post(server, one, **changes)
        ended, why = "served", ""
        if response.status_code == 200:
            try:
                read(one, response)
            except (AssertionError, ValueError, KeyError) as error:
                ended, why = "wrong", type(error).__name__
        elif response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded":
            ended = "too long"
        else:
            ended, why = "wrong", f"{response.status_code}: {response.text[:200]}"
        counts.setdefault(one.file, Counter())[ended] += 1
        if why:
            faults.append(f"{one.file}, line {one.line}: {why}")
    return counts, faults


if __name__ == "__main__":
    main()
