"""Everything that decides a token at once, in the engine's own loop, against a slow reference that only looks back.

Forced closings, stop ids, ``min_tokens``, biases, a grammar and the limit, each also tested alone: here it is their
order that counts. The reference knows no state but the answer so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.pieces import CLOSING, OPENING, Vocabulary
from engine.protocol import Ended, Grammar, Sampling, Start, Thinking, Tokens, Turn
from engine.reasoning import kept
from tests.test_grammar import CLOSE, END, GLUED, KNOWN, OPEN, PIECES, SPECIAL, SPELLED, Line, Wide, made, text

PROMPT = [1, 2, 3]
SIZE = Wide.vocab
WORDS = [["abc"], ["a", "ab", "<tea"], ["a</think>b", "<think>a"], ["b"], [">"]]
LIKED = [ord("a"), ord("b"), ord("<"), ord(">"), ord(" "), END, SPECIAL, OPEN, CLOSE, GLUED]
KINDS = {"known": KNOWN, "spelled": SPELLED}

Words = list[str] | None


def piece(token: int) -> bytes:
    return PIECES[token] if token < len(PIECES) else b""


def written(ids: list[int]) -> bytes:
    return b"".join(piece(token) for token in ids)


def block(ids: list[int], how: Thinking, known: Vocabulary) -> tuple[int | None, int | None, list[Turn]]:
    """The thinking's first token and the one behind its last, None where there is none (yet); its turns."""
    turns, begin = list[Turn](), 0 if how.state == "open" else None
    inside = 0  # where the thinking begins, in bytes
    for at, token in enumerate(ids if how.state != "off" else []):
        data, before = written(ids[: at + 1]), written(ids[:at])
        if begin is None:
            head = len(data) - len(data.lstrip())
            added = token in known.opening and not before.strip()
            if not added and not data.startswith(OPENING, head):
                if OPENING.startswith(data[head:]):
                    continue
                break
            begin, inside = at, len(data) if added else head + len(OPENING)
            turns.append(Turn("opened", at, 0 if added else len(OPENING), len(data) - inside))
        if token in known.closing:
            return begin, at + 1, [*turns, Turn("closed", at, 0, 0)]
        found = data.find(CLOSING, inside)
        if found >= 0:
            return begin, at + 1, [*turns, Turn("closed", at, len(CLOSING), len(data) - found - len(CLOSING))]
    return begin, None, turns


def due(ids: list[int], how: Thinking, known: Vocabulary, limit: int) -> str:
    """Why the block that is open behind ``ids`` must be closed: the first reason there was since it was opened."""
    begin, _, _ = block(ids, how, known)
    assert begin is not None
    opens = begin if how.state == "open" else begin + 1
    room = kept(how.reserve, limit)
    for n in range(opens, len(ids) + 1):
        thought = ids[begin:n] if how.state == "open" else ids[begin + 1 : n]  # the tag itself repeats nothing
        if 0 <= how.cap <= n - begin:
            return "budget"
        if room and n + len(known.close) >= limit - room:
            return "reserve"
        if how.stall and any(len(thought) >= 4 * k and thought[-4 * k :] == thought[-k:] * 4 for k in range(1, 17)):
            return "stall"
    return ""


def forced(ids: list[int], how: Thinking, known: Vocabulary) -> int:
    """The next token of the closing, of which the last tokens may be a part."""
    begin, _, _ = block(ids, how, known)
    assert begin is not None
    thought, close = ids[begin if how.state == "open" else begin + 1 :], list(known.close)
    return close[max(n for n in range(len(close)) if n == 0 or thought[-n:] == close[:n])]


def masked(logits: np.ndarray, ids: list[int], asked: Start, known: Vocabulary, words: list[str]) -> np.ndarray:
    """What the words leave of the logits. Where those are stop ids alone that may not end it yet, they are text."""
    early = logits.copy()
    if len(ids) < asked.min_tokens:
        early[asked.stop_ids] = -np.inf
    left = bound(early, ids, asked, known, words)
    return bound(logits, ids, asked, known, words, ends=False) if np.isneginf(left.max()) else left


def bound(
    logits: np.ndarray, ids: list[int], asked: Start, known: Vocabulary, words: list[str], ends: bool = True
) -> np.ndarray:
    begin, end, _ = block(ids, asked.thinking, known)
    if begin is not None and end is None:
        banned = [
            token for token in range(SIZE)
            if token in asked.stop_ids or (written(ids[begin:])[-8:] + piece(token)).partition(CLOSING)[2].strip()
        ]  # fmt: skip
        left = logits.copy()
        left[banned] = -np.inf
        return left if np.isfinite(left.max()) else logits
    before = written(ids if end is None else ids[end:])
    choices = [word.encode() for word in words]
    allowed = {
        t for t in range(SIZE) if piece(t) and t != END and any(w.startswith(before + piece(t)) for w in choices)
    }
    if before in choices and ends:
        allowed |= {stop for stop in asked.stop_ids if stop == END or not piece(stop)}
    if asked.thinking.state == "may" and begin is None and OPENING.startswith(before):
        rest = OPENING[len(before) :]
        allowed |= {t for t in range(SIZE) if piece(t) and rest.startswith(piece(t))}
        allowed |= set() if before else known.opening
    left = np.full(SIZE, -np.inf, np.float32)
    left[sorted(allowed)] = logits[sorted(allowed)]
    return left


def finished(ids: list[int], asked: Start, known: Vocabulary, words: Words) -> bool:
    begin, end, _ = block(ids, asked.thinking, known)
    if words is None or (begin is not None and end is None):
        return False
    answer = written(ids if end is None else ids[end:]).decode("latin-1")
    return [word for word in words if word.startswith(answer)] == [answer]


def reference(asked: Start, known: Vocabulary, words: Words) -> tuple[list[int], list[Turn], str]:
    """The greedy answer, its turns and how it ends."""
    model, ids, turns = Wide(), list[int](), list[Turn]()
    while True:
        if finished(ids, asked, known, words):
            return ids, turns, "stop"
        if len(ids) == asked.max_tokens:
            return ids, turns, "length"
        logits = model.logits(PROMPT + ids).numpy().copy()
        begin, end, _ = block(ids, asked.thinking, known)
        reason = due(ids, asked.thinking, known, asked.max_tokens) if begin is not None and end is None else ""
        if reason:
            token = forced(ids, asked.thinking, known)
        else:
            for liked, bias in asked.sampling.logit_bias.items():
                logits[liked] += np.float32(bias)
            if words is not None:
                logits = masked(logits, ids, asked, known, words)
            elif len(ids) < asked.min_tokens:
                logits[asked.stop_ids] = -np.inf
            token = int(logits.argmax())
        if token in asked.stop_ids and len(ids) >= asked.min_tokens:
            return ids, turns, "stop"
        ids.append(token)
        for turn in block(ids, asked.thinking, known)[2][len(turns) :]:
            why = reason or "model" if turn.kind == "closed" else ""
            turns.append(Turn(turn.kind, turn.at, turn.size, turn.tail, why))


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engines() -> dict[str, tuple[object, Line]]:
    return {kind: made(known=known) for kind, known in KINDS.items()}


counts = st.sampled_from([-1, 0, 1, 4, 9])
thinkings = st.builds(Thinking, st.sampled_from(["open", "may", "off"]), counts, counts, st.booleans())
biases = st.dictionaries(st.sampled_from(LIKED), st.sampled_from([-100.0, 5.0, 6.0, 8.0]), min_size=1, max_size=5)
stops = st.lists(st.sampled_from([END, SPECIAL, ord("b"), CLOSE, ord("<")]), max_size=3, unique=True)


@given(
    st.sampled_from(list(KINDS)), thinkings, biases, stops, st.sampled_from([0, 0, 1, 4, 12]),
    st.sampled_from([1, 2, 7, 20, 30]), st.none() | st.sampled_from(WORDS),
)  # fmt: skip
@example("known", Thinking(), {END: 5.0}, [], 0, 1, ["b"])  # the last word at the limit: a stop, not a length
@example("known", Thinking("open", 0), {END: 5.0}, [END], 9, 2, ["b"])
@example("spelled", Thinking(), {END: 5.0}, [END, ord("b")], 9, 9, ["abc"])  # a stop id that only writes
@settings(max_examples=300, deadline=None)
def test_a_run_is_what_a_look_back_at_every_token_makes_of_it(
    engines: dict, kind: str, how: Thinking, bias: dict[int, float], stop_ids: list[int], least: int, most: int,
    words: Words,
) -> None:  # fmt: skip
    """C3, C4, C6, C8, E2, E4, A4: tokens, turns and the end, for every mix of what decides them."""
    engine, line = engines[kind]
    grammar = None if words is None else Grammar(text("choice", words))
    asked = Start(
        1, 1, 0, PROMPT, Sampling(temperature=0, logit_bias=bias), most, stop_ids, min_tokens=least,
        thinking=how, grammar=grammar,
    )  # fmt: skip
    line.said.clear()
    line.inbox.append(asked)
    line.until(engine, 1)
    rounds = [message for message in line.said if isinstance(message, Tokens)]
    ended = line.said[-1]
    assert isinstance(ended, Ended)
    turns = [turn for message in rounds for turn in message.turns]
    ids, expected, reason = reference(asked, KINDS[kind], words)
    assert (line.sent_by(1), turns, ended.reason) == (ids, expected, reason)
    assert all(a.start + len(a.ids) == b.start for a, b in pairwise(rounds))
