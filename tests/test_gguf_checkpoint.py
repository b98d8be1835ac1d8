"""engine/weights/gguf_checkpoint.py: what the metadata says, in our terms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from engine.weights.config import RopeScaling
from engine.weights.errors import CheckpointError
from engine.weights.gguf_checkpoint import Gguf
from tests.checkpoints import write_gguf


def opened(tmp_path: Path, **extra: Any) -> Gguf:
    named = {key.replace("__", "."): value for key, value in extra.items()}
    return Gguf(write_gguf(tmp_path / "tiny.gguf", {}, extra=named))


def test_sizes(tmp_path: Path) -> None:
    """N3: the configuration from the file's own keys."""
    config = opened(tmp_path).config()
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (2, 256, 4, 2, 64)
    assert (config.ff, config.vocab, config.window, config.tied) == (512, 320, 128, True)
    assert config.rope_base == 10000.0 and config.rope_scaling is None


def test_who_it_is(tmp_path: Path) -> None:
    form = opened(tmp_path)
    assert (form.name, form.architecture, form.form) == ("tiny", "llama", "gguf")
    assert form.file_bytes == (tmp_path / "tiny.gguf").stat().st_size
    assert form.template() == ""
    assert form.special() == {"bos_token": "<|start|>", "eos_token": "<|im_end|>"}


def test_ends_are_named_ones_and_turn_ends(tmp_path: Path) -> None:
    """eos, eot and eom by their keys, and control tokens that end a turn by their text."""
    assert opened(tmp_path).end_ids() == [1]
    assert opened(tmp_path, tokenizer__ggml__eot_token_id=2).end_ids() == [1, 2]


def test_a_turn_end_that_was_converted_as_user_defined_still_ends(tmp_path: Path) -> None:
    """N3: old conversions give <|im_end|> another token type; an answer must end there all the same."""
    form = opened(tmp_path)
    meta = form.source._meta
    meta["tokenizer.ggml.token_type"], meta["tokenizer.ggml.tokens"] = (
        [1, 4, 3, 1],
        ["x", "<|im_end|>", "<EOT>", "<|end|>"],
    )
    meta["tokenizer.ggml.eos_token_id"] = 2
    assert form.end_ids() == [1, 2]


@pytest.mark.parametrize(
    ("extra", "add"), [({}, False), ({"tokenizer__ggml__add_bos_token": True}, True)], ids=["unsaid", "said"]
)
def test_bos(tmp_path: Path, extra: dict[str, Any], add: bool) -> None:
    assert opened(tmp_path, **extra).bos() == (add, 0)


def test_linear_scaling(tmp_path: Path) -> None:
    form = opened(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert form.config().rope_scaling == RopeScaling("linear", 4.0)


def test_yarn(tmp_path: Path) -> None:
    """N3: llama.cpp's keys and defaults; ``attn_factor`` comes on top of what the stretch asks for."""
    keys: dict[str, Any] = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    config = opened(tmp_path, **keys).config()
    grown = pytest.approx(0.1 * math.log(4) + 1)
    assert config.rope_scaling == RopeScaling("yarn", 4.0, original_window=128, attention=grown)
    assert config.window == 512
    keys |= {"llama__rope__scaling__original_context_length": 32, "llama__rope__scaling__yarn_beta_fast": 8.0}
    keys |= {"llama__rope__scaling__attn_factor": 0.5}
    config = opened(tmp_path, **keys).config()
    half = pytest.approx(0.05 * math.log(4) + 0.5)
    assert config.rope_scaling == RopeScaling("yarn", 4.0, original_window=32, beta_fast=8.0, attention=half)
    assert config.window == 128


def test_a_window_that_reaches_over_all_rows_is_none(tmp_path: Path) -> None:
    assert opened(tmp_path, llama__attention__sliding_window=128).config().windows == ()


def test_a_part_of_each_head(tmp_path: Path) -> None:
    """N3: the builder says where it is not supported."""
    assert opened(tmp_path, llama__rope__dimension_count=32).config().rotary == 32
    assert opened(tmp_path, llama__rope__dimension_count=64).config().rotary == 0


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"llama__expert_count": 8}, "expert_count"),
        ({"llama__attention__sliding_window": 64}, "sliding_window"),
        ({"llama__attention__value_length": 32}, "Keys and values"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_log_multiplier": 0.1}, "log_multiplier"),
    ],
)
def test_what_would_change_the_result_is_refused(tmp_path: Path, extra: dict[str, Any], said: str) -> None:
    """N3: a setting that is not understood is named, never ignored."""
    with pytest.raises(CheckpointError, match=said):
        opened(tmp_path, **extra).config()


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one part of several"):
        opened(tmp_path, split__count=3)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    form = Gguf(write_gguf(tmp_path / "tiny.gguf", {}, arch="llama"))
    form.architecture = "strange"
    with pytest.raises(CheckpointError, match=r"strange\.context_length"):
        form.config()
