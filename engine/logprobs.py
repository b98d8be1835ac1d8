"""Log-probabilities of a chosen token and of the likeliest ones: of the raw logits, not of what was chosen from.

So no penalty, bias, mask or temperature moves a value (row F7); a mask only keeps its tokens out of the alternatives.
"""

from __future__ import annotations

import numpy as np

from engine.protocol import TokenLogprob
from engine.sampling import Ids, Logits, top


def token_logprob(raw: Logits, adjusted: Logits, token: int, n: int) -> TokenLogprob:
    """Of ``token`` and of the ``n`` likeliest, best first, the lower id first where they tie.

    ``adjusted`` are the logits it was chosen from: what is at -inf there and not in ``raw`` was masked out.
    """
    logprobs = log_softmax(raw)
    ids = _likeliest(logprobs, _allowed(raw, adjusted), n) if n > 0 else np.empty(0, np.intp)
    return TokenLogprob(float(logprobs[token]), ids.tolist(), logprobs[ids].tolist())


def log_softmax(logits: Logits) -> Logits:
    """The logarithms of the tokens' shares, float32; the sum is taken in float64, as it runs over a vocabulary."""
    shifted = logits - logits.max()
    shares: Logits = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return shares


def _allowed(raw: Logits, adjusted: Logits) -> Ids | None:
    """The ids a mask leaves, ascending; None when there is no mask."""
    if adjusted is raw:
        return None
    masked = np.isneginf(adjusted) & ~np.isneginf(raw)
    return np.flatnonzero(~masked) if masked.any() else None


def _likeliest(logprobs: Logits, allowed: Ids | None, n: int) -> Ids:
    values = logprobs if allowed is None else logprobs[allowed]
    places = top(values, n)
    places = places[np.argsort(-values[places], kind="stable")]
    return places if allowed is None else allowed[places]
