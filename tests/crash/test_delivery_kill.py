"""SIGKILL of the node, of its delivery process, or of both, at any moment: every row whose `log` has returned
reaches the backend.
"""

from __future__ import annotations

import contextlib
import os
import random
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

from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.views import all_rows

#: Logs about 3 000 rows a second, and says after each `log` that it has returned.
NODE = """
    import os, sys, time
    import nodetrack
    run = nodetrack.init(
        project="p", dir="track", version="1", id="node", finish_timeout=30,
        backends=[{"kind": "jsonlines", "path": sys.argv[1], "batch_seconds": 0.05, "batch_rows": 500}],
    )
    os.write(1, f"delivery {run._state.delivery.pid}\\n".encode())
    for step in range(run.step, run.step + int(sys.argv[2])):
        run.log({"loss": step / 8})
        os.write(1, f"{step}\\n".encode())
        time.sleep(0.0002)
"""


def start(folder: Path, backend: Jsonlines, rows: int, body: str = NODE) -> subprocess.Popen[bytes]:
    with (folder / "acknowledged").open("wb") as output, (folder / "errors").open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(body), str(backend.path), str(rows)],
            cwd=folder,
            stdout=output,
            stderr=errors,
        )


def said(folder: Path) -> list[str]:
    """The whole lines that the node has written so far."""
    return (folder / "acknowledged").read_text().splitlines(keepends=True)


def delivery_of(folder: Path) -> int:
    """The number of the node's first delivery process, once it has said so."""
    wait_for(lambda: said(folder) and said(folder)[0].endswith("\n"))
    return int(said(folder)[0].split()[1])


def acknowledged(folder: Path) -> set[int]:
    return {int(line) for line in said(folder)[1:] if line.endswith("\n")}


def delivered(backend: Jsonlines) -> set[object]:
    return {row["step"] for row in backend.rows()}


def wait_for(condition: Callable[[], object], seconds: float = 50.0) -> None:
    """Until it holds; the bound is there so that a broken test ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)


def wait_for_end(pid: int) -> None:
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.case("C036")
def test_a_node_killed_at_any_moment_is_sent_to_its_last_row(jsonlines: Jsonlines, tmp_path: Path) -> None:
    """One node, killed again and again: the backend has what was acknowledged, and knows of each end."""
    moments, expected, kills = random.Random(5), set[int](), 8
    for _ in range(kills):
        node = start(tmp_path, jsonlines, 10**9)
        delivery = delivery_of(tmp_path)
        time.sleep(moments.uniform(0.0, 0.3))
        node.kill()
        node.wait()
        expected |= acknowledged(tmp_path)
        wait_for_end(delivery)
        assert expected <= delivered(jsonlines)
    run = RunFolder(tmp_path / "track" / "p" / "runs" / "node", "p")
    assert delivered(jsonlines) == {row.step for row in all_rows(run)}
    ends = [line for line in jsonlines.lines() if line["record"] == "AttemptFinished"]
    assert [(end["state"], end["reason"]) for end in ends] == [
        ("crashed", "killed: the process ended without a word")
    ] * kills
    assert {attempt.state(attempt.finish_record()).state for attempt in run.attempts} == {"crashed"}
    assert (tmp_path / "errors").read_text().count("warning") == 0


@pytest.mark.slow
def test_a_delivery_process_killed_at_any_moment_loses_nothing(jsonlines: Jsonlines, tmp_path: Path) -> None:
    moments = random.Random(6)
    for _ in range(4):
        node = start(tmp_path, jsonlines, 8_000)
        kill(delivery_of(tmp_path))
        for _ in range(3):
            time.sleep(moments.uniform(0.0, 0.8))
            for child in psutil.Process(node.pid).children():
                kill(child.pid)
        assert node.wait(100) == 0, (tmp_path / "errors").read_text()
        assert acknowledged(tmp_path) <= delivered(jsonlines)
    run = RunFolder(tmp_path / "track" / "p" / "runs" / "node", "p")
    assert sorted(delivered(jsonlines)) == [row.step for row in all_rows(run)]  # type: ignore[type-var]


@pytest.mark.slow
def test_both_killed_and_started_again_catches_up(jsonlines: Jsonlines, tmp_path: Path) -> None:
    moments, expected = random.Random(7), set[int]()
    for _ in range(8):
        node = start(tmp_path, jsonlines, 10**9)
        delivery = delivery_of(tmp_path)
        time.sleep(moments.uniform(0.0, 0.3))
        for pid in random.sample([delivery, node.pid], 2):
            kill(pid)
        node.wait()
        expected |= acknowledged(tmp_path)
    node = start(tmp_path, jsonlines, 10)
    assert node.wait(100) == 0
    expected |= acknowledged(tmp_path)
    assert expected <= delivered(jsonlines)
    run = RunFolder(tmp_path / "track" / "p" / "runs" / "node", "p")
    assert delivered(jsonlines) == {row.step for row in all_rows(run)}
    assert read_cursors(run.folder)["jsonlines"].rows() == len(list(all_rows(run))), "each row counted once"


def test_a_node_in_a_container_of_its_own_is_sent_at_the_next_start(
    jsonlines: Jsonlines, tmp_path: Path
) -> None:
    """The trainer is process 1: its end takes the delivery process with it."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make a namespace of processes")
    body = """
        import nodetrack, os, sys
        assert os.getpid() == 1
        run = nodetrack.init(project="p", dir="track", id="node", uid=sys.argv[2], backends=[
            {"kind": "jsonlines", "path": sys.argv[1]}])
        for step in range(100):
            run.log({"loss": 0.5})
        run.finish() if sys.argv[2] == "finish" else os._exit(3)
    """
    for way, code in (("kill", 3), ("finish", 0)):
        command = [*unshare, sys.executable, "-c", textwrap.dedent(body), str(jsonlines.path), way]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=100)
        assert done.returncode == code, done.stderr
    assert sorted(row["step"] for row in jsonlines.rows()) == sorted([*range(100)] * 2)  # type: ignore[type-var]
