"""The real server, engine process and embedded model, through the openai package: what a user gets."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.server import ROOT, Server

pytestmark = pytest.mark.e2e
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def ask(client: OpenAI, **fields: object):  # type: ignore[no-untyped-def]
    return client.chat.completions.create(**{"model": "m", "messages": QUESTION, "max_tokens": 24, **fields})  # type: ignore[call-overload]


def test_a_whole_chat(client: OpenAI) -> None:
    """F1, A9: a real answer of a real model, with its usage."""
    answer = ask(client, temperature=0)
    choice = answer.choices[0]
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")


def test_streamed_equals_whole(client: OpenAI) -> None:
    """F1, F9: the pieces joined are the whole text; the role comes first, usage on the finish chunk, once."""
    whole = ask(client, temperature=0)
    chunks = list(ask(client, temperature=0, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(getattr(chunks[-1].usage, kind) == getattr(whole.usage, kind) for kind in COUNTS)
    assert len(chunks) >= whole.usage.completion_tokens * 0.8


def test_usage_in_its_own_chunk(client: OpenAI) -> None:
    """F1: with include_usage usage comes in a last chunk without choices, nowhere else."""
    chunks = list(ask(client, stream=True, max_tokens=4, stream_options={"include_usage": True}))
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    none = list(ask(client, stream=True, max_tokens=4, stream_options={"include_usage": False}))
    assert all(c.usage is None for c in none)


def test_a_completion(client: OpenAI) -> None:
    """A1: /v1/completions with a text, and with token ids."""
    answer = client.completions.create(model="m", prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.id.startswith("cmpl-")
    by_ids = client.completions.create(model="m", prompt=[504, 3575, 282], max_tokens=4, temperature=0)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3
    stream = client.completions.create(model="m", prompt="Once upon", max_tokens=4, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in stream if c.choices)


def test_a_seeded_sample_twice(client: OpenAI) -> None:
    """F8: same seed, same request, same text; another seed gives another."""
    first, second = (ask(client, seed=7, temperature=1.2, max_tokens=16).choices[0].message.content for _ in "ab")
    assert first == second
    others = [ask(client, seed=s, temperature=1.2, max_tokens=16).choices[0].message.content for s in (8, 9)]
    assert any(other != first for other in others)


def test_a_stop_string(client: OpenAI) -> None:
    """F5: the text ends before the stop, finish stop, streamed and whole alike."""
    full = ask(client, temperature=0, max_tokens=30).choices[0].message.content
    word = full.split()[2]
    cut = ask(client, temperature=0, max_tokens=30, stop=[word])
    assert cut.choices[0].message.content == full[: full.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    stream = ask(client, temperature=0, max_tokens=30, stop=word, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == full[: full.index(word)]


def test_max_tokens(client: OpenAI) -> None:
    """A8, F5: length at the limit; max_completion_tokens wins; a prompt over the window is refused with both counts."""
    answer = ask(client, max_tokens=5, temperature=0)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)
    assert ask(client, max_tokens=50, max_completion_tokens=3, temperature=0).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * 9_000}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert "8192" in caught.value.message
    assert re.search(r"\b9\d{3}\b", caught.value.message)


def test_what_changes_logits_and_ends_answers(client: OpenAI) -> None:
    """A4: logit_bias forces a token; ignore_eos writes to the limit; stop_token_ids ends (A1 too)."""
    forced = ask(client, temperature=0, max_tokens=3, logit_bias={"504": 100})  # "The": in front of every other token
    assert forced.choices[0].message.content == "TheTheThe"
    free = ask(client, temperature=0, max_tokens=3, logit_bias={"504": 100}, frequency_penalty=2, presence_penalty=2)
    assert free.choices[0].message.content == "TheTheThe"  # the bias is larger than both together
    on = ask(client, temperature=0, max_tokens=60, extra_body={"ignore_eos": True})
    assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", 60)
    stopped = ask(client, temperature=0, logit_bias={"504": 100}, extra_body={"stop_token_ids": [504]})
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 0)
    least = {"stop_token_ids": [504], "min_tokens": 4}
    late = ask(client, temperature=0, logit_bias={"504": 100}, extra_body=least)
    assert (late.choices[0].finish_reason, late.usage.completion_tokens) == ("stop", 4)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, logit_bias={"49152": 1})
    assert (caught.value.code, caught.value.param) == ("invalid_value", "logit_bias.49152")


def test_logprobs(client: OpenAI) -> None:
    """F7: greedy, each chosen token is the likeliest; streamed and whole, chat and completion, tell the same."""
    wish = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    [choice] = ask(client, **wish).choices
    told = choice.logprobs.content
    assert "".join(one.token for one in told) == choice.message.content
    for one in told:
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
        assert bytes(one.bytes).decode() == one.token and len(one.top_logprobs) == 3
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1 + 1e-5
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **wish)]
    assert [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content] == told
    assert all(chunk.delta.content == "".join(o.token for o in chunk.logprobs.content) for chunk in chunks[:-1])
    plain = client.completions.create(model="m", prompt="Once upon a", max_tokens=6, temperature=0, logprobs=2)
    values, text = plain.choices[0].logprobs, plain.choices[0].text
    assert values is not None and values.tokens and values.text_offset and values.top_logprobs
    assert "".join(values.tokens) == text
    ends = [*values.text_offset[1:], len(text)]
    assert [text[a:b] for a, b in zip(values.text_offset, ends, strict=True)] == values.tokens
    assert all(
        max(top, key=top.__getitem__) == token for top, token in zip(values.top_logprobs, values.tokens, strict=True)
    )


def test_eight_clients_at_once(client: OpenAI) -> None:
    """I7, R1: eight at once are all answered, each with what it gets alone."""
    texts = [f"Name the number {n} in words." for n in range(8)]

    def one(text: str) -> str:
        answer = ask(client, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=12)
        return str(answer.choices[0].message.content)

    alone = [one(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, texts)) == alone


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ],
)
def test_a_bad_request_names_its_field(client: OpenAI, fields: dict[str, object], code: str, param: str) -> None:
    """A9: OpenAI's error object with the field in `param` and a word in `code`."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert (caught.value.code, caught.value.param, caught.value.type) == (code, param, "invalid_request_error")


def test_the_body_must_be_json(served: Server) -> None:
    """A9: a fault of the whole body has no param."""
    response = served.http.post("/v1/chat/completions", content=b"{nope")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert response.json()["error"]["param"] is None


def test_the_models_list(client: OpenAI, served: Server) -> None:
    """A11: the models list, by id, and what agents read to decide when to compact."""
    [model] = client.models.list().data
    assert model.id == "SmolLM2-135M-Instruct.Q4_1"
    assert model.model_dump()["context_length"] == model.model_dump()["max_model_len"] == 8192
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert served.http.get("/api/tags").status_code == 404
    assert served.http.head("/v1/models").status_code == 200


def test_health_and_the_weights(served: Server) -> None:
    """N2, I6: health names the model, load time and self-check; weights in memory are at most 1.15 x the file."""
    health = served.health()
    engine = health["engine"]
    assert health["status"] == "ok"
    assert engine["selfcheck_ms"] > 0
    assert engine["file_bytes"] * 0.9 < engine["weights_bytes"] <= engine["file_bytes"] * 1.15
    assert engine["kv_bytes"] > 0


def test_the_readme_python_and_curl(served: Server) -> None:
    """R1: the README's own lines work as they stand, on this server's port."""
    readme = (ROOT / "README.md").read_text().replace(":8000/", f":{served.port}/")
    [python] = re.findall(r"```python\n(.*?)```", readme, re.S)
    run = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, check=False, cwd=Path.home())
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    [shell] = [block for block in re.findall(r"```sh\n(.*?)```", readme, re.S) if "curl" in block]
    answer = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert '"content":' in answer.stdout


def test_no_text_in_the_log(served: Server, client: OpenAI) -> None:
    """P1: one line a request, and no text of a prompt or an answer in it."""
    answer = ask(client, messages=[{"role": "user", "content": "Say xylophone backwards please"}], temperature=0)
    served.idle()
    lines = [line for line in served.log if answer.id.removeprefix("chatcmpl-") in line]
    assert len(lines) == 1
    assert re.search(r"\[req\] \w+ chat json prompt=\d+ completion=\d+ finish=\w+ ms=\d+ tok/s=[\d.]+", lines[0])
    assert not [line for line in served.log if "xylophone" in line or "Paris" in line]
