"""The grammar of a run as its thinking lets it: it binds the answer and nothing before it (row E4).

Three times of a run. Inside a block every token may come but an end, for the answer is still to be written, and one
that would close it and write of the answer in the same breath. While the first token may still open a block, the tag
may come beside what the grammar allows. From then on the grammar alone decides. Built when it is first needed: what a
grammar costs is part of a step of its run.
"""

from __future__ import annotations

import numpy as np

from engine.grammar import Masks, Matcher, masked
from engine.pieces import CLOSING, OPENING, Vocabulary
from engine.protocol import Start, Turn
from engine.reasoning import Reasoning
from engine.sampling import Logits


class Binding:
    """The grammar of one run; ``reasoning`` is the run's own, told of each token before this is."""

    def __init__(self, start: Start, masks: Masks, vocabulary: Vocabulary, reasoning: Reasoning) -> None:
        self._start, self._masks, self._vocabulary, self._reasoning = start, masks, vocabulary, reasoning
        self._matcher: Matcher | None = None
        self._lost = False  # what was written before the answer began fits the opening tag alone
        self._written = b""  # the last bytes of the thinking, or all before it

    @property
    def finished(self) -> bool:
        """The answer can only end here."""
        return not (self._reasoning.inside or self._lost) and self._answer().finished

    def mask(self, logits: Logits, ends: bool = True) -> Logits:
        """The logits to choose from; without ``ends`` the answer goes on.

        Raises ``NothingAllowed``, and ``GrammarRefused`` for what is not taken.
        """
        if self._reasoning.inside:
            return self._closing_alone(logits)
        beside = self._opening() if self._reasoning.may_open else []
        if self._lost:
            return masked(logits, np.zeros(self._masks.size, dtype=np.bool_), beside)
        return self._answer().mask(logits, beside, ends)

    def tell(self, token: int, turns: list[Turn]) -> None:
        """The next token of the answer, and the turns that it completed."""
        if any(turn.kind == "closed" for turn in turns):
            self._matcher, self._lost = None, False
            return
        self._written = (self._written + self._masks.pieces[token])[-len(CLOSING) :]
        if self._reasoning.inside or self._lost:
            return
        if self._reasoning.may_open and not self._answer().allowed()[token]:
            self._lost = True
        else:
            self._answer().commit(token)

    def _answer(self) -> Matcher:
        if self._matcher is None:
            assert self._start.grammar is not None
            self._matcher = self._masks.matcher(self._start.grammar, self._start.stop_ids)
        return self._matcher

    def _opening(self) -> list[int]:
        """The ids that go on with the opening tag: the added token at the very begin, and those that spell the rest."""
        if not OPENING.startswith(self._written):
            return []
        rest = OPENING[len(self._written) :]
        added = [] if self._written else sorted(self._vocabulary.opening)
        return added + [
            at for end in range(1, len(rest) + 1) if (at := self._masks.by_piece.get(rest[:end])) is not None
        ]

    def _closing_alone(self, logits: Logits) -> Logits:
        """Inside a block: no token may end the run, nor close the block and write more than blanks behind the tag."""
        banned = [*self._start.stop_ids, *self._masks.over_tags]
        if any(self._written.endswith(CLOSING[:n]) for n in range(1, len(CLOSING))):
            pieces = self._masks.pieces
            banned += [
                at for at in self._masks.beyond_tags if (self._written + pieces[at]).partition(CLOSING)[2].strip()
            ]
        left = logits.copy()
        left[[at for at in banned if at < len(logits)]] = -np.inf
        return left if np.isfinite(left.max()) else logits
