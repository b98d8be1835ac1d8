"""How far the served model is from its own weights in float32: KL divergence a token, over real text.

The reference decodes the same file's weights to float32 and computes in float32 throughout. Two paths are measured, for
they round differently: prefill (many rows a step) and decode (one row a step, reading what it wrote before).

    python -m benchmarks.accuracy [--model FILE] [--text FILE] [--positions N] [--threads N]
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.models import registry
from engine.models.batch import Rows
from engine.models.cache import Cache
from engine.models.registry import Model
from engine.weights.checkpoint import Checkpoint, open_checkpoint
from engine.weights.embedded import embedded_model

TEXT = Path(__file__).resolve().parent.parent / "fixtures" / "texts" / "accuracy.txt"
"""Prose, explanation, code, a chat, minutes of a meeting, dialogue; written for this."""

LIMIT = 6e-3
"""Mean KL a token that a served path may have."""


@dataclass(frozen=True)
class Distance:
    """KL divergence in nats a token, over all positions; ``same``: the share where the likeliest token is the same."""

    path: str
    mean: float
    worst: float
    same: float

    @staticmethod
    def of(path: str, got: Tensor, expected: Tensor) -> Distance:
        """From logits ``[positions, vocab]``."""
        p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
        each = (p.exp() * (p - q)).sum(-1)
        same = (got.argmax(-1) == expected.argmax(-1)).double().mean()
        return Distance(path, float(each.mean()), float(each.max()), float(same))


def load(checkpoint: Checkpoint, threads: int, *, exact: bool) -> Model:
    device = torch.device("cpu")
    return registry.build(checkpoint, device=device, threads=threads, rows=0, progress=lambda *_: None, exact=exact)


def alone(model: Model, tokens: Tensor, cache: Cache, start: int, *, all_rows: bool = False) -> Tensor:
    """A step of one sequence: logits of its last row, or of all."""
    wanted = tokens.numel() if all_rows else 1
    return model.forward([Rows(cache, tokens.tolist(), start, wanted=wanted)])


def prefill(model: Model, tokens: Tensor) -> Tensor:
    return alone(model, tokens, model.new_cache(tokens.numel()), 0, all_rows=True)


def decode(model: Model, tokens: Tensor, rows: int) -> Tensor:
    """``rows`` at a time, each step reading what those before it wrote."""
    cache = model.new_cache(tokens.numel())
    steps = tokens.split(rows)
    return torch.cat([alone(model, step, cache, i * rows, all_rows=True) for i, step in enumerate(steps)])


def measure(checkpoint: Checkpoint, text: str, positions: int, threads: int, rows: int = 1) -> Iterator[Distance]:
    """The served paths against float32, over the first ``positions`` tokens of ``text``; ``rows`` a decode step."""
    tokens = tokenised(checkpoint, text, positions)
    with torch.inference_mode():
        expected = prefill(load(checkpoint, threads, exact=True), tokens)
        served = load(checkpoint, threads, exact=False)
        yield Distance.of("prefill", prefill(served, tokens), expected)
        yield Distance.of("decode", decode(served, tokens, rows), expected)


def tokenised(checkpoint: Checkpoint, text: str, positions: int) -> Tensor:
    return torch.tensor(Tokenizer.from_str(checkpoint.tokenizer_json).encode(text).ids[:positions])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=embedded_model())
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--positions", type=int, default=768)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    text = options.text.read_text(encoding="utf-8")
    positions = tokenised(checkpoint, text, options.positions).numel()
    print(f"model {checkpoint.name}, {positions} positions of {options.text.name}, {options.threads} threads")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {platform.machine()}, {processor()}")
    print(f"{'path':10} {'KL mean':>9} {'KL max':>9} {'same top':>9}")
    for distance in measure(checkpoint, text, positions, options.threads):
        print(f"{distance.path:10} {distance.mean:9.2e} {distance.worst:9.2e} {distance.same:9.3f}", flush=True)


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
