"""The side lane's rules by themselves: kinds, limits, pace; and what a request is made of under a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.clients import NEVER_NOTED, RECOGNISED, SIDES, Client
from stages.judge import Judged, Rules, judge
from stages.run import Caller, run
from stages.side_lane import (
    PATIENCE_S,
    RAW,
    ROUNDS,
    SHARE,
    SIDE,
    SPAN_S,
    Bounds,
    Moment,
    cap,
    kind,
    paced,
    quiet,
    recent,
    short,
    taken,
)
from stages.thinking import SWITCHES, Thinking

TITLE = "### Task:\nGenerate a concise, 3-5 word title for the chat."
clients = st.builds(Client, st.sampled_from(["open-webui", "hermes", *NEVER_NOTED]), st.sampled_from(["", *SIDES]))
bounds = st.builds(
    Bounds, st.sampled_from(["on", "decode", "off"]), st.integers(1, 3_000), st.integers(1, 100), st.integers(1, 300)
)


def judged(text: str = TITLE, plan: bool = True, **fields: Any) -> Judged:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    verdict = judge("chat", json.dumps(body).encode(), Rules(plan=plan))
    assert verdict.refusal is None
    return verdict


@given(clients, st.integers(0, 40_000), st.booleans(), st.booleans(), st.integers(0, 2), st.integers(1, 3))
def test_which_requests_are_of_the_lane(
    client: Client, asked: int, thinks: bool, plan: bool, images: int, choices: int
) -> None:
    """K1: one choice, no images, no thinking; recognised whatever its limit, raw only where it has one of its own."""
    got = kind(client, asked=asked, thinks=thinks, plan=plan, images=images, choices=choices)
    if thinks or images or choices > 1:
        assert got == ""
    elif client.side in RECOGNISED:
        assert got == SIDE
    elif plan and client.kind not in NEVER_NOTED:
        assert got == ""
    else:
        assert got == (RAW if asked else "")


@pytest.mark.parametrize("side", ["compaction", "mixture", "review", "image-prompt"])
def test_long_side_requests_are_never_of_the_lane(side: str) -> None:
    """K1: never compaction, mixture of answers or review, whoever sends it, but as a raw request with a small limit."""
    assert kind(Client("hermes", side), asked=16, thinks=False, plan=True) == ""
    assert kind(Client("other", side), asked=0, thinks=False, plan=True) == ""


@given(st.sampled_from(["", RAW, SIDE]), st.integers(1, 4_000), st.integers(0, 400), bounds)
def test_what_is_short(lane: str, prompt: int, asked: int, limits: Bounds) -> None:
    """K1: the prompt's limit holds for all, that of the output for raw ones; the cap is never over either limit."""
    ok = short(lane, prompt, asked, limits)
    assert ok == (lane != "" and prompt <= limits.prompt and (lane == SIDE or 1 <= asked <= limits.tokens))
    if ok and lane == RAW:
        assert cap(lane, asked, limits) == asked
    if ok:
        assert 1 <= cap(lane, asked or 5_000, limits) <= max(limits.tokens, limits.side_tokens)


def test_the_flags_defaults() -> None:
    """K1: 2,048 prompt tokens, 64 raw ones out, 192 of a recognised one."""
    assert short(RAW, 2_048, 64, Bounds()) and not short(RAW, 2_049, 64, Bounds()) and not short(RAW, 10, 65, Bounds())
    assert short(SIDE, 2_048, 32_000, Bounds()) and short(SIDE, 10, 0, Bounds())
    assert (cap(SIDE, 32_000, Bounds()), cap(SIDE, 4, Bounds()), cap(RAW, 16, Bounds())) == (192, 4, 16)


@given(st.sampled_from(["", "prefilling", "decoding"]), st.integers(0, 20), st.floats(0, 20), st.floats(0, 20), bounds)
def test_the_pace(holder: str, rounds: int, taken_s: float, waited_s: float, limits: Bounds) -> None:
    """K2: never more guests than the pace allows; nothing but the share is waived, by patience alone."""
    moment = Moment(holder, rounds, taken_s, waited_s)
    ok = paced(moment, limits)
    allowed = {"on": ("prefilling", "decoding"), "decode": ("decoding",), "off": ()}[limits.mode]
    assert ok == (holder in allowed and rounds >= ROUNDS and (taken_s <= SHARE * SPAN_S or waited_s >= PATIENCE_S))
    if ok:
        assert paced(Moment(holder, rounds + 1, 0.0, waited_s), limits)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20), st.floats(0, 50))
def test_time_taken_is_that_of_the_last_seconds(gaps: list[tuple[float, float]], later: float) -> None:
    """K2: any 20 s: what is longer ago does not count, and forgetting it changes nothing."""
    spans, at = [], 0.0
    for gap, length in gaps:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    now = at + later
    got = taken(spans, now)
    assert 0 <= got <= SPAN_S + 1e-6
    assert taken(recent(spans, now), now) == pytest.approx(got)
    assert taken(spans, now + SPAN_S) == pytest.approx(0.0) or spans[-1][1] > now


def test_time_taken_by_hand() -> None:
    """K2: a span that began before the window counts from its begin."""
    assert taken([(0.0, 3.0), (10.0, 12.0)], 21.0) == pytest.approx(2.0 + 2.0)
    assert recent([(0.0, 1.0), (10.0, 12.0)], 21.0) == [(10.0, 12.0)]


@given(
    clients, st.booleans(), st.sampled_from([None, True, False]), st.sampled_from(["", "reasoning_effort", *SWITCHES])
)
def test_a_plan_turns_thinking_off(client: Client, plan: bool, on: bool | None, switch: str) -> None:
    """K1, Q7: of a recognised side request alone, under a plan alone; an explicit on form wins."""
    before = Thinking(on=on, cap=7, asked=True, switch=switch)
    after = quiet(before, client, plan, True)
    explicit = bool(on) and switch in SWITCHES
    if plan and client.side in RECOGNISED and not explicit:
        assert after.on is False
    else:
        assert after == before


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, False),
        ({"reasoning_effort": "high"}, False),
        ({"think": "high"}, False),
        ({"max_reasoning_tokens": 100}, False),
        ({"enable_thinking": True}, True),
        ({"think": True}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"reasoning": {"enabled": True}}, True),
        ({"enable_thinking": False}, False),
    ],
)
def test_what_wins_over_a_plan(fields: dict[str, Any], on: bool) -> None:
    """K1: a client's on form does, its effort word and its number do not."""
    assert judged(**fields).thinking.on is on


def test_what_a_plan_leaves_alone() -> None:
    """C5: without a plan, and for a turn of a conversation, thinking stays as it was asked for."""
    assert judged(plan=False).thinking.on is None
    assert judged("Hello", reasoning_effort="high").thinking.on is True
    assert judged("You are performing a CONTEXT CHECKPOINT COMPACTION now").thinking.on is None


@given(st.floats(0, 2), st.booleans(), st.sampled_from(["", *SIDES]))
def test_a_side_request_is_written_greedily(temperature: float, plan: bool, side: str) -> None:
    """K3, C5: under a plan a recognised one is; its seed and penalties are the client's, and so is all of any other."""
    verdict = judged("Hello", temperature=temperature, presence_penalty=0.5, seed=3)
    assert verdict.request is not None
    rules = Rules(plan=plan)
    made = run(verdict.request, verdict.thinking, "off", None, rules, 9, Caller("open-webui", side)).sampling
    plain = run(verdict.request, verdict.thinking, "off", None, rules, 9, Caller("open-webui")).sampling
    if plan and side in RECOGNISED:
        assert (made.temperature, made.top_p, made.presence_penalty, made.seed) == (0.0, 1.0, 0.5, 3)
    else:
        assert made == plain
