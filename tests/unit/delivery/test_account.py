"""What a backend has and lacks, counted in journals that runs have written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

import nodetrack
from nodetrack.delivery import account as account_module
from nodetrack.delivery.account import (
    account_of,
    accounts,
    has_grown_beyond,
    missing,
    removed,
    undelivered,
)
from nodetrack.journal.cursor import Cursor, CursorFile
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import segment_paths
from nodetrack.records import Row


def logged(steps: Iterable[int], **arguments: object) -> nodetrack.Run:
    """An attempt of the one run of these tests that has logged these steps and is finished."""
    run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", **arguments)
    for step in steps:
        run.log({"a": float(step)}, step=step)
    run.finish()
    return run


def rows_of(run: nodetrack.Run, attempt: str | None = None) -> list[tuple[str, Row]]:
    """The rows of the run, or of one attempt, each with the file that it stands in."""
    found = []
    for folder in sorted(run.folder.glob("0*")):
        for path in segment_paths(folder) if attempt in (None, folder.name) else []:
            found += [(path.name, it) for it in SegmentReader(path).read() if isinstance(it, Row)]
    return found


def ends_of(run: nodetrack.Run, attempt: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in segment_paths(run.folder / attempt)}


def cursor_behind(run: nodetrack.Run, attempt: str, rows: int, cursor: Cursor | None = None) -> Cursor:
    """A cursor that stands behind so many rows of an attempt, as an acknowledged batch leaves it."""
    cursor = cursor or Cursor(backend="b", state="ok")
    standing = rows_of(run, attempt)
    for name, end in ends_of(run, attempt).items():
        offsets = [row.offset for where, row in standing if where == name]
        entry = cursor.progress(attempt, name)
        entry.rows = min(rows, len(offsets))
        entry.offset = offsets[rows] if rows < len(offsets) else end
        rows -= entry.rows
    return cursor


def test_where_nothing_was_sent_everything_is_missing() -> None:
    run = logged(range(5, 15))
    [part] = missing(run.folder, None)
    assert (part.attempt, part.rows, part.first_step, part.last_step) == (run.attempt, 10, 5, 14)
    assert part.records >= 2, "the record of the attempt and that of its end are missing too"
    assert undelivered(run.folder, Cursor(backend="b")) == (10, 0)


def test_the_missing_range_begins_behind_the_last_row_that_the_backend_has() -> None:
    run = logged(range(100))
    cursor = cursor_behind(run, run.attempt, 60)
    [part] = missing(run.folder, cursor)
    assert (part.rows, part.first_step, part.last_step) == (40, 60, 99)
    assert undelivered(run.folder, cursor) == (40, 0)


def test_steps_that_went_down_are_in_the_range() -> None:
    run = logged([0, 1, 50, 20, 7, 30])
    [part] = missing(run.folder, cursor_behind(run, run.attempt, 3))
    assert (part.rows, part.first_step, part.last_step) == (3, 7, 30)


def test_a_backend_that_has_every_record_lacks_nothing() -> None:
    run = logged(range(10))
    cursor = cursor_behind(run, run.attempt, 10)
    assert missing(run.folder, cursor) == ()
    assert undelivered(run.folder, cursor) == (0, 0)
    assert not has_grown_beyond(run.folder, cursor)
    logged([10])
    assert has_grown_beyond(run.folder, cursor)
    assert not has_grown_beyond(run.folder, cursor, [run.attempt])


def test_rows_alone_are_not_all_the_end_of_the_attempt_is_missing_too() -> None:
    run = logged(range(10))
    cursor = cursor_behind(run, run.attempt, 9)
    last = rows_of(run)[-1][1]
    [progress] = cursor.segments()
    progress.rows, progress.offset = 10, last.offset + 1  # anywhere inside the last row's frame is behind it
    [part] = missing(run.folder, cursor)
    assert (part.attempt, part.rows, part.records, part.first_step) == (run.attempt, 0, 1, None)


def test_every_attempt_and_segment_is_counted_and_they_can_be_chosen() -> None:
    first = logged(range(300), segment_bytes=4096)
    second = logged(range(300, 310))
    assert len(ends_of(first, first.attempt)) > 1
    cursor = cursor_behind(first, first.attempt, 200)
    parts = [(part.attempt, part.rows, part.first_step) for part in missing(first.folder, cursor)]
    assert parts == [(first.attempt, 100, 200), (second.attempt, 10, 300)]
    assert undelivered(first.folder, cursor) == (110, 0)
    [chosen] = missing(first.folder, cursor, [second.attempt])
    assert chosen.rows == 10


def test_an_account_adds_up() -> None:
    run = logged(range(100))
    cursor = cursor_behind(run, run.attempt, 60)
    [progress] = cursor.segments()
    progress.rows, progress.quarantined = 58, 2
    CursorFile(run.folder, "b").path.parent.mkdir()
    CursorFile(run.folder, "b").write(cursor)
    account = accounts(run.folder, recount=True)["b"]
    assert account == accounts(run.folder)["b"], "a recount of a journal in order tells the same"
    counts = (account.logged, account.delivered, account.quarantined, account.missing_rows)
    assert counts == (100, 58, 2, 40)
    assert (account.unexplained, account.is_complete, account.state) == (0, False, "behind")


def test_a_cursor_that_claims_too_little_or_too_much_is_found_out() -> None:
    """The proof of delivery counts the journal; it does not repeat what the cursor says."""
    run = logged(range(100))
    CursorFile(run.folder, "b").path.parent.mkdir()
    for claimed, unexplained in ((99, 1), (101, -1)):
        cursor = cursor_behind(run, run.attempt, 100)
        [progress] = cursor.segments()
        progress.rows = claimed
        CursorFile(run.folder, "b").write(cursor)
        account = accounts(run.folder, recount=True)["b"]
        assert (account.missing, account.unexplained, account.is_complete) == ((), unexplained, False)


def test_segments_that_were_removed_after_delivery_still_count() -> None:
    run = logged(range(300), segment_bytes=4096)
    CursorFile(run.folder, "b").path.parent.mkdir()
    CursorFile(run.folder, "b").write(cursor_behind(run, run.attempt, 250))
    segment_paths(run.folder / run.attempt)[0].unlink()
    account = accounts(run.folder, recount=True)["b"]
    assert (account.logged, account.delivered, account.missing_rows) == (300, 250, 50)
    assert account.unexplained == 0
    assert account == accounts(run.folder)["b"]


def test_removed_segments_are_counted_with_their_rows_where_a_backend_has_counted_them() -> None:
    run = logged(range(300), segment_bytes=4096)
    first, second, *others = segment_paths(run.folder / run.attempt)
    assert others, "of the newest segment nothing could be told"
    assert removed(run.folder) == (0, 0)
    first.unlink()
    assert removed(run.folder) == (1, 0)
    CursorFile(run.folder, "b").path.parent.mkdir()
    cursor = cursor_behind(run, run.attempt, 300)
    cursor.progress(run.attempt, first.name).rows = 70
    cursor.progress(run.attempt, second.name).lost = 5
    CursorFile(run.folder, "b").write(cursor)
    assert removed(run.folder) == (1, 70)
    rows = cursor.progress(run.attempt, second.name).rows
    second.unlink()
    assert removed(run.folder) == (2, 75 + rows)
    assert undelivered(run.folder, cursor).lost == 5


def test_what_a_running_node_sends_just_now_is_neither_behind_nor_undelivered() -> None:
    """The node is this process. Another one has the backend's lock: the parent of the tests, who is there."""
    run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", mode="offline")
    run.log({"a": 1.0}, step=0)
    cursor = Cursor(backend="b", state="ok")
    lock = CursorFile(run.folder, "b").path.with_suffix(".lock")
    lock.parent.mkdir()
    lock.write_text(str(os.getppid()))
    assert account_of(run.folder, cursor).state == "sending"
    assert undelivered(run.folder, cursor) == (0, 0)
    lock.write_text(str(os.getpid()))
    assert account_of(run.folder, cursor).state == "behind", "who asks is not at it"
    lock.write_text(str(os.getppid()))
    cursor.note_error("down", "Connection refused")
    assert account_of(run.folder, cursor).state == "down"
    cursor.state = "ok"
    run.finish()
    assert account_of(run.folder, cursor).state == "behind"
    assert undelivered(run.folder, cursor) == (1, 0)


def test_rows_that_nobody_takes_for_a_while_are_behind_also_of_a_running_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = nodetrack.init("p", role="miner", uid=1, version="0.1.0", mode="offline")
    run.log({"a": 1.0}, step=0)
    cursor = Cursor(backend="b", state="ok")
    lock = CursorFile(run.folder, "b").path.with_suffix(".lock")
    lock.parent.mkdir()
    lock.write_text(str(os.getppid()))
    later = time.time_ns() + int(100e9)
    monkeypatch.setattr(account_module.time, "time_ns", lambda: later)
    assert account_of(run.folder, cursor).state == "behind"
    cursor.last_ack_ns = later - int(1e9)
    assert account_of(run.folder, cursor).state == "sending"
    cursor.last_ack_ns = 0
    cursor.config = {"batch_seconds": 100}
    assert account_of(run.folder, cursor).state == "sending"


def test_a_torn_tail_is_not_missing() -> None:
    run = logged(range(10))
    [path] = segment_paths(run.folder / run.attempt)
    cursor = cursor_behind(run, run.attempt, 10)
    with path.open("ab") as file:
        file.write(b"\x07\x01\x00\x00half")
    assert missing(run.folder, cursor) == ()


def test_a_backend_in_trouble_keeps_its_state_until_it_has_everything() -> None:
    run = logged(range(10))
    CursorFile(run.folder, "b").path.parent.mkdir()
    for rows, state in ((5, "down"), (10, "delivered")):
        cursor = cursor_behind(run, run.attempt, rows)
        cursor.note_error("down", "Connection refused")
        CursorFile(run.folder, "b").write(cursor)
        account = accounts(run.folder)["b"]
        assert (account.state, account.last_error) == (state, "Connection refused")


def test_a_run_that_was_never_sent_has_no_accounts(tmp_path: Path) -> None:
    assert accounts(logged(range(3)).folder) == {}
    assert missing(tmp_path / "nowhere", None) == ()
