"""A start that fails, is interrupted, is made twice at once or by a program that replaced itself."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nodetrack
from nodetrack import tracker
from nodetrack.attempt import Attempt
from nodetrack.backends.null import NullBackend
from nodetrack.journal.folder import TrackingFolder
from nodetrack.live_run import Run
from nodetrack.records import Kind

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts attempts of one node in one folder."""

    def start(**arguments: object) -> Run:
        return nodetrack.init(**{"dir": tmp_path, "version": "1.0", **arguments})  # type: ignore[arg-type]

    return start


def raiser(error: BaseException) -> Callable[..., object]:
    def fail(*_arguments: object, **_more: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("can't start new thread"), SystemExit(1)]
)
@pytest.mark.parametrize("place", ["_identity", "_facts", "_labels", "_announce"])
def test_a_start_that_does_not_come_to_its_end_leaves_the_node_free(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str
) -> None:
    """The next start may be in this very process: a notebook, a loop that tries again."""
    with monkeypatch.context() as patched:
        patched.setattr(tracker, place, raiser(error))
        with pytest.raises(type(error)):
            start()

    assert not start().finished


def test_an_attempt_whose_start_fails_has_an_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "_announce", raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        start()

    (run,) = TrackingFolder(tmp_path).runs()
    assert (run.overview().state, run.overview().reason) == ("terminated", "SIGINT")


def test_backends_of_a_start_that_fails_are_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(NullBackend, "close", lambda self: closed.append(self))
    monkeypatch.setattr(Attempt, "__init__", raiser(OSError("no")))
    with pytest.raises(OSError, match="no"):
        start(backends="null")

    assert len(closed) == 1


def test_a_start_by_many_threads_is_one_start(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "nodetrack")
    together = threading.Barrier(8)

    def start_and_log(_number: int) -> Run:
        together.wait()
        run = start()
        run.log({"a": 1.0})
        return run

    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(start_and_log, range(8)))

    assert len({id(run) for run in runs}) == 1
    assert runs[0].health().logged == 8


def test_a_config_that_calls_init_when_it_is_read_does_not_block(start: Start) -> None:
    class Curious(Mapping[str, object]):
        def __getitem__(self, name: str) -> object:
            start(uid="other")
            return {"a": 1}[name]

        def __iter__(self) -> Iterator[str]:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    assert start(config=Curious()).config["a"] == 1


UPDATES_ITSELF = """
    import os, sys
    import nodetrack
    run = nodetrack.init(dir=sys.argv[1], version=sys.argv[2])
    run.log({"a": 1.0})
    if sys.argv[2] == "1":
        os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], "2"])
    print(os.getpid(), run.attempt[:4], run.step)
"""


def test_a_node_that_updates_itself_by_exec_goes_on(tmp_path: Path) -> None:
    """The new program is the same process, with the same number and start, and not the lock's owner."""
    script = tmp_path / "node.py"
    script.write_text(textwrap.dedent(UPDATES_ITSELF))
    command = [sys.executable, str(script), str(tmp_path / "tracking"), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        printed, _ = node.communicate(timeout=60)

    assert printed.split() == [str(node.pid), "0002", "2"]


def test_tags_may_be_one_text(start: Start) -> None:
    assert start(tags="stable").tags == ("stable",)


def test_tags_that_are_no_texts_do_not_stop_the_next_start(start: Start, tmp_path: Path) -> None:
    """A journal may hold anything under `tags`."""
    run = start()
    run._attempt.state.labels["tags"] = [["x"]]
    run._attempt.state.record(Kind.TAGS, {"tags": [["x"]]})
    run.finish()

    assert not start().finished


def test_the_attempt_says_when_its_process_started_whatever_the_clock(start: Start) -> None:
    (attempt,) = TrackingFolder(start().folder.parent.parent.parent).runs()[0].attempts

    assert attempt.facts["process_start_ticks"] == _start_ticks(os.getpid())


def _start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_removed_working_folder_stops_nothing(start: Start, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    start().log({"a": 1.0})
    assert start(dir="tracking", uid=1).folder.is_relative_to(gone / "tracking")


def test_without_a_free_descriptor_the_attempt_knows_less(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "process_created_at", raiser(OSError(24, "Too many open files")))
    assert not start().finished


def test_a_run_that_was_killed_before_its_folder_was_used_is_no_deleted_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(uid="other").finish()
    with monkeypatch.context() as patched:
        patched.setattr(tracker, "_identity", raiser(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            start()
    run = start()
    assert (run.previous_run, list(run.health().warnings)) == (None, [])


def test_a_lock_tells_how_slow_the_heartbeat_is(start: Start, tmp_path: Path) -> None:
    start(heartbeat_seconds=120)
    start(uid=1, heartbeat_seconds=1)
    lock_0, lock_1 = (json.loads(path.read_bytes()) for path in sorted(tmp_path.glob("default/ids/*.lock")))
    assert (lock_0["stale_after_seconds"], lock_1["stale_after_seconds"]) == (480, 60)
