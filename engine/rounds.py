"""A joint round: one forward pass for several runs, each with its draft, and what each run takes of it.

The token of every row is chosen exactly as without a draft: from that row's logits, as the run's own rules have it,
with the noise of its position. Where the draft has that token its row was computed too, and the next is chosen from
it. So drafts and neighbours change when a token comes, never which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine import sampling
from engine.logprobs import token_logprob
from engine.models.batch import Rows
from engine.models.cache import Cache
from engine.protocol import TokenLogprob
from engine.sampling import Logits
from engine.sequence import Sequence
from engine.speculate.draft import NOTHING, Draft


@dataclass(frozen=True, slots=True)
class Part:
    """A run's part of a joint round: its rows are its last committed token's and the draft's behind it."""

    slot: int
    run: Sequence
    draft: Draft = NOTHING

    @property
    def start(self) -> int:
        """The row of the last committed token."""
        return self.run.prompt + len(self.run.answer) - 1

    def rows(self, cache: Cache) -> Rows:
        """What the model is given."""
        tokens, parents = self.draft.rows(self.run.answer[-1])
        return Rows(cache, tokens, self.start, parents, len(tokens), draft=True)


def walk(run: Sequence, logits: Logits, draft: Draft, before: Callable[[Sequence], None]) -> list[int]:
    """Choose a round's tokens, as many as the draft has rows for and one more; the rows they took, the first one's 0.

    ``logits`` ``[rows, vocab]``. The row of the last token is among them where it was computed, so that it stays
    resident. ``before`` is called before each choice. The round is left open.
    """
    path = [0]
    while not run.finished:
        before(run)
        token, logprob = choose(run, logits[path[-1]])
        child = draft.child(path[-1] - 1, token) if run.take(token, logprob) else None
        if child is None:
            break
        path.append(child + 1)
        if not run.goes_on:
            break
    return path


def choose(run: Sequence, raw: Logits) -> tuple[int, TokenLogprob | None]:
    """The next token by its logits, with its log-probability where the run asks for that.

    Where the thinking must be closed it is the forced one instead, whatever the logits say; the alternatives beside it
    are those of any token there.
    """
    start, token = run.start, run.forced
    adjusted = run.adjusted(raw)
    if token is None:
        token = sampling.choose(adjusted, start.sampling, start.choice, run.position)
    else:
        sampling.highest(raw)  # a forward pass that went wrong is a fault here too
    return token, token_logprob(raw, adjusted, token, start.logprobs) if start.logprobs >= 0 else None
