"""The delivery process alone: it starts, shakes hands, delivers, and ends."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr
from tests.servers.plugin import Jsonlines

from nodetrack.delivery import process as process_module
from nodetrack.delivery.lock import BackendLock
from nodetrack.delivery.process import DeliveryProcess
from nodetrack.delivery.spec import Spec, TrainerProcess, revealed
from nodetrack.errors import BackendRefusedError
from nodetrack.journal.segment import SCHEMA_VERSION
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.machine import process_created_at, process_start_ticks
from nodetrack.records import Kind, SegmentHeader

Start = Callable[..., DeliveryProcess]


class Node:
    """A journal that is written, and the delivery process beside it."""

    def __init__(self, folder: Path) -> None:
        self.run_folder = folder / "p" / "runs" / "r1"
        self.warnings: list[str] = []
        self.process: DeliveryProcess | None = None
        self.writer = JournalWriter(self.run_folder / "0001-ab", self.header, self.warnings.append)
        self.keys = KeySet(("loss",), {})
        self.writer.open()
        self.writer.write([int(Kind.ATTEMPT), 1, {"version": "1.0", "role": "miner", "uid": "1"}])

    def header(self, writer: int, segment: int) -> SegmentHeader:
        return SegmentHeader(
            schema_version=SCHEMA_VERSION,
            project="p",
            run="r1",
            attempt="0001-ab",
            writer=writer,
            segment=segment,
            version="1.0",
        )

    def log(self, steps: range) -> None:
        for step in steps:
            self.writer.write_row(self.keys, step, step, [float(step)], False)

    def log_text(self) -> str:
        """What stands in the log of the process."""
        return (self.run_folder / "0001-ab" / "delivery.log").read_text()

    def start(self, *backends: object, **given: object) -> DeliveryProcess:
        settings: dict[str, object] = {
            "folder": os.fsencode(self.run_folder),
            "header": self.header(0, 0),
            "backends": [revealed(backend) for backend in backends],
            "trainer": TrainerProcess(os.getpid(), process_created_at() or 0.0, process_start_ticks()),
            "finish_timeout": 30.0,
            "heartbeat_seconds": 15.0,
            "segment_bytes": 64 * 1024 * 1024,
        }
        spec = Spec(**{**settings, **given})  # type: ignore[arg-type]
        self.process = DeliveryProcess(spec, "nodetrack sync r1", self.warnings.append)
        self.process.start()
        return self.process


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "track")
    yield node
    if node.process is not None:
        node.process.end(0.0, 0.0)
        node.process.kill()
    node.writer.close()


def wait_for(condition: Callable[[], object], seconds: float = 40.0) -> None:
    """Until it holds; the bound is there so that a broken test ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)


LOUD = """
    from typing import Literal
    from nodetrack.backends.base import Backend, BackendConfig

    class LoudConfig(BackendConfig):
        kind: Literal["loud"] = "loud"

    class Plugin(Backend[LoudConfig]):
        config_class = LoudConfig

        def open(self, run):
            print("{not an answer}", flush=True)
            try:
                input("password? ")
            except EOFError as error:
                print(repr(error), flush=True)

        def write(self, batch):
            pass
"""


def make_plugin(folder: Path, source: str) -> None:
    """A plug-in as an installer would leave it: a module and its metadata, on the path of this process."""
    info = folder / "loud-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nodetrack.backends]\nloud = loud_backend:Plugin\n")
    (folder / "loud_backend.py").write_text(textwrap.dedent(source))


def soon(seconds: float = 40.0) -> float:
    return time.monotonic() + seconds


def test_what_is_logged_arrives_and_the_process_ends(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"
    node.log(range(100))
    wait_for(lambda: len(jsonlines.rows()) == 100)
    node.log(range(100, 150))
    pid = process.pid
    assert pid is not None
    assert process.end(30.0, 30.0)
    assert [row["step"] for row in jsonlines.rows()] == list(range(150))
    assert not psutil.pid_exists(pid), "it was waited for, so it is no zombie"
    assert node.warnings == []


# -- the hand-shake ------------------------------------------------------------------------------------


def test_a_backend_that_refuses_is_named_with_its_words(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start({**jsonlines.config, "needs_token": True})
    with pytest.raises(BackendRefusedError) as refused:
        process.shake_hands(soon())
    assert str(refused.value) == (
        "401: jsonlines does not know this token; set JSONLINES_TOKEN. "
        "Correct that, or leave jsonlines out of the backends."
    )


def test_a_secret_reaches_the_process_and_nobody_who_looks_at_it(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start({**jsonlines.config, "needs_token": True, "token": SecretStr("let-me-in")})
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"
    assert process.pid is not None
    for name in ("cmdline", "environ"):
        assert b"let-me-in" not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    process.end(30.0, 30.0)
    for path in node.run_folder.rglob("*"):
        assert not path.is_file() or b"let-me-in" not in path.read_bytes(), path


def test_a_backend_that_is_away_is_warned_of_and_told_of_again_when_it_is_back(
    node: Node, jsonlines: Jsonlines
) -> None:
    jsonlines.spoil("open unavailable")
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert [warning for warning in node.warnings if "jsonlines cannot be had (503" in warning]
    node.log(range(10))
    jsonlines.mend()
    wait_for(lambda: process.tend() or any("jsonlines can be had" in warning for warning in node.warnings))
    wait_for(lambda: len(jsonlines.rows()) == 10)
    assert process.end(30.0, 30.0)
    came = [line.partition("INFO: ")[2] for line in node.log_text().splitlines()]
    came = [line for line in came if "Process" not in line]
    assert came == [
        "jsonlines: down: 503: jsonlines was told to be away.",
        "jsonlines: back; what waited for it is being sent",
        "jsonlines: has all that there is, 10 rows of the run",
    ]


def test_a_backend_that_does_not_answer_holds_up_nobody(node: Node, jsonlines: Jsonlines) -> None:
    jsonlines.spoil("open hang")
    process = node.start(jsonlines.config)
    process.shake_hands(soon(0.5))
    assert node.warnings == ["The backend jsonlines has not answered yet: rows wait in the journal for it."]
    node.log(range(10))
    jsonlines.mend()
    assert process.end(30.0, 30.0)
    assert len(jsonlines.rows()) == 10


def test_a_backend_that_another_process_sends_to_is_an_answer_after_a_moment(
    node: Node, jsonlines: Jsonlines
) -> None:
    """As the last attempt's process does for half a minute, or another node of the run for weeks."""
    lock = BackendLock(node.run_folder / "cursors" / "jsonlines.lock")
    assert lock.acquire()
    process = node.start(jsonlines.config)
    deadline = soon(1000)
    process.shake_hands(deadline)
    assert node.warnings == [
        "Another process is sending this run to jsonlines just now: this one goes on when it has ended."
    ]
    node.log(range(10))
    lock.release()
    wait_for(lambda: len(jsonlines.rows()) == 10)
    wait_for(lambda: process.tend() or any("jsonlines can be had" in warning for warning in node.warnings))


def test_a_process_that_is_about_to_end_is_not_worth_a_word(
    node: Node, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodetrack.delivery.remarks._SHORT_WAIT_SECONDS", 1000.0)
    lock = BackendLock(node.run_folder / "cursors" / "jsonlines.lock")
    assert lock.acquire()
    jsonlines.spoil("open hang")
    process = node.start(jsonlines.config)
    process.shake_hands(soon(2.0))
    wait_for(lambda: process.tend() or "jsonlines" in process.answers)
    lock.release()
    wait_for(lambda: process.tend() or process.answers["jsonlines"].state == "starting")
    process.tend()
    jsonlines.mend()
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"
    assert [warning for warning in node.warnings if "Another process" in warning] == []


def test_what_an_sdk_prints_disturbs_nothing(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints, and asks for a password: both go nowhere near the trainer."""
    make_plugin(tmp_path / "plugin", LOUD)
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    process = node.start("loud")
    process.shake_hands(soon())
    assert process.answers["loud"].state == "ready"
    assert process.end(30.0, 30.0)
    log = node.log_text()
    assert "{not an answer}" in log
    assert "EOFError" in log


HANGING = """
    import time
    from typing import Literal
    from nodetrack.backends.base import Backend, BackendConfig

    class HangingConfig(BackendConfig):
        kind: Literal["loud"] = "loud"

    class Plugin(Backend[HangingConfig]):
        config_class = HangingConfig

        def open(self, run):
            time.sleep(1000)
"""


def test_a_refusal_is_told_although_another_backend_hangs(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plugin(tmp_path / "plugin", HANGING)
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    process = node.start("loud", {**jsonlines.config, "needs_token": True})
    with pytest.raises(BackendRefusedError, match="401"):
        process.shake_hands(soon(1000))
    pid = process.pid
    assert pid is not None
    process.end(0.5, 0.5)
    assert not psutil.pid_exists(pid)


SLOW = """
    import runpy, time
    time.sleep(3)
    runpy.run_path({main!r}, run_name="__main__")
"""


def test_a_long_spec_reaches_a_process_that_is_slow_to_read_it(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 64 KiB: the rest is told by whoever looks after the process."""
    main = tmp_path / "main.py"
    main.write_text(textwrap.dedent(SLOW.format(main=str(process_module._MAIN))))
    monkeypatch.setattr(process_module, "_MAIN", main)
    process = node.start({**jsonlines.config, "token": "t" * 200_000})
    node.log(range(10))
    wait_for(lambda: process.tend() or len(jsonlines.rows()) == 10)
    process.kill()
    process.start()
    assert process.end(30.0, 30.0), "or by the end"


# -- the start ------------------------------------------------------------------------------------------


def test_what_stands_beside_the_script_is_not_taken_for_the_standard_library(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer began with the real ones: it never imported these."""
    for name in ("json", "sitecustomize", "logging", "encodings", "runpy"):
        (tmp_path / "beside" / name).mkdir(parents=True)
        (tmp_path / "beside" / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "beside"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "beside"))
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"


def test_an_environment_that_no_process_can_have_is_no_obstacle(
    node: Node, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(".env").write_text(f"NUL=a\0b\nLONG={'x' * 200_000}\nPYTHONHOME=/nowhere\n")
    monkeypatch.setenv("MODEL_CARD", "x" * 200_000)
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/nowhere/{n}/{'x' * 200}" for n in range(1000))])
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"


def test_a_process_that_dies_at_once_is_told_of_at_once(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setattr(process_module, "_MAIN", tmp_path / "main.py")
    process = node.start(jsonlines.config)
    process.shake_hands(soon(1000))
    [warning] = node.warnings
    assert "(it ended with exit code 1 (ImportError: no such thing))" in warning
    assert "rows wait in the journal, and `nodetrack sync r1` sends them" in warning


def test_a_process_that_cannot_be_started_is_told_of_at_once(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python-that-is-gone"))
    process = node.start(jsonlines.config)
    process.shake_hands(soon(1000))
    [warning] = node.warnings
    assert "it could not be started: [Errno 2]" in warning


def test_one_that_was_given_up_is_tried_now_and_then_and_limits_are_not_kept_until_then(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = process_module._MAIN
    (tmp_path / "main.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setattr(process_module, "_MAIN", tmp_path / "main.py")
    monkeypatch.setattr(process_module, "RESTART_PAUSES", (0.01,))
    monkeypatch.setattr(process_module, "_LATE_PAUSE_SECONDS", 0.01)
    process = node.start(jsonlines.config, max_bytes=10**9)
    wait_for(lambda: process.tend() or node.log_text().count("There is no process now") == 5)
    _, warning = node.warnings
    assert "It is started again every 10 minutes. Until then max_bytes cannot be kept." in warning
    monkeypatch.setattr(process_module, "_MAIN", main)
    wait_for(lambda: process.tend() or "jsonlines" in process.answers)


# -- the end --------------------------------------------------------------------------------------------


@pytest.mark.case("C024")
def test_a_hanging_backend_does_not_hold_the_end(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    jsonlines.spoil("write hang")
    node.log(range(10))
    pid = process.pid
    assert pid is not None
    assert not process.end(1.0, 1.0)
    assert not psutil.pid_exists(pid)
    assert jsonlines.rows() == []


def test_whoever_does_not_wait_leaves_a_process_that_sends_the_rest(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    jsonlines.spoil("write hang 1")
    node.log(range(10))
    pid = process.pid
    assert pid is not None
    process.end(30.0, 0.0)
    wait_for(lambda: len(jsonlines.rows()) == 10)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


# -- dying ------------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_started_again(
    node: Node, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "RESTART_PAUSES", (0.01,) * 3)
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    for number in range(3):
        node.log(range(number * 10, number * 10 + 10))
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: process.tend() or process.pid not in (pid, None))  # type: ignore[misc]
    assert node.warnings == []
    wait_for(lambda: len(jsonlines.rows()) == 30)
    log = node.log_text()
    assert log.count("There is no process now: it ended with exit code -9") == 3
    assert log.count("begins, for attempt 0001-ab: jsonlines") >= 2, "some were killed before that"
    os.kill(process.pid or 0, signal.SIGKILL)
    wait_for(lambda: process.tend() or node.warnings)
    [warning] = node.warnings
    assert "`nodetrack sync r1` sends them" in warning
    process.tend()
    assert not process.is_alive


def test_a_process_that_is_dead_at_the_end_is_started_once_more(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    os.kill(process.pid or 0, signal.SIGKILL)
    node.log(range(10))
    assert process.end(30.0, 30.0)
    assert len(jsonlines.rows()) == 10


def test_a_program_that_python_is_a_part_of_is_not_started_twice(
    node: Node, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable in ("", "/usr/bin/blender"):
        node.warnings.clear()
        monkeypatch.setattr(sys, "executable", executable)
        process = node.start(jsonlines.config)
        process.shake_hands(soon())
        process.tend()
        [warning] = node.warnings
        assert "nodetrack sync r1" in warning
        assert not process.end(1.0, 1.0)


# -- the life line -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_process_alive(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    child = os.fork()
    if child == 0:
        alive = process.is_alive
        process.tend()
        time.sleep(600 if not alive else 0)
        os._exit(1)
    try:
        node.log(range(10))
        assert process.is_alive
        process._close_pipes()  # end of file, if nobody else holds the pipe
        assert process._process is not None
        assert process._process.wait(60) == process_module.ALL_SENT
        assert len(jsonlines.rows()) == 10
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_that_c_code_forked_does_not_hold_the_end(node: Node, jsonlines: Jsonlines) -> None:
    """It has a copy of the life line that nobody could close, so the end is said in words."""
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert process._process is not None
    assert process._input is not None
    copy = os.dup(process._input.fd)
    node.log(range(10))
    assert process.end(30.0, 30.0)
    os.close(copy)


def test_a_trainer_that_closes_all_descriptors_keeps_those_that_it_opens_then(
    node: Node, jsonlines: Jsonlines, tmp_path: Path
) -> None:
    """As a daemon does. Its files have the numbers of our pipes."""
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert process._input is not None
    assert process._output is not None
    numbers = [process._input.fd, process._output.fd]
    for number in numbers:
        with (tmp_path / f"own-{number}").open("w+b", buffering=0) as own:
            own.write(b"0123")
            own.seek(0)
            os.dup2(own.fileno(), number)
    node.log(range(10))
    process.tend()
    assert process.end(30.0, 30.0)
    process.kill()
    for number in numbers:
        assert os.read(number, 100) == b"0123"
        os.close(number)
    assert len(jsonlines.rows()) == 10


def test_signals_for_the_trainers_group_do_not_end_it(node: Node, jsonlines: Jsonlines) -> None:
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    pid = process.pid
    assert pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    node.log(range(10))
    wait_for(lambda: len(jsonlines.rows()) == 10)
    assert process.pid == pid


def test_a_folder_named_like_us_is_not_imported(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nodetrack").mkdir()
    (tmp_path / "nodetrack" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"


def test_a_removed_working_folder_is_no_obstacle(
    node: Node, jsonlines: Jsonlines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    process = node.start(jsonlines.config)
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"
    os.chdir(tmp_path)


def test_a_dotenv_file_gives_the_variables_that_the_trainer_lacks(node: Node, jsonlines: Jsonlines) -> None:
    Path(".env").write_text("JSONLINES_TOKEN=let-me-in\n")
    process = node.start({**jsonlines.config, "needs_token": True})
    process.shake_hands(soon())
    assert process.answers["jsonlines"].state == "ready"
