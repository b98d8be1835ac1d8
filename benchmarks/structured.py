"""Structured answers of the embedded model: do those that finish validate, and how many finish (rows E1, E2).

Many schemas with required fields and bounded strings, each asked for several times, half of them at temperature 1. The
judge is ``jsonschema``. An answer that equals the smallest instance of its schema is counted too: a mask alone, with no
model behind it, would write that.

    python -m benchmarks.structured [--answers 200] [--model FILE]
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click
import httpx
import jsonschema
from rich.console import Console
from rich.progress import track

from tests.server import Server

MAX_TOKENS = 512
TOPICS = ("a city", "a book", "a meal", "a friend", "a river", "a song", "a bird", "a job", "a game", "a house")


def text(length: int) -> dict[str, Any]:
    """A bounded string of at least one character."""
    return {"type": "string", "minLength": 1, "maxLength": length}


FIELDS: dict[str, dict[str, Any]] = {
    "name": text(20),
    "note": text(40),
    "count": {"type": "integer", "minimum": 0, "maximum": 999},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "open": {"type": "boolean"},
    "color": {"enum": ["red", "green", "blue", "none"]},
    "tags": {"type": "array", "items": text(12), "minItems": 1, "maxItems": 3},
    "place": {"type": "object", "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}, "y": text(8)},
              "required": ["x", "y"], "additionalProperties": False},
    "maybe": {"anyOf": [{"type": "null"}, text(16)]},
    "level": {"const": 3},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "day": {"type": "string", "format": "date"},
}  # fmt: skip


FREE = ("name", "note", "tags", "place", "maybe")
"""Fields with a bounded string: of a word, a number and a constant a model may well write the least there is."""


def schemas() -> Iterator[dict[str, Any]]:
    """Every three of the fields, one of them with a bounded string, in an order that mixes them."""
    triples = sorted(itertools.combinations(FIELDS, 3), key=lambda names: [hash_of("".join(names)), names])
    for names in filter(lambda names: any(name in FREE for name in names), triples):
        properties = {name: FIELDS[name] for name in names}
        yield {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}


def hash_of(word: str) -> int:
    """A number that is the same in every process."""
    return sum(ord(letter) * 31**place for place, letter in enumerate(word)) % 9973


def smallest(schema: dict[str, Any]) -> Any:
    """The least a mask could write, for the kinds of schema above."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return smallest(schema["anyOf"][0])
    match schema["type"]:
        case "object":
            return {name: smallest(schema["properties"][name]) for name in schema["required"]}
        case "array":
            return [smallest(schema["items"])] * schema.get("minItems", 0)
        case "string" if "pattern" in schema:
            return "AA-000"
        case "string":
            return "a" * schema.get("minLength", 0)
        case "null":
            return None
        case "boolean":
            return False
    return schema.get("minimum", 0)


def ask(http: httpx.Client, number: int, schema: dict[str, Any]) -> dict[str, Any]:
    """One answer, every second one at temperature 1."""
    topic = TOPICS[number % len(TOPICS)]
    body = {
        "messages": [{"role": "user", "content": f"Describe {topic} as JSON with {', '.join(schema['required'])}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}},
        "temperature": number % 2, "seed": number, "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    response = http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()["choices"][0]
    return answer


def measure(http: httpx.Client, answers: int, show: bool = True) -> tuple[Counter[str], list[str]]:
    """How the answers ended, and what is wrong with those that finished."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    # Fifty schemas or more, each used as often as the number asks for.
    pool = list(itertools.islice(schemas(), max(1, min(answers, max(50, answers // 4)))))
    jobs = list(itertools.islice(itertools.cycle(pool), answers))
    with contextlib.suppress(KeyboardInterrupt, httpx.TransportError):  # what was measured is worth printing
        for number, schema in enumerate(track(jobs, "asking", disable=not show)):
            answer = ask(http, number, schema)
            counts["answers"] += 1
            counts[answer["finish_reason"]] += 1
            if answer["finish_reason"] != "stop":
                continue
            try:
                value = json.loads(answer["message"]["content"])
                jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
            except (jsonschema.ValidationError, ValueError) as error:
                faults.append(f"answer {number} ({', '.join(schema['required'])}): {type(error).__name__}")
                continue
            counts["smallest"] += value == smallest(schema)
    counts["schemas"] = len(pool)
    return counts, faults


@click.command()
@click.option("--answers", default=200, show_default=True)
@click.option("--threads", default=0, show_default=True, help="Of the engine; 0: all processors.")
@click.option("--model", default="", help="GGUF file or folder; default: the embedded model.")
def main(answers: int, threads: int, model: str) -> None:
    """Ask for structured answers and judge them."""
    console = Console()
    with Server("--threads", str(threads), *(["--model", model] if model else [])) as server:
        server.ready()
        counts, faults = measure(server.http, answers)
    answers, finished = counts["answers"], counts["stop"]
    console.print(
        f"{answers} answers under {counts['schemas']} schemas: {finished} finished ({finished / answers:.1%}), "
    )
    console.print(
        f"{counts['length']} at the limit, {len(faults)} of the finished invalid, {counts['smallest']} smallest"
    )
    for line in faults:
        console.print(line, markup=False)
    sys.exit(1 if faults or counts["smallest"] or finished < 0.95 * answers else 0)


if __name__ == "__main__":
    main()
