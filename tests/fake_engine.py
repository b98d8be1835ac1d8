"""A worker process without a checkpoint: ``python -m tests.fake_engine CONFIG_JSON``. The model is a hash of its rows.

``FakeModel`` keeps the tokens in its cache, so its logits depend on every resident row, as a real one's do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

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
