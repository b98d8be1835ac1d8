"""The rules of a run: what is resident, what was committed, what was judged, and when it ends.

Knows the protocol and counts. It holds no model, no clock and no pipe, so the real engine (``worker``) and the scripted
one (``scripted``) keep the same rules by sharing it. Which run computes next is ``slots``'.

A round is one step's tokens. They are chosen one after another: the next from ``adjusted``, or the one ``forced``, then
``take``; everything that judges tokens (what counts them, the thinking, a grammar) is told each at once, so the choice
after it is the same whether a round has one token or several. ``close`` ends the round: it is computed, and committed
by ``settle``, at the earliest when the round before was acknowledged. So the engine is at most one round ahead of the
text, yet the pipe's latency hides behind the computing of a step. A round closed is committed, or the run is over:
nothing that was told has to be taken back.

Rows and tokens: a prompt of P tokens takes rows 0 … P-1. Answer token i stands in row P + i: computed by the round
after the one that chose it, or by that very round where it was drafted and accepted.

The end of a prompt can be kept for another choice of it (``Start.keep_end``): its rows, which stay in the slot, and the
logits after them, which are the owner's and only held here. A run that begins there has its prompt read.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

from engine.binding import Binding
from engine.grammar import Masks, NothingAllowed
from engine.pieces import Vocabulary
from engine.protocol import Cancel, Chunk, Ended, FromEngine, Start, TokenLogprob, Tokens, Turn
from engine.reasoning import Reasoning
from engine.sampling import Adjustments, Logits, Repeats, highest

NO_TAGS = Vocabulary()


class Step(Enum):
    """What a run needs next."""

    PREFILL = "prefill"  # a step over prompt rows
    ROUND = "round"  # the next tokens
    WAIT = "wait"  # a message: its round is computed and may not be committed yet
    OVER = "over"  # nothing: it has ended


@dataclass(slots=True)
class Round:
    """What one step gave: its tokens, the turns they complete, and why the run ends behind them ("": it goes on)."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ending: str = ""
    ms: float = 0.0
    drafted: int = 0
    accepted: int = 0
    shared: int = 1


class Sequence:
    """One run. ``limit`` is how many tokens it may write: what was asked for, cut at the end of the window.

    ``end``: the logits after the prompt, once it is read, of a run that keeps them or began with them. ``masks``: of
    the model whose logits choose; without them a grammar binds nothing (a script's tokens are not chosen). ``rows``:
    resident; a run begins with ``resumed`` of them. ``guest``: it runs in another's place, and no row of it stays.
    """

    def __init__(
        self,
        start: Start,
        window: int,
        vocabulary: Vocabulary = NO_TAGS,
        end: Logits | None = None,
        masks: Masks | None = None,
        resumed: int = 0,
        guest: bool = False,
    ) -> None:
        self.start, self.guest = start, guest
        self.limit = min(start.max_tokens, window - len(start.tokens))
        self.end = end
        self.rows = resumed if end is None else len(start.tokens)
        self.chunks = 0
        self.answer: list[int] = []  # committed
        self.adjustments = Adjustments(start)
        self.reasoning = Reasoning(start.thinking, vocabulary, self.limit)
        self._binding: Binding | None = None
        if start.grammar is not None and masks is not None:
            self._binding = Binding(start, masks, vocabulary, self.reasoning)
        self._repeats = Repeats(start.thinking.ngram)
        self.vocabulary = vocabulary
        self.acked = 0
        self.prefill_ms = self.decode_ms = 0.0
        self._stop_ids = frozenset(start.stop_ids)
        self._round = Round()  # not committed
        self._closed = False  # it is computed
        self._rounds = self._drafted = self._accepted = 0  # committed
        self._cancel: Cancel | None = None
        self._over = False

    @property
    def prompt(self) -> int:
        """Rows of the prompt."""
        return len(self.start.tokens)

    @property
    def written(self) -> list[int]:
        """The tokens of the round so far."""
        return self._round.ids

    @property
    def position(self) -> int:
        """The place in the answer of the next token to be chosen."""
        return len(self.answer) + len(self._round.ids)

    @property
    def step(self) -> Step:
        """What it needs next."""
        if self._over:
            return Step.OVER
        if self._closed:
            return Step.WAIT
        begun = self.chunks > 0 or self.end is not None  # an empty prompt has no row to wait for: ``chunk`` refuses it
        return Step.ROUND if begun and self.rows >= self.prompt else Step.PREFILL

    @property
    def cancelled(self) -> bool:
        """It ends at the next safe point."""
        return self._cancel is not None and not self._over

    @property
    def ending(self) -> bool:
        """It is over, or will be without a step more."""
        if self._over or self._cancel is not None:
            return True
        return self._closed and (bool(self._round.ending) or self.position >= self.limit)

    @property
    def keeps_end(self) -> bool:
        """Another choice of its prompt can begin at its end; none comes for a client that left (no ``Cancel.keep``)."""
        left = self._cancel is not None and self._cancel.keep is None
        return self.start.keep_end and not left and self.end is not None and self.rows >= self.prompt

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
        adjusted = self.adjustments.apply(raw, self.position, banned)
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

    @property
    def goes_on(self) -> bool:
        """The round may have one more token."""
        return not self._round.ending and self.position < self.limit

    def take(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """The next token of the round, with its log-probability where that is asked for; False: it ends the run.

        That is a stop id past ``min_tokens``, which is not part of the answer. Behind a ``finished`` grammar the run
        ends too. Raises ``ValueError`` for one that is not ``forced`` where another is.
        """
        if self.forced not in (None, token):
            raise ValueError("not the forced token")
        round_ = self._round
        if token in self._stop_ids and self.position >= self.start.min_tokens:
            round_.ending = "stop"
            return False
        if self.reasoning.inside:
            self._repeats.tell(token)
        turns = self.reasoning.feed(token)
        if self._binding is not None:
            self._binding.tell(token, turns)
        self.adjustments.count([token])
        round_.ids.append(token)
        round_.turns += turns
        round_.logprobs += [] if logprob is None else [logprob]
        if self.finished:
            round_.ending = "stop"
        return True

    def close(self, ms: float, ending: str = "", drafted: int = 0, accepted: int = 0, shared: int = 1) -> None:
        """The round is computed, in ``ms``. The row of the last token committed is resident now.

        So are those of ``accepted`` tokens of the round: they were among the ``drafted``. ``ending``: the run ends
        behind it for that reason, unless it does for another. ``shared``: runs in that step.
        """
        round_ = self._round
        round_.ending = round_.ending or ending
        round_.ms, round_.drafted, round_.accepted, round_.shared = ms, drafted, accepted, shared
        self.rows = self.prompt + len(self.answer) + accepted
        self.decode_ms += ms
        self._closed = True

    def propose(self, ids: Items[int], ms: float, ending: str = "", logprobs: Items[TokenLogprob] = ()) -> None:
        """A whole round of tokens that no logits chose: a script's. None of them has a row yet.

        It is cut where it ends the run, at the limit and where another token is ``forced``; then ``ending`` is not its
        end. The first must be the forced one where there is one.
        """
        for at, token in enumerate(ids[: self.limit - len(self.answer)]):
            if at and self.forced not in (None, token):
                ending = ""
                break
            if not (self.take(token, logprobs[at] if logprobs else None) and self.goes_on):
                break
        self.close(ms, ending)

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
        if not self._closed or self.acked < len(self.answer):
            return []
        return self._commit(self._round)

    def fault(self, why: str) -> Ended:
        """End it by an exception of class ``why``: no row of the slot is trusted."""
        self.rows = 0
        return self._end("fault", 0, why)

    def _commit(self, round_: Round) -> list[FromEngine]:
        first, self._round, self._closed = len(self.answer), Round(), False
        self.answer += round_.ids
        self._rounds += 1
        self._drafted += round_.drafted
        self._accepted += round_.accepted
        tokens = Tokens(
            self.start.epoch, self.start.run, first, round_.ids, round_.ms, round_.logprobs, round_.turns,
            round_.drafted, round_.accepted, round_.shared,
        )  # fmt: skip
        said: list[FromEngine] = [tokens] if round_.ids else []
        ending = round_.ending or ("length" if len(self.answer) >= self.limit else "")
        if ending:
            said.append(self._end(ending, len(self.answer)))
        return said

    def _end(self, reason: str, keep: int, why: str = "") -> Ended:
        self._over = True
        self.rows = 0 if self.guest else min(self.rows, self.prompt + keep)
        start, generated = self.start, len(self.answer)
        return Ended(
            start.epoch, start.run, reason, self.rows, generated, self.prefill_ms, self.decode_ms, why,
            self._rounds, self._drafted, self._accepted,
        )  # fmt: skip
