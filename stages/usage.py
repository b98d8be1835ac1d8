"""What a request cost, in OpenAI's words (row F3) and in llama.cpp's (row F4)."""

from __future__ import annotations

from typing import Any


def usage(prompt: int, completion: int, cached: int, reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's usage object, in tokens. ``cached`` is part of ``prompt``, ``reasoning`` of ``completion``."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def timings(
    *,
    prompt_n: int,
    prompt_ms: float,
    predicted_n: int,
    predicted_ms: float,
    cache_n: int = 0,
    draft_n: int = 0,
    draft_n_accepted: int = 0,
    queue_ms: float = 0.0,
    ttft_ms: float = 0.0,
    total_ms: float = 0.0,
) -> dict[str, int | float]:
    """llama.cpp's timings, the engine's counts: ``cache_n + prompt_n`` rows are the prompt. Times in milliseconds.

    ``predicted_ms`` runs from the first token, so its rate counts the tokens after it.
    """
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": _rate(prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_second": _rate(max(predicted_n - 1, 0), predicted_ms),
        "draft_n": draft_n,
        "draft_n_accepted": draft_n_accepted,
        "queue_ms": round(queue_ms, 3),
        "ttft_ms": round(ttft_ms, 3),
        "total_ms": round(total_ms, 3),
    }


def _rate(count: int, ms: float) -> float:
    """Tokens a second; 0 where no time was taken."""
    return round(count * 1000.0 / ms, 3) if ms > 0 else 0.0
