"""What is to be done: the core's answers, carried out by the runner. None holds text of a prompt or an answer.

Client effects name a request, engine effects a run. Times are seconds on the core's clock.
"""

from __future__ import annotations

import msgspec


class _Effect(msgspec.Struct, frozen=True, tag=True):
    """Base: the class name is the tag."""


class ReadBody(_Effect, frozen=True):
    """Read and judge the body; answer with ``Checked``."""

    request: int


class Fetch(_Effect, frozen=True):
    """Fetch its images; answer with ``Fetched``."""

    request: int


class Prepare(_Effect, frozen=True):
    """Render and tokenise the prompt; answer with ``Prepared``."""

    request: int


class Spread(_Effect, frozen=True):
    """Its further prompts become requests of their own: answer with a ``Received`` each."""

    request: int


class Measure(_Effect, frozen=True):
    """Ask the engine for a memory reading before the prefill of ``rows`` rows."""

    epoch: int
    run: int
    rows: int


class StartRun(_Effect, frozen=True):
    """Start ``run`` for a request in ``slot``, writing at most ``max_tokens``. ``more``: another choice follows."""

    epoch: int
    run: int
    request: int
    slot: int
    max_tokens: int
    choice: int = 0
    more: bool = False


class StartGuest(_Effect, frozen=True):
    """Serve a request as ``run`` inside the run ``holder``, writing at most ``max_tokens`` (row K2)."""

    epoch: int
    run: int
    request: int
    holder: int
    max_tokens: int


class GiveBack(_Effect, frozen=True):
    """Have the engine give back at least ``nbytes`` of a level of memory; answer with ``MemoryRead``."""

    epoch: int
    run: int
    level: str
    nbytes: int


class Collect(_Effect, frozen=True):
    """Have the engine collect and empty its allocator; answer with ``MemoryRead``."""

    epoch: int
    run: int


class Recall(_Effect, frozen=True):
    """Forget the text of a request that was not sent: it is served anew (row K8)."""

    request: int


class Beat(_Effect, frozen=True):
    """Send a chunk with an empty delta on the stream, opening it if needed. Dropped while text is pending."""

    request: int


class Blank(_Effect, frozen=True):
    """Send one byte of white space of a whole answer, its 200 before the first (row I6b)."""

    request: int


class Acknowledge(_Effect, frozen=True):
    """Tell the engine that the first ``n`` answer tokens were judged."""

    epoch: int
    run: int
    n: int


class CancelRun(_Effect, frozen=True):
    """End a run; ``keep`` answer tokens' rows stay (None: those acknowledged)."""

    epoch: int
    run: int
    keep: int | None = None


class Send(_Effect, frozen=True):
    """Send the piece of text behind ``handle``."""

    request: int
    handle: int


class Line(_Effect, frozen=True):
    """Send a comment line on the stream, opening it if needed. Dropped while text is pending.

    Its figures, for a client that asked for them (row L8): of a waiter ``position`` from 1, ``estimate_s`` (None: none)
    and ``waited_s``; of a prefill ``done`` of ``total`` rows.
    """

    request: int
    text: str
    position: int = 0
    estimate_s: float | None = None
    waited_s: float = 0.0
    done: int = 0
    total: int = 0


class EndChoice(_Effect, frozen=True):
    """One choice is complete and others follow: its finish word."""

    request: int
    choice: int
    finish: str


class Finish(_Effect, frozen=True):
    """End the request for its client: the last effect that names it.

    ``code`` "" is a good end with finish word ``finish``. With a code: not ``opened``, it is ``status`` with the error
    object; opened, one finish chunk (``finish`` is error or timeout) with the same object. ``retry_after`` 0: none.
    """

    request: int
    finish: str
    opened: bool
    status: int = 200
    code: str = ""
    retry_after: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class Forget(_Effect, frozen=True):
    """The client left: let go of everything held for the request."""

    request: int
    why: str


class Log(_Effect, frozen=True):
    """One line for the log."""

    text: str


class Spawn(_Effect, frozen=True):
    """Start the engine process with this epoch."""

    epoch: int


class Kill(_Effect, frozen=True):
    """Kill the engine process of this epoch; its death is posted as ``EngineDied``."""

    epoch: int


class WakeAt(_Effect, frozen=True):
    """Post ``Tick`` at ``time``; the newest wish counts, ``inf`` takes it back."""

    time: float


class Exit(_Effect, frozen=True):
    """Nobody is inside any more: stop the server with this status."""

    status: int = 0


Effect = (
    ReadBody
    | Fetch
    | Prepare
    | Spread
    | Measure
    | StartRun
    | StartGuest
    | GiveBack
    | Collect
    | Recall
    | Beat
    | Blank
    | Acknowledge
    | CancelRun
    | Send
    | Line
    | EndChoice
    | Finish
    | Forget
    | Log
    | Spawn
    | Kill
    | WakeAt
    | Exit
)
