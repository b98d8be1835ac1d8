"""engine/native/build.py: a library from whatever machine there is, or a sentence that says why not."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import pytest

from engine.native import build
from engine.native.build import Native, attempt, compilers, find, instructions, nothing, private_folder

CPU = build.cpu_flags()
ROOT = Path(__file__).resolve().parent.parent
ANSWER = 'extern "C" int answer() { return 42; }\n'

needs_compiler = pytest.mark.skipif(
    not CPU >= build.NEEDED or not list(compilers(os.environ)), reason="needs a C++ compiler and AVX2"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(ANSWER)
    return folder


def around(tmp_path: Path, **more: str) -> dict[str, str]:
    """An environment with a cache of the test's own."""
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache"), **more}


def answer(native: Native) -> int:
    assert native.library is not None, native.why
    return int(native.library.answer())


@needs_compiler
def test_it_is_built_once_and_kept(tmp_path: Path, sources: Path) -> None:
    """N5: the first start compiles, the second opens the same file; only its user may read the folder."""
    first = attempt(around(tmp_path), CPU, sources, nothing)
    assert answer(first) == 42
    assert first.path is not None
    folder = tmp_path / "cache" / "tandem" / "native"
    assert folder.stat().st_mode & 0o777 == 0o700
    written = first.path.stat()
    second = attempt(around(tmp_path), CPU, sources, nothing)
    assert second.path == first.path
    assert (second.path.stat().st_ino, second.path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert [path.name for path in folder.iterdir()] == [first.path.name]


@needs_compiler
def test_other_sources_or_another_cpu_are_another_library(tmp_path: Path, sources: Path) -> None:
    """N5: an update of a source, a header or the CPU never opens the old library."""
    compiler = next(compilers(os.environ))
    keys = {build.key(compiler, CPU, sources), build.key(compiler, CPU | {"new"}, sources)}
    keys.add(build.key(compiler._replace(version="other"), CPU, sources))
    (sources / "answer.h").write_text("// more\n")
    keys.add(build.key(compiler, CPU, sources))
    assert len(keys) == 4
    before = attempt(around(tmp_path), CPU, sources, nothing)
    (sources / "answer.cpp").write_text(ANSWER.replace("42", "43"))
    after = attempt(around(tmp_path), CPU, sources, nothing)
    assert (answer(before), answer(after)) == (42, 43)


DAMAGED = """
import os, sys
from pathlib import Path
from engine.native import build
native = build.attempt(os.environ, build.cpu_flags(), Path(sys.argv[1]), build.nothing)
print(native.library and native.library.answer())
"""


@needs_compiler
@pytest.mark.parametrize("left", [0, 100, 0.5])
def test_a_damaged_library_is_built_anew(tmp_path: Path, sources: Path, left: float) -> None:
    """N5: a file cut short or overwritten is replaced; opening it would end the process."""
    native = attempt(around(tmp_path), CPU, sources, nothing)
    assert native.path is not None
    whole = native.path.read_bytes()
    native.path.unlink()  # this process keeps the one it opened
    native.path.write_bytes(whole[: int(left * len(whole))] if left == 0.5 else whole[: int(left)])
    environ = {**os.environ, **around(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", DAMAGED, str(sources)], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert said.strip() == "42"
    assert len(list(native.path.parent.iterdir())) == 1


@needs_compiler
def test_a_file_that_is_no_library_but_named_like_one(tmp_path: Path, sources: Path) -> None:
    """N5: what cannot be opened though its digest is right is built anew once."""
    native = attempt(around(tmp_path), CPU, sources, nothing)
    assert native.path is not None
    name = build.key(next(compilers(os.environ)), CPU, sources)
    native.path.unlink()
    folder = native.path.parent
    (folder / "x").write_bytes(b"no library")
    (folder / "x").rename(folder / f"{name}-{build._digest(folder / 'x')}.so")
    assert find(folder, name) is not None
    assert answer(attempt(around(tmp_path), CPU, sources, nothing)) == 42


@needs_compiler
def test_two_builds_at_once(tmp_path: Path, sources: Path) -> None:
    """N5: servers started together each get a whole library, and one is left."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: attempt(around(tmp_path), CPU, sources, nothing), range(2)))
    assert [answer(native) for native in both] == [42, 42]
    left = list((tmp_path / "cache" / "tandem" / "native").iterdir())
    assert left and all(path.suffix == ".so" for path in left)


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, sources: Path) -> None:
    """N5: a home that is a file, or none at all: it is built for this process alone."""
    (tmp_path / "cache").write_text("in the way")
    assert answer(attempt(around(tmp_path), CPU, sources, nothing)) == 42
    homeless = {"PATH": os.environ["PATH"]}
    assert private_folder(homeless, "native") is None
    native = attempt(homeless, CPU, sources, nothing)
    assert answer(native) == 42
    assert native.path is not None and not native.path.exists()


@needs_compiler
def test_an_error_in_the_source_is_a_sentence(tmp_path: Path, sources: Path) -> None:
    """N5: a build that fails leaves no file, and the model runs without it."""
    (sources / "answer.cpp").write_text("int broken(\n")
    native = attempt(around(tmp_path), CPU, sources, nothing)
    assert native.library is None
    assert "could not build the native step: answer.cpp:" in native.why and "\n" not in native.why
    assert list((tmp_path / "cache" / "tandem" / "native").iterdir()) == []


@needs_compiler
def test_a_wanted_compiler_that_fails_is_passed_over(tmp_path: Path, sources: Path) -> None:
    """N5: CXX comes first; where it cannot build, the next one does."""
    broken = tmp_path / "broken++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\nexit 1\n')
    broken.chmod(0o755)
    environ = around(tmp_path, CXX=str(broken))
    assert next(compilers(environ)).version == "broken 1.0"
    assert answer(attempt(environ, CPU, sources, nothing)) == 42


@needs_compiler
def test_a_beat_while_it_compiles(tmp_path: Path, sources: Path) -> None:
    """N5: whoever waits for the engine hears that it builds."""
    beats: list[int] = []
    attempt(around(tmp_path), CPU, sources, lambda: beats.append(1))
    assert beats
    beats.clear()
    attempt(around(tmp_path), CPU, sources, lambda: beats.append(1))
    assert not beats


def test_what_is_lacking_is_said(tmp_path: Path, sources: Path) -> None:
    """N5: switched off, a CPU without AVX2, no compiler, no sources: a sentence each, and nothing raised."""
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        "TANDEM_NATIVE": attempt(around(tmp_path, TANDEM_NATIVE="off"), build.NEEDED, sources, nothing),
        "f16c": attempt(around(tmp_path), build.NEEDED - {"f16c"}, sources, nothing),
        "avx2": attempt(around(tmp_path), frozenset(), sources, nothing),  # as where Linux names no flags: ARM
        "compiler": attempt({"PATH": str(empty)}, build.NEEDED, sources, nothing),
    }
    if list(compilers(os.environ)):
        cases["sources"] = attempt(around(tmp_path), build.NEEDED, empty, nothing)
    for word, native in cases.items():
        assert native.library is None
        assert word in native.why and native.why.endswith(".")


def test_the_instructions_of_a_cpu(tmp_path: Path) -> None:
    """N5: the words that say which kernels run."""
    assert instructions(frozenset()) == ""
    assert instructions(build.NEEDED) == "avx2"
    assert instructions(build.NEEDED | build.VNNI - {"avx512_vnni"}) == "avx2"
    assert instructions(build.NEEDED | build.VNNI) == "avx512-vnni"
    assert build.cpu_flags(tmp_path / "none") == frozenset()
    (tmp_path / "info").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert build.cpu_flags(tmp_path / "info") == {"fpu", "avx2", "fma"}


@needs_compiler
def test_the_library_says_what_it_was_built_with(tmp_path: Path, sources: Path) -> None:
    """N5: a compiler that knows fewer instructions than the CPU has: the words are those of the code that runs."""
    (sources / "answer.cpp").write_text(ANSWER + 'extern "C" const char* tandem_instructions() { return "avx2"; }\n')
    for _ in range(2):  # built, then found
        native = attempt(around(tmp_path), CPU | build.VNNI, sources, nothing)
        assert (answer(native), native.flags) == (42, "avx2")
        assert native.why == "The native step runs with avx2."
    if build.library() is not None:
        assert build.flags() == build.opened().flags == instructions(CPU)


@needs_compiler
def test_old_libraries_go(tmp_path: Path) -> None:
    """N5: updates do not fill the cache: the newest stay."""
    for age in range(12):
        path = tmp_path / f"{age}.so"
        path.write_bytes(b"")
        os.utime(path, (1000 + age, 1000 + age))
    old = tmp_path / "old.part"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    (tmp_path / "new.part").write_bytes(b"")
    build._prune(tmp_path, tmp_path / "0.so")
    assert {p.name for p in tmp_path.iterdir()} == {"0.so", "new.part", *(f"{n}.so" for n in range(5, 12))}


def test_the_sources_are_in_the_wheel() -> None:
    """N5: an installed server finds what it compiles, and every package is installed."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["engine.native"]
    for path in build.SOURCES.iterdir():
        if path.is_file() and path.suffix != ".py":
            assert any(path.match(pattern) for pattern in patterns), path.name
    included = settings["packages"]["find"]["include"]
    for init in ROOT.glob("[eps]*/**/__init__.py"):
        package = ".".join(init.parent.relative_to(ROOT).parts)
        assert any(fnmatch(package, pattern) for pattern in included), package
