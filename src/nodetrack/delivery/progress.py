"""How far a backend has come with what one process logged, for `run.health()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from nodetrack.errors import JournalError
from nodetrack.health import BackendHealth
from nodetrack.journal.cursor import Cursor
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import read_header
from nodetrack.journal.segment import segment_number, segment_paths
from nodetrack.records import Row, SegmentHeader

_BLOCK_BYTES: Final = 256 * 1024


class Logged(NamedTuple):
    """What one process has logged: so many rows, as that writer of the attempt."""

    attempt: str
    writer: int
    rows: int


class Reached(NamedTuple):
    """How far a backend has come: its cursor, None if nothing was ever sent, and the first and the last step
    of the rows behind it.
    """

    cursor: Cursor | None = None
    missing: tuple[int, int] | None = None


def progress(reached: Reached, logged: Logged) -> BackendHealth:
    """What it says of the rows of that process."""
    cursor = reached.cursor
    if cursor is None:
        return BackendHealth("starting", logged.rows, 0, missing=reached.missing)
    entries = [entry for entry in cursor.segments(logged.attempt) if entry.writer == logged.writer]
    return BackendHealth(
        cursor.state,
        logged.rows,
        sum(entry.rows for entry in entries),
        cursor.last_error,
        sum(entry.quarantined for entry in entries),
        sum(entry.lost for entry in entries),
        reached.missing,
        dict(cursor.left_out),
        cursor.url,
    )


class Backlog:
    """What one backend lacks of what a process has logged, looked at again and again.

    A look reads what was logged since the one before and a block of what has arrived since, however much the
    backend lacks: a program may ask after every step of an outage of days.
    """

    def __init__(self) -> None:
        self._segments: dict[Path, _Segment] = {}

    def steps(self, attempt_folder: Path, writer: int, cursor: Cursor | None) -> tuple[int, int] | None:
        """The lowest and the highest step of the rows in the journal behind the cursor; None without any."""
        entries = {} if cursor is None else cursor.attempts.get(attempt_folder.name, {})
        found: list[int] = []
        segments: dict[Path, _Segment] = {}
        for path in _paths(attempt_folder):
            segments[path] = segment = self._segments.get(path) or _Segment(path)
            if segment.writer == writer:
                offset = entries[path.name].offset if path.name in entries else 0
                with contextlib.suppress(JournalError, OSError):  # removed meanwhile, or no segment
                    found += segment.steps(offset)
        self._segments = segments
        return (min(found), max(found)) if found else None


class _Block(msgspec.Struct):
    """A stretch of a segment, and the lowest and the highest step of its rows, if it has any."""

    start: int
    end: int
    steps: tuple[int, ...]


class _Segment:
    """The steps of one segment, from the place of the cursor on."""

    def __init__(self, path: Path) -> None:
        self._header: SegmentHeader | None = None
        self._path = path
        self._reader = self._reader_at(0)
        self._blocks: list[_Block] = []

    @property
    def writer(self) -> int:
        """See `writer_of`; a file that was just made may not have its header yet."""
        self._header = self._header or read_header(self._path)
        return segment_number(self._path.name) if self._header is None else self._header.writer

    def _reader_at(self, offset: int) -> SegmentReader:
        reader = SegmentReader(self._path, names_are_needed=False)
        reader.offset = offset
        return reader

    def steps(self, offset: int) -> list[int]:
        """Steps among which are the lowest and the highest of the rows behind `offset`. Raises JournalError
        and OSError.
        """
        begin = self._blocks[0].start if self._blocks else self._reader.offset
        if not begin <= offset < self._reader.offset:  # all has arrived, or the cursor is another one
            self._reader, self._blocks = self._reader_at(offset), []
        self._read_on()
        while self._blocks and self._blocks[0].end <= offset:
            del self._blocks[0]
        if self._blocks and self._blocks[0].start < offset:
            block = self._blocks[0]
            block.steps = _extremes(_steps(self._reader_at(offset), block.end - offset))
            block.start = offset
        return [step for block in self._blocks for step in block.steps]

    def _read_on(self) -> None:
        """Take in what was written since, in blocks."""
        size, block_bytes = self._path.stat().st_size, _BLOCK_BYTES
        while (start := self._reader.offset) < size:
            steps = _extremes(_steps(self._reader, block_bytes))
            if self._reader.offset > start:
                self._add(_Block(start, self._reader.offset, steps))
                block_bytes = _BLOCK_BYTES
            elif start + block_bytes >= size:  # half a record
                return
            else:
                block_bytes *= 2

    def _add(self, block: _Block) -> None:
        """One more; a small one joins the one before it, so that there are few."""
        last = self._blocks[-1] if self._blocks else None
        if last is not None and block.end - last.start <= _BLOCK_BYTES:
            last.end, last.steps = block.end, _extremes([*last.steps, *block.steps])
        else:
            self._blocks.append(block)


def _steps(reader: SegmentReader, limit: int) -> Iterator[int]:
    return (record.step for record in reader.read(limit) if isinstance(record, Row))


def _extremes(steps: Iterator[int] | list[int]) -> tuple[int, ...]:
    found = list(steps)
    return (min(found), max(found)) if found else ()


def _paths(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return segment_paths(folder)
    return []
