"""Ten short requests into a long one: served inside it, or waiting behind it (rows K4, K7).

The long one reads 5,000 tokens and writes 768, streamed and greedy. The short ones come at even times through its
prefill and its decode; nine of them may be served inside it, the tenth asks for more than the lane writes. A round asks
every server once, with a text of its own that no server has the rows of: one where the long one is alone, the lane on,
in decode only, off, and the peer. Drafts have a fixed shape, so the long one's text is to be its text alone.

    python -m benchmarks.side_lane [--peer-python PYTHON] [--pace person] [--rounds 3] [--prompt 5000] [--tokens 768]

``--pace``: ``person`` sends the next one when the last was answered, ``even`` each at its time, ``once`` all together.
Only those that were sent while the long one ran are judged: behind it there is nothing to wait for. All together they
wait for one another, so no time is judged then.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import click
import httpx
from rich.table import Table

from benchmarks.bench import (
    PATIENCE_S,
    TEXT,
    Answer,
    Mark,
    Place,
    Setting,
    ask,
    interleaved,
    options,
    peer_server,
    ratios,
    report,
    serving,
    spread,
)

SHORT: tuple[tuple[str, int], ...] = (
    ("Give this chat a title of three words: how do I grow tomatoes on a balcony?", 12),
    ("Name two tags for a chat about the tides of the North Sea.", 16),
    ("Is a whale a fish? Answer with yes or no.", 8),
    ("What is the capital of Norway?", 16),
    ("Give this chat a title of three words: why does my bicycle squeak when it rains?", 12),
    ("Write one sentence about the moon.", 32),
    ("Which question could follow after one about baking bread?", 24),
    ("Name two tags for a chat about old maps and lost islands.", 16),
    ("Say good morning to a friend in two sentences.", 64),
    ("Tell me a story about a lighthouse keeper and his dog.", 200),
)
"""What is asked, and the most tokens of its answer. The last one is over the lane's limit."""
ELIGIBLE = 9
COUNTS = ("offered", "declined", "served", "outgrown", "guest_s")
"""What ``/health`` counts of the lane."""
LANE = (*COUNTS, "copied_rows", "copied_bytes")
FLAGS = ("--draft-shape", "fixed", "--max-queue", str(2 * len(SHORT)))
ALONE, ON, DECODE, OFF, PEER = "alone", "lane on", "lane in decode only", "lane off", "llama.cpp's server"
LANES = {ON: "on", DECODE: "decode", OFF: "off"}
PACES = ("person", "even", "once")
BARS = " ▁▂▃▄▅▆▇█"
BINS = 60
GAPS = 5
"""How many of the longest pauses between the long one's chunks are told."""


class Guest(NamedTuple):
    """A short request: which of ``SHORT``, its id, when it was sent and answered, its text; what our server says of it:
    whether it was served inside the long one, else the slot and the row it ended by."""

    number: int
    id: str
    sent_s: float
    done_s: float
    text: str
    inside: bool = False
    slot: int = -1
    row: str = ""

    @property
    def took_s(self) -> float:
        """Seconds its client waited."""
        return self.done_s - self.sent_s


class Turn(NamedTuple):
    """A round of one side: the long one's answer, when it was sent and over, those that came meanwhile, and the lane's
    counts in this round."""

    answer: Answer
    begun_s: float
    done_s: float
    guests: list[Guest]
    lane: dict[str, float]

    @property
    def took_s(self) -> float:
        """Seconds of the long one."""
        return self.done_s - self.begun_s

    @property
    def waits(self) -> list[float]:
        """Seconds of each that may be served inside and was sent before the long one's end; of all, if none was."""
        meant = [one for one in self.guests if one.number < ELIGIBLE]
        return [one.took_s for one in meant if one.sent_s < self.done_s] or [one.took_s for one in meant]


class Asked:
    """What is asked in a round: a long text with a beginning of its own, and when the short ones come."""

    def __init__(self, setting: Setting, prompt: int, tokens: int, pace: str) -> None:
        self._tokenizer, self._length, self.tokens, self.pace = setting.tokenizer, prompt, tokens, pace
        self._rounds = itertools.count(1)
        self.prompt, self.alone_s = "", 0.0

    def fresh(self) -> None:
        """The next round's text: words in an order of their own, so that nothing of it was read before."""
        words = random.Random(next(self._rounds)).choices(TEXT.split(), k=self._length)
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids[: self._length]
        self.prompt = f"{self._tokenizer.decode(ids)}\n\nThe story of the lighthouse, from the beginning:"

    def alone(self, place: Place) -> Turn:
        """The long one with nobody beside it."""
        self.fresh()
        turn = self._turn(place, [])
        self.alone_s = turn.took_s
        return turn

    def beside(self, place: Place, ours: bool) -> Turn:
        """The long one with the short ones into it. Of a server that is not ours only times are known."""
        before = lane(place) if ours else {}
        turn = self._turn(place, arrivals(self.pace, self.alone_s), {} if ours else endless(self._tokenizer))
        if not ours:
            return turn
        ended, after = place.recent(), lane(place)
        counted = after | {name: after[name] - before[name] for name in COUNTS}
        return turn._replace(guests=[known(one, ended) for one in turn.guests], lane=counted)

    def _turn(self, place: Place, times: list[float], more: dict[str, Any] | None = None) -> Turn:
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(SHORT) + 1) as pool:
            long = pool.submit(self._long, place, more or {})
            if self.pace == "person":
                guests = [short(place, number, begun + at) for number, at in enumerate(times)]
            else:
                sent = [pool.submit(short, place, number, begun + at) for number, at in enumerate(times)]
                guests = [each.result() for each in sent]
            answer, done = long.result()
        return Turn(answer, begun, done, guests, {})

    def _long(self, place: Place, more: dict[str, Any]) -> tuple[Answer, float]:
        answer = ask(place.url, self.tokens, self.prompt, more=more)
        return answer, time.perf_counter()


def arrivals(pace: str, alone_s: float) -> list[float]:
    """When the short ones are sent, after the long one: through what it takes alone, or all when it has begun."""
    count = len(SHORT)
    return [alone_s * ((0 if pace == "once" else number) + 0.5) / count for number in range(count)]


def short(place: Place, number: int, at: float) -> Guest:
    """Send a short request, no sooner than ``at``."""
    question, tokens = SHORT[number]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    time.sleep(max(at - time.perf_counter(), 0.0))
    sent = time.perf_counter()
    response = httpx.post(f"{place.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    done = time.perf_counter()
    if response.status_code != 200:
        raise SystemExit(f"a short request was refused: status {response.status_code}")
    answer = response.json()
    return Guest(number, answer["id"], sent, done, answer["choices"][0]["message"]["content"] or "")


def known(guest: Guest, ended: dict[str, dict[str, Any]]) -> Guest:
    """With what the server says of its end."""
    record = ended[guest.id]
    inside = record["inside"] and not record["outgrown"]
    return guest._replace(inside=inside, slot=record["slot"], row=record["row"])


def lane(place: Place) -> dict[str, float]:
    """The lane's counts so far, and the size of its last copy."""
    found = place.health()["lane"]
    return {name: found[name] for name in LANE}


def endless(tokenizer: Any) -> dict[str, Any]:
    """Fields that keep a server which does not know ``ignore_eos`` from ending an answer."""
    ids = [tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>", "</s>")]
    return {"logit_bias": {str(token): -100 for token in ids if token is not None}}


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(setting: Setting, prompt: int, tokens: int, pace: str) -> tuple[Table, list[Mark]]:
    """Every side, and what the last round looked like."""
    asked = Asked(setting, prompt, tokens, pace)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[], Turn]] = {}
        alone = stack.enter_context(serving(setting, *FLAGS))
        sides[ALONE] = lambda: asked.alone(alone)

        def add(name: str, place: Place) -> None:
            sides[name] = lambda: asked.beside(place, name != PEER)

        for name, word in LANES.items():
            add(name, stack.enter_context(serving(setting, *FLAGS, "--side-lane", word)))
        if setting.peer:
            add(PEER, stack.enter_context(peer_server(setting, prompt + tokens + 256)))
        turns = interleaved(setting, sides)
    for name in turns:
        tell(setting, name, turns)
    return table(turns), marks(turns, timed=pace != "once")


def tell(setting: Setting, name: str, turns: dict[str, list[Turn]]) -> None:
    """The last round of a side: when the long one wrote, and who was not served inside; of all rounds, what differs."""
    turn = turns[name][-1]
    pauses = sorted((after - before for before, after in itertools.pairwise(turn.answer.times)), reverse=True)[:GAPS]
    setting.say(f"\n{name}: first text after {turn.answer.first_s:.1f} s, then (a cell is 1/{BINS} of its writing)")
    setting.say(f"  |{drawn(turn.answer.times)}| longest pauses, ms: {', '.join(f'{1000 * p:.0f}' for p in pauses)}")
    if name in (ON, DECODE):
        for one in turn.guests:
            if not one.inside:
                what = f"number {one.number + 1} (max_tokens {SHORT[one.number][1]})"
                setting.say(f"  {what} was not served inside: slot {one.slot}, row {one.row}, {one.took_s:.1f} s")
        counted = ", ".join(f"{what} {turn.lane[what]:g}" for what in COUNTS if turn.lane[what])
        copied = f"{turn.lane['copied_rows']:g} rows, {turn.lane['copied_bytes'] / 1e6:.1f} MB"
        setting.say(f"  the lane: {counted or 'nothing'}; the last copy: {copied}")
    if name in LANES:
        for number, words in enumerate(differences(turns, name), 1):
            if words:
                setting.say(f"  round {number}: {words}")


def differences(turns: dict[str, list[Turn]], name: str) -> list[str]:
    """Of a side's rounds: where the long text parts from its text alone, and which short texts the lane changed."""
    found = []
    for one, off, apart in zip(turns[name], turns[OFF], parted(turns, name), strict=True):
        words = [] if apart is None else [f"the long text parts from its text alone at character {apart}"]
        texts = {guest.number: guest.text for guest in off.guests}
        others = [str(guest.number + 1) for guest in one.guests if guest.text != texts[guest.number]]
        words += [f"short texts unlike those with the lane off: {', '.join(others)}"] if others else []
        found.append("; ".join(words))
    return found


def parted(turns: dict[str, list[Turn]], name: str) -> list[int | None]:
    """Round by round where a side's long text parts from its text alone; None: nowhere."""
    pairs = zip(turns[ALONE], turns[name], strict=True)
    return [first_difference(alone.answer.text, one.answer.text) for alone, one in pairs]


def first_difference(one: str, other: str) -> int | None:
    """The first character at which two texts differ."""
    if one == other:
        return None
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def drawn(times: tuple[float, ...], bins: int = BINS) -> str:
    """How many chunks came in each of ``bins`` equal spans from the first to the last; a blank is none."""
    first, last = times[0], times[-1]
    counts = [0] * bins
    for at in times:
        counts[min(int(bins * (at - first) / max(last - first, 1e-9)), bins - 1)] += 1
    most = max(counts)
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)


def table(turns: dict[str, list[Turn]]) -> Table:
    """Of each side: who was served inside, how long short requests took, and what they cost the long one."""
    heads = ("", "inside", "short, s", "at most", "long, s", "of alone", "later, s")
    shown = Table(*heads, title="median over the rounds (range)")
    alone = [turn.took_s for turn in turns[ALONE]]
    for name, each in turns.items():
        took, waits = [turn.took_s for turn in each], [turn.waits for turn in each]
        inside = [float(sum(one.inside for one in turn.guests)) for turn in each]
        later = [a - b for a, b in zip(took, alone, strict=True)]
        ours = name in LANES
        shown.add_row(
            name,
            spread(inside, 0) if ours else "",
            spread([statistics.median(one) for one in waits], 2) if name != ALONE else "",
            f"{max(map(max, waits)):.2f}" if name != ALONE else "",
            spread(took),
            spread(ratios(took, alone), 2) if ours else "",
            spread(later) if ours else "",
        )
    return shown


def marks(turns: dict[str, list[Turn]], timed: bool = True) -> list[Mark]:
    """What is to be reached. A text that differs once is one too many, so texts are counted over all rounds.

    Not ``timed``: the short ones wait for one another, and their times are no figure of the lane.
    """
    inside = [float(sum(one.inside for one in turn.guests)) for turn in turns[ON]]
    same = [float(sum(apart is None for apart in parted(turns, name))) for name in LANES]
    found = [
        Mark("short requests served inside, of nine", inside, ELIGIBLE),
        Mark("long texts as alone, of the rounds of each lane", [min(same)], float(len(turns[ON]))),
    ]
    if not timed:
        return found
    waits = {name: [statistics.median(turn.waits) for turn in turns[name]] for name in (ON, OFF)}
    took = ratios([turn.took_s for turn in turns[ON]], [turn.took_s for turn in turns[ALONE]])
    return [
        *found,
        Mark("a short request, lane off, of on", ratios(waits[OFF], waits[ON]), 5.0),
        Mark("a short request, lane on, s", waits[ON], 1.0, most=True),
        Mark("the long one, lane on, of alone", took, 1.2, most=True),
    ]


@click.command()
@functools.partial(options, rounds=3)
@click.option("--prompt", default=5_000, show_default=True, help="Tokens the long one reads.")
@click.option("--tokens", default=768, show_default=True, help="Tokens the long one writes.")
@click.option("--pace", type=click.Choice(PACES), default="person", show_default=True, help="How short ones come.")
def main(setting: Setting, **what: Any) -> None:
    """Measure and print."""
    shown, found = measure(setting, **what)
    report(setting, shown, marks=found)


if __name__ == "__main__":
    main()
