"""Reading a run while it grows."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from nodetrack.cli.follow import RunFollower
from nodetrack.journal.folder import RunFolder
from nodetrack.records import Row

if TYPE_CHECKING:
    from conftest import Lab
    from nodetrack import Run


def follow(run: Run) -> RunFollower:
    """A follower of the run of an attempt."""
    return RunFollower(RunFolder(run.folder, "p"))


def newest(follower: RunFollower, count: int) -> list[int]:
    """The steps of the newest rows."""
    return [row.step for _, row in follower.newest(count, lambda _: True)]


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
