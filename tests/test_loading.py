"""engine/models/loading.py: what stays in memory, and what is said meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models import registry
from engine.models.batch import Rows
from engine.models.loading import Loader
from engine.native import build as native
from engine.native import lib
from engine.native.matrix import fresh
from engine.native.packed import Packed
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model
from tests.checkpoints import build, write_gguf

GROWTH = """
import gc, sys
from pathlib import Path
import torch
from engine.models import registry
from engine.weights.checkpoint import open_checkpoint

def resident():
    gc.collect()
    line = next(l for l in open("/proc/self/status") if l.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

def load(path):
    checkpoint = open_checkpoint(Path(path))
    model = registry.build(
        checkpoint, device=torch.device("cpu"), threads=1, rows=0, progress=lambda *_: None
    )
    return checkpoint, model

tiny = load(sys.argv[1])
before = resident()
checkpoint, model = load(sys.argv[2])
print(resident() - before, model.weights_bytes, checkpoint.file_bytes)
"""
"""A tiny model first: the code that a load pulls in is not counted as weights."""

KINDS = {"": "Q4_1", "token_embd": "Q8_0"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_embedded_model_takes_little_more_than_its_file(tmp_path: Path) -> None:
    """N3: resident weights at most 1.15 times the file, by our own account and by the process's growth."""
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    tiny = write_gguf(tmp_path / "tiny.gguf", KINDS)
    command = [sys.executable, "-c", GROWTH, str(tiny), str(path)]
    root = Path(__file__).resolve().parent.parent
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    growth, weights, file = (int(n) for n in said.split())
    assert weights <= 1.15 * file
    assert growth <= 1.15 * file, f"the process grew by {growth / file:.3f} times the file"


def test_the_account_is_every_tensor_once(tmp_path: Path) -> None:
    """N3: a tied head is not counted twice; float weights count as they lie in the file."""
    path = write_gguf(tmp_path / "tiny.gguf", {"": "F16", "token_embd": "F16"})
    checkpoint = open_checkpoint(path)
    expected = sum(checkpoint.read(name).data.nbytes for name in checkpoint.names())
    assert build(checkpoint).weights_bytes == expected


def test_progress_counts_bytes_up_to_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", KINDS))
    said: list[tuple[str, int, int]] = []
    registry.build(checkpoint, device=torch.device("cpu"), threads=0, rows=0, progress=lambda *step: said.append(step))
    said = [step for step in said if step[0] != "native step"]  # it is built first, where it was not kept
    done = [step[1] for step in said]
    assert len(said) == len(checkpoint.names()) and done == sorted(done)
    assert {(what, total) for what, _, total in said} == {("weights", checkpoint.file_bytes)}
    assert 0.5 * checkpoint.file_bytes < done[-1] <= checkpoint.file_bytes


def test_a_model_without_the_native_library_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """N5: no compiler: one plain line in the log, and the model runs in torch."""
    monkeypatch.setattr(native, "_opened", [native.Native(None, "There is no C++ compiler: install g++.")])
    lib.kernels.cache_clear()
    try:
        made = build(open_checkpoint(write_gguf(tmp_path / "tiny.gguf", KINDS)))
        cache = made.new_cache(8)
        assert made.path == "torch cpu" and bool(made.forward([Rows(cache, [1, 2], 0)]).isfinite().all())
    finally:
        lib.kernels.cache_clear()
    said = capsys.readouterr().err.splitlines()
    assert said == ["Steps run in torch, not in the native library: There is no C++ compiler: install g++."]


def test_packed_weights_are_known_by_their_rows(tmp_path: Path) -> None:
    """N5: what an earlier start packed is taken again, but not where rows have come to lie in another order."""
    if lib.kernels() is None:
        pytest.skip("no native library here")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {"": "Q4_1"}))

    def asked(order: Tensor) -> list[str]:
        names: list[str] = []
        loader = Loader(checkpoint, torch.device("cpu"), False, lambda *_: None)

        class Kept(Packed):
            def take(self, name: str, nbytes: int) -> tuple[Tensor, bool]:
                names.append(name)
                return fresh(nbytes)

        loader.packed = Kept(None, "", lambda *_: None)
        loader.beside([loader.read("blk.0.attn_q.weight", 256, 256).pick(order)])
        loader.table("token_embd.weight", 320, 256)
        return names

    rows = torch.arange(256)
    assert asked(rows) == asked(rows) and len(set(asked(rows))) == 2
    assert asked(rows)[0] != asked(rows.flip(0))[0] and asked(rows)[1] == asked(rows.flip(0))[1]
