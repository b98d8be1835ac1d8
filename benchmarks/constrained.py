"""Constrained against free decoding through the engine process: the price of a mask a token (row E6).

One schema of ten typed fields and an enum, answered many times with other seeds, and as many tokens decoded freely
after each, so that a busy neighbour meets both. Cold is the first constrained run of a fresh engine: it compiles the
grammar and reads the vocabulary. Warm are the others.

    python -m benchmarks.constrained [--runs 20] [--model FILE] [--threads N]
"""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from engine import protocol as wire
from engine.grammar import compile_grammar
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model
from stages.constraint import Constraint, judged
from tests.engine_client import Client

PROMPT = "Fill in this form about a person who lives in a small town, as JSON.\n"
FIELDS: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "height": {"type": "number", "minimum": 0, "maximum": 3},
    "married": {"type": "boolean"},
    "born": {"type": "string", "format": "date"},
    "scores": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    "plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "nickname": {"type": ["string", "null"], "maxLength": 20},
    "home": {
        "type": "object",
        "properties": {"street": {"type": "string", "maxLength": 40}},
        "required": ["street"],
        "additionalProperties": False,
    },
    "note": {"type": "string", "maxLength": 80},
    "mood": {"enum": ["happy", "calm", "tired"]},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}


class Bench:
    """A fresh engine and what it is asked."""

    def __init__(self, model: str, threads: int) -> None:
        checkpoint = open_checkpoint(Path(model))
        self._prompt = Tokenizer.from_str(checkpoint.tokenizer_json).encode(PROMPT).ids
        self._ends = list(checkpoint.end_ids)
        found = judged(Constraint(kind="schema", param="schema", value=SCHEMA), compile_grammar)
        assert isinstance(found, str), found
        self._grammar = wire.Grammar(found)
        self._client = Client(wire.Config(1, model, threads=threads))
        self.ready = self._client.ready()
        self._run = 0

    def run(self, seed: int, tokens: int, bound: bool) -> tuple[int, float, str]:
        """Tokens written, seconds of decoding as the engine counts them and until the end is heard, and the reason."""
        self._run += 1
        sampling = wire.Sampling(temperature=0.7, seed=seed)
        grammar, stops = (self._grammar, self._ends) if bound else (None, [])
        start = wire.Start(1, self._run, 0, self._prompt, sampling, tokens, stops, grammar=grammar)
        first = 0.0

        def heard(message: Any) -> None:
            nonlocal first
            self._client.acknowledge(message)
            if isinstance(message, wire.Tokens) and not first:
                first = time.perf_counter()

        self._client.link.send(start)
        ended = self._client.until(wire.Ended, heard)[-1]
        assert isinstance(ended, wire.Ended), ended
        return ended.generated, time.perf_counter() - first, ended.reason

    def first(self) -> float:
        """Seconds of a constrained run of one token from its start to its end: what cold and warm differ in."""
        begun = time.perf_counter()
        self.run(0, 1, True)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Stop the engine."""
        self._client.close()


@click.command()
@click.option("--runs", default=20, show_default=True)
@click.option("--tokens", default=160, show_default=True, help="Most tokens of a run.")
@click.option("--threads", default=0, show_default=True, help="0: as measured at load.")
@click.option("--model", default="", help="GGUF file or folder; default: the embedded model.")
def main(runs: int, tokens: int, threads: int, model: str) -> None:
    """Measure; the mark is 0.95 warm."""
    bench = Bench(model or str(embedded_model()), threads)
    try:
        plain = bench.run(0, tokens, False)
        cold_first = bench.first()
        warm_first = bench.first()
        ratios, rates = [], []
        for seed in range(runs):
            count, bound_s, _ = bench.run(seed, tokens, True)
            free_count, free_s, _ = bench.run(seed, count, False)
            assert free_count == count
            ratios.append(free_s / bound_s)
            rates.append((count - 1) / bound_s)
        free_rate = (plain[0] - 1) / plain[1]
    finally:
        bench.close()
    cold_s = cold_first - warm_first
    cold = (count - 1) / rates[-1]
    print(f"{platform.machine()}, {bench.ready.device}, {bench.ready.threads} threads, {runs} runs of one schema")
    print(f"free, first run: {free_rate:.1f} tokens/s; constrained: {statistics.median(rates):.1f} tokens/s (median)")
    print(f"warm: constrained / free {statistics.median(ratios):.3f} (median), worst {min(ratios):.3f}; mark 0.95")
    print(f"cold: the first run takes {cold_s:.2f} s more, once; constrained / free {cold / (cold + cold_s):.3f}")


if __name__ == "__main__":
    main()
