"""The official JSON Schema test suite against the masks: what is enforced, what is refused, what is let through.

Every schema is judged as the server judges one, and every instance written through the masks byte by byte. A valid
instance counts as refused if no spelling of it can be written: JSON leaves blanks, the order of names and 1.0 or 1
open, and a grammar fixes some of that. An invalid one counts as accepted if any spelling can.

    python -m benchmarks.schema_suite [--suite FOLDER] [--write docs/json-schema.md]
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from engine.grammar import BYTES, GrammarRefused, Masks, compile_grammar
from engine.protocol import Grammar
from stages.constraint import Constraint, judged
from stages.keywords import FORMATS, NUMBER_FORMATS, UNENFORCED
from stages.refusal import Refusal

DRAFTS = ("draft2020-12", "draft7")
SPELLINGS = 200
"""Spellings tried of one instance."""

LIBRARY = {"draft2020-12": (1109, 1044, 32, 40)}
"""llguidance 1.9.1 on its own, measured before this was written: right, not compiled, valid refused, invalid taken."""


@dataclass
class Found:
    """What came of one draft's cases. An entry of a list names file, schema and instance."""

    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # instances whose schema is refused, by keyword
    schemas: Counter[str] = field(default_factory=Counter)  # schemas, by keyword
    compiled: int = 0
    reordered: int = 0  # valid ones that only another spelling than compact JSON lets through
    valid_refused: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    loose: Counter[str] = field(default_factory=Counter)  # the formats of those accepted

    @property
    def total(self) -> int:
        """Instances."""
        lists = len(self.valid_refused) + len(self.invalid_accepted)
        return self.right + sum(self.refused.values()) + lists


def spellings(value: Any) -> Iterator[str]:
    """JSON texts of one value: compact, with blanks, whole floats as integers, names in another order."""
    yield json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False)
    for other in itertools.islice(_reordered(_whole(value)), SPELLINGS):
        yield json.dumps(other, separators=(",", ":"), ensure_ascii=False)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return {name: _whole(one) for name, one in value.items()} if isinstance(value, dict) else value


def _reordered(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        inside = [list(itertools.islice(_reordered(one), SPELLINGS)) for one in value]
        yield from (list(one) for one in itertools.product(*inside))
    elif isinstance(value, dict):
        inner = {name: list(itertools.islice(_reordered(one), SPELLINGS)) for name, one in value.items()}
        for names in itertools.permutations(value):
            for picked in itertools.product(*[inner[name] for name in names]):
                yield dict(zip(names, picked, strict=True))
    else:
        yield value


class Judge:
    """Compiles schemas and writes instances, a token a byte."""

    def __init__(self) -> None:
        self._masks = Masks(BYTES, [256], 257)

    def grammar(self, schema: Any) -> str | Refusal:
        """The grammar the server would use, or its refusal."""
        return judged(Constraint(kind="schema", param="schema", value=schema), compile_grammar)

    def takes(self, grammar: str, text: str) -> bool:
        """Whether the masks let ``text`` be written, and the answer end there."""
        matcher = self._masks.matcher(Grammar(grammar), [256])
        for byte in text.encode("utf-8", "surrogatepass"):
            if not matcher.allowed()[byte]:
                return False
            matcher.commit(byte)
        return matcher.complete


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema with its instances, and the file it is in."""
    for file in sorted(folder.rglob("*.json")):
        name = file.relative_to(folder).with_suffix("").as_posix()
        yield from ((name, case) for case in json.loads(file.read_text()))


def keyword_of(refusal: Refusal) -> str:
    """The keyword a refusal names."""
    named = re.match(r"(\S+) at ", refusal.text)
    return named[1] if named and named[1] != "The" else "(no value fits, or too complex)"


def measure(folder: Path) -> Found:
    """All cases of a folder."""
    judge, found = Judge(), Found()
    for name, case in cases(folder):
        grammar = judge.grammar(case["schema"])
        if isinstance(grammar, Refusal):
            keyword = keyword_of(grammar)
            found.schemas[keyword] += 1
            found.refused[keyword] += len(case["tests"])
            continue
        found.compiled += 1
        for test in case["tests"]:
            _one(judge, grammar, name, case, test, found)
    return found


def _one(judge: Judge, grammar: str, name: str, case: dict[str, Any], test: dict[str, Any], found: Found) -> None:
    said = f"{name}: {case['description']}: {test['description']}"
    try:
        ways = spellings(test["data"])
        accepted = judge.takes(grammar, next(ways))
        other = not accepted and any(judge.takes(grammar, text) for text in ways)
    except GrammarRefused:
        found.valid_refused.append(f"{said} (the matcher gave up)")
        return
    if (accepted or other) == test["valid"]:
        found.right += 1
        found.reordered += other
    elif test["valid"]:
        found.valid_refused.append(said)
    else:
        found.invalid_accepted.append(said)
        found.loose[_format(case["schema"])] += 1


def _format(schema: Any) -> str:
    return str(schema["format"]) if isinstance(schema, dict) and "format" in schema else "(not a format)"


def page(measured: dict[str, Found]) -> str:
    """The document that is published."""
    lines = [
        "# JSON Schema",
        "",
        "Written by `python -m benchmarks.schema_suite --write docs/json-schema.md`; do not edit.",
        "",
        "A schema is enforced or refused, never passed over (row E5): a refusal is a 400 `unsupported_schema` that",
        "names the keyword and its path. `$ref` inside the schema, `$defs`, recursion are served. What says nothing of",
        "a document passes: titles, `default`, `examples`, keywords no draft knows. Schemas are read by the newest",
        "draft; one that names an older `$schema` has `$ref` hide its siblings.",
        "",
        "A grammar fixes how a value is spelled: names come in the order of the schema, one blank or one line break",
        "with at most 32 columns of indent stands between two tokens and nothing around the document, whole numbers",
        "are written without a fraction, and a character is escaped only where JSON demands it (and U+007F). A name",
        "that the schema does not declare may come twice, as JSON allows; `minProperties` over 1 is refused where that",
        "could matter. Numbers beyond 2^53 in a schema are refused: they could not be told from their neighbours.",
        "",
        "## The official suite",
        "",
        "| | " + " | ".join(measured) + " |",
        "|---|" + "---|" * len(measured),
    ]
    rows = {
        "instances": lambda one: one.total,
        "decided right": lambda one: one.right,
        "… of these only in another spelling than compact JSON as the suite orders it": lambda one: one.reordered,
        "schema refused": lambda one: sum(one.refused.values()),
        "valid, refused": lambda one: len(one.valid_refused),
        "invalid, accepted": lambda one: len(one.invalid_accepted),
        "schemas compiled": lambda one: one.compiled,
        "schemas refused": lambda one: sum(one.schemas.values()),
    }
    lines += [
        f"| {name} | " + " | ".join(str(get(one)) for one in measured.values()) + " |" for name, get in rows.items()
    ]
    lines += _formats() + _refusals(measured) + _wrong(measured)
    return "\n".join(lines) + "\n"


def _formats() -> list[str]:
    return [
        "",
        "## `format`",
        "",
        "Enforced for strings; any other value is refused.",
        "",
        "| value | checked |",
        "|---|---|",
        *[f"| `{name}` | {loose or 'as its pattern says'} |" for name, loose in FORMATS.items()],
        "",
        "Beside a type without strings " + ", ".join(f"`{name}`" for name in sorted(NUMBER_FORMATS)) + " pass and bind",
        "nothing.",
    ]


def _refusals(measured: dict[str, Found]) -> list[str]:
    keywords = sorted(dict.fromkeys(itertools.chain(*[one.schemas for one in measured.values()])))
    lines = ["", "## Schemas of the suite refused, by the keyword named", ""]
    lines += ["| keyword | " + " | ".join(measured) + " |", "|---|" + "---|" * len(measured)]
    for keyword in keywords:
        counts = " | ".join(str(one.schemas[keyword]) for one in measured.values())
        lines.append(f"| {'`' + keyword + '`' if '(' not in keyword else keyword[1:-1]} | {counts} |")
    named = ", ".join(f"`{word}`" for word in sorted(UNENFORCED))
    return [*lines, "", f"Refused wherever they would bind something: {named}."]


def _wrong(measured: dict[str, Found]) -> list[str]:
    lines: list[str] = []
    for title, get in (
        ("Invalid instances accepted", lambda one: one.invalid_accepted),
        ("Valid instances refused", lambda one: one.valid_refused),
    ):
        for draft, one in measured.items():
            entries = get(one)
            lines += ["", f"## {title}, {draft}: {len(entries)}", ""]
            lines += [f"- {said}" for said in entries]
    return lines


def suite_folder() -> Path:
    """Where the tests find the suite, too."""
    from tests.captures import DATA

    return DATA / "json-schema-test-suite" / "tests"


@click.command()
@click.option("--suite", type=click.Path(path_type=Path), default=None, help="The suite's folder of drafts.")
@click.option("--write", type=click.Path(path_type=Path), default=None, help="Write the document here.")
def main(suite: Path | None, write: Path | None) -> None:
    """Measure both drafts; with ``--write`` publish what was found."""
    folder = suite or suite_folder()
    measured = {draft: measure(folder / draft) for draft in DRAFTS}
    for draft, one in measured.items():
        counts = (one.right, sum(one.refused.values()), len(one.valid_refused), len(one.invalid_accepted))
        print(f"{draft}: right, schema refused, valid refused, invalid accepted: {counts}")
        print("  the library alone:", LIBRARY.get(draft, "not measured"))
        print("  accepted by format:", dict(one.loose))
    if write:
        write.write_text(page(measured))


if __name__ == "__main__":
    main()
