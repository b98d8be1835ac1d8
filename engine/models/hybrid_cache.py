"""What a model with recurrent layers keeps of one sequence: rows of keys and values, and states that are not rows.

A state cannot forget a row. So a step of draft rows leaves it as it was and notes what the rows were (a
:class:`Record`); ``keep`` says which of them stay (the *path*), and the next step folds these into the state: until
then the commit is *pending*. The state before the fold is kept for one step more, with its record, so that ``rewind``
can go back into the round before. Steps of other rows advance the state in place.

    settled                stands
    │ state, tail, hidden  │
    ┼──────────────────────┼─────────────────────
    0 … rows of the state  │ … the path's rows     next step's rows …

Two :class:`State` take turns: a fold reads one and writes the other. Records are never written to once made.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.models.cache import KV, Loan, Mark
from engine.weights.hybrid import HybridConfig


@dataclass(frozen=True, slots=True)
class State:
    """Of all recurrent layers, in float32.

    ``delta``: ``[layers, value_heads, key_dim, value_dim]``. ``tail``: the convolutions' last inputs, ``[layers,
    taps - 1, channels]``. ``hidden``: the last row behind the final norm, for the layer that guesses; else empty.
    """

    delta: Tensor
    tail: Tensor
    hidden: Tensor

    def copy(self, other: State) -> None:
        """Take over ``other``'s numbers."""
        self.delta.copy_(other.delta)
        self.tail.copy_(other.tail)
        self.hidden.copy_(other.hidden)

    def clear(self) -> None:
        """As before the first row."""
        for tensor in (self.delta, self.tail, self.hidden):
            tensor.zero_()


@dataclass(frozen=True, slots=True)
class Record:
    """A step's draft rows.

    ``inputs``: the convolutions', ``[layers, n, channels]``. ``decay``, ``beta``: ``[layers, n, value_heads]``.
    ``hidden``: as a state's, ``[n, hidden]``.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    inputs: Tensor
    decay: Tensor
    beta: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """What stays of a record: the rows of ``path``, behind ``settled`` rows."""

    settled: int
    record: Record
    path: tuple[int, ...]

    @property
    def stands(self) -> int:
        """Rows once it is folded in."""
        return self.settled + len(self.path)

    def cut(self, rows: int) -> Pending:
        """Up to row ``rows``."""
        return replace(self, path=self.path[: rows - self.settled])


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a cache stands, beside its tensors."""

    current: int
    settled: int
    pending: Pending | None
    before: Pending | None
    guessed: int
    rows: int


class HybridCache:
    """A :class:`~engine.models.cache.Cache`. ``kv``: of the layers that attend, the guessing one last."""

    def __init__(self, config: HybridConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        attend = sum(config.attends) + config.mtp
        self.rows = rows
        self.kv = KV(attend, config.kv_heads, rows, config.head_dim, dtype, device)
        self._states = (_state(config, device), _state(config, device))
        self._current = 0
        self._settled = 0
        self._pending: Pending | None = None
        self._before: Pending | None = None  # what was folded into the other state to get this one
        self.guessed = 0
        """Rows of the guessing layer that are there, without a gap from the first on."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache; a round's record is made by its step."""
        return self.kv.nbytes + sum(t.nbytes for s in self._states for t in (s.delta, s.tail, s.hidden))

    @property
    def state(self) -> State:
        """The state behind ``settled`` rows."""
        return self._states[self._current]

    @property
    def settled(self) -> int:
        """Rows that the state holds."""
        return self._settled

    @property
    def pending(self) -> Pending | None:
        """The commit to fold in, if it has any rows."""
        return self._pending if self._pending is not None and self._pending.path else None

    @property
    def stands(self) -> int:
        """Rows that can be gone on from as they are."""
        return self._pending.stands if self._pending is not None else self._settled

    # What a step does, in order: begin, (settle into ``spare``), note or advance.

    def begin(self, start: int) -> Pending | None:
        """A step of rows from ``start`` on: what it folds in first, writing to ``spare``.

        Elsewhere than where the sequence stands there is no state to go on from: it begins anew, as before the first
        row. So do the loader's timed steps; an owner rewinds or goes back to a mark first.
        """
        if start == 0 or start != self.stands:
            self.go_back(None)
            self._settled = start
        return self.pending

    @property
    def spare(self) -> State:
        """Where a fold writes."""
        return self._states[1 - self._current]

    def folded(self) -> None:
        """``spare`` holds the pending commit: it is the state now, and the other can be gone back to."""
        assert self._pending is not None
        self._before, self._settled = self._pending, self._pending.stands
        self._current, self._pending = 1 - self._current, None

    def untold(self) -> tuple[int, Tensor, tuple[int, ...]]:
        """What the guessing layer may not have: its first such row, hidden rows from there up to the last row, and the
        token behind each but the last.
        """
        state, pending = self.state.hidden[None], self.pending
        if pending is None:
            return self._settled - 1, state, ()
        record, path = pending.record, list(pending.path)
        tokens = tuple(record.tokens[at] for at in path)
        if self._settled == 0:
            return 0, record.hidden[path], tokens[1:]
        return self._settled - 1, torch.cat([state, record.hidden[path]]), tokens

    def note(self, record: Record) -> None:
        """The step's rows were drafts: which stay is not known."""
        self._pending = Pending(self._settled, record, ())

    def advance(self, count: int) -> None:
        """The step's rows are in the state."""
        self._settled += count
        self._pending = self._before = None

    # A Cache's.

    def keep(self, start: int, path: Items[int]) -> None:
        """Rows of the last step's drafts that stay; folded in at the next step."""
        pending = self._pending
        if pending is None or pending.settled != start:
            raise ValueError(f"no drafts stand behind row {start}")
        if any(pending.record.parents[at] != (path[i - 1] if i else -1) for i, at in enumerate(path)):
            raise ValueError("the rows to keep do not follow one another")
        self.kv.keep(start, path)
        self._pending = replace(pending, path=tuple(path))

    def rewind(self, rows: int) -> int:
        """Back to row ``rows`` where the state can be there, else to nothing."""
        here, before = self._pending, self._before
        if rows == self.stands:
            return rows
        if here is not None and here.settled <= rows < here.stands:
            self._pending = here.cut(rows)
        elif before is not None and before.settled <= rows <= before.stands:
            self._current, self._settled = 1 - self._current, before.settled
            self._pending, self._before = before.cut(rows), None
        else:
            self.go_back(None)
        self.guessed = min(self.guessed, max(0, self.stands - 1))
        return self.stands

    def mark(self) -> Mark:
        """The state, and where a commit is pending that too: its path's rows alone."""
        state = self.state
        tensors = {"delta": state.delta.clone(), "tail": state.tail.clone(), "hidden": state.hidden.clone()}
        if (pending := self.pending) is not None:
            record, path = pending.record, torch.tensor(pending.path, device=state.delta.device)
            tensors |= {name: getattr(record, name)[:, path] for name in ("inputs", "decay", "beta")}
            tensors |= {"path_hidden": record.hidden[path]}
            tensors |= {"path_tokens": torch.tensor([record.tokens[at] for at in pending.path])}
        return Mark(self.stands, tensors)

    def go_back(self, mark: Mark | None) -> None:
        """Put state and pending commit where ``mark`` was made; None: before the first row."""
        self._pending = self._before = None
        self._settled = self.guessed = 0
        if mark is None:
            self.state.clear()
            return
        device, given = self.state.delta.device, mark.tensors
        self.state.copy(State(given["delta"], given["tail"], given["hidden"]))
        self._settled, self.guessed = mark.rows, max(0, mark.rows - 1)
        if "path_tokens" in given:
            tokens = tuple(given["path_tokens"].tolist())
            parts = [given[name].to(device).clone() for name in ("inputs", "decay", "beta", "path_hidden")]
            record = Record(tokens, tuple(range(-1, len(tokens) - 1)), *parts)
            self._settled = mark.rows - len(tokens)
            self._pending = Pending(self._settled, record, tuple(range(len(tokens))))

    def copy(self, first: int, stop: int) -> dict[str, Tensor]:
        """``{"kv": [rows, layers, 2 * kv_heads, head_dim]}``."""
        return self.kv.copy(first, stop)

    def put(self, first: int, rows: dict[str, Tensor]) -> None:
        """Write them back."""
        self.kv.put(first, rows)

    def lend(self, rows: int) -> Loan:
        """Rows a guest can write, both states, and where they stand; the guest finds room for ``rows`` rows alone."""
        rows = min(rows, self.rows)
        position = _Position(self._current, self._settled, self._pending, self._before, self.guessed, self.rows)
        tensors = self.kv.lend(rows).tensors
        for i, state in enumerate(self._states):
            tensors |= {f"{name}{i}": getattr(state, name).clone() for name in ("delta", "tail", "hidden")}
        self.go_back(None)
        self.rows = rows
        return Loan(rows, tensors, position)

    def take_back(self, loan: Loan) -> None:
        """All as it was."""
        position = loan.state
        assert isinstance(position, _Position)
        self.kv.take_back(loan)
        for i, state in enumerate(self._states):
            state.copy(State(*(loan.tensors[f"{name}{i}"] for name in ("delta", "tail", "hidden"))))
        self._current, self._settled = position.current, position.settled
        self._pending, self._before = position.pending, position.before
        self.guessed, self.rows = position.guessed, position.rows


def _state(config: HybridConfig, device: torch.device) -> State:
    layers = len(config.attends) - sum(config.attends)
    delta = (layers, config.value_heads, config.key_dim, config.value_dim)
    # Written now, as the rows are: promised memory may not be there later.
    shapes = (delta, (layers, config.conv - 1, config.mixed), (config.hidden if config.mtp else 0,))
    return State(*(torch.empty(shape, dtype=torch.float32, device=device).fill_(0) for shape in shapes))
