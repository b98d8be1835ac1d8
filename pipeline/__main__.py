"""The ``tandem`` command: ``serve``, ``doctor``, ``replay``, ``simulate`` and ``table``."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from engine.weights.embedded import embedded_model
from pipeline import __version__, what_if_print
from pipeline.changes import NoChange
from pipeline.replay import replay as replay_trace
from pipeline.settings import Settings, failpoints, settings_options
from pipeline.simulate_cli import command as simulate_command
from pipeline.starting import GIB
from pipeline.table import printed
from pipeline.trace import TraceError
from pipeline.what_if import what_if


@click.group()
@click.version_option(__version__, prog_name="tandem")
def main() -> None:
    """An LLM server for one machine: any OpenAI client changes its base URL and works."""


@main.command()
def table() -> None:
    """Print the tables: every state, trigger, guard and line."""
    click.echo(printed())


@main.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--journal", is_flag=True, help="Print the journal the facts give, without comparing.")
@click.option("--what-if", "changes", multiple=True, metavar="FLAG=VALUE", help="Change a flag; may be repeated.")
def replay(trace: Path, journal: bool, changes: tuple[str, ...]) -> None:
    """Drive a fresh core over a recorded TRACE and compare row for row.

    With --what-if, go on with a modelled engine from the first decision that differs, and print both runs.
    """
    if changes:
        _what_if(trace, changes, journal)
        return
    try:
        report = replay_trace(trace, compare=not journal)
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    if journal:
        click.echo("\n".join(str(step) for step in report.steps))
        return
    where = "" if report.complete else f" The recording dropped lines there: it replays to event {report.events}."
    if report.difference is not None:
        click.echo(str(report.difference))
        sys.exit(1)
    if report.events and not report.recorded:
        click.echo(
            f"{report.events} events, but the trace holds no journal rows to compare with: see --journal.{where}"
        )
        sys.exit(1)
    click.echo(f"{report.events} events, {report.recorded} rows: the same.{where}")


def _what_if(trace: Path, changes: tuple[str, ...], journal: bool) -> None:
    """Print a recorded run beside the same one with flags changed."""
    try:
        result = what_if(trace, changes)
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    except NoChange as error:
        raise click.UsageError(str(error)) from None
    click.echo(what_if_print.journal(result) if journal else what_if_print.printed(result))


@main.command()
@click.option("--model", default="", help="GGUF file or safetensors folder; default: the embedded model.")
@click.option("--max-len", default=Settings().max_len, help="As for serve.", type=click.IntRange(0))
@click.option("--parallel", default=Settings().parallel, help="As for serve.", type=click.IntRange(1))
@click.option("--side-max-len", default=Settings().side_max_len, help="As for serve.", type=click.IntRange(1))
@click.option("--mem-ceiling-gib", default=Settings().mem_ceiling_gib, help="As for serve.", type=click.FloatRange(0))
def doctor(model: str, max_len: int, parallel: int, side_max_len: int, mem_ceiling_gib: float) -> None:
    """Say what this machine has for a model, how steps will be computed, and what its window takes of memory."""
    path = Path(model) if model else embedded_model()
    numbers = [str(number) for number in (max_len, parallel, side_max_len, int(mem_ceiling_gib * GIB))]
    command = [sys.executable, "-m", "engine.doctor", str(path or ""), *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # torch stays out of this process
    click.echo(done.stdout, nl=False)
    sys.exit(done.returncode)


@main.command()
@settings_options
def serve(**flags: Any) -> None:
    """Serve one model over the OpenAI API."""
    settings = msgspec.convert(flags, Settings)
    path = _model_path(settings)
    try:
        failpoints(settings.failpoints)
    except ValueError:
        raise click.BadParameter("write name=n,name=n", param_hint="--failpoints") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    sys.setswitchinterval(0.0005)
    sys.exit(asyncio.run(_serve(settings, path)))


def _model_path(settings: Settings) -> Path:
    """The checkpoint to serve; a sentence that says what to do when there is none."""
    if settings.model:
        path = Path(settings.model)
        if not path.exists():
            raise click.ClickException(f"--model {path}: no such file or folder.")
        return path
    path_or_none = embedded_model()
    if path_or_none is None:
        raise click.ClickException(
            "No model: give one with --model (a GGUF file or a safetensors folder), or run `make model` to install "
            "the embedded one."
        )
    return path_or_none


async def _serve(settings: Settings, path: Path) -> int:
    """Run until the last request has left."""
    from pipeline.http.app import create_app
    from pipeline.http.serve import CannotServe
    from pipeline.http.serve import serve as serve_http
    from pipeline.rules import WrongSetting
    from pipeline.runner import Runner

    try:
        runner = Runner(settings, str(path), path.stem if path.suffix == ".gguf" else path.name)
        app = create_app(runner)
    except WrongSetting as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}.") from None
    stop_on_signals(runner)

    def listening(port: int) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        logging.getLogger("tandem").info("[server] http://%s:%d/v1 · Dev view at /dev · %s", host, port, runner.model)

    try:
        runner.begin()
        await serve_http(app, settings, runner.exiting, listening)
    except CannotServe as error:
        raise click.ClickException(str(error)) from None
    finally:
        await runner.close()
    return runner.exit_status


def stop_on_signals(runner: Any) -> None:
    """The first SIGTERM or SIGINT drains, the second stops at once."""
    from pipeline.events import Draining, Shutdown

    def asked() -> None:
        runner.post(Shutdown() if runner.draining else Draining())

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)


main.add_command(simulate_command)

if __name__ == "__main__":
    main()
