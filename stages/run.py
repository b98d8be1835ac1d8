"""What a request asks of one run, put together: for the engine how it decodes, for the text stage how it is read.

Knows which reader says what. What it does not: the prompt's tokens, slots and run numbers.
"""

from __future__ import annotations

import msgspec

from engine.protocol import Grammar, Sampling
from engine.protocol import Thinking as Bounds
from stages import judge, offer
from stages.clients import Client
from stages.constraint import Constraint, either, forced, wish
from stages.judge import Ending, Rules
from stages.refusal import Refusal
from stages.schema import ChatRequest, Request
from stages.side_lane import recognised
from stages.text import Reading
from stages.thinking import Thinking


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's run but for its prompt. ``alternatives``: that each token's log-probability comes with, -1: none."""

    sampling: Sampling
    ending: Ending
    thinking: Bounds = Bounds()
    grammar: Grammar | None = None
    reading: Reading = Reading()
    alternatives: int = -1


class Caller(msgspec.Struct, frozen=True):
    """What is known of who asks. ``format``: where its kind reads thinking, "" where that decides nothing (row Q2)."""

    kind: str = "other"
    side: str = ""
    format: str = ""


def constraint(request: Request) -> Constraint | Refusal | None:
    """What binds the answer: a call that is asked for, a call or a document (D5b), or the document alone."""
    document = wish(request)
    if isinstance(document, Refusal):
        return document
    tools, choice = offer.offered(request) or [], offer.chosen(request)
    many = offer.parallel(request)
    if isinstance(choice, dict):
        return forced(tools, choice["function"]["name"], many)
    if choice == "required":
        return forced(tools, None, many)
    return either(document, tools, many) if document is not None and tools else document


def run(
    request: Request, thinking: Thinking, state: str, grammar: Grammar | None, rules: Rules, seed: int, caller: Caller
) -> Run:
    """The run of one prompt whose thinking is in ``state``; ``seed`` where the client sent none.

    Under a plan a recognised side request is written greedily (rows K3, C5).
    """
    sampling = judge.sampling(request, seed)
    if rules.plan and recognised(Client(caller.kind, caller.side)):
        sampling = msgspec.structs.replace(sampling, temperature=0.0, top_p=1.0)
    return Run(
        sampling=sampling,
        ending=judge.ending(request),
        thinking=judge.budget(request, thinking, rules, state),
        grammar=grammar,
        reading=reading(request, state, rules, caller),
        alternatives=judge.logprobs(request),
    )


def state_of(state: str, bound: bool, thinks: bool) -> str:
    """The state of the thinking. A checkpoint that knows no tags is not led into a block by what binds its answer."""
    return "off" if bound and state == "may" and not thinks else state


def reading(request: Request, state: str, rules: Rules, caller: Caller) -> Reading:
    """How the answer is read.

    A completion's text is what the model wrote, its thinking too: the client wrote the whole prompt. Only where it
    names another format, or asks for an answer of a form, the thinking is left out: that route has no field for it.
    """
    structured = judge.structured(request)
    if not isinstance(request, ChatRequest):
        named = judge.shape_of(request, msgspec.structs.replace(rules, reasoning_format="tags"))
        plain = named == "tags"
        return Reading(
            stops=judge.stops(request), shape="tags" if plain else "hidden", state="off" if plain else state,
            plan=rules.plan and not plain,
        )  # fmt: skip
    tools = offer.offered(request)
    if not tools:  # what looks like a call is part of a document that was asked for
        tools = [] if rules.plan and not structured else None
    return Reading(
        stops=judge.stops(request),
        shape=judge.shape_of(request, rules, caller.format),
        state=state,
        tools=tools,
        parallel=offer.parallel(request),
        bare=not structured,  # beside a form, JSON outside of tags is the document
        plan=rules.plan,
        blank_line=rules.plan and caller.kind == "open-webui" and bool(request.stream),
    )
