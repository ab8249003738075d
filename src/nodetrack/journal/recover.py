"""Where a run stood when its last attempt ended, found without reading its history.

The header of every segment says the step, the counter and the summary at its beginning, so the last segment
of each writer of the last attempt is all that has to be read. A mark says the same further on, about once
a megabyte, so of a large segment only the end is read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast
from zlib import crc32

import msgspec

from nodetrack.errors import JournalError
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import (
    FRAME_HEAD,
    LENGTH_FACTOR,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    decode_header,
    segment_paths,
)
from nodetrack.records import Event, JsonValue, Mark, Record, Row, RunEdited, SegmentHeader, SummarySet

#: Room for two marks and the rows of a busy second between them. Without a mark in it, all is read.
TAIL_BYTES: Final = 4 * 1024 * 1024
_BEGINNING_BYTES: Final = 64 * 1024
ATTEMPT_NAME: Final = re.compile(r"([0-9]{4,})-[0-9a-z]+")


class Recovered(msgspec.Struct):
    """What a new attempt takes over."""

    #: The number of the last attempt; 0 before the first.
    attempt_number: int = 0
    last_attempt: str = ""
    #: One past the highest step of the run that counts, 0 before the first row.
    step: int = 0
    #: The next step of calls that give none.
    counter: int = 0
    summary: dict[str, JsonValue] = {}
    #: Name, tags, notes, group and job type.
    labels: dict[str, JsonValue] = {}


def attempt_folders(run_folder: Path) -> list[Path]:
    """The attempts of a run, first to last; [] when the run has no folder."""
    try:
        entries = [entry for entry in run_folder.iterdir() if ATTEMPT_NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(entries, key=lambda entry: (attempt_number(entry.name), entry.name))


def attempt_number(name: str) -> int:
    """7 for `0007-x4f2`."""
    match = ATTEMPT_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def recover(run_folder: Path) -> Recovered:
    """Where the run in `run_folder` stood. Damaged or missing files make it know less; nothing raises."""
    try:
        attempts = attempt_folders(run_folder)
    except OSError:  # no right to look: the run begins anew; its attempts stay apart by their random names
        attempts = []
    if not attempts:
        return Recovered()
    recovered = Recovered(attempt_number(attempts[-1].name), attempts[-1].name)
    for attempt in reversed(attempts):
        found = [standing for path in _last_segments(attempt) if (standing := _standing(path)) is not None]
        if found:
            _take(found, recovered)
            break
    return recovered


def read_header(path: Path) -> SegmentHeader | None:
    """The header of a segment, without reading the rest; None when it cannot be read or is damaged."""
    with contextlib.suppress(OSError, JournalError), path.open("rb") as file:
        head = file.read(len(MAGIC) + FRAME_HEAD.size)[len(MAGIC) :]
        if len(head) == FRAME_HEAD.size:
            marked, checksum = FRAME_HEAD.unpack(head)
            payload = file.read(min(marked // LENGTH_FACTOR, MAX_PAYLOAD_BYTES))
            if crc32(payload) == checksum:
                return decode_header(payload, path)
    return None


def _last_segments(attempt: Path) -> Iterator[Path]:
    """The last segment of every writer of the attempt, and those behind it that do not say whose they are."""
    seen: set[int] = set()
    with contextlib.suppress(OSError):
        for path in reversed(segment_paths(attempt)):
            header = read_header(path)
            if header is None:
                yield path
            elif header.writer not in seen:
                seen.add(header.writer)
                yield path


class _Change(NamedTuple):
    """What was set by hand at one time."""

    time_ns: int
    summary: Mapping[str, object]
    labels: Mapping[str, object]


class _Standing:
    """The step, the counter and what was set by hand at the end of one segment."""

    def __init__(self) -> None:
        self.step = 0
        self.counter = 0
        self.rewound = False
        self.changes: list[_Change] = []

    @classmethod
    def at(cls, mark: Mark) -> _Standing:
        """What a mark says."""
        standing = cls()
        standing.step, standing.counter = mark.step, mark.counter
        standing.changes = [_Change(mark.time_ns, mark.summary, mark.labels)]
        return standing

    def see(self, record: Record) -> None:
        """Take in the next record."""
        if isinstance(record, Row):
            self.step = max(self.step, record.step + 1)
            if record.counted:
                self.counter = max(self.counter, record.step + 1)
        elif isinstance(record, SummarySet):
            self._set(record.time_ns, record.summary, {})
        elif isinstance(record, RunEdited):
            self._set(record.time_ns, {}, record.fields)
        elif isinstance(record, Event) and record.name == "rewind":
            step = record.data.get("step")
            if isinstance(step, int):
                self.step = self.counter = step + 1
                self.rewound = True

    def begin(self, header: SegmentHeader) -> None:
        """Take in what stood at the beginning of the segment, unless the run went back behind it."""
        if not self.rewound:
            self.step = max(self.step, header.step)
            self.counter = max(self.counter, header.counter)
        self.changes.insert(0, _Change(header.created_ns, header.summary, header.labels))

    def _set(self, time_ns: int, summary: Mapping[str, object], labels: Mapping[str, object]) -> None:
        """A clock that was set back does not change the order within a segment."""
        last = self.changes[-1].time_ns if self.changes else time_ns
        self.changes.append(_Change(max(time_ns, last), summary, labels))


def _standing(path: Path) -> _Standing | None:
    """How a segment ends; None when nothing of it can be read."""
    return _standing_by_mark(path) or _standing_by_all(path)


def _standing_by_mark(path: Path) -> _Standing | None:
    """From the last mark on; None where the end of the file has none."""
    standing = None
    with contextlib.suppress(OSError, JournalError):  # of a later schema, which reading all of it says too
        next(SegmentReader(path).read(limit=_BEGINNING_BYTES), None)
        if path.stat().st_size > TAIL_BYTES:
            for record in SegmentReader(path).read_tail(TAIL_BYTES):
                if isinstance(record, Mark):
                    standing = _Standing.at(record)
                elif standing is not None:
                    standing.see(record)
    return standing


def _standing_by_all(path: Path) -> _Standing | None:
    reader = SegmentReader(path)
    standing = _Standing()
    try:
        for record in reader.read():
            standing.see(record)
    except (OSError, JournalError):
        return None  # `nodetrack journal verify` names such a file; a node must start without it
    if reader.header is not None:
        standing.begin(reader.header)
    return standing if reader.header is not None or reader.offset > len(MAGIC) else None


def _take(found: list[_Standing], recovered: Recovered) -> None:
    """The furthest step of all writers, and of what they set by hand the newest."""
    recovered.step = max(standing.step for standing in found)
    recovered.counter = max(standing.counter for standing in found)
    summary: dict[str, object] = {}
    labels: dict[str, object] = {}
    for change in sorted((change for standing in found for change in standing.changes), key=_time):
        summary.update(change.summary)
        labels.update(change.labels)
    set_now = {name: value for name, value in summary.items() if value is not None}  # None took an entry away
    recovered.summary = cast("dict[str, JsonValue]", set_now)
    recovered.labels = cast("dict[str, JsonValue]", labels)


def _time(change: _Change) -> int:
    return change.time_ns
