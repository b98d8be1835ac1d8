"""Who may speak to the server: API keys, and the fence that keeps web pages out (P4, P5).

Everything here is a plain function of header values and addresses; ``gate.py`` asks for every request.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.settings import Settings

WINDOW_S, FAILURES = 60.0, 5
REMEMBERED = 4_096
"""Addresses remembered at once; the oldest goes first."""
FORWARDING = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-Ip", "Via")


Header = Callable[[str], str | None]
"""A request's headers: a name's value, in any case of letters; None when it was not sent."""


class Keys:
    """The server's keys, as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys if key]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: str) -> bytes | None:
        """The digest of a key of ours, in a time that says nothing about it."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, ours) for ours in self._digests]
        return given if any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(settings: Settings) -> list[str]:
    """The keys of ``--api-key`` and of ``--api-key-file`` (one a line). Raises OSError when it cannot be read.

    Its bytes are taken as they are: what is wrong with them must not be told in an exception's text.
    """
    keys = [key.strip() for key in settings.api_key]
    if settings.api_key_file:
        keys += [
            line.strip() for line in Path(settings.api_key_file).read_text("utf-8", "surrogateescape").splitlines()
        ]
    return [key for key in keys if key]


class Attempts:
    """Failed keys by address. Five in a minute close the door to every key but those that address had right before:
    one misconfigured client does not lock out its neighbours."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, list[float]] = OrderedDict()
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def judge(self, keys: Keys, address: str, key: str | None, now: float) -> str:
        """The code to refuse with, "" to let in. A missing key is no attempt at one."""
        if not keys:
            return ""
        if key is None:
            return "invalid_api_key"
        digest = keys.find(key)
        if digest is not None and (address, digest) in self._known:
            return ""
        recent = [at for at in self._failed.get(address, ()) if now - at < WINDOW_S]
        if len(recent) >= FAILURES:
            return "too_many_attempts"
        if digest is None:
            self._failed[address] = [*recent, now]
            _bound(self._failed)
            return "invalid_api_key"
        self._known[(address, digest)] = None
        _bound(self._known)
        return ""


def _bound(memory: OrderedDict[str, list[float]] | OrderedDict[tuple[str, bytes], None]) -> None:
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)


def key_of(authorization: str, basic: bool = False) -> str | None:
    """The key in an ``Authorization`` header. ``basic``: a browser's password will do."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if basic and scheme.lower() == "basic":
        try:
            return b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return None


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own loopback."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def from_box(address: str, header: Header) -> bool:
    """The box itself: a loopback peer that speaks for nobody else."""
    return is_loopback(address) and all(header(name) is None for name in FORWARDING)


def own_names(settings: Settings) -> frozenset[str]:
    """Host names the server answers to."""
    machine = socket.gethostname().lower()
    names = ["localhost", machine, machine.partition(".")[0], machine.partition(".")[0] + ".local"]
    return frozenset(_bare(name) for name in (*names, settings.host, *settings.allowed_host) if name)


def _bare(host: str) -> str:
    """A host without its port, in lower case: ``[::1]:80`` and ``Box.:80`` are ``::1`` and ``box``."""
    try:
        name = urlsplit("//" + host).hostname or ""
    except ValueError:
        return ""
    return name.rstrip(".")


def host_passes(host: str, names: frozenset[str]) -> bool:
    """Whether a ``Host`` header names this server. Addresses pass: a page cannot point a name of its own at those."""
    name = _bare(host)
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def same_origin(origin: str, host: str) -> bool:
    """Whether an ``Origin`` is the server's own, by the ``Host`` it was reached under."""
    try:
        here, there = urlsplit(origin), urlsplit(f"{urlsplit(origin).scheme}://{host}")
        default = {"http": 80, "https": 443}.get(here.scheme)
        return (
            default is not None
            and here.hostname == there.hostname is not None
            and ((here.port or default) == (there.port or default))
        )
    except ValueError:
        return False


def origin_listed(origin: str, settings: Settings) -> bool:
    """Whether ``--cors-origin`` names it; ``*`` names every one."""
    listed = {entry.rstrip("/").lower() for entry in settings.cors_origin}
    return "*" in listed or origin.rstrip("/").lower() in listed


def fence_passes(header: Header, settings: Settings, names: frozenset[str]) -> bool:
    """Whether a request may be looked at at all. Only browsers send the headers that fail here."""
    host, origin = header("Host") or "", header("Origin")
    if host and not host_passes(host, names):
        return False
    if origin is not None:
        return origin_listed(origin, settings) or same_origin(origin, host)
    # A page's pictures and scripts send no Origin, but the browser says where they come from. A link may be followed.
    foreign = header("Sec-Fetch-Site") in ("cross-site", "same-site")
    return not foreign or (header("Sec-Fetch-Mode"), header("Sec-Fetch-Dest")) == ("navigate", "document")
