"""Characters and reaches of tokens, without stops; the text stage's own tests hold the rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.stream import Stream

raw = st.lists(
    st.sampled_from([b"a", b"ab", b"\xff", b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xf0\x9f", b"\x98\x80", b""]),
    max_size=12,
)


def test_ids_beyond_the_table_write_nothing() -> None:
    """F2: a token nobody named is one without bytes."""
    stream = Stream([b"a"])
    assert [stream.written(token) for token in (0, 1, -1)] == [b"a", b"", b""]


def test_a_partial_character_waits() -> None:
    """F2: it goes out with its last byte, and every token that has a part of it reaches into it."""
    stream = Stream([])
    assert [stream.push(data) for data in (b"a\xf0", b"\x9f", b"", b"\x98\x80b")] == [["a"], [""], [""], ["😀b"]]
    assert (stream.ends, stream.chars) == ([2, 2, 2, 3], 3)


def test_dropped_bytes_reach_nowhere() -> None:
    """F2: tokens that ended in them end where the text stood."""
    stream = Stream([])
    assert [stream.push(data) for data in (b"a\xe2", b"\x82", b"b")] == [["a"], [""], ["b"]]
    assert stream.ends == [1, 1, 2]


def test_no_character_reaches_across_a_cut() -> None:
    """C6: where a tag ends one text ends: a character open there is none, also over several tokens."""
    stream = Stream([])
    assert stream.push(b"a\xe2") == ["a"]
    assert stream.push(b"", [0]) == ["", ""]
    assert stream.push(b"\x82\xacb") == ["b"]
    assert stream.push(b"x\xc3y", [2, 3]) == ["x", "y", ""]
    assert stream.ends == [1, 1, 2, 4]


@given(raw, st.data())
def test_text_and_reaches(tokens: list[bytes], data: st.DataObject) -> None:
    """F2: between cuts the text is the valid characters of all bytes; reaches ascend and end at the text's end."""
    stream, texts, blocks = Stream([]), [""], [b""]
    for token in tokens:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(token)), max_size=2)))
        bounds = [0, *cuts, len(token)]
        for index, text in enumerate(stream.push(token, cuts)):
            if index:
                texts.append("")
                blocks.append(b"")
            texts[-1] += text
            blocks[-1] += token[bounds[index] : bounds[index + 1]]
    assert texts == [block.decode("utf-8", "ignore") for block in blocks]
    assert stream.chars == len("".join(texts))
    assert stream.ends == sorted(stream.ends) and all(end <= stream.chars + 1 for end in stream.ends)
