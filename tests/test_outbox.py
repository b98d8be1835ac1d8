"""One client's pending buffer: bounded, merged for a slow reader, no beat while text is pending."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pipeline import outbox
from pipeline.effects import Finish
from pipeline.outbox import Comment, End, Outbox, Text, said
from stages.calls import Content


def text(*pieces: str, choice: int = 0) -> Text:
    return Text([[Content(piece)] for piece in pieces], choice=choice)


def parts(item: Text) -> list[str]:
    return ["".join(said(delta) for delta in part) for part in item.parts]


def taken(box: Outbox) -> list[outbox.Item]:
    return asyncio.run(box.take())


@given(pieces=st.lists(st.text(max_size=40), max_size=50), reads=st.sets(st.integers(0, 49)))
def test_nothing_is_lost_or_reordered(pieces: list[str], reads: set[int]) -> None:
    """F1: whatever the reader's pace, the text comes out whole and in order."""

    async def run() -> str:
        box, out = Outbox(), []
        for number, piece in enumerate(pieces):
            assert box.put(text(piece), 0.0)
            if number in reads:
                out += await box.take()
        box.put(End(Finish(1, "stop", True)), 0.0)
        out += await box.take()
        assert isinstance(out[-1], End)
        return "".join(p for item in out if isinstance(item, Text) for p in parts(item))

    assert asyncio.run(run()) == "".join(pieces)


def test_a_client_that_does_not_read_costs_at_most_the_limit() -> None:
    """G4: over 4 MiB pending the client is stalled; until then deltas are merged into few pieces."""
    box, sent = Outbox(), 0
    while box.put(text(*["word "] * 100), 1.0):
        sent += 500
    assert outbox.LIMIT - 500 < sent <= outbox.LIMIT
    items = [item for item in taken(box) if isinstance(item, Text)]
    assert sum(len(p) for item in items for p in parts(item)) == sent
    pieces = sum(len(item.parts) for item in items)
    assert pieces < outbox.MERGE / 5 + 2 * outbox.LIMIT / outbox.BLOCK


def test_beats_are_dropped_while_text_is_pending() -> None:
    """G4: no beat goes out while text is pending for that client."""
    box = Outbox()
    box.put(text("a"), 0.0)
    box.put(Comment("waiting"), 0.0)
    assert taken(box) == [text("a")]
    box.put(Comment("waiting"), 0.0)
    assert taken(box) == [Comment("waiting")]


def test_a_reader_that_stands_still_is_stalled() -> None:
    """G4: 120 s without a sip, and the client counts as gone."""
    box = Outbox()
    assert box.put(text("a"), 10.0)
    assert not box.stalled(10.0 + outbox.STALL_S)
    assert box.stalled(10.1 + outbox.STALL_S)
    assert not box.put(text("b"), 10.1 + outbox.STALL_S)
    taken(box)
    assert not box.stalled(1e9)
    box.sent(20.0)
    assert box.stalled(20.1 + outbox.STALL_S)
