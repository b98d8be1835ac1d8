import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.wait import (
    Ended,
    History,
    Holder,
    Rates,
    Waiter,
    flat,
    folded,
    holder_left,
    nearest_rank,
    next_line_at,
    own_left,
    prefill_line,
    recent_rates,
    remembered,
    rounded,
    waiter_takes,
    waiting_line,
    waits_left,
)


def test_lines():
    """L1: the words of a waiting line, with and without an estimate, and while the model loads."""
    assert waiting_line(1, 30.0, False, 40.0) == "waiting, position 1, about 40 s, 30 s so far"
    assert waiting_line(1, 30.0, False) == "waiting, position 1, 30 s so far"
    assert waiting_line(2, 30.0, True) == "waiting, position 2, the model is loading, 30 s so far"
    assert waiting_line(2, 30.0, True, 40.0) == "waiting, position 2, the model is loading, 30 s so far"


def test_what_it_waits_for():
    """L4, L6: a wait for memory and one behind the server's own work are told apart from one for a slot."""
    assert waiting_line(1, 30.0, False, 40.0, memory=True) == "waiting for memory, position 1, about 40 s, 30 s so far"
    told = waiting_line(1, 12.0, False, 3.0, own="disk write")
    assert told == "waiting, position 1, about 3 s, 10 s so far, the server is writing its cache"
    assert waiting_line(1, 12.0, False, own="new").endswith("10 s so far, the server is busy with work of its own")


def test_own_work_is_estimated_by_real_waits():
    """L6: the median of what was left of waits behind that kind of work; none was longer: nothing is said."""
    assert own_left([1.0, 2.0, 9.0], 0.0) == 2.0
    assert own_left([1.0, 2.0, 9.0], 1.5) == 0.5
    assert own_left([1.0, 2.0, 9.0], 9.0) is None
    assert own_left([], 0.0) is None


def test_prefill_line():
    """G3: rows resident and rows of the whole prompt."""
    assert prefill_line(12288, 95131) == "prefill 12288/95131"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, 0),
        (0.4, 0),
        (0.5, 1),
        (9.4, 9),
        (9.6, 10),
        (10.003, 10),
        (12.5, 15),
        (57.4, 55),
        (59, 60),
        (64.9, 60),
        (65, 70),
    ],
)
def test_rounding(seconds, shown):
    """L1: to 1 s under 10, to 5 s under 60, else to 10 s."""
    assert rounded(seconds) == shown


def test_when():
    """L1: at 10, 20, 30 s from the waiter's start."""
    assert next_line_at(100.0, 100.0, 10.0) == 110.0
    assert next_line_at(100.0, 109.9, 10.0) == 110.0
    assert next_line_at(100.0, 110.0, 10.0) == 120.0
    assert next_line_at(100.0, 137.0, 10.0) == 140.0
    assert next_line_at(100.0, 50.0, 10.0) == 110.0  # a clock that stepped back asks for no earlier line


@given(st.floats(0, 1e7), st.floats(0, 1e5), st.sampled_from([1.0, 5.0, 10.0, 60.0]))
def test_never_due_twice(start, waited, every):
    """L1: the next line is later than now, and by no more than one interval."""
    now = start + waited
    line = next_line_at(start, now, every)
    assert now < line <= max(now, start) + every * (1 + 1e-9) + 1e-6
    assert next_line_at(start, line, every) > line


# -- the estimate ------------------------------------------------------------------------------------------------------

RATES = Rates(100.0, 10.0)


def known(*written: int, kind: str = "plain", rows: int = 500) -> History:
    """A history of answers so long, each a second a token."""
    history = History()
    for count in written:
        history = remembered(history, Ended(kind, count, float(count), rows))
    return history


def test_the_holder():
    """L2: its unread rows at its live rate, then the 40th percentile of what its kind wrote beyond its count."""
    history = known(*range(10, 210, 10))  # 10 … 200
    holder = Holder("plain", 500, 300, 95, 1_000, 9.0, prefill=50.0, decode=20.0)
    assert holder_left(holder, history, RATES) == 300 / 50 + (140 - 95) / 20  # 100 … 200 are beyond
    capped = Holder("plain", 500, 0, 95, 100, 9.0, decode=20.0)
    assert holder_left(capped, history, RATES) == 5 / 20
    other = Holder("thinking", 500, 0, 95, 1_000, 95.0)
    assert holder_left(other, history, RATES) == 150 - 95  # none of its kind: those that had run as long, by time


def test_nothing_is_said_of_too_little():
    """L3: under 8 of a kind ended, the time left over those that ran as long; under 8 of those, nothing."""
    holder = Holder("plain", 10, 0, 5, 1_000, 3.0)
    assert holder_left(holder, known(*range(1, 8)), RATES) is None
    assert waiter_takes(Waiter("plain", 100, 1_000), known(*range(1, 8)), RATES) is None
    assert holder_left(holder, known(*[50] * 8), RATES) == 45 / 10
    mixed = known(*[50] * 4)
    for count in [70] * 4:
        mixed = remembered(mixed, Ended("thinking", count, float(count)))
    assert holder_left(holder, mixed, RATES) == 50 - 3  # eight of any kind had run as long


def test_a_waiter_ahead_adds_its_time():
    """L2: its prompt at the recent rate and what its kind writes, capped by its max_tokens; then the next in line."""
    history = known(*[40] * 10)
    assert waiter_takes(Waiter("plain", 200, 1_000), history, RATES) == 200 / 100 + 40 / 10
    assert waiter_takes(Waiter("plain", 200, 10), history, RATES) == 200 / 100 + 10 / 10
    holder = Holder("plain", 500, 0, 20, 1_000, 1.0)
    line = [Waiter("plain", 200, 1_000), Waiter("plain", 0, 1_000), Waiter("plain", 0, 1_000)]
    assert waits_left([holder], line, history, RATES) == [2.0, 8.0, 12.0]


def test_list_scheduling():
    """L2: with several slots each takes the one that is free first, of those it may take."""
    history = known(*[100] * 10)
    holders = [Holder("plain", 500, 0, 50, 1_000, 1.0), Holder("plain", 500, 0, 80, 1_000, 1.0)]  # 5 s and 2 s
    both, whole = (0, 1), (0,)
    line = [Waiter("plain", 0, 1_000, slots) for slots in (both, both, whole, both)]
    assert waits_left(holders, line, history, RATES) == [2.0, 5.0, 15.0, 12.0]
    assert waits_left([None, holders[1]], line[:2], history, RATES) == [0.0, 2.0]


def test_who_reads_holds_the_others_up():
    """L2: beside a prompt that is read an answer gets a round a step: it is told what the others still read, too."""
    history = known(*[100] * 10)
    reads, writes = Holder("plain", 500, 400, 0, 1_000, 1.0), Holder("plain", 500, 0, 80, 1_000, 1.0)
    both = (0, 1)
    assert waits_left([reads, writes], [Waiter("plain", 0, 10, both)] * 2, history, RATES) == [6.0, 7.0]
    line = [Waiter("plain", 300, 10, both), Waiter("plain", 0, 10, both)]
    assert waits_left([writes, writes], line, history, RATES) == [2.0, 2.0]  # both are free at once
    later = Holder("plain", 500, 0, 50, 1_000, 1.0)
    assert waits_left([writes, later], line, history, RATES) == [2.0, 6.0]  # 2 + 3 + 1; the other's 5 became 8


def test_prompts_alike_are_asked_first():
    """L2: of the ended ones those with the nearest prompts say how long an answer will be."""
    history = known(*[10] * 40, rows=100)
    for end in known(*[500] * 40, rows=9_000).kinds["plain"]:
        history = remembered(history, end)
    assert waiter_takes(Waiter("plain", 100, 1_000), history, RATES) == 1 + 10 / 10
    assert waiter_takes(Waiter("plain", 9_000, 1_000), history, RATES) == 90 + 500 / 10


def test_rates_are_the_recent_ones():
    """L2: before the first end the self-check's, then those of the last that ended."""
    assert recent_rates(History(), RATES) == RATES
    history = History()
    for _ in range(40):
        history = remembered(history, Ended("plain", 100, 9.0, rows=1_000, prefill_s=4.0, decode_s=5.0))
    assert recent_rates(history, RATES) == Rates(250.0, 20.0)
    for _ in range(32):
        history = remembered(history, Ended("thinking", 100, 9.0, rows=1_000, prefill_s=8.0, decode_s=2.0))
    assert recent_rates(history, RATES) == Rates(125.0, 50.0)


def test_the_history_is_bounded():
    """L3: the last 512 of each kind."""
    history = known(*range(600))
    assert [end.written for end in history.kinds["plain"]] == list(range(88, 600))
    assert len(history.recent) == 32


@given(st.lists(st.tuples(st.sampled_from(["plain", "thinking"]), st.integers(1, 9)), max_size=1_300))
@settings(max_examples=30, deadline=None)
def test_a_history_goes_through_a_header(ended):
    """L3: the ends written into a trace's header make the same history again."""
    history = folded([Ended(kind, count, 1.0) for kind, count in ended])
    assert folded(flat(history)) == history


def test_nearest_rank():
    """L5: a percentile is a value that was there."""
    assert [nearest_rank([3, 1, 2, 4], percent) for percent in (1, 25, 50, 51, 75, 100)] == [1, 1, 2, 3, 3, 4]


counts = st.lists(st.integers(1, 2_000), min_size=8, max_size=80)
holder_facts = st.builds(
    Holder, st.just("plain"), st.integers(0, 9_000), st.integers(0, 9_000), st.integers(0, 3_000),
    st.integers(1, 4_000), st.floats(0, 500), st.sampled_from([0.0, 80.0]), st.sampled_from([0.0, 8.0]),
)  # fmt: skip
waiters = st.builds(Waiter, st.just("plain"), st.integers(0, 9_000), st.integers(1, 4_000))


@given(counts, holder_facts)
def test_the_holder_is_bounded(written, holder):
    """L2: never less than its prompt takes, never more than its max_tokens or the longest answer yet takes then."""
    left = holder_left(holder, known(*written), RATES)
    beyond = [count for count in written if count > holder.written]
    if len(beyond) >= 8:
        read, decode = holder.unread / (holder.prefill or RATES.prefill), holder.decode or RATES.decode
        most = min(max(beyond), max(holder.most, holder.written)) - holder.written
        assert read <= left <= read + most / decode + 1e-9
    else:
        assert left is None or 0 < left <= max(written) - holder.ran


@given(counts, st.lists(holder_facts, min_size=1, max_size=4), st.lists(waiters, max_size=8), st.data())
def test_the_line_only_grows(written, holders, line, data):
    """L2: on the same slots nobody is told less than who stands before it, and one more ahead makes no wait shorter."""
    slots = tuple(range(len(holders)))
    line = [Waiter(w.kind, w.rows, w.most, slots) for w in line]
    history = known(*written)
    waits = waits_left(holders, line, history, RATES)
    assert len(waits) == len(line)
    if None not in waits:
        assert waits == sorted(waits)
        at = data.draw(st.integers(0, len(line)))
        more = waits_left(holders, [*line[:at], Waiter("plain", 100, 100, slots), *line[at:]], history, RATES)
        assert all(new >= old - 1e-9 for old, new in zip(waits[at:], more[at + 1 :], strict=True))
        assert more[:at] == waits[:at]


@given(counts, holder_facts, st.lists(waiters, max_size=5), st.integers(2, 4))
def test_time_has_one_unit(written, holder, line, times):
    """L2: everything so many times slower is told so many times as long."""
    history = known(*written)
    slow = Rates(RATES.prefill / times, RATES.decode / times)
    own = Holder(holder.kind, holder.rows, holder.unread, holder.written, holder.most, holder.ran)
    if sum(count > holder.written for count in written) >= 8:
        one, other = waits_left([own], line, history, RATES), waits_left([own], line, history, slow)
        assert other == pytest.approx([wait * times for wait in one])
