import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Sampling, Start, encoder
from stages.judge import LARGEST, Ending, ending, judge, logprobs, sampling
from stages.schema import decode
from stages.validate import Rules
from tests.captures import captured
from tests.test_refusal import error_bytes
from tests.test_schema import names, routes, values

HI = [{"role": "user", "content": "hi"}]
STRICT = Rules(strict_model=True, model="smol")


def body(**fields):
    return json.dumps({"messages": HI, "prompt": "hi", **fields}).encode()


def code(given_body, rules=STRICT):
    refusal = judge("chat", given_body, rules).refusal
    return refusal and refusal.code


def test_order():
    """A6: whole body, model, shape, refused field: the first fault is the answer."""
    assert code(b'{"model": "other", "messages": 5, "audio": {}') == "invalid_json"
    assert code(body(model="other", messages=5, audio={})) == "model_not_found"
    assert code(body(model="smol", messages=5, audio={})) == "invalid_type"
    assert code(body(model="smol", messages=[], audio={})) == "invalid_value"
    assert code(body(model="smol", audio={})) == "unsupported_parameter"
    assert code(body(model="smol")) is None
    assert code(body(model=5)) == "invalid_type"


def test_facts():
    """A1: what the runner posts of a request that is served."""
    judged = judge("chat", body(stream=True, max_tokens=9, max_completion_tokens=7, stop="x", temperature=0), Rules())
    assert judged.refusal is None and judged.request is not None
    assert (judged.stream, judged.messages, judged.max_tokens, judged.stops) == (True, 1, 7, ["x"])
    assert judge("chat", body(), Rules()).max_tokens == 0
    assert judge("chat", body(stop=["a", "b"]), Rules()).stops == ["a", "b"]
    assert judge("completions", body(max_tokens=10**30), Rules()).max_tokens == LARGEST
    assert judge("completions", body(), Rules()).messages == 0


def test_include_usage():
    """F1: asked for, refused, or not said."""
    for options, expected in (
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({"include_usage": None}, None),
        ({}, None),
        (None, None),
    ):
        assert judge("chat", body(stream_options=options), Rules()).include_usage is expected


def test_refused_has_facts():
    """A9: a refused request is refused, and still tells whether it asked for a stream."""
    judged = judge("chat", body(stream=True, audio={}), Rules())
    assert judged.request is None and judged.stream and judged.messages == 1


def chosen(**fields):
    return sampling(decode("chat", body(**fields)), 11)


def test_sampling():
    """A1: OpenAI's defaults; a seed of the client's wins over ours."""
    default = chosen()
    assert (default.temperature, default.top_p, default.top_k, default.min_p, default.seed) == (1.0, 1.0, 0, 0.0, 11)
    asked = chosen(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=-5)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.seed) == (0.5, 0.9, 40, 0.1, -5)
    assert chosen(seed=0).seed == 0


def test_penalties_and_bias():
    """A1: neutral where nothing was asked for, a bias of 0 or null as well (A4)."""
    plain = chosen(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, logit_bias={"5": 0, "6": None})
    assert plain == chosen() == Sampling(seed=11)
    asked = chosen(presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={"5": 3, "0": -1.5})
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (1.0, -0.5, 1.2)
    assert asked.logit_bias == {5: 3.0, 0: -1.5}


def test_ending():
    """A4: which tokens end an answer; the client's ids in any case."""

    def ends(**fields):
        return ending(decode("chat", body(**fields)))

    assert ends() == ends(ignore_eos=False, min_tokens=0, stop_token_ids=[]) == Ending()
    assert ends().all_ids([2, 7]) == [2, 7]
    assert ends(ignore_eos=True).all_ids([2, 7]) == []
    assert ends(stop_token_ids=[9, 7, 9]).all_ids([2, 7]) == [2, 7, 9]
    assert ends(stop_token_ids=[9], ignore_eos=True).all_ids([2, 7]) == [9]
    assert (ends(min_tokens=5).min_tokens, ends(min_tokens=10**30).min_tokens) == (5, LARGEST)


def test_logprobs():
    """F7: how many alternatives a request wants, -1 for none of it."""
    for route, fields, expected in (
        ("chat", {}, -1),
        ("chat", {"logprobs": False, "top_logprobs": 0}, -1),
        ("chat", {"logprobs": True}, 0),
        ("chat", {"logprobs": True, "top_logprobs": 7}, 7),
        ("completions", {"logprobs": False}, -1),
        ("completions", {}, -1),
        ("completions", {"logprobs": 0}, 0),
        ("completions", {"logprobs": 5}, 5),
    ):
        assert logprobs(decode(route, body(**fields))) == expected


def test_greedy():
    """A6a: temperature 0 and top_p 0 are greedy; -1 turns top_k off."""
    assert chosen(temperature=0).temperature == 0.0
    assert chosen(temperature=1e-300).temperature == 0.0
    assert (chosen(top_p=0).temperature, chosen(top_p=0).top_p) == (0.0, 1.0)
    assert chosen(top_k=-1).top_k == 0


@given(routes, st.dictionaries(names, values, max_size=6))
def test_any_object(route, fields):
    """A9: whatever a body holds there is one verdict; what is served fits the pipe to the engine."""
    judged = judge(route, body(**fields), Rules())
    assert (judged.request is None) != (judged.refusal is None)
    if judged.refusal:
        assert error_bytes(judged.refusal) < 2048
        assert (judged.refusal.param is None) == (judged.refusal.code == "invalid_json")
    else:
        ends = ending(judged.request)
        start = Start(
            1, 1, 0, [1], sampling(judged.request, 5), judged.max_tokens, list(ends.stop_ids), 0, ends.min_tokens
        )
        encoder.encode(start)


@given(routes, st.binary(max_size=100))
def test_any_bytes(route, data):
    """A14: bytes of any kind get a verdict."""
    assert judge(route, data, Rules()).refusal


def test_captured():
    """A5: a real client's body is served, or names a field that is to come."""
    for route, file, captured_body in captured():
        refusal = judge(route, msgspec.json.encode(captured_body), Rules()).refusal
        assert refusal is None or refusal.code == "unsupported_parameter", (file, refusal)
