"""stages/run.py: what a request asks of its run, put together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.protocol import Grammar
from stages.constraint import Constraint
from stages.judge import Rules, judge
from stages.message import assembled
from stages.refusal import Refusal
from stages.run import Caller, Run, constraint, reading, run, state_of
from stages.text import TextStage

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "listen"}}
FORM = {"response_format": {"type": "json_object"}}
NAMED = {"type": "function", "function": {"name": "look"}}


def asked(route: str = "chat", **fields: Any) -> Any:
    base = {"messages": [{"role": "user", "content": "Hi"}]} if route == "chat" else {"prompt": "Hi"}
    judged = judge(route, json.dumps({**base, **fields}).encode(), Rules())
    assert judged.refusal is None, judged.refusal
    return judged


def of(route: str = "chat", *, state: str = "may", rules: Rules | None = None, caller: Caller | None = None,
       **fields: Any) -> Run:  # fmt: skip
    judged = asked(route, **fields)
    rules, caller = rules or Rules(), caller or Caller()
    return run(judged.request, judged.thinking, state, None, rules, 7, caller)


def bound(**fields: Any) -> Constraint | Refusal | None:
    return constraint(asked(**fields).request)


@pytest.mark.parametrize(
    ("fields", "kind", "tools", "parallel"),
    [
        ({}, None, 0, False),
        ({"tools": [TOOL]}, None, 0, False),
        (FORM, "json", 0, False),
        ({**FORM, "tools": []}, "json", 0, False),
        ({**FORM, "tools": [TOOL], "tool_choice": "none"}, "json", 0, False),
        ({**FORM, "tools": [TOOL]}, "either", 1, True),
        ({**FORM, "tools": [TOOL], "parallel_tool_calls": False}, "either", 1, False),
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, "call", 2, False),
        ({"tools": [TOOL, OTHER], "tool_choice": "required", "parallel_tool_calls": True}, "call", 2, True),
        ({"tools": [TOOL, OTHER], "tool_choice": NAMED}, "call", 2, False),
        ({**FORM, "tools": [TOOL, OTHER], "tool_choice": NAMED}, "call", 2, False),
    ],
)
def test_what_binds_the_answer(fields: dict[str, Any], kind: str | None, tools: int, parallel: bool) -> None:
    """D5, D5b: a call that is asked for wins; tools to choose from beside a form give either; else the form alone."""
    found = bound(**fields)
    if kind is None:
        assert found is None
        return
    assert isinstance(found, Constraint)
    assert (found.kind, len(found.tools), found.parallel) == (kind, tools, parallel)
    assert found.only == ("look" if fields.get("tool_choice") == NAMED else None)


@pytest.mark.parametrize(
    ("fields", "plan", "tools"),
    [
        ({}, True, []),
        ({}, False, None),
        ({"tools": []}, True, []),
        ({"tools": []}, False, None),
        ({"tools": [TOOL]}, True, [TOOL]),
        ({"tools": [TOOL]}, False, [TOOL]),
        ({"tools": [TOOL], "tool_choice": "none"}, True, []),
        ({"tools": [TOOL], "tool_choice": "none"}, False, None),
        (FORM, True, None),
        ({**FORM, "tools": [TOOL]}, True, [TOOL]),
    ],
)
def test_which_calls_are_read(fields: dict[str, Any], plan: bool, tools: list[Any] | None) -> None:
    """D7: with no tools offered a call is cut under a plan and stays on the raw path; a document is never cut."""
    assert of(rules=Rules(plan=plan), **fields).reading.tools == tools


def test_a_document_that_looks_like_a_call() -> None:
    """D5b: tools beside a form: JSON outside of tags is the document, whatever it spells; in tags it is a call."""
    bare = '{"name": "look", "arguments": {}}'
    for fields, calls in ((FORM, 0), ({}, 1)):
        for text, found in ((bare, calls), (f"<tool_call>\n{bare}\n</tool_call>", 1)):
            stage = TextStage([bytes([byte]) for byte in range(256)], of(tools=[TOOL], state="off", **fields).reading)
            pieces = [stage.push(list(text.encode())), stage.finish()]
            assert pieces[-1].closed_calls == found


WRITTEN = "Hi.\n</think>\n<tool_call>\n<function=look>\n</function>\n</tool_call>\n\nBye."


@pytest.mark.parametrize(("plan", "text"), [(False, WRITTEN), (True, "Hi.\n\n\nBye.")])
def test_the_raw_path(plan: bool, text: str) -> None:
    """Q1: on the raw path the answer is what the model wrote; under a plan a lone tag and a call nobody offered go."""
    stage = TextStage([bytes([byte]) for byte in range(256)], of(rules=Rules(plan=plan), state="off").reading)
    pieces = [stage.push(list(WRITTEN.encode())), stage.finish()]
    content, thought, calls = assembled([delta for piece in pieces for part in piece.parts for delta in part])
    assert (content, thought, calls) == (text, "", [])


def test_the_text_of_a_completion() -> None:
    """B8: a completion's text is what the model wrote; of an answer of a form the thinking is left out."""
    plain = of("completions", state="open").reading
    assert (plain.shape, plain.state, plain.tools, plain.plan) == ("tags", "off", None, False)
    formed = of("completions", state="open", guided_choice=["a"]).reading
    assert (formed.shape, formed.state, formed.tools) == ("hidden", "open", None)
    named = of("completions", state="open", reasoning_format="deepseek").reading
    assert (named.shape, named.state) == ("hidden", "open")


def test_who_asks() -> None:
    """Q2, B9: the kind's format counts where nothing else names one; only a streamed open-webui gets its blank line."""
    webui = Caller("open-webui", "", "reasoning_content")
    assert of(caller=webui).reading.shape == "reasoning_content"
    assert of(caller=webui, reasoning_format="raw").reading.shape == "tags"
    assert not of(caller=webui).reading.blank_line
    assert of(caller=webui, stream=True).reading.blank_line
    assert not of(caller=Caller("cline"), stream=True).reading.blank_line
    assert not of(caller=webui, stream=True, rules=Rules(plan=False)).reading.blank_line


def test_a_checkpoint_without_tags() -> None:
    """E4: where a block may open, a form lets the tag in; not in front of a model that knows no tags."""
    assert state_of("may", True, False) == "off"
    assert [state_of(*case) for case in [("may", True, True), ("may", False, False)]] == ["may", "may"]
    assert state_of("open", True, False) == "open"


def test_the_rest_of_a_run() -> None:
    """A1: seed, stops, limits and log-probabilities reach the run; the prompt's state reaches engine and text alike."""
    judged = asked(stop="x", logprobs=True, top_logprobs=2, min_tokens=3, max_reasoning_tokens=5)
    made = run(judged.request, judged.thinking, "open", Grammar("g"), Rules(), 7, Caller())
    assert (made.sampling.seed, made.reading.stops, made.alternatives) == (7, ["x"], 2)
    assert (made.ending.min_tokens, made.thinking.cap, made.thinking.state) == (3, 5, "open")
    assert made.grammar == Grammar("g") and made.reading.state == "open"
    assert reading(judged.request, "off", Rules(), Caller()).state == "off"
