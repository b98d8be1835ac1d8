"""A body in, a verdict out: ``schema``, ``validate`` and ``compat`` in the order of the request table's guards.

Then the readers: what the engine and the text stages need of a request that was not refused.

That order is bad_json, unknown_model, bad_shape, refused_field; a refusal's code tells which it was (``invalid_json``,
``model_not_found``, ``unsupported_parameter`` for the last, any other for the shape).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.protocol import Sampling
from engine.protocol import Thinking as Bounds
from stages.clients import Client, kind
from stages.compat import refused_field
from stages.constraint import wish
from stages.offer import offered as offered  # with the other readers of a request
from stages.offer import parallel as parallel
from stages.refusal import Refusal
from stages.schema import ChatRequest, Request, parse, shape
from stages.side_lane import quiet
from stages.thinking import TOP, Thinking, boolean, read
from stages.validate import FORMATS, unknown_model, validate
from stages.validate import Rules as Rules  # who calls judge needs it too

LARGEST = (1 << 31) - 1
"""Larger counts mean no more than this one, and the pipe's integers end at 64 bits."""
GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: logits divided by less overflow."""

OUTPUTS = ("json", "json_object", "regex", "choice")
"""The forms inside ``structured_outputs`` (row E1)."""


class Judged(msgspec.Struct, frozen=True):
    """The verdict, one of ``request`` and ``refusal``, and the facts the runner posts. ``max_tokens`` 0: not asked.

    ``thinking``: what the request, the server's defaults and a plan say of it (section C). ``client``: who asks, and
    for what.
    """

    request: Request | None = None
    refusal: Refusal | None = None
    stream: bool = False
    messages: int = 0
    max_tokens: int = 0
    include_usage: bool | None = None
    progress: bool = False
    stops: list[str] = []
    choices: int = 1
    thinking: Thinking = Thinking()
    client: Client = Client("other", "")


class Ending(msgspec.Struct, frozen=True):
    """Which tokens end an answer. ``ignore_eos``: not the checkpoint's own; ``stop_ids``: the client's, in any case.

    Before ``min_tokens`` tokens none of them is chosen.
    """

    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    def all_ids(self, end_ids: list[int]) -> list[int]:
        """The run's stop ids, with a checkpoint's own ``end_ids``."""
        return sorted({*self.stop_ids, *([] if self.ignore_eos else end_ids)})


def judge(route: str, body: bytes, rules: Rules, headers: Mapping[str, str] | None = None) -> Judged:
    """Judge a body of ``route`` ("chat" or "completions"). Never raises for what a client sent."""
    fields = parse(body)
    if isinstance(fields, Refusal):
        return Judged(refusal=fields)
    stranger = unknown_model(fields.get("model"), rules)
    if stranger:
        return Judged(refusal=stranger)
    request = shape(route, fields)
    if isinstance(request, Refusal):
        return Judged(refusal=request)
    thinking = read({name: getattr(request, name) for name in TOP}, rules.thinking)
    malformed = thinking if isinstance(thinking, Refusal) else None
    bound = wish(request)
    unbound = bound if isinstance(bound, Refusal) else None
    refusal = validate(request, rules) or malformed or refused_field(request) or unbound
    client = kind(fields, headers or {})
    wished = Thinking() if isinstance(thinking, Refusal) else quiet(thinking, client, rules.plan, request.think)
    return _judged(request, refusal, wished, client)


def sampling(request: Request, seed: int) -> Sampling:
    """How the engine chooses tokens: OpenAI's defaults, ``top_p`` 0 read as greedy, ``seed`` where none was sent."""
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if top_p == 0 or temperature < GREEDY_BELOW:
        temperature, top_p = 0.0, 1.0
    return Sampling(
        temperature=temperature,
        top_k=min(max(request.top_k or 0, 0), LARGEST),
        top_p=top_p,
        min_p=request.min_p or 0.0,
        seed=seed if request.seed is None else request.seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias={int(token): float(bias) for token, bias in (request.logit_bias or {}).items() if bias},
    )


def ending(request: Request) -> Ending:
    """Which tokens end the answer."""
    ids = tuple(request.stop_token_ids or ())
    return Ending(bool(request.ignore_eos), ids, min(request.min_tokens or 0, LARGEST))


def logprobs(request: Request) -> int:
    """How many alternatives each token's log-probability is to come with; -1: none is wanted (row F7)."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    asked = request.logprobs
    return -1 if asked is None or isinstance(asked, bool) else asked


def max_tokens(request: Request) -> int:
    """The output limit the client asked for, 0 when it asked for none; ``max_completion_tokens`` wins."""
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return min(asked or 0, LARGEST)


def stops(request: Request) -> list[str]:
    """The stop strings."""
    return [request.stop] if isinstance(request.stop, str) else list(request.stop or [])


def choices(request: Request) -> int:
    """How many answers to each prompt (row F11)."""
    return request.n or 1


def structured(request: Request) -> bool:
    """Whether the answer is bound to a form, in whichever of row E1's fields."""
    form, outputs = request.response_format or {}, request.structured_outputs or {}
    asked = (request.guided_json, request.guided_regex, request.guided_choice, *map(outputs.get, OUTPUTS))
    return form.get("type") not in (None, "text") or any(value not in (None, False) for value in asked)


def shape_of(request: Request, rules: Rules, by_kind: str = "") -> str:
    """Where the thinking goes: ``tags``, ``reasoning_content``, ``both`` or ``hidden``.

    A wish to hide it, then a format the request names, then what a structured answer needs (row B8), then the format
    of its client's kind (``by_kind``, row Q2), then the server's. ``auto`` names none.
    """
    inside = request.reasoning.get("exclude") if isinstance(request.reasoning, dict) else None
    if boolean(request.include_reasoning) is False or boolean(inside) is True:
        return "hidden"
    named = FORMATS.get(request.reasoning_format or "auto", "auto")
    if named != "auto":
        return named
    return "reasoning_content" if structured(request) else by_kind or rules.reasoning_format


def budget(request: Request, thinking: Thinking, rules: Rules, state: str) -> Bounds:
    """How the engine bounds the thinking (rows C3, C4, C8); ``state`` is that of the prompt (``stages/prompt.py``).

    The answer keeps its reserve where the client asked for a budget, or for an answer of a form.
    """
    reserved = thinking.asked or structured(request)
    return Bounds(
        state=state,
        cap=-1 if thinking.cap is None else min(thinking.cap, LARGEST),
        reserve=min(rules.answer_reserve, LARGEST) if reserved else 0,
        stall=rules.think_stall,
        ngram=min(request.no_repeat_ngram_size or 0, LARGEST),
    )


def _judged(request: Request, refusal: Refusal | None, thinking: Thinking, client: Client) -> Judged:
    options = request.stream_options
    return Judged(
        request=None if refusal else request,
        refusal=refusal,
        stream=bool(request.stream),
        messages=len(request.messages) if isinstance(request, ChatRequest) else 0,
        max_tokens=0 if refusal else max_tokens(request),
        include_usage=options.include_usage if options else None,
        progress=bool(options and options.include_progress),
        stops=[] if refusal else stops(request),
        choices=1 if refusal else choices(request),
        thinking=thinking,
        client=client,
    )
