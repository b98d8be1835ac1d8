"""A GGUF file as a checkpoint: its metadata keys, put into our terms.

Keys are those of the GGUF specification (ggml/docs/gguf.md). A key that would change the result and is not understood
is refused, so that a model is never served wrongly.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from engine.weights import hybrid
from engine.weights.config import Config, RopeScaling, stretched, yarn_attention
from engine.weights.ends import END_TEXTS
from engine.weights.errors import CheckpointError
from engine.weights.gguf_reader import GgufFile
from engine.weights.gguf_tokenizer import CONTROL, USER_DEFINED, begins_with_bos, tokenizer_json

REQUIRED = object()


class Gguf:
    """One GGUF file."""

    form: Literal["gguf", "safetensors"] = "gguf"

    def __init__(self, path: Path) -> None:
        """Reads the metadata. Raises CheckpointError when the file cannot be read."""
        self.source = GgufFile(path)
        self.name = path.stem
        self.files: tuple[Path, ...] = (path,)
        self.file_bytes = path.stat().st_size
        self.architecture = str(self._value("general.architecture"))
        if self.source.get("split.count", 1) > 1:
            raise CheckpointError(f"{path.name} is one part of several; merge them with gguf-split --merge first.")

    def _value(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.source.get(key, default)
        if value is REQUIRED:
            raise CheckpointError(
                f"The GGUF file lacks the key {key}: its architecture {self.source.get('general.architecture')} "
                "is not supported, or it should be converted anew with a current converter."
            )
        return value

    @cached_property
    def _tokens(self) -> Any:
        """The vocabulary, decoded once."""
        return self._value("tokenizer.ggml.tokens")

    def _own(self, key: str, default: Any = REQUIRED) -> Any:
        """A key of the architecture's own."""
        return self._value(f"{self.architecture}.{key}", default)

    def _size(self, key: str, default: Any = REQUIRED) -> int:
        """A count that must be the same for all layers."""
        value = self._own(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(f"{self.architecture}.{key} differs from layer to layer, which is not supported.")
            value = value[0]
        return int(value)

    def config(self) -> Config:
        """Sizes from ``<architecture>.*``."""
        window = self._size("context_length")
        recurrent = self._own("ssm.group_count", None) is not None
        if (self._own("expert_count", 0) and not recurrent) or 0 < self._size("attention.sliding_window", 0) < window:
            key = "expert_count" if self._own("expert_count", 0) else "attention.sliding_window"
            raise CheckpointError(f"The model sets {self.architecture}.{key}, which is not supported.")
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden // heads)
        if self._size("attention.value_length", head_dim) != head_dim:
            raise CheckpointError("Keys and values of different width are not supported.")
        rotary, scaling, names = self._size("rope.dimension_count", head_dim), self._scaling(), self.source.names()
        config = Config(
            layers=self._size("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._size("attention.head_count_kv", heads),
            head_dim=head_dim,
            ff=self._size("feed_forward_length", 0 if recurrent else REQUIRED),
            vocab=len(self._tokens),
            eps=float(self._own("attention.layer_norm_rms_epsilon")),
            rope_base=float(self._own("rope.freq_base", 10000.0)),
            window=stretched(window, scaling),
            tied="output.weight" not in names,
            rope_scaling=scaling,
            rotary=0 if rotary == head_dim else rotary,
            qkv_bias="blk.0.attn_q.bias" in names,
            qk_norm="blk.0.attn_q_norm.weight" in names,
        )
        return hybrid.in_gguf(config, self._own, names) if recurrent else config

    def _scaling(self) -> RopeScaling | None:
        if "rope_freqs.weight" in self.source.names():
            return RopeScaling("factors")
        kind = self._own("rope.scaling.type", "none")
        # Files older than the key "type" carry a linear factor alone.
        factor = float(self._own("rope.scaling.factor", self._own("rope.scale_linear", 1.0)))
        if kind == "linear" or (kind == "none" and self._own("rope.scaling.type", None) is None and factor != 1.0):
            return RopeScaling("linear", factor)
        if kind == "yarn":
            return self._yarn(factor)
        if kind != "none":
            raise CheckpointError(f"The model stretches its window by {kind} scaling, which is not supported.")
        return None

    def _yarn(self, factor: float) -> RopeScaling:
        """As llama.cpp reads it; what only other families' files say is refused."""
        for key, usual in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
            if float(self._own(f"rope.scaling.{key}", usual)) != usual:
                raise CheckpointError(f"The model sets {self.architecture}.rope.scaling.{key}, which is not supported.")
        return RopeScaling(
            "yarn",
            factor,
            original_window=self._size("rope.scaling.original_context_length", self._size("context_length")),
            beta_fast=float(self._own("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._own("rope.scaling.yarn_beta_slow", 1.0)),
            attention=float(self._own("rope.scaling.attn_factor", 1.0)) * yarn_attention(factor),
        )

    def tokenizer_json(self) -> str:
        """Built from ``tokenizer.ggml.*``."""
        return tokenizer_json(self.source)

    def template(self) -> str:
        """The chat template, "" when there is none."""
        return str(self._value("tokenizer.chat_template", ""))

    def special(self) -> dict[str, str]:
        """The text of the tokens that the metadata names."""
        tokens = self._tokens
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self.source.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
        return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}

    def end_ids(self) -> list[int]:
        """eos, eot and eom of the metadata, and tokens matched in text that end a turn by their text.

        Old conversions call some of these user-defined, so control tokens alone would miss them.
        """
        named = (self.source.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
        kinds = self._value("tokenizer.ggml.token_type", [])
        texts = self._tokens
        marks = (i for i, kind in enumerate(kinds[: len(texts)]) if kind in (CONTROL, USER_DEFINED))
        return sorted({int(i) for i in named if i is not None} | {i for i in marks if texts[i] in END_TEXTS})

    def bos(self) -> tuple[bool, int | None]:
        """Whether a prompt starts with it, and its id. Without the key it does where llama.cpp says so."""
        bos = self.source.get("tokenizer.ggml.bos_token_id")
        add = bool(self._value("tokenizer.ggml.add_bos_token", begins_with_bos(self.source)))
        return add and bos is not None, None if bos is None else int(bos)
