import itertools

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.calls import Arguments, CallClosed, CallOpened, Content, Reasoning
from stages.message import assembled
from stages.text import Reading, TextStage
from tests.split import CLOSE, OPEN, Answer, deltas, said

BYTES = [bytes([byte]) for byte in range(256)]
letters = st.text(alphabet="ab\ufffdé€😀\n", max_size=12)
raw = st.lists(
    st.sampled_from(
        [b"a", b"b", b"ab", b"\xff", b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xf0\x9f", b"\x98\x80", b""]
    ),
    max_size=12,
)
stop_lists = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=4)


def plain(tokens, stops=()):
    return TextStage(tokens, Reading(stops=list(stops)))


def texts(piece):
    """The text of each part: where nothing but text is read, it is one piece of content."""
    assert all(isinstance(delta, Content) for part in piece.parts for delta in part)
    return [delta.text for part in piece.parts for delta in part]


def run(tokens, stops, groups=None):
    """The whole text, and the last piece's n and keep; ``groups`` is how many tokens come at a time."""
    stage = plain(tokens, stops)
    ids = list(range(len(tokens)))
    pieces, at = [], 0
    for size in groups or [len(ids)]:
        pieces.append(stage.push(ids[at : at + size]))
        at += size
    pieces.append(stage.push(ids[at:]))
    pieces.append(stage.finish())
    last = pieces[-1]
    return "".join(part for piece in pieces for part in texts(piece)), last.n, last.stopped, last.keep


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
    piece = plain([b"Hel", b"lo", b"", b"!"]).push([0, 1, 2, 3])
    assert (texts(piece), piece.n, piece.stopped, piece.characters) == (["Hel", "lo", "!"], 4, False, 6)


def test_partial_character_waits():
    """F2: a character goes out with its last byte."""
    stage = plain([b"a\xf0", b"\x9f", b"\x98", b"\x80b"])
    assert [texts(stage.push([token])) for token in range(4)] == [["a"], [], [], ["😀b"]]


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
    assert plain([b"a"]).push([0, 7, -1]).n == 3


def test_stop():
    """A1: the text before the stop only; n counts through the token that completes it, keep those wholly before."""
    assert run([b"one", b" two", b" ST", b"OP", b" three"], ["STOP"]) == ("one two ", 4, True, 2)
    assert run([b"one", b" two ", b"ST", b"OP"], ["STOP"]) == ("one two ", 4, True, 2)
    assert run([b"STOP"], ["STOP"]) == ("", 1, True, 0)
    assert run([b"a", b"", b"STOP"], ["STOP"]) == ("a", 3, True, 2)


def test_held_back():
    """A1: only what may still become a stop is held, and it is let go when it does not."""
    stage = plain([b"a<", b"st", b"op", b"x"], ["<stop>"])
    assert [texts(stage.push([token])) for token in range(4)] == [["a"], [], [], ["<stopx"]]
    stage = plain([b"a<", b"st"], ["<stop>"])
    assert texts(stage.push([0, 1])) == ["a"]
    assert texts(stage.finish()) == ["<st"]
    assert texts(stage.finish()) == []


def test_overlapping_start():
    """A1: a stop that begins inside what was held for another try is found."""
    assert run([b"a", b"a", b"a", b"b"], ["aab"]) == ("a", 4, True, 1)


def test_long_stop():
    """A1: a stop of any length costs no more than the text, also where it nearly comes again and again."""
    stage = plain([b"a" * 500, b"c", b"b"], ["a" * 2000 + "b"])
    shown = "".join(part for token in [0, 0, 0, 1] * 200 for part in texts(stage.push([token])))
    assert len(shown) == 200 * 1501
    last = stage.push([0, 0, 0, 0, 0, 2])
    assert ("".join(texts(last)), last.stopped, last.keep) == ("a" * 500, True, 801)


def test_first_complete_stop_wins():
    """A1: of several the one complete first; of those the longest."""
    assert run([b"xabc"], ["abc", "b"])[0] == "xa"
    assert run([b"xabc"], ["bc", "abc"])[0] == "x"


def test_after_a_stop():
    """A1: what follows in the same round, or later, is not judged."""
    stage = plain([b"a", b"X", b"b"], ["X"])
    first = stage.push([0, 1, 2])
    assert (texts(first), first.n, first.stopped, first.keep) == (["a"], 2, True, 1)
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
    stage = plain(BYTES, stops)
    parts = [part for byte in text.encode() for part in texts(stage.push([byte]))]
    assert "".join([*parts, *texts(stage.finish())]) == expected(text, stops)[0]


# Thinking, calls and stops together

READ = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
CALL = "<tool_call>\n<function=read>\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>"
SENT = (0, "read", '{"path": "/a"}')
WORDS = [
    "a", "b", "\n", "\n\n", " ", "<", "<think>", "</think>", "</thi", "nk>", "é", b"\xf0\x9f", b"\x98\x80", b"\xff",
    OPEN, CLOSE, CALL, "<tool_call>\n", "<function=read>\n", "<parameter=path>\n", "/a", "\n</parameter>\n",
    "</function>", "\n</tool_call>", '{"name": "read", ', '"arguments": {"path": "/a"}}', "```\n", "x</think>\n\ny",
    "<think>\nz",
]  # fmt: skip
readings = st.builds(
    Reading,
    stops=st.lists(st.sampled_from(["a", "\n\n", "b\n", "é", "</think>", "k>\na", "=", "nk>\n\ny"]), max_size=2),
    shape=st.sampled_from(["tags", "reasoning_content", "both", "hidden"]),
    state=st.sampled_from(["open", "may", "off"]),
    tools=st.sampled_from([None, [], [READ]]),
    parallel=st.booleans(),
    plan=st.booleans(),
    blank_line=st.booleans(),
)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=14), readings, st.lists(st.integers(0, 4), max_size=14))
def test_any_rounds(parts, reading, sizes):
    """F2: tokens, turns and all that is told of them come out the same, however they fall into rounds."""
    answer = Answer(parts, reading.state)
    each = answer.pushed(reading, [1] * len(parts))
    some = answer.pushed(reading, sizes)
    assert [part for piece in some for part in piece.parts] == [part for piece in each for part in piece.parts]
    assert [at for piece in some for at in piece.through] == [at for piece in each for at in piece.through]
    assert [at for piece in some for at in piece.starts] == [at for piece in each for at in piece.starts]
    assert [p.closed_at for p in some if p.closed] == [p.closed_at for p in each if p.closed]
    last, other = (msgspec.structs.replace(pieces[-1], parts=[], through=[]) for pieces in (some, each))
    assert last == other


@settings(max_examples=300)
@given(st.text(alphabet="a\n é<😀", max_size=6), st.lists(st.sampled_from(WORDS), max_size=8), readings, st.data())
def test_any_tokens(text, words, reading, data):
    """F2: where tokens begin changes nothing in the message, the calls and the count of calls."""
    encoded = text.encode() + b"".join(
        word if isinstance(word, bytes) else word.encode() for word in words if not isinstance(word, int)
    )
    parts = cut(encoded, data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    bytewise = Answer([encoded[at : at + 1] for at in range(len(encoded))], reading.state).pushed(reading)
    pieces = Answer(parts, reading.state).pushed(reading)
    if reading.shape == "both":  # what is said twice is said side by side, so only the wholes are alike
        assert assembled(deltas(pieces)) == assembled(deltas(bytewise))
    else:
        assert deltas(pieces) == deltas(bytewise)
    facts = [(p.stopped, p.opened_calls, p.closed_calls, p.open_call, p.dropped_calls, p.lost_calls) for p in
             (pieces[-1], bytewise[-1])]  # fmt: skip
    assert facts[0] == facts[1]


@given(st.lists(st.sampled_from(WORDS), max_size=14), readings)
def test_facts_agree_with_what_was_said(parts, reading):
    """D7, D10: counts are those of the deltas; no call goes where none is offered; told tokens ascend to all."""
    pieces = Answer(parts, reading.state).pushed(reading)
    said, last = deltas(pieces), pieces[-1]
    assert last.opened_calls == sum(isinstance(delta, CallOpened) for delta in said)
    assert last.closed_calls == len(assembled(said)[2]) <= last.opened_calls
    assert reading.tools or (last.opened_calls, last.open_call, last.lost_calls) == (0, False, 0)
    through = [at for piece in pieces for at in piece.through]
    assert through == sorted(through)
    assert last.shown == (last.keep if last.stopped else len(parts)) and last.n <= len(parts)
    assert last.reasoning <= len(parts) and (last.reasoning == 0 or reading.state != "off")


@given(st.lists(st.sampled_from(WORDS), max_size=14), readings)
def test_shapes_agree(parts, reading):
    """B3: `both` is `tags` and what is apart; the answer and the calls are the same in every shape."""
    shapes = ("tags", "reasoning_content", "both", "hidden")
    readings = [msgspec.structs.replace(reading, shape=shape, blank_line=False) for shape in shapes]
    answer = Answer(parts, reading.state)
    tags, apart, both, hidden = (assembled(deltas(answer.pushed(reading))) for reading in readings)
    assert both == (tags[0], apart[1], tags[2])
    assert hidden == (apart[0], "", apart[2])
    assert (tags[0] or "").endswith(apart[0] or "") and tags[2] == apart[2]


def read(text, **more):
    """The message, and the last piece."""
    reading = Reading(**{"shape": "reasoning_content", "state": "open", "tools": [READ], **more})
    return said(text, reading), Answer([text], reading.state).pushed(reading)[-1]


def test_a_call_in_the_thinking_is_none():
    """D1: nor is one in a block that never closed; that one is counted."""
    assert read(f"{CALL}</think>x")[0] == ("x", CALL, [])
    assert read(f"{CALL}</think>x")[1].lost_calls == 0
    message, last = read(f"{CALL}\n{CALL.replace('/a', '/b')}")
    assert (message[0], message[2], last.lost_calls, last.opened_calls) == ("", [], 2, 0)
    assert read("I may write <tool_call> here")[1].lost_calls == 0
    assert read(CALL, tools=None)[1].lost_calls == 0


def test_nobody_offered_tools():
    """D7: a call is cut out under a plan, and counted; on the raw path it is content; it is never a call."""
    text = f"a {CALL} b"
    for tools, plan, wanted in (([], True, "a  b"), ([], False, text), (None, False, text), (None, True, text)):
        message, last = read(text, state="off", tools=tools, plan=plan)
        assert message == (wanted, "", [])
        assert (last.opened_calls, last.closed_calls, last.open_call) == (0, 0, False)
        assert last.dropped_calls == (tools == [] and plan)
    assert read(text[:-20], state="off", tools=[], plan=True)[0] == ("a ", "", [])


def test_calls_are_counted():
    """D10: opened and whole ones, and whether the text stands inside one, at every push."""
    stage = TextStage(
        [text.encode() for text in ("<function=read>", "\n</function>", "<function=")], Reading(tools=[READ])
    )
    facts = []
    for token in (0, 1, 0, 2):
        piece = stage.push([token])
        facts.append((piece.opened_calls, piece.closed_calls, piece.open_call))
    assert facts == [(1, 0, True), (1, 1, False), (1, 1, True), (1, 1, True)]
    end = stage.finish()
    assert (end.opened_calls, end.closed_calls, end.open_call) == (1, 1, True)


def test_at_the_output_limit():
    """D10, F9: a call left open is left out of the whole message; what was sent of it stays sent."""
    message, last = read(f"ok {CALL[:-40]}", state="off")
    assert message == ("ok ", "", [])
    assert (last.opened_calls, last.closed_calls, last.open_call) == (1, 0, True)
    message, last = read(f"{CALL}\n<tool_call>", state="off")
    assert message == (None, "", [SENT])
    assert (last.opened_calls, last.closed_calls, last.open_call) == (1, 1, True)


def test_one_call_only():
    """D6: the second is cut and counted; a repeated one is not sent."""
    for parallel in (True, False):
        message, last = read(f"{CALL}\n{CALL}", state="off", parallel=parallel)
        assert (message[2], last.dropped_calls) == ([SENT], 1)


def test_a_message_of_its_parts():
    """F9, D2: content is none beside calls without text, else the text; an unfinished call is left out."""
    opened, piece = CallOpened(0, "f"), Arguments(0, "{")
    assert assembled([]) == ("", "", [])
    assert assembled([Reasoning("r"), Content("a"), Reasoning("s"), Content("b")]) == ("ab", "rs", [])
    assert assembled([opened, piece, Arguments(0, "}"), CallClosed(0, True)]) == (None, "", [(0, "f", "{}")])
    assert assembled([opened, piece, CallClosed(0, False)]) == assembled([opened, piece]) == ("", "", [])
    two = [opened, piece, CallClosed(0, True), Content("x"), CallOpened(1, "g"), CallClosed(1, True)]
    assert assembled(two) == ("x", "", [(0, "f", "{"), (1, "g", "")])


def test_a_file_write_streams():
    """D3: a long value goes out with its tokens, none later than the next one."""
    write = {"type": "function", "function": {"name": "w", "parameters": {"properties": {"x": {"type": "string"}}}}}
    parts = ["<function=w>", "\n<parameter=x>\n", *["line of text\n"] * 300]
    pieces = Answer(parts, "off").pushed(Reading(tools=[write], stops=["END"], plan=True), [1] * len(parts))
    assert all(piece.parts for piece in pieces[2 : len(parts)])


def test_offsets_count_the_tags_we_write():
    """F7: text offsets are places in the content, the opener and a special token's tag among them."""
    answer = Answer(["a", CLOSE, "b", "c"])
    pieces = answer.pushed(Reading(state="open"))
    assert pieces[0].starts == [0, 9, 17, 18]
    assert assembled(deltas(pieces))[0].index("c") == 18


def test_offsets_leave_out_what_is_hidden():
    """F7: where the thinking is not sent, offsets are still places in the content."""
    for state, head in (("open", []), ("may", [" ", "<think>", "\n"])):
        parts = [*head, "why", "\n</think>", "\n", "\n", "ab", "c"]
        for shape in ("hidden", "reasoning_content"):
            pieces = Answer(parts, state).pushed(Reading(shape=shape, state=state, plan=True), [1] * len(parts))
            assert assembled(deltas(pieces))[0] == "abc"
            assert [start for piece in pieces for start in piece.starts][-2:] == [0, 2]
