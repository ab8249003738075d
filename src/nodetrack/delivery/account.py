"""What a backend has of a run and what it lacks, from the journal and the cursors alone.

What lies behind a cursor is read record by record. A recount reads all of the journal: where a cursor claims
more or less than a segment holds, `Account.unexplained` is not 0.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from nodetrack.delivery.lock import BackendLock
from nodetrack.errors import JournalError
from nodetrack.journal.cursor import CURSORS, Cursor, SegmentProgress, read_cursors
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import attempt_folders
from nodetrack.journal.segment import segment_name, segment_number, segment_paths
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    Row,
    RunEdited,
    SummarySet,
    SystemRow,
)

#: What is sent besides rows.
_OTHERS: Final = (
    *(AttemptStarted, ConfigSet, SummarySet, RunEdited, ConsoleLine, SystemRow, Event, AttemptFinished),
)
_NOTHING: Final = SegmentProgress()
#: How long a backend that is well takes at most, besides the time that rows wait for others.
_MOMENT_SECONDS: Final = 60.0


class MissingRange(msgspec.Struct, frozen=True):
    """What a backend lacks of one attempt: the rows and the range of their steps, and other records, such as
    console lines and the record of the attempt's end.
    """

    attempt: str
    rows: int
    records: int
    first_step: int | None = None
    last_step: int | None = None
    #: When the oldest of it was recorded.
    since_ns: int = 0


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's account of a run, or of some of its attempts.

    `state` is `delivered`, `sending` (a running node is at it) or `behind` where the backend is well, else
    what its cursor says: `starting`, `down`, `refused`. Rows: `logged` is what the journal holds, and what it
    held in segments that were removed since; it is `delivered` + `quarantined` + `lost` + those that are
    missing + `unexplained`, and the last can only differ from 0 where the journal was recounted.
    """

    backend: str
    state: str
    logged: int
    delivered: int
    quarantined: int
    lost: int
    missing: tuple[MissingRange, ...]
    destination: str = ""
    url: str | None = None
    last_error: str = ""
    last_error_ns: int = 0
    last_ack_ns: int = 0
    left_out: dict[str, int] = {}
    quarantined_records: int = 0

    @property
    def missing_rows(self) -> int:
        """How many rows are still to be sent."""
        return sum(part.rows for part in self.missing)

    @property
    def missing_records(self) -> int:
        """How many records other than rows are still to be sent."""
        return sum(part.records for part in self.missing)

    @property
    def unexplained(self) -> int:
        """Rows of the journal that no count has, or, below 0, that are counted and not there."""
        return self.logged - self.delivered - self.quarantined - self.lost - self.missing_rows

    @property
    def is_complete(self) -> bool:
        """Whether the backend has all but what it refused for good and what was removed before it had it."""
        return not self.missing and not self.unexplained

    @property
    def is_error_over(self) -> bool:
        """Whether the backend has been well since its last error."""
        return self.state in ("delivered", "sending", "behind")


class Journalled(msgspec.Struct, frozen=True):
    """A segment that is there: where its rows stand and their steps, in order; where its other records do;
    and the times of both.
    """

    attempt: str
    name: str
    rows: list[int] = []
    steps: list[int] = []
    row_times_ns: list[int] = []
    records: list[int] = []
    record_times_ns: list[int] = []

    def behind(self, offset: int) -> MissingRange:
        """What stands at that place or behind it."""
        row, record = bisect_left(self.rows, offset), bisect_left(self.records, offset)
        steps, times_ns = self.steps[row:], [*self.row_times_ns[row:], *self.record_times_ns[record:]]
        return MissingRange(
            attempt=self.attempt,
            rows=len(steps),
            records=len(self.records) - record,
            first_step=min(steps, default=None),
            last_step=max(steps, default=None),
            since_ns=min(times_ns, default=0),
        )


class Removed(NamedTuple):
    """Segments that are not there any more, and how many rows they had, as far as a backend counted them."""

    segments: int
    rows: int


class Undelivered(NamedTuple):
    """How many rows a backend lacks that nobody is sending, and that it will never get: they were removed."""

    rows: int
    lost: int


def accounts(
    run_folder: Path, attempts: Collection[str] | None = None, *, recount: bool = False
) -> dict[str, Account]:
    """The account of every backend that the run was ever sent to, of all attempts or of those given by id.

    Only what lies behind the cursors is read. `recount`: the whole journal is, once, and what a cursor claims
    is held against it.
    """
    cursors = read_cursors(run_folder)
    if not recount:
        return {backend: account_of(run_folder, cursor, attempts) for backend, cursor in cursors.items()}
    segments = read_journal(run_folder, attempts) if cursors else []
    return {backend: recounted(run_folder, cursor, segments, attempts) for backend, cursor in cursors.items()}


def account_of(run_folder: Path, cursor: Cursor, attempts: Collection[str] | None = None) -> Account:
    """What the cursor says, and what lies behind it."""
    return _account(run_folder, cursor, missing(run_folder, cursor, attempts), attempts)


def read_journal(run_folder: Path, attempts: Collection[str] | None = None) -> list[Journalled]:
    """All segments that can be read, of all attempts or of those given by id."""
    return [
        _journalled(attempt, path)
        for attempt in attempt_folders(run_folder)
        if attempts is None or attempt.name in attempts
        for path in _paths(attempt)
    ]


def recounted(
    run_folder: Path,
    cursor: Cursor,
    segments: Collection[Journalled],
    attempts: Collection[str] | None = None,
) -> Account:
    """What the cursor says, held against all that there is."""
    entries = _entries(cursor, attempts)
    there = {(segment.attempt, segment.name) for segment in segments}
    removed = [entry for place, entry in entries.items() if place not in there]
    lacking = _by_attempt(
        segment.behind(entries.get((segment.attempt, segment.name), _NOTHING).offset) for segment in segments
    )
    logged = sum(len(segment.rows) for segment in segments)
    logged += sum(entry.rows + entry.quarantined + entry.lost for entry in removed)
    return _account(run_folder, cursor, lacking, attempts, logged)


def missing(
    run_folder: Path, cursor: Cursor | None, attempts: Collection[str] | None = None
) -> tuple[MissingRange, ...]:
    """What lies behind the cursor, attempt by attempt; () if nothing does. No cursor: nothing was sent."""
    unread = _unread(run_folder, cursor, attempts)
    return _by_attempt(_journalled(attempt, path, offset).behind(offset) for attempt, path, offset in unread)


def has_grown_beyond(
    run_folder: Path, cursor: Cursor | None, attempts: Collection[str] | None = None
) -> bool:
    """Whether there is anything behind the cursor. Reads nothing; half a record counts as well."""
    return any(True for _ in _unread(run_folder, cursor, attempts))


def undelivered(run_folder: Path, cursor: Cursor) -> Undelivered:
    """What is missing and what is lost. Where a running node is at it, nothing is missing."""
    lacking = missing(run_folder, cursor)
    is_sent = _state(run_folder, cursor, lacking) == "sending"
    return Undelivered(0 if is_sent else sum(part.rows for part in lacking), cursor.lost)


def removed(run_folder: Path) -> Removed:
    """The segments of a run that were removed: those that a cursor knows, or whose number is missing."""
    there = {attempt.name: {path.name for path in _paths(attempt)} for attempt in attempt_folders(run_folder)}
    rows: dict[tuple[str, str], int] = {}
    for attempt, names in there.items():
        newest = max(map(segment_number, names), default=0)
        rows.update({(attempt, segment_name(number)): 0 for number in range(1, newest)})
    for cursor in read_cursors(run_folder).values():
        for place, entry in _entries(cursor, None).items():
            rows[place] = max(rows.get(place, 0), entry.rows + entry.quarantined + entry.lost)
    gone = {
        (attempt, name): count
        for (attempt, name), count in rows.items()
        if name not in there.get(attempt, ())
    }
    return Removed(len(gone), sum(gone.values()))


def _unread(
    run_folder: Path, cursor: Cursor | None, attempts: Collection[str] | None
) -> Iterator[tuple[Path, Path, int]]:
    """The attempt and the file of each segment that has grown beyond the cursor, and the cursor's place."""
    for attempt in attempt_folders(run_folder):
        if attempts is None or attempt.name in attempts:
            entries = {} if cursor is None else cursor.attempts.get(attempt.name, {})
            for path in _paths(attempt):
                offset = entries.get(path.name, _NOTHING).offset
                with contextlib.suppress(OSError):  # pruned meanwhile
                    if path.stat().st_size > offset:
                        yield attempt, path, offset


def _journalled(attempt: Path, path: Path, offset: int = 0) -> Journalled:
    """The records of a segment from `offset` on. A file that is none has none."""
    found = Journalled(attempt.name, path.name)
    reader = SegmentReader(path, names_are_needed=not offset)
    reader.offset = offset
    with contextlib.suppress(JournalError, OSError):  # told by `journal verify` and by delivery
        for record in reader.read():
            if isinstance(record, Row):
                found.rows.append(record.offset)
                found.steps.append(record.step)
                found.row_times_ns.append(record.time_ns)
            elif isinstance(record, _OTHERS):
                found.records.append(record.offset)
                found.record_times_ns.append(record.time_ns)
    return found


def _account(
    run_folder: Path,
    cursor: Cursor,
    lacking: tuple[MissingRange, ...],
    attempts: Collection[str] | None = None,
    logged: int | None = None,
) -> Account:
    """`logged`: how many rows there are, if they were counted."""
    entries = list(_entries(cursor, attempts).values())
    delivered = sum(entry.rows for entry in entries)
    quarantined = sum(entry.quarantined for entry in entries)
    lost = sum(entry.lost for entry in entries)
    if logged is None:
        logged = delivered + quarantined + lost + sum(part.rows for part in lacking)
    return Account(
        backend=cursor.backend,
        state=_state(run_folder, cursor, lacking),
        logged=logged,
        delivered=delivered,
        quarantined=quarantined,
        lost=lost,
        missing=lacking,
        destination=cursor.destination,
        url=cursor.url,
        last_error=cursor.last_error,
        last_error_ns=cursor.last_error_ns,
        last_ack_ns=cursor.last_ack_ns,
        left_out=cursor.left_out,
        quarantined_records=cursor.quarantined_records,
    )


def _entries(cursor: Cursor, attempts: Collection[str] | None) -> dict[tuple[str, str], SegmentProgress]:
    return {
        (attempt, name): entry
        for attempt, named in cursor.attempts.items()
        if attempts is None or attempt in attempts
        for name, entry in named.items()
    }


def _by_attempt(parts: Iterable[MissingRange]) -> tuple[MissingRange, ...]:
    """The parts of each attempt in one; those in which nothing is missing are left out."""
    found: dict[str, MissingRange] = {}
    for part in parts:
        if part.rows or part.records:
            before = found.get(part.attempt)
            found[part.attempt] = part if before is None else _joined(before, part)
    return tuple(found.values())


def _joined(one: MissingRange, other: MissingRange) -> MissingRange:
    steps = [step for part in (one, other) for step in (part.first_step, part.last_step) if step is not None]
    return MissingRange(
        attempt=one.attempt,
        rows=one.rows + other.rows,
        records=one.records + other.records,
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        since_ns=min(one.since_ns, other.since_ns),
    )


def _state(run_folder: Path, cursor: Cursor, lacking: Collection[MissingRange]) -> str:
    if not lacking:
        return "delivered"
    if cursor.state != "ok":
        return cursor.state
    return "sending" if _goes_on(cursor, lacking) and _has_sender(run_folder, cursor.backend) else "behind"


def _goes_on(cursor: Cursor, lacking: Collection[MissingRange]) -> bool:
    """Whether the backend took something a moment ago, or has had but a moment for what it lacks."""
    seconds = _MOMENT_SECONDS + float(cursor.config.get("batch_seconds") or 0)
    newest_ns = max(cursor.last_ack_ns, min(part.since_ns for part in lacking))
    return time.time_ns() - newest_ns < seconds * 1e9


def _has_sender(run_folder: Path, backend: str) -> bool:
    """Whether a node of the run is running and the process that sent last is there: one of another machine
    cannot be asked, and this one has done what it had to.
    """
    owner = BackendLock(run_folder / CURSORS / f"{backend}.lock").owner()
    if owner is None or owner == os.getpid():
        return False
    running = [it for it in RunFolder(run_folder, "").attempts if it.is_running]
    return any(not attempt.is_of_this_machine for attempt in running) or (bool(running) and _exists(owner))


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def _paths(attempt: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return segment_paths(attempt)
    return []
