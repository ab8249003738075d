"""Where a run stood when its last attempt ended, found without reading its history.

The header of every segment says the step, the counter and the summary at its beginning, so the last segment of
each writer of the last attempt is all that has to be read: at most one rotation's worth of rows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import msgspec

from nodetrack.errors import JournalError
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import FRAME_HEAD, MAGIC, MAX_PAYLOAD_BYTES, decode_header, segment_paths
from nodetrack.records import Event, JsonValue, Record, Row, RunEdited, SegmentHeader, SummarySet

ATTEMPT_NAME: Final = re.compile(r"(\d{4,})-[0-9a-z]+")


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
    attempts = attempt_folders(run_folder)
    if not attempts:
        return Recovered()
    recovered = Recovered(attempt_number(attempts[-1].name), attempts[-1].name)
    for attempt in reversed(attempts):
        taken = [_take(path, recovered) for path in _last_segments(attempt)]
        if any(taken):
            break
    return recovered


def read_header(path: Path) -> SegmentHeader | None:
    """The header of a segment, without reading the rest; None when it cannot be read."""
    with contextlib.suppress(OSError, JournalError), path.open("rb") as file:
        start = file.read(len(MAGIC) + FRAME_HEAD.size)
        if len(start) == len(MAGIC) + FRAME_HEAD.size:
            length, _ = FRAME_HEAD.unpack_from(start, len(MAGIC))
            return decode_header(file.read(min(length, MAX_PAYLOAD_BYTES)), path)
    return None


def _last_segments(attempt: Path) -> Iterator[Path]:
    """The last segment of every writer of the attempt."""
    seen: set[int] = set()
    for path in reversed(segment_paths(attempt)):
        header = read_header(path)
        if header is not None and header.writer not in seen:
            seen.add(header.writer)
            yield path


def _take(path: Path, recovered: Recovered) -> bool:
    """Adds what one segment says; whether it could be read."""
    reader = SegmentReader(path)
    position = _Position()
    try:
        for record in reader.read():
            position.see(record)
    except (OSError, JournalError):
        return False  # `nodetrack journal verify` names such a file; a node must start without it
    header = reader.header
    if header is None:
        return False
    base_step, base_counter = (0, 0) if position.rewound else (header.step, header.counter)
    recovered.step = max(recovered.step, base_step, position.step)
    recovered.counter = max(recovered.counter, base_counter, position.counter)
    recovered.summary.update(cast("dict[str, JsonValue]", header.summary))
    recovered.summary.update(position.summary)
    recovered.labels.update(cast("dict[str, JsonValue]", header.labels))
    recovered.labels.update(position.labels)
    return True


class _Position:
    """The step, counter and summary after some records."""

    def __init__(self) -> None:
        self.step = 0
        self.counter = 0
        self.rewound = False
        self.summary: dict[str, JsonValue] = {}
        self.labels: dict[str, JsonValue] = {}

    def see(self, record: Record) -> None:
        if isinstance(record, Row):
            self.step = max(self.step, record.step + 1)
            if record.counted:
                self.counter = max(self.counter, record.step + 1)
        elif isinstance(record, SummarySet):
            self.summary.update(record.summary)
        elif isinstance(record, RunEdited):
            self.labels.update(record.fields)
        elif isinstance(record, Event) and record.name == "rewind":
            self.step = self.counter = cast("int", record.data["step"]) + 1
            self.rewound = True
