"""engine/threads.py: a step's thread count, without a clock."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.threads import Threads


def counts(threads: Threads, times: list[float]) -> list[int]:
    """The counts used while steps take so long."""
    used = []
    for seconds in times:
        used.append(threads.count)
        threads.took(seconds)
    return used


def test_while_all_is_quiet_every_thread_is_used() -> None:
    assert counts(Threads(2, 1.0), [0.6] * 50) == [2] * 50


def test_slow_steps_on_average_or_a_very_slow_one_fall_to_one_thread() -> None:
    assert counts(Threads(2, 1.0), [1.3, 1.2, 1.2, 1.3, 1.0]) == [2, 2, 2, 2, 1]
    assert counts(Threads(2, 1.0), [4.1, 1.0]) == [2, 1]


def test_a_hiccup_of_the_server_beside_it_is_no_neighbour() -> None:
    """N5: two steps that a woken thread stretched must not cost sixteen at one thread's speed."""
    assert counts(Threads(2, 1.0), [0.7, 1.5, 1.5, 0.7, 0.7, 1.8, 0.7, 0.7, 0.7]) == [2] * 9


def test_it_tries_again_ever_more_seldom_while_the_neighbour_stays() -> None:
    threads = Threads(2, 1.0)
    used = []
    for _ in range(1200):
        used.append(threads.count)
        threads.took(9.0 if threads.count == 2 else 1.0)
    probes = [i for i, count in enumerate(used) if count == 2]
    assert [b - a - 1 for a, b in pairwise(probes)] == [16, 32, 64, 128, 256, 256, 256]


def test_a_quiet_stretch_makes_it_quick_again() -> None:
    threads = Threads(2, 1.0)
    counts(threads, [9.0] + [1.0] * 16 + [9.0] + [1.0] * 32 + [0.6] * 16)
    assert counts(threads, [9.0] + [1.0] * 17) == [2] + [1] * 16 + [2]


def test_what_one_thread_takes_is_learnt_while_one_is_used() -> None:
    threads = Threads(2, 1.0)
    counts(threads, [9.0] + [3.0] * 16)  # the sequence got long: one thread takes three times what it did
    assert counts(threads, [2.5] * 10) == [2] * 10


@given(st.lists(st.floats(0, 100), max_size=60))
def test_nothing_to_choose_is_nothing_changed(times: list[float]) -> None:
    assert set(counts(Threads(1, 1.0), times)) <= {1}
    assert set(counts(Threads(4, 0.0), times)) <= {4}
