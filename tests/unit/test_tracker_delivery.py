"""`init`, `log` and `finish` with backends that a process of its own delivers to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.servers.plugin import Jsonlines

import nodetrack
from nodetrack.delivery import process as process_module
from nodetrack.errors import BackendRefusedError
from nodetrack.journal.folder import RunFolder
from nodetrack.live_run import Run

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, jsonlines: Jsonlines) -> Start:
    """Starts attempts of one node in one folder, with the plug-in as its backend."""

    def start(**arguments: object) -> Run:
        settings: dict[str, object] = {
            "project": "p",
            "uid": 7,
            "dir": tmp_path / "track",
            "version": "1.0",
            "backends": [{**jsonlines.config, "batch_seconds": 0.05}],
            "init_timeout": 50,
        }
        return nodetrack.init(**{**settings, **arguments})  # type: ignore[arg-type]

    return start


def wait_for(condition: Callable[[], object], seconds: float = 50.0) -> None:
    """Until it holds; the bound is there so that a broken test ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)


def delivery_pid(run: Run) -> int:
    delivery = run._state.delivery
    assert delivery is not None
    assert delivery.pid is not None
    return delivery.pid


def script(folder: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, in `folder`."""
    (folder / "node.py").write_text(textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, "node.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def steps(backend: Jsonlines) -> list[object]:
    return [row["step"] for row in backend.rows()]


# -- the life of a run -----------------------------------------------------------------------------------


def test_all_that_a_run_records_arrives(start: Start, jsonlines: Jsonlines) -> None:
    run = start(config={"lr": 0.1})
    assert run.url == jsonlines.path.absolute().as_uri()
    for step in range(100):
        run.log({"loss": step / 2})
    run.tags += ("new",)
    run.finish()
    assert steps(jsonlines) == list(range(100))
    kinds = {line["record"] for line in jsonlines.lines()}
    assert kinds == {"AttemptStarted", "RunEdited", "ConfigSet", "Row", "AttemptFinished"}
    health = run.health().backends["jsonlines"]
    assert (health.state, health.logged, health.delivered, health.pending) == ("ok", 100, 100, 0)
    assert (health.missing, health.url) == (None, run.url)
    assert run.health().warnings == []


def test_a_restarted_node_goes_on_delivering_where_it_was(start: Start, jsonlines: Jsonlines) -> None:
    for _ in range(3):
        run = start()
        for _ in range(10):
            run.log({"loss": 0.5})
        run.finish()
    assert steps(jsonlines) == list(range(30))
    assert len([line for line in jsonlines.lines() if line["record"] == "Row"]) == 30, "each was sent once"


@pytest.mark.case("C019")
def test_health_says_what_a_backend_lacks_and_it_is_sent_once_when_it_is_back(
    start: Start, jsonlines: Jsonlines
) -> None:
    run = start(backends=[jsonlines.config, "null"])
    run.log({"loss": 1.0}, step=0)
    wait_for(lambda: steps(jsonlines) == [0])
    jsonlines.spoil("write fail")
    for step in range(1, 1001):
        run.log({"loss": 1.0}, step=step)
    wait_for(lambda: run.health().backends["jsonlines"].state == "down")
    health = run.health().backends
    assert (health["jsonlines"].pending, health["jsonlines"].missing) == (1000, (1, 1000))
    assert "jsonlines was told to fail" in health["jsonlines"].last_error
    assert (health["null"].state, health["null"].delivered) == ("ok", 1001)
    wait_for(lambda: any("jsonlines cannot be had" in warning for warning in run.health().warnings))
    jsonlines.mend()
    run.finish()
    assert steps(jsonlines) == list(range(1001))
    assert run.health().backends["jsonlines"].pending == 0


def test_what_is_missing_after_going_back_is_what_was_logged_since(
    start: Start, jsonlines: Jsonlines
) -> None:
    run = start()
    for step in range(100):
        run.log({"loss": 1.0}, step=step)
    wait_for(lambda: run.health().backends["jsonlines"].delivered == 100)
    assert run.health().backends["jsonlines"].missing is None
    jsonlines.spoil("write fail")
    run.load_state_dict({**run.state_dict(), "step": 40})
    run.log({"loss": 1.0}, step=40)
    run.log({"loss": 1.0}, step=41)
    health = run.health().backends["jsonlines"]
    assert (health.pending, health.missing) == (2, (40, 41))
    jsonlines.mend()
    run.finish()
    assert run.health().backends["jsonlines"].missing is None


def test_a_backend_that_does_not_close_is_not_said_to_lack_anything(
    start: Start, jsonlines: Jsonlines
) -> None:
    run = start(finish_timeout=3)
    run.log({"loss": 1.0})
    wait_for(lambda: steps(jsonlines) == [0])
    jsonlines.spoil("close hang 600")
    run.finish()
    [warning] = run.health().warnings
    assert warning.startswith(f"All of run {run.id} was sent, but jsonlines had not closed after 3 seconds")
    assert "Nothing is left to be sent." in warning
    assert "sync" not in warning


def test_a_checkpoint_of_another_run_takes_delivery_along(start: Start, jsonlines: Jsonlines) -> None:
    first = start()
    first.log({"loss": 1.0})
    checkpoint = first.state_dict()
    first.finish()
    second = start(resume="never")
    second.log({"loss": 2.0})
    second.load_state_dict(checkpoint)
    second.log({"loss": 3.0})
    second.finish()
    wait_for(lambda: len(jsonlines.rows()) == 3)
    runs = {(row["run"], row["values"][0]) for row in jsonlines.rows()}  # type: ignore[index]
    assert {value for run, value in runs if run == first.id} == {1.0, 3.0}


# -- who gets a process ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{"mode": "offline"}, {"mode": "disabled"}, {"rank": 1}, {"backends": ["null"]}]
)
def test_who_has_nothing_to_deliver_starts_no_process(start: Start, arguments: dict[str, object]) -> None:
    run = start(**arguments)
    assert run._state.delivery is None
    assert "jsonlines" not in run.health().backends


def test_an_offline_run_is_sampled_and_not_delivered(start: Start, jsonlines: Jsonlines) -> None:
    run = start(mode="offline", system_seconds=0.1)
    run.log({"loss": 1.0})
    assert delivery_pid(run)
    wait_for(lambda: len(list(Path(run.dir).glob("*.ntj"))) == 2)
    run.finish()
    assert jsonlines.lines() == []
    assert RunFolder(run.folder, "p").overview().state == "finished"


# -- the hand-shake ------------------------------------------------------------------------------------------


def test_a_refusal_is_raised_and_leaves_the_node_free(start: Start, jsonlines: Jsonlines) -> None:
    with pytest.raises(BackendRefusedError, match="401: jsonlines does not know this token") as refused:
        start(backends=[{**jsonlines.config, "needs_token": True}])
    assert refused.value.backend == "jsonlines"
    children = psutil.Process().children()  # a server that other tests share may be among them
    assert not [child for child in children if child.status() != psutil.STATUS_ZOMBIE and _is_delivery(child)]
    again = start(backends=[{**jsonlines.config, "needs_token": True, "token": "let-me-in"}])
    attempts = RunFolder(again.folder, "p").attempts
    assert [attempt.state(attempt.finish_record()).state for attempt in attempts] == ["crashed", "running"]
    again.log({"loss": 1.0})
    again.finish()
    assert steps(jsonlines) == [0]


@pytest.mark.case("C020")
def test_a_backend_that_never_answers_holds_init_no_longer_than_it_may(
    start: Start, jsonlines: Jsonlines
) -> None:
    jsonlines.spoil("open hang")
    began = time.monotonic()
    run = start(init_timeout=1)
    assert time.monotonic() - began < 30, "a bound on hanging, not a measure of speed"
    assert any("jsonlines has not answered" in warning for warning in run.health().warnings)
    for _ in range(100):
        run.log({"loss": 1.0})
    assert run.health().backends["jsonlines"].state == "starting"
    jsonlines.mend()
    run.finish()
    assert steps(jsonlines) == list(range(100))


# -- the end -----------------------------------------------------------------------------------------------


@pytest.mark.case("C024")
def test_finish_ends_although_a_backend_hangs_and_says_how_to_send_the_rest(
    tmp_path: Path, jsonlines: Jsonlines
) -> None:
    body = """
        import nodetrack, sys
        run = nodetrack.init(project="p", id="node", dir="track dir", finish_timeout=1, backends=[
            {"kind": "jsonlines", "path": sys.argv[1], "batch_seconds": 0.05}])
        open(sys.argv[1] + ".control", "w").write("write hang\\n")
        for _ in range(100):
            run.log({"loss": 1.0})
        sys.exit(7)
    """
    done = script(tmp_path, body, str(jsonlines.path))
    assert done.returncode == 7
    command = f"`nodetrack sync node --dir '{tmp_path / 'track dir'}'` sends the rest"
    assert "jsonlines 100 rows" in done.stderr
    assert command in done.stderr
    assert steps(jsonlines) == []
    jsonlines.mend()
    assert [path for path in psutil.process_iter() if _is_delivery_of(path, tmp_path)] == []


def test_a_ctrl_c_at_the_end_says_what_is_left_and_what_sends_it(
    tmp_path: Path, jsonlines: Jsonlines
) -> None:
    body = """
        import nodetrack, os, signal, sys, threading, time
        from pathlib import Path
        run = nodetrack.init(project="p", id="node", dir="track", backends=[
            {"kind": "jsonlines", "path": sys.argv[1], "batch_seconds": 0.05}])
        Path(sys.argv[1] + ".control").write_text("write hang\\n")
        for _ in range(100):
            run.log({"loss": 1.0})

        def press() -> None:
            while not run._state.delivery._ended:
                time.sleep(0.02)
            time.sleep(0.5)  # by now `finish` waits for the delivery
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press, daemon=True).start()
        run.finish()
    """
    done = script(tmp_path, body, str(jsonlines.path))
    assert done.returncode == -signal.SIGINT, done.stderr
    [hint] = [line for line in done.stderr.splitlines() if "interrupted" in line]
    assert "jsonlines 100 rows" in hint
    assert "goes on for at most" in hint
    assert f"`nodetrack sync node --dir {tmp_path / 'track'}`" in hint
    assert "subprocess.py" not in done.stderr, "where our wait was helps nobody"
    assert done.stderr.index("interrupted") < done.stderr.index("Traceback")
    jsonlines.mend()
    wait_for(lambda: steps(jsonlines) == list(range(100)))
    wait_for(lambda: not [process for process in psutil.process_iter() if _is_delivery_of(process, tmp_path)])


def _is_delivery(process: psutil.Process) -> bool:
    return any(argument.endswith("delivery/__main__.py") for argument in process.cmdline())


def _is_delivery_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return "delivery" in " ".join(process.cmdline()) and process.cwd() == str(folder)
    except psutil.Error:
        return False


def test_a_node_that_gets_sigterm_waits_a_little_and_the_rest_is_sent(
    tmp_path: Path, jsonlines: Jsonlines
) -> None:
    """As from systemd or torchrun, which signal the whole group."""
    body = """
        import nodetrack, os, signal, sys
        run = nodetrack.init(project="p", id="node", dir="track", backends=[
            {"kind": "jsonlines", "path": sys.argv[1], "batch_seconds": 60}])
        for _ in range(100):
            run.log({"loss": 1.0})
        os.kill(run._state.delivery.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    done = script(tmp_path, body, str(jsonlines.path))
    assert done.returncode == -signal.SIGTERM, done.stderr
    wait_for(lambda: steps(jsonlines) == list(range(100)))
    [end] = [line for line in jsonlines.lines() if line["record"] == "AttemptFinished"]
    assert (end["state"], end["reason"]) == ("terminated", "SIGTERM")


# -- unusual trainers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_the_trainer_log_and_hold_nothing(
    tmp_path: Path, jsonlines: Jsonlines, method: str
) -> None:
    """A worker that outlives the end of the run does not keep the delivery process alive."""
    body = """
        import multiprocessing, os, sys, time
        import nodetrack

        def work(ready, stay):
            ready.set()
            stay.wait(100)

        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[2])
            run = nodetrack.init(project="p", id="node", dir="track", backends=[
                {"kind": "jsonlines", "path": sys.argv[1]}])
            ready, stay = context.Event(), context.Event()
            worker = context.Process(target=work, args=(ready, stay))
            worker.start()
            assert ready.wait(100)
            run.log({"loss": 1.0})
            run.finish()
            assert run.health().backends["jsonlines"].pending == 0
            stay.set()
            worker.join()
    """
    done = script(tmp_path, body, str(jsonlines.path), method)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert steps(jsonlines) == [0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_rows_of_a_forked_child_are_delivered_too(start: Start, jsonlines: Jsonlines) -> None:
    run = start()
    run.log({"loss": 1.0}, step=0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run.log({"loss": 2.0}, step=1)
            run.finish()
            code = int(run._state.delivery is None or run._state.delivery.is_alive)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    wait_for(lambda: sorted(steps(jsonlines)) == [0, 1])  # type: ignore[type-var]
    run.finish()
    assert {row["writer"] for row in jsonlines.rows()} == {1, 2}
    assert run.health().backends["jsonlines"].delivered == 1, "its own"


def test_a_notebook_and_another_working_folder_are_no_obstacle(tmp_path: Path, jsonlines: Jsonlines) -> None:
    """`__main__` has no file, and a backend's relative path is meant from where `init` was called."""
    body = f"""
        import os
        import nodetrack
        os.mkdir("deeper")
        run = nodetrack.init(project="p", id="node", dir="track", backends=[
            {{"kind": "jsonlines", "path": "{jsonlines.path.name}"}}])
        os.chdir("deeper")
        os.rmdir("../deeper")
        os.kill(run._state.delivery.pid, 9)
        run.log({{"loss": 1.0}})
        run.finish()
    """
    done = subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(body),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert steps(jsonlines) == [0]


def test_a_node_that_goes_on_by_exec_leaves_no_process_behind(tmp_path: Path, jsonlines: Jsonlines) -> None:
    body = """
        import nodetrack, os, sys
        run = nodetrack.init(project="p", uid=1, dir="track", backends=[
            {"kind": "jsonlines", "path": sys.argv[1]}])
        run.log({"loss": 1.0})
        if len(sys.argv) < 3:
            os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
        run.finish()
    """
    done = script(tmp_path, body, str(jsonlines.path))
    assert done.returncode == 0, done.stderr
    assert steps(jsonlines) == [0, 1]
    wait_for(lambda: not [process for process in psutil.process_iter() if _is_delivery_of(process, tmp_path)])


@pytest.mark.case("C035")
def test_a_trainer_that_holds_its_interpreter_is_no_stale_one(tmp_path: Path, jsonlines: Jsonlines) -> None:
    """One long call of C code: no thread of the trainer's runs, and still there is a sign of life."""
    body = """
        import ctypes, nodetrack, os, sys
        run = nodetrack.init(project="p", id="node", dir="track", heartbeat_seconds=0.1, backends=[
            {"kind": "jsonlines", "path": sys.argv[1]}])
        os.utime(run.dir + "/heartbeat", (1, 1))
        ctypes.PyDLL(None).sleep(4)  # PyDLL keeps the interpreter's lock
        print(os.stat(run.dir + "/heartbeat").st_mtime > 1)
        run.finish()
    """
    done = script(tmp_path, body, str(jsonlines.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


@pytest.mark.case("C022")
def test_a_slow_backend_costs_the_trainer_no_call(start: Start, jsonlines: Jsonlines) -> None:
    """10 000 rows are logged while the backend has not come back from its first call."""
    run = start(backends=[{**jsonlines.config, "batch_seconds": 0.01}])
    jsonlines.spoil("write hang")
    for step in range(10_000):
        run.log({f"m/{number}": 0.5 for number in range(10)}, step=step)
    assert steps(jsonlines) == []
    health = run.health()
    assert (health.logged, health.written, health.pending) == (10_000, health.written, 0)
    jsonlines.mend()
    run.finish()
    assert len(jsonlines.rows()) == 10_000


def test_a_delivery_process_that_is_killed_is_back_before_anybody_notices(
    start: Start, jsonlines: Jsonlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "RESTART_PAUSES", (0.1,) * 5)
    run = start()
    first = delivery_pid(run)
    os.kill(first, signal.SIGKILL)
    run.log({"loss": 1.0})
    wait_for(lambda: steps(jsonlines) == [0])
    assert delivery_pid(run) != first
    assert run.health().warnings == []


def test_the_trainer_syncs_only_while_nobody_does_it_for_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(process_module, "RESTART_PAUSES", (600.0,))
    monkeypatch.setattr("nodetrack.journal.disk.sync", synced.append)
    run = start()
    run.log({"loss": 1.0})
    run._attempt._tend()
    assert synced == []
    os.kill(delivery_pid(run), signal.SIGKILL)
    wait_for(lambda: run._attempt._tend() or synced)
    synced.clear()
    run.log({"loss": 1.0})
    run.flush()
    assert synced, "flush always does"
