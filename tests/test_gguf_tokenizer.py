"""engine/weights/gguf_tokenizer.py: the same ids as the model was trained with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.weights.embedded import embedded_model
from engine.weights.errors import CheckpointError
from engine.weights.gguf_reader import GgufFile
from engine.weights.gguf_tokenizer import PRE_TOKENIZERS, begins_with_bos, tokenizer_json
from tests.checkpoints import byte_vocabulary

META: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*byte_vocabulary(320), "ab", "Ġab", "12"],
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 317 + [4, 1, 1],
    "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
}

TEXTS = [
    ("<|im_start|>user\n", [1, 4093, 198]),
    ("Hello  world!! 12345", [19556, 216, 905, 10095, 216, 33, 34, 35, 36, 37]),
    ("emoji 😀 naïve", [391, 33777, 40303, 218, 15486, 46494]),
    ("def f(x):\n    return x**2", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34]),
]
VARIED = [
    "emoji 😀👩‍👩‍👧‍👦 naïve e\u0301",
    "  \n\n\t tabs\r\n x",
    "don't I'LL we've",
    "def f(x):\n    return x**2  # ok",
    "日本語のテキスト。中文 العربية ½ Ⅷ ٣",
    "a<|im_end|>b",
    "",
    "\u00a0\u2003wide",
]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    path = embedded_model()
    if path is None:
        pytest.skip("the embedded model's package is not installed")
    return Tokenizer.from_str(tokenizer_json(GgufFile(path)))


@pytest.mark.parametrize(("text", "ids"), TEXTS)
def test_expected_ids(smollm: Tokenizer, text: str, ids: list[int]) -> None:
    """N3: ids as llama.cpp gives for the same file."""
    assert smollm.encode(text).ids == ids


@pytest.mark.parametrize("text", VARIED)
def test_varied_text_comes_back(smollm: Tokenizer, text: str) -> None:
    """N3: text of all kinds survives the way to ids and back."""
    assert smollm.decode(smollm.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_single_and_hidden(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user<|im_end|>").ids
    assert ids[0] == 1 and ids[-1] == 2
    assert smollm.decode(ids) == "user"


@given(st.text(max_size=60), st.sampled_from(["default", "gpt-2", "smollm", "llama-bpe"]))
def test_any_text_comes_back(text: str, pre: str) -> None:
    """Bytes are never lost, however text is cut. (qwen2 normalises, so its text may come back composed.)"""
    tokenizer = Tokenizer.from_str(tokenizer_json(META | {"tokenizer.ggml.pre": pre}))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_rule_is_one_the_library_reads(pre: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(META | {"tokenizer.ggml.pre": pre}))
    assert tokenizer.decode(tokenizer.encode("x 12 ab").ids) == "x 12 ab"


def pieces(pre: str, text: str) -> list[str]:
    tokenizer = Tokenizer.from_str(tokenizer_json(META | {"tokenizer.ggml.pre": pre}))
    cut = tokenizer.pre_tokenizer
    assert cut is not None
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


def test_the_rules_differ_where_they_should() -> None:
    """Digits one by one, by three, or as a run; contractions in any case or in lower case only."""
    assert pieces("smollm", "a 1234") == ["a", "Ġ", "1", "2", "3", "4"]
    assert pieces("gpt-2", "a 1234") == ["a", "Ġ1234"]
    assert pieces("llama-bpe", "a 1234") == ["a", "Ġ", "123", "4"]
    assert pieces("qwen2", "a 12") == ["a", "Ġ", "1", "2"]
    assert pieces("qwen35", "a 12") == pieces("qwen2", "a 12")
    assert len(pieces("qwen35", "ख़बर है")) == 2 < len(pieces("qwen2", "ख़बर है"))
    assert pieces("default", "1234") == ["123", "4"]
    assert pieces("llama-bpe", "I'LL") == ["I", "'LL"]
    assert pieces("gpt-2", "I'LL") == ["I", "'", "LL"]


def test_user_defined_tokens_are_shown() -> None:
    added = {t["content"]: t["special"] for t in json.loads(tokenizer_json(META))["added_tokens"]}
    assert added == {"<|start|>": True, "<|im_end|>": True, "<|pad|>": True, "ab": False}


def test_bos_where_the_file_does_not_say() -> None:
    assert begins_with_bos({"tokenizer.ggml.pre": "llama-bpe"})
    assert not begins_with_bos({"tokenizer.ggml.pre": "smollm"})
    assert not begins_with_bos({"tokenizer.ggml.pre": "unheard"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "type llama.*safetensors"),
        ({"tokenizer.ggml.model": "bert"}, "type bert"),
        ({"tokenizer.ggml.pre": "unheard"}, "pre-tokenizer unheard is not known"),
        ({"tokenizer.ggml.add_space_prefix": True}, "space"),
    ],
)
def test_what_is_not_exact_is_refused(change: dict[str, Any], said: str) -> None:
    """N3: a tokenizer is right or refused by name."""
    with pytest.raises(CheckpointError, match=said):
        tokenizer_json(META | change)
