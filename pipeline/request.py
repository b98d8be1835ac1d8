"""The records that move over the tables: a request, a slot, the engine. Plain facts, written by the core alone.

All times are seconds on the core's clock, None where nothing is due. The whole of the core's memory is these
records, so a snapshot of it is one JSON value.
"""

from __future__ import annotations

from math import inf

import msgspec

from pipeline.states import EngineState, RequestState, SlotState
from stages.wait import History

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
    thinks: bool = False
    planned: bool = False  # a plan shapes its prompt
    head: int = 0  # rows through the system prompt and tools
    opening: int = 0  # rows through its first user message
    first: bytes = b""  # those rows as one hash
    # of waiting
    why: str = ""  # what it waits for: slots, memory, slot0, own, engine
    offer_at: Time = None  # when waiting has been long enough for another answer
    slot0_since: Time = None  # since when it waits for slot 0 though a side slot is free
    continues: str = ""  # where the conversation is held that it goes on with: slot, park, disk
    waits_memory: bool = False  # until some run has ended
    gate_collected: bool = False
    gate_asked: list[str] = []  # levels that were asked to give back for it, in order
    mem_since: Time = None  # when its wait for memory began
    mem_wait_s: float = 0.0
    own_wait_s: float = 0.0
    own_since: Time = None  # since when it waits behind work of the engine's own
    own_what: str = ""  # behind which
    progress: bool = False  # its client wants the figures of its lines
    beat_at: Time = None  # when its client is due a sign of life: an empty chunk, or a blank of a whole answer
    sent_at: Time = None  # when it last got one that it counts
    # of the side lane
    lane: str = ""  # raw, side or ""
    offered: bool = False  # to the engine as a guest, no answer yet
    inside: bool = False  # it was served as a guest
    outgrown: bool = False
    lane_at: Time = None  # when it may be offered again
    held: list[int] = []  # handles of text that is not sent yet
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
    let_go: bool = False  # its request ended while a guest is inside
    kept: int = 0  # rows that its run left, in place or parked; set at the run's end
    hashes: list[bytes] = []  # of slot 0: blocks of the prompt that its run reads
    first: bytes = b""


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
    free: int = 0
    growth: int = -1  # what caches may still take; -1: not known
    levels: list[tuple[str, int]] = []  # what each could give back
    own_work: list[str] = []
    # of its start: the self-check's rates, and the bounds of memory (rows J1, J3)
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    ceiling: int = 0
    peak_limit: int = 0
    slack: int = 0
    workspaces: list[tuple[int, int]] = []
    most_rows: int = 0
    device: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one place of the engine holds, by its own word: rows of one sequence, and its whole blocks as hashes."""

    where: str
    slot: int
    rows: int
    hashes: list[bytes] = []
    nbytes: int = 0


class GuestRun(msgspec.Struct, kw_only=True):
    """The one outstanding guest of the engine. ``request`` -1: its client is gone, the engine not done with it."""

    request: int
    run: int
    holder: int
    begun_at: Time = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory gate decided on a request, and the figures it read, in bytes."""

    request: int
    name: str
    row: str
    at: float
    level: str = ""
    nbytes: int = 0
    workspace: int = 0
    allocated: int = 0
    reserved: int = 0


class LaneCounts(msgspec.Struct, kw_only=True):
    """What came of offers to the side lane since the start. ``copied``: rows and bytes of the last copy."""

    offered: int = 0
    declined: int = 0
    served: int = 0
    outgrown: int = 0
    guest_s: float = 0.0
    copied_rows: int = 0
    copied_bytes: int = 0


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
    history: History = msgspec.field(default_factory=History)  # what waits are estimated from
    own_waits: dict[str, list[float]] = {}  # seconds somebody waited behind the engine's own work, by its name
    behind_own: list[int] = []  # who does now
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
    guest: GuestRun | None = None
    lane: LaneCounts = msgspec.field(default_factory=LaneCounts)
    lane_spans: list[tuple[float, float]] = []  # when guests were inside, of the last seconds that count
    lane_shut: int = -1  # the run of slot 0 that takes no guest any more: it is about to end
    lane_since: int = 0  # rounds of the holder since the last guest; a prefill step counts as all it needs
    gate: int = -1  # the run whose memory is being decided on
    decision: Decision | None = None  # the gate's last
    memory_refused: int = 0
    last_refused: Decision | None = None  # for want of memory
    last_prompt: list[bytes] = []  # blocks of slot 0's last prompt, as far as its rows stayed
    openings: list[bytes] = []  # hashes of the beginnings of the last conversations of slot 0, newest last
    spill_waits: int = 0  # requests that waited for slot 0 as the park or the disk holds their conversation
    slot0_gave_up: int = 0  # of those that waited for it, how many took a side slot in the end
    max_running_why: str = ""  # what more would have waited for
    overlap_rounds: int = 0  # rounds of answers while another was being written
    max_running: int = 0  # the most requests that had a slot at once
    joint_rounds: int = 0  # rounds of answers whose step was another's too


def due(time: Time) -> float:
    """A time that may be unset, as a number: ``inf`` when nothing is due."""
    return inf if time is None else time


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a guard may read besides its record: computed by the core before it fires.

    ``before_queue`` and ``waiting`` count a list of prompts once; ``inside``: it is a further prompt of such a list.
    ``slot``: the free one that a request is next for, -1: it has to wait; ``why``: see ``stages/slots.py: Route``.
    ``gate``: what the stage ``memory_gate`` says.
    """

    now: float = 0.0
    draining: bool = False
    inside: bool = False
    before_queue: int = 0
    bodies: int = 0
    waiting: int = 0
    slot: int = -1
    why: str = ""
    lane_open: bool = False
    engine: EngineState = EngineState.ready
    window: int = 0
    advancing: bool = True
    failures: int = 0
    since_start: float = inf
    max_live: int = 64
    max_bodies: int = 1 << 30
    max_queue: int = 8
    retry_after: float = 30.0
    most_rows: int = 0
    gate: str = ""
