"""What of JSON Schema is enforced, what is refused and what says nothing about a document: the tables.

The keywords are read the same in every draft: a schema that names an old ``$schema`` is not read more loosely. A
keyword that no draft knows is an annotation by the standard, and passes.
"""

from __future__ import annotations

ONE = frozenset({"items", "additionalProperties"})
"""Keywords that hold one schema."""
MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords that hold a list of schemas."""
NAMED = frozenset({"properties", "patternProperties"})
"""Keywords that hold schemas by name."""
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

_UNENFORCED = """
not if then else contains minContains maxContains dependencies dependentRequired dependentSchemas propertyNames
unevaluatedItems unevaluatedProperties uniqueItems $dynamicRef $recursiveRef extends disallow divisibleBy
contentEncoding contentMediaType contentSchema
"""
UNENFORCED = frozenset(_UNENFORCED.split())
"""What a draft knows and no mask here can hold: refused by name (row E5)."""

_OTHERS = "$ref $defs definitions type enum const required pattern format additionalItems"
ALL = ONE | MANY | NAMED | COUNTS | LIMITS | UNENFORCED | frozenset(_OTHERS.split())
"""Every keyword that a path into a schema may hold."""

FORMATS = {
    "date-time": "",
    "date": "",
    "time": "",
    "duration": "",
    "email": "",
    "hostname": "loose: of labels that begin with xn-- not what they encode",
    "ipv4": "",
    "ipv6": "",
    "uuid": "",
    "uri": "",
}
"""The values of ``format`` that are enforced for strings, and what each lets through all the same."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_LEAP_SECOND = r"23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00)$"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"
_LABEL = "(?:[^.]{1,2}|[^.][^.][^-][^.]*|[^.][^.]-|[^.][^.]-[^-][^.]*|[xX][nN]--[^.]*)"

FORMAT_PATTERNS = {
    "date": [_DATE],
    "time": [f"^(?:{_SECOND}|{_LEAP_SECOND})"],
    "date-time": [_DATE, f"[tT](?:{_SECOND}|{_LEAP_SECOND})"],
    "hostname": [rf"^{_LABEL}(?:\.{_LABEL})*$"],
}
"""What is checked beside the library's own pattern: the days of February, a leap second at the end of a day (in UTC
only, where it can be told from the text), labels with two hyphens."""
FORMAT_LENGTHS = {"hostname": 253}

NUMBER_FORMATS = frozenset({"int32", "int64", "uint32", "uint64", "float", "double", "decimal"})
"""OpenAPI's names of number widths. They pass beside a type without strings, and bind nothing: ``format`` is about
strings in the standard."""

OLD_DRAFTS = tuple(f"http://json-schema.org/draft-0{n}/schema" for n in (3, 4, 6, 7))
"""Drafts in which ``$ref`` hides what stands beside it."""
