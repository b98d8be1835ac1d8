"""engine/sizes.py: what the chosen window, half and double of it take and leave."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import memory, sizes
from engine.models import cache_bytes, registry
from engine.protocol import windows
from engine.sizes import Machine, Model, Taken
from engine.weights.checkpoint import open_checkpoint
from tests import hybrids
from tests.checkpoints import write_gguf

GIB = 1 << 30
PLAIN = Model(weights=2 * GIB, row=1 << 20, state=0, marks=0)


def test_the_window_half_and_double_of_it() -> None:
    """I8: rows of every slot, states of every slot, the weights once."""
    model = Model(weights=100, row=10, state=7, marks=3)
    assert sizes.around(model, 64, slots=3, side=40) == [
        Taken(64, 100, (64 + 40 + 40) * 10, 21, 9),
        Taken(32, 100, (32 + 32 + 32) * 10, 21, 9),
        Taken(128, 100, (128 + 40 + 40) * 10, 21, 9),
    ]
    assert sizes.around(model, 1, slots=1, side=40)[1].window == 1


def test_the_table_of_the_doctor() -> None:
    """I8: a line a window in GiB, what it leaves free, and whether a start with it would succeed."""
    machine = Machine(free=8 * GIB, bound=6 * GIB)
    every = sizes.around(PLAIN, 2048, slots=1, side=64)
    assert [(label, words.split()) for label, words in sizes.table(every, machine, native=4096)] == [
        ("window", ["weights", "KV", "state", "together", "free", "GiB"]),
        ("2048", ["2.00", "2.00", "0.00", "4.00", "4.00", "fits"]),
        ("1024", ["2.00", "1.00", "0.00", "3.00", "5.00", "fits"]),
        ("4096", ["2.00", "4.00", "0.00", "6.00", "2.00", "fits"]),
    ]
    tight = [words.split(maxsplit=5)[-1] for _, words in sizes.table(every, Machine(8 * GIB, 6 * GIB - 1), 4095)]
    assert tight[1:] == ["fits", "fits", "longer than the model's window"]
    assert sizes.verdict(every[2], Machine(8 * GIB, 6 * GIB - 1), 4096) == "does not fit"
    assert sizes.verdict(every[2], Machine(6 * GIB, 6 * GIB), 4096) == "does not fit"


def test_the_line_of_a_start() -> None:
    """I8: one line, the loaded window first; of the others also that a start with them would fail."""
    every = sizes.around(PLAIN, 2048, slots=1, side=64)
    assert sizes.line(every, Machine(5 * GIB, 5 * GIB), native=8192) == (
        "weights 2.00 GiB; window 2048: KV 2.00, state 0.00, 1.00 free; 1024: KV 1.00, state 0.00, 2.00 free; "
        "4096: KV 4.00, state 0.00, -1.00 free (does not fit)"
    )
    assert sizes.line(every, Machine(9 * GIB, 9 * GIB), native=2048).endswith(
        "3.00 free (longer than the model's window)"
    )


@given(
    st.integers(64, 5_000), st.integers(1, 4), st.integers(1, 6_000), st.integers(1, 1 << 20), st.integers(0, 1 << 20),
    st.integers(0, 1 << 34),
)  # fmt: skip
def test_what_a_start_would_take_fits(native: int, slots: int, side: int, row: int, state: int, free: int) -> None:
    """I8, I4: the window that a start cuts itself to is one of which the table says that it fits, 64 more do not."""
    model, machine = Model(5 * row, row, state, 8 * state), Machine(free, free * 4 // 5)
    try:
        window, cut = memory.fit(0, native, row, sizes.room(model, machine, slots), slots - 1, side)
    except memory.DoesNotFit:
        assert sizes.verdict(sizes.taken(model, 64, slots, side), machine, native) == "does not fit"
        return
    chosen = sizes.taken(model, window, slots, side)
    assert chosen.kv == row * sum(windows(window, slots, side))
    assert sizes.verdict(chosen, machine, native) == "fits"
    if cut and window + 64 <= native:
        assert sizes.verdict(sizes.taken(model, window + 64, slots, side), machine, native) == "does not fit"


def test_a_caches_bytes_are_known_without_the_weights(tmp_path: Path) -> None:
    """I8: by the configuration alone what the model of it says once it is read, with recurrent layers and without."""
    folder = hybrids.save(hybrids.reference(), tmp_path / "hybrid")
    for path in (write_gguf(tmp_path / "tiny.gguf", {"": "F16"}), folder):
        found = open_checkpoint(path)
        model = registry.build(
            found, device=torch.device("cpu"), threads=0, rows=64, progress=lambda what, done, total: None
        )
        assert cache_bytes.row(found.config) == model.kv_bytes_per_row > 0
        assert cache_bytes.state(found.config) == model.state_bytes
    assert model.state_bytes > 0
