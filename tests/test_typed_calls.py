"""Calls of whole sessions under a strict validator (benchmarks/typed_calls.py prints the table)."""

from __future__ import annotations

import pytest

from benchmarks.typed_calls import BFCL, agent_session, bfcl_session, measure


def test_a_coding_agents_session() -> None:
    """D9: a strict validator refuses none of a scripted session's calls; with typing off it refuses most of them."""
    typed, untyped = measure(agent_session(), True), measure(agent_session(), False)
    print(f"typing on: {typed}; off: {untyped}")
    assert (typed.calls, typed.refused, typed.lost) == (26, 0, 0)
    assert untyped.calls == 26 and untyped.refused >= 13


@pytest.mark.skipif(not BFCL.exists(), reason="the function-calling subset is not here: set TANDEM_DATA")
def test_the_function_calling_subset() -> None:
    """D9: nor any of the ground truth of some hundred public function-calling items, written and read back."""
    typed, untyped = measure(bfcl_session(), True), measure(bfcl_session(), False)
    print(f"typing on: {typed}; off: {untyped}")
    assert typed.calls > 500 and typed.refused == typed.lost == 0
    assert untyped.refused > 100
