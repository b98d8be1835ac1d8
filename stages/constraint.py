"""What an answer is bound to: read from the request, then judged and written as one grammar (section E, D5, D5b).

Two steps. ``wish``, ``forced`` and ``either`` read what was asked for and are quick. ``judged`` reads schemas and
compiles, which may take long: it runs in a worker that can be killed (``pipeline/pools.py``). The grammar is
llguidance's own JSON form, one text; ``engine/grammar.py`` makes masks of it.

The compiler comes as an argument, ``compile(grammar text) -> what is wrong, or ""``: the limits are the engine's. What
it says is never passed on: a client gets our own words, with the keyword and its path.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
from llguidance import LLMatcher

from stages import jsonschema
from stages.jsonschema import Fault
from stages.jsonschema_close import DEFS
from stages.jsonschema_fault import REGEX, at_fault
from stages.refusal import Refusal, joined, quoted, refuse
from stages.schema import Request

MAX_BYTES = 256 * 1024
"""Of a schema, a pattern or a list of choices, as JSON."""
JSON_DEPTH = 64
BLANKS = r"\x20|\x0A[\x20\x09]{0,32}"
"""What may stand between two tokens of JSON: a blank, or a new line with its indent. A model writes more for ever."""
LEADING = r"/[\x20\x0A\x0D\x09]{0,8}/"
"""What may stand before a call or a document where both may come."""

Compile = Callable[[str], str]


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must be, unjudged. ``param``: the field that says so.

    ``kind``: ``json`` (any object), ``schema``, ``regex``, ``choice``; ``call``: calls of ``tools`` and nothing else;
    ``either``: such calls, or ``document``. ``value``: the schema, the pattern, the choices. ``tools``: in OpenAI's
    form; ``only``: the one of them to call. ``parallel``: more than one call.
    """

    kind: str
    param: str
    value: Any = None
    tools: list[dict[str, Any]] = []
    only: str | None = None
    parallel: bool = False
    document: Constraint | None = None


def wish(request: Request) -> Constraint | Refusal | None:
    """What the fields of a request bind the answer to; None: nothing. Two of them are one too many."""
    found: list[Constraint] = []
    for reader in (_response_format, _structured_outputs, _guided):
        for read in reader(request):
            if isinstance(read, Refusal):
                return read
            found.append(read)
    if len(found) > 1:
        text = f"{found[1].param} stands beside {found[0].param}: an answer is bound by one of them."
        return refuse("invalid_value", found[1].param, text)
    return found[0] if found else None


def forced(tools: list[dict[str, Any]], name: str | None = None, parallel: bool = False) -> Constraint:
    """``tool_choice`` required, or one function by ``name``: the answer is one call; one or more with ``parallel``."""
    return Constraint(kind="call", param="tools", tools=tools, only=name, parallel=parallel)


def either(document: Constraint, tools: list[dict[str, Any]], parallel: bool = True) -> Constraint:
    """Tools to choose from freely beside a document: its first token that is not blank decides (D5b)."""
    return Constraint(kind="either", param=document.param, tools=tools, parallel=parallel, document=document)


# -- reading the fields ------------------------------------------------------------------------------------------

_Found = list[Constraint | Refusal]


def _response_format(request: Request) -> _Found:
    value, param = request.response_format, "response_format"
    if value is None:
        return []
    if not isinstance(value, dict):
        return [_mistyped(param, "an object")]
    kind = value.get("type")
    if kind is None:
        return [refuse("missing_required_parameter", f"{param}.type", f"{param}.type is missing.")]
    if kind == "text":
        return []
    if kind == "json_schema":
        return [_json_schema(value)]
    if kind == "json_object":  # with a schema beside it: the spelling of other servers
        schema = value.get("schema")
        whole = Constraint(kind="json", param=param)
        return [whole if schema is None else _schema(schema, f"{param}.schema")]
    text = f"{param}.type must be text, json_object or json_schema."
    return [refuse("invalid_value" if isinstance(kind, str) else "invalid_type", f"{param}.type", text)]


def _json_schema(value: dict[str, Any]) -> Constraint | Refusal:
    param = "response_format.json_schema"
    named = value.get("json_schema")
    if named is None and "schema" in value:
        return _schema(value["schema"], "response_format.schema")
    if named is None:
        return refuse("missing_required_parameter", param, f"{param} is missing.")
    if not isinstance(named, dict):
        return _mistyped(param, "an object")
    for field, kind, words in (("name", str, "a string"), ("strict", bool, "true or false")):
        if named.get(field) is not None and not isinstance(named[field], kind):
            return _mistyped(f"{param}.{field}", words)
    if named.get("schema") is None:
        return refuse("missing_required_parameter", f"{param}.schema", f"{param}.schema is missing.")
    return _schema(named["schema"], f"{param}.schema")


_STRUCTURED = ("json", "regex", "choice", "json_object")


def _structured_outputs(request: Request) -> _Found:
    value, param = request.structured_outputs, "structured_outputs"
    if value is None:
        return []
    if not isinstance(value, dict):
        return [_mistyped(param, "an object")]
    wanted = {name: entry for name, entry in value.items() if entry is not None and entry is not False}
    for name in wanted:
        if name not in _STRUCTURED:
            return [refuse("unsupported_parameter", param + joined(name), f"{param}: {quoted(name)} is not supported.")]
    if not wanted:
        return []
    if len(wanted) != 1:
        return [refuse("invalid_value", param, f"{param} must hold exactly one of {', '.join(_STRUCTURED)}.")]
    name, entry = next(iter(wanted.items()))
    if name == "json_object":
        at = f"{param}.{name}"
        return [Constraint(kind="json", param=at) if entry is True else _mistyped(at, "true or false")]
    return [_READERS[name](entry, f"{param}.{name}")]


def _guided(request: Request) -> _Found:
    named = ((kind, f"guided_{kind}", getattr(request, f"guided_{kind}")) for kind in _READERS)
    return [_READERS[kind](value, field) for kind, field, value in named if value is not None]


def _schema(value: Any, param: str) -> Constraint | Refusal:
    """A schema, as an object or as the text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return refuse("invalid_value", param, f"{param} is a string that holds no JSON.")
    if not isinstance(value, dict | bool):
        return _mistyped(param, "a JSON Schema: an object")
    return _sized(Constraint(kind="schema", param=param, value=value))


def _regex(value: Any, param: str) -> Constraint | Refusal:
    if not isinstance(value, str):
        return _mistyped(param, "a string")
    return _sized(Constraint(kind="regex", param=param, value=value))


def _choice(value: Any, param: str) -> Constraint | Refusal:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return _mistyped(param, "a list of strings")
    if not value or not all(value):
        return refuse("invalid_value", param, f"{param} must hold at least one string, and none that is empty.")
    return _sized(Constraint(kind="choice", param=param, value=value))


_READERS: dict[str, Callable[[Any, str], Constraint | Refusal]] = {"json": _schema, "regex": _regex, "choice": _choice}


def _sized(constraint: Constraint) -> Constraint | Refusal:
    if len(msgspec.json.encode(constraint.value)) <= MAX_BYTES:
        return constraint
    text = f"{constraint.param} is larger than {MAX_BYTES // 1024} kB."
    return refuse("unsupported_schema", constraint.param, text)


def _mistyped(param: str, wanted: str) -> Refusal:
    return refuse("invalid_type", param, f"{param} must be {wanted}.")


# -- judging and writing -----------------------------------------------------------------------------------------


class _Lines:
    """A grammar as it is written: rules in llguidance's Lark form, and JSON schemas that they name."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._schemas: list[dict[str, Any]] = []

    def schema(self, schema: Any) -> str:
        """Add a schema; what a rule calls it."""
        self._schemas.append(_grammar_of(schema, f"s{len(self._schemas)}"))
        return f"@s{len(self._schemas) - 1}"

    def text(self) -> str:
        """One grammar. Without the option the library would force its own choice of tokens where bytes are forced."""
        rules = ['%llguidance {"no_forcing": true}', *self.rules]
        return _dumped({"grammars": [{"name": "answer", "lark_grammar": "\n".join(rules)}, *self._schemas]})


def judged(constraint: Constraint, compile: Compile, depth: int = JSON_DEPTH) -> str | Refusal:
    """The grammar of a constraint, which ``compile`` takes; else the refusal that says what of it is not served."""
    lines = _Lines()
    start = _rule(constraint, lines, compile, depth)
    if isinstance(start, Refusal):
        return start
    lines.rules.insert(0, f"start: {start}")
    text = lines.text()
    if compile(text):  # each part was taken alone: together they are too much
        return too_complex(constraint)
    return text


def too_complex(constraint: Constraint) -> Refusal:
    """What a client is told when the whole asks for more than a grammar may."""
    return refuse("unsupported_schema", constraint.param, f"{constraint.param} is too large or too complex.")


def too_long(constraint: Constraint) -> Refusal:
    """What a client is told when judging took longer than it may."""
    return refuse("unsupported_schema", constraint.param, f"{constraint.param} takes too long to compile.")


def _rule(constraint: Constraint, lines: _Lines, compile: Compile, depth: int) -> str | Refusal:
    """What follows ``start:`` for a constraint."""
    param, value = constraint.param, constraint.value
    match constraint.kind:
        case "json":
            return lines.schema(any_object(depth))
        case "schema":
            found = served(value, param, compile)
            return found if isinstance(found, Refusal) else lines.schema(found)
        case "regex":
            return _pattern(value, param, compile)
        case "choice":
            lines.rules.append("CHOICE: " + " | ".join(_literal(one) for one in dict.fromkeys(value)))
            return "CHOICE"
        case "call":
            return _calls(constraint, lines, compile)
    calls = _calls(constraint, lines, compile)
    if isinstance(calls, Refusal) or constraint.document is None:
        return calls
    document = _rule(constraint.document, lines, compile, depth)
    return document if isinstance(document, Refusal) else f"{LEADING} (({calls}) | {document})"


def _pattern(pattern: str, param: str, compile: Compile) -> str | Refusal:
    """The whole answer fits the pattern."""
    rule = str(json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"])
    if compile(_dumped({"grammars": [{"lark_grammar": rule}]})):
        text = f"{param} is no pattern that can be enforced: {REGEX}"
        return refuse("unsupported_schema", param, text)
    return rule.removeprefix("start: ")


_CLOSING = "}\n</tool_call>"


def _calls(constraint: Constraint, lines: _Lines, compile: Compile) -> str | Refusal:
    """One call of the tools; more of them, each on a line of its own, with ``parallel``."""
    rules: list[str] = []
    for i, tool in enumerate(constraint.tools):
        function = tool["function"]
        if constraint.only not in (None, function["name"]):
            continue
        param = f"tools[{i}].function.parameters"
        found = served(_arguments(function.get("parameters")), param, compile)
        if isinstance(found, Refusal):
            return found
        opening = f'<tool_call>\n{{"name": {_dumped(function["name"])}, "arguments": '
        lines.rules.append(f"call{i}: {_literal(opening)} {lines.schema(found)} {_literal(_CLOSING)}")
        rules.append(f"call{i}")
    lines.rules.append("call: " + " | ".join(rules))
    return f"call ({_literal(chr(10))} call)*" if constraint.parallel else "call"


def _arguments(parameters: Any) -> Any:
    """The schema of a call's arguments: they are an object, whatever else is said of them."""
    if not isinstance(parameters, dict):
        return {"type": "object"} if parameters is None else parameters
    return parameters if parameters.get("type") == "object" else {**parameters, "type": "object"}


def any_object(depth: int) -> dict[str, Any]:
    """A schema for any JSON object in which at most ``depth`` containers lie inside each other."""
    plain = {"type": ["null", "boolean", "number", "string"]}
    levels: list[dict[str, Any]] = [plain]  # what may stand there, by the containers it may hold inside each other
    for below in range(max(0, depth - 1)):
        inner = {"$ref": f"{DEFS}{below}"}
        levels.append({"anyOf": [plain, {"type": "array", "items": inner}, _map_of(inner)]})
    return {**_map_of({"$ref": f"{DEFS}{len(levels) - 1}"}), "$defs": {str(n): one for n, one in enumerate(levels)}}


def _map_of(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": inner}


def served(schema: Any, param: str, compile: Compile) -> Any:
    """The schema in the form that is compiled; a refusal naming keyword and path if it is not one that can be."""
    read = jsonschema.read(schema)
    if isinstance(read, Fault):
        return _refused(param, read)
    whole = read.alone(read.schema)
    return (
        _refused(param, at_fault(read, lambda part: bool(compile(_alone(part))))) if compile(_alone(whole)) else whole
    )


def _refused(param: str, fault: Fault) -> Refusal:
    """The client sees the whole path; ``refusal.masked`` is what a log shows of it."""
    path = param + joined(*fault.path)
    subject = f"{fault.keyword} at {path}" if fault.keyword else f"The schema at {path}:"
    return refuse("unsupported_schema", path, f"{subject} {fault.text}")


def _alone(schema: Any) -> str:
    return _dumped({"grammars": [_grammar_of(schema, "schema")]})


def _grammar_of(schema: Any, name: str) -> dict[str, Any]:
    """A schema as one of llguidance's grammars, blanks bounded. Only an object can carry the options."""
    whole = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    return {"name": name, "json_schema": {**whole, "x-guidance": {"whitespace_pattern": BLANKS}}}


def _literal(text: str) -> str:
    """A text in Lark: a JSON string."""
    return _dumped(text)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
