"""The program `nodetrack sync` on what real nodes left behind, as its users run it: again and again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.folder import RunFolder, TrackingFolder

if TYPE_CHECKING:
    from tests.servers.plugin import Jsonlines

NODE = """
import os, signal, sys
import nodetrack
first, count = int(sys.argv[1]), int(sys.argv[2])
run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", mode="offline", quiet=True)
for step in range(first, first + count):
    run.log({"loss": 1 / (1 + step), "step_squared": step * step}, step=step)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
run.finish()
"""


def node(first: int, count: int, *how: str) -> None:
    """One offline attempt, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", NODE, str(first), str(count), *how],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == (-9 if "killed" in how else 0), done.stderr


def sync(*arguments: str, code: int = 0) -> Any:
    """The program's answer."""
    done = subprocess.run(
        [sys.executable, "-m", "nodetrack", "sync", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def to(backend: Jsonlines, **options: object) -> str:
    return json.dumps([{**backend.config, **options}])


def the_run() -> RunFolder:
    [run] = TrackingFolder(Path(".nodetrack")).runs("p")
    return run


def times_each_step_came(backend: Jsonlines) -> Counter[int]:
    return Counter(line["step"] for line in backend.lines() if line["record"] == "Row")


@pytest.mark.case("C032")
def test_four_offline_attempts_synced_in_any_order_each_twice_are_one_run_each_row_once(
    jsonlines: Jsonlines,
) -> None:
    """The second one was killed: what it had logged is sent all the same."""
    for number, how in enumerate(((), ("killed",), (), ()), 0):
        node(number * 50, 50, *how)
    for number in (3, 1, 4, 2):
        for _ in range(2):
            sync("miner-1", "--attempt", str(number), "--backends", to(jsonlines))
    lines = [line for line in jsonlines.lines() if line["record"] == "Row"]
    assert [line["step"] for line in lines] == [
        *(*range(100, 150), *range(50), *range(150, 200), *range(50, 100))
    ]
    assert {line["run"] for line in lines} == {the_run().id}
    assert [line["attempt"][:4] for line in lines[::50]] == ["0003", "0001", "0004", "0002"]
    answer = sync("--backends", to(jsonlines))
    (backend,) = answer["runs"][0]["backends"]
    assert (backend["logged"], backend["delivered"], answer["complete"]) == (200, 200, True)


@pytest.mark.case("C033")
def test_syncing_from_time_to_time_sends_each_row_once(jsonlines: Jsonlines) -> None:
    node(0, 40)
    sync("--backends", to(jsonlines))
    node(40, 10)
    sync("--backends", to(jsonlines))
    sync("--backends", to(jsonlines))
    assert times_each_step_came(jsonlines) == Counter(range(50))


@pytest.mark.case("C033")
def test_a_crash_between_send_and_acknowledgement_repeats_one_batch_at_most_with_the_same_keys(
    jsonlines: Jsonlines,
) -> None:
    """The answer to a batch is lost, and the process is ended before it can try again."""
    node(0, 100)
    jsonlines.spoil("write lose")
    sync("--backends", to(jsonlines, batch_rows=30), "--timeout", "0.2", code=1)
    jsonlines.mend()
    sent_before = times_each_step_came(jsonlines).keys()
    assert 0 < len(sent_before) <= 30
    sync("--backends", to(jsonlines, batch_rows=30))
    steps = times_each_step_came(jsonlines)
    assert steps.keys() == set(range(100))
    assert {step for step, times in steps.items() if times > 1} == sent_before
    assert [row["step"] for row in jsonlines.rows()] == list(range(100)), "their keys are the same"


@pytest.mark.case("C024")
def test_what_a_finished_node_could_not_deliver_is_delivered_by_sync(jsonlines: Jsonlines) -> None:
    """The backend hangs while the node finishes; the node ends in time, and the rest comes later."""
    jsonlines.spoil("write hang")
    code = f"""
import nodetrack
run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", quiet=True, finish_timeout=1,
                     backends=[{jsonlines.config!r}])
for step in range(200):
    run.log({{"a": 1.0}}, step=step)
run.finish()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert jsonlines.lines() == []
    command = next(line for line in done.stderr.splitlines() if "nodetrack sync" in line)
    assert the_run().id in command
    jsonlines.mend()
    answer = sync("miner-1")
    assert answer["complete"]
    assert times_each_step_came(jsonlines).keys() == set(range(200))
    assert read_cursors(the_run().folder)["jsonlines"].rows() == 200


def test_two_syncs_at_once_send_nothing_twice(jsonlines: Jsonlines) -> None:
    node(0, 300)
    jsonlines.spoil("write hang 0.05")
    command = [sys.executable, "-m", "nodetrack", "sync", "--backends", to(jsonlines, batch_rows=20)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert 0 in [process.returncode for process in both]
    assert times_each_step_came(jsonlines) == Counter(range(300))


def test_a_running_node_is_left_to_send_its_own_rows_and_follow_takes_over_from_it(
    jsonlines: Jsonlines,
) -> None:
    """The node ends without having sent all: the backend is away. It is back when only sync is there."""
    jsonlines.spoil("write unavailable")
    code = f"""
import nodetrack
run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", quiet=True, finish_timeout=1,
                     backends=[{jsonlines.config!r}])
for step in range(50):
    run.log({{"a": 1.0}}, step=step)
print(run.id, flush=True)
input()
run.finish()
"""
    program = [sys.executable, "-c", code]
    live = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert live.stdin is not None
    assert live.stdout is not None
    run_id = live.stdout.readline().strip()
    command = [sys.executable, "-m", "nodetrack", "sync", run_id]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "is being sent by the running node (process" in done.stderr
    following = subprocess.Popen(
        [*command, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    live.communicate("\n", timeout=60)
    jsonlines.mend()
    while len(jsonlines.rows()) < 50:
        assert following.poll() is None
        time.sleep(0.05)
    following.send_signal(signal.SIGINT)
    output, errors = following.communicate(timeout=60)
    assert following.returncode == 0, errors
    assert output.splitlines()[2].split() == ["jsonlines", "50", "50", "0", "delivered"]
