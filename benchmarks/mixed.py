"""Twenty requests that together ask for everything a run can be asked for, and their way to the engine.

Sampling, penalties, ends, log-probabilities, forms of an answer, calls, bounds of the thinking, several choices; each
is a body, as a client sends it, and goes through the server's own stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from engine import protocol as wire
from engine.grammar import compile_grammar
from stages.constraint import Constraint, judged
from stages.judge import Rules, choices, judge, max_tokens
from stages.prompt import Prompt, Renderer
from stages.run import Caller, constraint, run, state_of

RULES = Rules()


def _string(least: int, most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": least, "maxLength": most}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


PLACE = _object(
    name=_string(5, 30),
    kind={"enum": ["harbour", "village", "city", "island"]},
    founded={"type": "integer", "minimum": 100, "maximum": 2000},
    coast={"type": "boolean"},
    about=_string(100, 140),
    sights={"type": "array", "items": _string(20, 40), "minItems": 4, "maxItems": 5},
)
VERDICT = _object(verdict=_string(30, 60), sure={"enum": ["yes", "no", "rather"]})
TOOL = {
    "type": "function",
    "function": {
        "name": "write_note",
        "description": "Keeps a note for later.",
        "parameters": _object(title=_string(10, 40), tags={"type": "array", "items": _string(3, 12), "minItems": 3,
                              "maxItems": 5}, body=_string(200, 280)),
    },
}  # fmt: skip
LONG = (
    "The ferry leaves the old harbour at seven in the morning, crosses the bay in a little under two hours, waits for "
    "the train from the north, takes its passengers on board, and is back before noon, unless the wind blows from the "
    "west; then it stays where it is, and those who came to the pier for nothing drink their coffee in the small white "
    "house behind the lighthouse, until the captain has changed his "
)
CHOICES = [LONG + "mind once more.", LONG + "coat and sails after all.", "There is no ferry on " + LONG]
LA = "<think>\nLet me sing it: la la la la la la la la la"
REASON = "Question: Is 91 a prime number, and how would you find out by hand?\nAnswer: <think>\nWell,"


def _ask(text: str, tokens: int = 116, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **fields}


def _begun(text: str, begin: str, tokens: int = 116, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A chat whose answer is begun."""
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": begin}]
    return "chat", {"messages": messages, "max_tokens": tokens, **fields}


def _raw(prompt: str, tokens: int = 116, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"prompt": prompt, "max_tokens": tokens, **fields}


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": _ask("Explain how bread is baked, step by step.", temperature=0),
    "sampled 0.7": _ask("Tell me a story about a lighthouse.", temperature=0.7, seed=11),
    "sampled 1.0": _ask("Write about a market in the morning.", seed=12, ignore_eos=True),
    "top_p, raw": _raw("The history of the lighthouse begins", temperature=1, top_p=0.8, seed=13, ignore_eos=True),
    "top_k": _ask("What grows in a kitchen garden in May?", temperature=1, top_k=20, seed=14, ignore_eos=True),
    "min_p": _ask("Describe a long journey by train.", temperature=0.9, min_p=0.05, seed=15, ignore_eos=True),
    "presence, frequency": _ask(
        "List things that are blue.", temperature=0.7, seed=16, presence_penalty=0.6, frequency_penalty=0.8,
        ignore_eos=True,
    ),
    "repetition": _ask("Count sheep for me.", temperature=0, repetition_penalty=1.3, ignore_eos=True),
    "logit_bias": _ask(
        "Describe a forest.", temperature=0.7, seed=17, logit_bias={"28": -100, "260": 4, "282": 2}, ignore_eos=True
    ),
    "min_tokens": _ask("Answer with the word yes.", temperature=0, min_tokens=100),
    "stop ids": _ask("Tell me about the moon.", 140, temperature=0.7, seed=18, stop_token_ids=[30], min_tokens=90),
    "logprobs": _ask(
        "Why is the sky blue?", temperature=1, seed=19, logprobs=True, top_logprobs=5, ignore_eos=True
    ),
    "json schema": _ask(
        "Describe a place by the sea, as JSON.", 320, temperature=0.7, seed=20, logprobs=True, top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}},
    ),
    "regex": _ask(
        "Write a row of short words.", 260, seed=21,
        structured_outputs={"regex": r"[A-Z][a-z]{1,9}( [a-z]{2,9}){60,70}\. [0-9]{4}-[0-9]{2}"},
    ),
    "choice": _ask(
        "When does the ferry leave?", 300, temperature=0, guided_choice=CHOICES, logprobs=True, top_logprobs=1
    ),
    "tool required": _ask(
        "Keep a note about my garden.", 260, temperature=0.7, seed=23, tools=[TOOL], tool_choice="required"
    ),
    "thinking cap, raw": _raw(
        REASON, temperature=0.7, seed=24, thinking_budget=45, reasoning_format="reasoning_content", logprobs=2,
        ignore_eos=True,
    ),
    "reserve, schema": _begun(
        "Is a whale a fish? Answer as JSON.", "<think>\nLet me see.", 220, temperature=0.7, seed=25,
        reasoning_effort="high", no_repeat_ngram_size=4,
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}},
    ),
    "stall": _begun("Sing.", LA, temperature=0, ignore_eos=True),
    "two choices": _ask("Invent a name and a story for a cat.", temperature=1, seed=26, n=2, ignore_eos=True),
}  # fmt: skip
"""By name: the route and the body. Ids of the embedded model: 28 a comma, 30 a full stop, 260 " the", 282 " of"."""


class Asked(NamedTuple):
    """A request as the engine is given it: a ``Start`` for each of its choices, one after the other in one slot."""

    name: str
    starts: list[wire.Start]


def asked(name: str, index: int, described: wire.Described, renderer: Renderer) -> Asked:
    """The way of a request through the stages, as ``pipeline`` goes it. SystemExit where one refuses it."""
    route, body = ASKED[name]
    verdict = judge(route, msgspec.json.encode(body), RULES)
    request = verdict.request
    if request is None:
        raise SystemExit(f"{name}: {verdict.refusal}")
    prompt = renderer.prompt(request, 0.0, verdict.thinking)
    wanted = constraint(request)
    text = judged(wanted, compile_grammar) if isinstance(wanted, Constraint) else wanted
    if not isinstance(prompt, Prompt) or not (text is None or isinstance(text, str)):
        raise SystemExit(f"{name}: {prompt if text is None else text}")
    grammar = None if text is None else wire.Grammar(text)
    state = state_of(prompt.state, grammar is not None, renderer.thinks)
    made = run(request, verdict.thinking, state, grammar, RULES, 0, Caller())
    count = choices(request)
    return Asked(
        name,
        [
            wire.Start(
                1, 10 * index + choice, 0, prompt.tokens, made.sampling, max_tokens(request),
                made.ending.all_ids(described.end_ids), choice, made.ending.min_tokens, made.alternatives,
                made.thinking, made.grammar, choice + 1 < count,
            )
            for choice in range(count)
        ],
    )  # fmt: skip
