"""The measurements of speed, one after the other, and how every mark came out (row N5).

python -m benchmarks.speed --peer-python PYTHON [--rounds 5] [--threads 0] [--model FILE]
"""

from __future__ import annotations

from collections.abc import Callable

import click
from rich.table import Table

from benchmarks import busy, continued, copying, decode, parallel, rows
from benchmarks.bench import Mark, Setting, options, report

Part = Callable[[Setting], tuple[Table, list[Mark]]]

PARTS: dict[str, Part] = {
    "decode": lambda setting: decode.measure(setting, 128, 512, True),
    "busy": lambda setting: busy.measure(setting, 96, 1),
    "rows": lambda setting: rows.measure(setting, rows.loaded(setting), 100),
    "copying": lambda setting: copying.measure(setting, 160),
    "continued": lambda setting: continued.measure(setting, 2500),
    "parallel": lambda setting: parallel.measure(setting, 128, False, 8),
}


def run(setting: Setting) -> None:
    """Each part with its table, then all marks. A part that cannot be finished is named; the others run on."""
    marks: list[Mark] = []
    for name, part in PARTS.items():
        setting.say(f"\n{name}")
        try:
            table, found = part(setting)
        except SystemExit as error:
            setting.say(f"{name}: {error}")
            found = [Mark(f"{name} could be measured", [0.0], 1.0)]
        else:
            setting.console.print(table)
        marks += found
    report(setting, marks=marks)


@click.command()
@options
def main(setting: Setting) -> None:
    """Measure and print."""
    run(setting)


if __name__ == "__main__":
    rows.as_the_engine("benchmarks.speed")
    main()
