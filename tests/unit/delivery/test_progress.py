"""What `run.health()` says a backend lacks: the steps behind its cursor, however the run went."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import nodetrack
from nodetrack.delivery import progress as progress_module
from nodetrack.delivery.progress import Backlog
from nodetrack.journal.cursor import Cursor
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import segment_paths
from nodetrack.records import Row


def offline(**arguments: object) -> nodetrack.Run:
    return nodetrack.init("p", role="miner", uid=1, version="0.1.0", mode="offline", **arguments)


def rows_of(run: nodetrack.Run) -> list[tuple[Path, Row]]:
    return [
        (path, record)
        for path in segment_paths(run.folder / run.attempt)
        for record in SegmentReader(path).read()
        if isinstance(record, Row)
    ]


def cursor_behind(run: nodetrack.Run, rows: list[tuple[Path, Row]], count: int) -> Cursor:
    """A cursor behind so many rows."""
    cursor = Cursor(backend="b", state="ok")
    for path in segment_paths(run.folder / run.attempt):
        offsets = [row.offset for it, row in rows[count:] if it == path]
        cursor.progress(run.attempt, path.name).offset = min(offsets, default=path.stat().st_size)
    return cursor


def steps_of(run: nodetrack.Run, backlog: Backlog, cursor: Cursor | None) -> tuple[int, int] | None:
    return backlog.steps(run.folder / run.attempt, run._state.journal.writer, cursor)


def test_after_going_back_the_steps_that_are_lacking_are_named_and_not_those_that_arrived() -> None:
    run = offline()
    for step in range(100):
        run.log({"a": 1.0}, step=step)
    cursor = cursor_behind(run, rows_of(run), 100)
    backlog = Backlog()
    assert steps_of(run, backlog, cursor) is None
    saved = run.state_dict()
    run.load_state_dict({**saved, "step": 50})
    for step in range(50, 60):
        run.log({"a": 1.0}, step=step)
    assert steps_of(run, backlog, cursor) == (50, 59)
    assert steps_of(run, Backlog(), None) == (0, 99)
    run.finish()


def test_steps_are_exact_for_any_course_of_the_run_and_of_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at all the time, with blocks so small that there are many, and a record larger than any."""
    monkeypatch.setattr(progress_module, "_BLOCK_BYTES", 300)
    chance = random.Random(7)
    run, backlog = offline(segment_bytes=4096), Backlog()
    delivered = 0
    for _ in range(60):
        for _ in range(chance.randrange(20)):
            name = "a" * 600 if chance.random() < 0.02 else "a"
            run.log({name: 1.0}, step=chance.randrange(1000))
        rows = rows_of(run)
        delivered = chance.choice(
            [delivered, len(rows), chance.randint(delivered, len(rows)), delivered // 2]
        )
        steps = [row.step for _, row in rows[delivered:]]
        expected = (min(steps), max(steps)) if steps else None
        assert steps_of(run, backlog, cursor_behind(run, rows, delivered)) == expected
    run.finish()


def test_what_was_removed_is_not_missing_any_more() -> None:
    run, backlog = offline(segment_bytes=4096), Backlog()
    for step in range(300):
        run.log({"a": 1.0}, step=step)
    assert steps_of(run, backlog, None) == (0, 299)
    first, *_ = segment_paths(run.folder / run.attempt)
    left = [row.step for path, row in rows_of(run) if path != first]
    first.unlink()
    assert steps_of(run, backlog, None) == (min(left), 299)
    run.finish()


def test_a_look_reads_what_is_new_and_not_all_that_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    run, backlog = offline(), Backlog()
    read: list[int] = []
    rows_read = progress_module._steps

    def counting(reader: SegmentReader, limit: int) -> list[int]:
        found = list(rows_read(reader, limit))
        read.append(len(found))
        return found

    monkeypatch.setattr(progress_module, "_steps", counting)
    for step in range(20_000):
        run.log({"a": 1.0}, step=step)
    assert steps_of(run, backlog, None) == (0, 19_999)
    assert sum(read) == 20_000
    read.clear()
    run.log({"a": 1.0}, step=20_000)
    assert steps_of(run, backlog, None) == (0, 20_000)
    assert sum(read) == 1
    run.finish()
