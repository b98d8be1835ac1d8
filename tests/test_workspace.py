"""What a prefill step is said to take, against what torch's allocator gives out and what the process holds at most."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.models import dense, hybrid
from engine.models.batch import Rows
from engine.models.registry import Model
from engine.native import lib
from engine.weights.checkpoint import open_checkpoint
from tests import checkpoints, hybrids
from tests.checkpoints import build, write_gguf
from tests.test_dense import reference, served

MIXES = {
    "four bits": {"": "Q4_1", "token_embd": "Q8_0"},
    "blocks": {"": "Q8_0"},
    "K-quants": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K"},
    "bfloat16": {"": "BF16"},
    "float32": {},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding windows": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 300}),
    "windows of some layers": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1},
    ),
    "norms of heads": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 64}),
}
WIDE = {"hidden_size": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
HYBRIDS: dict[str, dict[str, Any]] = {
    "small": {"intermediate_size": 96},
    "wide": {**WIDE, "intermediate_size": 768},
    "experts": {**WIDE, **EXPERTS, "num_experts": 16, "num_experts_per_tok": 4},
    "guessing": {**WIDE, "intermediate_size": 512},
}
CHUNKS = ((64, 0), (64, 1800), (256, 0), (256, 1000), (1024, 0), (1024, 1024))
WINDOW = 2048


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the worker runs; the number of threads is put back. A chunk asks for no trial of rounds."""
    monkeypatch.setattr(dense.Decoder, "_tried", lambda _: False)
    monkeypatch.setattr(hybrid.Hybrid, "_tried", lambda _: False)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native library."""
    monkeypatch.setattr(lib, "kernels", lambda: None)


def most(model: Model, part: Rows) -> int:
    """Bytes the allocator gave out at most during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model.forward([part])
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = top = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            top = max(top, held)
    return top


def holds(model: Model, chunks: tuple[tuple[int, int], ...] = CHUNKS) -> None:
    """Every chunk takes what is said: within a fifth, and never over it by more than 5 %."""
    made = random.Random(3)
    cache = model.new_cache(max(start + rows for rows, start in chunks))
    model.forward([Rows(cache, [7] * 64, 0)])
    for rows, start in chunks:
        took = most(model, Rows(cache, [made.randrange(300) for _ in range(rows)], start))

        assert 0.95 < model.workspace(rows, start) / took < 1.2, (rows, start)


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("mix", MIXES)
def test_a_prefill_takes_what_is_said(tmp_path: Path, mix: str) -> None:
    """J4: within a fifth, and never more than 5 % under, for chunks at a prompt's begin and far behind it."""
    path = write_gguf(tmp_path / "tiny.gguf", MIXES[mix], extra={"llama.context_length": WINDOW})
    holds(build(open_checkpoint(path), exact=mix == "float32"))


@pytest.mark.usefixtures("in_torch")
def test_a_long_chunk_takes_what_is_said(tmp_path: Path) -> None:
    """J4: of 4096 rows the masks and the activations alike."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": "Q4_1"}, extra={"llama.context_length": 5120})
    holds(build(open_checkpoint(path)), ((4096, 0), (4096, 1024)))


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_other_families_take_what_is_said(tmp_path: Path, family: str) -> None:
    """J4: a window's masks are as wide as what it sees, and a norm of heads squares them."""
    name, changes = FAMILIES[family]
    theirs = reference(name, max_position_embeddings=WINDOW, **changes)
    holds(served(theirs, tmp_path, exact=True))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrids_prefill_takes_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, native: bool
) -> None:
    """J4: with recurrent layers, experts and a layer that guesses; its matrices in torch or in the native library."""
    if not native:
        monkeypatch.setattr(lib, "kernels", lambda: None)
    elif lib.kernels() is None:
        pytest.skip("the native library is not built here")
    sizes = {"max_position_embeddings": WINDOW, **HYBRIDS[kind]}
    theirs = hybrids.reference(experts=kind == "experts", half=True, **sizes)
    folder = hybrids.save(theirs.to(torch.bfloat16), tmp_path, mtp=kind == "guessing")
    holds(hybrids.load(folder, exact=kind == "small" and not native), CHUNKS[:5])


NATIVE = """
import sys
from pathlib import Path
import torch
from engine import memory
from engine.models.batch import Rows
from engine.weights.checkpoint import open_checkpoint
from tests.checkpoints import build

path, rows, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = build(open_checkpoint(Path(path)), rows=rows + start)
assert model.path.startswith("native")
cache = model.new_cache(rows + start)
Path("/proc/self/clear_refs").write_text("5")
before = memory.resident()
with torch.inference_mode():
    model.forward([Rows(cache, [7] * rows, start)])
print(model.workspace(rows, start), memory.peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a process's high-water mark is reset in /proc")
@pytest.mark.parametrize("kind", ["Q4_K", "BF16"])
def test_a_native_step_takes_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """J4: the first step of a process, which writes to all of the step's room; wide layers, so that it stands out."""
    if lib.kernels() is None:
        pytest.skip("the native library is not built here")
    monkeypatch.setitem(checkpoints.SIZES, "ff", 16384)
    monkeypatch.setitem(checkpoints.META, "feed_forward_length", 16384)
    monkeypatch.setitem(checkpoints.META, "block_count", 1)
    path = write_gguf(tmp_path / "wide.gguf", {"": kind}, extra={"llama.context_length": WINDOW})
    # Rooms of their own for what is large: what loading gave back would serve again and not be seen.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "32768", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", NATIVE, str(path), *(("256", "0") if kind == "BF16" else ("1024", "500"))]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    said, took = (int(number) for number in ran.stdout.split())
    assert 0.95 < said / took < 1.2
