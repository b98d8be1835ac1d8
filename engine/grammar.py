"""Masks from a grammar: which tokens keep the answer completable (section E).

What ``Start.grammar.text`` carries is llguidance's JSON form, ``{"grammars": [{"lark_grammar": …}, {"name": …,
"json_schema": …}]}``: the first is where the answer begins, the others are what it refers to. The server writes and
judges it (``stages/constraint.py``, with :func:`compile_grammar` in a worker); the engine builds its own matcher from
the same text, and one that it does not take after all is the engine's fault.

A mask works on bytes: a token may end halfway through a character, and every token is allowed whose bytes keep the
answer completable. Tokens that write no bytes are never allowed, but for stop ids once the answer is complete. A token
refused is an error for good to the library, so none is committed that the mask did not allow.

Use: ``mask`` before choosing, ``commit`` after it, and no further token once ``finished``. This order needs no
rollback. Knows tokens, bytes and llguidance; no thinking (``binding``), no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from engine.pieces import CLOSING
from engine.protocol import Grammar
from engine.sampling import Logits

MAX_BYTES = 4 << 20
"""Of a grammar's text: a schema of 256 kB, and what tools add to it."""
KEPT = 8
"""Grammars that are kept compiled."""

Allowed = NDArray[np.bool_]


class GrammarRefused(Exception):
    """A grammar that was judged to be fine was not taken, or gave up on the way: too complex, or no token fits."""


class NothingAllowed(Exception):
    """No token is left to choose, or one was committed that the mask did not allow."""


class Masks:
    """The tokens of a model as matchers need them. The first matcher takes a second more for a large vocabulary.

    ``pieces``: the bytes each id writes, b"" for those that write none. ``end_ids``: what ends an answer. ``size``: how
    many logits there are.
    """

    def __init__(self, pieces: Items[bytes], end_ids: Items[int], size: int) -> None:
        self.size = max(size, len(pieces))
        self.pieces = [*pieces, *[b""] * (self.size - len(pieces))]
        self.ends = frozenset(end for end in end_ids if 0 <= end < self.size)
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar, stop_ids: Items[int] = ()) -> Matcher:
        """A matcher at the begin of an answer of a run with these ``stop_ids``. Raises ``GrammarRefused``."""
        kept = self._kept.pop(grammar.text, None) or self._built(grammar.text)
        self._kept[grammar.text] = kept
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return Matcher(self, kept.deep_copy(), stop_ids)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The library's own form of the vocabulary. What it has for an end is masked by us."""
        tokens = [b"" if at in self.ends else piece for at, piece in enumerate(self.pieces)]
        end = min(self.ends, default=len(tokens))
        tokens += [b""] * (end == len(tokens))
        return LLTokenizer(TokenizerWrapper(_Tokens(tokens, end)), eos_token=end)

    @cached_property
    def by_piece(self) -> dict[bytes, int]:
        """An id by what it writes; the lowest."""
        return {piece: at for at, piece in reversed(list(enumerate(self.pieces))) if piece}

    @cached_property
    def beyond_tags(self) -> list[int]:
        """The ids that may write more than blanks behind the end of a tag that is begun."""
        return [at for at, piece in enumerate(self.pieces) if piece.partition(b">")[2].strip()]

    @cached_property
    def over_tags(self) -> list[int]:
        """The ids that write the whole closing tag and more than blanks behind it."""
        return [at for at, piece in enumerate(self.pieces) if piece.partition(CLOSING)[2].strip()]

    def _built(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarRefused
        return matcher


class Matcher:
    """Where one answer stands in its grammar. Of ``stop_ids`` those that write nothing may come when it is complete."""

    def __init__(self, masks: Masks, matcher: LLMatcher, stop_ids: Items[int]) -> None:
        self._masks, self._matcher = masks, matcher
        inside = [stop for stop in stop_ids if 0 <= stop < masks.size]
        self._stops = [stop for stop in inside if stop in masks.ends or not masks.pieces[stop]]
        self._bits = allocate_token_bitmask(1, masks.tokenizer.vocab_size)
        self._allowed: Allowed | None = None

    @property
    def complete(self) -> bool:
        """The answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """The answer can only end here: it does, and no token is needed to say so."""
        return self.complete and not self.allowed().any()

    def allowed(self) -> Allowed:
        """Which tokens may come next, one truth value an id, those that end it aside. Raises ``GrammarRefused``."""
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    def mask(self, logits: Logits, beside: Items[int] = (), ends: bool = True) -> Logits:
        """The logits to choose from, -inf for what is not allowed; those given stay as they are.

        ``beside``: ids that are allowed whatever the grammar says. ``ends``: so is the end of a complete answer. Raises
        ``NothingAllowed``.
        """
        return masked(logits, self.allowed(), [*(self._stops if ends and self.complete else ()), *beside])

    def commit(self, token: int) -> None:
        """The answer goes on with ``token``. Raises ``NothingAllowed`` for one that is not allowed."""
        if not self.allowed()[token] or not self._matcher.consume_token(token):
            raise NothingAllowed
        self._allowed = None

    def _compute(self) -> Allowed:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return np.zeros(self._masks.size, dtype=np.bool_)
        fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            raise GrammarRefused
        bits = np.unpackbits(self._bits[0].view(np.uint8), count=self._masks.size, bitorder="little")
        bits[list(self._masks.ends)] = 0
        return bits.view(np.bool_)


def masked(logits: Logits, allowed: Allowed, beside: Items[int]) -> Logits:
    """A copy with -inf for what is neither ``allowed`` nor ``beside``. Raises ``NothingAllowed``."""
    left: Logits = np.where(allowed[: len(logits)], logits, np.float32(-np.inf))
    ids = np.array([token for token in beside if token < len(logits)], dtype=np.intp)
    left[ids] = logits[ids]
    if np.isneginf(left.max()):
        raise NothingAllowed
    return left


class _Tokens:
    """What the library asks of a tokenizer. ``__call__`` serves hints it is not asked for here: a token a byte."""

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = tokens, end
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self._bytes = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._bytes[byte] for byte in raw if byte in self._bytes]


def _limits() -> LLParserLimits:
    """What a grammar may cost: fuel is about 50,000 a millisecond to build and 14,000 a millisecond to step."""
    return LLParserLimits(
        initial_lexer_fuel=5_000_000, step_lexer_fuel=500_000, max_grammar_size=500_000, verbose_errors=False
    )


BYTES = [bytes([byte]) for byte in range(256)]
"""The least vocabulary: a token a byte. A grammar is judged with it, whatever the model's is."""
_JUDGING = Masks(BYTES, [256], 257)


def compile_grammar(text: str) -> str:
    """What is wrong with a grammar, "" for one that matchers are made of. For a worker: it may take long.

    What it says may quote the grammar: for the one who wrote it only, never for a log.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        return "too large"
    matcher = LLMatcher(_JUDGING.tokenizer, text, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error() or "")
