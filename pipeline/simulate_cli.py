"""``tandem simulate``: a public trace against the modelled engine, an hour in seconds (row R7)."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from pipeline.arrivals import NoTrace, Session, duration, read, sided, spread, thinned
from pipeline.figures import printed
from pipeline.measured import costs as measured_costs
from pipeline.modelled import Costs
from pipeline.plot import svg
from pipeline.settings import Policy
from pipeline.simulate import Outcome, simulate
from pipeline.trace import TraceError
from pipeline.trace import read as read_recorded

TRACE = click.Path(exists=True, dir_okay=False, path_type=Path)
FREE = ("thinking",)
"""Kinds of session that have no common clock: they are begun evenly over the time."""


class Plan(msgspec.Struct, frozen=True):
    """What is drawn from the traces. ``share``: the part of the load that is agents'; ``sides`` of requests bring one
    for the side lane.
    """

    sessions: list[Session]
    agents: list[Session]
    share: float
    seconds: float
    sides: float = 0.0

    def drawn(self, load: float, costs: Costs, seed: int) -> list[Session]:
        """The sessions of one run, by first arrival."""
        parts = [(self.sessions, load * (1 - self.share)), (self.agents, load * self.share)]
        out = []
        for number, (sessions, part) in enumerate(parts):
            if sessions and sessions[0].kind in FREE:
                sessions = spread(sessions, self.seconds, seed + number)
            inside = [session for session in sessions if session.requests[0].at < self.seconds]
            out += thinned(inside, part, self.seconds, costs.prefill, costs.decode, seed + number)
        out.sort(key=lambda session: session.requests[0].at)
        return sided(out, self.sides, seed) if self.sides else out


@click.command("simulate")
@click.argument("trace", type=TRACE)
@click.option("--agents", type=TRACE, help="Agent sessions to add to TRACE.")
@click.option("--agent-share", default=0.5, show_default=True, type=click.FloatRange(0, 1), help="Their part.")
@click.option("--load", "loads", default="0.6,0.8,0.95", show_default=True, help="Of what one slot can serve: L,L,…")
@click.option("--parallel", "slots", default=1, show_default=True, type=click.IntRange(1, 64), help="Slots.")
@click.option("--seed", default=0, show_default=True, help="What is drawn; the same seed gives the same output.")
@click.option("--runs", default=1, show_default=True, type=click.IntRange(1), help="Seeds a load, taken together.")
@click.option("--minutes", default=60.0, show_default=True, type=click.FloatRange(0.1), help="Of traffic, at most.")
@click.option("--prefill-rate", default=2_000.0, show_default=True, type=click.FloatRange(1), help="Prompt rows/s.")
@click.option("--decode-rate", default=60.0, show_default=True, type=click.FloatRange(0.1), help="Answer tokens/s.")
@click.option("--joint", default="1,1.7,2.1,2.5", show_default=True, help="Tokens/s of 1, 2, … at once, of one's.")
@click.option("--measured", type=TRACE, help="Take both rates from a trace this server recorded.")
@click.option("--held", default=4, show_default=True, type=click.IntRange(0), help="Conversations the engine keeps.")
@click.option("--max-queue", default=Policy().max_queue, show_default=True, type=click.IntRange(0), help="As of serve.")
@click.option(
    "--side-lane", default="on", show_default=True, type=click.Choice(["on", "decode", "off"]), help="As of serve."
)
@click.option(
    "--side-share", default=0.0, show_default=True, type=click.FloatRange(0, 1), help="Requests that bring one."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="SVG file to draw the last run in.")
def command(
    trace: Path, agents: Path | None, agent_share: float, loads: str, slots: int, seed: int, runs: int, minutes: float,
    prefill_rate: float, decode_rate: float, joint: str, measured: Path | None, held: int, max_queue: int,
    side_lane: str, side_share: float, plot: Path | None,
) -> None:  # fmt: skip
    """Run a public serving TRACE against a modelled engine, in virtual time.

    TRACE is Mooncake's, Azure's of 2023, or one of coding agents' sessions.
    """
    if measured is not None:
        prefill_rate, decode_rate = rates(measured)
    table = tuple(_numbers("--joint", joint))
    costs = Costs(prefill=prefill_rate, decode=decode_rate, joint=table, held=held)
    if side_share:
        costs = msgspec.structs.replace(costs, told_s=0.0)
    policy = Policy(slots=slots, max_queue=max_queue, side_lane=side_lane)
    plan = _plan(trace, agents, agent_share, minutes * 60, side_share)
    speed = f"{prefill_rate:.4g} prompt rows/s, {decode_rate:.4g} tokens/s"
    sides = f", side lane {side_lane}, {side_share:.0%} bring a side request" if side_share else ""
    click.echo(f"{trace.name}: {plan.seconds / 60:.0f} min, {speed}{sides}")
    title = ""
    outcomes: list[Outcome] = []
    for load in _numbers("--load", loads):
        outcomes = [_run(plan, load, policy, costs, seed + number) for number in range(runs)]
        click.echo("\n" + printed(outcomes, load, plan.seconds, slots))
        title = f"{trace.name}, load {load:g}, {slots} slot{'s' * (slots > 1)}, seed {seed + runs - 1}{sides}"
    if plot is not None:
        plot.write_text(svg(outcomes[-1], title))


def rates(path: Path) -> tuple[float, float]:
    """Prompt rows and answer tokens a second of a recorded run."""
    try:
        found = measured_costs(line.event for line in read_recorded(path) if line.event is not None)
    except TraceError as error:
        raise click.BadParameter(str(error), param_hint="--measured") from None
    if found is None:
        raise click.BadParameter(f"{path.name} has no prompt read and answered.", param_hint="--measured")
    return found.prefill, found.decode


def _plan(trace: Path, agents: Path | None, share: float, seconds: float, sides: float) -> Plan:
    try:
        sessions, more = read(trace), read(agents) if agents is not None else []
    except NoTrace as error:
        raise click.ClickException(str(error)) from None
    if sessions and sessions[0].kind not in FREE:
        seconds = min(seconds, duration(sessions) or seconds)
    return Plan(sessions, more, share if more else 0.0, seconds, sides)


def _run(plan: Plan, load: float, policy: Policy, costs: Costs, seed: int) -> Outcome:
    sessions = plan.drawn(load, costs, seed)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"load {load:g}, seed {seed}", total=2 * plan.seconds)
        before = [0.0, 0.0]  # the first run's end, the time last told

        def progress(time: float) -> None:
            if time < before[1]:
                before[0] += plan.seconds
            before[1] = time
            bar.update(task, completed=before[0] + min(time, plan.seconds))

        return simulate(sessions, policy, costs, progress=progress)


def _numbers(flag: str, text: str) -> list[float]:
    """Positive numbers between commas."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise click.BadParameter(f"{text}: write positive numbers with commas between.", param_hint=flag)
    return numbers
