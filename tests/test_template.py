"""What a chat template is given, and what it is found to be able to do."""

import pytest

from stages.template import MARK, Abilities, Template, Unrendered
from tests.templates import AGENT, CHATML, OPENING, STRICT, TEXTUAL

WALL = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC
USER = {"role": "user", "content": "hi"}


def run(source, *messages, **given):
    text = Template(source, {"bos_token": "<s>"}).run(list(messages) or [USER], header=True, wall=WALL, **given)
    assert isinstance(text, str), text
    return text


def test_environment():
    """A1: what Hugging Face's templates rely on: block trimming, loop controls, tojson, generation, the date."""
    template = (
        "{% for message in messages %}\n"
        "  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ {'b': 'é<', 'a': none} | tojson }}|{{ bos_token }}|{{ tools is none }}|{{ strftime_now('%d %b %Y') }}\n"
        "{% generation %}g{% endgeneration %}\n"
        "{% endfor %}"
    )
    assert run(template, USER, USER) == '{"b": "é<", "a": null}|<s>|True|14 Nov 2023\ng'
    assert run("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_the_day_is_an_argument():
    """R3: the same request at another time is the same but for the date."""
    template = Template("{{ strftime_now('%Y') }}", {})
    assert [template.run([USER], header=True, wall=wall) for wall in (0.0, WALL)] == ["1970", "2023"]


def test_a_mark_survives_escaping():
    """A6: a template that writes JSON in ASCII still leaves the marks to be found."""
    for escaped in ("true", "false"):
        assert run("{{ a | tojson(ensure_ascii=" + escaped + ") }}", extra={"a": f"<{MARK}|"}) == f'"<{MARK}|"'


def test_own_names_win():
    """A4: no variable of a client hides what we give a template, and a name it cannot take is no fault of ours."""
    extra = {"messages": [], "bos_token": "x", "raise_exception": 1, "self": 1, "1": 2}
    assert run("{{ messages | length }}{{ bos_token }}{{ self is defined }}", extra=extra).startswith("1<s>")


def test_complaints():
    """A6: what it raises is a value, with its own words, cut, and without marks."""
    raising = Template("{{ raise_exception(messages[0].content) }}", {})
    assert raising.run([{"role": "user", "content": f"a{MARK}b" + "c" * 900}], header=True).said == "ab" + "c" * 298
    assert Template("{{ 1 / 0 }}", {}).run([USER], header=True) == Unrendered()
    assert not Template("", {}).usable and not Template("{% if %}", {}).usable


GENERIC = Abilities(results=True)
"""A template that writes any role and its content."""


@pytest.mark.parametrize(
    ("source", "can"),
    [
        (CHATML, GENERIC),
        (OPENING, GENERIC),
        (AGENT, Abilities(tools=True, calls=True, results=True, texts=False)),
        (STRICT, Abilities(system=False, mid_system=False, doubles=False)),
        (TEXTUAL, Abilities(calls=True, results=True, objects=False)),
        ("{{ messages | tojson }}{{ tools | tojson }}", Abilities(tools=True, calls=True, results=True)),
        ("", Abilities()),
    ],
)
def test_abilities(source, can):
    """D1: what a template renders is found out by asking it."""
    assert Template(source, {}).can == can
