"""The messages between the server and the engine process, both ways. Nothing else crosses the pipe.

Frames are a 4-byte little-endian length and one msgpack-encoded tagged struct. Every message carries the engine's
``epoch`` (the server counts its starts); all about a run carry its ``run``. A run id is not a request id: one request
may run more than once. **Each ``Start`` or ``Guest`` gets exactly one ``Ended`` or ``Declined``.**

A round is what one decode step commits (one token without speculation). The engine never commits a second round past
the last acknowledged token: it waits for ``Seen``. ``Cancel(keep=n)`` ends a run and leaves the rows of the prompt and
of the first ``n`` answer tokens resident; ``keep=None`` keeps what was acknowledged.
"""

from __future__ import annotations

import msgspec

MAX_FRAME = 1 << 30
"""Bytes. A longer frame is a broken pipe, not a message."""


class Sampling(msgspec.Struct, frozen=True):
    """How a token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    So are ``presence_penalty`` and ``frequency_penalty`` 0, ``repetition_penalty`` 1 and an empty ``logit_bias`` (by
    token id); what they mean says ``engine/sampling.py``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}


class Thinking(msgspec.Struct, frozen=True):
    """How the thinking of one run is read and bounded (``engine/reasoning.py``). Counts are tokens.

    ``state``: ``open``: the prompt ends inside a block; ``may``: the model may open one as its first non-blank output;
    ``off``: nothing it writes is thinking. ``cap`` reasoning tokens, then the close is forced; -1: none. ``reserve``:
    what of the run's limit is kept for the answer; 0: nothing, -1: min(2,048, limit / 4). ``stall``: close a block that
    only repeats itself. ``ngram``: no n-gram of so many tokens comes twice in the thinking; 0: off.
    """

    state: str = "off"
    cap: int = -1
    reserve: int = 0
    stall: bool = False
    ngram: int = 0


class Grammar(msgspec.Struct, frozen=True):
    """What an answer is bound to, in llguidance's own JSON form (``engine/grammar.py``). It binds no thinking."""

    text: str


# -- to the engine -----------------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start", frozen=True):
    """Prefill ``tokens`` in ``slot``, then decode at most ``max_tokens``. A stop id ends the run and is not sent.

    No stop id is chosen before the answer has ``min_tokens`` tokens, but as text where a grammar leaves nothing beside
    it or a closing holds it. ``logprobs``: how many alternatives each token's log-probability comes with, -1: none is
    asked for. ``keep_end``: another choice of the same prompt follows in the same slot; a ``Start`` whose tokens are
    those kept there begins at the prompt's end. ``hashes``: of the prompt's whole blocks (``stages/hashes.py``):
    what is resident is found by them; they may be fewer than the prompt has.
    """

    epoch: int
    run: int
    slot: int
    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]
    choice: int = 0
    min_tokens: int = 0
    logprobs: int = -1
    thinking: Thinking = Thinking()
    grammar: Grammar | None = None
    keep_end: bool = False
    hashes: list[bytes] = []


class Seen(msgspec.Struct, tag="seen", frozen=True):
    """The text of the first ``n`` answer tokens was judged: the engine may commit one more round."""

    epoch: int
    run: int
    n: int


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """End ``run`` at the next safe point. ``keep``: answer tokens whose rows stay.

    None: those acknowledged, and no other choice of its prompt follows: its client has left.
    """

    epoch: int
    run: int
    keep: int | None = None


class Measure(msgspec.Struct, tag="measure", frozen=True):
    """Ask for a memory reading, with the workspace a prefill of ``rows`` rows would take."""

    epoch: int
    run: int
    rows: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Leave: the server is going down."""

    epoch: int


LEVELS = ("allocator", "images", "snapshots", "guest_copies", "park", "graphs", "checkpoints")
"""What memory can be given back, the cheapest to lose first (row J2): the allocator's free blocks · encoded images ·
stored snapshots · guest copies not in use · parked conversations · idle graph sets · resident checkpoints."""


class Guest(msgspec.Struct, tag="guest", frozen=True):
    """Serve ``start`` inside the run ``holder``, in its slot, at its next safe point; one at a time (rows K2 to K5).

    It gets ``Declined``, or ``GuestStarted`` and later its ``Ended``. What the holder had is put back behind it, bit
    for bit. ``start.slot`` is the holder's; ``start.max_tokens`` the lane's cap.
    """

    epoch: int
    start: Start
    holder: int


class GiveBack(msgspec.Struct, tag="give_back", frozen=True):
    """Give back at least ``nbytes`` of a level of ``LEVELS``, no more entries than needed; answered by ``Memory``."""

    epoch: int
    run: int
    level: str
    nbytes: int


class Collect(msgspec.Struct, tag="collect", frozen=True):
    """Collect what nobody uses and empty the allocator; answered by ``Memory``."""

    epoch: int
    run: int


ToEngine = Start | Seen | Cancel | Measure | Stop | Guest | GiveBack | Collect

# -- from the engine ---------------------------------------------------------------------------------------------


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress of a load: ``what`` is a word for people, ``done`` of ``total`` in bytes."""

    epoch: int
    what: str
    done: int
    total: int


class Described(msgspec.Struct, tag="described", frozen=True):
    """What the checkpoint says of itself, sent before its weights are read, so that prompts can be rendered meanwhile.

    ``tokenizer`` is the JSON the ``tokenizers`` package reads, ``template`` the Jinja chat template ("" when there is
    none), ``special`` maps names a template may use (``bos_token``, ``eos_token``) to text, ``window`` is in rows.
    ``pieces``: the bytes each token id writes, b"" for special tokens and for ids nobody named.
    """

    epoch: int
    model: str
    architecture: str
    engine: str
    tokenizer: str
    template: str
    special: dict[str, str]
    end_ids: list[int]
    add_bos: bool
    bos_id: int | None
    window: int
    vocab: int
    pieces: list[bytes] = []


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine takes runs. Sizes in bytes, times in seconds (``_s``) or milliseconds (``_ms``), rates in rows/s.

    ``path``: what computes, in words (``native avx2``). ``alike``: the most rows of a step that come out the same bits
    as each alone; 1: no drafts and no joint rounds. ``state_bytes``: the recurrent state of one sequence.

    ``ceiling``, ``peak_limit`` and ``slack`` bound memory as row J1 says; 0: not known. ``workspaces``: what prefills
    of so many rows take, rising; ``most_rows``: the longest prompt that fits when every cache is given back, 0: not
    known.
    """

    epoch: int
    load_s: float
    safe_rows: int
    selfcheck_ms: float
    prefill_rate: float
    decode_rate: float
    file_bytes: int
    weights_bytes: int
    kv_bytes: int
    rss_bytes: int
    device: str
    threads: int
    path: str = ""
    alike: int = 1
    state_bytes: int = 0
    ceiling: int = 0
    peak_limit: int = 0
    slack: int = 0
    workspaces: list[tuple[int, int]] = []
    most_rows: int = 0


class Memory(msgspec.Struct, tag="memory", frozen=True):
    """The answer to ``Measure``, ``GiveBack`` and ``Collect``, in bytes. ``free``: what can still be taken.

    ``workspace``: of the prefill last measured for. ``levels``: what each of ``LEVELS`` could give back, in order.
    ``growth``: what caches may still take beside; -1: not known.
    """

    epoch: int
    run: int
    allocated: int
    reserved: int
    peak: int
    workspace: int
    free: int = 0
    levels: list[tuple[str, int]] = []
    growth: int = -1


class GuestStarted(msgspec.Struct, tag="guest_started", frozen=True):
    """The guest ``run`` is inside ``holder``. Of it ``rows`` rows, ``nbytes`` bytes, were copied before."""

    epoch: int
    run: int
    holder: int
    rows: int
    nbytes: int


class Chunk(msgspec.Struct, tag="chunk", frozen=True):
    """One prefill step is done: ``done`` of ``total`` rows are resident; the step took ``ms``."""

    epoch: int
    run: int
    done: int
    total: int
    ms: float


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A token's log-probability by the raw logits, and the likeliest tokens', best first (``engine/logprobs.py``)."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Turn(msgspec.Struct, array_like=True, frozen=True):
    """Where a thinking block begins or ends. Decided once, by the engine, on the bytes of tokens (row C6).

    ``kind``: ``opened`` (the model wrote the opening tag itself) or ``closed``. ``at``: the index of the answer token
    that completes the tag. Of the bytes that answer tokens write (``Described.pieces``), the tag is the last ``size``
    before the last ``tail`` bytes of that token; a special token writes none, then both are 0. ``reason``, of a close:
    ``model``, ``budget``, ``reserve`` or ``stall``. Reasoning tokens are those from ``at`` of ``opened`` (0 where the
    prompt opened the block) through ``at`` of ``closed``, both counted.
    """

    kind: str
    at: int
    size: int
    tail: int
    reason: str = ""


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """One round: ``ids`` are answer tokens ``start`` … ``start + len(ids) - 1``; ``logprobs`` one each, if asked.

    ``turns``: those that these tokens complete, in order. ``drafted`` tokens were proposed for this round, ``accepted``
    of them are among ``ids``. ``shared``: runs that had a round in this step, this one counted.
    """

    epoch: int
    run: int
    start: int
    ids: list[int]
    ms: float
    logprobs: list[TokenLogprob] = []
    turns: list[Turn] = []
    drafted: int = 0
    accepted: int = 0
    shared: int = 1


class Resumed(msgspec.Struct, tag="resumed", frozen=True):
    """The run begins with ``rows`` of the prompt's rows already resident; it is said before the first ``Chunk``.

    ``source``: ``slot``, what the slot kept; ``park``, a conversation put aside in memory; ``disk``, a prefix read from
    a file; ``end``, the kept end of the same prompt; ``none``, nothing.
    """

    epoch: int
    run: int
    rows: int
    source: str


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """The run is over and its slot free. ``reason``: stop, length, cancelled or fault; ``why`` a fault's class name.

    ``kept`` rows stay: in slot 0, in the park, or in a side slot for a next choice (``Start.keep_end``); else they are
    lost. ``generated`` answer tokens were committed in ``rounds`` steps; ``drafted`` tokens were proposed, ``accepted``
    of them committed.
    """

    epoch: int
    run: int
    reason: str
    kept: int
    generated: int
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    why: str = ""
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class Declined(msgspec.Struct, tag="declined", frozen=True):
    """The run was not started. ``reason``: busy, late, memory; of a guest no_holder too."""

    epoch: int
    run: int
    reason: str


class Resident(msgspec.Struct, tag="resident", frozen=True):
    """What one place holds now, sent whenever it changed; the newest word on a place stands.

    ``where``: ``slot``, ``park`` or ``disk``; ``slot``: which one of the slots, or which entry of the other two (a
    number the engine gives, -1: all that is there as one). ``rows`` 0: nothing any more. ``hashes``: of the whole
    blocks held, in order, as in ``Start.hashes``. ``nbytes``: what the entry takes beside the slots' own buffers.
    """

    epoch: int
    where: str
    slot: int
    rows: int
    hashes: list[bytes] = []
    nbytes: int = 0


class OwnWork(msgspec.Struct, tag="own_work", frozen=True):
    """The engine works on its own account between steps: ``what`` (a word for people) has begun or is over."""

    epoch: int
    what: str
    begun: bool


FromEngine = (
    Loading
    | Described
    | Ready
    | Memory
    | GuestStarted
    | Resumed
    | Chunk
    | Tokens
    | Ended
    | Declined
    | Resident
    | OwnWork
)


class Config(msgspec.Struct, frozen=True):
    """What an engine process is started with (one JSON argument).

    ``model``: a GGUF file or a safetensors folder. ``max_len`` 0 takes the checkpoint's window. ``safe_rows`` 0 is
    chosen at load so that a step takes at most 0.5 s. ``script``: a JSON file for the scripted engine. ``failpoints``
    name places where a test makes the engine fail: ``{"load": 1}`` and the like (see ``engine/failpoints.py``).
    ``speculate``: draft tokens; ``draft_shape``: ``learned`` (cut by what rounds cost) or ``fixed``. ``park_bytes``:
    memory for conversations put aside, 0: none, -1: from what is free. ``disk_cache_bytes``: what prefixes may take in
    ``data_dir``, 0: none is written or read. ``parallel_cut``: with several sequences decoding, each one's drafts are
    cut to its share of a step (``share``) or by the whole step (``joint``). ``parallel`` slots: the first has the whole
    window, the others at most ``side_max_len`` rows. ``mem_ceiling``, ``mem_peak`` and ``slack`` in bytes (row J1); 0,
    of ``slack`` -1: from the device. ``side_graphs``: verify graphs in side slots too.
    """

    epoch: int
    model: str
    device: str = "auto"
    threads: int = 0
    max_len: int = 0
    safe_rows: int = 0
    prefix_chunk: int = 1024
    parallel: int = 1
    side_max_len: int = 65_536
    script: str = ""
    failpoints: dict[str, int] = {}
    speculate: bool = True
    draft_shape: str = "learned"
    park_bytes: int = -1
    disk_cache_bytes: int = 0
    data_dir: str = ""
    parallel_cut: str = "share"
    mem_ceiling: int = 0
    mem_peak: int = 0
    slack: int = -1
    side_graphs: bool = True


def windows(window: int, slots: int, side: int) -> list[int]:
    """Rows of each slot: the first has the whole window, the others no more than ``side`` (row M1)."""
    return [window, *[min(side, window)] * (slots - 1)]


encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """One message as bytes for the pipe."""
    body = encoder.encode(message)
    return len(body).to_bytes(4, "little") + body
