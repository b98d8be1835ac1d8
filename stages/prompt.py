"""Messages to text to token ids, with the checkpoint's own chat template and tokenizer.

What this file knows: what of a request goes into its prompt, and whether the prompt ends inside a thinking block.

* ``developer`` is ``system``; those at the start become one system prompt (row A7). The texts of a part list are
  joined by line breaks, as other servers do; a null content is the empty text. A last message of the assistant is
  continued: rendered without its close and without a new header.
* **A client's text cannot write control tokens.** Tokenizers find special tokens anywhere in the text they are given,
  so a message that spells ``<|im_end|>`` would end its own turn. Here each such spelling gets a mark inside it before
  the template runs, and the rendered text is cut at the marks and encoded piece by piece: the same characters, as
  ordinary tokens. Tools and a template's variables are guarded alike. Only tokens the tokenizer calls special are;
  tags a template itself looks for in a history (``</think>``) are left to it. A raw completion prompt is not guarded:
  there the client writes the whole prompt.
* **Whether the prompt ends inside a thinking block** (row B0) is read off what the template wrote behind the last
  message, never off a client's text, which may speak of the tags; off that text only where the client wrote the end
  of the prompt itself: a message to be continued, a raw prompt.
* Where thinking is turned off and the template opens a block nevertheless, the block is closed in the prompt (C2).
* No exception text of a template goes anywhere but to the client who sent the messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.protocol import Described
from stages.conversation import Entry, entries, shown, told
from stages.judge import ending
from stages.offer import offered
from stages.refusal import Refusal, refuse
from stages.schema import ChatRequest, CompletionRequest, Message, Request
from stages.template import MARK, PROBE, Template, Unrendered
from stages.thinking import TOP, Thinking, effort
from stages.validate import foreign_id, prompt_name, prompts_of

CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands at the end of a message to be continued; the blank tells whether the template strips its content."""
OPEN, CLOSE = "<think>", "</think>"
UNSAID = Thinking()


class Beginning(msgspec.Struct, frozen=True):
    """Rows of a prompt through its system prompt and tools, and through its first user message; 0: nobody knows."""

    head: int = 0
    opening: int = 0


class Prompt(msgspec.Struct, frozen=True):
    """Token ids, at least one. ``state`` of the thinking at their end: as ``engine/protocol.py: Thinking`` has it.

    ``hashes``: of its whole blocks, where they were asked for (``stages/hashes.py``). So are ``beginning`` and
    ``first``, the hash of its rows through the first user message.
    """

    tokens: list[int]
    state: str
    hashes: list[bytes] = []
    beginning: Beginning = Beginning()
    first: bytes = b""


class _Text(msgspec.Struct, frozen=True):
    """A rendered prompt, still with marks, and the part of it that decides the state."""

    whole: str
    tail: str


class Renderer:
    """One checkpoint's prompts. Building it takes a fraction of a second; it keeps no request."""

    def __init__(self, described: Described) -> None:
        self._tokenizer = Tokenizer.from_str(described.tokenizer)
        self._vocab, self._end_ids = described.vocab, described.end_ids
        self._bos = described.bos_id if described.add_bos else None
        self._template = Template(described.template, described.special)
        self._guard = _guard(self._tokenizer)
        self.pieces = described.pieces
        self._window = described.window
        self._longest = max(map(len, self.pieces), default=0) or 1
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.thinks = OPEN in described.template or any(token.content == OPEN for token in added)
        """Whether the checkpoint itself knows the tags of thinking."""

    def render_chat(self, request: ChatRequest, wall: float, thinking: Thinking = UNSAID) -> str | Refusal:
        """The text of the prompt; ``wall`` in seconds since 1970 is the day a template may name, in UTC."""
        rendered = self._render(request, wall, thinking)
        return rendered if isinstance(rendered, Refusal) else rendered.whole.replace(MARK, "")

    def prompt(self, request: Request, wall: float, thinking: Thinking = UNSAID, index: int = 0) -> Prompt | Refusal:
        """The prompt; a refusal also for ids of other fields outside the vocabulary.

        ``thinking`` is the reading of the request's wish; ``index`` picks one of the prompts of a completion.
        """
        fault = foreign_id(request, self._vocab) or self._mute(request)
        if fault:
            return fault
        if isinstance(request, ChatRequest):
            made, field = self._chat(request, wall, thinking), "messages"
        else:
            made, field = self._completion(request, index, thinking), "prompt"
        if isinstance(made, Refusal) or made.tokens:
            return made
        return refuse("invalid_value", field, f"{field} renders to no token.")

    def beginning(self, request: Request, tokens: list[int], wall: float, thinking: Thinking = UNSAID) -> Beginning:
        """Where the beginnings of its prompt ``tokens`` end: found by rendering them alone, so to within a few rows."""
        if not isinstance(request, ChatRequest):
            return Beginning()
        at = next((index for index, message in enumerate(request.messages) if message.role == "user"), -1)
        if at < 0:
            return Beginning()
        before, first = request.messages[:at], request.messages[at]
        probe = msgspec.structs.replace(first, content=PROBE)
        head, opening = (self._leading(request, [*before, last], tokens, wall, thinking) for last in (probe, first))
        return Beginning(min(head, opening), opening)

    def _leading(
        self, request: ChatRequest, messages: list[Message], tokens: list[int], wall: float, thinking: Thinking
    ) -> int:
        """How many of ``tokens`` a prompt of these messages alone begins with."""
        can, tools = self._template.can, self._guard(offered(request) or [])
        rendered = self._template.run(
            told(self._guard(entries(messages)), tools, can), header=False, wall=wall, tools=shown(tools, can),
            extra=self._guard(variables(request, thinking)),
        )  # fmt: skip
        if isinstance(rendered, Unrendered):
            return 0
        return common(tokens, self._begun(self._encode(rendered.split(MARK))))

    def _mute(self, request: Request) -> Refusal | None:
        """A refusal where ``min_tokens`` forbids every token there is."""
        ends = ending(request)
        if not ends.min_tokens or len(ends.all_ids(self._end_ids)) < self._vocab:
            return None
        return refuse("invalid_value", "min_tokens", "min_tokens leaves no token: all are stop ids.")

    # -- completions -------------------------------------------------------------------------------------------------

    def _completion(self, request: CompletionRequest, index: int, thinking: Thinking) -> Prompt | Refusal:
        prompts = prompts_of(request)
        if isinstance(prompts, Refusal):
            return prompts
        prompt, name = prompts[index], prompt_name(len(prompts), index)
        if isinstance(prompt, str):
            oversize = self._oversize(prompt, name)
            if oversize:
                return oversize
            return Prompt(self._begun(self._encode([prompt])), state_of(prompt, thinking))
        outside = next((token for token in prompt if not 0 <= token < self._vocab), None)
        if outside is not None:
            text = f"{name} holds the token id {outside}; this model's vocabulary is 0 to {self._vocab - 1}."
            return refuse("invalid_value", name, text)
        return Prompt(prompt, state_of(self._tokenizer.decode(prompt, skip_special_tokens=False), thinking))

    def _oversize(self, text: str, field: str) -> Refusal | None:
        """A refusal of a text that no tokenizer could fit into the window: reading it whole would take minutes.

        Every token writes at most so many bytes; a normaliser may drop some of the text, so four times as many.
        """
        least = len(text.encode()) // (4 * self._longest)
        if least <= self._window:
            return None
        said = f"The prompt has more than {least} tokens and the model's window is {self._window}. Shorten the prompt."
        return refuse("context_length_exceeded", field, said)

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

    # -- chat --------------------------------------------------------------------------------------------------------

    def _chat(self, request: ChatRequest, wall: float, thinking: Thinking) -> Prompt | Refusal:
        text = self._render(request, wall, thinking)
        if isinstance(text, Refusal):
            return text
        oversize = self._oversize(text.whole, "messages")
        if oversize:
            return oversize
        return Prompt(
            self._begun(self._encode(text.whole.split(MARK))), state_of(text.tail.replace(MARK, ""), thinking)
        )

    def _render(self, request: ChatRequest, wall: float, thinking: Thinking) -> _Text | Refusal:
        if not self._template.usable:
            text = "This checkpoint has no chat template that can be used: send a prompt to /v1/completions."
            return refuse("invalid_value", "messages", text)
        can, tools = self._template.can, self._guard(offered(request) or [])
        offer = shown(tools, can)
        extra = self._guard(variables(request, thinking))

        def run(messages: list[Entry], header: bool) -> str | Unrendered:
            return self._template.run(messages, header=header, wall=wall, tools=offer, extra=extra)

        messages = told(self._guard(entries(request.messages)), tools, can)
        last = request.messages[-1]
        if last.role == "assistant" and not last.tool_calls:
            own = messages[-1]["content"]
            rendered = run([*messages[:-1], messages[-1] | {"content": own + CONTINUE}], False)
            if isinstance(rendered, Unrendered):
                return _untaken(rendered)
            if begun := _continued(rendered):
                return _Text(begun, own)
        rendered = run(messages, True)
        if isinstance(rendered, Unrendered):
            return _untaken(rendered)
        bare = run(messages, False) if OPEN in rendered else rendered
        tail = rendered[common(rendered, bare) :] if isinstance(bare, str) else rendered
        closed = _closed(tail) if thinking.on is False else ""
        return _Text(rendered + closed, tail + closed)


def variables(request: ChatRequest, thinking: Thinking) -> dict[str, Any]:
    """What a template gets beside the conversation: the client's own variables, and what was decided of thinking.

    Both names that templates give the switch, and only where somebody said something (row C5).
    """
    given = {name: value for name, value in (request.chat_template_kwargs or {}).items() if value is not None}
    if thinking.on is not None:
        given |= {"enable_thinking": thinking.on, "thinking": thinking.on}
    word = effort({name: getattr(request, name) for name in TOP})
    return given | {"reasoning_effort": word} if word else given


def state_of(text: str, thinking: Thinking) -> str:
    """Where a prompt that ends in ``text`` leaves the thinking (row B0): ``open``, ``off`` or ``may``."""
    if text.rfind(OPEN) > text.rfind(CLOSE):
        return "open"
    return "off" if thinking.on is False else "may"


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, or tokens, both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _closed(tail: str) -> str:
    """What closes the block that ``tail`` leaves open, in the form of templates that close it themselves."""
    at = tail.rfind(OPEN)
    if at <= tail.rfind(CLOSE):
        return ""
    return ("" if tail[at:].endswith("\n") else "\n") + f"\n{CLOSE}\n\n"


def _untaken(fault: Unrendered) -> Refusal:
    text = "The model's chat template does not take these messages" + (f": {fault.said}" if fault.said else ".")
    return refuse("invalid_value", "messages", text)


def _continued(rendered: str) -> str:
    """The prompt up to the mark of the message to be continued; "" when the template left it out."""
    at = rendered.rfind(CONTINUE.strip())
    if at < 0:
        return ""
    return rendered[:at] if rendered.startswith(CONTINUE, at) else rendered[:at].rstrip()


def _guard(tokenizer: Tokenizer) -> Callable[[Any], Any]:
    """A function that marks every spelling of a special token in the strings of a value."""
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
