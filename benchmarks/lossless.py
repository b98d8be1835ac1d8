"""Drafts and neighbours change no answer: 20 mixed requests without drafts, with forced ones, and four at a time.

Each request goes through the server's own stages to the engine's loop, in this process. The drafts are forced: trees
that are right for some tokens and wrong before, beside and behind them, whether they pay or not. Token ids,
log-probabilities, the thinking's turns and the end must be exactly those of plain steps (rows F8, M6), and every
request must have had ``ROUNDS`` rounds in which drafted rows were accepted and others refused. Other than that is a
failure.

    python -m benchmarks.lossless [--only NAME ...] [--threads N] [--model FILE]

With ``TANDEM_NATIVE=off`` the steps are torch's: slow, so best with ``--only``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.mixed import ASKED, Asked, asked
from engine import protocol as wire
from engine.drafting import Drafting
from engine.failpoints import Failpoints
from engine.load import ROUND_ROWS, Loaded, load
from engine.models import registry
from engine.slots import Turn
from engine.speculate.draft import Draft, Drafter
from engine.speculate.shape import Shapes
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model
from engine.worker import Engine
from stages.prompt import Renderer
from tests.drafters import Forced

ROUNDS = 20
AT_ONCE = 4
WINDOW = 1024

# -- the engine --------------------------------------------------------------------------------------------------------


class Line:
    """The pipe's place: what is sent is there at the next safe point."""

    def __init__(self) -> None:
        self.inbox: list[wire.ToEngine] = []
        self.said: list[wire.FromEngine] = []

    def post(self, message: wire.FromEngine) -> None:
        """The engine speaks."""
        self.said.append(message)

    def take(self, timeout: float | None) -> list[wire.ToEngine]:  # noqa: ARG002 (nothing is ever waited for)
        """What was sent."""
        taken, self.inbox = self.inbox, []
        return taken

    def leave(self, code: int) -> NoReturn:
        """The engine gives up."""
        raise SystemExit(f"the engine left with {code}")


class Forcing(Drafting):
    """Drafts whatever it costs. ``known``: by run what it will answer.

    ``trees``: by run its drafts of two branches and more.
    """

    def __init__(self, vocab: int, most: int, known: dict[int, list[int]]) -> None:
        super().__init__(Shapes({1: 1.0}, learned=False, always=True), most, lambda slot, _: self._forced(slot))
        self.trees: Counter[int] = Counter()
        self._vocab, self._known = vocab, known
        self._met: dict[int, wire.Start] = {}  # by slot

    def meet(self, start: wire.Start) -> wire.Start:
        """The next run of its slot."""
        self._met[start.slot] = start
        return start

    def drafts(self, turn: Turn) -> list[Draft]:
        """What is proposed, counted."""
        drafts = super().drafts(turn)
        self.trees.update(run.start.run for (_, run), draft in zip(turn, drafts, strict=True) if branches(draft) > 1)
        return drafts

    def _forced(self, slot: int) -> Drafter:
        start = self._met[slot]
        return Turning(Forced(self._vocab, start.tokens, self._known[start.run], seed=start.run))


class Turning:
    """A drafter whose every other tree is turned round: what is right stands behind what is wrong, not first."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._turn = drafter, False

    def tell(self, tokens: Items[int]) -> None:
        """What came."""
        self._drafter.tell(tokens)

    def draft(self, most: int) -> Draft:
        """What may come."""
        self._turn = not self._turn
        draft = self._drafter.draft(most)
        return turned(draft) if self._turn else draft


def turned(draft: Draft) -> Draft:
    """The same tree, the last child of each token first."""
    order: list[int] = []
    left = [at for at, parent in enumerate(draft.parents) if parent == -1]
    while left:
        order.append(at := left.pop())
        left += [child for child, parent in enumerate(draft.parents) if parent == at]
    new = {-1: -1, **{at: i for i, at in enumerate(order)}}
    return Draft(
        tuple(draft.tokens[at] for at in order),
        tuple(new[draft.parents[at]] for at in order),
        tuple(draft.chances[at] for at in order),
    )


def branches(draft: Draft) -> int:
    """Tokens that nothing stands behind."""
    return len(set(range(len(draft))) - set(draft.parents))


@dataclass
class Answer:
    """All that is said of a run. ``rounds``: those that gave a token; ``trees``: drafts of two branches and more."""

    rounds: list[wire.Tokens] = field(default_factory=list)
    ended: wire.Ended | None = None
    trees: int = 0

    @property
    def ids(self) -> list[int]:
        """The tokens."""
        return [token for one in self.rounds for token in one.ids]

    @property
    def told(self) -> dict[str, Any]:
        """What reaches a client, by what it is."""
        ended = self.ended
        assert ended is not None
        return {
            "ids": self.ids,
            "logprobs": [entry for one in self.rounds for entry in one.logprobs],
            "turns": [turn for one in self.rounds for turn in one.turns],
            "end": (ended.reason, ended.generated, ended.why),
        }


def tried(
    config: wire.Config, loaded: Loaded, lanes: Items[Items[wire.Start]], known: dict[int, list[int]] | None = None
) -> dict[int, Answer]:
    """What comes of each slot's lane of runs, one after the other, all slots at once, by an engine of its own.

    ``known``: what the drafts of each run are to know; None: no drafts. Every round is acknowledged at once.
    """
    line = Line()
    forcing = Forcing(loaded.model.vocab, min(ROUND_ROWS, loaded.model.alike), known or {})
    engine = Engine(config, loaded, line, Failpoints({}), None if known is None else forcing)
    left = {slot: [msgspec.structs.replace(start, slot=slot) for start in lane] for slot, lane in enumerate(lanes)}
    slot_of = {start.run: slot for slot, lane in left.items() for start in lane}
    found = {run: Answer() for run in slot_of}
    line.inbox += [forcing.meet(lane.pop(0)) for lane in left.values() if lane]
    while any(answer.ended is None for answer in found.values()):
        line.said.clear()
        engine.turn()
        for message in line.said:
            if isinstance(message, wire.Tokens):
                found[message.run].rounds.append(message)
                line.inbox.append(wire.Seen(1, message.run, message.start + len(message.ids)))
            elif isinstance(message, wire.Ended):
                found[message.run].ended = message
                line.inbox += [forcing.meet(lane.pop(0)) for lane in [left[slot_of[message.run]]] if lane]
            elif isinstance(message, wire.Declined):
                raise SystemExit(f"a run was declined: {message.reason}")
    for run, answer in found.items():
        answer.trees = forcing.trees[run]
    return found


# -- what came out -----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A request's answers: plain, with drafts, and with drafts beside three others."""

    name: str
    plain: list[Answer]
    drafted: list[Answer]
    joint: list[Answer]

    @property
    def rounds(self) -> list[wire.Tokens]:
        """Its rounds with drafts, alone."""
        return [one for answer in self.drafted for one in answer.rounds if one.drafted]

    @property
    def mixed(self) -> int:
        """Of those how many had rows accepted and rows refused."""
        return sum(0 < one.accepted < one.drafted for one in self.rounds)

    @property
    def accepted(self) -> int:
        """Rows that were the next token."""
        return sum(one.accepted for one in self.rounds)

    @property
    def refused(self) -> int:
        """Rows that were not."""
        return sum(one.drafted - one.accepted for one in self.rounds)

    @property
    def trees(self) -> int:
        """Drafts of two branches and more, alone."""
        return sum(answer.trees for answer in self.drafted)

    @property
    def shared(self) -> int:
        """Rounds with drafts that were one step with another run's."""
        return sum(one.shared > 1 and one.drafted > 0 for answer in self.joint for one in answer.rounds)

    @property
    def faults(self) -> list[str]:
        """What is not as it has to be."""
        found = [f"alone {words}" for words in differences(self.plain, self.drafted)]
        found += [f"together {words}" for words in differences(self.plain, self.joint)]
        if self.mixed < ROUNDS:
            found.append(f"{self.mixed} rounds with accepted and refused rows, not {ROUNDS}")
        if self.trees < ROUNDS:
            found.append(f"{self.trees} trees of two branches, not {ROUNDS}")
        if not self.shared:
            found.append("no joint round had drafts")
        if any(answer.told["end"][0] == "fault" for answer in self.plain):
            found.append("it ended by a fault")
        return found


def differences(plain: Items[Answer], other: Items[Answer]) -> list[str]:
    """Where two tries of the same runs part, in words; empty: nowhere."""
    found = []
    for choice, (one, two) in enumerate(zip(plain, other, strict=True)):
        for what, value in one.told.items():
            if value == two.told[what]:
                continue
            pairs = zip(value, two.told[what], strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
            found.append(f"choice {choice} has other {what} from {at} on")
    return found


def lanes(requests: Items[Asked], count: int) -> list[list[wire.Start]]:
    """The runs of ``count`` slots: each request in one of them."""
    return [[start for one in requests[slot::count] for start in one.starts] for slot in range(count)]


class Setup(NamedTuple):
    """A loaded model and who writes prompts for it."""

    config: wire.Config
    loaded: Loaded
    described: wire.Described
    renderer: Renderer


def opened(model: str, threads: int) -> Setup:
    """Load a model for ``AT_ONCE`` runs. SystemExit where this machine's rows do not come out alike."""
    line = Line()
    config = wire.Config(
        1, model, "cpu", threads, WINDOW, safe_rows=64, parallel=AT_ONCE, park_bytes=0, speculate=False
    )
    loaded = load(config, open_checkpoint(Path(model)), registry.build, line, Failpoints({}))
    if loaded.model.alike == 1:
        raise SystemExit(f"{loaded.model.path}: rows do not come out alike, so nothing is ever drafted.")
    described = next(message for message in line.said if isinstance(message, wire.Described))
    return Setup(config, loaded, described, Renderer(described))


def compared(setup: Setup, names: Items[str]) -> list[Row]:
    """The requests of these names, three times."""
    config, loaded, described, renderer = setup
    requests = [asked(name, index, described, renderer) for index, name in enumerate(names)]
    alone, together = lanes(requests, 1), lanes(requests, AT_ONCE)
    plain = tried(config, loaded, alone)
    known = {run: answer.ids for run, answer in plain.items()}
    sides = plain, tried(config, loaded, alone, known), tried(config, loaded, together, known)
    return [Row(name, *([side[start.run] for start in starts] for side in sides)) for name, starts in requests]


def table(rows: Items[Row]) -> Table:
    """All figures."""
    counts = "tokens", "rounds", "both", "accepted", "refused", "trees"
    shown = Table("request", *counts, "end", "equal", "joint", "four")
    for row in rows:
        ends = "/".join(sorted({answer.told["end"][0] for answer in row.plain}))
        turns = [f"{turn.reason}@{turn.at}" for answer in row.plain for turn in answer.told["turns"]]
        figures = sum(len(answer.ids) for answer in row.plain), len(row.rounds), row.mixed
        same = ["no" if differences(row.plain, side) else "yes" for side in (row.drafted, row.joint)]
        shown.add_row(
            row.name, *map(str, (*figures, row.accepted, row.refused, row.trees)), " ".join([ends, *turns]),
            same[0], str(row.shared), same[1],
        )  # fmt: skip
    return shown


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(ASKED)), help="These requests; default: all.")
@click.option("--threads", default=0, show_default=True, help="0: all cores.")
@click.option("--model", default="", help="GGUF file or folder; default: the embedded model.")
def main(only: tuple[str, ...], threads: int, model: str) -> None:
    """Compare and print. rounds: with drafts; both: of them with accepted and refused rows; joint: shared by runs."""
    path = model or str(embedded_model() or "")
    if not path:
        raise click.UsageError("the embedded model is not installed: --model FILE")
    console = Console(width=128)
    setup = opened(path, threads or len(os.sched_getaffinity(0)))
    ready, rows = setup.loaded.ready, compared(setup, only or list(ASKED))
    console.print(f"{ready.path}, {ready.threads} threads, rows alike up to {ready.alike}", highlight=False)
    console.print(table(rows))
    for row in rows:
        for fault in row.faults:
            console.print(f"{row.name}: {fault}", highlight=False)
    held = [row for row in rows if not row.faults]
    console.print(f"{len(held)} of {len(rows)} requests as they have to be", highlight=False)
    if len(held) < len(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
