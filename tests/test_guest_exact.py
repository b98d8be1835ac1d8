"""K4 in the loop: whoever was inside a run and however it ended, the run is an uninterrupted one's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import memory
from engine.drafting import Drafting
from engine.load import Loaded
from engine.protocol import Cancel, Chunk, Config, Declined, Ended, Grammar, GuestStarted, Resumed, Sampling, Tokens
from engine.speculate.shape import Shapes
from engine.weights.embedded import embedded_model
from tests import hybrids
from tests.checkpoints import write_gguf
from tests.drafters import Forced
from tests.engine_client import PATIENCE, Client
from tests.fake_engine import POISON, FakeModel, StateModel
from tests.guests import ASKED, GUEST, HOLDER, PROMPT, TRUTH, Answer, Drive, fake, guest, holder, uninterrupted
from tests.test_grammar import BOUNDED, END, KNOWN, MASKS, Wide, text
from tests.test_joint import layer_drafts, made
from tests.test_worker import FAKE, GREEDY


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- ends that go wrong ------------------------------------------------------------------------------------------------

FAKES = {"rows": FakeModel, "states": StateModel}


@pytest.mark.parametrize("model", FAKES.values(), ids=FAKES)
@pytest.mark.parametrize("how", ["cancelled", "chunk", "forward", "choice"])
def test_a_guest_that_ends_badly_harms_its_holder_in_nothing(model: type[FakeModel], how: str) -> None:
    """K4, F6: cancelled in the middle, or a fault in its prefill, its round or its choice: it ends alone."""
    asked = holder(logprobs=2)
    expected = uninterrupted(model, asked)
    visit = {
        "cancelled": guest(max_tokens=7),
        "chunk": guest(tokens=[4] * 10 + [POISON]),
        "forward": guest(sampling=Sampling(temperature=0, logit_bias={POISON: 99.0})),  # its second step raises
        "choice": guest(sampling=Sampling(temperature=0, logit_bias={5: float("nan")})),
    }[how]
    for when in (1, 5):
        drive = fake(model)
        drive.turns(when, asked)
        drive.turns(4, visit)
        if how == "cancelled":
            drive.turns(1, Cancel(1, GUEST))
        drive.until(GUEST)
        drive.turns(1, guest(51))  # its place is free as soon as its end is said
        drive.until(51, HOLDER)
        assert [m.reason for m in drive.of(Ended) if m.run != HOLDER] == [
            "cancelled" if how == "cancelled" else "fault",
            "length",
        ]
        assert drive.end(GUEST).kept == 0 and drive.answer(HOLDER) == expected
        cache: Any = drive.engine._loaded.caches[0]
        kept = drive.end(HOLDER).kept
        assert cache.rows == 96 and cache.tokens[:kept].tolist() == [*PROMPT, *expected[0]][:kept]


def test_checkpoints_are_the_holders_alone() -> None:
    """K3, G5: of a guest's prompt and answer none is made: who goes on from one has the holder's state."""
    config = msgspec.structs.replace(FAKE, prefix_chunk=40, park_bytes=0)
    tokens = PROMPT * 2 + PROMPT[:12]
    drive = fake(StateModel, drafts=False, config=config)
    drive.turns(2, holder(tokens=tokens))
    drive.turns(1, guest(tokens=(ASKED * 5)[:60], max_tokens=10))
    drive.until(GUEST, HOLDER)
    after = holder(run=2, tokens=[*tokens[:70], 9, 9])
    drive.turns(1, after)
    drive.until(2)
    assert [m.rows for m in drive.of(Resumed)] == [40]
    assert drive.answer(2) == uninterrupted(StateModel, after)


@pytest.mark.parametrize("model", FAKES.values(), ids=FAKES)
def test_the_next_choice_begins_at_the_prompts_end(model: type[FakeModel]) -> None:
    """F11, K4: what is kept of a prompt's end outlives a guest inside the choice before."""
    drive = fake(model)
    for choice in (0, 1):
        asked = msgspec.structs.replace(holder(run=choice + 1, choice=choice), keep_end=choice == 0)
        drive.turns(7 if choice == 0 else 1, asked)
        if choice == 0:
            drive.turns(1, guest())
        drive.until(choice + 1)
        assert drive.answer(choice + 1) == uninterrupted(model, asked)
    assert [(m.rows, m.source) for m in drive.of(Resumed)] == [(30, "end")] and len(drive.of(GuestStarted)) == 1


def test_rows_that_cannot_be_put_back_end_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """K4, I6: by a fault, behind its guest; the slot begins anew."""
    drive = fake(StateModel)
    drive.turns(5, holder())
    cache: Any = drive.engine._loaded.caches[0]

    def broken(loan: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(cache, "take_back", broken)
    drive.turns(1, guest())
    drive.until(GUEST, HOLDER)
    assert [(m.run, m.reason, m.kept, m.why) for m in drive.of(Ended)] == [
        (GUEST, "length", 0, ""),
        (HOLDER, "fault", 0, "RuntimeError"),
    ]
    monkeypatch.undo()
    drive.turns(1, holder(run=2, logprobs=0))
    drive.until(2)
    assert drive.answer(2) == uninterrupted(StateModel, holder(run=2, logprobs=0)) and drive.of(Resumed) == []


def test_a_copy_that_cannot_be_made_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    """K5: out of memory in the copy itself: the holder has lost nothing."""
    drive = fake(StateModel)
    drive.turns(5, holder(logprobs=0))

    def full(rows: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(drive.engine._loaded.caches[0], "lend", full)
    assert Declined(1, GUEST, "memory") in drive.turns(1, guest())
    drive.until(HOLDER)
    assert drive.answer(HOLDER) == uninterrupted(StateModel, holder(logprobs=0))


def test_no_guest_where_the_peak_would_be_passed() -> None:
    """K5: what is reserved, the copy and its workspace stay under the peak, where that is known."""
    for peak, enters in ((1, False), (1 << 60, True)):
        drive = fake(drafts=False)
        ready = msgspec.structs.replace(drive.engine._loaded.ready, peak_limit=peak)
        object.__setattr__(drive.engine._loaded, "ready", ready)
        drive.turns(1, holder(), guest())
        assert bool(drive.of(GuestStarted)) == enters and bool(drive.of(Declined)) != enters


def test_a_process_is_held_to_the_peak_by_what_the_engine_accounts_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """K5, J1: as at the memory gate: on the CPU an interpreter and mapped files are no part of it."""
    copy, workspace, held = 18 * 8, 5 * 13, 1000 + 96 * 8
    for short, enters in ((0, True), (1, False)):
        drive = fake(drafts=False)
        monkeypatch.setattr(memory, "reserved", lambda device: 1 << 40)
        ready = msgspec.structs.replace(drive.engine._loaded.ready, peak_limit=held + copy + workspace - short)
        object.__setattr__(drive.engine._loaded, "ready", ready)
        drive.turns(1, holder(), guest())
        assert bool(drive.of(GuestStarted)) == enters
        monkeypatch.undo()


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truths() -> dict[str, Answer]:
    """Of each fake model: what the holder writes alone, without drafts."""
    return {name: uninterrupted(model, holder(logprobs=2)) for name, model in FAKES.items()}


visits = st.lists(
    st.tuples(
        st.integers(0, 9),  # turns before it
        st.integers(1, 30),  # its prompt
        st.integers(0, 9),  # its tokens
        st.sampled_from([0.0, 0.8]),
        st.integers(0, 12),  # turns until it is cancelled; many: never
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FAKES)), visits)
def test_guests_whenever_they_come_change_nothing(
    truths: dict[str, Answer], name: str, visits: list[tuple[int, int, int, float, int]]
) -> None:
    """K4, F8: drafts and pending commits or not: the holder's answer is bit for bit an uninterrupted one's."""
    TRUTH[:] = truths[name][0]
    drive = fake(FAKES[name])
    drive.turns(1, holder(logprobs=2))
    asked = [
        guest(60 + at, tokens=ASKED[:2] * prompt, max_tokens=most, logprobs=1, sampling=Sampling(heat, seed=at))
        for at, (_, prompt, most, heat, _) in enumerate(visits)
    ]
    for visit, (wait, *_, left) in zip(asked, visits, strict=True):
        drive.turns(wait)
        drive.turns(1, visit)
        if left < 10:
            drive.turns(left)
            drive.turns(1, Cancel(1, visit.start.run))
        drive.until(visit.start.run)
    drive.until(HOLDER)
    assert drive.answer(HOLDER) == truths[name]
    for visit in asked:
        run = visit.start.run
        over = [m for m in drive.said if isinstance(m, Ended | Declined) and m.run == run]
        assert len(over) == 1
        ids, entries = drive.answer(run)
        mine, logprobs = uninterrupted(FAKES[name], visit.start)
        assert (ids, entries) == (mine[: len(ids)], logprobs[: len(ids)])
        if isinstance(over[0], Ended) and over[0].reason != "cancelled":
            assert ids == mine


def tiny(path: Path, drafts: bool, drafting: Any = None) -> Drive:
    engine, line = made(path, 1, drafts, drafting if drafts else None)
    return Drive(engine, line)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_guest_asked_for_binds_it_as_any_run(seed: int) -> None:
    """K3, E3: grammar, stop ids, min_tokens and log-probabilities: the answer of a run of its own."""
    harmless = Sampling(seed=seed, logit_bias={POISON: -99.0})  # it is a letter of this vocabulary
    wish = {"max_tokens": 40, "logprobs": 2, "min_tokens": 3, "sampling": harmless}
    bound = guest(stop_ids=[END], grammar=Grammar(text("schema", BOUNDED)), **wish)
    free = guest(51, stop_ids=list(range(100, 200)), **wish)
    expected = {}
    for visit in (bound, free):
        plain = knowing(fake(Wide, drafts=False))
        plain.turns(1, visit.start)
        plain.until(visit.start.run)
        expected[visit.start.run] = told(plain, visit.start.run)
    drive = knowing(fake(Wide))
    drive.turns(4, holder(max_tokens=30, sampling=harmless))
    for visit in (bound, free):
        drive.turns(1, visit)
        drive.until(visit.start.run)
        assert told(drive, visit.start.run) == expected[visit.start.run]
    assert len(drive.of(GuestStarted)) == 2
    assert len(expected[51][0][0]) >= 3 and [end for _, end in expected.values()] == ["stop", "stop"]


def knowing(drive: Drive) -> Drive:
    """With the vocabulary of the wide model's grammars."""
    for place in (drive.engine._slots, drive.engine._slots._guests):
        place._vocabulary, place._masks = KNOWN, MASKS
    return drive


def told(drive: Drive, run: int) -> tuple[Answer, str]:
    return drive.answer(run), drive.end(run).reason


MODELS = ("dense F32", "dense Q4_0", "hybrid", "hybrid that guesses")


@pytest.mark.parametrize("kind", MODELS)
def test_a_models_holder_and_guests_answer_as_alone(tmp_path: Path, kind: str) -> None:
    """K3, K4, F7, F8: tiny models, bit for bit, log-probabilities too: at every safe point from the first to the last.

    Between prefill chunks, between rounds, with drafts' commits pending; the guest's own answer is what it gets from an
    empty engine, with a seed, penalties and log-probabilities of its own.
    """
    if kind.startswith("dense"):
        path = write_gguf(tmp_path / "tiny.gguf", {"": kind.split()[1]})
    else:
        path = hybrids.save(hybrids.reference(), tmp_path, mtp=kind.endswith("guesses"))
    asked = holder(logprobs=2, tokens=PROMPT + PROMPT[5:25])
    own = Sampling(temperature=0.7, seed=3, presence_penalty=0.5, repetition_penalty=1.2)
    visit = guest(sampling=own, logprobs=1, max_tokens=4, tokens=ASKED + ASKED[:6])
    plain = tiny(path, False)
    plain.turns(1, asked)
    plain.until(HOLDER)
    expected = plain.answer(HOLDER)
    empty = tiny(path, False)
    empty.turns(1, visit.start)
    empty.until(GUEST)
    TRUTH[:] = expected[0]
    drive = tiny(path, True, layer_drafts if kind.endswith("guesses") else knows)
    where = []
    for at in range(1, 13):
        run = 100 + at
        drive.turns(at, msgspec.structs.replace(asked, run=run, hashes=[]))
        one = msgspec.structs.replace(visit, start=msgspec.structs.replace(visit.start, run=200 + at), holder=run)
        where += [type(m) for m in drive.turns(1, one) if isinstance(m, GuestStarted | Declined)]
        drive.until(200 + at, run)
        assert drive.answer(run) == expected, at
        if where[-1] is GuestStarted:
            assert drive.answer(200 + at) == empty.answer(GUEST)
        other = [(token + 1) % 40 for token in PROMPT[:20]]  # so that the next one's prompt is read again
        drive.turns(1, holder(run=300 + at, tokens=other, max_tokens=0))
        drive.until(300 + at)
    assert where.count(GuestStarted) >= 6
    ends = [m for m in drive.of(Ended) if 100 < m.run < 200]
    assert sum(m.accepted for m in ends) > 0 or kind.endswith("guesses")
    assert sum(m.drafted - m.accepted for m in ends) > 0


def knows(loaded: Loaded) -> Drafting:
    """As ``forced``, of this test's longer prompt."""
    shapes = Shapes({1: 1.0}, learned=False, always=True)
    return Drafting(shapes, 32, lambda *_: Forced(loaded.model.vocab, PROMPT + PROMPT[5:25], TRUTH))


# -- the process, with the embedded model ------------------------------------------------------------------------------

EMBEDDED = embedded_model()


@pytest.mark.e2e
@pytest.mark.skipif(EMBEDDED is None, reason="the embedded model is not installed")
def test_the_embedded_model_serves_guests_inside_a_long_run() -> None:
    """K2, K4: in its prefill and in its answer, over the pipe, with drafts: nobody's answer is another."""
    config = Config(1, str(EMBEDDED), device="cpu", threads=1, max_len=1024, safe_rows=64, draft_shape="fixed")
    client = Client(config)
    per_row = client.ready().kv_bytes // 1024
    long = holder(tokens=[100 + i % 90 for i in range(500)], max_tokens=30, logprobs=0, sampling=GREEDY)
    short = [guest(50 + at, tokens=[300 + at + i % 70 for i in range(150)], max_tokens=9) for at in range(2)]
    said: dict[int, list[int]] = {}

    def listen(message: Any) -> None:
        client.acknowledge(message)
        if isinstance(message, Tokens):
            said.setdefault(message.run, []).extend(message.ids)

    alone = [client.answer(msgspec.structs.replace(one, run=run))[0] for one, run in ((long, 90), (long, 91))]
    assert alone[0] == alone[1]
    alone += [client.answer(msgspec.structs.replace(one.start, run=92))[0] for one in short]
    client.link.send(msgspec.structs.replace(long, tokens=long.tokens[::-1], run=93, max_tokens=0))
    client.until(Ended)
    client.link.send(long)
    for one, when in zip(short, (Chunk, Tokens), strict=True):
        client.until(when, listen)
        client.link.send(one)
        got = client.until(Ended, listen)
        began = next(m for m in got if isinstance(m, GuestStarted))
        assert (began.holder, began.rows, began.nbytes) == (HOLDER, 159, 159 * per_row)
        assert isinstance(got[-1], Ended) and got[-1].run == one.start.run
    client.until(Ended, listen)
    client.link.close(PATIENCE)
    assert [said[HOLDER], said[50], said[51]] == [alone[0], *alone[2:]]
