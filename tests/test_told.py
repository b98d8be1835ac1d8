"""stages/logprobs.py: which chunk tells of which token, in the stage and through the runner; the two shapes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import protocol as wire
from engine.protocol import TokenLogprob
from pipeline import effects as do
from pipeline import events as ev
from pipeline.outbox import BLOCK, End, Outbox, Text
from pipeline.runner import Runner
from pipeline.settings import Settings
from stages.calls import Content
from stages.logprobs import Entry, Logprobs, shaped
from stages.text import Reading, TextStage
from tests.split import Answer
from tests.test_text import raw, stop_lists, texts

Told = list[tuple[str, list[Entry]]]


def value(token: int) -> TokenLogprob:
    return TokenLogprob(-float(token), [token], [-float(token)])


def told(tokens: list[bytes], stops: list[str], groups: list[int] | None = None) -> tuple[Told, list[Entry], int]:
    """Each piece of text with what it tells, what the finish tells, and how many tokens lie before a stop."""
    stage, logprobs, out, at = TextStage(tokens, Reading(stops=stops)), Logprobs(tokens), Told(), 0
    for size in [*(groups or []), len(tokens)]:
        ids = list(range(len(tokens)))[at : at + size]
        at += size
        piece = stage.push(ids)
        out += zip(texts(piece), logprobs.add(ids, [value(i) for i in ids], piece), strict=True)
    last = stage.finish()
    out += zip(texts(last), logprobs.add([], [], last), strict=True)
    return out, logprobs.rest(), last.keep if last.stopped else len(tokens)


@given(raw, stop_lists, st.lists(st.integers(0, 4), max_size=12))
def test_any_grouping(tokens: list[bytes], stops: list[str], groups: list[int]) -> None:
    """F7: how ids come in rounds changes nothing; every token wholly before a stop is told once, in order, no other."""
    chunks, rest, count = told(tokens, stops, groups)
    assert (chunks, rest, count) == told(tokens, stops)
    entries = [entry for _, part in chunks for entry in part] + rest
    assert [(entry.data, entry.logprob) for entry in entries] == [(tokens[i], -float(i)) for i in range(count)]


@given(raw, stop_lists)
def test_nothing_is_told_before_its_text(tokens: list[bytes], stops: list[str]) -> None:
    """F7: what the entries so far spell was sent, by every chunk; offsets are places in the text, ascending."""
    chunks, rest, _ = told(tokens, stops)
    text, data, offsets = "", b"", [0]
    for part, entries in [*chunks, ("", rest)]:
        text += part
        data += b"".join(entry.data for entry in entries)
        offsets += [entry.offset for entry in entries]
        assert text.startswith(data.decode("utf-8", "ignore"))
        assert offsets[-1] <= len(text)
    assert offsets == sorted(offsets)


def spelled(tokens: list[bytes], stops: list[str]) -> tuple[list[tuple[str, list[bytes]]], list[bytes]]:
    chunks, rest, _ = told(tokens, stops)
    return [(part, [entry.data for entry in entries]) for part, entries in chunks], [entry.data for entry in rest]


def test_who_waits_for_whom() -> None:
    """F7: a partial character waits for its last byte, held text with its token, the rest goes with the finish."""
    assert spelled([b"a", b"\xe2\x82", b"\xac", b"b"], []) == (
        [("a", [b"a"]), ("€", [b"\xe2\x82", b"\xac"]), ("b", [b"b"])], [],
    )  # fmt: skip
    assert spelled([b"a<", b"st", b"x"], ["<stop>"]) == ([("a", []), ("<stx", [b"a<", b"st", b"x"])], [])
    assert spelled([b"a<", b"st"], ["<stop>"]) == ([("a", []), ("<st", [b"a<", b"st"])], [])
    assert spelled([b"a", b"b<", b"stop>", b"c"], ["<stop>"]) == ([("a", [b"a"]), ("b", [])], [])
    assert spelled([b"a", b"", b"\xe2"], []) == ([("a", [b"a"])], [b"", b"\xe2"])
    assert spelled([b"a", b"", b"X"], ["X"]) == ([("a", [b"a"])], [b""])


def test_bytes_that_never_complete() -> None:
    """F2: they are in ``bytes`` and nowhere else: ``token`` is the whole characters alone, without a replacement."""
    one = Entry(b"a\xe2\x82", -0.5, [(b"\xff", -0.5), (b"", -9999.0)], 3)
    assert shaped("chat", [one]) == {
        "content": [
            {
                "token": "a", "logprob": -0.5, "bytes": [97, 226, 130],
                "top_logprobs": [
                    {"token": "", "logprob": -0.5, "bytes": [255]},
                    {"token": "", "logprob": -9999.0, "bytes": []},
                ],
            }
        ],
        "refusal": None,
    }  # fmt: skip


def test_completions_shape() -> None:
    """F7: four lists; the chosen token stands among the alternatives, and of two with one text the likelier."""
    entries = [Entry(b"a", -2.0, [(b"b", -0.1), (b"\xff", -1.0), (b"\xfe", -1.5)], 0), Entry(b"c", 0.0, [], 1)]
    assert shaped("completions", entries) == {
        "tokens": ["a", "c"], "token_logprobs": [-2.0, 0.0], "text_offset": [0, 1],
        "top_logprobs": [{"b": -0.1, "": -1.0, "a": -2.0}, {"c": 0.0}],
    }  # fmt: skip


def test_infinity() -> None:
    """F7: -inf is sent as -9999.0; an id beyond the table has no bytes."""
    logprobs, infinite = Logprobs([b"a"]), -float("inf")
    piece = TextStage([b"a"], Reading()).push([0])
    [[entry]] = logprobs.add([0], [TokenLogprob(infinite, [0, 7], [-0.5, infinite])], piece)
    assert entry == Entry(b"a", -9999.0, [(b"a", -0.5), (b"", -9999.0)], 0)


def test_merged_for_a_slow_reader() -> None:
    """F7: pieces merged in the outbox keep every entry, beside the text it belongs to; entries count as pending."""

    async def run() -> list[Any]:
        box, text = Outbox(), "x" * (BLOCK // 3)
        for number in range(40):
            assert box.put(Text([[Content(text)], [Content(text)]], [[Entry(b"x", -number, [], 0)], []]), 0.0)
        assert box.pending > 80 * len(text)
        return await box.take()

    items = asyncio.run(run())
    assert all(len(item.parts) == len(item.logprobs) for item in items)
    entries = [entry.logprob for item in items for part in item.logprobs for entry in part]
    assert entries == [-number for number in range(40)]
    assert sum(len(item.parts) for item in items) < 40  # merged: of 80 pieces


class Ran:
    """A runner without an engine process, one request in it, and the facts it posts of the run."""

    def __init__(self, tokens: list[bytes], stops: list[str], tmp_path: Path) -> None:
        self.runner = Runner(Settings(trace=str(tmp_path)), "model.gguf", "model")
        self.call = self.runner.receive("chat", 0)
        self.call.text, self.call.logprobs = TextStage(tokens, Reading(stops=stops)), Logprobs(tokens)
        self.call.alternatives = 1
        self.facts: list[ev.Event] = []
        self.runner.post = self.facts.append  # type: ignore[method-assign]
        self.runner._runs[1] = self.call
        self.epoch = self.runner.core.memory.engine.epoch

    def hear(self, first: int, ids: list[int]) -> None:
        self.runner._from_engine(wire.Tokens(self.epoch, 1, first, ids, 1.0, [value(i) for i in ids]))
        self._sent()

    def end(self, generated: int) -> list[Any]:
        self.runner._from_engine(wire.Ended(self.epoch, 1, "length", 1, generated))
        self._sent()
        self.runner._finish(do.Finish(self.call.request, "length", True))
        return self.call.outbox._items

    def _sent(self) -> None:
        fact = self.facts[-1]
        assert isinstance(fact, ev.Progress | ev.RunEnded)
        if fact.characters:
            self.runner._send(do.Send(self.call.request, fact.handle))


@pytest.mark.parametrize("rounds", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]])
def test_through_the_runner(rounds: list[list[int]], tmp_path: Path) -> None:
    """F7: the outbox holds each piece with its entries, the end those that are left; the core's facts hold none."""

    async def run() -> tuple[list[Any], list[ev.Event]]:
        ran = Ran([b"a", b"b\xe2", b"\x82\xac", b"\xe2"], [], tmp_path)
        for ids in rounds:
            ran.hear(ids[0], ids)
        return ran.end(4), ran.facts

    items, facts = asyncio.run(run())
    pairs = [pair for item in items if isinstance(item, Text) for pair in zip(item.parts, item.logprobs, strict=True)]
    assert [(said, [entry.data for entry in part]) for [said], part in pairs] == [
        (Content("a"), [b"a"]), (Content("b"), []), (Content("€"), [b"b\xe2", b"\x82\xac"]),
    ]  # fmt: skip
    assert isinstance(items[-1], End) and [entry.data for entry in items[-1].logprobs] == [b"\xe2"]
    assert "Entry" not in repr(facts) and "TokenLogprob" not in repr(facts)


def test_what_follows_a_stop_is_not_told(tmp_path: Path) -> None:
    """F7: of a round with a stop inside, the tokens wholly before the stop only."""

    async def run() -> list[Any]:
        ran = Ran([b"a", b"b", b"cS", b"TOP", b"secret"], ["STOP"], tmp_path)
        ran.hear(0, [0, 1, 2, 3, 4])
        ran.runner._cancel_run(do.CancelRun(ran.epoch, 1, 2))
        return ran.end(4)

    items = asyncio.run(run())
    assert [entry.data for entry in items[0].logprobs[0] + items[0].logprobs[1]] == [b"a", b"b"]
    assert items[0].parts == [[Content(text)] for text in "abc"] and items[0].logprobs[2] == items[-1].logprobs == []


def test_hidden_thinking_is_not_told() -> None:
    """B10: no token of it, nor of its close, stands among the log-probabilities; those of the answer do."""
    for state, parts in (("open", []), ("may", ["<think>"])):
        answer = Answer([*parts, "se", "cret", "\n</think>", "\n\n", "x", "y"], state)
        for size in (1, len(answer.ids)):
            stage = TextStage(answer.pieces, Reading(shape="hidden", state=state, plan=True))
            logprobs, entries = Logprobs(answer.pieces), list[Entry]()
            for at in range(0, len(answer.ids), size):
                ids = answer.ids[at : at + size]
                piece = stage.push(ids, [turn for turn in answer.turns if at <= turn.at < at + size])
                entries += [one for each in logprobs.add(ids, [value(i) for i in ids], piece) for one in each]
            logprobs.add([], [], stage.finish())
            spelled = b"".join(entry.data for entry in [*entries, *logprobs.rest()])
            assert spelled.removeprefix(b"<think>") == b"\n\nxy"
