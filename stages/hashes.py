"""A prompt's blocks as salted hashes: what it shares with what the engine holds, without its tokens.

Every whole block of 64 tokens has one hash of 8 bytes, chained: it stands for all tokens up to the block's end, so two
prompts that have a hash in common begin alike. The salt is the server's and keys every block: who reads a trace can
neither guess a text by its hash nor go on from one block to the next.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack

BLOCK = 64
"""Tokens."""
SIZE = 8
"""Bytes of a hash. Two that are alike by chance cost a wrong guess, no more: the engine compares tokens."""


def hashes(tokens: list[int], salt: bytes) -> list[bytes]:
    """One hash for each whole block; ``salt`` has at most 64 bytes."""
    chain: list[bytes] = []
    before = b""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = pack(f"<{BLOCK}I", *tokens[start : start + BLOCK])
        before = blake2b(before + block, digest_size=SIZE, key=salt).digest()
        chain.append(before)
    return chain


def through(tokens: list[int], rows: int, chain: list[bytes], salt: bytes) -> bytes:
    """One hash for the first ``rows`` tokens, whose whole blocks are hashed in ``chain``; b"" for none."""
    if not rows:
        return b""
    whole = rows // BLOCK
    rest = tokens[whole * BLOCK : rows]
    before = chain[whole - 1] if whole else b""
    return blake2b(before + pack(f"<{len(rest)}I", *rest), digest_size=SIZE, key=salt).digest()
