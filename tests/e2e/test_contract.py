"""The request contract end to end: several choices, lists of prompts, calls and forms, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.openai_schemas import check
from tests.server import Server

pytestmark = pytest.mark.e2e

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "How is the weather in Bern?"}]}


def post(server: Server, route: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    response = server.http.post(route, json=fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    check(answer, "CreateChatCompletionResponse" if "chat" in route else "CreateCompletionResponse")
    return answer


def chunks(server: Server, route: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", route, json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        found = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    for chunk in found if "chat" in route else []:
        check(chunk, "CreateChatCompletionStreamResponse")
    return found


# -- choices and lists of prompts ------------------------------------------------------------------------------------


def test_choices_do_not_depend_on_their_number(served: Server) -> None:
    """F11: choice i is the same whatever n is; usage sums, the prompt is counted once; each has its own finish."""
    fields = {**ASK, "temperature": 1, "seed": 5, "max_tokens": 12}
    three = post(served, **fields, n=3)
    two = post(served, **fields, n=2)
    one = post(served, **fields)
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert len(set(texts)) > 1
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert texts[:2] == [choice["message"]["content"] for choice in two["choices"]]
    assert texts[0] == one["choices"][0]["message"]["content"]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] <= 36
    assert {choice["finish_reason"] for choice in three["choices"]} <= {"length", "stop"}


def test_a_stop_ends_one_choice_alone(served: Server) -> None:
    """F11: stops act on each choice; the next one starts from the prompt again."""
    plain = post(served, "/v1/completions", prompt="1, 2, 3, 4,", temperature=0, max_tokens=16)
    stop = plain["choices"][0]["text"][2:5]
    answer = post(served, "/v1/completions", prompt="1, 2, 3, 4,", temperature=0, max_tokens=16, n=3, stop=stop)
    assert [choice["text"] for choice in answer["choices"]] == [plain["choices"][0]["text"].split(stop)[0]] * 3
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts(served: Server, stream: bool) -> None:
    """A13: every prompt is answered as alone, in the prompts' order; each is a request of its own in the journal."""
    prompts: list[Any] = ["1, 2, 3,", [504, 29, 216, 34], "The sky is"]
    fields = {"temperature": 0, "max_tokens": 6}
    if not all(isinstance(prompt, str) for prompt in prompts):
        prompts = [prompt for prompt in prompts if isinstance(prompt, str)] + ["Water is"]
    alone = [post(served, "/v1/completions", prompt=prompt, **fields) for prompt in prompts]
    before = served.state()["counts"]["served"]
    texts = [""] * len(prompts)
    if stream:
        told = chunks(served, "/v1/completions", prompt=prompts, **fields)
        for chunk in told:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        usage = next(chunk["usage"] for chunk in told if chunk.get("usage"))
    else:
        answer = post(served, "/v1/completions", prompt=prompts, n=1, **fields)
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
    assert texts == [one["choices"][0]["text"] for one in alone]
    assert usage["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert served.state()["counts"]["served"] == before + len(prompts)


def test_too_many_prompts(served: Server) -> None:
    """A13: more than 16 prompts are a 400; a fault in one of them refuses all and names it."""
    many = served.http.post("/v1/completions", json={"prompt": ["a"] * 17})
    assert many.status_code == 400 and many.json()["error"]["param"] == "prompt"
    wrong = served.http.post("/v1/completions", json={"prompt": ["a", ""]})
    assert wrong.status_code == 400 and "prompt" in wrong.json()["error"]["param"]


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps({"answers": [{"text": f"Let me look.\n{CALL}", "round": 3}]}))
    with Server("--script", str(script)) as server:
        yield server.ready()


def test_a_call_streamed_and_whole(caller: Server) -> None:
    """D2, D3, F9: the same call, ids apart; finish tool_calls; the pieces joined are the arguments."""
    whole = post(caller, **ASK, tools=[WEATHER])
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern", "days": 3}
    assert choice["message"]["content"] == "Let me look.\n"
    told = chunks(caller, **ASK, tools=[WEATHER])
    deltas = [c["delta"] for chunk in told for c in chunk["choices"]]
    pieces = [entry["function"]["arguments"] for delta in deltas for entry in delta.get("tool_calls", [])]
    assert "".join(pieces) == call["function"]["arguments"]
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert told[-1]["choices"][0]["finish_reason"] == "tool_calls"
    rows = [row for _time, row in caller.state()["recent"][0]["history"]]
    assert "call_opened" in rows and "call_closed" in rows and rows[-1] == "called"


def test_no_tools_offered(caller: Server) -> None:
    """D7: without tools, with an empty list or with none chosen: never tool_calls, the call is cut from the answer."""
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = post(caller, **ASK, **fields)["choices"][0]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert choice["message"]["content"].strip() == "Let me look."


def test_a_call_cut_by_the_limit(caller: Server) -> None:
    """D10: an open call at the limit is `length`; the whole answer leaves it out."""
    choice = post(caller, **ASK, tools=[WEATHER], max_tokens=24)["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


def test_forced_calls(served: Server) -> None:
    """D5: required and named write one call whose arguments satisfy the schema, in front of a model that chats."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked = (("required", "Hello, how are you?"), (named, "Write me a poem and call nothing!"))
    for choice, text in asked:
        fields = {"messages": [{"role": "user", "content": text}], "tools": [WEATHER], "max_tokens": 96}
        answer = post(served, **fields, tool_choice=choice, seed=1)["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        [call] = answer["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])  # type: ignore[arg-type]
        assert answer["message"]["content"] is None


def test_choices_that_nobody_offered(served: Server) -> None:
    """D5: an unoffered tool, or `required` without tools, is a 400 that names the field."""
    for fields in (
        {"tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ):
        response = served.http.post("/v1/chat/completions", json={**ASK, **fields})
        assert response.status_code == 400 and response.json()["error"]["param"].startswith("tool_choice")
        assert response.json()["error"]["code"] == "invalid_value"


# -- forms -------------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_every_form_on_both_routes(served: Server, route: str, form: dict[str, Any]) -> None:
    """E1: each spelling binds the answer, on both routes."""
    prompt = ASK if "chat" in route else {"prompt": "A person as JSON:"}
    fields = {**prompt, **form, "max_tokens": 64, "seed": 3}
    choice = post(served, route, **fields)["choices"][0]
    text = choice["message"]["content"] if "chat" in route else choice["text"]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert choice["finish_reason"] == "stop"


def test_other_forms(served: Server) -> None:
    """E1: a choice, a pattern and any JSON object."""
    choice = post(served, **ASK, structured_outputs={"choice": ["red", "green"]}, max_tokens=8)
    assert choice["choices"][0]["message"]["content"] in ("red", "green")
    pattern = post(served, **ASK, guided_regex="[0-9]{3}-[a-f]{2}", max_tokens=16)
    text = pattern["choices"][0]["message"]["content"]
    assert len(text) == 6 and text[3] == "-" and text[:3].isdigit()
    anything = post(served, **ASK, response_format={"type": "json_object"}, max_tokens=48, temperature=0)
    if anything["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(anything["choices"][0]["message"]["content"]), dict)
    assert anything["choices"][0]["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "unheardOf": 1, "contentEncoding": 7}}}, ""),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ],
)
def test_schemas_that_are_not_served(served: Server, schema: dict[str, Any], word: str) -> None:
    """E5: an unsupported schema is a 400 naming the keyword and its path, and the server lives on."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    response = served.http.post("/v1/chat/completions", json={**ASK, "response_format": form, "max_tokens": 8})
    if word:
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "unsupported_schema" and word in error["message"]
        assert error["param"].startswith("response_format") and len(response.content) < 2_048
    assert served.http.get("/health").status_code == 200


def test_two_constraints(served: Server) -> None:
    """D5b: two constraints of one kind are a 400."""
    both = {**FORMS[0], **FORMS[1]}
    response = served.http.post("/v1/chat/completions", json={**ASK, **both})
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_value"


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    """D1: --chat-template takes the place of the checkpoint's; a missing file is a sentence."""
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with Server("--chat-template", str(template)) as server:
        server.ready()
        own = post(server, messages=[{"role": "user", "content": "1, 2, 3,"}], max_tokens=4, temperature=0)
        raw = post(server, "/v1/completions", prompt="1, 2, 3,", max_tokens=4, temperature=0)
        assert own["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]
    with pytest.raises(RuntimeError, match="no such file"):
        Server("--chat-template", str(tmp_path / "none.jinja"))
