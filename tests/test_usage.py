from stages.usage import timings, usage


def test_usage():
    """F3: OpenAI's object; cached and reasoning tokens are parts of their sums."""
    assert usage(100, 20, 64, 5) == {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }
    assert usage(1, 1, 0)["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_timings():
    """F4: llama.cpp's names and ours, in one object."""
    timing = timings(
        prompt_n=36,
        prompt_ms=72.0,
        predicted_n=20,
        predicted_ms=400.0,
        cache_n=64,
        queue_ms=1.23456,
        ttft_ms=80,
        total_ms=480,
    )
    assert set(timing) == {
        *("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"),
        *("cache_n", "draft_n", "draft_n_accepted", "queue_ms", "ttft_ms", "total_ms"),
    }
    assert (timing["prompt_per_second"], timing["predicted_per_second"]) == (500.0, 47.5)
    assert timing["queue_ms"] == 1.235


def test_no_time_no_rate():
    """F4: a prompt that came whole from a cache has no rate."""
    assert timings(prompt_n=0, prompt_ms=0.0, predicted_n=0, predicted_ms=0.0)["prompt_per_second"] == 0.0
