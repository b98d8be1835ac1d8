"""A worker process without a checkpoint: ``python -m tests.fake_engine CONFIG_JSON``. The model is a hash of its rows.

``FakeModel`` keeps the tokens in its cache, so its logits depend on every resident row, as a real one's do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

VOCAB = 50
POISON = 49
"""A token whose forward pass raises, with a text that must reach nobody."""
SECRET = "the prompt said: xyzzy"


class FakeModel:
    window, vocab, weights_bytes, kv_bytes_per_row = 96, VOCAB, 1000, 8

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def new_cache(self, rows: int) -> Tensor:
        return torch.zeros(rows, dtype=torch.int64)

    def workspace(self, rows: int, start: int) -> int:
        return rows * (start + rows)

    def forward(self, tokens: Tensor, cache: Tensor, start: int, *, all_rows: bool = False) -> Tensor:
        self.steps.append((len(tokens), start))
        if POISON in tokens.tolist() and len(tokens) != 64:  # the self-check's prompt may hold it
            raise RuntimeError(SECRET)
        cache[start : start + len(tokens)] = tokens
        seen = cache[: start + len(tokens)].double()
        key = (seen * torch.arange(1, len(seen) + 1)).sum()
        logits = torch.sin(key + torch.arange(VOCAB, dtype=torch.float64) * 1.7).float() * 3
        logits[POISON] = -20.0
        return logits[None]


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
