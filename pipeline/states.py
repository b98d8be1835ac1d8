"""The words of the three tables: what a request, a slot and the engine can be doing, and what can happen to them.

States are adjectives or participles, triggers verbs. ``pipeline/table.py`` says which trigger moves what where.
"""

from __future__ import annotations

from enum import Enum


class RequestState(Enum):
    """Where one request is. It ends exactly once, in ``finished`` (with its outcome) or ``abandoned``."""

    received = "received"  # the route matched and the key passed; the body is read and checked
    validated = "validated"  # well formed; its images are fetched (a text request fetches none)
    image_fetched = "image_fetched"  # the prompt is rendered and counted
    queued = "queued"  # waits for a slot, first come first served
    admitted = "admitted"  # holds a slot; memory is read before the prefill
    prefilling = "prefilling"  # the engine reads the prompt
    decoding = "decoding"  # the engine writes the answer
    guest = "guest"  # served inside another one's run, at its safe point
    finished = "finished"  # over, with an outcome
    abandoned = "abandoned"  # over: its client left


class SlotState(Enum):
    """What one slot (one sequence of the engine) is doing."""

    free = "free"  # takes a request
    busy = "busy"  # holds a live request
    ending = "ending"  # its request is over, the engine has not said so yet
    lent = "lent"  # a guest is inside


class EngineState(Enum):
    """What the engine process is doing."""

    starting = "starting"  # the process starts and loads the model
    ready = "ready"  # takes runs
    silent = "silent"  # a run is live and no message came in time
    lost = "lost"  # the process is gone
    failed = "failed"  # it failed to start three times in a minute


class Trigger(Enum):
    """What can happen to a request, a slot or the engine."""

    # a request
    arrive = "arrive"  # the route matched, the key passed
    grow = "grow"  # more of the body came than was known of
    check = "check"  # the body was read and judged
    fetch = "fetch"  # its images are here
    enqueue = "enqueue"  # the prompt is rendered and counted
    offer = "offer"  # may it have a slot
    tick = "tick"  # a line may be due
    gate = "gate"  # memory was read
    chunk = "chunk"  # one prefill step is done
    first_token = "first_token"  # the first token was chosen
    closed = "closed"  # the thinking is over
    call = "call"  # a tool call begins or is whole
    choice_end = "choice_end"  # one choice is complete, others follow
    end = "end"  # the answer is complete
    deadline = "deadline"  # its time is over
    engine_lost = "engine_lost"  # the engine process is gone
    fault = "fault"  # something of ours broke
    shutdown = "shutdown"  # the drain's time is over
    hang_up = "hang_up"  # its client left
    lend = "lend"  # its slot is lent to a guest (of a slot too)
    returned = "returned"  # the guest is over (of a slot too)
    guest_started = "guest_started"  # it is a guest now
    # a slot
    take = "take"  # a request was admitted to it
    let_go = "let_go"  # its request is over before the engine said so
    ended = "ended"  # the engine ended the run
    declined = "declined"  # the engine refused the run (of a request: to be a guest)
    epoch = "epoch"  # the engine starts again
    # the engine
    ready = "ready"  # the model is loaded
    quiet = "quiet"  # nothing was heard in time
    heard = "heard"  # a message came after all
    give_up = "give_up"  # it was silent, or a load stood still, for too long
    died = "died"  # the process ended
    restart = "restart"  # start it again
