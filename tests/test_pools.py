"""Work in processes that can be killed (row E5): what hangs, what crashes, what is cancelled, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from engine.grammar import compile_grammar
from pipeline.judging import grammar_of
from pipeline.pools import Pool, Raised, TookTooLong, WorkerDied
from stages.constraint import Constraint
from stages.judge import Rules, judge
from stages.refusal import Refusal


def double(number: int) -> int:
    return number * 2


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def spin_for_ever() -> None:
    while True:
        pass


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def fail(secret: str) -> None:
    raise ValueError(secret)


def print_much() -> int:
    print("this is no frame" * 1000)
    return 1


def pid() -> int:
    return os.getpid()


def imported(module: str) -> bool:
    return module in sys.modules


def session() -> tuple[int, Any]:
    return os.getsid(0), signal.getsignal(signal.SIGINT)


def with_pool(work: Callable[[Pool], Awaitable[Any]], size: int = 2) -> Any:
    """Run ``work``, and see that no process is left of it."""

    async def run() -> Any:
        pool = Pool(size)
        try:
            return await work(pool)
        finally:
            await pool.close()
            assert psutil.Process().children() == before

    before = psutil.Process().children()
    return asyncio.run(run())


def test_a_task_that_never_ends_is_killed_and_the_next_one_is_done() -> None:
    """E5: a task out of time takes its worker with it, and another worker does what comes next."""

    async def work(pool: Pool) -> tuple[int, int, int]:
        first = await pool.call(pid, timeout=30)
        for hang in (sleep_for_ever, spin_for_ever):
            with pytest.raises(TookTooLong):
                await pool.call(hang, timeout=0.2)
        return first, await pool.call(pid, timeout=30), await pool.call(double, 21, timeout=30)

    first, second, answer = with_pool(work, size=1)
    assert first != second
    assert answer == 42


def test_a_worker_that_crashes_is_told() -> None:
    """E5: a death in the middle of a task is an error of its own with the signal, and costs no later call."""

    async def work(pool: Pool) -> int:
        with pytest.raises(WorkerDied) as died:
            await pool.call(crash, timeout=30)
        assert died.value.code == -signal.SIGSEGV
        return await pool.call(double, 4, timeout=30)

    assert with_pool(work) == 8


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    """E5: what ended between two tasks is noticed before the next one is sent."""

    async def work(pool: Pool) -> int:
        idle = await pool.call(pid, timeout=30)
        os.kill(idle, signal.SIGKILL)
        while psutil.pid_exists(idle):
            await asyncio.sleep(0.01)
        return await pool.call(double, 5, timeout=30)

    assert with_pool(work, size=1) == 10


def test_of_an_exception_only_the_class_comes_back() -> None:
    """P1: the text of an exception stays in the worker; the worker stays, too."""

    async def work(pool: Pool) -> bool:
        before = await pool.call(pid, timeout=30)
        with pytest.raises(Raised) as raised:
            await pool.call(fail, "xyzzy", timeout=30)
        assert raised.value.name == "ValueError"
        assert "xyzzy" not in repr(raised.value)
        return before == await pool.call(pid, timeout=30)

    assert with_pool(work, size=1)


def test_fifty_calls_at_once_are_all_answered() -> None:
    """E5: calls wait for a free worker, and each gets its own answer; no more processes than allowed are started."""

    async def work(pool: Pool) -> tuple[list[int], int]:
        answers = await asyncio.gather(*[pool.call(double, n, timeout=30) for n in range(50)])
        pids = await asyncio.gather(*[pool.call(pid, timeout=30) for _ in range(20)])
        return answers, len(set(pids))

    answers, processes = with_pool(work)
    assert answers == [2 * n for n in range(50)]
    assert processes <= 2


def test_a_cancelled_call_kills_its_worker() -> None:
    """G1: a client that left takes its work with it, and the place is free again."""

    async def work(pool: Pool) -> tuple[bool, int]:
        hanging = await pool.call(pid, timeout=30)
        call = asyncio.create_task(pool.call(sleep_for_ever, timeout=30))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        answer = await pool.call(double, 7, timeout=30)
        while psutil.pid_exists(hanging):  # killed, and reaped by the loop
            await asyncio.sleep(0.01)
        return True, answer

    assert with_pool(work, size=1) == (True, 14)


def test_what_a_task_prints_is_no_answer() -> None:
    """E5: standard output is not the pipe to the parent."""
    assert with_pool(lambda pool: pool.call(print_much, timeout=30)) == 1


def test_the_terminal_does_not_reach_a_worker() -> None:
    """I5: an interrupt from the terminal goes to the server alone, which ends its work in order."""
    found, handler = with_pool(lambda pool: pool.call(session, timeout=30))
    assert found != os.getsid(0)
    assert handler == signal.SIG_IGN


def test_a_worker_leaves_with_its_parent() -> None:
    """E5: a server that was killed leaves no worker behind, not even a busy one."""
    code = (
        "import asyncio\n"
        "from pipeline.pools import Pool\n"
        "from tests.test_pools import pid, spin_for_ever\n"
        "async def run():\n"
        "    pool = Pool(1)\n"
        "    print(await pool.call(pid, timeout=30), flush=True)\n"
        "    await pool.call(spin_for_ever, timeout=300)\n"
        "asyncio.run(run())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    worker.wait(timeout=30)
    assert not worker.is_running()


def test_a_pool_that_is_closed_while_a_worker_starts() -> None:
    """I5: a call that was starting a worker, or waited for a place, is told; no process stays, and none comes later."""

    async def work(pool: Pool) -> list[BaseException | int]:
        calls = [asyncio.create_task(pool.call(double, n, timeout=30)) for n in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        assert psutil.Process().children() == before
        return [*await asyncio.gather(*calls, pool.call(double, 4, timeout=30), return_exceptions=True)]

    before = psutil.Process().children()
    assert [type(answer) for answer in with_pool(work, size=1)] == [WorkerDied] * 4


def test_what_a_worker_needs_is_there_before_its_first_task() -> None:
    """E5: importing takes nothing of a task's time."""

    async def work(pool: Pool) -> tuple[bool, bool]:
        pool._modules = ("stages.judge",)
        return await pool.call(imported, "stages.judge", timeout=30), await pool.call(imported, "wave", timeout=30)

    assert with_pool(work, size=1) == (True, False)


PADDING = "x" * (300 << 10)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "anyOf": [{}]}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LARGE_BODIES: dict[str, tuple[str, Any]] = {
    "chat": ("chat", {
        "messages": [
            {"role": "system", "content": PADDING}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream": True,
        "stream_options": {"include_usage": True}, "logit_bias": {"3": 1}, "chat_template_kwargs": {"a": [1]},
        "reasoning_effort": "low",
    }),
    "document": ("chat", {
        "messages": [{"role": "user", "content": PADDING}], "n": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    }),
    "texts": ("completions", {"prompt": [PADDING, "a"], "n": 2, "logprobs": 2, "stop": ["a", "b"]}),
    "ids": ("completions", {"prompt": [[1] * 200_000, [2]]}),
    "refused": ("chat", {"messages": [{"role": "user", "content": PADDING}], "temperature": 9}),
    "model": ("chat", {"model": "other", "messages": PADDING}),
    "empty": ("chat", PADDING),
}  # fmt: skip


def test_large_bodies_are_judged_the_same_in_a_worker() -> None:
    """A14: what a worker says of a body, good or bad, is what is said of it here."""
    rules = Rules(model="model", strict_model=True)
    asked = [
        (route, json.dumps(fields | {"model": "model", **fields} if isinstance(fields, dict) else fields).encode())
        for route, fields in LARGE_BODIES.values()
    ]

    async def work(pool: Pool) -> list[Any]:
        return [await pool.call(judge, route, body, rules, {"user-agent": "x"}, timeout=60) for route, body in asked]

    there = with_pool(work, size=1)
    assert there == [judge(route, body, rules, {"user-agent": "x"}) for route, body in asked]
    refused = [judged.refusal.code if judged.refusal else "" for judged in there]
    assert refused == ["", "", "", "", "invalid_value", "model_not_found", "invalid_json"]


def test_a_constraint_is_judged_in_a_worker() -> None:
    """E5: what comes back is a grammar that compiles, or the refusal; too long a judging is a refusal as well."""
    schema = Constraint(kind="schema", param="response_format", value={"type": "integer"})
    bad = Constraint(kind="regex", param="guided_regex", value="(")

    async def work(pool: Pool) -> tuple[Any, Any, Any]:
        fine, refused = await grammar_of(pool, schema, 64), await grammar_of(pool, bad, 64)
        return fine, refused, await grammar_of(pool, schema, 64, seconds=0)

    fine, refused, late = with_pool(work)
    assert isinstance(fine, str)
    assert compile_grammar(fine) == ""
    assert isinstance(refused, Refusal)
    assert refused.param == "guided_regex"
    assert isinstance(late, Refusal)
    assert "takes too long" in late.text
