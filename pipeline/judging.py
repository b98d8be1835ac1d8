"""A constraint is judged in a worker, for at most so long: a schema must not hang the server (row E5)."""

from __future__ import annotations

from engine.grammar import compile_grammar
from pipeline.pools import Pool, TookTooLong, WorkerDied
from stages.constraint import Constraint, judged, too_complex, too_long
from stages.refusal import Refusal

JUDGED_S = 5.0


def judge(constraint: Constraint, depth: int) -> str | Refusal:
    """For the worker: the grammar as the engine takes it, or what the client is told."""
    return judged(constraint, compile_grammar, depth)


async def grammar_of(pool: Pool, constraint: Constraint, depth: int, seconds: float = JUDGED_S) -> str | Refusal:
    """The grammar of a constraint. One that takes too long, or takes its worker with it, is refused."""
    try:
        return await pool.call(judge, constraint, depth, timeout=seconds)
    except TookTooLong:
        return too_long(constraint)
    except WorkerDied:
        return too_complex(constraint)
