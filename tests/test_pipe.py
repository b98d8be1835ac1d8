"""engine/pipe.py: frames. The threads and the end of the process are tested in test_link.py and test_worker.py."""

from __future__ import annotations

import io
import os

import pytest

from engine.pipe import BrokenFrame, Pipe, complain, read_frame
from engine.protocol import MAX_FRAME, Cancel, Declined, Seen, frame, from_engine


def test_frames_follow_one_another_to_the_end() -> None:
    stream = io.BytesIO(frame(Cancel(1, 2)) + frame(Seen(1, 2, 3)))
    assert read_frame(stream) == frame(Cancel(1, 2))[4:]
    assert read_frame(stream) == frame(Seen(1, 2, 3))[4:]
    assert read_frame(stream) is None


@pytest.mark.parametrize("data", [b"\x01\x00", b"\x05\x00\x00\x00ab", (MAX_FRAME + 1).to_bytes(4, "little")])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(BrokenFrame):
        read_frame(io.BytesIO(data))


def test_messages_pass_both_ways_in_order() -> None:
    from_parent, to_child = os.pipe()
    from_child, to_parent = os.pipe()
    pipe = Pipe(from_parent, to_parent)
    assert pipe.take(0) == [] and pipe.take(0.01) == []
    for n in range(3):
        os.write(to_child, frame(Seen(1, 1, n)))
    got = []
    while len(got) < 3:
        got += pipe.take(None)
    assert got == [Seen(1, 1, n) for n in range(3)]
    for run in range(3):
        pipe.post(Declined(1, run, "busy"))
    pipe.flush()
    with os.fdopen(from_child, "rb") as stream:
        bodies = [read_frame(stream) for _ in range(3)]
    assert [from_engine.decode(body or b"") for body in bodies] == [Declined(1, run, "busy") for run in range(3)]
    # to_child stays open: its end would end this process, as it ends an engine


def test_a_complaint_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    complain("so it is")
    assert capsys.readouterr().err == "so it is\n"
