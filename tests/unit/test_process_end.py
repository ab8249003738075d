"""How the end of a process is recorded, and that nothing is taken from the user's own handlers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nodetrack.journal.folder import AttemptState, RunFolder, TrackingFolder


def end_of(folder: Path, body: str, send: signal.Signals | None = None) -> tuple[AttemptState, int, str, str]:
    """Runs a node with `body`; with `send`, the signal is sent once it has printed a line."""
    program = (
        "import nodetrack, os, signal, sys, time\nrun = nodetrack.init(project='p')\n" + textwrap.dedent(body)
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("NODETRACK")},
    ) as node:
        first = ""
        if send is not None:
            assert node.stdout is not None
            first = node.stdout.readline()
            node.send_signal(send)
        output, errors = node.communicate(timeout=60)
    [run] = TrackingFolder(folder / ".nodetrack").runs()
    return run.detail().attempts[-1][1], node.returncode, first + output, errors


def test_an_end_without_finish_is_finished(tmp_path: Path) -> None:
    state, code, _, _ = end_of(tmp_path, "run.log({'a': 1.0})")
    assert (state.state, state.exit_code, code) == ("finished", 0, 0)


def test_an_uncaught_exception_is_crashed_with_its_type(tmp_path: Path) -> None:
    state, code, _, errors = end_of(tmp_path, "raise ValueError('no gradient')")
    assert (state.state, state.reason, code) == ("crashed", "ValueError: no gradient", 1)
    assert errors.count("Traceback") == 1, "the traceback is printed as ever"


def test_an_exception_is_noticed_where_the_hook_was_replaced(tmp_path: Path) -> None:
    state, _, _, errors = end_of(
        tmp_path, "sys.excepthook = lambda *_: print('mine', file=sys.stderr)\nraise ValueError('x')"
    )
    assert (state.state, state.reason) == ("crashed", "ValueError: x")
    assert errors.strip().endswith("mine")


def test_the_users_excepthook_is_called(tmp_path: Path) -> None:
    program = """
        run.finish()
        sys.excepthook = lambda kind, error, trace: print("mine", error, file=sys.stderr)
        run = nodetrack.init(project="p")
        raise ValueError("x")
    """
    state, _, _, errors = end_of(tmp_path, program)
    assert state.reason == "ValueError: x"
    assert "mine x" in errors


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("3", 3, "crashed"), ("0", 0, "finished"), ("", 0, "finished"), ("'words'", 1, "crashed")],
)
def test_sys_exit_is_recorded_with_its_code(tmp_path: Path, status: str, code: int, expected: str) -> None:
    state, returned, _, _ = end_of(tmp_path, f"sys.exit({status})")
    assert (state.state, state.exit_code, returned) == (expected, code, code)


def test_finish_says_how_it_ended(tmp_path: Path) -> None:
    state, code, _, _ = end_of(tmp_path, "run.finish(exit_code=4)")
    assert (state.state, state.exit_code, code) == ("crashed", 4, 0)


def test_a_with_block_that_raises_is_crashed(tmp_path: Path) -> None:
    state, _, _, _ = end_of(tmp_path, "with run:\n    raise KeyError('x')")
    assert (state.state, state.reason) == ("crashed", "KeyError: 'x'")


def test_sigterm_ends_the_process_as_ever_and_is_recorded(tmp_path: Path) -> None:
    state, code, _, _ = end_of(tmp_path, "print('ready', flush=True)\ntime.sleep(60)", signal.SIGTERM)
    assert (state.state, state.reason, code) == ("terminated", "SIGTERM", -signal.SIGTERM)


def test_sigterm_in_a_tight_loop_of_logging_is_recorded(tmp_path: Path) -> None:
    """The handler may run in the middle of a `log` call."""
    body = "print('ready', flush=True)\nwhile True:\n    run.log({'a': 1.0})"
    state, code, _, _ = end_of(tmp_path, body, signal.SIGTERM)
    assert (state.state, code) == ("terminated", -signal.SIGTERM)
    [run] = TrackingFolder(tmp_path / ".nodetrack").runs()
    assert run.detail().damage.corrupt == 0


def test_the_users_handler_of_sigterm_still_runs_and_decides(tmp_path: Path) -> None:
    body = """
        run.finish()
        def mine(number, frame):
            print("mine", number, flush=True)
            run.log({"last": 1.0})
            sys.exit(0)
        signal.signal(signal.SIGTERM, mine)
        run = nodetrack.init(project="p")
        print("ready", flush=True)
        time.sleep(60)
    """
    state, code, output, _ = end_of(tmp_path, body, signal.SIGTERM)
    assert "mine 15" in output
    assert (state.state, state.reason, code) == ("terminated", "SIGTERM", 0)


def test_a_handler_set_after_init_replaces_ours_as_anywhere(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready", flush=True)
        time.sleep(60)
    """
    state, code, _, _ = end_of(tmp_path, body, signal.SIGTERM)
    assert (state.state, code) == ("finished", 0)


def test_an_ignored_sigterm_stays_ignored(tmp_path: Path) -> None:
    body = """
        run.finish()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run = nodetrack.init(project="p")
        print("ready", flush=True)
        time.sleep(0.5)
        print("alive", flush=True)
    """
    state, code, output, _ = end_of(tmp_path, body, signal.SIGTERM)
    assert (state.state, code) == ("finished", 0)
    assert "alive" in output


def test_ctrl_c_is_terminated(tmp_path: Path) -> None:
    state, _, _, _ = end_of(tmp_path, "print('ready', flush=True)\ntime.sleep(60)", signal.SIGINT)
    assert (state.state, state.reason) == ("terminated", "SIGINT")


def test_sigkill_is_seen_from_outside(tmp_path: Path) -> None:
    state, _, _, _ = end_of(tmp_path, "print('ready', flush=True)\ntime.sleep(60)", signal.SIGKILL)
    assert state.state == "crashed"
    assert "killed" in state.reason


def test_after_finish_every_hook_is_as_it_was(tmp_path: Path) -> None:
    body = """
        run.finish()
        assert sys.excepthook is sys.__excepthook__
        assert sys.exit.__name__ == "exit" and not hasattr(sys.exit, "__func__")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        import threading
        assert threading.active_count() == 1, threading.enumerate()
        print("as it was")
    """
    _, code, output, errors = end_of(tmp_path, body)
    assert (code, output.strip()) == (0, "as it was"), errors


def test_a_multiprocessing_child_ends_nothing(tmp_path: Path) -> None:
    body = """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        def work():
            run.log({"child": 1.0})
        children = [context.Process(target=work) for _ in range(3)]
        for child in children: child.start()
        for child in children: child.join()
        sleeper = context.Process(target=time.sleep, args=(60,))
        sleeper.start()
        sleeper.terminate()
        sleeper.join(10)
        print(sleeper.exitcode, [child.exitcode for child in children])
        run.log({"parent": 1.0})
    """
    state, code, output, errors = end_of(tmp_path, body)
    assert (code, output.strip()) == (0, "-15 [0, 0, 0]"), errors
    assert state.state == "finished"
    run: RunFolder = TrackingFolder(tmp_path / ".nodetrack").runs()[0]
    assert run.detail().rows == 4


def test_init_works_from_another_thread(tmp_path: Path) -> None:
    body = """
        run.finish()
        import threading
        def work():
            other = nodetrack.init(project="p")
            other.log({"a": 1.0})
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    state, code, _, errors = end_of(tmp_path, body)
    assert (state.state, code) == ("finished", 0), errors


def test_a_silent_run_of_another_host_is_stale_and_comes_back(tmp_path: Path) -> None:
    """The journal is copied from elsewhere, so no process can be looked at: its age decides."""
    end_of(tmp_path, "print('ready', flush=True)\nrun.log({'a': 1.0})\nos._exit(0)")
    [run] = TrackingFolder(tmp_path / ".nodetrack").runs()
    attempt = run.attempts[0]
    attempt.facts = {**attempt.facts, "host": {"hostname": "h", "boot_id": "b", "pid_namespace": "p"}}
    assert attempt.state(None).state == "running"
    for path in attempt.folder.iterdir():
        os.utime(path, (0, 0))
    attempt.facts = {**attempt.facts, "started_ns": 0}
    assert attempt.state(None).state == "stale"
    (attempt.folder / "heartbeat").touch()
    assert attempt.state(None).state == "running"
