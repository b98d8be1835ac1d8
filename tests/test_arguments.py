import json

import pytest
from hypothesis import given as check
from hypothesis import strategies as st

from stages.arguments import TEXT, Kind, Value, dumped, given, kinds, written

ROOT = {
    "properties": {},
    "$defs": {
        "count": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "a/b": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
    },
}


def kind(schema):
    return kinds({**ROOT, "properties": {"x": schema}})["x"]


INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
TABLE = [
    (INTEGER, "150", "150"),
    (INTEGER, " 7\n", "7"),
    (INTEGER, "230.0", "230"),
    (INTEGER, "1e2", "100"),
    (INTEGER, "5.5", "5.5"),
    (INTEGER, "abc", '"abc"'),
    (INTEGER, "five", '"five"'),
    (INTEGER, '"5"', "5"),
    (INTEGER, "", '""'),
    (INTEGER, "1" * 5000, f'"{"1" * 5000}"'),
    ({"type": "number"}, "5.0", "5.0"),
    ({"type": "number"}, "0.10000000000000000555", "0.10000000000000000555"),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "number"}, "-Infinity", '"-Infinity"'),
    ({"type": ["integer", "number"]}, "5.0", "5.0"),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "boolean"}, "false", "false"),
    ({"type": "array"}, "[1,2]", "[1,2]"),
    ({"type": "array"}, '[True, None, "True"]', '[true, null, "True"]'),
    ({"type": "array"}, '[True, "é\\ud800"]', '[true, "é\\ud800"]'),
    ({"type": "array"}, "[True, 1e999]", '"[True, 1e999]"'),
    ({"type": "array"}, "[" * 100000, json.dumps("[" * 100000)),
    ({"type": "object"}, '"{\\"a\\": 1}"', '{"a": 1}'),
    ({"type": "object"}, '"a"', '"\\"a\\""'),
    ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
    (STRING, "00123", '"00123"'),
    (STRING, "null", '"null"'),
    (STRING, " a\n", '" a\\n"'),
    ({"anyOf": [STRING, NULL]}, "null", '"null"'),
    ({"type": ["string", "null"]}, "null", '"null"'),
    ({"type": ["string", "integer"]}, "7", '"7"'),
    ({"anyOf": [INTEGER, NULL]}, "null", "null"),
    ({"oneOf": [INTEGER, NULL]}, "None", "null"),
    ({"anyOf": [INTEGER, {}]}, "5", '"5"'),
    ({"allOf": [{"minimum": 1}, INTEGER]}, "5.0", "5"),
    ({"type": "integer", "nullable": True}, "null", "null"),
    ({"$ref": "#/$defs/count"}, "5.0", "5"),
    ({"$ref": "#/$defs/a~1b"}, "None", "null"),
    ({"$ref": "#/$defs/loop"}, "5", '"5"'),
    ({"$ref": "#/$defs/none"}, "5", '"5"'),
    ({"$ref": "https://example.com/x"}, "[5]", "[5]"),
    ({"enum": ["none", None]}, "none", '"none"'),
    ({"enum": ["none", "null"]}, "null", '"null"'),
    ({"enum": ["none", None]}, "None", "null"),
    ({"enum": ["3", 3]}, "3", '"3"'),
    ({"enum": ["a", 3]}, "3.0", "3"),
    ({"enum": ["a", 3]}, "4", '"4"'),
    ({"enum": ["a", 1]}, "True", '"True"'),
    ({"enum": ["a", [1, 2]]}, "[1,2]", "[1, 2]"),
    ({"type": "string", "enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": [1, 2]}, "1", "1"),
    ({"const": 7}, "7", "7"),
    ({"const": "7"}, "7", '"7"'),
    ({}, '{"a": 1}', '{"a": 1}'),
    ({}, " [1]", "[1]"),
    ({}, "[a](b)", '"[a](b)"'),
    ({}, "42", '"42"'),
    ({"description": "anything"}, "true", '"true"'),
    (True, "true", '"true"'),
]


@pytest.mark.parametrize(("schema", "text", "wanted"), TABLE, ids=range(len(TABLE)))
def test_types(schema, text, wanted):
    """D4: what a schema makes of a text."""
    assert written(text, kind(schema)) == wanted
    json.loads(wanted)


@pytest.mark.parametrize(("schema", "text", "wanted"), TABLE, ids=range(len(TABLE)))
def test_pieces_are_the_value(schema, text, wanted):
    """D3: joined, what goes out by character is the same as whole."""
    value = Value(kind(schema))
    assert "".join(map(value.add, text[:9999])) + value.end() == written(text[:9999], kind(schema))


@check(st.text(), st.integers(0, 5))
def test_text_of_any_characters(text, at):
    """D3: a string at any cut."""
    value = Value(TEXT)
    assert json.loads(value.add(text[:at]) + value.add(text[at:]) + value.end()) == text


def test_an_undeclared_parameter_has_no_kind():
    """D4: nor have those of a schema that declares none, or is none."""
    assert kinds({"properties": {"a": STRING}}) == {"a": Kind(("string",))}
    assert kinds(None) == kinds({}) == kinds({"properties": []}) == kinds(True) == {}


def test_a_fan_of_references_is_read_once():
    """D4: references that double at each of 60 steps, from a client, cost nothing."""
    steps = {f"s{n}": {"anyOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2} for n in range(60)}
    parameters = {"properties": {"x": {"$ref": "#/$defs/s0"}}, "$defs": {**steps, "s60": INTEGER}}
    assert kinds(parameters)["x"] == Kind(("integer",))


@pytest.mark.parametrize(
    ("schema", "value", "wanted"),
    [(INTEGER, "5", 5), (INTEGER, 5.0, 5), (STRING, "5", "5"), (STRING, 5, 5), ({"type": "array"}, "[1]", [1])],
)
def test_values_of_a_json_call_take_their_types_too(schema, value, wanted):
    """D4: a value of a JSON call object that is text where no string is allowed, or a float where it is to be whole."""
    got = given(value, kind(schema))
    assert (got, type(got)) == (wanted, type(wanted))


def test_half_a_surrogate_pair_stays_escaped():
    """D3: it cannot be sent as a character."""
    assert dumped(["\ud83d\ude00", "😀"]).encode() and json.loads(dumped("\ud800")) == "\ud800"
    with pytest.raises(ValueError):
        dumped(float("inf"))
