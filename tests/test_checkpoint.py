"""engine/weights/checkpoint.py: one face for both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.weights.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoints import write_gguf
from tests.test_folder import folder


def test_a_gguf_file(tmp_path: Path) -> None:
    """N3: everything the server describes itself with, from a .gguf file."""
    opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {}, extra={"tokenizer.chat_template": "{{ x }}"}))
    assert (opened.name, opened.architecture, opened.form) == ("tiny", "llama", "gguf")
    assert (opened.template, opened.end_ids, opened.add_bos, opened.bos_id) == ("{{ x }}", [1], False, 0)
    assert opened.config.window == 128 and opened.special["eos_token"] == "<|im_end|>"
    assert '"ByteLevel"' in opened.tokenizer_json
    assert "token_embd.weight" in opened.names() and opened.read("token_embd.weight").cols == 256


def test_a_safetensors_folder(tmp_path: Path) -> None:
    """N3: and from a folder."""
    (tmp_path / "little").mkdir()
    opened = open_checkpoint(folder(tmp_path / "little"))
    assert (opened.name, opened.architecture, opened.form) == ("little", "llama", "safetensors")
    assert opened.file_bytes == (tmp_path / "little" / "model.safetensors").stat().st_size
    assert (opened.template, opened.end_ids, opened.add_bos, opened.bos_id) == ("", [1, 2], False, 0)
    assert opened.config.vocab == 300 and opened.names() == {"output.weight"}


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no model"):
        open_checkpoint(tmp_path / "absent.gguf")
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither a \.gguf file nor a folder"):
        open_checkpoint(other)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"llama.block_count": 2**31}, "sizes cannot be"),
        ({"llama.context_length": 2**32 - 1}, "sizes cannot be"),
        ({"llama.attention.head_count": 0}, "sizes in a way"),
        ({"llama.embedding_length": 0}, "sizes cannot be"),
        ({"llama.attention.head_count_kv": 3}, "share keys evenly"),
        ({"llama.attention.key_length": 63, "llama.attention.value_length": 63}, "turn in pairs"),
        ({"llama.block_count": "two"}, "sizes in a way"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "above 0"),
        ({"llama.rope.freq_base": float("nan")}, "above 0"),
        ({"tokenizer.ggml.eot_token_id": "two"}, "end tokens in a way"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "special tokens in a way"),
        ({"split.count": "three"}, "contents in a way"),
    ],
)
def test_values_that_cannot_be_are_refused_in_a_sentence(tmp_path: Path, extra: dict[str, Any], said: str) -> None:
    """N3: a damaged file is told from a fault of the engine, and decides about no memory."""
    with pytest.raises(CheckpointError, match=said):
        opened = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", {}, extra=extra))
        _ = opened.config, opened.special, opened.end_ids, opened.bos_id


def test_a_tokenizer_that_the_library_cannot_read_is_refused(tmp_path: Path) -> None:
    """N3: here, by the process that may end over it, and not by the server that waits for it."""
    opened = open_checkpoint(folder(tmp_path))
    broken = json.loads(opened.tokenizer_json)
    broken["model"]["merges"] = [["a", "unheard"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(CheckpointError, match="tokenizers package cannot read"):
        _ = open_checkpoint(tmp_path).tokenizer_json


def test_json_of_a_strange_shape_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """N3: lists where objects belong, and nesting without end."""
    path = folder(tmp_path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(CheckpointError, match="contents in a way"):
        open_checkpoint(path)
    (path / "model.safetensors.index.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=r"contents in a way|not valid JSON"):
        open_checkpoint(path)
    (path / "model.safetensors.index.json").unlink()
    (path / "tokenizer_config.json").write_text('{"chat_template": ["x"], "bos_token": 7}')
    opened = open_checkpoint(path)
    with pytest.raises(CheckpointError, match="chat template in a way"):
        _ = opened.template


def test_a_place_that_may_not_be_looked_into_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: not a fault of the engine that would be tried three times."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(CheckpointError, match="PermissionError"):
        open_checkpoint(tmp_path / "model.gguf")
