"""engine/link.py against small stand-in processes."""

from __future__ import annotations

import queue
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from engine.link import NOT_STARTED, SPIN, Died, EngineLink, command_for, environment
from engine.protocol import Cancel, Config, Declined, FromEngine, Sampling, Start, frame

PATIENCE = 60.0
CONFIG = Config(3, "nowhere")


class Child:
    """A link to a Python one-liner; ``b`` is bound to the binary stdin and stdout, ``d`` to a frame of Declined."""

    def __init__(self, code: str, command: list[str] | None = None) -> None:
        self.inbox: queue.Queue[FromEngine | Died] = queue.Queue()
        head = (
            f"import sys, os, time; i, o = sys.stdin.buffer, sys.stdout.buffer; d = {frame(Declined(3, 1, 'busy'))!r}\n"
        )
        self.link = EngineLink(CONFIG, self.inbox.put, command or [sys.executable, "-c", head + code])
        self.link.start()

    def next(self) -> FromEngine | Died:
        return self.inbox.get(timeout=PATIENCE)

    def all(self) -> list[FromEngine | Died]:
        """Everything up to its death, and that nothing came after."""
        got = [self.next()]
        while not isinstance(got[-1], Died):
            got.append(self.next())
        self.link.close(PATIENCE)
        assert self.inbox.empty()
        return got


def test_messages_come_in_order_and_death_once() -> None:
    child = Child("o.write(d * 3); o.flush(); sys.exit(7)")
    assert child.all() == [Declined(3, 1, "busy")] * 3 + [Died(3, 7)]


def test_what_is_sent_arrives() -> None:
    child = Child("n = int.from_bytes(i.read(4), 'little'); i.read(n); o.write(d); o.flush(); i.read()")
    child.link.send(Cancel(3, 1))
    assert child.next() == Declined(3, 1, "busy")
    child.link.kill()
    assert child.all() == [Died(3, -9)]


def test_a_process_that_cannot_be_started_has_died() -> None:
    child = Child("", command=["/no/such/program"])
    child.link.send(Cancel(3, 1))
    child.link.kill()
    assert child.all() == [Died(3, NOT_STARTED)] and child.link.pid is None


@pytest.mark.parametrize(
    "code",
    [
        "o.write((1 << 31).to_bytes(4, 'little')); o.flush(); time.sleep(600)",  # a frame over the limit
        "o.write(b'\\x03\\0\\0\\0abc'); o.flush(); time.sleep(600)",  # no message
        "print('hello from a stray print', flush=True); time.sleep(600)",
    ],
)
def test_a_process_that_speaks_otherwise_is_killed(code: str) -> None:
    assert Child(code).all() == [Died(3, -9)]


def test_a_frame_cut_off_by_its_death_is_death() -> None:
    assert isinstance(Child("o.write(d[:-1]); o.flush(); os._exit(5)").all()[-1], Died)


def test_close_asks_then_kills() -> None:
    polite = Child("i.read(4); sys.exit(0)")
    polite.link.close(PATIENCE)
    assert polite.inbox.get_nowait() == Died(3, 0)
    deaf = Child("o.write(d); o.flush(); time.sleep(600)")
    assert deaf.next() == Declined(3, 1, "busy")
    deaf.link.close(0.05)
    assert deaf.inbox.get_nowait() == Died(3, -9)


def test_send_never_blocks_even_when_nobody_reads() -> None:
    child = Child("o.write(d); o.flush(); time.sleep(600)")
    child.next()
    for _ in range(50_000):  # far more than a pipe holds
        child.link.send(Cancel(3, 1))
    child.link.kill()
    assert child.all() == [Died(3, -9)]


def test_what_cannot_be_put_into_bytes_is_the_senders_error() -> None:
    """G1: the writer goes on, so a cancel that follows still arrives."""
    child = Child("n = int.from_bytes(i.read(4), 'little'); i.read(n); o.write(d); o.flush(); i.read()")
    with pytest.raises(OverflowError):
        child.link.send(Start(3, 1, 0, [1], Sampling(seed=1 << 70), 1, []))
    child.link.send(Cancel(3, 1))
    assert child.next() == Declined(3, 1, "busy")
    child.link.kill()
    assert child.all() == [Died(3, -9)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_starting_again_and_again_leaves_nothing_behind() -> None:
    """I11: no descriptor, no thread and no dead process stays of an engine that is gone."""

    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = left()
    for _ in range(5):
        child = Child("o.write(d); o.flush(); sys.exit(1)")
        assert child.all() == [Declined(3, 1, "busy"), Died(3, 1)]
        assert child.link.pid is not None and not Path(f"/proc/{child.link.pid}").exists()
        assert Child("", command=["/no/such/program"]).all() == [Died(3, NOT_STARTED)]
    assert left() == before


def test_a_link_that_was_never_started_closes() -> None:
    EngineLink(CONFIG, lambda message: None).close(PATIENCE)


def test_a_listener_that_fails_ends_the_process_and_still_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    heard: queue.Queue[FromEngine | Died] = queue.Queue()

    def post(message: FromEngine | Died) -> None:
        heard.put(message)
        if not isinstance(message, Died):
            raise RuntimeError("the loop is closed")

    said = frame(Declined(3, 1, "busy"))
    code = f"import sys, time; sys.stdout.buffer.write({said!r}); sys.stdout.flush(); time.sleep(600)"
    link = EngineLink(CONFIG, post, [sys.executable, "-c", code])
    link.start()
    assert heard.get(timeout=PATIENCE) == Declined(3, 1, "busy")
    assert heard.get(timeout=PATIENCE) == Died(3, -9)


def test_the_command_is_the_worker_or_the_script() -> None:
    assert command_for(CONFIG)[1:3] == ["-m", "engine.worker"]
    scripted = command_for(msgspec.structs.replace(CONFIG, script="s.json"))
    assert scripted[1:3] == ["-m", "engine.scripted"]
    assert msgspec.json.decode(scripted[3], type=Config).script == "s.json"


def test_the_engine_spins_briefly_unless_the_user_says_otherwise() -> None:
    assert environment({"A": "1"}) == {"A": "1", "GOMP_SPINCOUNT": SPIN}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        assert environment({name: "x"}) == {name: "x"}
