"""A folder of safetensors, as transformers writes it, as a checkpoint.

``config.json``, one or several ``*.safetensors`` (with their index), ``tokenizer.json``, and where present
``tokenizer_config.json``, ``generation_config.json`` and ``chat_template.jinja``. A setting that would change the
result and is not understood is refused. Matrices quantised by AWQ or GPTQ are unpacked by
``engine/weights/autoquant.py``.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from engine.weights import autoquant, hybrid, rope
from engine.weights.config import Config, stretched
from engine.weights.ends import END_TEXTS
from engine.weights.errors import CheckpointError
from engine.weights.stored import Source, Stored

KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

NESTED = "model.language_model."
"""How names begin in a folder whose model also sees."""

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def canonical(name: str) -> str | None:
    """GGUF's name of a tensor; None for a table of rotary frequencies, which old files carry; others unchanged."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    name = name.replace(NESTED, "model.", 1) if name.startswith(NESTED) else name
    if match := LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        return f"blk.{layer}.{INNER.get(part, part)}.{kind}"
    return OUTER.get(name, name)


class Shards:
    """The tensors of all safetensors files of a folder. A :class:`~engine.weights.stored.Source`."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers. Raises CheckpointError when there is none or one cannot be read."""
        self.files = _weight_files(folder)
        self._places: dict[str, tuple[Path, str]] = {}
        for file in self.files:
            for name in _tensor_names(file):
                if (ours := canonical(name)) is not None:
                    self._places[ours] = (file, name)

    def names(self) -> set[str]:
        """Canonical names of all tensors; a name with no counterpart is the file's own."""
        return set(self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it lies there."""
        return self._opened(name)[0]

    def _opened(self, name: str) -> tuple[torch.Tensor, str]:
        """A tensor and the file's own name of it."""
        if name not in self._places:
            raise CheckpointError(f"The folder has no tensor {name}; the checkpoint is incomplete.")
        file, own = self._places[name]
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(own), own

    def read(self, name: str) -> Stored:
        """One tensor's bytes, copied so that no page of the mapped file stays."""
        tensor, own = self._opened(name)
        if tensor.dtype not in KINDS:
            raise CheckpointError(
                f"Tensor {own} is stored as {tensor.dtype}; use bfloat16, float16 or float32 weights."
            )
        if not tensor.numel():
            raise CheckpointError(f"Tensor {own} has no elements; download the weights again.")
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        flat = tensor.reshape(rows, -1).clone()
        return Stored(KINDS[tensor.dtype], rows, flat.shape[1], flat.view(torch.uint8))


def _weight_files(folder: Path) -> list[Path]:
    """Those the index names; without one ``model.safetensors``, or all there are.

    As transformers picks them: the same weights may lie there a second time, under other names or in another type.
    """
    there = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    if not there:
        raise CheckpointError(f"{folder.name} has no *.safetensors; download the weights into it.")
    index = _read_json(folder / "model.safetensors.index.json")
    named = sorted({str(name) for name in index.get("weight_map", {}).values()})
    if missing := [name for name in named if name not in there]:
        raise CheckpointError(f"{folder.name} lacks {', '.join(missing)}, which its index names; download them.")
    whole = ["model.safetensors"] if "model.safetensors" in there else list(there)
    return [there[name] for name in named or whole]


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.name} is damaged or not a safetensors file; download it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, empty when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON; download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object; download it again.")
    return value


class Folder:
    """One folder."""

    form: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, path: Path) -> None:
        """Reads the JSON files and the headers. Raises CheckpointError when one is missing or cannot be read."""
        self._path = path
        self._config = _read_json(path / "config.json")
        if not self._config:
            raise CheckpointError(f"{path.name} has no config.json; give a folder that transformers could load.")
        self._tokenizer_config = _read_json(path / "tokenizer_config.json")
        self._generation = _read_json(path / "generation_config.json")
        self._shards = Shards(path)
        self.name = path.resolve().name
        self.architecture = str(self._config.get("model_type", "unnamed"))
        self.files = (path / "config.json", *self._shards.files)
        self.file_bytes = sum(file.stat().st_size for file in self._shards.files)

    @cached_property
    def source(self) -> Source:
        """The tensors; those of a quantised folder unpacked. Raises CheckpointError for a way that is not known."""
        said = self._config.get("quantization_config") or self._text.get("quantization_config")
        if not said:
            return self._shards
        scheme = autoquant.scheme(said if isinstance(said, dict) else {})
        return autoquant.Unpacked(self._shards, scheme, canonical)

    @property
    def _text(self) -> dict[str, Any]:
        """The settings of the part that reads and writes text, which lie apart where a model also sees."""
        text = self._config.get("text_config")
        return text if isinstance(text, dict) else self._config

    def _value(self, key: str) -> Any:
        if key not in self._config:
            raise CheckpointError(f"config.json lacks {key}; download it again.")
        return self._config[key]

    def config(self) -> Config:
        """Sizes from config.json."""
        settings = self._config
        names = self.source.names()
        if hybrid.is_hybrid(text := self._text):
            tied = bool(settings.get("tie_word_embeddings", text.get("tie_word_embeddings")))
            return hybrid.configured(text, tied=tied or "output.weight" not in names, mtp=hybrid.MTP in names)
        for key in ("attention_bias", "mlp_bias"):
            if settings.get(key):
                raise CheckpointError(f"config.json sets {key}, which is not supported.")
        if settings.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"The activation {settings['hidden_act']} is not supported, only silu.")
        hidden, heads = int(self._value("hidden_size")), int(self._value("num_attention_heads"))
        layers, head_dim = int(self._value("num_hidden_layers")), int(settings.get("head_dim") or hidden // heads)
        base, scaling = rope.stretch(settings)
        window = stretched(int(self._value("max_position_embeddings")), scaling)
        return Config(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(settings.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            ff=int(self._value("intermediate_size")),
            vocab=int(self._value("vocab_size")),
            eps=float(settings.get("rms_norm_eps", 1e-6)),
            rope_base=base,
            window=window,
            tied=bool(settings.get("tie_word_embeddings", False)) or "output.weight" not in names,
            rope_scaling=scaling,
            rotary=rope.turned(settings, head_dim),
            qkv_bias="blk.0.attn_q.bias" in names,
            qk_norm="blk.0.attn_q_norm.weight" in names,
            windows=self._windows(layers, window),
        )

    def _windows(self, layers: int, whole: int) -> tuple[int, ...]:
        """How many rows each layer sees; () where every one sees all.

        Which layers are narrow is said a layer, by the first of them, or not at all: then all are.
        """
        settings = self._config
        width = int(settings.get("sliding_window") or 0)
        if "use_sliding_window" in settings and not settings["use_sliding_window"]:
            width = 0
        kinds = settings.get("layer_types")
        if kinds is None:
            first = int(settings.get("max_window_layers") or 0)
            kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            raise CheckpointError(f"config.json has layers of the type {unknown[0]}, which is not supported.")
        if len(kinds) != layers:
            raise CheckpointError(f"config.json gives {len(kinds)} layer_types for {layers} layers; download it again.")
        windows = tuple(width if kind == "sliding_attention" and width < whole else 0 for kind in kinds)
        return windows if any(windows) else ()

    def tokenizer_json(self) -> str:
        """The file, without the lengths it was cut or filled up to when it was saved: prompts come whole."""
        path = self._path / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(
                f"{self._path.name} has no tokenizer.json; save the model's fast tokenizer with transformers into it."
            )
        settings = self._tokenizer
        if settings.get("truncation") or settings.get("padding"):
            return json.dumps(settings | {"truncation": None, "padding": None}, ensure_ascii=False)
        return path.read_text(encoding="utf-8")

    def template(self) -> str:
        """``chat_template.jinja``, or the template (of several, the one named default) of tokenizer_config.json."""
        path = self._path / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        template = self._tokenizer_config.get("chat_template") or ""
        if isinstance(template, list):
            return next((str(t["template"]) for t in template if t.get("name") == "default"), "")
        return str(template)

    def special(self) -> dict[str, str]:
        """The text of the tokens that tokenizer_config.json names."""
        found = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = self._tokenizer_config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if text:
                found[name] = str(text)
        return found

    @cached_property
    def _tokenizer(self) -> dict[str, Any]:
        return _read_json(self._path / "tokenizer.json")

    @cached_property
    def _added(self) -> dict[str, int]:
        """Added tokens by their text."""
        return {str(t["content"]): int(t["id"]) for t in self._tokenizer.get("added_tokens", [])}

    def end_ids(self) -> list[int]:
        """The eos ids of both configurations, and added tokens that end a turn by their text."""
        ends: set[int] = set()
        for settings in (self._config, self._text, self._generation):
            eos = settings.get("eos_token_id")
            ends.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
        texts = END_TEXTS | {self.special().get("eos_token", "")}
        return sorted(ends | {i for text, i in self._added.items() if text in texts})

    def bos(self) -> tuple[bool, int | None]:
        """Whether a prompt starts with it, and its id.

        Some tokenizers say so in ``add_bos_token``, others only by a template in tokenizer.json that puts it in front.
        """
        text = self.special().get("bos_token", "")
        bos = self._added.get(text, self._config.get("bos_token_id"))
        add = self._tokenizer_config.get("add_bos_token")
        if add is None:
            add = self._in_front(text)
        return bool(add) and bos is not None, None if bos is None else int(bos)

    def _in_front(self, text: str) -> bool:
        processor = self._tokenizer.get("post_processor") or {}
        for part in [processor, *processor.get("processors", [])]:
            single = part.get("single") if part.get("type") == "TemplateProcessing" else None
            if single and single[0].get("SpecialToken", {}).get("id") == text:
                return True
        return False
