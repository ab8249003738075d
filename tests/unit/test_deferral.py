"""`log(..., defer=True)`: values that are not there yet, and rows that stand where their call stood."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.plugin import Jsonlines

import nodetrack
from nodetrack.errors import RunFinishedError, UsageError
from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.views import ViewRow, all_rows, current_rows
from nodetrack.live_run import Run

_PATIENCE_SECONDS = 60


class Device:
    """Computes when it is let go, as a GPU with a queue of work does. Stands in for JAX, which the tests run
    without: an array of one element, whose `item` waits.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        #: Set when somebody waits for a value.
        self.asked = threading.Event()

    def number(self, value: float) -> Lazy:
        return Lazy(self, value)

    def compute(self) -> None:
        self._done.set()

    def wait(self) -> None:
        self.asked.set()
        assert self._done.wait(_PATIENCE_SECONDS)

    def compute_when_asked(self) -> None:
        """In a thread, so that whoever asks is the first to wait."""
        threading.Thread(target=lambda: self.asked.wait(_PATIENCE_SECONDS) and self.compute()).start()


class Lazy:
    """One number of a device."""

    size = 1

    def __init__(self, device: Device, value: float) -> None:
        self._device = device
        self._value = value

    def item(self) -> float:
        self._device.wait()
        return self._value


@pytest.fixture
def device() -> Iterator[Device]:
    """A device on which everything is computed in the end: no thread outlives its test."""
    device = Device()
    yield device
    device.compute()


def start(folder: Path, **settings: object) -> Run:
    return nodetrack.init(
        project="p", role="miner", uid=1, version="0.1.0", dir=folder, system_seconds=0, **settings
    )


@pytest.fixture
def run(tmp_path: Path, device: Device) -> Iterator[Run]:
    """A run in a folder of its own, finished when all is computed."""
    run = start(tmp_path)
    yield run
    device.compute()
    run.finish()


def logged(run: Run) -> list[ViewRow]:
    return list(all_rows(RunFolder(run.folder, run.project)))


def steps(run: Run) -> list[int]:
    return [row.step for row in logged(run)]


@pytest.mark.case("C023")
def test_the_call_does_not_wait_for_the_values(run: Run, device: Device) -> None:
    for step in range(100):
        run.log({"loss": device.number(step), "lr": 0.1}, step=step, defer=True)
    assert logged(run) == []
    assert run.health().pending == run.health().logged == 100
    device.compute()
    run.flush()
    assert [row.values for row in logged(run)] == [{"loss": float(step), "lr": 0.1} for step in range(100)]
    health = run.health()
    assert (health.logged, health.written, health.pending, health.lost) == (100, 100, 0, 0)
    assert (health.state, health.skipped, health.out_of_order) == ("ok", {}, 0)


@pytest.mark.case("C023")
def test_with_a_full_queue_the_call_reads_its_own_values_and_nothing_is_dropped(
    run: Run, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodetrack.deferral.MOST_DEFERRED", 4)
    ready = Device()
    ready.compute()
    for step in range(4):
        run.log({"loss": device.number(step)}, step=step, defer=True)
    for step in range(4, 8):
        run.log({"loss": ready.number(step)}, step=step, defer=True)
    assert steps(run) == [4, 5, 6, 7]
    assert run.health().pending == 4, "the memory is bounded"
    device.compute()
    run.flush()
    assert steps(run) == [4, 5, 6, 7, 0, 1, 2, 3]
    health = run.health()
    assert (health.logged, health.written, health.lost, health.skipped) == (8, 8, 0, {})
    assert health.out_of_order == 0, "the calls came in order"
    assert dict(run.summary) == {"loss": 7.0}, "the last call has the last word, not the last to be written"
    assert run.step == 8


@pytest.mark.case("C023")
def test_a_backend_that_hangs_holds_up_no_value(jsonlines: Jsonlines, tmp_path: Path) -> None:
    """The values wait for the device, the backend waits for the journal, and nobody for the backend."""
    jsonlines.spoil("write hang")
    device = Device()
    run = start(tmp_path, backends=[jsonlines.config], finish_timeout=5)
    for step in range(300):
        run.log({"loss": device.number(step)} if step < 250 else {"loss": step}, step=step, defer=True)
    device.compute()
    run.flush()
    assert sorted(steps(run)) == list(range(300))
    run.finish()
    assert (run.health().written, run.health().lost) == (300, 0)


def test_a_row_has_time_step_and_context_of_its_call(
    run: Run, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1000, 2000])
    monkeypatch.setattr("nodetrack.live_run.time_ns", lambda: next(times))
    evaluation = run.bind(stage="eval")
    evaluation.log({"loss": device.number(1.0)}, step=7, defer=True)
    monkeypatch.undo()
    run.log({"loss": 2.0}, step=8, context={"shard": 3}, defer=True)
    device.compute()
    run.flush()
    first, second = logged(run)
    assert (first.time_ns, first.step, dict(first.context)) == (1000, 7, {"stage": "eval"})
    assert (second.step, dict(second.context)) == (8, {"shard": "3"})


def test_the_runs_counter_counts_at_the_call(run: Run, device: Device) -> None:
    run.log({"a": device.number(0.0)}, defer=True)
    run.log({"b": device.number(0.0)}, commit=False, defer=True)
    run.log({"a": 1.0})
    run.log({"a": device.number(2.0)}, defer=True)
    device.compute()
    run.flush()
    assert sorted((row.step, *row.values) for row in logged(run)) == [(0, "a"), (1, "a"), (1, "b"), (2, "a")]
    run.log({"a": 3.0})
    assert run.step == 4


def test_whatever_may_be_logged_may_be_deferred(run: Run) -> None:
    nodetrack.log(
        {"loss": 0.5, "train": {"n": 3}, "text": nodetrack.Text("x"), "broken": "a text", "": 1}, defer=True
    )
    run.log({}, defer=True)
    run.log({"broken": None}, defer=True)
    run.flush()
    [row] = logged(run)
    assert row.values == {"loss": 0.5, "train/n": 3, "text": {"type": "text", "text": "x"}}
    assert {name: item.count for name, item in run.health().skipped.items()} == {"broken": 2, "": 1}
    assert (run.health().logged, run.health().pending) == (1, 0)


def test_a_value_that_cannot_be_read_costs_itself_and_not_the_rows_behind_it(run: Run) -> None:
    class Broken:
        size = 1

        def item(self) -> float:
            raise RuntimeError("device lost")

    class Unreadable:
        @property
        def size(self) -> int:
            raise RuntimeError("no size")

    run.log({"broken": Broken(), "loss": 1.0}, defer=True)
    run.log({"unreadable": Unreadable()}, defer=True)
    run.log({"loss": 2.0}, defer=True)
    run.flush()
    assert [row.values for row in logged(run)] == [{"loss": 1.0}, {"loss": 2.0}]
    skipped = run.health().skipped
    assert "device lost" in skipped["broken"].reason
    assert "no size" in skipped["(whole row)"].reason
    assert run.health().logged == 2


def test_the_callers_own_mistakes_are_told_at_the_call(run: Run) -> None:
    with pytest.raises(UsageError):
        run.log({3: 1.0}, defer=True)  # type: ignore[dict-item]
    with pytest.raises(UsageError):
        run.log([0.1], defer=True)  # type: ignore[arg-type]
    run.finish()
    with pytest.raises(RunFinishedError):
        run.log({"a": 1.0}, defer=True)


def test_the_mapping_may_be_filled_anew_at_once(run: Run, device: Device) -> None:
    values: dict[str, object] = {}
    nested: dict[str, object] = {"train": values}
    for step in range(3):
        values["loss"] = device.number(step)
        run.log(nested, step=step, defer=True)
    device.compute()
    run.flush()
    assert [row.values for row in logged(run)] == [{"train/loss": float(step)} for step in range(3)]


def test_a_written_row_lets_go_of_its_values(run: Run, device: Device) -> None:
    """They may lie in the memory of a GPU."""
    value, gone = device.number(1.0), threading.Event()
    weakref.finalize(value, gone.set)
    run.log({"loss": value}, defer=True)
    del value
    device.compute()
    assert gone.wait(_PATIENCE_SECONDS)


def test_a_run_that_defers_nothing_has_no_thread_for_it(run: Run) -> None:
    run.log({"a": 1.0})
    assert "nodetrack-deferral" not in [thread.name for thread in threading.enumerate()]
    run.log({"a": 1.0}, defer=True)
    assert "nodetrack-deferral" in [thread.name for thread in threading.enumerate()]
    run.finish()
    assert "nodetrack-deferral" not in [thread.name for thread in threading.enumerate()]


def test_without_a_thread_to_be_had_the_call_reads_its_own_values(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    run.log({"a": 1.0}, step=3, defer=True)
    monkeypatch.undo()
    assert steps(run) == [3]


def test_flush_waits_for_what_was_deferred_before(run: Run) -> None:
    class Slow:
        size = 1

        def item(self) -> float:
            time.sleep(0.01)
            return 1.0

    for _ in range(20):
        run.log({"loss": Slow()}, defer=True)
    run.flush()
    assert len(logged(run)) == 20


def test_flush_gives_up_waiting_and_not_the_rows(tmp_path: Path, device: Device) -> None:
    run = start(tmp_path, finish_timeout=0.1)
    run.log({"loss": device.number(1.0)}, defer=True)
    run.flush()
    assert logged(run) == []
    assert "flush goes on without them" in run.health().warnings[-1]
    device.compute()
    run._state.deferral.drain(_PATIENCE_SECONDS)
    assert len(logged(run)) == 1
    run.finish()


def test_a_value_may_flush_the_run_that_reads_it(run: Run, device: Device) -> None:
    """As a handler of the program's logging may, which is called wherever something is said."""

    class Flushing:
        size = 1

        def item(self) -> float:
            device.wait()
            run.flush()
            return 1.0

    for _ in range(2):
        run.log({"loss": Flushing()}, defer=True)
    device.compute()
    run.flush()
    assert len(logged(run)) == 2
    assert not [warning for warning in run.health().warnings if "flush goes on" in warning]


# -- the end -----------------------------------------------------------------------------------------


def test_finish_waits_for_the_values(run: Run, device: Device) -> None:
    for step in range(10):
        run.log({"loss": device.number(step)}, step=step, defer=True)
    device.compute_when_asked()
    run.finish()
    assert steps(run) == list(range(10))
    assert run.summary["loss"] == 9.0
    assert run.health().state == "finished"
    overview = RunFolder(run.folder, "p").overview()
    assert (overview.state, overview.step) == ("finished", 10)


def test_values_that_never_come_are_counted_and_told_once(tmp_path: Path, device: Device) -> None:
    """Also when they come after all: what was said to be lost stays lost, and the end is the end."""
    run = start(tmp_path, finish_timeout=0.2)
    run.log({"loss": 0.5}, step=0)
    for step in range(1, 4):
        run.log({"loss": device.number(step)}, step=step, defer=True)
    run.finish()
    health = run.health()
    assert (health.logged, health.written, health.pending, health.lost) == (4, 1, 0, 3)
    assert health.state == "degraded"
    [warning] = [warning for warning in health.warnings if "lost" in warning]
    assert "3 deferred rows" in warning
    reader = next(thread for thread in threading.enumerate() if thread.name == "nodetrack-deferral")
    device.compute()
    reader.join(_PATIENCE_SECONDS)
    assert steps(run) == [0]
    assert RunFolder(run.folder, "p").overview().state == "finished"


def test_after_an_exception_only_what_comes_soon_is_kept(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodetrack.attempt._UNWELL_PATIENCE_SECONDS", 0.2)
    computed = Device()
    computed.compute()
    run = start(tmp_path, finish_timeout=_PATIENCE_SECONDS)
    run.log({"loss": computed.number(1.0)}, step=1, defer=True)
    run.log({"loss": device.number(2.0)}, step=2, defer=True)
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    assert steps(run) == [1]
    assert run.health().lost == 1
    assert RunFolder(run.folder, "p").overview().state == "crashed"


_PROGRAM = """
import sys, time
import nodetrack
class Slow:
    size = 1
    def item(self):
        time.sleep(0.005)
        return 1.0
run = nodetrack.init(project="p", uid=1, version="1", dir=sys.argv[1], system_seconds=0)
for step in range(100):
    run.log({"loss": Slow()}, step=step, defer=True)
"""


#: SIGTERM that comes while a call of `log` holds the lock, which is given back after the handler only.
_TERMINATED = """
import os, signal
with run._state.journal.lock:
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("ending", "state", "code"),
    [("", "finished", 0), ("raise ValueError", "crashed", 1), (_TERMINATED, "terminated", -signal.SIGTERM)],
    ids=["end", "exception", "SIGTERM"],
)
def test_a_program_that_just_ends_loses_none(tmp_path: Path, ending: str, state: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM + ending, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_SECONDS,
    )
    assert done.returncode == code, done.stderr
    [run] = TrackingFolder(tmp_path).runs("p")
    assert [row.step for row in all_rows(run)] == list(range(100))
    assert run.overview().state == state


# -- going back, checkpoints, forks ------------------------------------------------------------------


def test_a_late_row_does_not_undo_a_rewind(run: Run, device: Device) -> None:
    for step in range(10):
        run.log({"loss": device.number(step)}, step=step, defer=True)
    device.compute_when_asked()
    run.rewind(4)
    run.log({"loss": 50.0}, defer=True)
    run.flush()
    rows = current_rows(RunFolder(run.folder, "p"))
    assert [(row.step, row.values["loss"]) for row in rows] == [
        *((step, float(step)) for step in range(5)),
        (5, 50.0),
    ]
    assert len(logged(run)) == 11, "what was superseded stays readable"


@pytest.mark.parametrize("by", ["rewind", "load_state_dict"])
def test_a_row_that_going_back_could_not_wait_for_is_lost_and_counted(
    tmp_path: Path, device: Device, by: str
) -> None:
    run = start(tmp_path, finish_timeout=0.2)
    run.log({"loss": 0.0})
    saved = run.state_dict()
    run.log({"loss": device.number(9.0)}, step=9, defer=True)
    if by == "rewind":
        run.rewind(0)
    else:
        run.load_state_dict(saved)
    assert (run.step, run.health().lost) == (1, 1)
    device.compute()
    run.log({"loss": 1.0}, defer=True)
    run.finish()
    assert steps(run) == [0, 1]


def test_a_checkpoint_counts_the_rows_that_wait(run: Run, device: Device) -> None:
    for step in range(5):
        run.log({"loss": device.number(step)}, defer=True)
    saved = run.state_dict()
    assert (saved["step"], saved["counter"]) == (5, 5)
    run.log({"loss": device.number(5.0)}, defer=True)
    device.compute_when_asked()
    run.load_state_dict(saved)
    run.log({"loss": 55.0}, defer=True)
    run.flush()
    rows = current_rows(RunFolder(run.folder, "p"))
    assert [row.values["loss"] for row in rows] == [0.0, 1.0, 2.0, 3.0, 4.0, 55.0]


def test_a_rule_for_the_summary_holds_from_where_it_was_made(run: Run, device: Device) -> None:
    run.log({"loss": device.number(1.0)}, step=0, defer=True)
    device.compute_when_asked()
    run.define_metric("loss", summary="min")
    run.log({"loss": device.number(3.0)}, step=1, defer=True)
    run.log({"loss": 2.0}, step=2, defer=True)
    run.flush()
    assert dict(run.summary) == {"loss": 2.0}


def test_a_forked_child_defers_rows_of_its_own(run: Run, device: Device) -> None:
    for step in (0, 2):
        run.log({"who": device.number(0.0)}, step=step, defer=True)
    assert device.asked.wait(_PATIENCE_SECONDS)
    child = os.fork()
    if child == 0:
        device.compute()
        run.log({"who": 1.0}, step=1, defer=True)
        run.flush()
        run.finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    device.compute()
    run.flush()
    assert sorted((row.step, row.values["who"]) for row in logged(run)) == [(0, 0.0), (1, 1.0), (2, 0.0)]


def test_many_threads_defer_to_one_run(run: Run, device: Device) -> None:
    def work(number: int) -> None:
        for step in range(200):
            run.log({f"own/{number}": device.number(step)}, step=step, context={"t": number}, defer=True)

    device.compute()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.flush()
    rows = logged(run)
    assert len(rows) == 800
    for number in range(4):
        assert sorted(row.step for row in rows if row.context["t"] == str(number)) == list(range(200))
    health = run.health()
    assert (health.logged, health.written, health.pending, health.lost) == (800, 800, 0, 0)


def test_a_disabled_run_takes_deferred_rows_too(tmp_path: Path, device: Device) -> None:
    run = start(tmp_path, mode="disabled")
    run.log({"loss": device.number(1.0)}, defer=True)
    device.compute()
    run.finish()
    assert dict(run.summary) == {"loss": 1.0}
