import json
import re

import pytest

from stages.compat import FIELDS, RESERVED, refused_field
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


NESTED = {"stream_options": "ChatCompletionStreamOptions"}
"""Objects whose fields have answers of their own; those inside messages, tools and formats are their stage's."""


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_every_nested_field_has_an_answer(route):
    """A1: so does every field of an object that is answered field by field."""
    schemas = json.loads(needed("openai/chat_completions_schemas.json").read_text())["$defs"]
    for field, name in NESTED.items():
        options = schemas[name]["anyOf"][0]["properties"]
        assert len(options) > 1
        assert sorted(f"{field}.{option}" for option in options if f"{field}.{option}" not in FIELDS[route]) == []


def test_one_answer_each():
    """A1: no field has two answers: a dotted one is never refused inside an object that is, nor served there."""
    for fields in FIELDS.values():
        for path in fields:
            outer = path.rpartition(".")[0]
            assert not outer or outer not in fields or fields[outer].kind == "honoured"


def test_answers():
    """A1: four answers and no other, each with its row; only the last two have neutral values."""
    for fields in FIELDS.values():
        for answer in fields.values():
            assert answer.kind in ("honoured", "accepted", "refused")
            assert re.fullmatch(r"[A-L]\d*", answer.row)
            assert not answer.neutral or answer.kind == "refused"


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
    assert verdict("completions", best_of=2, n=2) is None and verdict("completions", best_of=1, n=2) is None
    assert verdict("completions", best_of=2, n=3).param == verdict("completions", best_of=3, n=2).param == "best_of"


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
    assert verdict("completions", echo=0).param == "echo"
    assert verdict("completions", best_of=True).param == "best_of"


def test_include_progress():
    """L8: progress chunks are served. The other options pass (A10)."""
    assert verdict(stream_options={"include_progress": True}) is None
    assert verdict(stream_options={"include_progress": False}) is None
    for options in (None, {}, {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": 5}):
        assert verdict(stream_options=options) is None


SERVED = [
    {"n": 16},
    {"no_repeat_ngram_size": 3},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"guided_json": {}},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
    {"reasoning_format": "hidden"},
    {"include_reasoning": False},
    {"reasoning": {"exclude": True, "effort": "low"}},
    {"reasoning_effort": "high"},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking_budget": 512},
    {"chat_template_kwargs": {"enable_thinking": True, "mine": [1]}},
    {"chat_template_args": {"enable_thinking": False}},
    {"extra_body": {"google": {"thinking_config": {"thinking_budget": 0, "include_thoughts": True}}, "mine": 1}},
]


@pytest.mark.parametrize("fields", SERVED)
def test_served(fields):
    """A4: what was built is no longer refused, on either route."""
    assert verdict(**fields) is None
    assert verdict("completions", **fields) is None


def test_tools_are_served():
    """A1: tools and everything about them."""
    for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "read"}}):
        assert verdict(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False) is None


def test_the_servers_own_variables():
    """A4: a client's variables reach the template, but none that would write the prompt in the server's place."""
    assert {"messages", "tools", "add_generation_prompt", "documents"} <= RESERVED
    for name in sorted(RESERVED):
        refusal = verdict(chat_template_kwargs={name: 1})
        assert refusal.param == f"chat_template_kwargs.{name}" and refusal.param in refusal.text
        assert verdict(chat_template_kwargs={name: None}) is None


def test_captured():
    """A5: every body of a real client is served."""
    for route, file, body in captured():
        assert verdict(route, **body) is None, file
