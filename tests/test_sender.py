"""engine/sender.py: everything arrives in order, nobody waits for a full pipe, a broken one is told once."""

from __future__ import annotations

import os
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sender import Sender


def drained(source: int, length: int) -> bytes:
    got = b""
    while len(got) < length:
        got += os.read(source, 1 << 16)
    return got


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 200_000), max_size=12))
def test_everything_arrives_in_order(sizes: list[int]) -> None:
    source, sink = os.pipe()
    sender = Sender(sink, lambda: None)
    data = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    for part in data:
        sender.send(part)  # nobody reads yet: a caller that waited would wait for ever
    assert drained(source, sum(sizes)) == b"".join(data)
    sender.flush(30)
    sender.close()
    os.close(source), os.close(sink)


def test_a_small_frame_needs_no_thread() -> None:
    source, sink = os.pipe()
    sender = Sender(sink, lambda: None)
    before = threading.active_count()
    for _ in range(100):
        sender.send(b"seen")
    assert threading.active_count() == before
    assert os.read(source, 4_000) == b"seen" * 100
    os.close(source), os.close(sink)


def test_a_broken_pipe_is_told_once_and_takes_what_follows() -> None:
    """I11: to a dead engine a message is lost, and nobody waits."""
    told = []
    source, sink = os.pipe()
    sender = Sender(sink, lambda: told.append(1))
    os.close(source)
    for _ in range(3):
        sender.send(b"x")
    sender.flush(30)
    sender.close()
    assert told == [1]
    os.close(sink)


def test_close_ends_a_full_pipe() -> None:
    source, sink = os.pipe()
    sender = Sender(sink, lambda: None)
    sender.send(b"x" * (1 << 20))
    sender.close()
    sender.send(b"y")
    os.close(source), os.close(sink)
