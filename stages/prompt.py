"""Messages to text to token ids, with the checkpoint's own chat template and tokenizer.

What this file knows: how Hugging Face's checkpoints expect their template to be run, and the bytes of every token.

* ``developer`` is ``system``; those at the start become one system prompt (row A7). The texts of a part list are
  joined by line breaks, as other servers do; a null content is the empty text. A last message of the assistant is
  continued: rendered without its close and without a new header.
* **A client's text cannot write control tokens.** Tokenizers find special tokens anywhere in the text they are given,
  so a message that spells ``<|im_end|>`` would end its own turn. Here each such spelling gets a mark inside it before
  the template runs, and the rendered text is cut at the marks and encoded piece by piece: the same characters, as
  ordinary tokens. Only tokens the tokenizer calls special are guarded; tags a template itself looks for in a history
  (``</think>``) are left to it. A raw completion prompt is not guarded: there the client writes the whole prompt.
* No exception text of a template goes anywhere but to the client who sent the messages.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from engine.protocol import Described
from stages.judge import ending
from stages.refusal import Refusal, refuse
from stages.schema import ChatRequest, CompletionRequest, Message, Request, ToolCall
from stages.validate import SYSTEM, foreign_id, prompt_of

MARK = "\ufdd0\ufdd1"
"""Two noncharacters, which Unicode gives to no text; a client's own are cut out likewise."""
CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands at the end of a message to be continued; the blank tells whether the template strips its content."""
OWN_WORDS = 300
"""Characters of a template's own complaint that a client sees."""


class Renderer:
    """One checkpoint's prompts. Building it takes a fraction of a second; it keeps no request."""

    def __init__(self, described: Described) -> None:
        self._tokenizer = Tokenizer.from_str(described.tokenizer)
        self._vocab, self._end_ids = described.vocab, described.end_ids
        self._bos = described.bos_id if described.add_bos else None
        self._names = described.special
        self._template = _compiled(described.template)
        self._guard = _guard(self._tokenizer)
        self.pieces = _pieces(described.tokenizer, described.vocab)

    def render_chat(self, request: ChatRequest, wall: float) -> str | Refusal:
        """The text of the prompt; ``wall`` in seconds since 1970 is the day a template may name, in UTC."""
        rendered = self._render(request, wall)
        return rendered if isinstance(rendered, Refusal) else rendered.replace(MARK, "")

    def prompt(self, request: Request, wall: float) -> list[int] | Refusal:
        """The prompt's token ids, at least one; a refusal also for ids of other fields outside the vocabulary."""
        fault = foreign_id(request, self._vocab) or self._mute(request)
        if fault:
            return fault
        ids = self._chat(request, wall) if isinstance(request, ChatRequest) else self._completion(request)
        if isinstance(ids, Refusal) or ids:
            return ids
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        return refuse("invalid_value", field, f"{field} renders to no token.")

    def _mute(self, request: Request) -> Refusal | None:
        """A refusal where ``min_tokens`` forbids every token there is."""
        ends = ending(request)
        if not ends.min_tokens or len(ends.all_ids(self._end_ids)) < self._vocab:
            return None
        return refuse("invalid_value", "min_tokens", "min_tokens leaves no token: all are stop ids.")

    def _chat(self, request: ChatRequest, wall: float) -> list[int] | Refusal:
        rendered = self._render(request, wall)
        return rendered if isinstance(rendered, Refusal) else self._begun(self._encode(rendered.split(MARK)))

    def _completion(self, request: CompletionRequest) -> list[int] | Refusal:
        prompt = prompt_of(request)
        if isinstance(prompt, Refusal):
            return prompt
        if isinstance(prompt, str):
            return self._begun(self._encode([prompt]))
        outside = next((token for token in prompt if not 0 <= token < self._vocab), None)
        if outside is None:
            return prompt
        text = f"prompt holds the token id {outside}; this model's vocabulary is 0 to {self._vocab - 1}."
        return refuse("invalid_value", "prompt", text)

    def _encode(self, texts: list[str]) -> list[int]:
        ids: list[int] = []
        for text in texts:
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _begun(self, ids: list[int]) -> list[int]:
        """With the token a text begins with, once, also where the template wrote it."""
        if self._bos is None or ids[:1] == [self._bos]:
            return ids
        return [self._bos, *ids]

    def _render(self, request: ChatRequest, wall: float) -> str | Refusal:
        if self._template is None:
            text = "This checkpoint has no chat template that can be used: send a prompt to /v1/completions."
            return refuse("invalid_value", "messages", text)
        messages = [self._guard(entry) for entry in _entries(request.messages)]
        if messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
            return self._run(messages, wall, True)
        last = messages[-1] | {"content": messages[-1]["content"] + CONTINUE}
        rendered = self._run([*messages[:-1], last], wall, False)
        if isinstance(rendered, Refusal):
            return rendered
        return _continued(rendered) or self._run(messages, wall, True)

    def _run(self, messages: list[dict[str, Any]], wall: float, header: bool) -> str | Refusal:
        """Run the template. It is the checkpoint's program: whatever it raises is about these messages."""
        assert self._template is not None
        names = {"tools": None, "documents": None, "strftime_now": _strftime(wall), **self._names}
        try:
            return self._template.render(messages=messages, add_generation_prompt=header, **names)
        except jinja2.TemplateError as error:
            said = (error.message or "").replace(MARK, "")[:OWN_WORDS]
        except Exception:
            said = ""
        text = "The model's chat template does not take these messages" + (f": {said}" if said else ".")
        return refuse("invalid_value", "messages", text)


# -- messages as a template sees them ------------------------------------------------------------------------------


def _entries(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as dicts, the system and developer ones at the start merged into one (rows A7, A10)."""
    heads = next((index for index, entry in enumerate(messages) if entry.role not in SYSTEM), len(messages))
    entries = [_entry(message) for message in messages[heads:]]
    if heads == 0:
        return entries
    texts = [text for message in messages[:heads] for text in _texts(message)]
    return [{"role": "system", "content": "\n\n".join(texts)}, *entries]


def _entry(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": "\n".join(_texts(message))}
    if message.tool_calls:
        entry["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            entry[name] = value
    return entry


def _texts(message: Message) -> list[str]:
    if isinstance(message.content, list):
        return [text for part in message.content if (text := part.text or part.refusal)]
    return [message.content] if message.content else []


def _call(call: ToolCall) -> dict[str, Any]:
    """A call of the history. Templates walk its arguments, so an object sent as text is given as an object."""
    function = call.function
    if function is None:
        return {"id": call.id, "type": call.type}
    arguments: Any = function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, RecursionError):
            arguments = function.arguments
        if not isinstance(arguments, dict):
            arguments = function.arguments
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _continued(rendered: str) -> str:
    """The prompt up to the mark of the message to be continued; "" when the template left it out."""
    at = rendered.rfind(CONTINUE.strip())
    if at < 0:
        return ""
    return rendered[:at] if rendered.startswith(CONTINUE, at) else rendered[:at].rstrip()


def _guard(tokenizer: Tokenizer) -> Callable[[Any], Any]:
    """A function that marks every spelling of a special token in a message's strings."""
    added = tokenizer.get_added_tokens_decoder().values()
    spellings = sorted({token.content for token in added if token.special and len(token.content) > 1}, reverse=True)
    pattern = re.compile("|".join(map(re.escape, spellings)) if spellings else r"(?!)")

    def guard(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
        if isinstance(value, dict):
            return {guard(name): guard(entry) for name, entry in value.items()}
        return [guard(entry) for entry in value] if isinstance(value, list) else value

    return guard


# -- the template ----------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a trainer learns from; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(source: str) -> jinja2.Template | None:
    """The template, None for none or one that is no Jinja."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source) if source else None
    except jinja2.TemplateError:
        return None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja2's own filter would escape HTML and sort keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime(wall: float) -> Callable[[str], str]:
    return datetime.datetime.fromtimestamp(wall, datetime.UTC).strftime


# -- bytes of tokens -------------------------------------------------------------------------------------------------


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Added(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct, frozen=True):
    model: _Model
    decoder: Any = None
    pre_tokenizer: Any = None
    added_tokens: list[_Added] = []


_SPM_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _pieces(tokenizer: str, size: int) -> list[bytes]:
    """The bytes of each token id, ``size`` of them or more: b"" for special tokens and for ids nobody named."""
    parsed = msgspec.json.decode(tokenizer, type=_Tokenizer)
    vocab = parsed.model.vocab
    entries = vocab.items() if isinstance(vocab, dict) else ((word, index) for index, (word, _) in enumerate(vocab))
    whole = repr((parsed.decoder, parsed.pre_tokenizer))
    read = _byte_level if "ByteLevel" in whole else _sentence_piece
    known = {index: read(word) for word, index in entries}
    known |= {token.id: b"" if token.special else token.content.encode() for token in parsed.added_tokens}
    return [known.get(index, b"") for index in range(max(size, max(known, default=-1) + 1))]


def _byte_table() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_BYTES = _byte_table()


def _byte_level(word: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in word])
    except KeyError:  # not written in the table's letters: an added token's plain text
        return word.encode()


def _sentence_piece(word: str) -> bytes:
    byte = _SPM_BYTE.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace("\u2581", " ").encode()
