import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Sampling, Start, encoder
from engine.protocol import Thinking as Bounds
from stages.constraint import wish
from stages.judge import (
    LARGEST,
    Ending,
    budget,
    choices,
    ending,
    judge,
    logprobs,
    offered,
    parallel,
    sampling,
    shape_of,
    structured,
)
from stages.schema import decode
from stages.thinking import Defaults, Thinking
from stages.validate import Rules
from tests.captures import captured
from tests.test_refusal import error_bytes
from tests.test_schema import broken, names, routes, values

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
    assert judge("chat", body(think=5, audio={}), Rules()).refusal.param == "think"
    assert judge("chat", body(think=5, n=0), Rules()).refusal.param == "n"


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


def test_include_progress():
    """L8: the figures of its lines are wanted only where it says so."""
    for options, expected in (({"include_progress": True}, True), ({"include_progress": False}, False), (None, False)):
        assert judge("chat", body(stream=True, stream_options=options), Rules()).progress is expected


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
            1, 1, 0, [1], sampling(judged.request, 5), judged.max_tokens, list(ends.stop_ids), 0, ends.min_tokens,
            thinking=budget(judged.request, judged.thinking, Rules(), "may"),
        )  # fmt: skip
        encoder.encode(start)


@given(broken)
def test_captured_and_broken(sent):
    """A6: a real body with one value replaced gets a verdict, and what is served can be read by every reader."""
    route, given_body = sent
    judged = judge(route, json.dumps(given_body).encode(), Rules())
    if judged.refusal:
        assert error_bytes(judged.refusal) < 2048
        return
    request = judged.request
    assert 1 <= choices(request) == judged.choices <= 16
    assert shape_of(request, Rules()) in ("tags", "reasoning_content", "both", "hidden")
    assert -1 <= budget(request, judged.thinking, Rules(), "open").cap <= LARGEST
    assert isinstance(offered(request), list | None) and isinstance(parallel(request), bool)


@given(routes, st.binary(max_size=100))
def test_any_bytes(route, data):
    """A14: bytes of any kind get a verdict."""
    assert judge(route, data, Rules()).refusal


def test_captured():
    """A10: every body of a real client is served."""
    for route, file, captured_body in captured():
        assert judge(route, msgspec.json.encode(captured_body), Rules()).refusal is None, file


# -- thinking --------------------------------------------------------------------------------------------------------


def test_thinking():
    """C0: the verdict says what the request and the server's defaults make of thinking."""
    off = Rules(thinking=Defaults(thinking="off"))
    assert judge("chat", body(), Rules()).thinking == Thinking()
    assert judge("chat", body(), off).thinking.on is False
    asked = judge("completions", body(thinking_budget=5), off).thinking
    assert (asked.on, asked.cap, asked.asked) == (True, 5, True)
    refused = judge("chat", body(thinking_budget=-5), Rules())
    assert (refused.refusal.code, refused.refusal.param) == ("invalid_value", "thinking_budget")
    assert refused.request is None and refused.thinking == Thinking()


def test_choices():
    """F11: one unless more are asked for."""
    for n, count in ((None, 1), (1, 1), (16, 16)):
        request = decode("chat", body(n=n))
        assert choices(request) == count == judge("chat", body(n=n), Rules()).choices


STRUCTURED = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
    {"structured_outputs": {"json": {}}},
    {"structured_outputs": {"regex": "a"}},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": {}},
    {"guided_json": "{}"},
    {"guided_regex": ""},
    {"guided_choice": []},
]
FREE = [
    {},
    {"response_format": {}},
    {"response_format": {"type": "text"}},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False, "regex": None, "whitespace_pattern": "a"}},
]


def test_structured():
    """B8: every form of E1, on both routes, and what asks for none."""
    for route in ("chat", "completions"):
        for fields in STRUCTURED:
            assert structured(decode(route, body(**fields))), fields
        for fields in STRUCTURED:
            assert wish(decode(route, body(**fields))) is not None, fields
        for fields in FREE:
            assert not structured(decode(route, body(**fields))), fields


def placed(rules=Rules(), by_kind="", **fields):  # noqa: B008 - frozen
    return shape_of(decode("chat", body(**fields)), rules, by_kind)


def test_shape():
    """B10: each word, its alias, and ``auto`` as if nothing was said."""
    for word, expected in (
        ("tags", "tags"),
        ("none", "tags"),
        ("raw", "tags"),
        ("reasoning_content", "reasoning_content"),
        ("deepseek", "reasoning_content"),
        ("parsed", "reasoning_content"),
        ("both", "both"),
        ("deepseek-legacy", "both"),
        ("hidden", "hidden"),
    ):
        for rules in (Rules(), Rules(reasoning_format="both")):
            assert placed(rules, "reasoning_content", reasoning_format=word) == expected
            for form in STRUCTURED:
                assert placed(rules, reasoning_format=word, **form) == expected
    for server in ("tags", "reasoning_content", "both"):
        assert placed(Rules(reasoning_format=server), reasoning_format="auto") == server
        assert placed(Rules(reasoning_format=server)) == server


def test_hidden():
    """B10: the two switches hide the thinking whatever the format."""
    for fields in ({"reasoning": {"exclude": True}}, {"include_reasoning": False}, {"include_reasoning": "false"}):
        assert (
            placed(**fields)
            == placed(reasoning_format="tags", **fields)
            == placed(**fields, **STRUCTURED[0])
            == "hidden"
        )
    for fields in ({"reasoning": {"exclude": False}}, {"include_reasoning": True}, {"reasoning": {}}):
        assert placed(**fields) == "tags"


def test_structured_answers_have_no_tags():
    """B8: ``reasoning_content`` unless the request names a format, before the client's kind (Q2) and the server."""
    for form in STRUCTURED:
        for rules in (Rules(), Rules(plan=False), Rules(reasoning_format="both")):
            assert placed(rules, "tags", **form) == placed(rules, "tags", reasoning_format="auto", **form)
            assert placed(rules, "tags", **form) == "reasoning_content"
    assert placed(by_kind="reasoning_content") == "reasoning_content"
    assert placed(Rules(reasoning_format="both"), "tags") == "tags"


def bounds(rules=Rules(), state="open", **fields):  # noqa: B008 - frozen
    request = decode("chat", body(**fields))
    return budget(request, judge("chat", body(**fields), rules).thinking, rules, state)


def test_no_bounds():
    """C5: a request that says nothing is bounded by nothing; C8: but a stall."""
    for state in ("off", "may", "open"):
        assert bounds(state=state) == Bounds(state=state, stall=True)
        assert bounds(Rules(think_stall=False), state) == Bounds(state=state)
        assert bounds(state=state, enable_thinking=True) == Bounds(state=state, stall=True)


def test_cap():
    """C3: the cap of the first number or word, none at 0, at once where the shape's own server says so (C7)."""
    for fields, cap in (
        ({"thinking_budget": 50}, 50),
        ({"thinking_budget": 0}, -1),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "max"}, -1),
        ({"thinking_budget": 10**30}, LARGEST),
    ):
        assert bounds(**fields).cap == cap
    documented = Rules(thinking=Defaults(budget_zero="as-documented"))
    assert bounds(documented, thinking_token_budget=0).cap == 0
    assert bounds(Rules(thinking=Defaults(budget=9))).cap == 9


def test_reserve():
    """C4: kept where a budget was asked for, in whatever shape, or a form (B8); not for the server's own default."""
    for fields in (
        {"thinking_budget": 50},
        {"thinking_budget": 0},
        {"reasoning_effort": "max"},
        {"reasoning_effort": "auto"},
        *STRUCTURED,
    ):
        for reserve in (-1, 0, 300):
            assert bounds(Rules(answer_reserve=reserve), **fields).reserve == reserve
    for fields in [*FREE, {"enable_thinking": True}, {"think": True}]:
        assert bounds(Rules(answer_reserve=300), **fields).reserve == 0
    assert bounds(Rules(thinking=Defaults(budget=9))).reserve == 0


def test_ngram():
    """A4: in the thinking only, so it is one of its bounds."""
    assert [bounds(no_repeat_ngram_size=size).ngram for size in (None, 0, 3, 10**30)] == [0, 0, 3, LARGEST]
