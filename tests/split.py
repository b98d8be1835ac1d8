"""Answers for the text stage as the engine gives them: ids, and the turns its own detector finds in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

from engine.pieces import Vocabulary
from engine.protocol import Thinking, Turn
from engine.reasoning import Reasoning
from stages.calls import Delta, Dropped, join
from stages.message import assembled
from stages.text import Piece, Reading, TextStage

OPEN, CLOSE = 256, 257
"""The special tokens of those names; ids below are bytes."""
FIRST = 258
"""What tokens of several bytes begin with."""


class Answer:
    """``parts``: strings, bytes, or the ids OPEN and CLOSE, a token each."""

    def __init__(self, parts: Sequence[str | bytes | int], state: str = "open") -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + [b"", b""]
        self.ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                self.ids.append(part)
            else:
                self.ids.append(len(self.pieces))
                self.pieces.append(part.encode() if isinstance(part, str) else part)
        found = Vocabulary(self.pieces, frozenset([OPEN]), frozenset([CLOSE]), (CLOSE,))
        detector = Reasoning(Thinking(state), found, 1 << 20)
        self.turns: list[Turn] = [turn for token in self.ids for turn in detector.feed(token)]
        self.count = detector.count

    def pushed(self, reading: Reading, sizes: Sequence[int] = ()) -> list[Piece]:
        """What each push says, and the finish; ``sizes``: how many tokens come at a time, the rest at once."""
        stage, pieces, at = TextStage(self.pieces, reading), [], 0
        for size in [*sizes, len(self.ids)]:
            turns = [turn for turn in self.turns if at <= turn.at < at + size]
            pieces.append(stage.push(self.ids[at : at + size], turns))
            at += size
        return [*pieces, stage.finish()]


def deltas(pieces: Sequence[Piece]) -> list[Delta]:
    """All that was said, neighbours joined."""
    parts = [part for piece in pieces for part in piece.parts]
    assert all(part and not any(isinstance(delta, Dropped) for delta in part) for part in parts)
    return join([delta for part in parts for delta in part])


Said = tuple[str | None, str, list[tuple[int, str, str]]]


def said(text: str, reading: Reading) -> Said:
    """Content, reasoning and calls: the one result that all cuts give."""
    whole = message([text], reading)
    for parts in cuts(text, Random(len(text))):
        assert message(parts, reading) == whole, parts
    return whole


def message(parts: Sequence[str | bytes | int], reading: Reading) -> Said:
    return assembled(deltas(Answer(parts, reading.state).pushed(reading, [1] * len(parts))))


def cuts(text: str, rng: Random, halves: int = 150) -> Iterator[list[str]]:
    """By character, cut in two (a sample of long ones), and in random pieces."""
    yield list(text)
    places = range(len(text) + 1)
    for at in places if len(text) <= halves else sorted(rng.sample(places, halves)):
        yield [text[:at], text[at:]]
    for _ in range(10):
        yield [text[a:b] for a, b in pairwise([0, *sorted(rng.choices(places, k=rng.randint(1, 12))), len(text)])]
