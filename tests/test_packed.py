"""engine/native/packed.py: packed weights are kept, mapped again, and never trusted when damaged."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models.batch import Rows
from engine.native import build, packed
from engine.native.packed import ALIGNED, Packed, identity_of, prune
from engine.weights.checkpoint import open_checkpoint
from engine.weights.stored import Stored
from tests.checkpoints import build as tiny
from tests.checkpoints import write_gguf

SIZES = {"blk.0.attn_q.weight+blk.0.attn_k.weight": 5000, "output.weight": 64, "token_embd.weight": 70_001}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST", 1)


def weights(name: str, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def opened(home: Path, identity: str = "one") -> Packed:
    return Packed.open(identity, lambda *_: None, {"XDG_CACHE_HOME": str(home)})


def packs(home: Path, sizes: dict[str, int] = SIZES, identity: str = "one") -> dict[str, bool]:
    """A start: which tensors came from the file. All of them are right, whichever way they came."""
    store = opened(home, identity)
    kept = {}
    for name, size in sizes.items():
        tensor, kept[name] = store.take(name, size)
        assert tensor.dtype == torch.uint8 and tensor.shape == (size,) and tensor.data_ptr() % ALIGNED == 0
        if not kept[name]:
            tensor.copy_(weights(name, size))
        assert torch.equal(tensor, weights(name, size))
    store.done()
    return kept


def file_of(home: Path, identity: str = "one") -> Path:
    return home / "tandem" / "packed" / f"{identity}.bin"


def test_a_second_start_packs_nothing(tmp_path: Path) -> None:
    """N5: the first start packs and writes, the next ones map what it wrote and write nothing."""
    assert not any(packs(tmp_path).values())
    written = file_of(tmp_path).stat()
    assert written.st_mode & 0o077 == 0
    assert all(packs(tmp_path).values())
    assert file_of(tmp_path).stat().st_ino == written.st_ino
    assert [p.name for p in file_of(tmp_path).parent.iterdir()] == ["one.bin"]


def test_what_is_mapped_can_be_written_to(tmp_path: Path) -> None:
    """N5: a model that changes its own copy changes no file."""
    packs(tmp_path)
    tensor, kept = opened(tmp_path).take("output.weight", 64)
    assert kept
    tensor.zero_()
    assert all(packs(tmp_path).values())


def test_new_tensors_join_the_kept_ones(tmp_path: Path) -> None:
    """N5: a start that needs more, or another size, keeps what the file had beside it."""
    packs(tmp_path, {"a": 100, "b": 200})
    assert packs(tmp_path, {"b": 200, "c": 300}) == {"b": True, "c": False}
    assert packs(tmp_path, {"a": 100, "b": 201, "c": 300}) == {"a": True, "b": False, "c": True}
    assert all(packs(tmp_path, {"a": 100, "b": 201, "c": 300}).values())


@settings(deadline=None, max_examples=60)
@given(at=st.floats(0, 1, exclude_max=True), cut=st.booleans(), bit=st.integers(0, 7))
def test_a_damaged_file_is_never_used(at: float, cut: bool, bit: int) -> None:
    """N5: cut short anywhere, or one bit turned anywhere: every tensor is still right, and the file is whole again."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        packs(home)
        path = file_of(home)
        whole = path.read_bytes()
        place = int(at * len(whole))
        changed = whole[:place] + (b"" if cut else bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        path.write_bytes(changed)
        kept = packs(home)  # asserts that all are right
        if cut:
            assert not any(kept.values())
        assert all(packs(home).values())


@pytest.mark.parametrize("content", [b"", b"TANDEMPK", b"x" * 1000, b"TANDEMPK" + bytes(8)])
def test_a_file_of_something_else(tmp_path: Path, content: bytes) -> None:
    """N5: what was not written here is passed over."""
    packs(tmp_path)
    file_of(tmp_path).write_bytes(content)
    assert not any(packs(tmp_path).values())
    assert all(packs(tmp_path).values())


def test_a_damaged_length_is_not_believed() -> None:
    """N5: four bytes that say 4 GiB are no reason to read so much of a large file into memory."""

    class Large(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None and 0 <= size <= 64 << 20
            return super().read(size)

    with pytest.raises(ValueError):
        packed.read_header(Large(b"TANDEMPK" + b"\xff" * 1000))


def test_another_checkpoint_reads_nothing_of_it(tmp_path: Path) -> None:
    """N5: a file that was renamed is not another checkpoint's."""
    packs(tmp_path)
    file_of(tmp_path).rename(file_of(tmp_path, "two"))
    assert not any(packs(tmp_path, identity="two").values())


def test_a_small_model_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N5: what is packed in a moment pushes no large model out."""
    monkeypatch.setattr(packed, "LEAST", 1 << 20)
    packs(tmp_path)
    assert not file_of(tmp_path).exists()


def test_a_full_disk_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """N5: without room, and when the room ends while writing, the weights stay in memory and nothing else is left."""

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "secret")

    with monkeypatch.context() as patch:
        patch.setattr(packed, "_SPARE", 1 << 62)
        packs(tmp_path)
    assert "no room" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        packs(tmp_path)
    said = capsys.readouterr().err
    assert "could not be written" in said and "secret" not in said
    assert list(file_of(tmp_path).parent.iterdir()) == []


def test_no_cache_folder(tmp_path: Path) -> None:
    """N5: without a home everything is packed anew, and nothing is said."""
    store = Packed.open("one", lambda *_: None, {})
    assert store.take("a", 10)[1] is False
    store.done()
    (tmp_path / "tandem").write_text("in the way")
    assert not any(packs(tmp_path).values())
    assert not any(packs(tmp_path).values())


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N5: at most three checkpoints and so many bytes are kept; using one makes it young."""
    folder = file_of(tmp_path).parent
    for age, identity in enumerate(("a", "b", "c")):
        packs(tmp_path, identity=identity)
        os.utime(file_of(tmp_path, identity), (1000 + age, 1000 + age))
    (folder / "dead.part").write_bytes(b"")
    os.utime(folder / "dead.part", (0, 0))
    assert all(packs(tmp_path, identity="a").values())
    packs(tmp_path, identity="d")
    assert {p.name for p in folder.iterdir()} == {"a.bin", "c.bin", "d.bin"}
    monkeypatch.setattr(packed, "KEPT_BYTES", 2 * file_of(tmp_path, "a").stat().st_size)
    prune(file_of(tmp_path, "d"))
    assert {p.name for p in folder.iterdir()} == {"a.bin", "d.bin"}


def test_progress_is_said_while_it_is_written(tmp_path: Path) -> None:
    """N5: whoever waits for the engine hears how far it is."""
    said: list[tuple[str, int, int]] = []
    store = Packed.open("one", lambda *step: said.append(step), {"XDG_CACHE_HOME": str(tmp_path)})
    for name, size in SIZES.items():
        store.take(name, size)
    store.done()
    assert len(said) == len(SIZES)
    assert said[-1][1] == said[-1][2]


def test_a_checkpoint_is_known_by_its_files_and_the_layout(tmp_path: Path) -> None:
    """N5: wherever it lies; other bytes at an end, another time, another layout are another one."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_bytes(b"weights")
        os.utime(path, (5, 5))
    assert identity_of([one], "x") == identity_of([two], "x")
    seen = {identity_of([one], "x"), identity_of([one], "y"), identity_of([one, two], "x"), identity_of([], "x")}
    two.write_bytes(b"Weights")
    os.utime(two, (5, 5))
    seen.add(identity_of([two], "x"))
    two.write_bytes(b"weights")
    os.utime(two, (6, 6))
    seen.add(identity_of([two], "x"))
    assert len(seen) == 6


def test_the_layout_is_the_code_that_packs(tmp_path: Path) -> None:
    """N5: an update of the packing never reads what the old one wrote."""
    (tmp_path / "matrix.py").write_text("a = 1\n")
    before = packed.layout(tmp_path)
    assert packed.layout(tmp_path) == before
    (tmp_path / "matrix.py").write_text("a = 2\n")
    assert packed.layout(tmp_path) != before


@given(rows=st.integers(1, 3), flip=st.booleans())
def test_a_matrix_is_known_by_its_bytes(rows: int, flip: bool) -> None:
    """N5: rows in another order, or of another kind, are another matrix: a builder that changes finds no old one."""
    data = torch.arange(36, dtype=torch.uint8).expand(rows, 36)
    one = Stored("Q8_0", rows, 32, data)
    other = data.clone()
    other[-1, 0] += flip
    assert (packed.name_of(Stored("Q8_0", rows, 32, other)) == packed.name_of(one)) is not flip
    assert packed.name_of(Stored("Q4_1", rows, 32, data)) != packed.name_of(one)


def test_equal_matrices_share_a_place(tmp_path: Path) -> None:
    """N5: two matrices with the same bytes are packed alike, and one of them is kept."""
    for kept in (False, True):
        store = opened(tmp_path)
        for _ in range(2):
            tensor, filled = store.take("same", 100)
            assert filled is kept
            if not filled:
                tensor.copy_(weights("same", 100))
            assert torch.equal(tensor, weights("same", 100))
        store.done()


def test_a_model_from_the_file_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N5: the second load takes every quantised matrix from the file: the same bytes in memory, the same logits."""
    if build.library() is None:
        pytest.skip(build.why())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_gguf(tmp_path / "tiny.gguf", {"": "Q4_1", "token_embd": "Q8_0"})
    taken: list[bool] = []
    take = Packed.take

    def noted(store: Packed, name: str, nbytes: int) -> tuple[Tensor, bool]:
        tensor, kept = take(store, name, nbytes)
        taken.append(kept)
        return tensor, kept

    monkeypatch.setattr(Packed, "take", noted)
    logits, bytes_ = [], []
    for _ in range(2):
        model = tiny(open_checkpoint(path))
        with torch.inference_mode():
            logits.append(model.forward([Rows(model.new_cache(8), [1, 2, 3], 0)]))
        bytes_.append(model.weights_bytes)
    half = len(taken) // 2
    assert half and not any(taken[:half]) and all(taken[half:])
    assert torch.equal(*logits)
    assert len(set(bytes_)) == 1
