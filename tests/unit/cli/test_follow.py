"""Reading a run while it grows."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from nodetrack.cli.follow import RunFollower
from nodetrack.journal import folder as folder_module
from nodetrack.journal.folder import AttemptState, RunFolder
from nodetrack.records import Row

if TYPE_CHECKING:
    from conftest import Lab
    from nodetrack import Run


def follow(run: Run) -> RunFollower:
    """A follower of the run of an attempt."""
    return RunFollower(RunFolder(run.folder, "p"))


def newest(follower: RunFollower, count: int) -> list[int]:
    """The steps of the newest rows."""
    return [row.step for _, row in follower.newest(Row, count, lambda _: True)]


def added(follower: RunFollower) -> list[int]:
    """The steps of the rows that came since the last look."""
    return [record.step for _, record in follower.added() if isinstance(record, Row)]


def test_no_more_segments_are_read_than_it_takes(lab: Lab) -> None:
    with lab.start(segment_bytes=4096) as run:
        lab.log_steps(run, range(1000))
    follower = follow(run)
    assert newest(follower, 2) == [998, 999]
    assert len(follower._readers) < 3 < len(lab.segments(run))
    assert added(follower) == []


def test_a_row_is_given_once_and_only_when_all_of_it_is_there(lab: Lab) -> None:
    """The last three records arrive byte by byte, with a look after each byte."""
    with lab.start() as run:
        lab.log_steps(run, range(5))
    (path,) = lab.segments(run)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    follower = follow(run)
    found = newest(follower, 99)
    assert len(found) < 5
    with path.open("ab", buffering=0) as file:
        for byte in whole[-100:]:
            file.write(bytes([byte]))
            found += added(follower)
    assert found == [0, 1, 2, 3, 4]


def test_rows_between_the_first_look_and_the_second_are_not_missed(lab: Lab) -> None:
    run = lab.start(segment_bytes=4096)
    lab.log_steps(run, range(3))
    follower = follow(run)
    assert newest(follower, 0) == []
    lab.log_steps(run, range(3, 400))
    run.finish()
    with lab.start() as second:
        lab.log_steps(second, range(300, 310))
    assert added(follower) == [*range(3, 400), *range(300, 310)]
    assert added(follower) == []


def test_a_deleted_run_gives_nothing_and_raises_nothing(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    follower = follow(run)
    assert newest(follower, 9) == [0, 1, 2]
    shutil.rmtree(run.folder)
    assert added(follower) == []
    assert follower.problems == {}


# ---------------------------------------------------------------------------------------------------
# How attempts end


def states(follower: RunFollower) -> list[tuple[str, str]]:
    """The number of each attempt of which something is told since the last look, and its state."""
    return [
        (attempt.id.partition("-")[0], record.state)
        for attempt, record in follower.added()
        if isinstance(record, AttemptState)
    ]


def test_an_attempt_that_was_killed_is_told_once_and_behind_its_last_row(lab: Lab) -> None:
    lab.killed_node("run.log({'a': 1.0}, step=0)")
    (run,) = Path(".nodetrack/p/runs").iterdir()
    follower = RunFollower(RunFolder(run, "p"))
    told = [type(record).__name__ for _, record in follower.added()]
    assert told[-2:] == ["Row", "AttemptState"]
    assert told.count("AttemptState") == 1
    assert states(follower) == []


def test_an_attempt_that_was_killed_is_told_even_if_another_has_begun_meanwhile(lab: Lab) -> None:
    node = lab.open_node("run.log({'a': 1.0}, step=0)\nprint('logged')\nsys.stdin.read()")
    assert node.stdout is not None
    node.stdout.readline()
    (run,) = Path(".nodetrack/p/runs").iterdir()
    follower = RunFollower(RunFolder(run, "p"))
    newest(follower, 0)
    assert states(follower) == []
    node.kill()
    node.wait()
    lab.start()
    assert states(follower) == [("0001", "crashed")]
    assert states(follower) == []


def test_an_attempt_on_another_machine_has_ended_when_another_begins(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process cannot be asked from here."""
    lab.killed_node("run.log({'a': 1.0}, step=0)")
    elsewhere = msgspec.structs.replace(folder_module.this_host(), boot_id="another boot")
    monkeypatch.setattr(folder_module, "this_host", lambda: elsewhere)
    (run,) = Path(".nodetrack/p/runs").iterdir()
    follower = RunFollower(RunFolder(run, "p"))
    assert states(follower) == []
    lab.start()
    assert states(follower) == [("0001", "crashed")]


def test_attempts_before_the_one_that_is_followed_are_not_told(lab: Lab) -> None:
    lab.killed_node("run.log({'a': 1.0}, step=0)")
    follower = follow(lab.start())
    newest(follower, 0)
    assert states(follower) == []


def test_an_end_that_its_record_tells_is_told_by_that_alone(lab: Lab) -> None:
    run = lab.start()
    follower = follow(run)
    newest(follower, 0)
    assert states(follower) == []
    run.finish()
    assert states(follower) == []
    assert states(follower) == []


def test_an_attempt_that_ended_before_the_first_look_is_told(lab: Lab) -> None:
    with lab.start() as run:
        lab.log_steps(run, range(3))
    follower = follow(run)
    newest(follower, 5)
    assert states(follower) == [("0001", "finished")]
    assert states(follower) == []


def test_an_attempt_that_went_stale_is_told_each_time_it_does(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lab.start(heartbeat_seconds=1000)
    elsewhere = msgspec.structs.replace(folder_module.this_host(), boot_id="another boot")
    monkeypatch.setattr(folder_module, "this_host", lambda: elsewhere)
    follower = follow(run)
    assert states(follower) == []
    for _ in range(2):
        hour_ago = time.time() - 3600
        for path in run.folder.rglob("*"):
            os.utime(path, (hour_ago, hour_ago))
        monkeypatch.setattr(folder_module.AttemptFolder, "started_ns", int(hour_ago * 1e9))
        assert states(follower) == [("0001", "stale")]
        assert states(follower) == []
        run.log({"a": 1.0})
        assert states(follower) == []
