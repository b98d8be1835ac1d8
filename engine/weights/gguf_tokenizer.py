"""A GGUF file's vocabulary as the JSON of the ``tokenizers`` package.

Byte-level BPE only (``tokenizer.ggml.model`` "gpt2"). How text is cut before merging is not in the file, only a name
for it; the rules behind the names are those of the models' own tokenizer.json and of llama.cpp (``llama-vocab.cpp``). A
name that is not known here is refused: a tokenizer that is nearly right gives answers that are quietly worse.
SentencePiece vocabularies ("llama") are refused too: ``tokenizers`` breaks ties between merges in another order, so ids
could differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec

from engine.weights.errors import CheckpointError

CONTROL = 3
USER_DEFINED = 4
"""``tokenizer.ggml.token_type``: both are matched in text before anything else; control tokens are not shown."""

_WORDS = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"
_LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_QWEN2 = _LLAMA3.replace("\\p{N}{1,3}", "\\p{N}")
# Marks go with the letters before them.
_QWEN35 = _QWEN2.replace("?\\p{L}+", "?[\\p{L}\\p{M}]+").replace("\\s\\p{L}", "\\s\\p{L}\\p{M}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _cut(*patterns: str) -> dict[str, Any]:
    """Cut by each pattern in turn, then go over to bytes."""
    splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(False)]}


_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
}


class Pre(NamedTuple):
    """``rules`` cut text into words. ``nfc``: text is normalised first.

    ``whole``: a word that is itself in the vocabulary is taken without merging. ``bos``: prompts begin with the bos
    token where the file does not say.
    """

    rules: dict[str, Any]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


PRE_TOKENIZERS = {
    "default": Pre(_cut("[\\p{P}\\$\\+<=>\\^~\\|]+", _WORDS, "\\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Pre(_byte_level(True)),
    "smollm": Pre(_DIGITS),
    "starcoder": Pre(_DIGITS),
    "refact": Pre(_DIGITS),
    "llama-bpe": Pre(_cut(_LLAMA3), whole=True, bos=True),
    "llama3": Pre(_cut(_LLAMA3), whole=True, bos=True),
    "llama-v3": Pre(_cut(_LLAMA3), whole=True, bos=True),
    "dbrx": Pre(_cut(_LLAMA3)),
    "qwen2": Pre(_cut(_QWEN2), nfc=True),
    "qwen35": Pre(_cut(_QWEN35), nfc=True),
    "deepseek-r1-qwen": Pre(_cut(_QWEN2), nfc=True),
}
"""By ``tokenizer.ggml.pre``."""


class Metadata(Protocol):
    """A GGUF file's metadata; a plain dictionary will do."""

    def get(self, key: str, default: Any = None, /) -> Any:
        """The value, or ``default`` where the file has none."""
        ...


def tokenizer_json(meta: Metadata) -> str:
    """The tokenizer that ``meta`` (the file's metadata) describes. Raises CheckpointError for one not supported."""
    model = meta.get("tokenizer.ggml.model", "none")
    if model != "gpt2":
        raise CheckpointError(
            f"The GGUF file's vocabulary is of the type {model}, and only gpt2 (byte-level BPE) is supported; "
            "use the model's safetensors folder, which carries its own tokenizer.json."
        )
    pre = _pre_name(meta)
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"The GGUF file's pre-tokenizer {pre} is not known; known are {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's safetensors folder, which carries its own tokenizer.json."
        )
    if meta.get("tokenizer.ggml.add_space_prefix"):
        raise CheckpointError("The GGUF file asks for a space before every text, which is not supported for gpt2.")
    return msgspec.json.encode(_describe(meta, PRE_TOKENIZERS[pre])).decode()


def begins_with_bos(meta: Metadata) -> bool:
    """Whether prompts begin with the bos token in a file that does not say."""
    pre = PRE_TOKENIZERS.get(_pre_name(meta))
    return pre is not None and pre.bos


def _pre_name(meta: Metadata) -> str:
    return str(meta.get("tokenizer.ggml.pre", "default"))


def _describe(meta: Metadata, pre: Pre) -> dict[str, Any]:
    tokens = meta.get("tokenizer.ggml.tokens", [])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, meta.get("tokenizer.ggml.token_type", [])),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": pre.rules,
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in meta.get("tokenizer.ggml.merges", [])],
        },
    }


def _added(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for i, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]
