"""The tables: every state, every trigger, every guard, every line. Nothing changes a state anywhere else.

Two rules. A row fires when its record is in one of its sources, its trigger is fired, and its guard (if it has one)
says yes; rows of one (state, trigger) group are tried in the order written. The last row of every group has no guard,
so no trigger fails silently: every refusal, wait and status line is a named row in the journal. A pair (state,
trigger) with no row is ``Illegal`` and changes nothing.

Theory of operation. A request walks ``received → validated → image_fetched → queued → admitted → prefilling →
decoding → finished``; from every live state it may end in ``abandoned`` when its client left. Refusal, length,
time-out and error are outcomes of ``finished``, told by the row that fired (``pipeline/outcomes.py``). A slot is taken
by an admitted request and is free again only when the engine said so. The engine is a process that starts, may fall
silent, may be lost, and starts again; three failed starts in a minute are ``failed``, and then a new request tries
again now and then.

Guards are pure: they read the record and the ``Facts`` the core computed before it fired. ``dest=None`` stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.request import Engine, Facts, Request, Slot, due
from pipeline.states import EngineState, RequestState, SlotState, Trigger

Guard = Callable[[Any, Facts], bool]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row. ``dest`` None stays; ``says`` is the line a person sees, in the log, the Dev view or the README."""

    name: str
    sources: tuple[Any, ...]
    trigger: Trigger
    guard: Guard | None = None
    dest: Any = None
    says: str


# -- guards of a request --------------------------------------------------------------------------------------------

MALFORMED = ("invalid_json",)
UNKNOWN_MODEL = ("model_not_found",)
REFUSED = ("unsupported_parameter", "unsupported_value", "unsupported_schema")
SCHEMA = ("unsupported_schema",)


def draining(_request: Request, facts: Facts) -> bool:
    """The server was asked to stop, and this is no further prompt of a request it let in."""
    return facts.draining and not facts.inside


def live_full(request: Request, facts: Facts) -> bool:
    """Too many requests, or too many bytes of them, are before the queue."""
    return (facts.before_queue > facts.max_live or bodies_full(request, facts)) and not facts.inside


def bodies_full(_request: Request, facts: Facts) -> bool:
    """Too many bytes of requests are before the queue."""
    return facts.bodies > facts.max_bodies


def queue_full(_request: Request, facts: Facts) -> bool:
    """As many requests wait as may, and no slot is free for one more."""
    full = facts.waiting >= facts.max_queue and facts.slot < 0
    return full and not facts.inside


def engine_failed(_request: Request, facts: Facts) -> bool:
    """The engine failed to start three times in a minute."""
    return facts.engine is EngineState.failed


def bad_json(request: Request, _facts: Facts) -> bool:
    """The body is no JSON object."""
    return request.code in MALFORMED


def unknown_model(request: Request, _facts: Facts) -> bool:
    """The named model is not served here."""
    return request.code in UNKNOWN_MODEL


def refused_field(request: Request, _facts: Facts) -> bool:
    """A field, or a value of one, that is not served."""
    return request.code in REFUSED


def bad_shape(request: Request, _facts: Facts) -> bool:
    """A field is missing, has the wrong type or a value out of range."""
    return request.code != "" and request.code not in (*MALFORMED, *UNKNOWN_MODEL, *REFUSED)


def no_token(request: Request, _facts: Facts) -> bool:
    """The prompt could not be rendered, or renders to no token."""
    return request.code not in SCHEMA and (request.code != "" or request.prompt_tokens == 0)


def over_window(request: Request, facts: Facts) -> bool:
    """A prompt leaves no room for a single answer token."""
    return request.code not in SCHEMA and max(request.prompt_tokens, request.longest) + 1 > facts.window


def bad_schema(request: Request, _facts: Facts) -> bool:
    """What the answer is to be bound to cannot be served."""
    return request.code in SCHEMA


def never_fits(request: Request, facts: Facts) -> bool:
    """A prompt's workspace does not fit in this machine's memory, even with every cache given back."""
    return request.code not in SCHEMA and 0 < facts.most_rows < max(request.prompt_tokens, request.longest)


def fits_peak(_request: Request, facts: Facts) -> bool:
    """Memory is under its ceiling, and the prefill's workspace fits under the peak."""
    return facts.gate == "fits"


def level_helps(_request: Request, facts: Facts) -> bool:
    """What can be given back is enough."""
    return facts.gate == "give_back"


def not_collected(_request: Request, facts: Facts) -> bool:
    """It is not, and nothing was collected yet."""
    return facts.gate == "collect"


def fits_reserve(_request: Request, facts: Facts) -> bool:
    """The workspace fits in what the allocator holds free."""
    return facts.gate == "fits_reserve"


def others_running(_request: Request, facts: Facts) -> bool:
    """Others run, and their ends will give memory back."""
    return facts.gate == "wait"


def has_slot(_request: Request, facts: Facts) -> bool:
    """The engine is ready, and slot 0 is free, that nobody in front is to have."""
    return facts.engine is EngineState.ready and facts.slot == 0


def has_side_slot(_request: Request, facts: Facts) -> bool:
    """Slot 0 is busy, and a side slot it fits in is free that nobody in front is to have."""
    return facts.engine is EngineState.ready and facts.slot > 0 and facts.why == "busy"


def gave_up(_request: Request, facts: Facts) -> bool:
    """It goes on with a held conversation, waited for slot 0 as long as it may, and a side slot is free."""
    return facts.engine is EngineState.ready and facts.slot > 0 and facts.why == "gave_up"


def guest_aside(_request: Request, facts: Facts) -> bool:
    """It is short, slot 0 holds another's long conversation, and a side slot is free."""
    return facts.engine is EngineState.ready and facts.slot > 0 and facts.why == "guest"


def engine_away(_request: Request, facts: Facts) -> bool:
    """The engine takes no runs."""
    return facts.engine is not EngineState.ready


def memory_holds(_request: Request, facts: Facts) -> bool:
    """A slot is free, memory beside the others is not."""
    return facts.why == "memory"


def slot0_holds(_request: Request, facts: Facts) -> bool:
    """A side slot is free, but it goes on with a conversation that is held for slot 0."""
    return facts.why == "slot0"


def own_holds(_request: Request, facts: Facts) -> bool:
    """Slot 0 is free but for work of the engine's own."""
    return facts.why == "own"


def lane_open(_request: Request, facts: Facts) -> bool:
    """The run of slot 0 may serve it inside itself at its next safe point (rows K1, K2)."""
    return facts.lane_open


def line_due(request: Request, facts: Facts) -> bool:
    """A status line is due on an open-ended stream, and the engine advances (or is starting)."""
    return request.stream and facts.advancing and facts.now >= due(request.line_at)


def headers_due(request: Request, facts: Facts) -> bool:
    """A whole answer is old enough for its headers to leave before it is there, and the engine advances."""
    return not request.stream and not request.opened and facts.advancing and facts.now >= due(request.beat_at)


def beat_due(request: Request, facts: Facts) -> bool:
    """Its client is due a sign of life, and the engine advances (or is starting)."""
    return (request.stream or request.opened) and facts.advancing and facts.now >= due(request.beat_at)


def in_call(request: Request, _facts: Facts) -> bool:
    """The call that is told of has just begun."""
    return request.opened_calls > request.closed_calls


def has_calls(request: Request, _facts: Facts) -> bool:
    """There are calls, and each of them is whole."""
    return request.closed_calls > 0 and request.opened_calls == request.closed_calls and not request.open_call


def outgrown(request: Request, _facts: Facts) -> bool:
    """A recognised side request reached the lane's cap, which is not its own limit."""
    return request.lane == "side" and request.end_reason == "length" and request.completion_tokens < request.max_tokens


def at_limit(request: Request, _facts: Facts) -> bool:
    """The answer reached its limit."""
    return request.end_reason == "length"


# -- guards of a slot and of the engine -----------------------------------------------------------------------------


def more_choices(slot: Slot, _facts: Facts) -> bool:
    """Its request is live and has a choice left to write."""
    return slot.more


def let_go_seen(slot: Slot, _facts: Facts) -> bool:
    """Its request ended while the guest was inside."""
    return slot.let_go


def nothing_kept(slot: Slot, _facts: Facts) -> bool:
    """It is a side slot, and the engine did not park what its run left."""
    return slot.id > 0 and slot.kept == 0


def not_started(slot: Slot, _facts: Facts) -> bool:
    """No start was sent to the engine."""
    return not slot.started


def third_failure(_engine: Engine, facts: Facts) -> bool:
    """Three starts failed within a minute."""
    return facts.failures >= 3


def too_soon(_engine: Engine, facts: Facts) -> bool:
    """The last start was tried only just now."""
    return facts.since_start < facts.retry_after


# -- the request's table ---------------------------------------------------------------------------------------------

R, T = RequestState, Trigger
BEFORE_SLOT = (R.received, R.validated, R.image_fetched, R.queued)
RUNNING = (R.prefilling, R.decoding)
LIVE = (*BEFORE_SLOT, R.admitted, *RUNNING, R.guest)
WRITING = (R.decoding, R.guest)
TOLD = (R.queued, R.admitted, R.guest)


def _row(name: str, sources: Any, trigger: Trigger, guard: Guard | None, dest: Any, says: str) -> Row:
    """A row, written on one line."""
    sources = sources if isinstance(sources, tuple) else (sources,)
    return Row(name=name, sources=sources, trigger=trigger, guard=guard, dest=dest, says=says)


ROWS: tuple[Row, ...] = (
    _row("refused_draining", R.received, T.arrive, draining, R.finished, "503 at once: the server is stopping"),
    _row("refused_live_full", R.received, T.arrive, live_full, R.finished, "503 at once: too many are being read"),
    _row("refused_queue_full", R.received, T.arrive, queue_full, R.finished, "503 at once: the queue is full"),
    _row("refused_engine_failed", R.received, T.arrive, engine_failed, R.finished, "503 at once: the engine failed"),
    _row("arrived", R.received, T.arrive, None, None, "reading the body"),
    _row("refused_bodies_full", R.received, T.grow, bodies_full, R.finished, "503: too much is being read"),
    _row("reads_on", R.received, T.grow, None, None, "the body has more bytes than were known of"),
    _row("bad_json", R.received, T.check, bad_json, R.finished, "400: the body is no JSON object"),
    _row("unknown_model", R.received, T.check, unknown_model, R.finished, "404: no such model"),
    _row("bad_shape", R.received, T.check, bad_shape, R.finished, "400, names the field"),
    _row("refused_field", R.received, T.check, refused_field, R.finished, "400: the field is not served"),
    _row("well_formed", R.received, T.check, None, R.validated, "well formed"),
    _row("fetched", R.validated, T.fetch, None, R.image_fetched, "images are here"),
    _row("no_token", R.image_fetched, T.enqueue, no_token, R.finished, "400: no prompt"),
    _row("over_window", R.image_fetched, T.enqueue, over_window, R.finished, "400: longer than the window"),
    _row("never_fits", R.image_fetched, T.enqueue, never_fits, R.finished, "400: its workspace fits in no memory here"),
    _row("bad_schema", R.image_fetched, T.enqueue, bad_schema, R.finished, "400, names the keyword and its path"),
    _row("queue_filled", R.image_fetched, T.enqueue, queue_full, R.finished, "503: the queue filled meanwhile"),
    _row("queued", R.image_fetched, T.enqueue, None, R.queued, "queued"),
    _row("admitted", R.queued, T.offer, has_slot, R.admitted, "slot 0 is free"),
    _row("admitted_aside", R.queued, T.offer, has_side_slot, R.admitted, "a side slot: slot 0 is busy"),
    _row("admitted_gave_up", R.queued, T.offer, gave_up, R.admitted, "a side slot: slot 0 stayed busy too long for it"),
    _row(
        "admitted_guest_aside", R.queued, T.offer, guest_aside, R.admitted, "a side slot: slot 0 keeps its conversation"
    ),
    _row("offered_to_lane", R.queued, T.offer, lane_open, None, "offered to the run of slot 0 as a guest"),
    _row("waits_engine", R.queued, T.offer, engine_away, None, "waits for the engine to be there"),
    _row("waits_memory", R.queued, T.offer, memory_holds, None, "waits for memory"),
    _row("waits_slot0", R.queued, T.offer, slot0_holds, None, "waits for slot 0, which its conversation goes on in"),
    _row("waits_own", R.queued, T.offer, own_holds, None, "waits for the server's own work"),
    _row("must_wait", R.queued, T.offer, None, None, "waits for a slot: all are busy"),
    _row("lane_declined", R.queued, T.declined, None, None, "no guest now: no holder, late, memory; offered again"),
    _row("guest_started", R.queued, T.guest_started, None, R.guest, "inside the run of slot 0"),
    _row("waiting_line", TOLD, T.tick, line_due, None, ": waiting, position p, about e s, w s so far"),
    _row("headers_due", RUNNING, T.tick, headers_due, None, "a request without a stream: 200 and a blank"),
    _row("beat_due", (*TOLD, *RUNNING), T.tick, beat_due, None, "an empty-delta chunk, or one more blank"),
    _row("not_due", RUNNING, T.tick, None, None, "no sign of life while the engine stands still"),
    _row("waits_silently", TOLD, T.tick, None, None, "no line while the engine stands still"),
    _row("unfit_after_all", R.admitted, T.gate, never_fits, R.finished, "400: it queued while the engine was starting"),
    _row("fits", R.admitted, T.gate, fits_peak, R.prefilling, "fits in memory"),
    _row("level_given", R.admitted, T.gate, level_helps, None, "level n gives back b bytes, no more than needed"),
    _row("collects", R.admitted, T.gate, not_collected, None, "collects what nobody uses and empties the allocator"),
    _row("fits_reserve", R.admitted, T.gate, fits_reserve, R.prefilling, "fits in the allocator's own reserve"),
    _row("waits_for_memory", R.admitted, T.gate, others_running, R.queued, "waits until a run has ended"),
    _row("refused_memory", R.admitted, T.gate, None, R.finished, "503: too little memory, though nothing else runs"),
    _row("prefill_line", R.prefilling, T.chunk, line_due, None, ": prefill done/total"),
    _row("chunk_done", R.prefilling, T.chunk, None, None, "a prefill step is done"),
    _row("answering", R.prefilling, T.first_token, None, R.decoding, "answering"),
    _row("lent", RUNNING, T.lend, None, None, "a guest is inside its run"),
    _row("back_from_guest", RUNNING, T.returned, None, None, "the guest is over, its run goes on"),
    _row("reasoning_closed", WRITING, T.closed, None, None, "the thinking is over: model, budget, reserve, stall"),
    _row("call_opened", WRITING, T.call, in_call, None, "a call begins"),
    _row("call_closed", WRITING, T.call, None, None, "the call is whole"),
    _row("choice_ended", R.decoding, T.choice_end, None, None, "choice i of n ended: its own finish; the next starts"),
    _row("called", R.decoding, T.end, has_calls, R.finished, "tool_calls"),
    _row("at_limit", R.decoding, T.end, at_limit, R.finished, "length"),
    _row("stopped", R.decoding, T.end, None, R.finished, "stop"),
    _row("outgrown", R.guest, T.end, outgrown, R.queued, "the lane's cap came first: nothing was sent, waits again"),
    _row("guest_called", R.guest, T.end, has_calls, R.finished, "tool_calls"),
    _row("guest_at_limit", R.guest, T.end, at_limit, R.finished, "length"),
    _row("guest_stopped", R.guest, T.end, None, R.finished, "stop"),
    _row("waited_out", BEFORE_SLOT, T.deadline, None, R.finished, "429: no slot in time"),
    _row("ran_out", (R.admitted, *RUNNING, R.guest), T.deadline, None, R.finished, "timeout: what was written stands"),
    _row("engine_failed", BEFORE_SLOT, T.engine_lost, engine_failed, R.finished, "503: the engine failed"),
    _row("keeps_place", BEFORE_SLOT, T.engine_lost, None, None, "the model starts again, the place is kept"),
    _row("requeued", R.admitted, T.engine_lost, None, R.queued, "nothing had run, the place is kept"),
    _row("engine_lost", (*RUNNING, R.guest), T.engine_lost, None, R.finished, "503 or error; never run again"),
    _row("faulted", LIVE, T.fault, None, R.finished, "500: ours"),
    _row("shut_down", LIVE, T.shutdown, None, R.finished, "503 or error: the drain's time is over"),
    _row("hung_up", LIVE, T.hang_up, None, R.abandoned, "abandoned, never an error"),
)

# -- the slot's table --------------------------------------------------------------------------------------------------

S = SlotState

SLOT_ROWS: tuple[Row, ...] = (
    _row("taken", S.free, T.take, None, S.busy, "holds a request"),
    _row("given_back", S.busy, T.let_go, not_started, S.free, "nothing was started"),
    _row("let_go", S.busy, T.let_go, None, S.ending, "its request is over, the engine not yet"),
    _row("next_choice", S.busy, T.ended, more_choices, None, "choice i + 1 starts"),
    _row("rows_lost", (S.busy, S.ending), T.ended, nothing_kept, S.free, "a side slot's run ended; its rows are lost"),
    _row("run_ended", S.busy, T.ended, None, S.free, "the run ended; its rows are kept, a side slot's parked"),
    _row("wound_down", S.ending, T.ended, None, S.free, "the engine let go; rows kept as above"),
    _row("run_declined", (S.busy, S.ending), T.declined, None, S.free, "the engine refused the run"),
    _row("lent", (S.busy, S.ending), T.lend, None, S.lent, "a guest is inside its run"),
    _row("lets_go_later", S.lent, T.let_go, None, None, "its request is over, its run ends after the guest"),
    _row("ends_after_guest", S.lent, T.returned, let_go_seen, S.ending, "the guest ended, its request is over"),
    _row("returned", S.lent, T.returned, None, S.busy, "the guest ended"),
    _row("new_epoch", (S.free, S.busy, S.ending, S.lent), T.epoch, None, S.free, "the engine starts again"),
)

# -- the engine's table ------------------------------------------------------------------------------------------------

E = EngineState

ENGINE_ROWS: tuple[Row, ...] = (
    _row("loaded", E.starting, T.ready, None, E.ready, "the model is loaded"),
    _row("went_quiet", E.ready, T.quiet, None, E.silent, "a run is live and nothing was heard: health is red"),
    _row("heard_again", E.silent, T.heard, None, E.ready, "heard again"),
    _row("given_up", (E.starting, E.silent), T.give_up, None, E.lost, "killed: silent, or a load that stood still"),
    _row("died", (E.starting, E.ready, E.silent), T.died, None, E.lost, "the process ended"),
    _row("third_failure", E.lost, T.restart, third_failure, E.failed, "three failed starts in a minute"),
    _row("restarted", E.lost, T.restart, None, E.starting, "starts again"),
    _row("too_soon", E.failed, T.restart, too_soon, None, "tried again only just now"),
    _row("tried_again", E.failed, T.restart, None, E.starting, "a new request tries again"),
)

TABLES: dict[str, tuple[Row, ...]] = {"request": ROWS, "slot": SLOT_ROWS, "engine": ENGINE_ROWS}
STATES: dict[str, Any] = {"request": RequestState, "slot": SlotState, "engine": EngineState}
ENDED = (RequestState.finished, RequestState.abandoned)


def drawing() -> str:
    """The request's way through the states, drawn from the table (the README shows it, a test compares)."""
    main = [R.received]
    while main[-1] is not R.finished:
        main.append(_next(main))
    line = " → ".join(state.value for state in main)
    middle = {state: line.index(state.value) + len(state.value) // 2 for state in main}
    out = [line]
    for row in ROWS:
        for source in row.sources:
            if row.dest in middle and source in middle and middle[row.dest] < middle[source]:
                arrow = "↑" + "─" * (middle[source] - middle[row.dest] - 1) + "┘"
                out.append(" " * middle[row.dest] + arrow + f" {row.trigger.value}")
    for state in LIVE:
        if state not in main:
            source = next(other for other in main if _leads(other, state))
            again = f", or {source.value} again" if _leads(state, source) else ""
            out.append(f"{source.value} → {state.value} → finished{again}")
    if all(_leads(state, R.finished) and _leads(state, R.abandoned) for state in LIVE):
        out.append("every live state → finished (refused, timed out, error) and → abandoned (its client left)")
    return "\n".join(out)


def _leads(source: RequestState, dest: RequestState) -> bool:
    """Whether some row leads from one state to the other."""
    return any(source in row.sources and row.dest is dest for row in ROWS)


def _next(way: list[RequestState]) -> RequestState:
    """The state after the last of ``way``: the new live one, at the end ``finished``."""
    onward = [state for state in LIVE if state not in way and _leads(way[-1], state)]
    return onward[0] if onward else R.finished


def printed() -> str:
    """All three tables as text: state, trigger, guard, destination, name, line."""
    out = [drawing()]
    for life, rows in TABLES.items():
        out.append(f"\n{life}")
        for row in rows:
            guard = row.guard.__name__ if row.guard else "–"
            sources = ", ".join(s.value for s in row.sources) if len(row.sources) < 7 else "every live"
            dest = row.dest.value if row.dest else "·"
            out.append(f"  {sources:<46} {row.trigger.value:<12} {guard:<14} → {dest:<14} {row.name}: {row.says}")
    return "\n".join(out)
