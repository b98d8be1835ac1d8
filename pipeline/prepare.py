"""What happens to a request before the queue, off the event loop: its body is judged, its prompts are rendered.

A pool of two threads does what is quick; a large body and every constraint go to processes that can be killed, and the
prompt of a large body, which may take minutes, to a thread that nobody else waits for. The pure work is the stages'.
Each step ends in the fact the core waits for. What the core must not see stays with the ``Call``: the parsed body, the
prompts' tokens, a refusal's words.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec

from engine.protocol import Described, Grammar
from pipeline import events as ev
from pipeline.call import Call
from pipeline.judging import grammar_of
from pipeline.pools import Pool
from pipeline.rules import Rulebook
from stages.clients import NEVER_NOTED, format_for
from stages.constraint import Constraint
from stages.hashes import hashes, through
from stages.judge import Judged, judge, structured
from stages.prompt import Prompt, Renderer
from stages.refusal import Refusal, masked
from stages.run import Caller, constraint, run, state_of
from stages.schema import ChatRequest
from stages.side_lane import kind
from stages.validate import prompts_of

LARGE = 256 << 10
"""Bytes. A larger body is judged in a process: parsing it, or rendering its prompt, would hold up everything else."""
JUDGE_S = 60.0
"""Seconds that may take, then the process is killed."""


class Preparation:
    """The pools, and the renderer of the checkpoint once it is described."""

    def __init__(self, book: Rulebook, salt: bytes, sides: bool = False) -> None:
        self._book, self._rules, self._salt, self._sides = book, book.rules, salt, sides
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="prepare-large")
        self._processes = Pool(modules=(judge.__module__, grammar_of.__module__))
        self._described: Described | None = None
        self._renderer: asyncio.Future[Renderer] = self._loop.create_future()

    async def judge(self, call: Call, body: bytes) -> ev.Checked:
        """Judge a whole body."""
        judged = await self._judge(call, body)
        call.judged, call.stream, call.include_usage = judged, judged.stream, judged.include_usage
        call.shows_lines = self._shows_lines(judged)
        code, param = _refused(call, judged.refusal)
        return ev.Checked(
            call.request, code, param, len(body), judged.stream, judged.messages, judged.max_tokens, judged.choices,
            judged.progress,
        )  # fmt: skip

    async def _judge(self, call: Call, body: bytes) -> Judged:
        headers, call.headers = call.headers, {}
        arguments = (call.route, body, self._rules, headers)
        if len(body) <= LARGE:
            return await self._loop.run_in_executor(self._pool, judge, *arguments)
        return await self._processes.call(judge, *arguments, timeout=JUDGE_S)

    async def prepare(self, call: Call) -> ev.Prepared:
        """Render and tokenise every prompt, once the checkpoint is known, and compile what binds the answer."""
        judged, call.judged = call.judged, None  # a body may be large: nobody reads it again
        assert judged is not None and judged.request is not None and call.checked is not None
        renderer = await self.renderer()
        pool = self._large if call.checked.body_bytes > LARGE else self._pool
        arguments = (renderer, judged, float(call.created), self._salt, self._sides)
        prompts = await self._loop.run_in_executor(pool, _rendered, *arguments)
        if isinstance(prompts, Refusal):
            return ev.Prepared(call.request, 0, *_refused(call, prompts))
        grammar = await self._grammar(judged)
        if isinstance(grammar, Refusal):
            return ev.Prepared(call.request, len(prompts[0].tokens), *_refused(call, grammar))
        caller = self._caller(judged)
        call.pieces = renderer.pieces
        call.prompts, call.blocks = [prompt.tokens for prompt in prompts], [prompt.hashes for prompt in prompts]
        call.runs = [
            run(judged.request, judged.thinking, state, grammar, self._rules, call.seed, caller)
            for state in (state_of(prompt.state, grammar is not None, renderer.thinks) for prompt in prompts)
        ]
        call.run = call.runs[0]
        call.alternatives = call.run.alternatives
        longest, planned = max(map(len, call.prompts)), self._rules.plan and judged.client.kind not in NEVER_NOTED
        thinks = renderer.thinks and call.run.thinking.state != "off"
        lane = kind(
            judged.client, asked=judged.max_tokens, thinks=thinks, plan=self._rules.plan,
            choices=judged.choices * len(prompts),
        )  # fmt: skip
        return ev.Prepared(
            call.request, len(call.prompts[0]), prompts=len(prompts), longest=longest, hashes=call.hashes,
            thinks=thinks, planned=planned, lane=lane, head=prompts[0].beginning.head,
            opening=prompts[0].beginning.opening, first=prompts[0].first,
        )  # fmt: skip

    def _shows_lines(self, judged: Judged) -> bool:
        """Whether its waiting lines stand where the thinking does too (row Q6): never beside an answer of a form."""
        request = judged.request
        named = self._rules.plan and judged.client.kind in self._book.lines
        return named and isinstance(request, ChatRequest) and not structured(request)

    async def _grammar(self, judged: Judged) -> Grammar | Refusal | None:
        assert judged.request is not None
        wanted = constraint(judged.request)
        if not isinstance(wanted, Constraint):
            return wanted
        text = await grammar_of(self._processes, wanted, self._book.depth)
        return text if isinstance(text, Refusal) else Grammar(text)

    def _caller(self, judged: Judged) -> Caller:
        """A kind's format counts under a plan, where the server's own is the one that decides nothing (row Q2)."""
        rules, client = self._rules, judged.client
        decides = rules.plan and rules.reasoning_format == "tags"
        return Caller(client.kind, client.side, format_for(client, self._book.formats) if decides else "")

    async def renderer(self) -> Renderer:
        """The renderer, once there is one."""
        return await asyncio.shield(self._renderer)

    async def describe(self, described: Described) -> None:
        """Build the renderer, once for each checkpoint. Raises what its tokenizer or template raises."""
        if self._book.template is not None:
            described = msgspec.structs.replace(described, template=self._book.template)
        old, self._described = self._described, described
        if old is not None and (old.tokenizer, old.template) == (described.tokenizer, described.template):
            return
        renderer = await self._loop.run_in_executor(self._pool, Renderer, described)
        if self._renderer.done():
            self._renderer = self._loop.create_future()
        self._renderer.set_result(renderer)

    async def close(self) -> None:
        """Start nothing more, and leave no process behind."""
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
        await self._processes.close()


def _rendered(renderer: Renderer, judged: Judged, wall: float, salt: bytes, sides: bool) -> list[Prompt] | Refusal:
    """Every prompt of the request, with its hashes; a fault in one of them refuses it.

    ``sides``: there are side slots, so it matters where a prompt's beginning ends (row M3).
    """
    request = judged.request
    assert request is not None
    texts = [""] if isinstance(request, ChatRequest) else prompts_of(request)
    if isinstance(texts, Refusal):
        return texts
    prompts: list[Prompt] = []
    for index in range(len(texts)):
        prompt = renderer.prompt(request, wall, judged.thinking, index)
        if isinstance(prompt, Refusal):
            return prompt
        tokens, blocks, beginning = prompt.tokens, hashes(prompt.tokens, salt), prompt.beginning
        if sides:
            beginning = renderer.beginning(request, tokens, wall, judged.thinking)
        first = through(tokens, beginning.opening, blocks, salt)
        prompts.append(msgspec.structs.replace(prompt, hashes=blocks, beginning=beginning, first=first))
    return prompts


def _refused(call: Call, refusal: Refusal | None) -> tuple[str, str]:
    """Keep a refusal's words for the client; the trace gets its code and the masked field."""
    if refusal is None:
        return "", ""
    call.message, call.param = refusal.text, refusal.param
    return refusal.code, masked(refusal.param) if refusal.param else ""
