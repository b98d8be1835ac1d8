import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stages.compat import FIELDS, RESERVED
from stages.judge import OUTPUTS
from stages.refusal import KNOWN, clipped, joined, masked, quoted, refuse
from stages.schema import ChatRequest, CompletionRequest, FunctionCall, Message, Part, Tool, ToolCall, ToolFunction


def error_bytes(refusal):
    error = {"message": refusal.text, "type": "invalid_request_error", "param": refusal.param, "code": refusal.code}
    return len(msgspec.json.encode({"error": error}))


@given(st.text(max_size=5000), st.text(max_size=5000))
def test_size(text, param):
    """A9: an error is at most 2 KB, whatever a client put into it."""
    assert error_bytes(refuse("missing_required_parameter", param, text)) <= 2048


def test_worst_size():
    """A9: control characters, six bytes each in JSON."""
    assert error_bytes(refuse("missing_required_parameter", "\x01" * 9000, "\x01" * 9000)) <= 2048


def test_short_texts_stay():
    """A9: only what is too long is cut."""
    assert clipped("temperature must be between 0 and 2.", 100) == "temperature must be between 0 and 2."
    assert quoted("x" * 80) == "'" + "x" * 80 + "'"
    assert quoted("x" * 81) == "'" + "x" * 80 + "…'"


def test_masked():
    """P1: known names and indices stay, any other name is a star."""
    assert masked("messages[0].role") == "messages[0].role"
    assert masked("messages[12].content[3].text") == "messages[12].content[3].text"
    assert masked("chat_template_kwargs.my_secret") == "chat_template_kwargs.*"
    assert masked("tools[2].function.parameters.properties.ssn") == "tools[2].function.parameters.properties.*"
    assert masked("secret[12345678]") == "*[*]"
    assert masked(None) == masked("") == ""


def test_masked_schema():
    """P1: of a path into a schema the keywords stay, and no name of the client's does, whatever it spells."""
    at = "response_format.json_schema.schema"
    assert masked(f"{at}.properties.ssn.items.pattern") == f"{at}.properties.*.items.pattern"
    assert masked(f"{at}.properties.role.pattern") == f"{at}.properties.*.pattern"
    assert masked(f"{at}.properties.properties.properties.x") == f"{at}.properties.*.properties.*"
    assert masked(f"{at}.$defs.type.anyOf[2].uniqueItems") == f"{at}.$defs.*.anyOf[2].uniqueItems"
    for field in ("json", "regex", "choice"):
        assert masked(f"structured_outputs.{field}") == f"structured_outputs.{field}"
    assert masked("tools[0].function.strict") == "tools[0].function.strict"
    assert masked("logit_bias.role") == "logit_bias.*"


def test_names_with_other_signs():
    """P1: a name that looks like steps of a path is one step, to the client as it wrote it, to a log a star."""
    for name in ("a.role", "pin[1234]", 'say "type"]', "]", "", "über mich", "a\\", "x\ny"):
        path = "guided_json" + joined("properties", name, "pattern")
        assert masked(path) == "guided_json.properties.*.pattern"
    assert joined("über", 3, "a b") == '.über[3]["a b"]'
    long = refuse("unsupported_schema", "guided_json" + joined("properties", "role.type " * 99), "no").param
    assert masked(long) == "guided_json.properties.*"


@given(st.text(alphabet='ab.[]1 "\\messages', max_size=40))
def test_masked_holds_no_stranger(param):
    """P1: what is left is names of ours, short indices, stars and punctuation."""
    for word in masked(param).replace("[", ".").replace("]", ".").split("."):
        assert word in KNOWN or word in ("", "*") or (word.isdigit() and len(word) <= 6)


def test_every_field_is_known():
    """P1: no field of ours shows as a star."""
    names = {name for fields in FIELDS.values() for path in fields for name in path.split(".")}
    for struct in (ChatRequest, CompletionRequest, FunctionCall, Message, Part, Tool, ToolCall, ToolFunction):
        names |= {field.encode_name for field in msgspec.structs.fields(struct)}
    names |= RESERVED | set(OUTPUTS)
    assert sorted(names - KNOWN) == []
