"""The folder for what outlives a server, and the salt of its hashes. Both are for the owner's eyes only."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from pipeline.settings import Settings

SALT_FILE, SALT_BYTES = "hash-salt", 16


def folder(settings: Settings) -> Path:
    """``--data-dir``, or the user's data folder. Nothing is made."""
    if settings.data_dir:
        return Path(settings.data_dir).expanduser().resolve()
    home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(home) if home.startswith("/") else Path.home() / ".local" / "share") / "tandemllm"


def salt(settings: Settings) -> bytes:
    """What keys the hashes of prompts: new at every start, but where files are to be found by them again (row G2).

    Then it lies in the data folder. Raises OSError where that cannot be written or read.
    """
    if not settings.disk_cache_gb:
        return secrets.token_bytes(SALT_BYTES)
    path = folder(settings)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        _write(path)
    kept = (path / SALT_FILE).read_bytes()
    return kept if len(kept) == SALT_BYTES else secrets.token_bytes(SALT_BYTES)


def _write(path: Path) -> None:
    """A new salt, whole or not at all: two servers that start at once have the same one."""
    if (path / SALT_FILE).exists():
        return
    draft = path / f"{SALT_FILE}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SALT_BYTES))
        os.link(draft, path / SALT_FILE)
    finally:
        draft.unlink()
