"""engine/weights/gguf_reader.py: the same answers as gguf's own reader, sooner and without keeping the file mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from engine.weights.errors import CheckpointError
from engine.weights.gguf_reader import GgufFile
from tests.checkpoints import write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", {"": "Q4_1", "token_embd": "Q8_0", "attn_v": "Q6_K"})


def test_metadata_is_that_of_gguf(path: Path) -> None:
    """N3: every key, scalars and arrays of strings and numbers, as the reference reader gives it."""
    ours = GgufFile(path)
    reader = GGUFReader(path)
    assert len(reader.fields) > 15
    for name, field in reader.fields.items():
        assert ours.get(name) == field.contents(), name
    assert ours.get("no.such.key", 7) == 7


def test_tensors_are_that_of_gguf(path: Path) -> None:
    """N3: every tensor's kind, shape and bytes."""
    ours = GgufFile(path)
    reader = GGUFReader(path)
    assert ours.names() == {t.name for t in reader.tensors}
    for tensor in reader.tensors:
        stored = ours.read(tensor.name)
        assert stored.kind == tensor.tensor_type.name
        assert (stored.cols, stored.rows) == (tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1)
        assert np.array_equal(stored.data.numpy().reshape(-1), tensor.data.view(np.uint8).reshape(-1))


def test_the_file_is_not_kept_mapped(path: Path) -> None:
    """N3: no page of the file stays with us once its metadata is read."""
    kept = GgufFile(path)
    kept.read("token_embd.weight")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    assert str(path) not in maps.read_text()


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"PK\x03\x04 a zip file, not a model" * 10):
        broken.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a GGUF file"):
            GgufFile(broken)


@pytest.mark.parametrize("part", [0.1, 0.3, 0.6, 0.95])
def test_a_file_cut_short_is_refused(path: Path, part: float) -> None:
    """A download that stopped is said to be one, at opening, not in the middle of a load."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointError, match="download it again"):
        GgufFile(path)


def test_a_missing_tensor_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor blk\.9\.attn_q\.weight"):
        GgufFile(path).read("blk.9.attn_q.weight")
