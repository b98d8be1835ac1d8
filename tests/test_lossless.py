"""benchmarks/lossless.py: some of its requests on the embedded model, and whether it would tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import lossless
from benchmarks.mixed import asked
from engine.speculate.draft import Draft, from_branches
from engine.weights.embedded import embedded_model

HANDFUL = ["logprobs", "tool required", "thinking cap, raw"]


@pytest.fixture(scope="module")
def setup() -> Iterator[lossless.Setup]:
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    before = torch.get_num_threads()
    try:
        yield lossless.opened(str(path), 1)
    except SystemExit as error:
        pytest.skip(str(error))
    finally:
        torch.set_num_threads(before)


@pytest.mark.e2e
def test_drafts_and_neighbours_change_nothing(setup: lossless.Setup) -> None:
    """F8, M6: tokens, log-probabilities, turns and ends, with forced drafts, alone and four at a time."""
    rows = lossless.compared(setup, HANDFUL)
    assert {row.name: row.faults for row in rows} == {name: [] for name in HANDFUL}
    ends = [answer.told["end"][0] for row in rows for answer in row.plain]
    assert ends == ["length", "stop", "length"]
    turns = [[(turn.kind, turn.reason) for answer in row.plain for turn in answer.told["turns"]] for row in rows]
    assert turns == [[], [], [("closed", "budget")]]
    entries = [len(answer.told["logprobs"]) / len(answer.ids) for row in rows for answer in row.plain]
    assert entries == [1, 0, 1]


@pytest.mark.e2e
def test_rows_of_a_wrong_branch_are_found(setup: lossless.Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """F8: the comparison fails where the cache keeps a round's first rows instead of those that were accepted."""
    config, loaded, described, renderer = setup
    starts = [msgspec.structs.replace(start, max_tokens=30) for start in asked("greedy", 0, described, renderer).starts]
    plain = lossless.tried(config, loaded, [starts])
    cache: Any = type(loaded.caches[0])
    right, kept = cache.keep, []

    def wrong(self: Any, start: int, path: Sequence[int]) -> None:
        kept.append(list(path))
        right(self, start, list(range(len(path))))

    monkeypatch.setattr(cache, "keep", wrong)
    drafted = lossless.tried(config, loaded, [starts], {run: answer.ids for run, answer in plain.items()})
    assert any(path != list(range(len(path))) for path in kept)
    assert lossless.differences(list(plain.values()), list(drafted.values()))


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.floats(0, 1)), max_size=5))
def test_a_tree_turned_round_is_the_same_tree(grown: list[tuple[list[int], float]]) -> None:
    """F8: the same paths with the same chances, and turned again it is what it was."""
    draft = from_branches(grown)
    other = lossless.turned(draft)
    assert lossless.turned(other) == draft and lossless.branches(other) == lossless.branches(draft)

    def paths(tree: Draft) -> list[tuple[list[int], float]]:
        return sorted(
            ([tree.tokens[i] for i in [*tree.ancestors(at), at]], tree.chances[at]) for at in range(len(tree))
        )

    assert paths(other) == paths(draft)
