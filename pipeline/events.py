"""What can happen: the facts posted to the core. With their times they are the trace.

No event carries text of a prompt or an answer, a header, a key or an address: counts, kinds, indices and handles only.
A *handle* is the index of a piece of text the runner holds for that request. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import msgspec


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base: the class name is the tag. A trace has what says something: there is an event for every round."""


class Received(_Event, frozen=True):
    """A request's first event. ``seed`` and ``wall`` are the only chance and calendar it will ever have.

    ``parent``: the request in whose body it came as a further prompt, -1 for one that a client sent.
    """

    request: int
    name: str  # the public id, without its prefix: 24 hex digits
    route: str  # "chat" or "completions"
    body_bytes: int  # declared; 0 when the body is chunked
    seed: int
    wall: float
    parent: int = -1


class BodyGrew(_Event, frozen=True):
    """More of its body came than it was known to have: ``body_bytes`` so far."""

    request: int
    body_bytes: int


class Checked(_Event, frozen=True):
    """The body was read and judged. ``code`` is a word of the error table, "" when it is well formed.

    ``param`` names the field: known names and indices, any other name as ``*``. ``max_tokens`` 0: none was asked for.

    ``progress``: the figures of its waiting and prefill lines are wanted as chunks too.
    """

    request: int
    code: str = ""
    param: str = ""
    body_bytes: int = 0
    stream: bool = False
    messages: int = 0
    max_tokens: int = 0
    choices: int = 1
    progress: bool = False


class Fetched(_Event, frozen=True):
    """Its images are here: ``images`` of them, ``left_out`` older ones replaced by a text."""

    request: int
    images: int = 0
    left_out: int = 0


class Prepared(_Event, frozen=True):
    """The prompt is rendered and tokenised. ``code``: a word of the error table when it could not be.

    Of a list ``prompts`` counts all, ``longest`` is the longest one's tokens; this request is the first of them.
    ``hashes``: of its whole blocks, salted (``stages/hashes.py``). ``thinks``: its thinking is on. ``planned``: a plan
    shapes its prompt. ``lane``: as what the side lane may serve it: raw, side (a recognised side request) or "".
    ``head`` and ``opening``: rows through the system prompt and tools, and through its first user message; 0: unknown.
    ``first``: the latter as one salted hash.
    """

    request: int
    prompt_tokens: int = 0
    code: str = ""
    param: str = ""
    prompts: int = 1
    longest: int = 0
    hashes: list[bytes] = []
    thinks: bool = False
    planned: bool = False
    lane: str = ""
    head: int = 0
    opening: int = 0
    first: bytes = b""


class Progress(_Event, frozen=True):
    """One round went through the text stage. ``n`` answer tokens are judged; ``handle`` is the piece to send.

    ``characters`` 0: nothing to send yet. ``stopped``: a stop string was found; then ``keep`` answer tokens lie wholly
    before it and ``n`` is the count through it.

    All counts are of the run's choice. ``reasoning``: answer tokens that are thinking; ``closed``: why it ended, at
    token ``closed_at``, said in the round it ended in; calls sent so far and those of them that are whole;
    ``open_call``: the text stands inside one. Of the round alone: ``drafted`` tokens were proposed, ``accepted`` taken;
    so many runs ``shared`` its step.
    """

    request: int
    epoch: int
    run: int
    n: int
    handle: int = -1
    characters: int = 0
    stopped: bool = False
    keep: int = 0
    ms: float = 0.0
    reasoning: int = 0
    closed: str = ""
    closed_at: int = -1
    opened_calls: int = 0
    closed_calls: int = 0
    open_call: bool = False
    drafted: int = 0
    accepted: int = 0
    shared: int = 1


class HungUp(_Event, frozen=True):
    """The client is gone. ``why``: closed, stalled (it did not read) or cut (its body never came whole)."""

    request: int
    why: str = "closed"


class Faulted(_Event, frozen=True):
    """A stage or handler of ours raised. ``where`` is our stage's name, ``error`` the exception's class."""

    request: int
    where: str
    error: str


class EngineLoading(_Event, frozen=True):
    """Progress of a load."""

    epoch: int
    done: int
    total: int


class EngineDescribed(_Event, frozen=True):
    """The checkpoint is known, its weights are not loaded yet. ``window`` in rows."""

    epoch: int
    window: int


class EngineReady(_Event, frozen=True):
    """The engine takes runs. The rest is as in ``engine/protocol.py: Ready``."""

    epoch: int
    load_s: float
    safe_rows: int
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    ceiling: int = 0
    peak_limit: int = 0
    slack: int = 0
    workspaces: list[tuple[int, int]] = []
    most_rows: int = 0
    device: str = ""


class EngineDied(_Event, frozen=True):
    """The process ended, or could not be started. ``code`` is its exit status, negative for a signal."""

    epoch: int
    code: int


class MemoryRead(_Event, frozen=True):
    """A memory reading for the prefill of ``run``, in bytes."""

    epoch: int
    run: int
    allocated: int
    reserved: int
    peak: int
    workspace: int
    free: int = 0
    levels: list[tuple[str, int]] = []
    growth: int = -1


class GuestStarted(_Event, frozen=True):
    """The guest ``run`` is inside the run ``holder``; ``rows`` rows of it, ``nbytes`` bytes, were copied before."""

    epoch: int
    run: int
    holder: int
    rows: int
    nbytes: int


class RunResumed(_Event, frozen=True):
    """The run begins with ``rows`` rows already resident, taken from ``source``."""

    epoch: int
    run: int
    rows: int
    source: str


class ChunkDone(_Event, frozen=True):
    """One prefill step: ``done`` of ``total`` rows, in ``ms``."""

    epoch: int
    run: int
    done: int
    total: int
    ms: float


class RunEnded(_Event, frozen=True):
    """The engine ended a run. ``handle``/``characters``: what the text stage still held back and now lets go.

    ``n`` counts the answer tokens whose text was judged (the engine's ``generated`` may be one round more). ``rounds``,
    ``drafted`` and ``accepted`` are the whole run's, 0 where the engine does not count. The rest is as in ``Progress``,
    at the end of the text.
    """

    epoch: int
    run: int
    reason: str
    kept: int
    n: int
    handle: int = -1
    characters: int = 0
    why: str = ""
    reasoning: int = 0
    closed: str = ""
    closed_at: int = -1
    opened_calls: int = 0
    closed_calls: int = 0
    open_call: bool = False
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class RunDeclined(_Event, frozen=True):
    """The engine refused to start a run: busy, late, memory."""

    epoch: int
    run: int
    reason: str


class Resident(_Event, frozen=True):
    """What a place of the engine holds now: ``where`` is slot, park or disk, ``slot`` which one of them.

    ``hashes`` as in ``Prepared``; ``rows`` 0: nothing any more.
    """

    epoch: int
    where: str
    slot: int
    rows: int
    hashes: list[bytes] = []
    nbytes: int = 0


class OwnWork(_Event, frozen=True):
    """Work of the engine's own has begun, or is over."""

    epoch: int
    what: str
    begun: bool


class Tick(_Event, frozen=True):
    """The time the core asked to be woken at has come."""


class Draining(_Event, frozen=True):
    """The server was asked to stop: who is inside finishes."""


class Shutdown(_Event, frozen=True):
    """Stop now: a second signal."""


Event = (
    Received
    | BodyGrew
    | Checked
    | Fetched
    | Prepared
    | Progress
    | HungUp
    | Faulted
    | EngineLoading
    | EngineDescribed
    | EngineReady
    | EngineDied
    | MemoryRead
    | GuestStarted
    | RunResumed
    | ChunkDone
    | RunEnded
    | RunDeclined
    | Resident
    | OwnWork
    | Tick
    | Draining
    | Shutdown
)
