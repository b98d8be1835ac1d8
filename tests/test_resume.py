"""What stays in a slot from one run to the next, in the loop: the next begins there and answers as if it had not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import (
    Cancel,
    Chunk,
    Ended,
    OwnWork,
    Resident,
    Resumed,
    Sampling,
    Seen,
    Start,
    Tokens,
)
from engine.worker import SOON_S
from tests import hybrids
from tests.checkpoints import write_gguf
from tests.fake_engine import POISON, FakeModel, StateModel
from tests.test_joint import driven, forced, made
from tests.test_worker import FAKE, GREEDY, Bench

PARKING = msgspec.structs.replace(FAKE, park_bytes=1 << 20, prefix_chunk=16)


class Dense(FakeModel):
    """Its rows are the same bits in any step."""

    alike = 1 << 20


MODELS = pytest.mark.parametrize("model", [Dense, StateModel])


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def asked(run: int, tokens: list[int], max_tokens: int = 8, **more: Any) -> Start:
    sampling = more.pop("sampling", Sampling(temperature=0.9, seed=3))
    return Start(1, run, more.pop("slot", 0), tokens, sampling, max_tokens, more.pop("stop_ids", []), **more)


def prompt(seed: int, rows: int) -> list[int]:
    return [3 + (seed * 13 + i * i + i) % 40 for i in range(rows)]


def bench(model: Any, drafts: bool = True) -> Bench:
    made = Bench(config=PARKING, made=lambda *_, **__: model(), drafting=forced() if drafts else None)
    made.loaded.model.strict = True  # type: ignore[attr-defined]
    return made


def fresh(model: Any, start: Start) -> list[int]:
    return bench(model, drafts=False).answer(start)


def resumed(bench: Bench, run: int) -> list[tuple[int, str]]:
    return [(m.rows, m.source) for m in bench.said if isinstance(m, Resumed) and m.run == run]


@MODELS
def test_the_next_turn_begins_behind_the_last_answer(model: Any) -> None:
    """G2, G5, F8: its cached rows reach the answer's last token, and it answers as a fresh engine does."""
    one = bench(model)
    first = asked(1, prompt(1, 20))
    answer = one.answer(first)
    ended = next(m for m in one.said if isinstance(m, Ended))
    second = asked(2, [*first.tokens, *answer, 9, 8, 7], 12)
    assert one.answer(second) == fresh(model, second)
    assert resumed(one, 2) == [(ended.kept, "slot")] and ended.kept >= 20 + len(answer) - 1
    assert next(m.done for m in one.said if isinstance(m, Chunk) and m.run == 2) > ended.kept


@pytest.mark.parametrize(("park", "parks"), [(1 << 20, True), (0, False)])
@MODELS
def test_a_side_slots_end_says_whether_its_rows_are_parked(model: Any, park: int, parks: bool) -> None:
    """G2: its rows are offered to the park, else lost: ``Ended.kept`` says which, and the next turn finds it so."""
    config = msgspec.structs.replace(PARKING, park_bytes=park)
    one = Bench(2, config, made=lambda *_, **__: model())
    first = asked(1, prompt(1, 40), slot=1)
    answer = one.answer(first)
    [ended] = [m for m in one.said if isinstance(m, Ended)]
    assert (ended.kept >= 40) is parks and (ended.kept == 0) is not parks
    one.answer(asked(2, [*first.tokens, *answer, 9], slot=1))
    assert resumed(one, 2) == ([(ended.kept, "park")] if parks else [])


@MODELS
def test_choices_that_were_left_hold_nothing(model: Any) -> None:
    """G2, F11: a side slot's rows are parked as those of any run; no prompt's end stays for a choice nobody wants."""
    one = Bench(2, PARKING, made=lambda *_, **__: model())
    first = asked(1, prompt(1, 40), slot=1, keep_end=True)
    one.turns(8, first)
    one.turns(2, Cancel(1, 1))
    [ended] = [m for m in one.said if isinstance(m, Ended)]
    assert ended.reason == "cancelled" and ended.kept >= 40
    assert one.engine._slots.kept_ends() == [] and one.engine._keeper._ends == [None, None]
    one.answer(asked(2, [*first.tokens, 9]))
    assert resumed(one, 2) == [(40, "park")]


@MODELS
def test_the_same_request_again_computes_one_row(model: Any) -> None:
    """G2, F8: at most all rows but one are taken, with a recurrent state those up to its last checkpoint."""
    one = bench(model)
    first = asked(1, prompt(1, 40))
    assert one.answer(first) == one.answer(msgspec.structs.replace(first, run=2)) == fresh(model, first)
    assert resumed(one, 2) == [(39 if model is Dense else 32, "slot")]


def test_where_a_cut_changes_bits_a_prompt_is_cut_as_before() -> None:
    """F8, G5: of a prompt that was read, whole prefill steps are taken over; what goes on behind an answer, there."""
    one = bench(FakeModel)
    first = asked(1, prompt(1, 31))
    answer = one.answer(first)
    one.answer(msgspec.structs.replace(first, run=2))
    assert resumed(one, 2) == [(24, "slot")]
    model: Any = one.loaded.model
    assert (7, 24) in model.steps[-20:]
    kept = [m.kept for m in one.said if isinstance(m, Ended)][-1]
    one.answer(asked(3, [*first.tokens, *answer, 9, 9]))
    assert resumed(one, 3) == [(kept, "slot")]


@MODELS
def test_a_prefill_that_was_cut_goes_on_where_it_stopped(model: Any) -> None:
    """G2, G1: a client that left and came back."""
    one = bench(model)
    first = asked(1, prompt(2, 50))
    one.turns(3, first)
    one.turns(1, Cancel(1, 1))
    again = msgspec.structs.replace(first, run=2)
    assert one.answer(again) == fresh(model, again)
    assert resumed(one, 2) == [(24, "slot")]


@MODELS
@pytest.mark.parametrize("keep", [0, 1, 2, 3, None])
def test_a_stop_found_in_the_text_leaves_what_was_sent(model: Any, keep: int | None) -> None:
    """G5: Cancel(keep=n) inside the round under way: the next turn begins behind the n-th token, and no other row."""
    one = bench(model)
    first = asked(1, prompt(3, 20), 30)
    one.line.inbox.append(first)
    while sum(len(m.ids) for m in one.said if isinstance(m, Tokens)) < 4:
        one.turns(1, ack=True)
    rounds = [m for m in one.said if isinstance(m, Tokens)]
    answer = [token for m in rounds for token in m.ids]
    n = len(answer) if keep is None else len(answer) - keep
    one.turns(1, Cancel(1, 1, n))
    ended = next(m for m in one.said if isinstance(m, Ended))
    assert ended.kept == min(20 + n, 20 + len(answer)) and ended.generated == len(answer)
    second = asked(2, [*first.tokens, *answer[:n], 9, 9, 9], 12)
    assert one.answer(second) == fresh(model, second)
    if model is Dense or n >= rounds[-1].start - 1:
        assert resumed(one, 2) == [(ended.kept, "slot")]
    else:  # a state goes back into the round before, or to the prompt's end
        assert resumed(one, 2) == [(20, "slot")]


@MODELS
@pytest.mark.parametrize("rows", [88, 70, 64, 63])
def test_a_stop_many_rounds_behind_costs_few_rows(model: Any, rows: int) -> None:
    """G5: a stop of many tokens: a state goes on from the answer's last checkpoint before it, not from the prompt."""
    one = bench(model, drafts=False)
    first = asked(1, prompt(3, 20), 75)
    one.line.inbox.append(first)
    while sum(len(m.ids) for m in one.said if isinstance(m, Tokens)) < 70:
        one.turns(1, ack=True)
    answer = [token for m in one.said if isinstance(m, Tokens) for token in m.ids]
    one.turns(1, Cancel(1, 1, rows - 20))
    second = asked(2, [*first.tokens, *answer[: rows - 20], 9], 4)
    assert one.answer(second) == fresh(model, second)
    there = {88: 88, 70: 64, 64: 64, 63: 20}[rows]
    assert resumed(one, 2) == [(rows if model is Dense else there, "slot")]


@MODELS
def test_checkpoints_of_an_answer_are_two(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """G5: and a prompt's stay beside them."""
    monkeypatch.setattr("engine.keeper.APART", 8)
    one = bench(model, drafts=False)
    one.answer(asked(1, prompt(3, 40), 45))
    marks = one.engine._keeper._residency._slots[0].marks
    assert [mark.rows for mark in marks] == ([] if model is Dense else [16, 32, 40, 72, 80])


@MODELS
def test_nothing_is_left_of_a_fault(model: Any) -> None:
    """F6, G5: no row of that slot is trusted."""
    one = bench(model)
    poisoned = asked(1, prompt(4, 30), sampling=Sampling(temperature=0, logit_bias={POISON: 99.0}))
    one.turns(20, poisoned, ack=True)
    again = asked(2, poisoned.tokens)
    assert one.answer(again) == fresh(model, again) and resumed(one, 2) == []
    assert [m.rows for m in one.line.resident if isinstance(m, Resident)][:1] != [30]


@MODELS
def test_two_conversations_take_turns_in_a_slot(model: Any) -> None:
    """G2: the one pushed out comes back from memory, and both answer as on fresh engines."""
    one = bench(model)
    turns = {seed: asked(seed, prompt(seed, 40)) for seed in (1, 2)}
    for _ in range(3):
        for seed, start in turns.items():
            answer = one.answer(start)
            assert answer == fresh(model, start)
            turns[seed] = msgspec.structs.replace(start, run=start.run + 2, tokens=[*start.tokens, *answer, 7])
    sources = [m.source for m in one.said if isinstance(m, Resumed)]
    assert sources == ["park"] * 4
    places = {m.where for m in one.line.resident if isinstance(m, Resident)}
    assert places == {"slot", "park"} and any(isinstance(m, OwnWork) for m in one.line.resident)


@MODELS
def test_choices_and_turns_after_them(model: Any) -> None:
    """F11, G2: a kept end, then another turn, with a recurrent state put back each time."""
    one = bench(model)
    for choice in range(3):
        start = asked(choice + 1, prompt(5, 30), choice=choice, keep_end=choice < 2)
        assert one.answer(start) == fresh(model, start)
    assert [m.source for m in one.said if isinstance(m, Resumed)] == ["end", "end"]
    last = asked(9, [*prompt(5, 30), 4, 4])
    assert one.answer(last) == fresh(model, last) and resumed(one, 9)


@MODELS
@settings(max_examples=25)
@given(data=st.data())
def test_whatever_came_before_an_answer_is_its_own(model: Any, data: st.DataObject) -> None:
    """F8, G2, G5: any series of runs, cut anywhere, leaves every later answer as it is on a fresh engine."""
    one = bench(model)
    texts = [prompt(1, 20), prompt(2, 37)]
    for run in range(1, 6):
        tokens = data.draw(st.sampled_from(texts))[: data.draw(st.sampled_from([9, 20, 33, 60]))]
        start = asked(run, tokens, data.draw(st.integers(0, 9)), keep_end=data.draw(st.booleans()))
        at = len(one.said)
        if data.draw(st.booleans()):
            one.turns(data.draw(st.integers(1, 9)), start, ack=True)
            one.turns(1, Cancel(1, run, data.draw(st.sampled_from([None, 0, 1, 3]))))
        else:
            assert one.answer(start) == fresh(model, start)
        got = [t for m in one.said[at:] if isinstance(m, Tokens) for t in m.ids]
        assert next(m.reason for m in one.said[at:] if isinstance(m, Ended)) != "fault"
        texts.append([*tokens, *got, *prompt(run, 3)][:70])


# -- a model -----------------------------------------------------------------------------------------------------------


def test_a_resumed_answer_is_the_unresumed_one_bit_for_bit(tmp_path: Path) -> None:
    """G2, F8, F7: a tiny model over three turns: equal log-probabilities, with drafts and without the cache."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": "Q4_0"})
    engine = made(path, 1, True, forced())
    tokens = prompt(1, 30)
    for run in range(1, 4):
        start = asked(run, tokens, 12, logprobs=1)
        got = driven(*engine, start)[run]
        said = [m for m in engine[1].said if isinstance(m, Resumed)]
        assert got == driven(*made(path, 1, False), start)[run]
        assert [m.source for m in said] == (["slot"] if run > 1 else [])
        if said:
            assert said[0].rows >= len(tokens) - 4
        tokens = [*tokens, *got[0], 5, 6, 7]


def test_a_hybrid_model_goes_on_behind_a_stop(tmp_path: Path) -> None:
    """G5, G2: Cancel(keep=n) in the round behind; the next turn begins there, and answers as a fresh engine does."""
    path = hybrids.save(hybrids.reference(), tmp_path)
    engine, line = made(path, 1, True, forced())
    first = asked(1, prompt(1, 30), 40, sampling=GREEDY)
    line.inbox.append(first)
    while sum(len(m.ids) for m in line.said if isinstance(m, Tokens)) < 5:
        at = len(line.said)
        engine.turn()
        line.inbox += [Seen(1, 1, m.start + len(m.ids)) for m in line.said[at:] if isinstance(m, Tokens)]
    answer = [token for m in line.said if isinstance(m, Tokens) for token in m.ids]
    line.inbox.append(Cancel(1, 1, len(answer) - 1))
    engine.turn()
    second = asked(2, [*first.tokens, *answer[:-1], 4, 5, 6], 16, sampling=GREEDY)
    got = driven(engine, line, second)[2]
    assert [m.rows for m in line.said if isinstance(m, Resumed)] == [30 + len(answer) - 1]
    assert got == driven(*made(path, 1, False), second)[2]


# -- files, and what goes wrong ----------------------------------------------------------------------------------------


@MODELS
def test_a_prefix_is_there_after_a_restart(model: Any, tmp_path: Path) -> None:
    """G2: written while nothing else is to be done, told as own work, found by the next process."""
    weights = tmp_path / "fake"
    weights.write_bytes(b"weights")
    config = msgspec.structs.replace(
        PARKING, model=str(weights), data_dir=str(tmp_path), disk_cache_bytes=1 << 20, park_bytes=0
    )
    first = asked(1, prompt(6, 40))
    one = Bench(config=config, made=lambda *_, **__: model())
    one.answer(first)
    works = [m.begun for m in one.line.resident if isinstance(m, OwnWork)]
    assert works == [True, False]
    again = Bench(config=config, made=lambda *_, **__: model())
    again.loaded.model.strict = True
    assert again.answer(first) == fresh(model, first)
    assert [m.rows for m in again.said if isinstance(m, Resumed) and m.source == "disk"] == [32]
    weights.write_bytes(b"other weights")
    last = Bench(config=config, made=lambda *_, **__: model())
    last.answer(first)
    assert resumed(last, 1) == []  # of another model


def test_a_folder_that_cannot_be_used_is_said_and_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """G2, F6: without its files the engine goes on; only the class is told."""
    config = msgspec.structs.replace(PARKING, model="/no/such", data_dir="/no/such", disk_cache_bytes=1 << 20)
    one = Bench(config=config)
    assert len(one.answer(asked(1, prompt(1, 20)))) == 8
    assert "No prefix is kept in files: FileNotFoundError." in capsys.readouterr().err


def test_a_round_is_not_kept_waiting_by_a_file(tmp_path: Path) -> None:
    """L6, G2: between two rounds nothing is written while a message is about to come; where none does, it is."""
    weights = tmp_path / "fake"
    weights.write_bytes(b"weights")
    more = {"model": str(weights), "data_dir": str(tmp_path), "disk_cache_bytes": 1 << 20}
    one = Bench(config=msgspec.structs.replace(PARKING, **more), made=lambda *_, **__: Dense())  # type: ignore[arg-type]
    waits: list[float | None] = []
    take = one.line.take

    def noting(timeout: float | None) -> list[Any]:
        waits.append(timeout)
        return take(timeout)

    one.line.take = noting  # type: ignore[method-assign]
    first = asked(1, prompt(6, 40), 4)
    one.answer(first)
    assert waits[-1] is None
    for file in tmp_path.glob("prefixes/*"):
        file.unlink()
    one.engine._keeper._residency._disk._files.clear()  # type: ignore[union-attr]
    said = one.turns(20, asked(2, [*first.tokens, *prompt(7, 20)], 9))  # its begin has something to write
    assert len([m for m in said if isinstance(m, Tokens)]) == 1 and not one.engine._keeper.busy
    pieces = waits[waits.index(SOON_S) :]
    pieces = pieces[: pieces.index(None)]
    assert set(pieces[::2]) == {SOON_S} and set(pieces[1::2]) == {0.0}
    assert list(tmp_path.glob("prefixes/*"))


@MODELS
def test_a_write_that_fails_harms_no_run(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F6, G2: whatever a file's writing raises, the engine goes on, and no text of the exception is told."""
    weights = tmp_path / "fake"
    weights.write_bytes(b"weights")
    more = {"model": str(weights), "data_dir": str(tmp_path), "disk_cache_bytes": 1 << 20}
    one = Bench(config=msgspec.structs.replace(PARKING, **more), made=lambda *_, **__: model())  # type: ignore[arg-type]
    first = asked(1, prompt(6, 40))
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> Any:
            raise RuntimeError("xyzzy")

        patch.setattr("engine.prefix_file._pieces", broken)
        assert one.answer(first) == fresh(model, first)
    heard = capsys.readouterr().err
    assert "a prefix is not written: RuntimeError" in heard and "xyzzy" not in heard
    assert [m.begun for m in one.line.resident if isinstance(m, OwnWork)] == [True, False]
    assert not list(tmp_path.glob("prefixes/*"))
    second = msgspec.structs.replace(first, run=2)
    assert one.answer(second) == fresh(model, second)
    assert len(list(tmp_path.glob("prefixes/*"))) == 2


@MODELS
@pytest.mark.parametrize("place", ["begin", "end"])
def test_what_fails_in_keeping_costs_a_prefill(
    model: Any, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F6, G5: the slot is forgotten, no run ends by it, and no text of the exception is told."""
    one = bench(model)
    first = asked(1, prompt(1, 40))
    one.answer(first)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("xyzzy")

    with monkeypatch.context() as patch:
        patch.setattr(one.engine._keeper._residency, place, broken)
        assert one.answer(msgspec.structs.replace(first, run=2)) == fresh(model, first)
    assert ([m.kept for m in one.said if isinstance(m, Ended)][1] == 0) is (place == "end")
    assert one.answer(msgspec.structs.replace(first, run=3)) == fresh(model, first)
    heard = capsys.readouterr().err
    assert "what slot 0 held is forgotten: RuntimeError" in heard and "xyzzy" not in heard
