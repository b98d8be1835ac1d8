"""What binds an answer: how it is read from a request, how it is judged, and what its grammar lets through."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import schema_suite
from engine.grammar import BYTES, Masks, compile_grammar
from engine.protocol import Grammar
from stages.constraint import MAX_BYTES, Constraint, either, forced, judged, wish
from stages.jsonschema import Fault, read
from stages.keywords import FORMATS, UNENFORCED
from stages.refusal import Refusal, masked
from stages.schema import ChatRequest, CompletionRequest
from tests.captures import needed

MASKS = Masks(BYTES, [256], 257)
ROUTES = ["chat", "completions"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def asked(route: str = "chat", **fields: Any) -> Any:
    """Read as from a body whose types nobody has checked."""
    return wish(ChatRequest(messages=[], **fields) if route == "chat" else CompletionRequest(prompt="x", **fields))


def bound(kind: str, value: Any = None) -> Constraint:
    return Constraint(kind=kind, param=kind, value=value)


def grammar(constraint: Constraint, depth: int = 64) -> str:
    found = judged(constraint, compile_grammar, depth)
    assert isinstance(found, str), found
    return found


def refusal(constraint: Constraint) -> Refusal:
    found = judged(constraint, compile_grammar)
    assert isinstance(found, Refusal), found
    return found


def takes(text: str, grammar: str) -> bool:
    """Whether the masks let ``text`` be written, a token a byte, and the answer end there."""
    matcher = MASKS.matcher(Grammar(grammar))
    for byte in text.encode():
        if not matcher.allowed()[byte]:
            return False
        matcher.commit(byte)
    return matcher.complete


# -- reading the request -------------------------------------------------------------------------------------------

SPELLINGS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"response_format": {"type": "json_object"}}, "json", None, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        "schema",
        SCHEMA,
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "schema", SCHEMA, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "schema", SCHEMA, "response_format.schema"),
    ({"structured_outputs": {"json": SCHEMA}}, "schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, "json", None, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, "regex", "a+", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
    ({"guided_json": SCHEMA}, "schema", SCHEMA, "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, "schema", SCHEMA, "guided_json"),
    ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
    ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "kind", "value", "param"), SPELLINGS)
def test_every_spelling_is_read_on_both_routes(
    route: str, fields: dict[str, Any], kind: str, value: Any, param: str
) -> None:
    """E1: OpenAI's, vLLM's and llama.cpp's spellings say the same thing, and the field that said it is remembered."""
    assert asked(route, **fields) == Constraint(kind=kind, param=param, value=value)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_what_binds_nothing_is_no_constraint(fields: dict[str, Any]) -> None:
    """E1: text is the default, also where it is said."""
    assert asked(**fields) is None


MALFORMED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "invalid_type", "response_format"),
    ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {"type": 1}}, "invalid_type", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "missing_required_parameter",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
        "invalid_type",
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}}},
        "invalid_type",
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "unsupported_parameter", "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs"),
    ({"guided_json": "{"}, "invalid_value", "guided_json"),
    ({"guided_json": 3}, "invalid_type", "guided_json"),
    ({"guided_regex": ["a"]}, "invalid_type", "guided_regex"),
    ({"guided_choice": []}, "invalid_value", "guided_choice"),
    ({"guided_choice": ["a", ""]}, "invalid_value", "guided_choice"),
    ({"guided_choice": ["a", 1]}, "invalid_type", "guided_choice"),
    ({"guided_regex": "a" * MAX_BYTES}, "unsupported_schema", "guided_regex"),
]


@pytest.mark.parametrize(("fields", "code", "param"), MALFORMED)
def test_what_is_malformed_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    """E1: a fault names the field and is no constraint."""
    found = asked(**fields)
    assert isinstance(found, Refusal), found
    assert (found.code, found.param) == (code, param)


@pytest.mark.parametrize(
    "other", [{"guided_regex": "a"}, {"structured_outputs": {"choice": ["a"]}}, {"guided_choice": ["a"]}]
)
def test_two_constraints_are_one_too_many(other: dict[str, Any]) -> None:
    """D5b: an answer is bound by one of them; beside plain text the other one stands."""
    found = asked(response_format={"type": "json_object"}, **other)
    assert isinstance(found, Refusal)
    assert found.code == "invalid_value"
    assert isinstance(asked(response_format={"type": "text"}, **other), Constraint)


# -- grammars ------------------------------------------------------------------------------------------------------


def test_a_choice_is_exactly_one_of_the_strings() -> None:
    """E1: quotes, line ends and letters of any script are written as they are."""
    found = grammar(bound("choice", ['a"b', "ab\n", "é", "a", "a"]))
    assert all(takes(text, found) for text in ('a"b', "ab\n", "é", "a"))
    assert not any(takes(text, found) for text in ("ab", "", "aa", "b"))


def test_a_pattern_is_of_the_whole_answer() -> None:
    """E1: anchors at the ends change nothing; what is beyond them is not allowed."""
    for pattern in (r"[0-9]{2}/[a-z]+", r"^[0-9]{2}/[a-z]+$"):
        found = grammar(bound("regex", pattern))
        assert takes("12/ab", found)
        assert not takes("x12/ab", found)
        assert not takes("12/", found)


def test_an_object_nests_as_deep_as_it_may_and_no_deeper() -> None:
    """E5: ``json_object`` is any object, with a bound on what lies inside each other."""
    for depth in (1, 2, 5):
        found = grammar(bound("json"), depth)
        fits, over = '{"a":' * depth + "1" + "}" * depth, '{"a":' * (depth + 1) + "1" + "}" * (depth + 1)
        assert takes(fits, found)
        assert not takes(over, found)
        assert not takes("[1]", found)
        assert takes('{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}", found) or depth == 1


def test_blanks_between_tokens_are_bounded() -> None:
    """E5: a document may be indented, and no model can write blanks for ever."""
    found = grammar(bound("schema", SCHEMA))
    assert takes('{\n    "a": 1\n}', found)
    assert takes('{"a": 1}', found) and takes('{"a":1}', found) and takes('{\n\t"a": 1\n}', found)
    assert takes("{\n" + " " * 32 + '"a":1}', found)
    assert not takes("{\n" + " " * 33 + '"a":1}', found)
    assert not takes('{"a":  1}', found) and not takes('{\n\n"a":1}', found)
    assert not takes(' {"a":1}', found)
    assert not takes('{"a":1} ', found)


texts = st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=6)  # DEL: see below
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=3))
def test_any_object_of_json_is_a_json_object(value: dict[str, Any]) -> None:
    """E1: whatever JSON writers write, as long as no character is escaped that need not be (and DEL is)."""
    found = grammar(bound("json"))
    assert takes(json.dumps(value, ensure_ascii=False), found)
    assert takes(json.dumps(value, ensure_ascii=False, separators=(",", ":")), found)


names = st.sampled_from(["a", "b", "c"])
schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "string", "maxLength": 3},
            {"type": "integer", "minimum": -5, "maximum": 20},
            {"type": ["boolean", "null"]},
            {"enum": ["x", 1, None]},
            {"const": [1, "y"]},
            {"type": "string", "pattern": "^[a-z]{2}$"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda properties, all_of: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[: 1 + all_of],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, max_size=3),
            st.booleans(),
        ),
    ),
    max_leaves=6,
)


@given(schemas, st.randoms(use_true_random=False))
def test_whatever_is_written_under_the_masks_is_valid(schema: dict[str, Any], random: Any) -> None:
    """E1: a writer that takes any allowed byte ends with a document that a strict validator accepts."""
    matcher = MASKS.matcher(Grammar(grammar(bound("schema", schema))))
    written = bytearray()
    for _ in range(400):
        if matcher.finished:
            break
        allowed = [byte for byte in range(256) if matcher.allowed()[byte]]
        if matcher.complete and (not allowed or random.random() < 0.5):
            break
        closing = [byte for byte in allowed if byte in b'"}],' or 0x80 <= byte < 0xC0]
        byte = random.choice(closing if closing and random.random() < 0.5 else allowed)
        matcher.commit(byte)
        written.append(byte)
    if matcher.complete:
        jsonschema.validate(json.loads(written.decode()), schema)


# -- calls ---------------------------------------------------------------------------------------------------------

TOOLS = [
    {"type": "function", "function": {"name": 'say "hi"', "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
HI = '<tool_call>\n{"name": "say \\"hi\\"", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_a_forced_call_is_one_call_unless_more_may_be() -> None:
    """D5: required is one call of any tool with arguments of its schema; with parallel calls one and more."""
    one, more = grammar(forced(TOOLS)), grammar(forced(TOOLS, parallel=True))
    for found in (one, more):
        assert takes(HI, found)
        assert takes(NOW, found)
        assert not takes("", found)
        assert not takes(HI.replace("1", '"x"'), found)
        assert not takes("Sure! " + HI, found)
    assert not takes(f"{HI}\n{NOW}", one)
    assert takes(f"{HI}\n{NOW}\n{HI}", more)


def test_a_named_function_is_the_only_one() -> None:
    """D5: no other tool can be called, and another's schema is not even read."""
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": {"not": {}}}}]
    found = grammar(forced(tools, "now"))
    assert takes(NOW, found)
    assert not takes(HI, found)
    assert refusal(forced(tools, "bad")).param == "tools[2].function.parameters.not"


def test_a_call_or_a_document() -> None:
    """D5b: what the first token that is not blank begins, the answer stays."""
    found = grammar(either(bound("schema", SCHEMA), TOOLS))
    for text in (HI, f"\n{HI}\n{NOW}", '{"a": 1}', '\n{"a": 1}'):
        assert takes(text, found)
    for text in ("", " ", f'{HI}{{"a": 1}}', f'{{"a": 1}}{HI}', '{"b": 1}'):
        assert not takes(text, found)
    assert not takes(f"{HI}\n{NOW}", grammar(either(bound("schema", SCHEMA), TOOLS, parallel=False)))


@pytest.mark.parametrize(
    ("kind", "value", "text"), [("json", None, "{}"), ("regex", "<[a-z]+", "<b"), ("choice", ["<"], "<")]
)
def test_any_document_may_stand_beside_calls(kind: str, value: Any, text: str) -> None:
    """D5b: also one that begins as a call does."""
    found = grammar(either(bound(kind, value), TOOLS))
    assert takes(text, found)
    assert takes(NOW, found)


# -- what of JSON Schema is served -----------------------------------------------------------------------------------

UNMET: dict[str, Any] = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "then": {"minLength": 1},
    "else": {"minLength": 1},
    "contains": {"type": "integer"},
    "minContains": 2,
    "maxContains": 2,
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "propertyNames": {"minLength": 2},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "uniqueItems": True,
    "$dynamicRef": "#x",
    "$recursiveRef": "#",
    "extends": {},
    "disallow": "string",
    "divisibleBy": 2,
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {"type": "object"},
}
BESIDE = {
    "if": {"then": {}},
    "then": {"if": {}},
    "else": {"if": {}},
    "minContains": {"contains": {}},
    "maxContains": {"contains": {}},
}


def test_the_table_of_what_is_not_enforced_is_tried_whole() -> None:
    """E5: a keyword added to the table needs a case here."""
    assert set(UNMET) == UNENFORCED


@pytest.mark.parametrize("keyword", sorted(UNMET))
@pytest.mark.parametrize(
    "draft", ["", "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"]
)
def test_no_keyword_is_passed_over(keyword: str, draft: str) -> None:
    """E5: what a mask cannot hold is refused with its name and path, whatever draft the schema says it is of."""
    inner = {keyword: UNMET[keyword], **BESIDE.get(keyword, {})}
    schema = {"type": "object", "properties": {"secret": inner}, **({"$schema": draft} if draft else {})}
    found = refusal(bound("schema", schema))
    assert found.code == "unsupported_schema"
    assert found.param is not None
    assert found.param.startswith("schema.properties.secret.")
    assert found.text.split()[0] in (keyword, *BESIDE.get(keyword, {}))
    assert "secret" not in masked(found.param)


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False},
        {"if": {"not": {}}},
        {"then": False},
        {"minContains": 3},
        {"dependencies": {}},
        {"propertyNames": True},
        {"unevaluatedProperties": {}},
        {"not": False},
        {"title": "x", "description": "y", "default": 3, "examples": [1], "deprecated": True, "$comment": "z"},
        {"discriminator": {"propertyName": "a"}, "x-order": 1, "nullable": False},
        {"x-guidance": {"lenient": True, "whitespace_flexible": False}},
        {"additionalItems": False},
        {"$anchor": "here", "$id": "https://example.com/x", "$schema": "https://example.com/mine"},
    ],
)
def test_what_binds_nothing_passes(idle: dict[str, Any]) -> None:
    """E5: annotations, and keywords that rule nothing out where they stand; the library's own options are nobody's."""
    assert grammar(bound("schema", {**idle, **SCHEMA})) == grammar(bound("schema", SCHEMA))


AT_FAULT: list[tuple[Any, str]] = [
    (
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}}},
        "properties.a.anyOf[1].pattern",
    ),
    ({"type": "string", "pattern": "a(?=b)"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "format": "iri"}}}, "$defs.x.format"),
    ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"pattern": "("}}}, "$defs.x.pattern"),
    ({"$ref": "https://example.com/schema"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf"),
    ({"patternProperties": {"^a": {}, "a$": {}}}, "patternProperties"),
    ({"type": "array", "items": {"type": "int"}}, "items.type"),
    ({"type": "array", "minItems": -1}, "minItems"),
    ({"enum": []}, "enum"),
    ({"const": 9007199254740993}, "const"),
    ({"maximum": 1e400}, "maximum"),
    ({"minimum": True}, "minimum"),
    ({"properties": [1]}, "properties"),
    ({"properties": {"a": 1}}, "properties.a"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
]


@pytest.mark.parametrize(("schema", "path"), AT_FAULT)
def test_a_refusal_names_the_path(schema: Any, path: str) -> None:
    """E5: also where only compiling shows that a part is not served."""
    found = refusal(bound("schema", schema))
    assert (found.code, found.param) == ("unsupported_schema", f"schema.{path}")


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {
            "allOf": [{"$ref": "#/$defs/x"}],
            "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}]}, "y": {"$ref": "#/$defs/x"}},
        },
    ],
)
def test_what_no_document_of_finite_length_fits_is_refused(schema: Any) -> None:
    """E5: a mask would let it be written for ever."""
    assert refusal(bound("schema", schema)).code == "unsupported_schema"


def test_recursion_is_served_and_never_leads_where_nothing_ends() -> None:
    """E5: trees of any depth; a branch that could never be closed is not begun."""
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert takes('{"next": {"next": {}}}', grammar(bound("schema", tree)))
    endless = {"type": "object", "required": ["y"], "properties": {"y": {"$ref": "#/$defs/x"}}}
    found = grammar(bound("schema", {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": endless}}))
    assert takes("{}", found)
    assert not takes('{"a":{}}', found)
    assert not MASKS.matcher(Grammar(found)).finished


def test_references_are_read_as_the_standard_has_them() -> None:
    """E5: pointers with escapes, anchors, and resources of their own inside the schema."""
    inner = {"$id": "https://example.com/inner", "$defs": {"x": {"type": "null"}}, "items": {"$ref": "#/$defs/x"}}
    defs = {"a/b": {"type": "integer"}, "%": {"$anchor": "percent", "type": "boolean"}, "x": {"type": "string"}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/a~1b"},
            "b": {"$ref": "#/$defs/%25"},
            "c": {"$ref": "#percent"},
            "d": {"type": "array", **inner},
        },
        "$defs": defs,
    }
    found = grammar(bound("schema", schema))
    assert takes('{"a":1,"b":true,"c":false,"d":[null]}', found)
    for wrong in ('{"a":"x"}', '{"b":1}', '{"c":1}', '{"d":["x"]}'):
        assert not takes(wrong, found)


def test_a_reference_hides_its_siblings_in_old_drafts_only() -> None:
    """E5: each draft as it says of itself."""
    schema = {"$ref": "#/definitions/x", "maxLength": 1, "definitions": {"x": {"type": "string"}}}
    assert not takes('"ab"', grammar(bound("schema", schema)))
    assert takes('"ab"', grammar(bound("schema", {**schema, "$schema": "http://json-schema.org/draft-07/schema#"})))


def test_one_of_several_is_served_where_no_value_fits_two() -> None:
    """E5: unions told apart by their types or by a required constant, also through references."""
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}, "of": {"$ref": "#"}}, "required": ["kind"]}
    dog = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
    union = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}]
    found = grammar(bound("schema", {"oneOf": union, "$defs": {"cat": cat, "dog": dog}}))
    assert takes('{"kind":"cat","of":{"kind":"dog"}}', found)
    assert takes("null", found)
    assert not takes('{"kind":"cow"}', found)
    loose = {**cat, "required": []}
    assert refusal(bound("schema", {"oneOf": union, "$defs": {"cat": loose, "dog": dog}})).param == "schema.oneOf"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date-time", "2024-02-29T23:59:60Z", "2023-02-29T10:00:00Z"),
        ("date", "2000-02-29", "1900-02-29"),
        ("time", "23:59:60+00:00", "12:00:60Z"),
        ("duration", "P1DT2H", "P"),
        ("email", "a.b@example.com", "a@"),
        ("hostname", "a-b.xn--c.example", "ab--c.example"),
        ("ipv4", "127.0.0.1", "256.0.0.1"),
        ("ipv6", "::1", ":::1"),
        ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08"),
        ("uri", "https://example.com/a?b#c", "//no scheme"),
    ],
)
def test_formats_are_enforced(name: str, good: str, bad: str) -> None:
    """E5: every format of the table; a hostname is also bounded in length."""
    assert name in FORMATS
    found = grammar(bound("schema", {"type": "string", "format": name}))
    assert takes(json.dumps(good), found)
    assert not takes(json.dumps(bad), found)
    if name == "hostname":
        assert not takes(json.dumps(".".join(["a" * 60] * 5)), found)


def test_a_format_of_numbers_binds_no_string() -> None:
    """E5: OpenAPI's widths pass beside numbers; beside strings no format is passed over."""
    assert takes("3", grammar(bound("schema", {"type": "integer", "format": "int32"})))
    assert refusal(bound("schema", {"format": "int32"})).param == "schema.format"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "items", "properties", "$ref", "enum", "const", "allOf", "required", "anyOf", "$id"]
                )
                | st.text(max_size=5),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_reading_never_raises(schema: Any) -> None:
    """E5: anything JSON can say is read, or is a fault with a path; what is read compiles or is refused."""
    found = read(schema)
    if not isinstance(found, Fault):
        assert isinstance(judged(bound("schema", schema), compile_grammar), str | Refusal)


# -- field report 18 -------------------------------------------------------------------------------------------------

HOSTILE = ["(", "(a+)+$", "a(?=b)b", "(a|b)*a(a|b){300}", "((a{1,100}){1,100}){1,100}", "(" * 2000 + ")" * 2000]


@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize("shape", ["regex", "schema"])
def test_a_hostile_pattern_is_a_short_refusal_or_a_mask(pattern: str, shape: str) -> None:
    """E5: field report 18: neither the server nor the error grows with what was sent."""
    value = pattern if shape == "regex" else {"type": "object", "properties": {"x" * 500: {"pattern": pattern}}}
    found = judged(bound(shape, value), compile_grammar)
    assert len(msgspec.json.encode(found)) < 2048
    if isinstance(found, str):
        assert MASKS.matcher(Grammar(found)).allowed().any()


def test_ten_thousand_choices_are_a_mask() -> None:
    """E5: field report 18: a long list costs memory and no recursion."""
    choices = [f"{n} of many" for n in range(10_000)]
    found = grammar(bound("choice", choices))
    assert takes("9999 of many", found)
    assert not takes("10000 of many", found)


def test_deep_schemas_end() -> None:
    """E5: as deep as a body may nest."""
    schema: Any = {"type": "string"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}}
    found = judged(bound("schema", schema), compile_grammar)
    assert isinstance(found, str), found


# -- the official suite ----------------------------------------------------------------------------------------------


def test_the_published_table_is_what_the_suite_says() -> None:
    """E5: docs/json-schema.md against a draft measured anew; what is let through is a loose format and nothing else."""
    folder = needed("json-schema-test-suite") / "tests"
    found = schema_suite.measure(folder / "draft2020-12")
    page = (Path(__file__).resolve().parent.parent / "docs" / "json-schema.md").read_text()
    rows = dict(re.findall(r"^\| ([^|`]+) \| (\d+) \|", page, re.MULTILINE))
    assert int(rows["instances"]) == found.total
    assert int(rows["decided right"]) == found.right
    assert int(rows["schema refused"]) == sum(found.refused.values())
    assert int(rows["valid, refused"]) == len(found.valid_refused)
    assert int(rows["invalid, accepted"]) == len(found.invalid_accepted)
    right, refused, valid_refused, invalid_accepted = schema_suite.LIBRARY["draft2020-12"]
    assert found.right >= right
    assert sum(found.refused.values()) <= refused
    assert len(found.valid_refused) <= valid_refused
    assert len(found.invalid_accepted) <= invalid_accepted
    assert all(FORMATS.get(name, "").startswith("loose") for name in found.loose)
