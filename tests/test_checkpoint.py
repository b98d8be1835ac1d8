"""engine/weights/checkpoint.py: one face for both formats."""

from __future__ import annotations

from pathlib import Path

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
