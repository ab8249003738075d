"""The records of a run that a backend does not have yet, batch by batch.

Attempts come first to last, their segments in the order in which they were begun. Reading runs ahead of the
cursor by one batch; the cursor moves when the batch has arrived.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import msgspec

from nodetrack.backends.base import Batch, RunInfo
from nodetrack.errors import JournalError
from nodetrack.journal.cursor import Cursor, SegmentProgress
from nodetrack.journal.folder import AttemptFolder
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import attempt_folders, attempt_number, read_header
from nodetrack.journal.segment import segment_number, segment_paths
from nodetrack.records import JsonValue, Mark, Record, RunEdited

#: All folders are looked through again so often; in between only attempts that are being written are.
_LOOK_SECONDS: Final = 60.0
#: The folders of attempts that grow are listed so often while there is something to send.
_GLANCE_SECONDS: Final = 0.5
#: An attempt whose files have not grown for so long is not being written, until a look finds otherwise.
_LIVELY_SECONDS: Final = 600.0
_LEAST_BLOCK_BYTES: Final = 64 * 1024
#: The writer of a batch that holds what the node logged, or what its delivery process wrote for it.
_NODE: Final = 1
_LABELS: Final = ("name", "tags", "notes", "group", "job_type")


class Taken(msgspec.Struct, frozen=True):
    """A batch, and where its segment stands behind it. It may hold no record that a backend wants."""

    batch: Batch
    attempt: str
    segment_name: str
    end: int
    rows: int


class Source:
    """Reads what lies behind `cursor`. `attempts` restricts it to some, by id."""

    def __init__(
        self, run_folder: Path, project: str, cursor: Cursor, attempts: Collection[str] | None = None
    ) -> None:
        self._run_folder = run_folder
        self._project = project
        self._cursor = cursor
        self._only = attempts
        self._segments: dict[Path, _Segment] = {}
        self._infos: dict[str, _AttemptInfo] = {}
        self._looked = self._glanced = -_LOOK_SECONDS
        #: Attempts by name: those that have been looked into, and those that may get new segments.
        self._known: set[str] = set()
        self._lively: set[str] = set()
        self._unsorted = False
        #: By writer of an attempt, when it was last read to the end of what was written.
        self._turns: dict[tuple[str, int], int] = {}
        #: Those that have been read to that end in this round.
        self._read_to_end: set[tuple[str, int]] = set()
        #: Files that could not be read, with the reason.
        self.problems: dict[Path, str] = {}

    def next(self, records: int, size: int, *, look: bool = False, same_round: bool = False) -> Taken | None:
        """The next batch of at most so many records and about so many bytes; None if there is no more now.

        `look`: look through all attempts for new segments first. `same_round`: of a writer whose newest
        segment was read to its end since the last call without it, nothing more is taken.
        """
        if not same_round:
            self._read_to_end.clear()
        glance = look or time.monotonic() - self._glanced > _GLANCE_SECONDS
        if glance:
            self._look(all_attempts=look or time.monotonic() - self._looked > _LOOK_SECONDS)
        if look:
            for segment in self._segments.values():
                segment.look_again()
        taken = self._take_next(records, size)
        if taken is None and not glance:  # folders are not listed for every batch of a long backlog
            self._look(all_attempts=False)
            taken = self._take_next(records, size)
        return taken

    def _take_next(self, records: int, size: int) -> Taken | None:
        for segment in self._in_turn():
            if segment.writer not in self._read_to_end and segment.has_grown():
                taken = self._take(segment, records, size)
                if taken is not None:
                    return taken
        return None

    def _in_turn(self) -> list[_Segment]:
        """First to last, but whoever was read to the end has had its turn: a writer that adds a row in the
        time of every batch must not keep the others back for ever.
        """
        return sorted(self._segments.values(), key=lambda segment: self._turns.get(segment.writer, 0))

    def acknowledge(self, taken: Taken, refused: int = 0) -> None:
        """Move the cursor behind a batch, of whose rows the backend refused so many for good."""
        entry = self._cursor.progress(taken.attempt, taken.segment_name)
        entry.offset = taken.end
        entry.rows += taken.rows - refused
        entry.quarantined += refused
        entry.lost -= min(entry.lost, taken.rows)  # removed while it was under way: it has arrived after all
        entry.writer = taken.batch.writer
        steps = [row.step for row in taken.batch.rows]
        if steps:
            entry.step = max(steps) if entry.step is None else max(entry.step, *steps)

    def newest_attempt(self) -> RunInfo | None:
        """What is known of the attempt that began last; None before there is any."""
        folders = self._attempt_folders()
        return self._info(folders[-1]).info if folders else None

    # -- looking -------------------------------------------------------------------------------------

    def _look(self, *, all_attempts: bool) -> None:
        """Notice new segments. Several nodes may write to one run: the newest attempt need not be the only
        one that grows. Segments that have been sent to their end, and grow no more, are not kept.
        """
        folders = self._attempt_folders()
        self._glanced = time.monotonic()
        if all_attempts:
            self._looked = self._glanced
            self._lively.clear()
        self._lively.update(folder.name for folder in folders[-1:])
        for folder in folders:
            if all_attempts or folder.name in self._lively or folder.name not in self._known:
                self._look_into(folder)
        if self._unsorted:
            self._segments = dict(sorted(self._segments.items(), key=lambda item: _order(item[0])))
            self._unsorted = False

    def _look_into(self, folder: Path) -> None:
        self._known.add(folder.name)
        for path in _paths(folder):
            if folder.name not in self._lively and _is_written(path):
                self._lively.add(folder.name)
            if path not in self._segments and (folder.name in self._lively or self._has_more(path)):
                self._segments[path] = _Segment(path, self._cursor.progress(folder.name, path.name))
                self._unsorted = True

    def _has_more(self, path: Path) -> bool:
        entry = self._cursor.attempts.get(path.parent.name, {}).get(path.name)
        with contextlib.suppress(OSError):
            return entry is None or path.stat().st_size > entry.offset
        return False

    def _attempt_folders(self) -> list[Path]:
        with contextlib.suppress(OSError):  # a file server that does not answer now: nothing new is seen
            folders = attempt_folders(self._run_folder)
            return [folder for folder in folders if self._only is None or folder.name in self._only]
        return []

    def _info(self, folder: Path) -> _AttemptInfo:
        if folder.name not in self._infos:
            self._infos[folder.name] = _AttemptInfo(folder, self._project)
        return self._infos[folder.name]

    # -- reading -------------------------------------------------------------------------------------

    def _take(self, segment: _Segment, records: int, size: int) -> Taken | None:
        try:
            taken = segment.take(records, size, self._info(segment.path.parent))
        except (JournalError, OSError) as error:
            self.problems[segment.path] = str(error)
            segment.give_up()
            return None
        if segment.is_at_end and not self._goes_on_behind(segment):
            self._turns[segment.writer] = max(self._turns.values(), default=0) + 1
            self._read_to_end.add(segment.writer)
        return taken

    def _goes_on_behind(self, segment: _Segment) -> bool:
        """Whether there is more of the writer of a segment than that segment."""
        others = (other for other in self._segments.values() if other is not segment)
        return any(other.writer == segment.writer and other.has_grown() for other in others)


class _AttemptInfo:
    """What batches say of their attempt; the labels follow the records as they are read."""

    def __init__(self, folder: Path, project: str) -> None:
        attempt = AttemptFolder(folder, is_last=True)
        self.labelled = False
        self.info = RunInfo(
            project=project,
            run=folder.parent.name,
            attempt=attempt.id,
            attempt_number=attempt.number,
            version=attempt.version,
            role=str(attempt.facts.get("role", "")),
            uid=str(attempt.facts.get("uid", "")),
            environment=str(attempt.facts.get("environment", "prod")),
            entity=_text(attempt.facts.get("entity")),
            group=_text(attempt.facts.get("group")),
            job_type=_text(attempt.facts.get("job_type")),
            previous_run=_text(attempt.facts.get("previous_run")),
            started_ns=attempt.started_ns,
            folder=folder.parent,
        )

    def set_labels(self, labels: Mapping[str, object]) -> None:
        """Take in name, tags, notes, group or job type, as far as given."""
        self.labelled = True
        given = {name: labels[name] for name in _LABELS if name in labels}
        if "tags" in given:
            given["tags"] = tuple(cast("list[str]", given["tags"] or ()))
        if given.get("name", "") is None:
            given["name"] = ""
        if given:
            self.info = msgspec.structs.replace(self.info, **given)


class _Segment:
    """One segment that is being read."""

    def __init__(self, path: Path, progress: SegmentProgress) -> None:
        self.path = path
        self._progress = progress
        self._reader = SegmentReader(path)
        self._block: Iterator[Record] | None = None
        self._block_start = 0
        self._block_bytes = 0
        self._file_size = 0
        self._skipped = False
        self._writer: tuple[str, int] | None = None
        #: Whether the last batch took all that there was.
        self.is_at_end = False
        #: How large the file was when it was last read to its end.
        self._seen_size = progress.offset

    @property
    def writer(self) -> tuple[str, int]:
        """The attempt, and who wrote the segment; one whose header is not there yet stands alone."""
        if self._writer is None:
            header = read_header(self.path)
            if header is None:
                return self.path.parent.name, segment_number(self.path.name)
            self._writer = self.path.parent.name, header.writer
        return self._writer

    def has_grown(self) -> bool:
        """Whether there may be more than was read."""
        if self._block is not None:
            return True
        try:
            return self.path.stat().st_size > self._seen_size
        except OSError:  # pruned, or a file server that does not answer now
            return False

    def look_again(self) -> None:
        """Read a torn end once more, although the file is as large as it was."""
        self._seen_size = self._reader.offset if self._skipped else self._progress.offset

    def take(self, records: int, size: int, attempt: _AttemptInfo) -> Taken | None:
        """The next records; None if there is no whole one. Raises JournalError and OSError."""
        if not self._skipped:
            for who in self._reader.skip_to(self._progress.offset):
                self._note(who, attempt)
            self._skipped = True
        start, taken, self.is_at_end = self._reader.offset, list[Record](), False
        while len(taken) < records and self._reader.offset - start < size:
            record = self._next_record(max(_LEAST_BLOCK_BYTES, size))
            if record is None:
                self.is_at_end = True
                break
            self._note(record, attempt)
            if not isinstance(record, Mark):
                taken.append(record)
        if self._reader.offset == start:
            return None
        header = self._reader.header
        companion = header is not None and header.companion
        writer = segment_number(self.path.name) if header is None else header.writer
        batch = Batch(
            run=attempt.info,
            records=taken,
            segment=segment_number(self.path.name),
            writer=_NODE if companion else writer,
            companion=companion,
        )
        return Taken(batch, attempt.info.attempt, self.path.name, self._reader.offset, len(batch.rows))

    def _next_record(self, block_bytes: int) -> Record | None:
        """The next whole record; None at the end of what is written."""
        while True:
            if self._block is None:
                self._file_size = self.path.stat().st_size
                self._block_start = self._reader.offset
                self._block_bytes = max(self._block_bytes, block_bytes)
                self._block = self._reader.read(limit=self._block_bytes)
            for record in self._block:
                return record
            self._block = None
            if self._reader.offset > self._block_start:
                self._block_bytes = 0
            elif self._block_start + self._block_bytes >= self._file_size:
                self._seen_size = self._file_size
                return None
            else:  # a record that is larger than the block, or a damaged stretch
                self._block_bytes *= 2

    def _note(self, record: Record, attempt: _AttemptInfo) -> None:
        header = self._reader.header
        if header is not None and not attempt.labelled:
            attempt.set_labels(header.labels)
        if isinstance(record, RunEdited):
            attempt.set_labels(record.fields)

    def give_up(self) -> None:
        """It cannot be read as it is; try again when it has grown."""
        self._block = None
        with contextlib.suppress(OSError):
            self._seen_size = self.path.stat().st_size


def has_all(cursor: Cursor, run_folder: Path, project: str, attempt: str) -> bool:
    """Whether whoever wrote the cursor has sent all records of an attempt that there are now."""
    source = Source(run_folder, project, cursor, [attempt])
    return source.next(1, 1, look=True) is None and not source.problems


def _paths(folder: Path) -> list[Path]:
    try:
        return segment_paths(folder)
    except OSError:
        return []


def _is_written(path: Path) -> bool:
    """Whether the file has grown of late."""
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime < _LIVELY_SECONDS
    return False


def _order(path: Path) -> tuple[int, str, int]:
    attempt = path.parent.name
    return attempt_number(attempt), attempt, segment_number(path.name)


def _text(value: JsonValue) -> str | None:
    return value if isinstance(value, str) else None
