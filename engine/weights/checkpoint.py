"""Opens a checkpoint of either format: metadata at once, tokenizer and configuration when asked, tensors last.

So an unknown architecture is named before anything else of the file is interpreted, and prompts can be rendered while
the weights are still being read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from tokenizers import Tokenizer

from engine.weights.config import Config
from engine.weights.errors import CheckpointError
from engine.weights.folder import Folder
from engine.weights.gguf_checkpoint import Gguf
from engine.weights.stored import Source, Stored

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

Value = TypeVar("Value")


class Format(Protocol):
    """What a file format has to tell; :class:`Checkpoint` documents each answer."""

    name: str
    architecture: str
    file_bytes: int
    files: tuple[Path, ...]
    form: Literal["gguf", "safetensors"]

    @property
    def source(self) -> Source: ...
    def config(self) -> Config: ...
    def tokenizer_json(self) -> str: ...
    def template(self) -> str: ...
    def special(self) -> dict[str, str]: ...
    def end_ids(self) -> list[int]: ...
    def bos(self) -> tuple[bool, int | None]: ...


class Checkpoint:
    """One opened checkpoint. Every attribute may raise CheckpointError when the file does not support it."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self.name = form.name
        """The model's name for people: the file's stem or the folder's name."""
        self.architecture = form.architecture
        """What the registry is asked for: "llama", …"""
        self.file_bytes = form.file_bytes
        """Bytes of the GGUF file, or of all safetensors files together."""
        self.files = form.files
        """The files that hold the weights and their sizes: who changes a weight changes one of them."""
        self.form = form.form
        """The file format; builders know in which order a family's converter leaves rows."""

    @cached_property
    def config(self) -> Config:
        """The model's sizes, normalised."""
        config = self._asked("sizes", self._form.config)
        config.check()
        return config

    @cached_property
    def tokenizer_json(self) -> str:
        """What ``tokenizers.Tokenizer.from_str`` reads: it is tried here."""
        text = self._asked("tokenizer", self._form.tokenizer_json)
        try:
            Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise CheckpointError(f"The tokenizers package cannot read {self.name}'s tokenizer: {error}.") from error
        return text

    @cached_property
    def template(self) -> str:
        """The Jinja chat template; "" when there is none."""
        return self._asked("chat template", self._form.template)

    @cached_property
    def special(self) -> dict[str, str]:
        """The names a template may use (``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``) and their text."""
        return self._asked("special tokens", self._form.special)

    @cached_property
    def end_ids(self) -> list[int]:
        """Token ids that end an answer, ascending."""
        return self._asked("end tokens", self._form.end_ids)

    @property
    def add_bos(self) -> bool:
        """Whether a prompt starts with ``bos_id``."""
        return self._asked("bos token", self._form.bos)[0]

    @property
    def bos_id(self) -> int | None:
        """The id of the token a text begins with, when there is one."""
        return self._asked("bos token", self._form.bos)[1]

    def names(self) -> set[str]:
        """The tensors' canonical names, those of GGUF."""
        return self._form.source.names()

    def read(self, name: str) -> Stored:
        """One tensor, read now. Raises CheckpointError when it is missing."""
        return self._asked(f"tensor {name}", lambda: self._form.source.read(name))

    def _asked(self, what: str, question: Callable[[], Value]) -> Value:
        return _asked(self.name, what, question)


def _asked(name: str, what: str, question: Callable[[], Value]) -> Value:
    """The answer; a value of another type or out of range, which a damaged file may hold, is a CheckpointError."""
    try:
        return question()
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} does not say its {what} in a way that can be read ({type(error).__name__}); "
            "download it again or convert it anew."
        ) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.gguf`` file or a folder of safetensors. Raises CheckpointError that says what to do."""
    return Checkpoint(_asked(path.name, "contents", lambda: _opened(path)))


def _opened(path: Path) -> Format:
    if path.is_dir():
        return Folder(path)
    if not path.exists():
        raise CheckpointError(f"There is no model at {path}; give a .gguf file or a safetensors folder with --model.")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path.name} is neither a .gguf file nor a folder; give one of these with --model.")
    return Gguf(path)
