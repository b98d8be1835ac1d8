"""What a tokenizer's ids write: the bytes of each, and how the thinking's tags are spelled in them.

What this file knows: the JSON of the ``tokenizers`` package. What it does not: what is done with a tag (``reasoning``).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from tokenizers import Tokenizer

OPENING, CLOSING = b"<think>", b"</think>"


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Added(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct, frozen=True):
    model: _Model = _Model()
    decoder: Any = None
    pre_tokenizer: Any = None
    added_tokens: list[_Added] = []


class Vocabulary(msgspec.Struct, frozen=True):
    """What a run's detector needs to know of the checkpoint's ids.

    ``pieces``: the bytes of each id, b"" for special tokens and for ids nobody named. ``opening`` and ``closing``: the
    ids of the added tokens of those names, special or not. ``close``: the ids that write the closing tag when it is
    forced; empty where the tokenizer cannot write it, and then nothing is ever forced.
    """

    pieces: list[bytes] = []
    opening: frozenset[int] = frozenset()
    closing: frozenset[int] = frozenset()
    close: tuple[int, ...] = ()


def vocabulary(tokenizer: str, size: int) -> Vocabulary:
    """Read it from the JSON; ``size`` pieces or more. Raises ``msgspec.MsgspecError`` for what is no tokenizer."""
    parsed = msgspec.json.decode(tokenizer, type=_Tokenizer)
    pieces = _pieces(parsed, size)
    opening, closing = (_added(parsed, tag.decode()) for tag in (OPENING, CLOSING))
    close = closing[:1] if closing or not parsed.model.vocab else _spelled(tokenizer, pieces)
    return Vocabulary(pieces, frozenset(opening), frozenset(closing), tuple(close))


def _added(parsed: _Tokenizer, name: str) -> list[int]:
    return [token.id for token in parsed.added_tokens if token.content == name]


def _spelled(tokenizer: str, pieces: list[bytes]) -> list[int]:
    """The closing tag as plain tokens; none when those do not write exactly it, but for a blank some put in front."""
    ids = list(Tokenizer.from_str(tokenizer).encode(CLOSING.decode(), add_special_tokens=False).ids)
    return ids if b"".join(pieces[token] for token in ids).lstrip(b" ") == CLOSING else []


def _pieces(parsed: _Tokenizer, size: int) -> list[bytes]:
    vocab = parsed.model.vocab
    entries = vocab.items() if isinstance(vocab, dict) else ((word, index) for index, (word, _) in enumerate(vocab))
    whole = repr((parsed.decoder, parsed.pre_tokenizer))
    read = _byte_level if "ByteLevel" in whole else _sentence_piece
    known = {index: read(word) for word, index in entries}
    known |= {token.id: b"" if token.special else token.content.encode() for token in parsed.added_tokens}
    return [known.get(index, b"") for index in range(max(size, max(known, default=-1) + 1))]


_SPM_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_table() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_BYTES = _byte_table()


def _byte_level(word: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in word])
    except KeyError:  # not written in the table's letters: an added token's plain text
        return word.encode()


def _sentence_piece(word: str) -> bytes:
    byte = _SPM_BYTE.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace("\u2581", " ").encode()
