import json
import re

import pytest

from stages.compat import FIELDS, refused_field
from stages.refusal import Refusal
from stages.schema import ChatRequest, CompletionRequest, decode
from tests.captures import captured, needed

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "read"}}]
STRUCTS = {"chat": ChatRequest, "completions": CompletionRequest}


def verdict(route="chat", **fields):
    request = decode(route, json.dumps({"messages": HI, "prompt": "hi", **fields}).encode())
    assert not isinstance(request, Refusal), request
    refusal = refused_field(request)
    if refusal is None:
        return None
    assert refusal.code == "unsupported_parameter"
    return refusal


def properties(schemas, name):
    """The names of a schema's properties, through ``allOf``."""
    schema = schemas[name]
    found = set(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        ref = part.get("$ref", "").rsplit("/", 1)[-1]
        found |= properties(schemas, ref) if ref else set(part.get("properties", {}))
    return found


@pytest.mark.parametrize(
    ("route", "name"), [("chat", "CreateChatCompletionRequest"), ("completions", "CreateCompletionRequest")]
)
def test_every_openai_field_has_an_answer(route, name):
    """A1: every field of OpenAI's own schemas stands in the table (A2 and A3 too)."""
    schemas = json.loads(needed("openai/chat_completions_schemas.json").read_text())["$defs"]
    asked = properties(schemas, name)
    assert len(asked) > 15
    assert sorted(asked - set(FIELDS[route])) == []


def test_answers():
    """A1: four answers and no other, each with its row; only the last two have neutral values."""
    for fields in FIELDS.values():
        for answer in fields.values():
            assert answer.kind in ("honoured", "accepted", "refused", "later")
            assert re.fullmatch(r"[A-L]\d*", answer.row)
            assert not answer.neutral or answer.kind in ("refused", "later")


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_the_struct_has_what_the_table_reads(route):
    """A3: a field that is honoured, refused or to come is not dropped before the table sees it; an accepted one is."""
    declared = set(STRUCTS[route].__struct_fields__)
    named = {path.split(".")[0] for path, answer in FIELDS[route].items() if answer.kind != "accepted"}
    accepted = {path for path, answer in FIELDS[route].items() if answer.kind == "accepted"}
    assert declared == named
    assert not declared & accepted


@pytest.mark.parametrize(
    "name", [name for name, answer in FIELDS["chat"].items() if answer.kind == "accepted" and "." not in name]
)
def test_accepted(name):
    """A2: fields without effect by their own definition pass, whatever they hold."""
    assert verdict(**{name: "x"}) is None
    assert verdict(**{name: {"a": 1}}) is None


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        ("chat", "audio", {"voice": "alloy", "format": "wav"}),
        ("chat", "functions", [{"name": "f"}]),
        ("chat", "function_call", "auto"),
        ("chat", "web_search_options", {}),
        ("chat", "verbosity", "low"),
        ("chat", "moderation", {}),
        ("completions", "suffix", "end"),
        ("completions", "echo", True),
        ("completions", "best_of", 2),
    ],
)
def test_refused(route, name, value):
    """A3: a 400 that names the field; null counts as absent."""
    refusal = verdict(route, **{name: value})
    assert refusal.param == name and name in refusal.text and "yet" not in refusal.text
    assert verdict(route, **{name: None}) is None


def test_refused_says_use_tools():
    """A3: the old form is refused with the way out."""
    assert "use tools" in verdict(functions=[]).text
    assert "use tools" in verdict(function_call="none").text


def test_counts_as_absent():
    """A3: ``echo: false``, ``suffix: ""``, best_of 1 or equal to n."""
    assert verdict("completions", echo=False, suffix="", best_of=1) is None
    assert verdict("completions", best_of=2, n=2).param == "n"
    assert verdict("completions", best_of=True).param == "best_of"


LATER = [
    ("no_repeat_ngram_size", 3, [0]),
    ("n", 2, [1]),
    ("tools", TOOLS, [[]]),
    ("response_format", {"type": "json_object"}, [{"type": "text"}]),
    ("structured_outputs", {"regex": "a"}, [{}]),
    ("guided_json", {}, []),
    ("guided_regex", "a", []),
    ("guided_choice", ["a"], []),
    ("reasoning_format", "hidden", ["auto", "none"]),
    ("parallel_tool_calls", "no", [True, False]),
    ("tool_choice", "required", ["none", "auto"]),
]


@pytest.mark.parametrize(("name", "wish", "neutral"), LATER)
def test_not_built_yet(name, wish, neutral):
    """A1: until it is built a wish is refused and never dropped in silence; what asks for nothing passes (A10)."""
    refusal = verdict(**{name: wish})
    assert refusal.param == name and "is not supported yet" in refusal.text
    for value in [None, *neutral]:
        assert verdict(**{name: value}) is None


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_sampling_fields_are_served(route):
    """A4: what changes single logits, and what ends an answer, is no longer refused (A1 too)."""
    asked = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": 1}}
    assert verdict(route, **asked, ignore_eos=True, min_tokens=1, stop_token_ids=[1]) is None


def test_logprobs_are_served():
    """F7: both routes' own shapes of the wish (A1 too)."""
    assert verdict(logprobs=True, top_logprobs=20) is None
    assert verdict("completions", logprobs=5) is None


def test_false_is_not_zero():
    """A6: neutral means the same JSON value."""
    assert verdict(no_repeat_ngram_size=False).param == "no_repeat_ngram_size"
    assert verdict(parallel_tool_calls=0).param == "parallel_tool_calls"


def test_tools_with_choice_none():
    """D5: ``none`` renders no tools, so they are no wish."""
    assert verdict(tools=TOOLS, tool_choice="none", parallel_tool_calls=False) is None
    assert verdict(tools=TOOLS, tool_choice="auto").param == "tools"


def test_include_progress():
    """L8: progress chunks are not built yet; the other stream options pass (A10)."""
    assert verdict(stream_options={"include_progress": True}).param == "stream_options.include_progress"
    for options in (None, {}, {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": 5}):
        assert verdict(stream_options=options) is None


THINKING_OFF = [
    {"reasoning_effort": "none"},
    {"reasoning_effort": "off"},
    {"reasoning_effort": "auto"},
    {"reasoning_effort": "default"},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"enable": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"summary": "auto", "exclude": True}},
    {"enable_thinking": False},
    {"enable_thinking": "false"},
    {"think": False},
    {"thinking": {"type": "disabled"}},
    {"chat_template_kwargs": {}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False, "reasoning_effort": None}},
    {"chat_template_args": {"enable_thinking": False}},
    {"thinking_budget": 0},
    {"extra_body": {"google": {"thinking_config": {"thinking_budget": 0, "include_thoughts": True}}}},
    {"extra_body": {"mine": 1}},
    {"custom_params": {"mine": 1}},
    {"include_reasoning": False},
]


@pytest.mark.parametrize("fields", THINKING_OFF)
def test_thinking_off_passes(fields):
    """C2: a model that does not think can be told not to."""
    assert verdict(**fields) is None
    assert verdict("completions", **fields) is None


THINKING_ON = [
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"enabled": True}}, "reasoning.enabled"),
    ({"reasoning": {"max_tokens": 2000}}, "reasoning.max_tokens"),
    ({"enable_thinking": True}, "enable_thinking"),
    ({"think": True}, "think"),
    ({"think": "high"}, "think"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ({"thinking": {"budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"thinking_config": {"thinking_budget": 5}}, "thinking_config.thinking_budget"),
    ({"thinkingConfig": {"thinkingBudget": -1}}, "thinkingConfig.thinkingBudget"),
    (
        {"extra_body": {"google": {"thinking_config": {"thinking_level": "low"}}}},
        "extra_body.google.thinking_config.thinking_level",
    ),
    ({"nvext": {"max_thinking_tokens": 5}}, "nvext.max_thinking_tokens"),
    ({"custom_params": {"thinking_budget": 5}}, "custom_params.thinking_budget"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"mine": 1}}, "chat_template_kwargs.mine"),
    ({"max_reasoning_tokens": 5}, "max_reasoning_tokens"),
    ({"thinking_budget": 512}, "thinking_budget"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"thinking_budget_tokens": 5}, "thinking_budget_tokens"),
    ({"reasoning_budget": 5}, "reasoning_budget"),
    ({"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
    ({"max_thinking_tokens": 5}, "max_thinking_tokens"),
    ({"reasoning_tokens": 5}, "reasoning_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), THINKING_ON)
def test_thinking_on_is_refused(fields, param):
    """C0: what asks for thinking is refused by name while no model thinks."""
    refusal = verdict(**fields)
    assert refusal.param == param and "is not supported yet" in refusal.text
    assert verdict("completions", **fields).param == param


THINKING_MALFORMED = [
    ({"reasoning_effort": 5}, "invalid_type", "reasoning_effort"),
    ({"reasoning_effort": "hgih"}, "invalid_value", "reasoning_effort"),
    ({"reasoning": "high"}, "invalid_type", "reasoning"),
    ({"thinking": True}, "invalid_type", "thinking"),
    ({"thinking_budget": -1}, "invalid_value", "thinking_budget"),
    ({"thinkingConfig": 5}, "invalid_type", "thinkingConfig"),
    ({"chat_template_kwargs": [1]}, "invalid_type", "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "invalid_type", "chat_template_kwargs"),
    ({"enable_thinking": False, "think": 5, "audio": {}}, "invalid_type", "think"),
]


@pytest.mark.parametrize(("fields", "code", "param"), THINKING_MALFORMED)
def test_malformed_thinking(fields, code, param):
    """C: a malformed shape is no wish that is to come: it is told for what it is, before anything unsupported."""
    for route in STRUCTS:
        refusal = refused_field(decode(route, json.dumps({"messages": HI, "prompt": "hi", **fields}).encode()))
        assert (refusal.code, refusal.param) == (code, param)


def test_one_wish():
    """C: the shapes are judged together: an off form silences a word, a 0 hides no other wish."""
    assert verdict(enable_thinking=False, reasoning_effort="high", thinking_budget=5) is None
    assert verdict(thinking={"type": "disabled"}, reasoning={"enabled": True}) is None
    assert verdict(thinking_budget=0, reasoning_effort="high").param == "reasoning_effort"
    assert verdict(enable_thinking=True, reasoning_effort="none").param == "enable_thinking"


def test_captured():
    """A5: of the bodies of real clients only fields that are to come are refused, and plain chats are served."""
    served = 0
    for route, file, body in captured():
        refusal = verdict(route, **body)
        served += refusal is None
        assert refusal is None or "is not supported yet" in refusal.text, (file, refusal)
    assert served > 60
