"""Renderer.beginning: where the rows of a prompt's system prompt and tools end, and those of its first user message."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.prepare import _rendered
from stages.hashes import BLOCK, through
from stages.judge import Rules, judge
from stages.prompt import Beginning, common
from stages.refusal import Refusal
from tests.templates import AGENT, CHATML, OPENING, STRICT
from tests.test_prompt import TOKENIZER, WALL, chat, completion, renderer, tokens

MADE = {template: renderer(template) for template in (CHATML, AGENT, OPENING, STRICT)}
SYSTEM = {"role": "system", "content": "You are a helper."}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def found(template: str, *messages: dict[str, str], **fields: object) -> tuple[str, str]:
    """The texts of the two beginnings."""
    request = chat(*messages, **fields)
    ids = tokens(MADE[template], request)
    made = MADE[template].beginning(request, ids, WALL)
    head, opening = (TOKENIZER.decode(ids[:rows], skip_special_tokens=False) for rows in (made.head, made.opening))
    return head, opening


@pytest.mark.parametrize("template", [CHATML, AGENT, OPENING])
def test_the_beginnings_of_a_conversation(template: str) -> None:
    """M3, M11: the head ends where the first user message begins, the opening where that one ends."""
    talk = [SYSTEM, {"role": "user", "content": "first"}, {"role": "assistant", "content": "said"}]
    for messages in (talk[:2], [*talk, {"role": "user", "content": "second"}]):
        head, opening = found(template, *messages)
        assert head == "<|im_start|>system\nYou are a helper.<|im_end|>\n<|im_start|>user\n"
        assert opening == head + "first<|im_end|>\n"


def test_tools_are_of_the_head() -> None:
    """M11: offered tools stand before the first message, wherever the template writes them."""
    for template in (CHATML, AGENT):
        head, opening = found(template, SYSTEM, {"role": "user", "content": "first"}, tools=[TOOL])
        assert "find" in head and "first" not in head and opening == head + "first<|im_end|>\n"


def test_what_has_no_beginning() -> None:
    """M3: a completion, and a conversation without a user, say nothing of one."""
    for request in (completion("Once upon a time"), chat(SYSTEM)):
        assert MADE[CHATML].beginning(request, tokens(MADE[CHATML], request), WALL) == Beginning()


def test_a_template_that_takes_no_part_of_it() -> None:
    """M3: where the beginning alone is not rendered nobody knows where it ends."""
    demanding = "{% if messages | length < 3 %}{{ raise_exception('more') }}{% endif %}" + CHATML
    made = renderer(demanding)
    said = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    request = chat(*said)
    assert made.beginning(request, tokens(made, request), WALL) == Beginning()


words = st.text("ab <|im_end|>\n", max_size=12)
turns = st.lists(words, max_size=3)


@given(st.sampled_from(sorted(MADE)), words, words, turns, turns, st.booleans())
def test_a_conversation_is_known_by_its_opening(
    template: str, system: str, first: str, one: list[str], other: list[str], headed: bool
) -> None:
    """M3: two turns of a conversation have the rows of the opening in common, and it is the same in both."""

    def messages(rest: list[str]) -> list[dict[str, str]]:
        head = [{"role": "system", "content": system}] if headed else []
        said = [{"role": "user", "content": first}]
        for text in rest:
            said += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": text}]
        return head + said

    asked = [chat(*messages(rest)) for rest in (one, other)]
    ids = [tokens(MADE[template], request) for request in asked]
    made = [MADE[template].beginning(request, prompt, WALL) for request, prompt in zip(asked, ids, strict=True)]
    assert made[0] == made[1] and 0 <= made[0].head <= made[0].opening <= common(*ids)


def test_where_it_ends_is_worked_out_where_there_are_side_slots() -> None:
    """M3: with one slot nobody asks; with more the opening's hash is told with its rows."""
    rules = Rules(model="m")
    body = json.dumps({"messages": [SYSTEM, {"role": "user", "content": "x" * 300}]}).encode()
    judged = judge("chat", body, rules)
    alone, beside = (_rendered(MADE[CHATML], judged, WALL, b"salt", sides) for sides in (False, True))
    assert not isinstance(alone, Refusal) and not isinstance(beside, Refusal)
    [one], [other] = alone, beside
    assert (one.beginning, one.first) == (Beginning(), b"")
    assert BLOCK < other.beginning.opening < len(other.tokens) and 0 < other.beginning.head < BLOCK
    assert other.first == through(other.tokens, other.beginning.opening, other.hashes, b"salt")
    assert (one.tokens, one.hashes) == (other.tokens, other.hashes)
