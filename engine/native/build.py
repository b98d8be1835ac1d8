"""The native step's library: compiled once for this CPU, kept in the user's cache, opened once a process.

Knows compilers, the cache folder and what can be wrong with both; nothing of what the library does. Nothing here
raises: where the library cannot be had there is a sentence that says why, and the model runs without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch  # noqa: F401 (its OpenMP library must be loaded first: ours is then the same one)

SOURCES = Path(__file__).resolve().parent
FLAGS = ("-O2", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=off")
"""How it is compiled; ``-ffp-contract=off``: the same bits by every compiler."""

NEEDED = frozenset({"avx2", "fma", "f16c"})
VNNI = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"})
"""What vector.h asks of the compiler before it takes its wide form."""

_LIMIT_S = 300.0
_BEAT_S = 0.2
_KEPT = 8
"""Libraries that stay in the cache: one an update and CPU."""


class Native(NamedTuple):
    """An opened library, or None and the sentence that says why there is none."""

    library: ctypes.CDLL | None
    why: str
    path: Path | None = None
    flags: str = ""
    """The instructions it was built with, by its own word."""


class Compiler(NamedTuple):
    """A C++ compiler: how it is called, and the version it names."""

    command: tuple[str, ...]
    version: str


class CannotBuild(Exception):
    """No library this way; the text is a sentence."""


def nothing() -> None:
    """A beat nobody listens to."""


_opened: list[Native] = []


def opened(beat: Callable[[], None] = nothing) -> Native:
    """The outcome for this process; the first call builds, if it must, and calls ``beat`` a few times a second."""
    if not _opened:
        _opened.append(attempt(os.environ, cpu_flags(), SOURCES, beat))
    return _opened[0]


def library() -> ctypes.CDLL | None:
    """The opened library, None where there is none."""
    return opened().library


def why() -> str:
    """One sentence: what was opened, or why nothing was."""
    return opened().why


def flags() -> str:
    """The instructions it uses here: "avx512-vnni", "avx2", or "" where it cannot run.

    Before it is opened: those that a compiler takes who knows this CPU.
    """
    return (_opened[0].flags if _opened else "") or instructions(cpu_flags())


def instructions(cpu: frozenset[str]) -> str:
    """The same for a CPU with the flags ``cpu``."""
    if not cpu >= NEEDED:
        return ""
    return "avx512-vnni" if cpu >= VNNI else "avx2"


def cpu_flags(info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What this CPU can do, as Linux names it; nothing where Linux does not say."""
    try:
        lines = info.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def attempt(environ: Mapping[str, str], cpu: frozenset[str], sources: Path, beat: Callable[[], None]) -> Native:
    """Find the library in the cache or build it, and open it."""
    if environ.get("TANDEM_NATIVE", "").lower() in ("off", "0", "no"):
        return Native(None, "TANDEM_NATIVE is off.")
    if not cpu >= NEEDED:
        lacking = ", ".join(sorted(NEEDED - cpu))
        return Native(None, f"This CPU ({platform.machine()}) does not name {lacking}.")
    found = list(compilers(environ))
    if not found:
        return Native(None, "There is no C++ compiler: install g++ or clang++, or name one with CXX.")
    reason = "The sources of the native step are not there."
    kept = private_folder(environ, "native")
    for compiler in found:
        for folder in (None,) if kept is None else (kept, None):
            try:
                return _from(folder, compiler, cpu, sources, beat)
            except CannotBuild as error:
                reason = str(error)
            except (OSError, subprocess.SubprocessError) as error:
                reason = f"The native step could not be built ({type(error).__name__})."
    return Native(None, reason)


def compilers(environ: Mapping[str, str]) -> Iterator[Compiler]:
    """The compilers there are, the wanted one first."""
    seen = set()
    for name in (environ.get("CXX", ""), "g++", "c++", "clang++"):
        try:
            command = shlex.split(name)
        except ValueError:
            continue
        place = shutil.which(command[0], path=environ.get("PATH")) if command else None
        if place is None or (os.path.realpath(place), *command[1:]) in seen:
            continue
        seen.add((os.path.realpath(place), *command[1:]))
        version = _version((place, *command[1:]))
        if version:
            yield Compiler((place, *command[1:]), version)


def cache_home(environ: Mapping[str, str]) -> Path | None:
    """The user's cache folder for this program; None where there is no home."""
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the convention: any other value is to be ignored
        cache = Path(environ.get("HOME", "")) / ".cache"
    return cache / "tandem" if cache.is_absolute() else None


def private_folder(environ: Mapping[str, str], name: str) -> Path | None:
    """The folder ``name`` in the cache, made if need be. None: no such place that only this user can write to."""
    home = cache_home(environ)
    if home is None:
        return None
    folder = home / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():  # what lies there runs in this process, or answers in its place
            return None
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def key(compiler: Compiler, cpu: frozenset[str], sources: Path) -> str:
    """What a library was built from: another key, another library. Raises CannotBuild without sources."""
    files = sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".h"))
    if not any(path.suffix == ".cpp" for path in files):
        raise CannotBuild("The sources of the native step are not there.")
    digest = hashlib.sha256()
    for part in (*compiler, " ".join(FLAGS), " ".join(sorted(cpu))):
        digest.update(repr(part).encode() + b"\0")
    for path in files:
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\0".encode() + text)
    return digest.hexdigest()[:32]


def _from(
    folder: Path | None, compiler: Compiler, cpu: frozenset[str], sources: Path, beat: Callable[[], None]
) -> Native:
    """Open what lies in ``folder``, or build it there; a second time where it is damaged. None: a folder of our own."""
    name = key(compiler, cpu, sources)
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="tandem-native-") as own:  # an open library outlives its file
            return _open(_build(Path(own), name, compiler, sources, beat), instructions(cpu))
    kept = find(folder, name)
    if kept is not None:
        try:
            return _open(kept, instructions(cpu))
        except OSError:
            kept.unlink(missing_ok=True)
    return _open(_build(folder, name, compiler, sources, beat), instructions(cpu))


def _open(path: Path, words: str) -> Native:
    """``words``: the instructions of a library that does not say; an old compiler may know fewer than the CPU has."""
    library = ctypes.CDLL(str(path))
    if hasattr(library, "tandem_instructions"):
        library.tandem_instructions.restype = ctypes.c_char_p
        words = library.tandem_instructions().decode()
    return Native(library, f"The native step runs with {words}.", path, words)


def find(folder: Path, name: str) -> Path | None:
    """The built library of the key ``name``; one that is not what was written is removed.

    The file's name holds a digest of its bytes: opening a library that was cut short ends the process.
    """
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.name == f"{name}-{_digest(path)}.so":
            return path
        path.unlink(missing_ok=True)
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _build(folder: Path, name: str, compiler: Compiler, sources: Path, beat: Callable[[], None]) -> Path:
    """Compile into ``folder`` under a name of our own, then rename: two processes at once do not meet."""
    handle, partial = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=folder)
    os.close(handle)
    try:
        files = [path.name for path in sorted(sources.glob("*.cpp"))]
        _run([*compiler.command, *FLAGS, *files, "-o", partial], sources, beat)
        built = folder / f"{name}-{_digest(Path(partial))}.so"
        Path(partial).replace(built)
    finally:
        Path(partial).unlink(missing_ok=True)
    _prune(folder, built)
    return built


def _run(command: list[str], sources: Path, beat: Callable[[], None]) -> None:
    """Run the compiler. Raises CannotBuild with its first complaint."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=sources, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        end = time.monotonic() + _LIMIT_S
        try:
            while process.poll() is None and time.monotonic() < end:
                beat()
                time.sleep(_BEAT_S)
        finally:
            if process.poll() is None:
                process.kill()
        code = process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace")
    if code:
        words = next((line for line in text.splitlines() if "error" in line.lower()), f"status {code}")
        raise CannotBuild(f"{Path(command[0]).name} could not build the native step: {words.strip()[:200]}")


def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _prune(folder: Path, built: Path) -> None:
    """Remove all but the newest libraries, and what killed builds left; one that is open stays for its user."""
    others = sorted((p for p in folder.glob("*.so") if p != built), key=_written, reverse=True)
    dead = [p for p in folder.glob("*.part") if time.time() - _written(p) > 2 * _LIMIT_S]
    for path in [*others[_KEPT - 1 :], *dead]:
        path.unlink(missing_ok=True)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
