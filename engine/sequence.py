"""The rules of a run: what is resident, what was committed, what was judged, and when it ends.

Knows the protocol and counts. It holds no model, no clock and no pipe, so the real engine (``worker``) and the scripted
one (``scripted``) keep the same rules by sharing it. The owner's loop is

1. at a *safe point* give every message that has arrived to ``Slots.handle``, then call ``Slots.settle``;
2. compute one step of the run ``Slots.turn`` names: a prefill step, then ``Sequence.read``, or a round, then
   ``Sequence.propose``; none: wait for a message.

A round is proposed once computed and committed by ``settle``, at the earliest when the round before was acknowledged.
So the engine is at most one round ahead of the text, yet the pipe's latency hides behind the computing of a step. What
judges tokens (``reasoning``) is told of a round when it is proposed: it is committed, or the run is over.

Rows and tokens: a prompt of P tokens takes rows 0 … P-1. Answer token i stands in row P + i once the round after it was
computed, so the last token committed may have no row yet.

The end of a prompt can be kept for another choice of it (``Start.keep_end``): its rows, which stay in the slot, and the
logits after them, which are the owner's and only held here. A run that begins there has its prompt read.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import Enum

from engine.binding import Binding
from engine.failpoints import Failpoints
from engine.grammar import Masks, NothingAllowed
from engine.pieces import Vocabulary
from engine.protocol import Cancel, Chunk, Declined, Ended, FromEngine, Resumed, Seen, Start, TokenLogprob, Tokens, Turn
from engine.reasoning import Reasoning
from engine.sampling import Adjustments, Logits, Repeats, highest

NO_TAGS = Vocabulary()


class Step(Enum):
    """What a run needs next."""

    PREFILL = "prefill"  # a step over prompt rows
    ROUND = "round"  # the next tokens
    WAIT = "wait"  # a message: its round is computed and may not be committed yet
    OVER = "over"  # nothing: it has ended


class Sequence:
    """One run. ``limit`` is how many tokens it may write: what was asked for, cut at the end of the window.

    ``end``: the logits after the prompt, once it is read, of a run that keeps them or began with them. ``masks``: of
    the model whose logits choose; without them a grammar binds nothing (a script's tokens are not chosen).
    """

    def __init__(
        self,
        start: Start,
        window: int,
        vocabulary: Vocabulary = NO_TAGS,
        end: Logits | None = None,
        masks: Masks | None = None,
    ) -> None:
        self.start = start
        self.limit = min(start.max_tokens, window - len(start.tokens))
        self.end = end
        self.rows = 0 if end is None else len(start.tokens)  # resident
        self.chunks = 0
        self.answer: list[int] = []  # committed
        self.adjustments = Adjustments(start)  # counts what is in ``answer`` and nothing else
        self.reasoning = Reasoning(start.thinking, vocabulary, self.limit)
        self._binding: Binding | None = None
        if start.grammar is not None and masks is not None:
            self._binding = Binding(start, masks, vocabulary, self.reasoning)
        self._repeats = Repeats(start.thinking.ngram)
        self.vocabulary = vocabulary
        self.acked = 0
        self.prefill_ms = self.decode_ms = 0.0
        self._stop_ids = frozenset(start.stop_ids)
        self._round: list[int] | None = None  # computed, not committed
        self._round_ms = 0.0
        self._round_logprobs: list[TokenLogprob] = []
        self._round_turns: list[Turn] = []
        self._ending = ""  # the reason it ends with once that round is committed
        self._cancel: Cancel | None = None
        self._over = False

    @property
    def prompt(self) -> int:
        """Rows of the prompt."""
        return len(self.start.tokens)

    @property
    def step(self) -> Step:
        """What it needs next."""
        if self._over:
            return Step.OVER
        if self._round is not None:
            return Step.WAIT
        begun = self.chunks > 0 or self.end is not None  # an empty prompt has no row to wait for: ``chunk`` refuses it
        return Step.ROUND if begun and self.rows >= self.prompt else Step.PREFILL

    @property
    def forced(self) -> int | None:
        """The token that must come next, whatever the logits say (row C3); None: one is chosen from ``adjusted``."""
        return self.reasoning.forced

    def adjusted(self, raw: Logits) -> Logits:
        """The logits the next token is chosen from, ``raw`` itself where nothing changes them.

        Raises ``LogitsNotFinite``, and what a grammar raises (``Binding.mask``).
        """
        banned = self._repeats.banned() if self.reasoning.inside else []
        if banned:  # the block must stay one that can be closed
            spared = {*self.vocabulary.closing, *self.vocabulary.close[self.reasoning.spelled :][:1]}
            banned = [token for token in banned if token not in spared]
        adjusted = self.adjustments.apply(raw, len(self.answer), banned)
        if self._binding is None:
            return adjusted
        highest(raw)  # before a mask could hide what is no number
        try:
            return self._binding.mask(adjusted)
        except NothingAllowed:  # stop ids that may not end it yet may be all that fits: they are text then
            return self._binding.mask(self.adjustments.apply(raw, self.start.min_tokens), ends=False)

    @property
    def finished(self) -> bool:
        """Its grammar leaves nothing to write: it ends without a stop id, whatever ``min_tokens`` is."""
        return self._binding is not None and self._binding.finished

    def chunk(self, safe_rows: int) -> tuple[int, int]:
        """The next prefill step: its first row and the one after its last, on the grid of ``safe_rows`` or the end.

        Raises ``ValueError`` for an empty prompt: there is nothing to choose a first token from.
        """
        if not self.start.tokens:
            raise ValueError("an empty prompt")
        return self.rows, min(self.prompt, (self.rows // safe_rows + 1) * safe_rows)

    def read(self, stop: int, ms: float, logits: Logits | None = None) -> Chunk:
        """The prompt is resident up to row ``stop``; that step took ``ms`` and gave ``logits``."""
        self.rows = stop
        if self.start.keep_end and stop == self.prompt:
            self.end = None if logits is None else logits.copy()  # the model may use its place again
        self.chunks += 1
        self.prefill_ms += ms
        return Chunk(self.start.epoch, self.start.run, stop, self.prompt, ms)

    def propose(self, ids: Items[int], ms: float, ending: str = "", logprobs: Items[TokenLogprob] = ()) -> None:
        """The next round was computed, which made the rows of all committed tokens resident.

        It is cut at the limit, at a stop id past ``min_tokens``, behind a ``finished`` grammar and where another token
        is ``forced``; the first must be the forced one where there is one. ``ending``: end after it for that reason (a
        script's end). ``logprobs``, where asked for: one a token.
        """
        if ids and self.forced not in (None, ids[0]):
            raise ValueError("not the forced token")
        self.rows = self.prompt + len(self.answer)
        self.decode_ms += ms
        self._round, self._round_ms, self._ending, self._round_turns = [], ms, ending, []
        for token in ids[: self.limit - len(self.answer)]:
            if self.forced not in (None, token):
                self._ending = ""
                break
            if token in self._stop_ids and len(self.answer) + len(self._round) >= self.start.min_tokens:
                self._ending = "stop"
                break
            self._round.append(token)
            self._tell(token)
            if self.finished:
                self._ending = "stop"
                break
        self._round_logprobs = list(logprobs[: len(self._round)])

    def _tell(self, token: int) -> None:
        """The one place where what judges tokens is told the next one of the answer, in order."""
        if self.reasoning.inside:
            self._repeats.tell(token)
        turns = self.reasoning.feed(token)
        self._round_turns += turns
        if self._binding is not None:
            self._binding.tell(token, turns)

    def seen(self, n: int) -> None:
        """The text of the first ``n`` answer tokens was judged."""
        self.acked = max(self.acked, min(n, len(self.answer)))

    def cancel(self, message: Cancel) -> None:
        """End it at the next safe point. The first cancel counts."""
        self._cancel = self._cancel or message

    def settle(self) -> list[FromEngine]:
        """At a safe point: commit or end what may be; the messages that say so.

        An end by a stop id waits for ``Seen`` like a round does: a stop found in the text of the round before comes
        first and says itself which rows stay. An end by the limit was known beforehand and waits for nothing.
        """
        if self._over:
            return []
        if self._cancel is not None:
            keep = self.acked if self._cancel.keep is None else self._cancel.keep
            return [self._end("cancelled", max(0, min(keep, len(self.answer))))]
        if self.limit <= 0 and self.step is Step.ROUND:
            return [self._end("length", 0)]
        if self._round is None or self.acked < len(self.answer):
            return []
        return self._commit(self._round)

    def fault(self, why: str) -> Ended:
        """End it by an exception of class ``why``: no row of the slot is trusted."""
        self.rows = 0
        return self._end("fault", 0, why)

    def _commit(self, ids: list[int]) -> list[FromEngine]:
        first, self._round = len(self.answer), None
        self.answer += ids
        self.adjustments.count(ids)
        said: list[FromEngine] = []
        if ids:
            start, turns = self.start, self._round_turns
            said.append(Tokens(start.epoch, start.run, first, ids, self._round_ms, self._round_logprobs, turns))
        if not self._ending and len(self.answer) >= self.limit:
            self._ending = "length"
        if self._ending:
            said.append(self._end(self._ending, len(self.answer)))
        return said

    def _end(self, reason: str, keep: int, why: str = "") -> Ended:
        self._over = True
        self.rows = min(self.rows, self.prompt + keep)
        start, generated = self.start, len(self.answer)
        return Ended(start.epoch, start.run, reason, self.rows, generated, self.prefill_ms, self.decode_ms, why)


class Slots:
    """The runs of an engine, at most one a slot, computed a step each in turn.

    ``window`` is in rows, a slot. Every ``Start`` ends in exactly one ``Ended`` or ``Declined``.
    """

    def __init__(
        self,
        epoch: int,
        count: int,
        window: int,
        failpoints: Failpoints,
        vocabulary: Vocabulary = NO_TAGS,
        masks: Masks | None = None,
    ) -> None:
        self._epoch, self._window, self._failpoints, self._vocabulary = epoch, window, failpoints, vocabulary
        self._masks = masks
        self._runs: list[Sequence | None] = [None] * count
        self._ends: list[tuple[list[int], Logits] | None] = [None] * count  # by slot: a prompt whose end is kept
        self._next = 0
        self._starts = 0

    def handle(self, message: Start | Seen | Cancel) -> list[FromEngine]:
        """Take a message in; what is to be said at once. Another epoch's is dropped, one of an unknown run ignored."""
        if message.epoch != self._epoch:
            return []
        if isinstance(message, Start):
            return self._admit(message)
        run = next((run for run in self._runs if run is not None and run.start.run == message.run), None)
        if run is None:
            return []
        if isinstance(message, Seen):
            run.seen(message.n)
        else:
            run.cancel(message)
        return []

    def settle(self) -> list[FromEngine]:
        """Commit and end what may be, in every slot, and free the slots of ended runs."""
        said = [message for run in self._runs if run is not None for message in run.settle()]
        self._free()
        return said

    def turn(self) -> tuple[int, Sequence] | None:
        """The slot and the run to compute a step of: each in turn. None: all wait, or there is none."""
        count = len(self._runs)
        for slot in ((self._next + i) % count for i in range(count)):
            run = self._runs[slot]
            if run is not None and run.step in (Step.PREFILL, Step.ROUND):
                self._next = (slot + 1) % count
                return slot, run
        return None

    def fault(self, run: Sequence, why: str) -> Ended:
        """End a run by an exception of class ``why`` and free its slot."""
        ended = run.fault(why)
        self._free()
        return ended

    def _admit(self, start: Start) -> list[FromEngine]:
        self._starts += 1
        if not 0 <= start.slot < len(self._runs) or self._runs[start.slot] is not None:
            return [Declined(self._epoch, start.run, "busy")]
        if len(start.tokens) + 1 > self._window or self._failpoints.fires("decline_start", self._starts):
            return [Declined(self._epoch, start.run, "memory")]
        kept, self._ends[start.slot] = self._ends[start.slot], None
        end = kept[1] if kept is not None and kept[0] == start.tokens else None
        self._runs[start.slot] = Sequence(start, self._window, self._vocabulary, end, self._masks)
        if end is None:
            return []
        rows = len(start.tokens)
        return [Resumed(self._epoch, start.run, rows, "end"), Chunk(self._epoch, start.run, rows, rows, 0.0)]

    def _free(self) -> None:
        for slot, run in enumerate(self._runs):
            if run is None or run.step is not Step.OVER:
                continue
            if run.start.keep_end and run.end is not None and run.rows >= run.prompt:
                self._ends[slot] = run.start.tokens, run.end
            self._runs[slot] = None
