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


NAMES = ("string in a list", "list of strings", "list of numbers", "number of keys", "number of tensors", "no rows")


@pytest.mark.parametrize("what", NAMES)
def test_a_damaged_table_is_refused_and_nothing_is_allocated_for_it(path: Path, what: str) -> None:
    """N3: a length, count or size that the file cannot hold, also at its very end, is an error at opening."""
    content = bytearray(path.read_bytes())
    tokens = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    kinds = content.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type")
    rows = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 8
    at = dict(zip(NAMES, (tokens + 16, tokens + 8, kinds + 8, 16, 8, rows), strict=True))[what]
    content[at : at + 8] = (0 if what == "no rows" else (1 << 63) + 5).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="download it again"):
        GgufFile(path)


def test_a_list_that_says_to_be_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    """N3: the last key of a file without tensors, so that nothing read behind it fails."""
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (10).to_bytes(4, "little")
    short = tmp_path / "short.gguf"
    short.write_bytes(head + key + (1 << 40).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="shorter than its own tables"):
        GgufFile(short)


def test_text_that_is_no_text_is_refused(path: Path) -> None:
    """N3: bytes that are no UTF-8, in a key's value and in a list."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"<filler0>", b"<\xff\xfeller0>"))
    with pytest.raises(CheckpointError, match=r"no readable text in tokenizer\.ggml\.tokens"):
        GgufFile(path).get("tokenizer.ggml.tokens")
    path.write_bytes(content.replace(b"gpt-2", b"gp\xff-2"))
    with pytest.raises(CheckpointError, match="not a GGUF file that can be read"):
        GgufFile(path)


def test_a_file_that_may_not_be_read_is_said_to_be_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: not a fault of the engine that would be tried three times."""

    def refuse(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("numpy.memmap", refuse)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf cannot be read: Permission denied"):
        GgufFile(path)


def test_a_missing_tensor_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor blk\.9\.attn_q\.weight"):
        GgufFile(path).read("blk.9.attn_q.weight")
