"""What happens to a request before the queue, off the event loop: its body is judged, its prompt is rendered.

A pool of two threads; the pure work is the stages'. Each step ends in the fact the core waits for. What the core must
not see stays with the ``Call``: the parsed body, the prompt's tokens, a refusal's words.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from engine.protocol import Described
from pipeline import events as ev
from pipeline.call import Call
from stages.judge import Rules, ending, judge, logprobs, sampling
from stages.logprobs import Logprobs
from stages.prompt import Renderer
from stages.refusal import Refusal, masked
from stages.text import TextStage


class Preparation:
    """The pool, and the renderer of the checkpoint once it is described."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        self._described: Described | None = None
        self._renderer: asyncio.Future[Renderer] = self._loop.create_future()

    async def judge(self, call: Call, body: bytes) -> ev.Checked:
        """Judge a whole body."""
        judged = await self._loop.run_in_executor(self._pool, judge, call.route, body, self._rules)
        call.judged, call.stream, call.include_usage = judged, judged.stream, judged.include_usage
        code, param = _refused(call, judged.refusal)
        return ev.Checked(
            call.request, code, param, len(body), judged.stream, judged.messages, judged.max_tokens,
        )  # fmt: skip

    async def prepare(self, call: Call) -> ev.Prepared:
        """Render and tokenise, once the checkpoint is known."""
        assert call.judged is not None and call.judged.request is not None
        renderer = await self.renderer()
        prompt = await self._loop.run_in_executor(self._pool, renderer.prompt, call.judged.request, float(call.created))
        call.sampling = sampling(call.judged.request, call.seed)
        call.ending = ending(call.judged.request)
        call.text = TextStage(renderer.pieces, call.judged.stops)
        call.alternatives = logprobs(call.judged.request)
        call.logprobs = Logprobs(renderer.pieces) if call.alternatives >= 0 else None
        call.judged = None  # a body may be large: nobody reads it again
        if isinstance(prompt, Refusal):
            return ev.Prepared(call.request, 0, *_refused(call, prompt))
        call.tokens = prompt
        return ev.Prepared(call.request, len(prompt))

    async def renderer(self) -> Renderer:
        """The renderer, once there is one."""
        return await asyncio.shield(self._renderer)

    async def describe(self, described: Described) -> None:
        """Build the renderer, once for each checkpoint. Raises what its tokenizer or template raises."""
        old, self._described = self._described, described
        if old is not None and (old.tokenizer, old.template) == (described.tokenizer, described.template):
            return
        renderer = await self._loop.run_in_executor(self._pool, Renderer, described)
        if self._renderer.done():
            self._renderer = self._loop.create_future()
        self._renderer.set_result(renderer)

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _refused(call: Call, refusal: Refusal | None) -> tuple[str, str]:
    """Keep a refusal's words for the client; the trace gets its code and the masked field."""
    if refusal is None:
        return "", ""
    call.message, call.param = refusal.text, refusal.param
    return refusal.code, masked(refusal.param) if refusal.param else ""
