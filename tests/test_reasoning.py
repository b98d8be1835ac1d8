"""engine/reasoning.py: where the thinking begins and ends, and when it must be closed, against plain references."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pieces import CLOSING, OPENING, Vocabulary
from engine.protocol import Thinking, Turn
from engine.reasoning import Reasoning, Stall, kept

PIECES = [
    b"a", b" ", b"\n", b"<", b"/", b"think", b">", b"</", b"<th", b"ink>", b"x</think>\n", b"<think>ok",
    b"<think></think>y", b"", b"", b"", b"</think>", b"</thi", b"nk>", b"nk> </think>",
]  # fmt: skip
OPEN, CLOSE, OTHER = 13, 14, 15  # special: they write nothing
SPELLED = Vocabulary(PIECES, frozenset({OPEN}), frozenset({CLOSE}), (7, 5, 6))
ADDED = Vocabulary(PIECES, frozenset({OPEN}), frozenset({CLOSE}), (CLOSE,))
FREE = 1 << 20

answers = st.lists(st.integers(-1, len(PIECES)), max_size=40)


def data(ids: list[int]) -> bytes:
    return b"".join(PIECES[i] for i in ids if 0 <= i < len(PIECES))


def turns_of(ids: list[int], state: str, vocabulary: Vocabulary = ADDED) -> list[Turn]:
    reasoning = Reasoning(Thinking(state), vocabulary, FREE)
    return [turn for token in ids for turn in reasoning.feed(token)]


def plain(ids: list[int], state: str) -> list[Turn]:
    """The same by looking at the whole text again after every token."""
    said: list[Turn] = []
    begin = 0 if state == "open" else None  # of the thinking, in bytes
    if state == "off":
        return said
    for at, token in enumerate(ids):
        text, before = data(ids[: at + 1]), data(ids[:at])
        if begin is None:
            head = len(text) - len(text.lstrip())
            if token == OPEN and not before.strip():
                begin = len(text)
                said.append(Turn("opened", at, 0, 0))
                continue
            if text.startswith(OPENING, head):
                begin = head + len(OPENING)
                said.append(Turn("opened", at, len(OPENING), len(text) - begin))
            elif not OPENING.startswith(text[head:]):
                return said
            else:
                continue
        if token == CLOSE:
            return [*said, Turn("closed", at, 0, 0, "model")]
        found = text.find(CLOSING, begin)
        if found >= 0:
            return [*said, Turn("closed", at, len(CLOSING), len(text) - found - len(CLOSING), "model")]
    return said


@given(answers, st.sampled_from(["open", "may", "off"]))
def test_turns_are_where_the_whole_text_has_them(ids: list[int], state: str) -> None:
    """C6: decided once, at the token that completes the tag, however tokens cut it; also as the very first token."""
    assert turns_of(ids, state) == plain(ids, state)


@pytest.mark.parametrize(
    ("ids", "state", "expected"),
    [
        ([CLOSE], "open", [Turn("closed", 0, 0, 0, "model")]),
        ([16], "open", [Turn("closed", 0, 8, 0, "model")]),
        ([10], "open", [Turn("closed", 0, 8, 1, "model")]),
        ([7, 5, 6, CLOSE, 16], "open", [Turn("closed", 2, 8, 0, "model")]),
        ([17, 19], "open", [Turn("closed", 1, 8, 9, "model")]),
        ([0, 16], "may", []),
        ([1, 2, OPEN, 0, CLOSE], "may", [Turn("opened", 2, 0, 0), Turn("closed", 4, 0, 0, "model")]),
        ([2, 3, 5, 6, 7, 5, 6], "may", [Turn("opened", 3, 7, 0), Turn("closed", 6, 8, 0, "model")]),
        ([12, 16], "may", [Turn("opened", 0, 7, 9), Turn("closed", 0, 8, 1, "model")]),
        ([11, 18], "may", [Turn("opened", 0, 7, 2)]),
        ([3, OPEN], "may", []),
        ([OPEN, 0, OPEN, CLOSE, OPEN], "may", [Turn("opened", 0, 0, 0), Turn("closed", 3, 0, 0, "model")]),
        ([16, OPEN], "off", []),
    ],
)
def test_turns_by_hand(ids: list[int], state: str, expected: list[Turn]) -> None:
    """B0, C6: only the first non-blank output opens; what is closed stays closed."""
    assert turns_of(ids, state) == expected


# -- closing it -------------------------------------------------------------------------------------------------------


def written(
    model: list[int], thinking: Thinking, vocabulary: Vocabulary, limit: int = FREE
) -> tuple[list[int], list[Turn], int, int]:
    """The answer where a model wants ``model``: its tokens, turns, reasoning tokens, and how many were forced."""
    reasoning, said = Reasoning(thinking, vocabulary, limit), list[Turn]()
    answer, forced, wants = list[int](), 0, list(model)
    while len(answer) < limit:
        token = reasoning.forced
        forced += token is not None
        if token is None:
            if not wants:
                break
            token = wants.pop(0)
        answer.append(token)
        said += reasoning.feed(token)
    return answer, said, reasoning.count, forced


@pytest.mark.parametrize(("vocabulary", "close"), [(SPELLED, [7, 5, 6]), (ADDED, [CLOSE])])
@pytest.mark.parametrize("cap", [0, 1, 50])
def test_a_budget_closes_a_block_the_prompt_opened(vocabulary: Vocabulary, close: list[int], cap: int) -> None:
    """C3: after cap tokens the tag comes as real tokens, which are reasoning; then the model goes on."""
    model = [0, 1] * 100
    answer, said, count, forced = written(model, Thinking("open", cap), vocabulary)
    assert answer == model[:cap] + close + model[cap:]
    assert (count, forced) == (cap + len(close), len(close))
    assert [(turn.kind, turn.at, turn.reason) for turn in said] == [("closed", cap + len(close) - 1, "budget")]


def test_a_budget_counts_from_the_tag_the_model_wrote() -> None:
    """C3, B0: the blank before it is not reasoning, the token that completes it is; no tag: no budget."""
    answer, said, count, _ = written([2, 3, 5, 6, *[0, 1] * 20], Thinking("may", 5), SPELLED)
    assert answer[:8] == [2, 3, 5, 6, 0, 1, 0, 1] and answer[8:11] == [7, 5, 6] and count == 5 + 3
    assert said == [Turn("opened", 3, 7, 0), Turn("closed", 10, 8, 0, "budget")]
    model = [0, 11, 1] * 9
    assert written(model, Thinking("may", 5, -1, True), SPELLED, 20) == (model[:20], [], 0, 0)
    assert written(model, Thinking("off", 5, -1, True), SPELLED, 20) == (model[:20], [], 0, 0)


def test_of_a_tag_that_is_begun_the_rest_is_forced() -> None:
    """C3, C6: no tag is written twice, and one begun in other tokens is closed all the same."""
    answer, said, count, forced = written([0, 1, 7, 5, 0, 0], Thinking("open", 4), SPELLED)
    assert answer == [0, 1, 7, 5, 6, 0, 0] and (count, forced) == (5, 1) and said[0].reason == "budget"
    answer, said, count, _ = written([0, 3, 4, 5, 0, 0], Thinking("open", 4), SPELLED)
    assert answer == [0, 3, 4, 5, 7, 5, 6, 0, 0] and count == 7 and said == [Turn("closed", 6, 8, 0, "budget")]


@given(answers, st.integers(0, 12), st.sampled_from([SPELLED, ADDED]), st.sampled_from(["open", "may"]))
def test_no_budget_is_ever_passed(model: list[int], cap: int, vocabulary: Vocabulary, state: str) -> None:
    """C3: at most cap tokens and the closing are reasoning; what is forced is told from what the model did."""
    answer, said, count, forced = written(model, Thinking(state, cap), vocabulary)
    assert count <= cap + len(vocabulary.close) + (state == "may" and cap == 0)
    closed = next((turn for turn in said if turn.kind == "closed"), None)
    assert [t.kind for t in said] in ([], ["opened"], ["closed"], ["opened", "closed"])
    assert bool(forced) == (closed is not None and closed.reason == "budget")
    opened = next((turn.at for turn in said if turn.kind == "opened"), 0 if state == "open" else None)
    if opened is not None:
        assert count == (len(answer) if closed is None else closed.at + 1) - opened
    assert [turn.at for turn in plain(answer, state)] == [turn.at for turn in said]


@given(answers, st.sampled_from(["open", "may", "off"]))
def test_without_a_wish_nothing_is_forced(model: list[int], state: str) -> None:
    """C5: token for token as the model wants it."""
    answer, _, _, forced = written(model, Thinking(state), SPELLED)
    assert answer == model and forced == 0


def test_a_tokenizer_that_cannot_write_the_tag_forces_nothing() -> None:
    """C3: there is no token to force."""
    assert written([0] * 9, Thinking("open", 2, 3, True), Vocabulary([b"a"]), 9)[0] == [0] * 9


# -- the reserve ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reserve", "limit", "expected"),
    [(0, 400, 0), (-1, 400, 100), (-1, 100_000, 2048), (-1, 3, 0), (50, 400, 50), (300, 400, 200), (9, 0, 0)],
)
def test_what_is_kept(reserve: int, limit: int, expected: int) -> None:
    """C4: auto is min(2,048, limit / 4), and never is it over half the limit."""
    assert kept(reserve, limit) == expected


@given(st.integers(1, 300), st.integers(-1, 400), st.sampled_from([SPELLED, ADDED]))
def test_the_reserve_is_left_for_the_answer(limit: int, reserve: int, vocabulary: Vocabulary) -> None:
    """C4: reasoning and its forced closing leave exactly the reserve, or all that is left where it does not fit."""
    answer, said, count, forced = written([0, 1] * 200, Thinking("open", -1, reserve), vocabulary, limit)
    room, close = kept(reserve, limit), len(vocabulary.close)
    assert len(answer) == limit
    if room == 0:
        assert (said, count, forced) == ([], limit, 0)
    else:
        assert count == min(max(limit - room, close), limit)
        assert [turn.reason for turn in said] == ["reserve"] * (close <= limit)


def test_thinking_never_eats_the_limit() -> None:
    """C4: 400 tokens for a document: at most 300 are reasoning; and 20 tokens without a budget are all reasoning."""
    assert written([0, 1] * 300, Thinking("open", -1, -1), SPELLED, 400)[2] == 300
    assert written([0, 1] * 300, Thinking("open"), SPELLED, 20)[1:3] == ([], 20)


def test_the_nearer_of_budget_and_reserve_closes() -> None:
    """C3, C4: whichever comes first is the reason."""
    for cap, reason, count in ((10, "budget", 13), (200, "reserve", 75)):
        _, said, reasoning, _ = written([0, 1] * 300, Thinking("open", cap, -1), SPELLED, 100)
        assert (said[0].reason, reasoning) == (reason, count)


def test_a_tag_late_in_the_answer_is_closed_at_once() -> None:
    """C4: the reserve counts the whole answer, also what stood before the tag."""
    answer, said, count, _ = written([1] * 90 + [OPEN] + [0] * 50, Thinking("may", -1, -1), ADDED, 100)
    assert answer[90:92] == [OPEN, CLOSE] and count == 2 and said[-1].reason == "reserve"


# -- a stall ----------------------------------------------------------------------------------------------------------


def stalled_at(tokens: list[int]) -> int | None:
    stall = Stall()
    for at, token in enumerate(tokens):
        stall.feed(token)
        if stall.found:
            return at + 1
    return None


@given(st.lists(st.integers(0, 2), max_size=120), st.integers(1, 16))
def test_a_block_four_times(tokens: list[int], period: int) -> None:
    """C8: a block of 1 to 16 tokens written four times in a row, found at its last token."""
    tokens = tokens + list(range(period)) * 4
    expected = next(
        end
        for end in range(1, len(tokens) + 1)
        if any(end >= 4 * n and tokens[end - 4 * n : end] == tokens[end - n : end] * 4 for n in range(1, 17))
    )
    assert stalled_at(tokens) == expected


def test_a_harmless_run_is_one_too() -> None:
    """C8, decided: the row is kept to its letter, a block of one token counts like any other.

    So the zeros of 10000 where each digit is a token, a rule of a table and an indentation close the block. A least
    length for short blocks would spare them; the row names none, and ``--think-stall off`` is there for who thinks so.
    """
    zeros = [0, 7, 1, 2, 2, 2, 2, 3]
    assert stalled_at(zeros) == 7
    assert stalled_at([1, 2, 2, 2, 3, 2, 2, 2]) is None
    assert stalled_at([1, *[2, 3] * 4]) == 9  # |-|-|-|-


def test_longer_blocks_and_three_times_are_none() -> None:
    """C8: a block of 17 is none, nor one written three times."""
    assert stalled_at(list(range(17)) * 6) is None
    assert stalled_at(list(range(16)) * 3 + list(range(15))) is None


def test_a_span_with_nothing_new() -> None:
    """C8: from 320 tokens on and every 64, under a tenth of 121 8-grams new: 12 are, 13 are not."""
    block, fresh = list(range(40)), list(range(1000, 1320))
    assert stalled_at(block * 20) == 320
    assert stalled_at(fresh + block * 20) == 512  # the first on the grid with a whole block in the span before
    for new, at in ((12, 320), (13, None)):  # so many of the last 8-grams end in a token never seen
        assert stalled_at((block * 8)[: 320 - new] + fresh[:new]) == at
    assert stalled_at(list(range(1000))) is None


def test_a_stall_closes_the_block() -> None:
    """C8: and the history says why; the answer may repeat itself as it likes."""
    model = [3, 3, 4, 0, 1, 4, 0, 1, 4, 0, 1, 4, 0, 1] + [0] * 30
    answer, said, count, _ = written(model, Thinking("open", stall=True), SPELLED)
    assert said == [Turn("closed", 16, 8, 0, "stall")] and count == 17
    assert answer == [*model[:14], 7, 5, 6, *model[14:]]
    assert written(model, Thinking("open"), SPELLED)[0] == model
