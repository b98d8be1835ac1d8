"""Row F9: the same request, streamed and whole, gives the same message, calls, finish and usage.

Every kind of request is played once both ways on each engine: on the script, which writes calls and thinking exactly,
and on the embedded model behind a template that opens the block. Every answer and chunk is held against OpenAI's
schemas on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.openai_schemas import check
from tests.server import Server
from tests.sessions import CALL, FORMAT, GREETING, PERSON, TOOL

pytestmark = pytest.mark.e2e

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
THOUGHT = "Two <tool_call> 🙂.\n</think>\n\nFour, 你好."
"""The template opened the block."""
OTHER = CALL.replace("Paris", "Bern")
CHOSEN = {"type": "function", "function": {"name": "get_weather"}}
OFF = {"enable_thinking": False}
BRIEF = {"max_reasoning_tokens": 16, "max_tokens": 40}
"""More than the script thinks; the model, which knows no end of thinking, is stopped there."""


class Case(NamedTuple):
    """``fields`` of the request, and what the script writes: an answer for each prompt."""

    name: str
    fields: dict[str, Any]
    answers: tuple[str, ...]
    route: str = CHAT


CASES = (
    Case("plain", OFF, (GREETING,)),
    Case("default format", BRIEF, (THOUGHT,)),
    *(
        Case(word, {**BRIEF, "reasoning_format": word}, (THOUGHT,))
        for word in ("tags", "reasoning_content", "both", "hidden")
    ),
    Case("never closed", {"reasoning_format": "reasoning_content"}, ("Two and",)),
    Case("never closed in tags", {"reasoning_format": "tags"}, ("Two and",)),
    Case("no text", {"reasoning_format": "tags"}, ("",)),
    Case("opens it itself", {**BRIEF, "chat_template_kwargs": {"leave": True}}, ("\n <think>\n" + THOUGHT,)),
    Case("opens nothing", {**BRIEF, "chat_template_kwargs": {"leave": True}}, ("<thin <think>",)),
    Case("call", {**OFF, "tools": [TOOL]}, (f"Let me look.\n{CALL}",)),
    Case("two calls", {**OFF, "tools": [TOOL]}, (f"{CALL}\n{OTHER}",)),
    Case("one call of two", {**OFF, "tools": [TOOL], "parallel_tool_calls": False}, (f"{CALL}\n{OTHER}",)),
    Case("thinking, then a call", {**BRIEF, "tools": [TOOL], "max_tokens": 72}, (THOUGHT + CALL,)),
    Case("forced call", {**OFF, "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}, (CALL,)),
    Case("named call", {**BRIEF, "tools": [TOOL], "tool_choice": CHOSEN, "max_tokens": 96}, (CALL,)),
    Case("nobody offered it", OFF, (f"Let me look.\n{CALL}",)),
    Case("form", {**OFF, "response_format": FORMAT, "max_tokens": 48}, (PERSON,)),
    Case(
        "thinking, then a form", {**BRIEF, "response_format": FORMAT, "max_tokens": 64},
        (f"A\n</think>\n{PERSON}",),
    ),
    Case("stop found", {**OFF, "stop": ["e", "."]}, (GREETING,)),
    Case("length", {**OFF, "max_tokens": 5}, (GREETING,)),
    Case("length inside a character", {**OFF, "max_tokens": 11}, (GREETING,)),
    Case("logprobs", {**OFF, "logprobs": True, "top_logprobs": 2}, (GREETING,)),
    Case("logprobs of thinking", {**BRIEF, "logprobs": True}, (THOUGHT,)),
    Case("logprobs of a call", {**OFF, "tools": [TOOL], "logprobs": True}, (f"Let me look.\n{CALL}",)),
    Case("completion", {}, (GREETING,), TEXT),
    Case("completion that thinks", {}, (THOUGHT,), TEXT),
    Case("completion stopped", {"stop": " "}, (GREETING,), TEXT),
    Case("completion with logprobs", {"logprobs": 2}, (GREETING,), TEXT),
    Case("prompts", {"prompt": ["One, two,", "A, b,", "Once"]}, (GREETING, "c, d", "upon a time"), TEXT),
    Case("prompts with logprobs", {"prompt": ["One, two,", "A, b,"], "logprobs": 0}, (GREETING, "c, d"), TEXT),
    Case("completion of a form", {"guided_regex": "[a-f]{3}[0-9]{2}"}, ("abc12",), TEXT),
)  # fmt: skip

OPEN = Case("open", {**OFF, "tools": [TOOL], "max_tokens": 24}, (f"Let me look.\n{CALL}",))


class Said(NamedTuple):
    """A whole answer, the chunks of the same request streamed, and what each of them says."""

    answer: dict[str, Any]
    chunks: list[dict[str, Any]]
    whole: list[dict[str, Any]]
    streamed: list[dict[str, Any]]


def play(server: Server, case: Case) -> Said:
    """One request both ways."""
    start = {"messages": [{"role": "user", "content": "What is 2+2?"}]} if case.route == CHAT else {"prompt": "One,"}
    ask = {"model": "m", "temperature": 0, "max_tokens": 100 if case.answers[0] != GREETING else 20, **start}
    ask |= case.fields
    response = server.http.post(case.route, json=ask)
    assert response.status_code == 200, (case.name, response.text)
    answer = response.json()
    check(answer, "CreateChatCompletionResponse" if case.route == CHAT else "CreateCompletionResponse")
    chunks = streamed_chunks(server, case.route, ask)
    if case.route == CHAT:
        return Said(answer, chunks, [told(choice) for choice in answer["choices"]], [joined(chunks)])
    whole = [{name: choice[name] for name in ("text", "logprobs", "finish_reason")} for choice in answer["choices"]]
    return Said(answer, chunks, whole, [joined_text(chunks, index) for index in range(len(case.answers))])


def streamed_chunks(server: Server, route: str, ask: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", route, json={**ask, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks: list[dict[str, Any]] = [json.loads(line[6:]) for line in lines[:-1]]
    for chunk in chunks:
        if route == CHAT:
            check(chunk, "CreateChatCompletionStreamResponse")
        else:  # OpenAI's schema is that of the whole answer: there a finish is never null
            ended = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
            check({**chunk, "choices": ended}, "CreateCompletionResponse")
    return chunks


def told(choice: dict[str, Any]) -> dict[str, Any]:
    """What a whole chat choice says; ids but for the request's own part, and no text as null."""
    message = choice["message"]
    calls = [
        (call["id"][-6:], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return {
        "content": message["content"] or "", "reasoning": message.get("reasoning_content"), "calls": calls,
        "logprobs": (choice["logprobs"] or {}).get("content"), "finish": choice["finish_reason"],
    }  # fmt: skip


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the chunks of a chat say, joined as clients join them."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", [])):
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append([piece["id"][-6:], piece["function"]["name"], ""])
        calls[piece["index"]][2] += piece["function"]["arguments"]
    logprobs = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning": "".join(delta.get("reasoning_content") or "" for delta in deltas) or None,
        "calls": [tuple(call) for call in calls], "logprobs": logprobs or None, "finish": finish(choices),
    }  # fmt: skip


def joined_text(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """What the chunks say of one prompt's completion."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    logprobs = {name: [one for part in parts for one in part[name]] for name in parts[0]} if parts else None
    text = "".join(choice["text"] for choice in choices)
    return {"text": text, "logprobs": logprobs, "finish_reason": finish(choices)}


def finish(choices: list[dict[str, Any]]) -> str:
    """The one finish word, on the last chunk of its choice."""
    words: list[str | None] = [choice["finish_reason"] for choice in choices]
    assert words[-1] is not None and words[:-1] == [None] * (len(words) - 1)
    return words[-1]


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Usage but for what was cached."""
    details = usage.get("prompt_tokens_details") or {}
    return {**usage, "prompt_tokens_details": {**details, "cached_tokens": 0}}


@pytest.fixture(scope="module")
def by_script(tmp_path_factory: pytest.TempPathFactory, opening_template: Path) -> Iterator[dict[str, Said]]:
    """Every case played on the script."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    texts = [text for case in (*CASES, OPEN) for _way in ("whole", "streamed") for text in case.answers]
    script.write_text(json.dumps({"answers": [{"text": text, "round": 3} for text in texts]}))
    with Server("--script", str(script), "--chat-template", str(opening_template)) as server:
        server.ready()
        yield {case.name: play(server, case) for case in (*CASES, OPEN)}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_by_the_script(by_script: dict[str, Said], name: str) -> None:
    """F9: streamed and whole are the same, of what the script writes, token by token the same."""
    equal(by_script[name])


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name != "no text"])
def test_by_the_model(thinking: Server, name: str) -> None:
    """F9: the same of what the embedded model writes."""
    equal(play(thinking, next(case for case in CASES if case.name == name)))


def equal(said: Said) -> None:
    assert said.streamed == said.whole
    [usage] = [chunk["usage"] for chunk in said.chunks if chunk.get("usage")]
    assert counts(usage) == counts(said.answer["usage"])
    assert "usage" in said.chunks[-1]


def test_the_cases_are_what_they_are_called(by_script: dict[str, Said]) -> None:
    """F9: the comparison is of thinking, calls, forms and ends that were really there."""

    def only(name: str) -> dict[str, Any]:
        return by_script[name].whole[0]

    assert only("plain")["content"] == GREETING and only("plain")["finish"] == "stop"
    thought = only("reasoning_content")
    assert thought["content"] == "Four, 你好." and thought["reasoning"].strip() == "Two <tool_call> 🙂."
    assert only("tags") == {**thought, "content": f"<think>\n{THOUGHT}", "reasoning": None}
    assert only("both") == {**thought, "content": f"<think>\n{THOUGHT}"}
    assert only("opens it itself") == only("default format") == thought
    assert only("opens nothing")["content"] == "<thin <think>" and only("opens nothing")["reasoning"] is None
    assert only("hidden") == {**thought, "reasoning": None}
    assert only("never closed")["reasoning"] and only("never closed")["content"] == ""
    assert only("no text")["content"] == "<think>\n" and only("no text")["finish"] == "stop"
    calls = [len(only(name)["calls"]) for name in ("call", "two calls", "one call of two", "forced call")]
    assert calls == [1, 2, 1, 1]
    assert only("two calls")["finish"] == only("thinking, then a call")["finish"] == "tool_calls"
    assert only("nobody offered it")["finish"] == "stop" and not only("nobody offered it")["calls"]
    assert json.loads(only("form")["content"]) == json.loads(only("thinking, then a form")["content"])
    assert only("stop found")["content"] == "H" and only("length")["finish"] == "length"
    assert len(only("logprobs")["logprobs"]) == by_script["logprobs"].answer["usage"]["completion_tokens"]
    assert [choice["text"] for choice in by_script["prompts"].whole] == [GREETING, "c, d", "upon a time"]


def test_an_open_call_is_the_one_difference(by_script: dict[str, Said]) -> None:
    """F9, D10: a call the limit cuts is left out of a whole answer, while what a stream sent of it stays."""
    said = by_script[OPEN.name]
    [whole], [streamed] = said.whole, said.streamed
    assert whole["calls"] == [] and streamed["calls"] and whole["finish"] == "length"
    assert {**streamed, "calls": []} == whole
    assert counts(said.chunks[-1]["usage"]) == counts(said.answer["usage"])


def test_the_first_of_two_choices_is_the_one_streamed(thinking: Server) -> None:
    """F9, F11: `n` is for whole answers alone; its first choice is what the same request streams."""
    fields = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 1, "seed": 4, "max_tokens": 12}
    two = thinking.http.post(CHAT, json={**fields, **OFF, "n": 2}).json()
    check(two, "CreateChatCompletionResponse")
    chunks = streamed_chunks(thinking, CHAT, {**fields, **OFF})
    assert joined(chunks) == told(two["choices"][0])
    assert chunks[-1]["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]
    refused = thinking.http.post(CHAT, json={**fields, "n": 2, "stream": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_value")
