"""Tools and the choice among them: what is refused, and what is offered, chosen and allowed."""

import json

import pytest
from hypothesis import given

from stages.offer import chosen, malformed, offered, parallel
from stages.refusal import Refusal
from stages.schema import decode
from tests.test_refusal import error_bytes
from tests.test_schema import values

USER = {"role": "user", "content": "hi"}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}, "strict": True}}
WRITE = {"type": "function", "function": {"name": "write"}}


def named(name="read"):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def asked(**fields):
    request = decode("chat", json.dumps({"messages": [USER], **fields}).encode())
    assert not isinstance(request, Refusal), request
    return request


def fault(**fields):
    refusal = malformed(asked(**fields))
    return None if refusal is None else (refusal.code, refusal.param)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([], None),
        ([READ, WRITE], None),
        ([{"function": {"name": "f", "parameters": {"$schema": "x", "anyOf": []}, "description": None}}], None),
        ([{"type": "function"}], ("missing_required_parameter", "tools[0].function.name")),
        ([{"type": "function", "function": None}], ("missing_required_parameter", "tools[0].function.name")),
        ([{"type": "custom", "custom": {"name": "f"}}], ("missing_required_parameter", "tools[0].function.name")),
        ([READ, {"function": {"name": ""}}], ("invalid_value", "tools[1].function.name")),
    ],
)
def test_tools(tools, expected):
    """A6: malformed tools are refused by item, also beside ``tool_choice: none``; A10 lists shapes that pass."""
    assert fault(tools=tools) == expected
    assert fault(tools=tools, tool_choice="none") == expected


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("required", "tool_choice"),
        (named(), "tool_choice"),
        (allowed("required", named()), "tool_choice"),
        (allowed("required"), "tool_choice"),
    ],
)
def test_nothing_to_choose_from(choice, param):
    """D5: nothing can be required or named where nothing is offered; ``auto`` and ``none`` need no tools (A10)."""
    for tools in (None, []):
        assert fault(tool_choice=choice, tools=tools) == ("invalid_value", param)
        for word in (None, "auto", "none"):
            assert fault(tool_choice=word, tools=tools) is None


@pytest.mark.parametrize(
    "choice", [None, "none", "auto", "required", named(), named("write"), allowed("auto", named())]
)
def test_good_choices(choice):
    """D5: every form that OpenAI's schema has for functions."""
    assert fault(tool_choice=choice, tools=[READ, WRITE]) is None


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        ("often", "invalid_value", "tool_choice"),
        ("", "invalid_value", "tool_choice"),
        ({}, "missing_required_parameter", "tool_choice.type"),
        ({"type": 5}, "invalid_type", "tool_choice.type"),
        ({"type": "custom", "custom": {"name": "read"}}, "invalid_value", "tool_choice.type"),
        ({"type": "function"}, "missing_required_parameter", "tool_choice.function.name"),
        ({"type": "function", "name": "read"}, "missing_required_parameter", "tool_choice.function.name"),
        ({"type": "function", "function": {"name": 5}}, "invalid_type", "tool_choice.function.name"),
        (named("reed"), "invalid_value", "tool_choice.function.name"),
        (named(""), "invalid_value", "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "invalid_type", "tool_choice.allowed_tools"),
        (allowed("none", named()), "invalid_value", "tool_choice.allowed_tools.mode"),
        (allowed([], named()), "invalid_value", "tool_choice.allowed_tools.mode"),
        (allowed("auto") | {"allowed_tools": {"mode": "auto"}}, "invalid_type", "tool_choice.allowed_tools.tools"),
        (allowed("auto", "read"), "missing_required_parameter", "tool_choice.allowed_tools.tools[0].function.name"),
        (
            allowed("auto", named(), named("reed")),
            "invalid_value",
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
    ],
)
def test_bad_choices(choice, code, param):
    """D5: a malformed choice, and one of a tool that nobody offered, is a 400 that names the place."""
    assert fault(tool_choice=choice, tools=[READ, WRITE]) == (code, param)


@pytest.mark.parametrize("choice", [5, True, ["auto"]])
def test_a_choice_of_a_wrong_type(choice):
    """A6: with or without tools."""
    refusal = decode("chat", json.dumps({"messages": [USER], "tool_choice": choice}).encode())
    assert (refusal.code, refusal.param) == ("invalid_type", "tool_choice")


@given(values, values)
def test_any_json(tools, choice):
    """A6: whatever stands there, there is one answer, and what passes can be read."""
    request = decode("chat", json.dumps({"messages": [USER], "tools": tools, "tool_choice": choice}).encode())
    refusal = request if isinstance(request, Refusal) else malformed(request)
    if refusal is None:
        assert isinstance(offered(request), list | None) and isinstance(parallel(request), bool)
        assert isinstance(chosen(request), str | dict)
    else:
        assert refusal.param and error_bytes(refusal) < 2048


def test_offered():
    """D7: what was offered, as it was sent; nothing said, nothing offered and ``none`` are told apart."""
    assert offered(asked()) is None and offered(asked(tools=None)) is None
    assert offered(asked(tools=[])) == offered(asked(tools=[READ], tool_choice="none")) == []
    assert offered(asked(tools=[READ, WRITE])) == [READ, WRITE]
    assert offered(asked(tools=[READ, WRITE], tool_choice=named())) == [READ, WRITE]
    assert offered(asked(tools=[READ, WRITE], tool_choice=allowed("auto", named("write")))) == [WRITE]
    assert offered(asked(tools=[READ], tool_choice=allowed("auto"))) == []
    assert offered(decode("completions", b'{"prompt": "hi"}')) is None


def test_chosen():
    """D5: the choice in one of four forms."""
    assert chosen(asked()) == chosen(decode("completions", b'{"prompt": "hi"}')) == "auto"
    for choice in ("none", "auto", "required", named()):
        assert chosen(asked(tools=[READ], tool_choice=choice)) == choice
    assert chosen(asked(tools=[READ], tool_choice=allowed("required", named()))) == "required"


def test_parallel():
    """D6: many calls unless told otherwise; D5: one where one is asked for, unless more are."""
    for choice, default in ((None, True), ("auto", True), ("none", True), ("required", False), (named(), False)):
        assert parallel(asked(tools=[READ], tool_choice=choice)) is default
        for said in (True, False):
            assert parallel(asked(tools=[READ], tool_choice=choice, parallel_tool_calls=said)) is said
