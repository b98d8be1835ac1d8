import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.refusal import Refusal
from stages.schema import INTEGERS, ChatRequest, Common, CompletionRequest, decode
from tests.captures import captured
from tests.test_refusal import error_bytes

HI = [{"role": "user", "content": "hi"}]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
)
NAMES = """
messages role content prompt model stream stop max_tokens temperature top_k seed tools function type text
"""
names = st.sampled_from(NAMES.split()) | st.text(max_size=5)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5))
routes = st.sampled_from(["chat", "completions"])


def chat(**fields):
    return decode("chat", json.dumps({"messages": HI, **fields}).encode())


def completion(**fields):
    return decode("completions", json.dumps(fields).encode())


def refused(result):
    assert isinstance(result, Refusal), result
    return result.code, result.param


# -- the whole body ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "ends before"),
        (b"{", "ends before"),
        (b"nope", "not valid JSON"),
        (b'{"a": NaN}', "near byte"),
        (b'{"messages": []} x', "not valid JSON"),
        (b"[]", "must be a JSON object, not a list"),
        (b"null", "not null"),
        (b"true", "not true or false"),
        (b'"x"', "not a string"),
        (b"1", "not an integer"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\\udc00"}', "surrogate"),
        (b'{"a": "\\ud83dabc"}', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_invalid_json(body, says):
    """A14: a fault of the whole body names no field."""
    result = decode("chat", body)
    assert refused(result) == ("invalid_json", None)
    assert says in result.text


def test_surrogate_pairs_pass():
    """A14: only a lone half is refused."""
    assert decode("chat", b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}').messages[0].content == "😀"


@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_depth(opened):
    """A14: 128 levels pass, 129 do not."""

    def nested(levels):
        closed = "]" if opened == "[" else "}"
        inner = opened * (levels - 1) + ("" if opened == "[" else "1") + closed * (levels - 1)
        return ('{"messages": [{"role": "user", "content": "hi"}], "mine": ' + inner + "}").encode()

    assert isinstance(decode("chat", nested(128)), ChatRequest)
    assert refused(decode("chat", nested(129))) == ("invalid_json", None)
    assert refused(decode("chat", nested(50_000))) == ("invalid_json", None)
    assert "128 levels" in decode("chat", nested(129)).text


# -- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [*HI, {"role": 1}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1024.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": []}, "stream_options"),
        ({"tools": {}}, "tools"),
        ({"tools": ["t"]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"function": {"name": 5}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a", "description": 5}}]}, "tools[0].function.description"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"no_repeat_ngram_size": False}, "no_repeat_ngram_size"),
        ({"reasoning_format": True}, "reasoning_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": {}}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"n": "2"}, "n"),
        ({"modalities": "text"}, "modalities"),
        ({"model": 5}, "model"),
        ({"seed": 1e400}, "seed"),
    ],
)
def test_wrong_types(fields, param):
    """A6: a wrong type is a 400 that names the field, never ``$.messages``."""
    body = json.dumps({"messages": HI, **fields}).replace("Infinity", "1e400").encode()
    result = decode("chat", body)
    assert refused(result) == ("invalid_type", param)
    assert result.text.startswith(param + " must be ")
    assert "$" not in result.text and "`" not in result.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"messages": None}, "messages"),
    ],
)
def test_missing(fields, param):
    """A6: what is absent is named by its whole path; null is absent."""
    assert refused(chat(**fields)) == ("missing_required_parameter", param)


def test_missing_at_the_top():
    """A6: both routes name what they need."""
    assert refused(decode("chat", b"{}")) == ("missing_required_parameter", "messages")
    assert refused(decode("completions", b"{}")) == ("missing_required_parameter", "prompt")


def test_plain_words():
    """A9: types are said in words."""
    assert chat(max_tokens="5").text == "max_tokens must be an integer, not a string."
    assert chat(stop=5).text == "stop must be a string or a list, not an integer."


def test_whole_floats_are_integers():
    """A6a: 1024.0 is 1024, in every integer field."""
    request = chat(max_tokens=1024.0, top_k=20.0, seed=-3.0, n=1.0, max_completion_tokens=1e3)
    assert (request.max_tokens, request.top_k, request.seed, request.n) == (1024, 20, -3, 1)
    assert request.max_completion_tokens == 1000
    assert chat(no_repeat_ngram_size=3.0).no_repeat_ngram_size == 3
    assert (chat(min_tokens=2.0).min_tokens, chat(stop_token_ids=[5.0, 6]).stop_token_ids) == (2, [5, 6])
    typed = {field.name for field in msgspec.structs.fields(Common) if "int" in str(field.type)}
    assert typed == set(INTEGERS)


def test_null_is_absent():
    """A10: an explicit null that means absent."""
    assert chat(**dict.fromkeys(name for name in ChatRequest.__struct_fields__ if name != "messages")) == chat()


def test_unknown_fields_pass():
    """A5: at every level."""
    assert chat(mine={"a": [1]}, keep_alive="5m") == chat()
    assert chat(messages=[{"role": "user", "content": "hi", "mine": 1}]) == chat()


def test_tools_are_kept_as_sent():
    """A10: what a tool holds beside the fields that are typed here reaches the template and the reader."""
    tool = {"type": "function", "mine": 1, "function": {"name": "f", "strict": True, "parameters": {"$schema": "x"}}}
    assert chat(tools=[tool]).tools == [tool]


def test_prompts():
    """A1: a text, texts, token ids, lists of token ids."""
    for prompt in ("a", ["a", "b"], [1, 2], [[1, 2], [3]]):
        assert completion(prompt=prompt).prompt == prompt
    assert refused(completion(prompt=[True])) == ("invalid_type", "prompt[0]")
    assert refused(completion(prompt=[[1.5]])) == ("invalid_type", "prompt[0][0]")
    assert refused(completion(prompt={})) == ("invalid_type", "prompt")


# -- properties ----------------------------------------------------------------------------------------------------


def holds(route, body):
    result = decode(route, body)
    if not isinstance(result, Refusal):
        assert isinstance(result, ChatRequest if route == "chat" else CompletionRequest)
        return
    assert error_bytes(result) < 2048
    assert (result.param is None) == (result.code == "invalid_json")
    assert result.param is None or not result.param.startswith(("$", "."))


@given(routes, st.binary(max_size=200))
def test_any_bytes(route, body):
    """A14: bytes of any kind get an answer."""
    holds(route, body)


@given(routes, values)
def test_any_json(route, value):
    """A6: JSON of any shape gets an answer."""
    holds(route, json.dumps(value).encode())


@given(routes, st.dictionaries(names, values, max_size=6))
def test_any_object(route, fields):
    """A6: fields of any type get an answer."""
    holds(route, json.dumps({"messages": HI, "prompt": "hi", **fields}).encode())


def test_captured():
    """A10: no body of a real client has a wrong type."""
    for route, file, body in captured():
        result = decode(route, json.dumps(body).encode())
        assert not isinstance(result, Refusal), (file, result)


@st.composite
def _broken(draw):
    route, _, body = draw(st.sampled_from(captured()))
    copy = json.loads(json.dumps(body))
    node = copy
    for _ in range(draw(st.integers(0, 5))):
        children = [key for key in keys(node) if isinstance(node[key], dict | list) and node[key]]
        if not children:
            break
        node = node[draw(st.sampled_from(children))]
    if keys(node):
        node[draw(st.sampled_from(keys(node)))] = draw(values)
    return route, copy


broken = st.deferred(_broken)
"""Route and body of a real client with one value replaced."""


@given(broken)
def test_captured_and_broken(sent):
    """A6: a real body with one value replaced gets an answer."""
    holds(sent[0], json.dumps(sent[1]).encode())


def keys(node):
    return list(node) if isinstance(node, dict) else list(range(len(node)))
