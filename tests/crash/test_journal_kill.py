"""SIGKILL at any moment: a row whose `log` has returned is never missing, and no step is used twice."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

import nodetrack
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import attempt_folders, recover
from nodetrack.journal.segment import segment_paths
from nodetrack.records import Row

KILLS = 100
LONGEST_SECONDS = 0.15
ACKNOWLEDGEMENT_BYTES = 8
#: Most runs fill no segment in that time, so in every second one segments are tiny.
SEGMENT_BYTES = (64 * 1024 * 1024, 32 * 1024)


class Killed(NamedTuple):
    """What a node had acknowledged when it was killed: `log` had returned for these steps."""

    steps: list[int]


def log_for_ever(folder: Path, segment_bytes: int, acknowledge: int) -> NoReturn:
    """The node: logs as fast as it can, and says after each `log` that it has returned."""
    run = nodetrack.init(dir=folder, version="1", segment_bytes=segment_bytes, id="node")
    os.write(acknowledge, run.step.to_bytes(ACKNOWLEDGEMENT_BYTES))
    for step in range(run.step, 2**62):
        run.log({"loss": step / 8, "step": step})
        os.write(acknowledge, step.to_bytes(ACKNOWLEDGEMENT_BYTES))
    raise AssertionError


def killed_node(folder: Path, segment_bytes: int, seconds: float) -> Killed:
    """Runs the node in a forked child and kills it `seconds` after it began to log.

    A fork of this process, which has imported everything, is a process like any other and starts faster.
    """
    acknowledged, acknowledge = os.pipe()
    fcntl.fcntl(acknowledge, fcntl.F_SETPIPE_SZ, 1024 * 1024)  # the node must not wait for us
    pid = os.fork()
    if pid == 0:
        try:
            log_for_ever(folder, segment_bytes, acknowledge)
        except BaseException:  # whatever it is, the child must not go on as a second test run
            traceback.print_exc()
            os._exit(1)
    os.close(acknowledge)
    with os.fdopen(acknowledged, "rb", buffering=0) as pipe:
        assert pipe.read(ACKNOWLEDGEMENT_BYTES), "the node did not begin"
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        return Killed([*steps_in(b"".join(iter(lambda: pipe.read(65536), b"")))])


def steps_in(data: bytes) -> Iterator[int]:
    for begin in range(0, len(data), ACKNOWLEDGEMENT_BYTES):
        yield int.from_bytes(data[begin : begin + ACKNOWLEDGEMENT_BYTES])


def rows_of(attempt: Path) -> list[Row]:
    """The rows of an attempt. Only the end of its last segment may be torn."""
    rows: list[Row] = []
    paths = segment_paths(attempt)
    for path in paths:
        reader = SegmentReader(path)
        rows += [record for record in reader.read() if isinstance(record, Row)]
        assert (reader.damage.corrupt, reader.unnamed_rows, reader.unknown_records) == (0, 0, 0)
        assert reader.damage.torn_bytes == 0 or path == paths[-1]
    return rows


@pytest.mark.slow
@pytest.mark.case("C030")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_node_killed_at_any_moment_has_every_row_that_it_was_told_is_logged(tmp_path: Path) -> None:
    """Promise P2. One node, killed a hundred times: its history has no hole and no step twice."""
    nodetrack.init(dir=tmp_path, version="1", uid="warms up").finish()
    moments = random.Random(2)
    next_step = 0
    rotated = 0
    for kill in range(KILLS):
        segment_bytes = SEGMENT_BYTES[kill % 2]
        killed = killed_node(tmp_path, segment_bytes, moments.uniform(0.0, LONGEST_SECONDS))
        run_folder = tmp_path / "default" / "runs" / "node"
        attempt = attempt_folders(run_folder)[-1]
        rows = rows_of(attempt)
        assert killed.steps == list(range(next_step, next_step + len(killed.steps)))
        assert len(rows) - len(killed.steps) in (0, 1)  # the last `log` may not have come to return
        assert [row.step for row in rows] == list(range(next_step, next_step + len(rows)))
        assert all(row.values == [row.step / 8, row.step] for row in rows)
        next_step += len(rows)
        assert recover(run_folder).step == next_step
        rotated += len(segment_paths(attempt)) > 1
    assert len(attempt_folders(run_folder)) == KILLS
    assert rotated > KILLS // 4
    assert next_step > KILLS * 100


ENDING = """
    import os, sys
    import nodetrack
    run = nodetrack.init(dir=sys.argv[1], version="1", id="node")
    run.log({"loss": 0.5})
    os.kill(os.getpid(), 9) if sys.argv[2] == "kill" else os._exit(3)
"""


@pytest.mark.case("C030")
@pytest.mark.parametrize("way", ["kill", "exit"])
def test_the_row_before_a_sudden_end_is_there(tmp_path: Path, way: str) -> None:
    """The next instruction behind `log` ends the process; nothing of it runs any more."""
    command = [sys.executable, "-c", textwrap.dedent(ENDING), str(tmp_path), way]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == (-signal.SIGKILL if way == "kill" else 3), done.stderr
    attempt = attempt_folders(tmp_path / "default" / "runs" / "node")[-1]
    assert [(row.names, row.values, row.step) for row in rows_of(attempt)] == [(("loss",), [0.5], 0)]
