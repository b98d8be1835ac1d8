import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from stages.text import TextStage

BYTES = [bytes([byte]) for byte in range(256)]
letters = st.text(alphabet="ab\ufffdé€😀\n", max_size=12)
raw = st.lists(
    st.sampled_from(
        [b"a", b"b", b"ab", b"\xff", b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xf0\x9f", b"\x98\x80", b""]
    ),
    max_size=12,
)
stop_lists = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=4)


def run(tokens, stops, groups=None):
    """The whole text, and the last piece's n and keep; ``groups`` is how many tokens come at a time."""
    stage = TextStage(tokens, stops)
    ids = list(range(len(tokens)))
    pieces, at = [], 0
    for size in groups or [len(ids)]:
        pieces.append(stage.push(ids[at : at + size]))
        at += size
    pieces.append(stage.push(ids[at:]))
    pieces.append(stage.finish())
    last = pieces[-1]
    return "".join(part for piece in pieces for part in piece.parts), last.n, last.stopped, last.keep


def expected(text, stops):
    """The text before the stop that is complete first, of those the longest; and whether there is one."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def cut(data, places):
    bounds = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


def test_one_part_a_token():
    """F1: each token that completes text is a part of its own."""
    piece = TextStage([b"Hel", b"lo", b"", b"!"], []).push([0, 1, 2, 3])
    assert (piece.parts, piece.n, piece.stopped, piece.characters) == (["Hel", "lo", "!"], 4, False, 6)


def test_partial_character_waits():
    """F2: a character goes out with its last byte."""
    stage = TextStage([b"a\xf0", b"\x9f", b"\x98", b"\x80b"], [])
    assert [stage.push([token]).parts for token in range(4)] == [["a"], [], [], ["😀b"]]


def test_dropped_bytes():
    """F2: bytes that never complete are dropped, before text and at the end; none becomes a replacement character."""
    assert run([b"\xe2", b"a"], [])[0] == "a"
    assert run([b"\xff\xfe", b"a", b"\xc3"], [])[0] == "a"
    assert run([b"\xe2\x82", b"\xe2\x82\xac"], [])[0] == "€"
    assert run([b"\xed\xa0\x80", b"a"], [])[0] == "a"


def test_real_replacement_character():
    """F2: a U+FFFD the model wrote as three valid bytes passes."""
    assert run([b"\xef", b"\xbf", b"\xbd"], [])[0] == "\ufffd"


def test_unknown_ids_have_no_text():
    """F2: an id beyond the table is a token without bytes."""
    assert TextStage([b"a"], []).push([0, 7, -1]).n == 3


def test_stop():
    """A1: the text before the stop only; n counts through the token that completes it, keep those wholly before."""
    assert run([b"one", b" two", b" ST", b"OP", b" three"], ["STOP"]) == ("one two ", 4, True, 2)
    assert run([b"one", b" two ", b"ST", b"OP"], ["STOP"]) == ("one two ", 4, True, 2)
    assert run([b"STOP"], ["STOP"]) == ("", 1, True, 0)
    assert run([b"a", b"", b"STOP"], ["STOP"]) == ("a", 3, True, 2)


def test_held_back():
    """A1: only what may still become a stop is held, and it is let go when it does not."""
    stage = TextStage([b"a<", b"st", b"op", b"x"], ["<stop>"])
    assert [stage.push([token]).parts for token in range(4)] == [["a"], [], [], ["<stopx"]]
    stage = TextStage([b"a<", b"st"], ["<stop>"])
    assert stage.push([0, 1]).parts == ["a"]
    assert stage.finish().parts == ["<st"]
    assert stage.finish().parts == []


def test_overlapping_start():
    """A1: a stop that begins inside what was held for another try is found."""
    assert run([b"a", b"a", b"a", b"b"], ["aab"]) == ("a", 4, True, 1)


def test_long_stop():
    """A1: a stop of any length costs no more than the text, also where it nearly comes again and again."""
    stage = TextStage([b"a" * 500, b"c", b"b"], ["a" * 2000 + "b"])
    shown = "".join(part for token in [0, 0, 0, 1] * 200 for part in stage.push([token]).parts)
    assert len(shown) == 200 * 1501
    last = stage.push([0, 0, 0, 0, 0, 2])
    assert ("".join(last.parts), last.stopped, last.keep) == ("a" * 500, True, 801)


def test_first_complete_stop_wins():
    """A1: of several the one complete first; of those the longest."""
    assert run([b"xabc"], ["abc", "b"])[0] == "xa"
    assert run([b"xabc"], ["bc", "abc"])[0] == "x"


def test_after_a_stop():
    """A1: what follows in the same round, or later, is not judged."""
    stage = TextStage([b"a", b"X", b"b"], ["X"])
    first = stage.push([0, 1, 2])
    assert (first.parts, first.n, first.stopped, first.keep) == (["a"], 2, True, 1)
    assert stage.push([2]) == stage.finish() == type(first)([], 2, True, 1, shown=1)


def test_keep_at_a_split_character():
    """G5: a token with the first bytes of the stop is not wholly before it; one whose open bytes were dropped is."""
    assert run([b"a", b"\xe2\x82", b"\xac"], ["€"]) == ("a", 3, True, 1)
    assert run([b"a\xe2", b"\x82\xac"], ["€"]) == ("a", 2, True, 0)
    assert run([b"a", b"\xe2", b"\xff", b"X"], ["X"]) == ("a", 4, True, 3)
    assert run([b"a", b"\xe2", b"", b"X"], ["X"]) == ("a", 4, True, 3)
    assert run([b"\xe2", b"\xe2\x82\xac"], ["€"]) == ("", 2, True, 1)


@given(raw, stop_lists, st.lists(st.integers(0, 4), max_size=12))
@example([b"\xe2", b"\xe2\x82", b"\xac"], ["€"], [1, 1])
def test_any_grouping(tokens, stops, groups):
    """F2: how ids come in rounds changes neither the text nor n nor keep."""
    assert run(tokens, stops, groups) == run(tokens, stops)


@given(raw, stop_lists)
def test_text_of_any_bytes(tokens, stops):
    """F2: the text is the valid characters of all bytes, cut before the first stop."""
    text, stopped = expected(b"".join(tokens).decode("utf-8", "ignore"), stops)
    result = run(tokens, stops)
    assert (result[0], result[2]) == (text, stopped)
    assert "\ufffd" not in result[0]
    assert stopped or (result[1], result[3]) == (len(tokens), 0)


@given(letters, stop_lists, st.data())
def test_any_split(text, stops, data):
    """F2: where tokens begin changes nothing in the text; keep's rows are the longest that end before the stop."""
    encoded = text.encode()
    tokens = cut(encoded, data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    shown, stopped = expected(text, stops)
    result_text, n, found, keep = run(tokens, stops)
    assert (result_text, found) == (shown, stopped)
    if stopped:
        before = len(shown.encode())
        ends = [len(b"".join(tokens[: index + 1])) for index in range(len(tokens))]
        assert keep == sum(end <= before for end in ends)
        stop_end = min(before + len(s.encode()) for s in stops if text[len(shown) :].startswith(s))
        assert n == 1 + sum(end < stop_end for end in ends)


@given(letters, stop_lists)
def test_byte_by_byte(text, stops):
    """F2: one byte a token, through the table of all bytes."""
    stage = TextStage(BYTES, stops)
    parts = [part for byte in text.encode() for part in stage.push([byte]).parts]
    assert "".join([*parts, *stage.finish().parts]) == expected(text, stops)[0]
