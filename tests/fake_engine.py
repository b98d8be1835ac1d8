"""A worker process without a checkpoint: ``python -m tests.fake_engine CONFIG_JSON``. The model is a hash of its rows.

``FakeModel`` keeps the tokens in its cache, so its logits depend on every resident row, as a real one's do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.models.batch import Rows
from engine.models.cache import Loan, Mark

VOCAB = 50
POISON = 49
"""A token whose forward pass raises, with a text that must reach nobody."""
SECRET = "the prompt said: xyzzy"


class FakeCache:
    """A cache whose rows are the tokens themselves. It has no state beside them."""

    def __init__(self, rows: int) -> None:
        self.rows, self.tokens = rows, torch.zeros(rows, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes

    def keep(self, start: int, path: Sequence[int]) -> None:
        self.tokens[start : start + len(path)] = self.tokens[[start + at for at in path]]

    def rewind(self, rows: int) -> int:
        return rows

    def mark(self) -> Mark | None:
        return None

    def go_back(self, mark: Mark | None) -> None:
        assert mark is None

    def copy(self, first: int, stop: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[first:stop].clone()}

    def put(self, first: int, rows: dict[str, Tensor]) -> None:
        self.tokens[first : first + len(rows["tokens"])] = rows["tokens"]

    def lend(self, rows: int) -> Loan:
        return Loan(rows, self.copy(0, rows))

    def take_back(self, loan: Loan) -> None:
        self.put(0, loan.tensors)


class FakeModel:
    window, vocab, weights_bytes, kv_bytes_per_row = 96, VOCAB, 1000, 8
    state_bytes, alike, path = 0, 32, "fake"

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []  # rows and start of every part

    def new_cache(self, rows: int) -> FakeCache:
        return FakeCache(rows)

    def workspace(self, rows: int, start: int) -> int:
        return rows * (start + rows)

    def use(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def forward(self, parts: Sequence[Rows]) -> Tensor:
        return torch.stack([logits for part in parts for logits in self._part(part)])

    def _part(self, part: Rows) -> list[Tensor]:
        cache, tokens, start = part.cache, list(part.tokens), part.start
        self.steps.append((len(tokens), start))
        if POISON in tokens and len(tokens) != 64:  # the self-check's prompt may hold it
            raise RuntimeError(SECRET)
        cache.tokens[start : start + len(tokens)] = torch.tensor(tokens)
        parents = range(-1, len(tokens) - 1) if part.parents is None else part.parents
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        before = cache.tokens[:start].tolist()
        return [self.logits(before + path) for path in paths[len(tokens) - part.wanted :]]

    def logits(self, tokens: list[int]) -> Tensor:
        """Float32 ``[vocab]`` behind ``tokens``, all of them."""
        key = (torch.tensor(tokens).double() * torch.arange(1, len(tokens) + 1)).sum()
        logits = torch.sin(key + torch.arange(self.vocab, dtype=torch.float64) * 1.7).float() * 3
        if self.vocab == VOCAB:
            logits[POISON] = -20.0
        return logits


class StateCache(FakeCache):
    """A cache with a recurrent state: the tokens it was led through, one after another. Strict about the protocol.

    A draft's rows leave it as it was; ``keep`` notes a path, the next step folds that in. It can go back into the last
    two steps while they were drafts.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.state: list[int] = []
        self.noted: list[int] | None = None  # a draft's tokens, until ``keep``
        self.pending: list[int] = []
        self.before = 0  # rows the state can still go back to, of what is folded in

    def fold(self) -> None:
        """The step that begins has the path of the last one in its state."""
        assert self.noted is None, "a draft that nobody kept"
        if self.pending:
            self.before = len(self.state)
            self.state += self.pending
            self.pending = []

    def keep(self, start: int, path: Sequence[int]) -> None:
        assert self.noted is not None and path[0] == 0
        self.pending, self.noted = [self.noted[at] for at in path], None
        super().keep(start, path)

    def rewind(self, rows: int) -> int:
        if not self.before <= rows <= len(self.state) + len(self.pending):
            return 0
        kept = len(self.state)
        self.pending = self.pending[: max(rows - kept, 0)]
        del self.state[rows:]
        return rows

    def mark(self) -> Mark | None:
        rows = self.state + self.pending
        state = torch.zeros(self.rows, dtype=torch.int64)  # of one size, as a real one
        state[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        return Mark(len(rows), {"state": state})

    def go_back(self, mark: Mark | None) -> None:
        self.state = [] if mark is None else mark.tensors["state"][: mark.rows].tolist()
        self.pending, self.noted, self.before = [], None, len(self.state)

    def lend(self, rows: int) -> Loan:
        assert self.noted is None, "a draft that nobody kept"
        loan = Loan(rows, self.copy(0, rows), (list(self.state), list(self.pending), self.before, self.rows))
        self.go_back(None)
        self.rows = rows
        return loan

    def take_back(self, loan: Loan) -> None:
        position: Any = loan.state
        self.put(0, loan.tensors)
        self.state, self.pending, self.before, self.rows = position
        self.noted = None


class StateModel(FakeModel):
    """The fake model with a recurrent state beside its rows: where both do not say the same, a step is a fault.

    ``strict``: once it is loaded; a load times steps anywhere in the window.
    """

    state_bytes, alike, strict = 400, 1 << 20, False

    def new_cache(self, rows: int) -> FakeCache:
        return StateCache(rows)

    def _part(self, part: Rows) -> list[Tensor]:
        cache = part.cache
        assert isinstance(cache, StateCache)
        cache.fold()
        if self.strict and cache.state != cache.tokens[: part.start].tolist():
            raise AssertionError("the state does not stand behind the rows")
        logits = super()._part(part)
        if part.draft:
            cache.noted = list(part.tokens)
        else:
            cache.state += list(part.tokens)
            cache.before = len(cache.state)
        return logits


def checkpoint(path: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="fake", architecture="fake", tokenizer_json="{}", template="", special={}, end_ids=[2], add_bos=False,
        bos_id=None, file_bytes=1000, config=SimpleNamespace(window=96, vocab=VOCAB),
    )  # fmt: skip


def build(
    checkpoint: object, *, device: object, threads: int, rows: int, progress: Callable[[str, int, int], None]
) -> FakeModel:
    progress("weights", 0, 1000)
    print("a stray print must not break the pipe")
    progress("weights", 1000, 1000)
    return FakeModel()


if __name__ == "__main__":
    from engine.worker import main

    main(sys.argv[1:], checkpoint, build)  # type: ignore[arg-type]
