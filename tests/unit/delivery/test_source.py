"""Which records come next, where several processes write to one run at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import nodetrack
from nodetrack.delivery.companion import companion_writer
from nodetrack.delivery.source import Source, has_all
from nodetrack.journal.cursor import Cursor
from nodetrack.journal.recover import read_header
from nodetrack.journal.segment import segment_paths
from nodetrack.live_run import Run
from nodetrack.records import Kind


def node(uid: int, **settings: object) -> Run:
    """A node of the run `shared`."""
    return nodetrack.init("p", role="miner", uid=uid, id="shared", mode="offline", **settings)


def source_of(run: Run, cursor: Cursor | None = None) -> Source:
    return Source(run.folder, "p", cursor or Cursor(backend="b", destination="here"))


def step_batches(source: Source, *, most: int = 100, records: int = 1000) -> list[list[int]]:
    """The steps of the next batches that hold rows, each acknowledged at once."""
    batches = []
    while len(batches) < most and (taken := source.next(records, 1 << 20)) is not None:
        source.acknowledge(taken)
        if taken.batch.rows:
            batches.append([row.step for row in taken.batch.rows])
    return batches


@pytest.mark.case("C041")
def test_a_writer_that_never_pauses_does_not_keep_the_others_back() -> None:
    busy, other = node(1), node(2)
    busy.log({"loss": 1.0}, step=0)
    source = source_of(busy)
    step_batches(source)
    other.log({"loss": 1.0}, step=1000)
    came = []
    for step in range(1, 6):
        busy.log({"loss": 1.0}, step=step)
        came += step_batches(source, most=1)
    assert [1000] in came[:2]


@pytest.mark.case("C041")
def test_what_an_earlier_attempt_goes_on_to_write_is_noticed_at_once() -> None:
    """Also in a segment that had been sent to its end before, and in one that was begun since."""
    earlier, newest = node(1, segment_bytes=4096), node(2)
    cursor = Cursor(backend="b", destination="here")
    earlier.log({"loss": 1.0}, step=0)
    step_batches(source_of(earlier, cursor))
    source = source_of(earlier, cursor)
    assert step_batches(source) == []
    for step in range(1, 500):
        earlier.log({"loss": 1.0}, step=step)
    newest.log({"loss": 1.0}, step=0)
    assert sorted(step for batch in step_batches(source) for step in batch) == [0, *range(1, 500)]
    assert len(segment_paths(Path(earlier.dir))) > 2


def test_a_round_takes_what_each_writer_had_and_then_ends() -> None:
    """Both writers log after every batch; each has one turn, and the next round has the rest in order."""
    run, other = node(1, segment_bytes=4096), node(2)
    source = source_of(run)
    came: list[list[int]] = []
    for same_round in (False, *[True] * 20, False, *[True] * 20):
        taken = source.next(1000, 1 << 20, same_round=same_round)
        if taken is not None:
            source.acknowledge(taken)
            came.append([row.step for row in taken.batch.rows if row.step < 10_000])
            for step in range(60):
                run.log({"loss": 1.0}, step=60 * len(came) + step)
                other.log({"loss": 1.0}, step=10_000 + step)
    assert len(came) < 12, "each writer's turn, and the segments that one had begun meanwhile"
    steps = [step for batch in came for step in batch]
    assert steps == sorted(steps)


def test_one_writers_segments_come_in_their_order() -> None:
    """However the turns fall, the end of one segment comes before the beginning of the next."""
    run, other = node(1, segment_bytes=4096), node(2)
    source, came = source_of(run), list[int]()
    for step in range(600):
        run.log({"loss": 1.0}, step=step)
        other.log({"loss": 1.0}, step=10_000 + step)
        if step % 7 == 0:
            came += [step for batch in step_batches(source, most=1, records=5) for step in batch]
    came += [step for batch in step_batches(source, most=10_000) for step in batch]
    assert [step for step in came if step < 10_000] == list(range(600))
    assert [step for step in came if step >= 10_000] == list(range(10_000, 10_600))


def test_attempts_that_ended_come_first_to_last() -> None:
    for first in (0, 100, 200):
        run = node(1)
        for step in range(first, first + 50):
            run.log({"loss": 1.0}, step=step)
        run.finish()
    steps = [step for batch in step_batches(source_of(run), records=7) for step in batch]
    assert steps == [*range(50), *range(100, 150), *range(200, 250)]


def test_what_was_sent_to_its_end_long_ago_is_not_kept() -> None:
    """A run of thousands of attempts costs a look a minute, not a look a batch."""
    old = node(1)
    old.log({"loss": 1.0}, step=0)
    old.finish()
    long_ago = time.time() - 86_400
    for path in segment_paths(Path(old.dir)):
        os.utime(path, (long_ago, long_ago))
    run = node(1)
    cursor = Cursor(backend="b", destination="here")
    step_batches(source_of(run, cursor))
    source = source_of(run, cursor)
    assert step_batches(source) == []
    assert {path.parent.name for path in source._segments} == {run.attempt}


@pytest.mark.case("C041")
def test_whether_all_of_an_attempt_was_sent_is_told_apart_from_the_rest_of_the_run() -> None:
    first, second = node(1), node(2)
    cursor = Cursor(backend="b", destination="here")
    second.log({"loss": 1.0}, step=0)
    assert not has_all(cursor, second.folder, "p", second.attempt)
    step_batches(source_of(first, cursor))
    first.log({"loss": 1.0}, step=0)
    assert has_all(cursor, second.folder, "p", second.attempt)
    assert not has_all(cursor, second.folder, "p", first.attempt)


def test_what_the_delivery_process_wrote_for_the_node_is_the_nodes_own() -> None:
    """A backend must not take the end of a killed node for that of a forked child."""
    run = node(1)
    header = read_header(segment_paths(Path(run.dir))[0])
    assert header is not None
    companion = companion_writer(Path(run.dir), header)
    with companion.lock:
        companion.write([int(Kind.FINISH), time.time_ns(), "crashed", -1, "killed"])
    companion.close()
    source, found = source_of(run), []
    while (taken := source.next(1000, 1 << 20)) is not None:
        source.acknowledge(taken)
        found += [(type(record).__name__, taken.batch.companion) for record in taken.batch.records]
        assert taken.batch.writer == 1
    assert ("AttemptStarted", False) in found
    assert found[-1] == ("AttemptFinished", True)
