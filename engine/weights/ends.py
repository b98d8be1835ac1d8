"""Which tokens end an answer, beside those the checkpoint names."""

from __future__ import annotations

END_TEXTS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>")
)
"""Control tokens that end a turn or a text wherever they exist; llama.cpp's list (``llama-vocab.cpp``), shortened."""
