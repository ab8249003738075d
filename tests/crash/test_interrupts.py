"""Ctrl-C and signals at any instant: no lock is kept, no row is lost, and the end can still be recorded."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nodetrack
from nodetrack.errors import UsageError
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.views import all_rows
from nodetrack.journal.writer import KeySet
from nodetrack.live_run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return nodetrack.init(project="p", role="miner", uid=1, version="1.0", dir=tmp_path)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGALRM raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def steps_of(run: Run) -> list[int]:
    return [row.step for row in all_rows(RunFolder(run.folder, "p"))]


def is_free(run: Run) -> bool:
    """Whether another thread can take the journal's lock."""
    got: list[bool] = []

    def take() -> None:
        lock = run._state.journal.lock
        got.append(lock.acquire(timeout=5))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got == [True]


def test_ctrl_c_at_any_instant_of_log_keeps_no_lock_and_loses_no_row(run: Run, interrupts: None) -> None:
    acknowledged = []
    step = 0
    for round_number in range(400):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + round_number * 1e-6)
            while True:
                step += 1
                run.log({"a": 1.0}, step=step)
                acknowledged.append(step)
        except KeyboardInterrupt:
            continue
    assert is_free(run)
    run.finish()
    kept = steps_of(run)
    assert set(acknowledged) <= set(kept)
    assert len(kept) == len(set(kept))


def test_an_interrupted_finish_can_be_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.log({"a": 1.0}, step=0)
    keeper = run._attempt._keeper
    assert keeper is not None
    stop = keeper.stop

    def interrupted(timeout: float) -> None:
        monkeypatch.setattr(keeper, "stop", stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(keeper, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    run.finish()
    assert "nodetrack-keeper" not in [thread.name for thread in threading.enumerate()]
    assert RunFolder(run.folder, "p").overview().state == "finished"
    again = nodetrack.init(project="p", role="miner", uid=1, dir=run.folder.parents[2])
    assert again.id == run.id


def test_rows_that_wait_for_the_disk_survive_an_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = run._state.journal
    monkeypatch.setattr(type(journal), "_ready", lambda _: False)
    for step in range(50):
        run.log({"a": 1.0}, step=step)
    monkeypatch.undo()
    write_row, calls = journal.write_row, []

    def interrupted(*arguments: object, **named: object) -> None:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        write_row(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(journal, "write_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.flush()
    monkeypatch.undo()
    run.flush()
    assert steps_of(run) == list(range(50))
    assert run.health().pending == 0


def test_sigterm_waits_for_no_keeper_that_waits_for_our_lock(tmp_path: Path) -> None:
    """The handler stands on top of a frame that holds the lock, so the keeper cannot end before it."""
    body = """
        import nodetrack, os, signal, time
        run = nodetrack.init(project="p", finish_timeout=50)
        with run._state.journal.lock:
            time.sleep(1.5)  # by now the keeper waits for the lock
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(50)
    """
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], cwd=tmp_path, capture_output=True)
    assert done.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 40, "a bound on hanging, not a measure of speed"


def test_contexts_and_names_may_be_new_in_many_threads_at_once(run: Run) -> None:
    stop = threading.Event()

    def bind() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            run.log({f"m/{number % 50}": 1.0}, step=number, context={"shard": number % 300})

    threads = [threading.Thread(target=bind) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        assert run.step >= 0
        run.state_dict()
        assert run.health().skipped == {}
        _ = run.summary
    stop.set()
    for thread in threads:
        thread.join()


def test_a_context_that_comes_while_the_step_is_asked_for_disturbs_nothing(run: Run) -> None:
    """As from a signal handler, or from another thread."""

    class Interrupting(KeySet):
        @property
        def last_step(self) -> int:
            run.log({"new": 1.0}, step=3, context={"number": len(run._state._views)})
            return 7

        @last_step.setter
        def last_step(self, step: int) -> None: ...

    run._state.view({})["x",] = Interrupting(("x",), {})
    assert run.step == 8
    assert run.step == 8
    run._state.view({}).clear()  # so that the run can be finished


def test_contexts_that_never_repeat_do_not_fill_the_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodetrack.run_state.MAX_KEY_SETS", 50)
    kept = run.bind(kept=1)
    for number in range(200):
        run.log({"a": 1.0}, step=number, context={"batch": number})
        kept.log({"b": 1.0}, step=number)
    assert len(run._state._views) <= 50
    assert run.step == 200
    assert run.health().out_of_order == 0
    assert len(steps_of(run)) == 400


def test_a_handler_that_logs_to_the_run_does_not_hang_it(run: Run) -> None:
    """Another thread holds the handler's lock and wants to log; a warning of ours wants the handler."""

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            run.log({"log/warnings": 1.0})

    handler = Counting()
    logger = logging.getLogger()
    logger.addHandler(handler)
    try:
        threads = [
            threading.Thread(target=lambda: [run.log({f"t/{n}": "text"}) for n in range(300)], daemon=True),
            threading.Thread(target=lambda: [logger.warning("other") for _ in range(300)], daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        logger.removeHandler(handler)


def test_a_handler_that_raises_ends_neither_a_row_nor_the_run(run: Run) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no disk for logs")

    handler = Broken()
    logging.getLogger().addHandler(handler)
    try:
        run.log({"a": 1.0, "b": "text"}, step=0)
        run.finish()
    finally:
        logging.getLogger().removeHandler(handler)
    assert steps_of(run) == [0]
    assert any("no disk for logs" in warning for warning in run.health().warnings)


def test_a_slow_value_makes_no_other_thread_wait(run: Run) -> None:
    """As the `item()` of a tensor whose device is busy."""
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        def item(self) -> float:
            reading.set()
            assert go_on.wait(60)
            return 1.0

    thread = threading.Thread(target=lambda: run.log({"slow": Slow()}, step=1))
    thread.start()
    assert reading.wait(60)
    run.log({"quick": 1.0}, step=0)
    assert steps_of(run) == [0]
    go_on.set()
    thread.join()
    assert steps_of(run) == [0, 1]


def test_a_checkpoint_of_another_node_merges_nothing(run: Run, tmp_path: Path) -> None:
    run.log({"a": 1.0}, step=9)
    checkpoint = run.state_dict()
    other = nodetrack.init(project="p", role="miner", uid=2, dir=tmp_path)
    own = other.id
    other.load_state_dict(checkpoint)
    assert (other.id, other.step) == (own, 10)
    other.finish()
    assert nodetrack.init(project="p", role="miner", uid=2, dir=tmp_path).step == 10, "also after a restart"


@pytest.mark.parametrize("run_id", ["../../../escaped", "", "a/b", ".hidden"])
def test_the_run_id_of_a_checkpoint_is_no_path(run: Run, tmp_path: Path, run_id: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="cannot be one"):
        run.load_state_dict({**run.state_dict(), "run": run_id})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("step", [2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70])
def test_no_step_is_too_large_for_the_next_segment(tmp_path: Path, step: int) -> None:
    run = nodetrack.init(project="p", dir=tmp_path, segment_bytes=4096)
    run.log({"a": 1.0}, step=0)
    run.log({"a": 1.0}, step=step)
    run.load_state_dict({**run.state_dict(), "step": step})
    for _ in range(200):
        run.log({"a": 1.0}, step=5)
    run.finish()
    detail = RunFolder(run.folder, "p").detail()
    assert (detail.rows, detail.damage.corrupt, detail.damage.problems) == (202, 0, [])
    assert os.listdir(run.dir).count("segment-000002.ntj") == 1  # noqa: PTH208 - names only
