"""engine/disk.py and engine/prefix_file.py: prefixes in files, and none that is not what was written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import prefix_file
from engine.disk import Disk
from engine.models.cache import KV, Cache, Mark
from engine.prefix import Prefix
from engine.resident import Residency
from tests.fake_engine import FakeCache
from tests.keeping import GRID, holds, make, write

LONG = 1 << 30


class Folder:
    """A folder's files as one engine after another sees them."""

    def __init__(self, path: Path, recurrent: bool = False, limit: int = LONG, identity: str = "model") -> None:
        self.path, self.recurrent, self.reports = path, recurrent, list[str]()
        self.cache = make(recurrent)
        self.disk = Disk(path, limit, identity, GRID, self.cache, self.reports.append)

    def save(self, tokens: list[int], hashes: list[bytes] | None = None) -> int:
        """A conversation that was read on the grid. How many pieces it took."""
        cache, marks = make(self.recurrent, len(tokens) + 1), []
        for at in range(0, len(tokens), GRID):
            write(cache, at, tokens[at : at + GRID])
            mark = cache.mark()
            marks += [mark] if mark is not None else []
        return sum(1 for _ in self.disk.save(Prefix(tokens, hashes or [], marks), cache))

    def load(self, tokens: list[int]) -> list[int]:
        """The tokens a run over ``tokens`` can begin with, loaded and there."""
        cache = make(self.recurrent, len(tokens) + 1)
        prefix = self.disk.load(self.disk.find(tokens), cache)
        for mark in prefix.marks:
            cache.go_back(mark)
        assert not prefix.tokens or prefix.marks or not self.recurrent
        assert not prefix.tokens or holds(cache, prefix.tokens)
        return prefix.tokens

    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))


both = pytest.mark.parametrize("recurrent", [False, True], ids=["dense", "recurrent"])


@both
def test_a_prefix_outlives_the_engine(tmp_path: Path, recurrent: bool) -> None:
    """G2: whole chunks of the grid are found again by another process, and one row is always left to compute."""
    tokens = list(range(14))
    Folder(tmp_path, recurrent).save(tokens)
    again = Folder(tmp_path, recurrent)
    assert again.load([*tokens, 99]) == tokens[:12]
    assert again.load(tokens[:12]) == tokens[:8] and again.load([*tokens[:9], 77, 78, 79, 80]) == tokens[:8]
    assert again.load([5, *tokens]) == [] and again.load([]) == [] and not again.reports


def test_conversations_that_begin_alike_share_files(tmp_path: Path) -> None:
    """G2: a chunk is written once; one that grew writes its new chunks alone."""
    folder = Folder(tmp_path)
    folder.save(list(range(8)))
    written = [path.stat().st_ino for path in folder.files()]
    folder.save([*range(8), 50, 51, 52, 53])
    folder.save([*range(8), 60, 61, 62, 63])
    assert len(folder.files()) == 4 and {path.stat().st_ino for path in folder.files()} > {*written}
    assert folder.disk.missing(Prefix([*range(8), 60, 61, 62, 63, 1], [])) == 0
    assert folder.disk.missing(Prefix([*range(8), 60, 61, 62, 63, 1, 2, 3, 4], [])) == 16


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    """G2: 0600 in a 0700 folder; no name holds a token, and names say nothing without the model's files."""
    folder = Folder(tmp_path / "there" / "prefixes")
    folder.save([31337] * 4)
    (path,) = folder.files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "31337" not in path.name
    other = Folder(tmp_path / "other", identity="another model")
    other.save([31337] * 4)
    assert other.files()[0].name != path.name


def test_they_are_plain_safetensors(tmp_path: Path) -> None:
    """G2: any reader of the format opens them."""
    folder = Folder(tmp_path, recurrent=True)
    folder.save([5, 6, 7, 8], [])
    tensors = safetensors.torch.load_file(folder.files()[0])
    assert tensors["tokens"].tolist() == [5, 6, 7, 8] and tensors["rows.tokens"].tolist() == [5, 6, 7, 8]
    assert set(tensors) == {"tokens", "rows.tokens", "mark.state"}


def test_another_models_files_are_not_seen(tmp_path: Path) -> None:
    """G2: model, settings, layout and grid are the fingerprint; nobody's file is reported for being another's."""
    tokens = list(range(9))
    Folder(tmp_path, identity="one").save(tokens)
    for other in (Folder(tmp_path, identity="two"), Folder(tmp_path, recurrent=True, identity="one")):
        assert other.load(tokens) == [] and not other.reports
    assert Folder(tmp_path, identity="one").load(tokens) == tokens[:8]


def test_a_file_under_anothers_name_is_not_used(tmp_path: Path) -> None:
    """G2: its fingerprint inside says so; it is named and deleted."""
    one, two = Folder(tmp_path / "one", identity="one"), Folder(tmp_path / "two", identity="two")
    one.save([1, 2, 3, 4])
    two.save([1, 2, 3, 4])
    two.files()[0].write_bytes(one.files()[0].read_bytes())
    again = Folder(tmp_path / "two", identity="two")
    assert again.load([1, 2, 3, 4, 5]) == [] and len(again.reports) == 1 and not again.files()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), recurrent=st.booleans(), restart=st.booleans())
def test_no_file_with_any_byte_changed_is_used(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, recurrent: bool, restart: bool
) -> None:
    """G2: whatever byte, the header's and the checksum's too, before or after a restart: skipped, named, deleted."""
    folder = Folder(tmp_path_factory.mktemp("flip"), recurrent)
    tokens = list(range(20, 29))
    folder.save(tokens)
    before = {path.name: path.read_bytes() for path in folder.files()}
    first = folder.disk.find(tokens)[0].name
    name = data.draw(st.sampled_from(sorted(before)))
    harmed = bytearray(before[name])
    at = data.draw(st.integers(0, len(harmed) - 1))
    harmed[at] ^= data.draw(st.integers(1, 255))
    (folder.path / name).write_bytes(harmed)
    if restart:
        folder = Folder(folder.path, recurrent)
    assert folder.load(tokens) == ([] if name == first else tokens[:4])
    assert len(folder.reports) == 1 and name in folder.reports[0] and not (folder.path / name).exists()


def test_a_mark_under_another_name_is_no_missing_mark(tmp_path: Path) -> None:
    """G2: a changed name in the header is seen at the start, not passed over as a file without a state."""
    folder = Folder(tmp_path, True)
    tokens = list(range(20, 29))
    folder.save(tokens)
    last = folder.path / folder.disk.find(tokens)[-1].name
    last.write_bytes(last.read_bytes().replace(b'"mark.', b'"lark.', 1))
    folder = Folder(folder.path, True)
    assert len(folder.reports) == 1 and last.name in folder.reports[0] and not last.exists()


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 2000), recurrent=st.booleans(), restart=st.booleans())
def test_no_file_cut_short_or_drawn_out_is_used(
    tmp_path_factory: pytest.TempPathFactory, length: int, recurrent: bool, restart: bool
) -> None:
    """G2: a copy that stopped halfway, or one with something behind it."""
    folder = Folder(tmp_path_factory.mktemp("cut"), recurrent)
    folder.save([1, 2, 3, 4])
    (path,) = folder.files()
    whole = path.read_bytes()
    path.write_bytes((whole + b" " * 2000)[: length if length < len(whole) else length + 1])
    if restart:
        folder = Folder(folder.path, recurrent)
    assert folder.load([1, 2, 3, 4, 5]) == [] and len(folder.reports) == 1 and not path.exists()


def test_a_file_of_other_shapes_is_not_used(tmp_path: Path) -> None:
    """G2: whole and rightly signed, but not laid out as this cache's rows are."""
    for rows, state in (({"tokens": torch.zeros(4, 2)}, {}), ({}, {}), ({"tokens": torch.arange(4)}, {"x": 1})):
        made = FakeCache(8)
        made.copy = lambda first, stop, rows=rows: {k: v[first:stop] for k, v in rows.items()}  # type: ignore
        mark = Mark(4, {name: torch.zeros(1) for name in state}) if state else None
        path = tmp_path / "one.safetensors"
        list(prefix_file.write(path, {}, [1, 2, 3, 4], made, 0, mark))
        layout = prefix_file.layout(FakeCache(8).copy(0, 1), rows=True)
        with pytest.raises(prefix_file.Damaged):
            prefix_file.read(path, layout, {})


@both
def test_a_middle_file_that_is_gone_ends_the_prefix(tmp_path: Path, recurrent: bool) -> None:
    """G2: what is before it is used; it is written again with the next save."""
    folder, tokens = Folder(tmp_path, recurrent), list(range(13))
    folder.save(tokens)
    (tmp_path / folder.disk.find(tokens)[1].name).unlink()
    assert folder.load(tokens) == tokens[:4] and len(folder.reports) == 1
    folder.save(tokens)
    assert folder.load(tokens) == tokens[:12]


def test_the_longest_unused_goes_first(tmp_path: Path) -> None:
    """G2: bounded by bytes over all models' files; a chain loses its end before its begin, also after a restart."""
    folder = Folder(tmp_path)
    folder.save(list(range(8)))
    size = folder.files()[0].stat().st_size
    folder.save([*range(50, 58)])
    folder.load([*range(9)])  # used since
    folder = Folder(tmp_path, limit=3 * size + 200)
    assert folder.load([*range(9)]) == list(range(8)) and folder.load([*range(50, 59)]) == list(range(50, 54))
    other = Folder(tmp_path, limit=2 * size + 200, identity="another")
    other.save([1, 2, 3, 4])
    assert other.load([1, 2, 3, 4, 5]) == [1, 2, 3, 4]
    assert sum(path.stat().st_size for path in other.files()) == other.disk.nbytes <= 2 * size + 200


def test_a_prefix_longer_than_the_bound_keeps_its_begin(tmp_path: Path) -> None:
    """G2: no chunk pushes out one that it needs."""
    size = Folder(tmp_path / "size").save([1, 2, 3, 4]) and next((tmp_path / "size").glob("*.s*")).stat().st_size
    folder = Folder(tmp_path / "small", limit=2 * size + 5000)
    folder.save(list(range(4 * 40)))
    assert folder.load(list(range(4 * 40)))[:8] == list(range(8))
    assert sum(path.stat().st_size for path in folder.files()) <= 2 * size + 5000
    none = Folder(tmp_path / "none", limit=10)
    none.save(list(range(8)))
    assert not none.files() and not none.reports


def test_a_write_stops_anywhere_and_leaves_nothing(tmp_path: Path) -> None:
    """K5: closed between any two pieces, only whole files are there, and what was written before is used."""
    cache = FakeCache(32)
    write(cache, 0, list(range(12)))
    pieces = sum(1 for _ in Folder(tmp_path / "whole").disk.save(Prefix(list(range(12)), []), cache))
    for stop in range(pieces):
        folder = Folder(tmp_path / str(stop))
        saving = folder.disk.save(Prefix(list(range(12)), []), cache)
        for _ in range(stop):
            next(saving)
        saving.close()
        assert not list(folder.path.glob("*.part"))
        assert len(folder.load(list(range(13)))) == 4 * len(folder.files()) and not folder.reports


def test_a_writer_that_was_killed_leaves_no_trash(tmp_path: Path) -> None:
    """G2: its unfinished file is cleared away at the next start."""
    tmp_path.joinpath("x.1.part").write_bytes(b"half")
    assert not list(Folder(tmp_path).path.iterdir())


def test_a_folder_that_cannot_be_written_costs_files_and_nothing_else(tmp_path: Path) -> None:
    """G2: said in a line; the engine goes on."""
    folder = Folder(tmp_path)
    folder.path.rmdir()
    folder.save([1, 2, 3, 4])
    assert len(folder.reports) == 1 and "could not be written" in folder.reports[0]


def test_rows_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: no piece is larger than so many bytes, whatever a chunk has; all together they are the chunk's rows."""
    monkeypatch.setattr(prefix_file, "PIECE", 64)
    asked: list[tuple[int, int]] = []

    class Counted(FakeCache):
        def copy(self, first: int, stop: int) -> dict[str, torch.Tensor]:
            asked.append((first, stop))
            return super().copy(first, stop)

    cache = Counted(100)
    write(cache, 0, list(range(100)))
    path = tmp_path / "one.safetensors"
    list(prefix_file.write(path, {}, list(range(20, 90)), cache, 20, None))
    _, rows, _ = prefix_file.read(path, prefix_file.layout(cache.copy(0, 1), rows=True), {})
    assert rows["tokens"].tolist() == list(range(20, 90))
    assert all((stop - first) * 8 <= 64 for first, stop in asked) and len(asked) > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """G2: of every type a cache may have."""
    cache = KV(3, 2, 16, 8, dtype, torch.device("cpu"))
    cache.all.copy_(torch.randn(cache.all.shape, generator=torch.Generator().manual_seed(3)))
    disk = Disk(tmp_path, LONG, "m", 8, cache, print)
    list(disk.save(Prefix(list(range(16)), []), cache))
    fresh: Cache = KV(3, 2, 16, 8, dtype, torch.device("cpu"))
    assert disk.load(disk.find([*range(16), 1]), fresh).tokens == list(range(16))
    assert torch.equal(fresh.all, cache.all)  # type: ignore[attr-defined]


def test_what_files_hold_is_told_with_the_hashes_they_came_with(tmp_path: Path) -> None:
    """G2: the end of every chain, its hashes as far as a prompt told them; after a restart from the files."""
    tokens, hashes = [n % 9 for n in range(140)], [b"a" * 8, b"b" * 8]
    folder = Folder(tmp_path)
    folder.save(tokens, hashes[:1])
    told = [(rows, hashes, nbytes) for _, rows, hashes, nbytes in folder.disk.held()]
    assert told == [(140, hashes[:1], folder.disk.nbytes)]
    again = Folder(tmp_path)
    assert [(rows, hashes) for _, rows, hashes, _ in again.disk.held()] == [(140, hashes[:1])]
    again.disk.learn(again.disk.find([*tokens, 1]), hashes)
    assert [(rows, hashes) for _, rows, hashes, _ in again.disk.held()] == [(140, hashes)]


@both
def test_a_restarted_engine_resumes_from_files(tmp_path: Path, recurrent: bool) -> None:
    """G2: through the whole of what stays resident: written between steps, found by tokens, said as disk."""
    tokens = list(range(21))
    for begins in ((0, "none"), (20, "disk")):
        folder = Folder(tmp_path, recurrent)
        keeps = Residency(3, 1, GRID, 0, folder.disk, recurrent=recurrent)
        assert keeps.begin(0, folder.cache, tokens, []) == begins and holds(folder.cache, tokens[: begins[0]])
        for at in range(begins[0], 21, GRID):
            write(folder.cache, at, tokens[at : at + GRID])
            keeps.mark(0, folder.cache.mark())
        keeps.end(0, tokens, [])
        while keeps.work():
            assert keeps.busy
        assert len(folder.files()) == 5


@both
def test_what_grew_while_files_were_written_is_written_too(tmp_path: Path, recurrent: bool) -> None:
    """G2: a run that ends while the files of its begin are under way: no next run is needed to write the rest."""
    folder = Folder(tmp_path, recurrent)
    keeps = Residency(3, 1, GRID, 0, folder.disk, recurrent=recurrent)
    tokens = list(range(33))
    at = 0
    for rows in (17, 33):
        assert keeps.begin(0, folder.cache, tokens[:rows], []).rows == at
        while at < rows:
            stop = min((at // GRID + 1) * GRID, rows)
            write(folder.cache, at, tokens[at:stop])
            keeps.mark(0, folder.cache.mark())
            at = stop
        keeps.end(0, tokens[:rows], [])
        assert keeps.work()
    while keeps.work():
        pass
    assert len(folder.files()) == 8


@both
def test_what_finds_no_room_is_not_tried_for_ever(tmp_path: Path, recurrent: bool) -> None:
    """G2: files that do not fit are left out, and then there is no more work."""
    folder = Folder(tmp_path, recurrent, limit=1)
    keeps = Residency(3, 1, GRID, 0, folder.disk, recurrent=recurrent)
    keeps.begin(0, folder.cache, list(range(9)), [])
    for at in range(0, 8, GRID):
        write(folder.cache, at, list(range(at, at + GRID)))
        keeps.mark(0, folder.cache.mark())
    keeps.end(0, list(range(8)), [])
    assert not any(keeps.work() for _ in range(9)) and not folder.files()
