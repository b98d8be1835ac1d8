import json

import pytest

from stages.refusal import Refusal, joined
from stages.schema import decode
from stages.validate import FORMATS, Rules, prompt_name, prompts_of, validate
from tests.captures import captured

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
ANSWER = {"role": "assistant", "content": "hello"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "done"}


def judged(route="chat", rules=Rules(), **fields):  # noqa: B008 - frozen
    base = {"messages": [USER]} if route == "chat" else {"prompt": "hi"}
    request = decode(route, json.dumps(base | fields).encode())
    assert not isinstance(request, Refusal), request
    refusal = validate(request, rules)
    return None if refusal is None else (refusal.code, refusal.param)


def invalid(param):
    return ("invalid_value", param)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], invalid("messages")),
        ([{"role": "robot", "content": "x"}], invalid("messages[0].role")),
        ([USER, {"role": "User", "content": "x"}], invalid("messages[1].role")),
        ([USER, {"role": "function", "name": "f", "content": "x"}], invalid("messages[1].role")),
        ([SYSTEM], invalid("messages")),
        ([SYSTEM, {"role": "developer", "content": "x"}], invalid("messages")),
        ([RESULT], invalid("messages")),
        ([SYSTEM, RESULT], invalid("messages")),
        ([CALL, RESULT], invalid("messages")),
        ([USER, SYSTEM], invalid("messages[1].role")),
        ([SYSTEM, USER, ANSWER, {"role": "developer", "content": "x"}, USER], invalid("messages[3].role")),
        ([{"role": "user"}], ("missing_required_parameter", "messages[0].content")),
        ([{"role": "user", "content": None}], ("missing_required_parameter", "messages[0].content")),
        ([{"role": "system"}, USER], ("missing_required_parameter", "messages[0].content")),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            ("missing_required_parameter", "messages[0].content[0].text"),
        ),
        ([{"role": "user", "content": [{"type": "smell"}]}], invalid("messages[0].content[0].type")),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            ("unsupported_value", "messages[0].content[0]"),
        ),
        (
            [
                USER,
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]},
            ],
            ("unsupported_value", "messages[1].content[1]"),
        ),
    ],
)
def test_messages(messages, expected):
    """A6: shapes that are refused, and the name of the place."""
    assert judged(messages=messages) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, USER],
        [SYSTEM, {"role": "developer", "content": "x"}, USER],
        [USER, CALL, RESULT],
        [USER, CALL | {"content": ""}, RESULT | {"name": "f"}],
        [USER, CALL, RESULT | {"content": [{"type": "text", "text": "done"}]}],
        [USER, CALL, RESULT | {"content": None}],
        [USER, ANSWER],
        [SYSTEM, ANSWER],
        [USER, {"role": "assistant"}, USER],
        [USER, ANSWER | {"reasoning_content": "hm", "tool_calls": None}, USER],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}],
        [{"role": "user", "content": ""}],
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER],
    ],
)
def test_never_refused(messages):
    """A10: shapes that real clients send."""
    assert judged(messages=messages) is None


def test_function_role_says_use_tools():
    """A6: the old role is refused with the way out."""
    body = json.dumps({"messages": [{"role": "function", "content": "x"}]}).encode()
    assert "use tools" in validate(decode("chat", body), Rules()).text


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [1, 10**30], [0, -1]),
        ("max_completion_tokens", [1], [0, -5]),
        ("temperature", [0, 0.7, 2], [-0.1, 2.01, 10**300]),
        ("top_p", [0, 0.5, 1], [-0.1, 1.01]),
        ("min_p", [0, 1], [-0.1, 1.01]),
        ("top_k", [-1, 0, 1, 10**30], [-2]),
        ("seed", [0, -(1 << 63), (1 << 63) - 1], [1 << 63, -(1 << 63) - 1]),
        ("n", [1, 16], [0, 17, -1]),
        ("presence_penalty", [-2, 0, 0.5, 2], [-2.01, 2.01, 10**300]),
        ("frequency_penalty", [-2, 0, 0.5, 2], [-2.01, 2.01, 10**300]),
        ("repetition_penalty", [1e-300, 1, 1.3, 1e300], [0, -1]),
        ("min_tokens", [0, 5, 5.0, 10**30], [-1]),
        ("no_repeat_ngram_size", [0, 1, 3.0, 10**30], [-1]),
        ("stop", ["a", [], ["a"], ["a"] * 16], ["", ["a"] * 17]),
    ],
)
def test_ranges(name, good, bad):
    """A6a: the ranges of the honoured fields."""
    for route in ("chat", "completions"):
        for value in good:
            assert judged(route, **{name: value}) is None, value
        for value in bad:
            assert judged(route, **{name: value}) == invalid(name), value


def test_logprobs():
    """A6a: F7's counts; a count without chat's switch is told, 0 asks for nothing."""
    for count in (0, 1, 20):
        assert judged(logprobs=True, top_logprobs=count) is None
    assert judged(logprobs=False, top_logprobs=0) is None
    assert judged(top_logprobs=1) == judged(logprobs=False, top_logprobs=1) == invalid("top_logprobs")
    for count in (21, -1):
        assert judged(logprobs=True, top_logprobs=count) == invalid("top_logprobs")
    for count in (None, False, 0, 5):
        assert judged("completions", logprobs=count) is None
    for count in (6, -1):
        assert judged("completions", logprobs=count) == invalid("logprobs")
    assert judged("completions", logprobs=True) == ("invalid_type", "logprobs")
    assert isinstance(decode("chat", json.dumps({"messages": [USER], "logprobs": 1}).encode()), Refusal)


def test_both_limits():
    """A6a: each limit is held to its range, whichever wins."""
    assert judged(max_tokens=0, max_completion_tokens=5) == invalid("max_tokens")


def test_empty_stop():
    """A6a: none empty, the place named."""
    assert judged(stop=["a", ""]) == invalid("stop[1]")


@pytest.mark.parametrize("good", [{}, {"0": 100, "5": -100.0, "49151": 0.5}, {"7": None}])
def test_logit_bias(good):
    """A6a: token ids as keys, -100 to 100 as values; null is absent."""
    for route in ("chat", "completions"):
        assert judged(route, logit_bias=good) is None


@pytest.mark.parametrize("key", ["", "a", "-1", "+1", " 1", "01", "1.0", "\u0661", "9" * 5000])
def test_a_key_that_is_no_token_id(key):
    """A6a: the key is named, cut where it is long."""
    code, param = judged(logit_bias={"3": 1, key: 1})
    assert code == "invalid_value" and param.startswith(("logit_bias" + joined(key))[:200])


def test_a_bias_out_of_range():
    """A6a: the id is named."""
    for value in (100.1, -101, 10**400):
        assert judged(logit_bias={"3": 1, "4": value}) == invalid("logit_bias.4")
    for value in ("1", True, [1], {}):
        assert judged(logit_bias={"4": value}) == ("invalid_type", "logit_bias.4")
    request = decode("chat", b'{"messages":[{"role":"user","content":"hi"}],"logit_bias":{"4":1e999}}')
    assert validate(request, Rules()).param == "logit_bias.4"


def test_infinite_numbers():
    """A6a: a number beyond any float is out of range, not a fault of the body."""
    request = decode("chat", b'{"messages":[{"role":"user","content":"hi"}],"temperature":1e999}')
    assert validate(request, Rules()).param == "temperature"


def test_modalities():
    """A1: text only."""
    assert judged(modalities=["text"]) is None
    assert judged(modalities=[]) is None
    assert judged(modalities=["text", "audio"]) == ("unsupported_value", "modalities")


def test_tools():
    """A6: malformed tools and choices are refused here, behind the messages (``tests/test_offer.py`` has them all)."""
    assert judged(tools=[{"type": "function"}]) == ("missing_required_parameter", "tools[0].function.name")
    assert judged(tool_choice="required") == invalid("tool_choice")
    assert judged(messages=[], tool_choice="required") == invalid("messages")


def test_one_stream():
    """A1: n over 1 is not streamed."""
    for route in ("chat", "completions"):
        assert judged(route, n=2, stream=True) == ("unsupported_value", "n")
        assert judged(route, n=17, stream=True) == invalid("n")
        for fields in ({"n": 2}, {"n": 2, "stream": False}, {"n": 1, "stream": True}, {"n": None, "stream": True}):
            assert judged(route, **fields) is None


def test_mid_system():
    """A12: with ``--mid-system fold`` a system message may stand anywhere, and the rest of the order holds."""
    fold = Rules(mid_system="fold")
    for messages in ([USER, SYSTEM], [SYSTEM, USER, ANSWER, {"role": "developer", "content": "x"}, USER]):
        assert judged(messages=messages, rules=fold) is None
        assert judged(messages=messages)[0] == "invalid_value"
    assert judged(messages=[SYSTEM], rules=fold) == judged(messages=[RESULT, SYSTEM], rules=fold) == invalid("messages")


def test_reasoning_format():
    """B10: its own words and those of other servers; any other is a 400."""
    words = "tags reasoning_content both deepseek parsed none raw deepseek-legacy auto hidden"
    assert sorted(FORMATS) == sorted(words.split())
    for route in ("chat", "completions"):
        for word in words.split():
            assert judged(route, reasoning_format=word) is None
        for word in ("", "Tags", "think", "x" * 9000):
            assert judged(route, reasoning_format=word) == invalid("reasoning_format")


def test_hiding():
    """B10: the switches that hide the thinking are booleans, also written as strings."""
    for value in (True, False, "true", "false", None):
        assert judged(include_reasoning=value, reasoning={"exclude": value}) is None
    for value in (0, "no", [], {}):
        assert judged(include_reasoning=value) == ("invalid_type", "include_reasoning")
        assert judged(reasoning={"exclude": value}) == ("invalid_type", "reasoning.exclude")


def test_strict_model():
    """A9: an unknown model is a 404 only with ``--strict-model``."""
    strict = Rules(strict_model=True, model="smol")
    assert judged(model="other") is None
    assert judged() is None
    assert judged(rules=strict, model="smol") is None
    assert judged(rules=strict, model="other") == ("model_not_found", "model")
    assert judged(rules=strict, model="") == ("model_not_found", "model")
    assert judged(rules=strict) == ("missing_required_parameter", "model")


@pytest.mark.parametrize("prompt", ["", [], [""], [[]]])
def test_empty_prompt(prompt):
    """A6: an empty completion prompt."""
    assert judged("completions", prompt=prompt) == invalid("prompt")


def test_prompts():
    """A13: up to 16 texts or lists of ids, in order; a list of one counts as one."""

    def all_of(prompt):
        return prompts_of(decode("completions", json.dumps({"prompt": prompt}).encode()))

    assert all_of("a") == all_of(["a"]) == ["a"]
    assert all_of([1, 2]) == all_of([[1, 2]]) == [[1, 2]]
    assert all_of(["a", "b"]) == ["a", "b"] and all_of([[1], [2, 3]]) == [[1], [2, 3]]
    assert len(all_of(["a"] * 16)) == 16 and judged("completions", prompt=["a"] * 16) is None
    assert judged("completions", prompt=["a"] * 17) == judged("completions", prompt=[[1]] * 17) == invalid("prompt")
    assert judged("completions", prompt=[1] * 17) is None
    assert judged("completions", prompt=["a", ""]) == judged("completions", prompt=[[1], []]) == invalid("prompt[1]")
    for mixed in (["a", 1], [1, [1]], ["a", [1]]):
        assert judged("completions", prompt=mixed) == ("invalid_type", "prompt")
    assert [prompt_name(1, 0), prompt_name(3, 2)] == ["prompt", "prompt[2]"]


def test_captured():
    """A10: no body of a real client has a wrong shape."""
    for route, file, body in captured():
        assert validate(decode(route, json.dumps(body).encode()), Rules()) is None, file
