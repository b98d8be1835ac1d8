"""Section C as tests: every row in both directions, then what must hold for any JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import thinking
from stages.compat import FIELDS
from stages.refusal import Refusal
from stages.thinking import Defaults, Thinking, read
from tests.captures import captured
from tests.test_refusal import error_bytes
from tests.test_schema import values

# Written out again, as the specification has it: the stage's own tables are what is tested.
_NUMBERS = """
max_reasoning_tokens thinking_budget chat_template_kwargs.thinking_budget thinking_token_budget
reasoning.max_tokens thinking.budget_tokens thinking_budget_tokens reasoning_budget
thinking_config.thinking_budget thinkingConfig.thinkingBudget extra_body.google.thinking_config.thinking_budget
extra_body.google.thinkingConfig.thinkingBudget nvext.max_thinking_tokens reasoning_budget_tokens
max_thinking_tokens reasoning_tokens custom_params.thinking_budget chat_template_kwargs.thinking_token_budget
"""
NUMBERS = _NUMBERS.split()
_WORDS = """
reasoning_effort reasoning.effort chat_template_kwargs.reasoning_effort output_config.effort think
thinking_config.thinking_level thinkingConfig.thinkingLevel extra_body.google.thinking_config.thinking_level
extra_body.google.thinkingConfig.thinkingLevel
"""
WORDS = _WORDS.split()
GEMINI = [path for path in NUMBERS if "onfig" in path]
MINUS_ONE = ["thinking_token_budget", "thinking_budget_tokens", "reasoning_budget", "reasoning_budget_tokens", *GEMINI]
ZERO_CLOSES = [*MINUS_ONE, "nvext.max_thinking_tokens", "max_thinking_tokens", "custom_params.thinking_budget"]
_BOOLEANS = """
chat_template_kwargs.enable_thinking enable_thinking chat_template_args.enable_thinking
chat_template_kwargs.thinking reasoning.enabled reasoning.enable think
"""
BOOLEANS = _BOOLEANS.split()
CAPS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576, "xhigh": 32768, "max": None, "ultra": None}
OFF = Defaults(thinking="off")
ALL = (Defaults(), OFF, Defaults(thinking="on"), Defaults(budget=77), Defaults(effort="none"))


def paths(at):
    fields = {}
    for path, value in at.items():
        *outer, name = path.split(".")
        place = fields
        for step in outer:
            place = place.setdefault(step, {})
        place[name] = value
    return fields


def got(at, defaults=thinking.DEFAULTS):
    result = read(paths(at), defaults)
    assert isinstance(result, Thinking), result
    return result


def refused(at):
    result = read(paths(at))
    assert isinstance(result, Refusal), result
    assert result.param in result.text and error_bytes(result) < 2048
    return result.code, result.param


# -- C0: the default, and who wins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defaults", "on", "cap"),
    [
        (Defaults(), None, None),
        (Defaults(thinking="on"), True, None),
        (Defaults(thinking="off"), False, None),
        (Defaults(thinking="off", budget=9), False, None),
        (Defaults(effort="low"), None, 1024),
        (Defaults(effort="low", budget=9), None, 9),
        (Defaults(effort="auto"), None, None),
        (Defaults(effort="none"), False, None),
        (Defaults(thinking="on", effort="none"), True, None),
        (Defaults(effort="low", caps={"low": 5}), None, 5),
    ],
)
def test_default(defaults, on, cap):
    """C0: nothing said is the server's default, and nothing was asked (C4); null and strangers say nothing."""
    nothing = read({}, defaults)
    assert nothing == Thinking(on, cap)
    strangers = {"mine": 5, "reasoning": {"exclude": True, "summary": "auto"}, "extra_body": {"mine": 1}}
    assert read(strangers, defaults) == nothing
    assert read(paths(dict.fromkeys([*NUMBERS, *WORDS, *BOOLEANS, "thinking.type"])), defaults) == nothing
    assert read(dict.fromkeys(thinking.TOP), defaults) == nothing


@pytest.mark.parametrize("path", BOOLEANS)
@pytest.mark.parametrize("defaults", ALL)
def test_switch(path, defaults):
    """C0: every switch works in both directions whatever the default, and alone asks for no budget (C4)."""
    for value, on in ((True, True), ("true", True), (False, False), ("false", False)):
        result = got({path: value}, defaults)
        assert (result.on, result.asked, result.source, result.switch) == (on, False, path, path)


@pytest.mark.parametrize("defaults", ALL)
def test_type(defaults):
    """C0: ``thinking.type``, enabled and adaptive on, disabled off."""
    for word, on in (("enabled", True), ("adaptive", True), ("disabled", False)):
        result = got({"thinking.type": word, "thinking.display": "omitted"}, defaults)
        assert (result.on, result.switch) == (on, "thinking.type")


def test_default_off():
    """C0: with the default off a number, 0 too, or a word that is no off word turns it on; with auto likewise."""
    for path in NUMBERS:
        for count in (5, 0):
            assert got({path: count}, OFF).on is got({path: count}).on is True
    for path in WORDS:
        for word in CAPS:
            assert got({path: word}, OFF).on is got({path: word}).on is True
        for word in ("auto", "default", "on"):
            assert (got({path: word}, OFF).on, got({path: word}, OFF).switch) == (True, path)
            assert got({path: word}, Defaults(thinking="off", effort="low")).cap == 1024
        for word in ("none", "off"):
            assert got({path: word}, OFF).on is False


def test_precedence():
    """C: the template's switch, then the top-level one, then any off form, then any on form."""
    template, top = "chat_template_kwargs.enable_thinking", "enable_thinking"
    for value in (True, False):
        assert got({template: value, top: not value}).on is value
        others = dict.fromkeys(BOOLEANS[2:], not value)
        assert got({top: value, "thinking.type": "disabled" if value else "enabled", **others}).on is value
    for off in [*BOOLEANS[2:], "thinking.type"]:
        on = dict.fromkeys(BOOLEANS[2:], True) | {"thinking.type": "enabled", "thinking_budget": 5}
        result = got({**on, off: "disabled" if off == "thinking.type" else False})
        assert (result.on, result.cap, result.switch) == (False, None, off)


def test_switch_names_the_strongest():
    """C0: a form before an amount, an amount before a 0: what a refusal names, and what K1 tells apart."""
    fields = {"thinking_budget": 0, "reasoning_effort": "low", "reasoning_budget": 5, "think": True}
    for switch in ("think", "reasoning_budget", "reasoning_effort", "thinking_budget"):
        assert (got(fields).switch, got(fields).source) == (switch, next(iter(fields)))
        del fields[switch]


# -- C1 and the words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORDS)
def test_words(path):
    """C1: every word at every place, its cap, and that a budget was asked for (C4)."""
    for word, cap in CAPS.items():
        assert got({path: word}) == Thinking(True, cap, True, path, "", path)
    for word in ("none", "off"):
        assert got({path: word}) == Thinking(False, None, True, path, "", path)
    for word in ("auto", "default", "on"):
        for defaults, on, cap in ((Defaults(), None, None), (Defaults(thinking="on", budget=7), True, 7)):
            assert got({path: word}, defaults) == Thinking(on, cap, True, path)


def test_effort_caps():
    """C1: ``--effort-caps`` changes the numbers it names and no other; 0 is no cap."""
    defaults = Defaults(caps={"low": 9, "max": 50, "high": 0})
    caps = [got({"reasoning_effort": word}, defaults).cap for word in CAPS]
    assert caps == [512, 9, 8192, None, 32768, 50, None]


def test_every_word_is_known():
    """C1: twelve words, and a refusal lists them all."""
    assert sorted(thinking.EFFORTS) == sorted([*CAPS, "none", "off", "auto", "default", "on"])
    text = read({"reasoning_effort": 0.35}).text
    assert all(word in text for word in thinking.EFFORTS)


@pytest.mark.parametrize("path", WORDS)
@pytest.mark.parametrize("word", ["", "LOW", "adaptive", "enabled", "very high", "x" * 9000, "é" * 9000])
def test_unknown_word(path, word):
    """C: an unknown word is a 400 naming the field."""
    assert refused({path: word}) == ("invalid_value", path)


@pytest.mark.parametrize("path", WORDS)
@pytest.mark.parametrize("value", [5, 0.35, 0, True, False, [], {}, ["low"]])
def test_word_of_a_wrong_type(path, value):
    """C: so is a number or a boolean where a word belongs; only ``think`` is a boolean too."""
    if path != "think" or not isinstance(value, bool):
        assert refused({path: value}) == ("invalid_type", path)


def test_order_of_words():
    """C: words 1 to 6: the first that is there gives the cap."""
    fields = dict.fromkeys(WORDS, "low")
    for path in WORDS:
        fields[path] = "high"
        assert (got(fields).cap, got(fields).source) == (24576, path)
        del fields[path]


# -- C2: off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning.enabled": False},
        {"reasoning.enable": False},
        {"reasoning.effort": "none"},
        {"thinking.type": "disabled"},
        {"think": False},
        {"chat_template_kwargs.thinking": False},
        {"chat_template_args.enable_thinking": False},
        {"reasoning_effort": "none", "think": False},
    ],
)
@pytest.mark.parametrize("defaults", ALL)
def test_off(fields, defaults):
    """C2: every off form, whatever the default, also beside words and numbers."""
    assert got(fields, defaults).on is False
    assert got({"thinking_budget": 5, "output_config.effort": "high", **fields}, defaults).on is False


@pytest.mark.parametrize("path", WORDS)
@pytest.mark.parametrize("switch", ["enable_thinking", "chat_template_kwargs.enable_thinking"])
def test_on_beside_an_off_word(path, switch):
    """C2: ``enable_thinking: true`` beside an off word: it thinks, and the word gives no cap."""
    for defaults in (Defaults(), Defaults(budget=7)):
        assert got({switch: True, path: "none"}, defaults) == Thinking(True, None, True, path, "", switch)
    assert got({switch: True, path: "none", "thinking_budget": 5}).cap == 5


# -- the numbers, C7 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NUMBERS)
def test_numbers(path):
    """C: every number at its place; 1024.0 is 1024."""
    for value in (1, 1024, 1024.0, 10**30):
        assert got({path: value}) == Thinking(True, int(value), True, path, "", path)


@pytest.mark.parametrize("path", NUMBERS)
def test_malformed_number(path):
    """C: a wrong type or a negative is a 400 naming the field."""
    for value in (True, False, 1024.5, float("inf"), "1024", "true", "low", [], {}, [5]):
        assert refused({path: value}) == ("invalid_type", path)
    for value in (-2, -2.0, -(10**30)):
        assert refused({path: value}) == ("invalid_value", path)


@pytest.mark.parametrize("path", NUMBERS)
def test_minus_one(path):
    """C7: -1 is no cap where the shape's own documentation says so, a 400 elsewhere."""
    for defaults in (Defaults(), Defaults(budget=9, budget_zero="as-documented")):
        if path in MINUS_ONE:
            assert got({path: -1}, defaults) == Thinking(True, None, True, path, f"{path}: -1 read as no cap", path)
            assert got({path: -1.0}, defaults) == got({path: -1}, defaults)
        else:
            assert refused({path: -1}) == ("invalid_value", path)


@pytest.mark.parametrize("path", NUMBERS)
def test_zero(path):
    """C7: 0 is no cap and counts as asking (C4); as documented it closes at once where the shape's server says so."""
    for value in (0, 0.0, -0.0):
        result = got({path: value}, Defaults(budget=9))
        assert result == Thinking(True, None, True, path, f"{path}: 0 read as no cap", path)
    documented = got({path: 0}, Defaults(budget_zero="as-documented"))
    assert documented.cap == (0 if path in ZERO_CLOSES else None)
    assert ("close at once" in documented.note) == (path in ZERO_CLOSES)


@pytest.mark.parametrize("path", WORDS)
def test_effort_for_a_template(path):
    """C1: the first word that says how much; no other is an amount."""
    for word in thinking.EFFORTS:
        assert thinking.effort(paths({path: word})) == (word if word in CAPS else "")
    assert thinking.effort(paths({path: True, "thinking_budget": 5})) == ""
    assert thinking.effort(paths({"reasoning_effort": "none", path: "low"})) == "low"


def test_order_of_numbers():
    """C: numbers 1 to 15, 9 at four places: the first that is there gives the cap, a 0 too."""
    fields = {path: 100 + index for index, path in enumerate(NUMBERS)}
    for index, path in enumerate(NUMBERS):
        assert (got(fields).cap, got(fields).source) == (100 + index, path)
        assert got({**fields, path: 0}).cap is None
        del fields[path]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_beat_words(number):
    """C: the last number beats the first word, also as 0."""
    for word in WORDS:
        assert got({word: "low", number: 5}).cap == 5
        assert got({word: "low", number: 0}).cap is None


# -- shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*BOOLEANS, "thinking.type"])
def test_switch_of_a_wrong_type(path):
    """C: a switch is a boolean, ``"true"`` or ``"false"``; ``thinking.type`` a known word."""
    for value in (0, 1, 1.0, [], {}):
        assert refused({path: value}) == ("invalid_type", path)
    expected = "invalid_value" if path in ("think", "thinking.type") else "invalid_type"
    for value in ("", "True", "yes"):
        assert refused({path: value}) == (expected, path)


@pytest.mark.parametrize("path", thinking.CONTAINERS)
def test_container_of_a_wrong_type(path):
    """C: what should hold fields must be an object; null is absent."""
    for value in ("low", 5, True, []):
        assert refused({path: value}) == ("invalid_type", path)
    assert got({path: {}}) == got({path: None}) == Thinking()


def test_a_loser_is_checked_too():
    """C: a malformed field is a 400 also where another field would win."""
    assert refused({"thinking_budget": 5, "reasoning_tokens": -1}) == ("invalid_value", "reasoning_tokens")
    assert refused({"enable_thinking": False, "reasoning_effort": "hgih"}) == ("invalid_value", "reasoning_effort")


def test_the_tables():
    """C: the stage's tables are the specification's, and every field of theirs stands in the field table (A4)."""
    assert [number.path for number in thinking.NUMBERS] == NUMBERS
    assert list(thinking.WORDS) == WORDS
    assert sorted(thinking.SWITCHES) == sorted([*BOOLEANS, "thinking.type"])
    for fields in FIELDS.values():
        assert set(thinking.ROWS) <= set(fields)


# -- any JSON ----------------------------------------------------------------------------------------------------

LEAVES = [*NUMBERS, *WORDS, *BOOLEANS, "thinking.type"]
likely = st.sampled_from(
    [None, True, False, "true", "none", "off", "low", "high", "on", "enabled", "disabled", 0, 5, -1]
)
shapes = st.dictionaries(st.sampled_from(LEAVES), likely | values, max_size=6).map(paths)
wild = st.dictionaries(st.sampled_from(thinking.TOP) | st.text(max_size=5), values, max_size=6)
defaults_ = st.builds(
    Defaults,
    thinking=st.sampled_from(["auto", "on", "off"]),
    effort=st.sampled_from(thinking.EFFORTS),
    budget=st.integers(0, 9),
    caps=st.dictionaries(st.sampled_from(thinking.EFFORTS), st.integers(0, 9), max_size=3),
    budget_zero=st.sampled_from(["no-cap", "as-documented"]),
)


@given(shapes | wild, defaults_)
def test_any_json(fields, defaults):
    """C: whatever a body holds there is one reading or a refusal that names a field of the table."""
    result = read(fields, defaults)
    if isinstance(result, Refusal):
        assert result.code in ("invalid_type", "invalid_value") and result.param in thinking.ROWS
        assert error_bytes(result) < 2048
        return
    assert result.on in (True, False, None)
    assert result.cap is None or (result.cap >= 0 and result.on is not False)
    assert {result.source, result.switch} <= {"", *LEAVES}
    assert result.source or not result.asked


def turned(value):
    """The same JSON with every object's keys in the opposite order."""
    return {key: turned(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


@given(shapes | wild, defaults_)
def test_key_order(fields, defaults):
    """C: order is the table's, never the body's."""
    assert read(fields, defaults) == read(turned(fields), defaults)


good_words = st.dictionaries(st.sampled_from(WORDS), st.sampled_from(thinking.EFFORTS), max_size=4)
good_numbers = st.dictionaries(st.sampled_from(NUMBERS), st.integers(0, 9), min_size=1, max_size=4)


@given(good_words, good_numbers, defaults_)
def test_words_never_move_a_number(words, numbers, defaults):
    """C: beside a number no word changes the cap while it thinks."""
    thinks = {"enable_thinking": True}
    alone, beside = got({**numbers, **thinks}, defaults), got({**words, **numbers, **thinks}, defaults)
    assert alone == beside


@given(good_words, st.dictionaries(st.sampled_from(NUMBERS), st.integers(0, 9), max_size=4), defaults_)
def test_an_off_form_wins(words, numbers, defaults):
    """C2: with any off form and no ``enable_thinking`` it does not think."""
    for off in BOOLEANS[2:6]:
        assert got({**words, **numbers, off: False}, defaults).on is False


def test_captured():
    """C: every captured body of a real client is read without a refusal."""
    seen = set()
    for _route, file, sent in captured():
        result = read(sent)
        assert isinstance(result, Thinking), (file, result)
        seen.add((result.on, result.cap))
    assert {(False, None), (True, 512), (True, 1024), (True, 24576), (True, 32768), (None, None)} <= seen
