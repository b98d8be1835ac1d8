"""A guest inside a run: answered as from an empty engine, its holder as if nobody had been there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine import memory
from engine.protocol import (
    Cancel,
    Chunk,
    Declined,
    Ended,
    Guest,
    GuestStarted,
    Measure,
    Memory,
    OwnWork,
    Resumed,
    Seen,
    ToEngine,
    Tokens,
)
from tests.fake_engine import FakeModel
from tests.guests import GUEST, HOLDER, PROMPT, fake, guest, holder, uninterrupted
from tests.test_joint import Noting
from tests.test_worker import FAKE


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the messages ------------------------------------------------------------------------------------------------------


def test_a_guest_is_served_inside_and_its_holder_goes_on() -> None:
    """K2: it enters at the next safe point, has its steps and its end, then the holder's steps go on."""
    drive = fake(drafts=False)
    drive.turns(2, holder())
    said = drive.turns(7, guest())
    assert said[0] == GuestStarted(1, GUEST, HOLDER, 18, 18 * 8)
    assert [type(m) for m in said[1:]] == [Chunk, Chunk, *[Tokens] * 5, Ended, Chunk]
    assert all(m.run == GUEST for m in said[:-1]) and [m.done for m in said[1:3]] == [8, 13]
    assert drive.end(GUEST).reason == "length" and drive.end(GUEST).kept == 0
    assert said[-1].run == HOLDER and said[-1].done == 24
    drive.until(HOLDER)
    assert drive.end(HOLDER).kept == 43 and drive.of(Resumed) == []


def test_a_guest_is_declined_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """K5: no holder, another one's, one that is about to end, a second guest, too long, no memory, a failpoint."""
    drive = fake(drafts=False)

    def reasons(*messages: ToEngine) -> list[tuple[int, str]]:
        return [(m.run, m.reason) for m in drive.turns(1, *messages) if isinstance(m, Declined)]

    assert reasons(guest()) == [(GUEST, "no_holder")]
    assert reasons(holder(), guest(of=2)) == [(GUEST, "late")]
    assert reasons(guest(tokens=[5] * 96)) == [(GUEST, "memory")]
    monkeypatch.setattr(memory, "free", lambda _: 1000)
    assert reasons(guest()) == [(GUEST, "memory")]
    monkeypatch.undo()
    assert reasons(guest(60), guest(61)) == [(61, "busy")]
    assert reasons(guest(62)) == [(62, "busy")]
    drive.until(60)
    assert reasons(guest(63)) == [] and reasons(Guest(2, guest(64).start, HOLDER)) == []


def test_a_failpoint_declines_the_nth_guest() -> None:
    """K5: for the tests of whoever asks."""
    drive = fake(drafts=False, decline_guest=2)
    drive.turns(1, holder(), guest(50))
    drive.until(50)
    assert drive.turns(1, guest(51))[0] == Declined(1, 51, "memory")
    drive.turns(1, guest(52))
    drive.until(52, HOLDER)
    assert len(drive.of(Declined)) == 1


@pytest.mark.parametrize("ending", ["stop", "length", "cancel"])
def test_a_holder_whose_end_is_computed_takes_no_guest(ending: str) -> None:
    """K5: its last round only waits to be judged, or it was cancelled: there is nothing to be served inside."""
    plain = fake(drafts=False)
    plain.turns(1, holder(max_tokens=4))
    plain.until(HOLDER)
    ids = plain.answer(HOLDER)[0]
    drive = fake(drafts=False)
    drive.deaf = (HOLDER,)
    stops = msgspec.structs.replace(holder(max_tokens=3 if ending == "length" else 9), stop_ids=ids[2:3])
    drive.turns(5, stops if ending == "stop" else holder(max_tokens=2 if ending == "length" else 9))
    if ending == "stop":
        drive.turns(3, Seen(1, HOLDER, 1))
    what = [Cancel(1, HOLDER)] if ending == "cancel" else []
    said = drive.turns(1, *what, guest())
    assert [m for m in said if isinstance(m, Declined)] == [
        Declined(1, GUEST, "no_holder" if ending == "cancel" else "late")
    ]


def test_a_guest_that_is_left_before_it_entered_is_declined() -> None:
    """K5: one answer for each guest, whatever comes in one batch."""
    drive = fake(drafts=False)
    drive.turns(1, holder())
    assert drive.turns(1, guest(), Cancel(1, GUEST))[0] == Declined(1, GUEST, "late")
    drive.turns(1, guest(51))
    assert drive.of(GuestStarted)[0].run == 51


def test_a_guest_waits_for_its_text_to_be_judged() -> None:
    """K2: one round ahead, like any run."""
    drive = fake(drafts=False)
    drive.deaf = (GUEST,)
    drive.turns(1, holder())
    said = drive.turns(20, guest())
    assert [type(m) for m in said] == [GuestStarted, Chunk, Chunk, Tokens]
    assert [m.start for m in drive.turns(5, Seen(1, GUEST, 1)) if isinstance(m, Tokens)] == [1]


def test_what_the_holder_computed_before_is_committed_meanwhile() -> None:
    """K2: its clients hear of it; nothing more is computed."""
    drive = fake(drafts=False)
    drive.deaf = (HOLDER, GUEST)
    drive.turns(9, holder(), guest(51, of=9))
    steps = len(drive.engine._loaded.model.steps)  # type: ignore[attr-defined]
    assert [m.start for m in drive.of(Tokens)] == [0]
    drive.turns(6, guest())
    said = drive.turns(6, Seen(1, HOLDER, 1))
    assert [(m.run, m.start) for m in said if isinstance(m, Tokens)] == [(HOLDER, 1)]
    drive.turns(6, Seen(1, HOLDER, 2))
    held = [start for rows, start in drive.engine._loaded.model.steps[steps:] if start >= 30]  # type: ignore[attr-defined]
    assert held == []


@pytest.mark.parametrize("when", [1, 4])
def test_a_holder_that_is_left_ends_behind_its_guest(when: int) -> None:
    """K5: the guest runs on; the rows that stay are the holder's."""
    drive = fake()
    drive.turns(when, holder())
    drive.turns(2, guest())
    said = drive.turns(2, Cancel(1, HOLDER))
    assert not [m for m in said if m.run == HOLDER]
    drive.until(GUEST, HOLDER)
    ends = [m.run for m in drive.of(Ended)]
    assert ends == [GUEST, HOLDER] and drive.end(GUEST).reason == "length"
    ended = drive.end(HOLDER)
    assert (ended.reason, ended.kept) == ("cancelled", min(8 * when, 30))
    drive.turns(1, holder(run=2))
    assert [(m.rows, m.source) for m in drive.of(Resumed)] == [(8 if when == 1 else 24, "slot")]


def test_side_slots_go_on_in_turn_with_a_guest() -> None:
    """K2, M6: a step of the guest, one of the others; never both in one."""
    drive = fake(Noting, drafts=False, parallel=3)
    model: Any = drive.engine._loaded.model
    sides = [msgspec.structs.replace(holder(run=slot, max_tokens=40), slot=slot) for slot in (2, 1)]
    drive.turns(20, holder(run=9, max_tokens=40), *sides)
    model.batches.clear()
    said = drive.turns(15, guest(of=9, max_tokens=6))
    drive.until(GUEST)
    said = said[[type(m) for m in said].index(GuestStarted) :]
    said = said[: said.index(drive.end(GUEST))]
    runs = [m.run for m in said if isinstance(m, Chunk | Tokens)]
    assert runs.count(GUEST) == 2 + 6 and runs.count(9) <= 1 and runs.count(1) >= 5
    steps = [[start < 18 for _, start, _ in batch] for batch in model.batches]  # only the guest has rows down there
    assert steps[:13] == [[True], [False, False]] * 6 + [[True]]  # of six tokens the first comes with the prompt
    assert {m.shared for m in said if isinstance(m, Tokens) and m.run in (1, 2)} == {2}
    assert {m.shared for m in said if isinstance(m, Tokens) and m.run == GUEST} == {1}
    drive.until(9, 1, 2)
    alone = fake(drafts=False, parallel=3)
    alone.turns(20, holder(run=9, max_tokens=40), *sides)
    alone.until(9, 1, 2)
    assert [drive.answer(run) for run in (9, 1, 2)] == [alone.answer(run) for run in (9, 1, 2)]


def test_nothing_of_a_guest_stays_and_nobody_hears_of_its_rows() -> None:
    """K3: the next run finds what the holder left, and no guest finds what was resident."""
    drive = fake(drafts=False)
    drive.turns(1, holder())
    drive.turns(5, guest(tokens=PROMPT, keep_end=True))
    inside = drive.engine._slots._guests.run
    assert inside is not None and inside.answer and inside.end is None
    drive.until(GUEST, HOLDER)
    assert drive.of(Resumed) == [] and [m.done for m in drive.of(Chunk) if m.run == GUEST] == [8, 16, 24, 30]
    drive.turns(1, holder(run=2, tokens=[*PROMPT, *drive.answer(HOLDER)[0]]))
    assert [(m.rows, m.source) for m in drive.of(Resumed)] == [(43, "slot")]
    assert all(m.rows != 18 for m in drive.line.resident if not isinstance(m, OwnWork))  # type: ignore[union-attr]


def test_a_copy_is_counted_while_there_is_one() -> None:
    """J2, K4: and freed at once."""
    drive = fake(drafts=False)
    drive.turns(2, holder())

    def allocated() -> int:
        [read] = [m for m in drive.turns(1, Measure(1, 7, 9)) if isinstance(m, Memory)]
        return read.allocated

    before = allocated()
    drive.turns(1, guest())
    assert allocated() == before + 18 * 8
    drive.until(GUEST)
    assert allocated() == before


def test_a_guest_is_no_sample_of_what_rounds_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """K6: neither threads nor the shapes of drafts hear of its steps, and no drafter of its tokens."""
    drive = fake()
    drive.turns(6, holder())
    took: list[Any] = []
    monkeypatch.setattr(drive.engine._threads, "took", took.append)
    monkeypatch.setattr(drive.engine._drafting, "took", lambda *_: took.append(_))
    monkeypatch.setattr(drive.engine._drafting, "drafts", lambda *_: took.append(_))
    drive.turns(6, guest())
    assert len([m for m in drive.of(Tokens) if m.run == GUEST]) > 2 and took == []


def test_a_disk_write_stops_where_a_guest_would_overwrite_it(tmp_path: Path) -> None:
    """K5: what is still to copy the rows stops there and is written anew behind the holder, with its rows."""
    weights = tmp_path / "fake"
    weights.write_bytes(b"weights")
    config = msgspec.structs.replace(
        FAKE, model=str(weights), disk_cache_bytes=1 << 20, data_dir=str(tmp_path), prefix_chunk=8, park_bytes=0
    )
    first = fake(drafts=False, config=config)
    first.turns(1, holder(run=9))
    first.until(9)
    residency = first.engine._keeper._residency
    first.deaf = (HOLDER, GUEST)
    long = [*PROMPT, *first.answer(9)[0]]
    first.turns(1, holder(tokens=long, max_tokens=4))
    assert residency.busy
    first.turns(12, guest())  # the guest waits to be judged, and pieces could be written
    assert len([m for m in first.of(Tokens) if m.run == GUEST]) == 1 and not residency.busy
    first.deaf = ()
    first.turns(1, *(Seen(1, run, 1) for run in (HOLDER, GUEST)))
    first.until(GUEST, HOLDER)
    assert residency.busy
    while residency.busy:
        first.turns(1)
    begun = [m.begun for m in first.line.resident if isinstance(m, OwnWork) and m.what == "disk write"]
    assert begun.count(True) == begun.count(False) > 0
    asked = holder(run=3, tokens=[*long, 5])
    again = fake(drafts=False, config=config)
    again.turns(1, asked)
    assert [(m.rows, m.source) for m in again.of(Resumed)] == [(40, "disk")]
    again.until(3)
    assert again.answer(3) == uninterrupted(FakeModel, asked)
