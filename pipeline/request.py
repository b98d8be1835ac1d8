"""The records that move over the tables: a request, a slot, the engine. Plain facts, written by the core alone.

All times are seconds on the core's clock, None where nothing is due. The whole of the core's memory is these
records, so a snapshot of it is one JSON value.
"""

from __future__ import annotations

from math import inf

import msgspec

from pipeline.states import EngineState, RequestState, SlotState

HISTORY = 16
"""Transitions kept with a live request, for the Dev view and for replay's report."""

RECENT = 20
"""Ended requests kept for the Dev view."""

Time = float | None
"""In a snapshot JSON has no ``inf``: None stands for it."""


class Drafts(msgspec.Struct, frozen=True):
    """How a choice was decoded: in so many rounds, with so many tokens proposed and so many of them taken."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class Request(msgspec.Struct, kw_only=True):
    """One client request, from its first event to its end.

    Of a list of prompts each is a request of its own: the first one is the ``parent`` of the others (-1: no other's).
    Choices are written one after another; what is said of an answer is said of ``choice``, sums are named so.
    """

    id: int
    name: str
    route: str
    seed: int
    wall: float
    received_at: float
    state: RequestState = RequestState.received
    row: str = ""
    history: list[tuple[float, str]] = []
    # of the body
    body_bytes: int = 0
    code: str = ""
    param: str = ""
    stream: bool = False
    messages: int = 0
    asked_tokens: int = 0
    choices: int = 1
    # of its family: the prompts that came in one body
    parent: int = -1
    prompts: int = 1
    longest: int = 0
    # of the prompt
    images: int = 0
    left_out: int = 0
    prompt_tokens: int = 0
    max_tokens: int = 0
    hashes: list[bytes] = []
    shared_rows: int = 0  # what the engine seemed to hold of it when it was admitted, by its hashes
    # of the run
    place: int = -1
    slot: int = -1
    served_by: int = -1
    run: int = -1
    rows_done: int = 0
    cached_tokens: int = 0
    source: str = ""  # where those came from
    choice: int = 0
    end_reason: str = ""
    choice_over: bool = False  # its text is complete, the engine has not let go yet
    closed: str = ""  # why the thinking is over
    closed_at: int = -1  # at which answer token
    opened_calls: int = 0
    closed_calls: int = 0
    open_call: bool = False
    # over its choices
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    calls: int = 0
    choice_tokens: list[int] = []
    choice_reasoning: list[int] = []
    choice_drafts: list[Drafts] = []
    read_ms: float = 0.0  # of its prefill steps and rounds alone, whatever else the engine did between them
    write_ms: float = 0.0
    # of the client
    opened: bool = False
    line: str = ""
    # times
    waits_from: float = 0.0
    deadline_at: Time = None
    line_at: Time = None
    queued_at: Time = None
    admitted_at: Time = None
    prefill_at: Time = None
    first_token_at: Time = None
    last_token_at: Time = None
    ended_at: Time = None
    outcome: str = ""

    @property
    def drafts(self) -> Drafts:
        """Over its choices."""
        each = self.choice_drafts
        return Drafts(sum(d.rounds for d in each), sum(d.drafted for d in each), sum(d.accepted for d in each))


class Slot(msgspec.Struct, kw_only=True):
    """One sequence of the engine."""

    id: int
    state: SlotState = SlotState.free
    row: str = ""
    history: list[tuple[float, str]] = []
    request: int = -1
    run: int = -1
    started: bool = False
    more: bool = False  # what its run wrote ended well and is not its request's last choice


class Engine(msgspec.Struct, kw_only=True):
    """The engine process as the core sees it. ``failures`` are the times of failed starts."""

    id: int = 0
    state: EngineState = EngineState.starting
    row: str = ""
    history: list[tuple[float, str]] = []
    epoch: int = 1
    window: int = 0
    load_done: int = 0
    load_total: int = 0
    load_s: float = 0.0
    safe_rows: int = 0
    exit_code: int = 0
    heard_at: float = 0.0
    step_s: float = 0.0
    silent_at: Time = None
    started_at: float = 0.0
    failures: list[float] = []
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    own_work: list[str] = []


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one place of the engine holds, by its own word: rows of one sequence, and its whole blocks as hashes."""

    where: str
    slot: int
    rows: int
    hashes: list[bytes] = []
    nbytes: int = 0


class Counts(msgspec.Struct, kw_only=True):
    """How requests ended since the start."""

    served: int = 0
    refused: int = 0
    errors: int = 0
    timeouts: int = 0
    abandoned: int = 0


class Memory(msgspec.Struct, kw_only=True):
    """Everything the core remembers: what a rotated trace opens with."""

    requests: dict[int, Request] = {}
    recent: list[Request] = []
    queue: list[int] = []
    slots: list[Slot] = []
    engine: Engine = msgspec.field(default_factory=Engine)
    residents: list[Held] = []
    counts: Counts = msgspec.field(default_factory=Counts)
    draining: bool = False
    drain_until: Time = None
    exiting: bool = False
    next_run: int = 1
    next_place: int = 0
    steps: int = 0
    wake: Time = None
    max_running: int = 0  # the most requests that had a slot at once
    joint_rounds: int = 0  # rounds of answers whose step was another's too


def due(time: Time) -> float:
    """A time that may be unset, as a number: ``inf`` when nothing is due."""
    return inf if time is None else time


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a guard may read besides its record: computed by the core before it fires.

    ``before_queue`` and ``waiting`` count a list of prompts once; ``inside``: it is a further prompt of such a list.
    ``slot``: the free one that a request is next for, -1: it has to wait.
    """

    now: float = 0.0
    draining: bool = False
    inside: bool = False
    before_queue: int = 0
    bodies: int = 0
    waiting: int = 0
    slot: int = -1
    engine: EngineState = EngineState.ready
    window: int = 0
    advancing: bool = True
    failures: int = 0
    since_start: float = inf
    max_live: int = 64
    max_bodies: int = 1 << 30
    max_queue: int = 8
    retry_after: float = 30.0
