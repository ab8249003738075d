"""Where a run stood when its last attempt ended, found without reading its history.

The header of every segment says the step, the counter and the summary at its beginning, so the last segment
of each writer of the last attempt is all that has to be read. A mark says the same further on, about once
a megabyte, so of a large segment only the end is read.

Of several writers (a process and its forked children), each says what it knows itself, and none knows that
another went back. So the rewinds of the others are looked for, where they can matter. What a writer said of
itself since stays as it said it: the step is then at most too high, and none is used twice.

Several nodes may log to one run, each in attempts of its own. Where a node goes on, its own last attempt
says; the name, tags and summary are the run's, so what was said since in the run's last attempt counts too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
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
    segment_number,
    segment_paths,
)
from nodetrack.records import Event, JsonValue, Mark, Record, Row, RunEdited, SegmentHeader, SummarySet

#: A segment that is not larger is read whole. Of a larger one, so much at a time until there is a mark.
TAIL_BYTES: Final = 4 * 1024 * 1024
_BEGINNING_BYTES: Final = 64 * 1024
_BEFORE_ALL_STEPS: Final = -(2**63)
#: Other programs may write steps beyond it. What is recovered goes into headers, which have to hold it.
_MAX_STEP: Final = 2**63 - 1
ATTEMPT_NAME: Final = re.compile(r"([0-9]{4,})-[0-9a-z]+")


class Node(NamedTuple):
    """Whose attempt it is."""

    role: str
    uid: str


class Recovered(msgspec.Struct):
    """What a new attempt takes over."""

    #: The number of the run's last attempt; 0 before the first.
    attempt_number: int = 0
    last_attempt: str = ""
    #: One past the highest step of the node that counts, 0 before its first row.
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


def recover(run_folder: Path, node: Node | None = None) -> Recovered:
    """Where `node` stood in the run in `run_folder`; without one, where the node of the last attempt did.

    Damaged or missing files make it know less; nothing raises.
    """
    try:
        attempts = attempt_folders(run_folder)
    except OSError:  # no right to look: the run begins anew; its attempts stay apart by their random names
        attempts = []
    if not attempts:
        return Recovered()
    recovered = Recovered(attempt_number(attempts[-1].name), attempts[-1].name)
    last: list[_Standing] = []
    for attempt in reversed(attempts):
        if _may_be_of(attempt, node):
            found = _standings(attempt)
            if found:
                _take_steps(found, recovered)
                _take_words([*last, *found], recovered)
                return recovered
        elif not last:
            last = _as_of_another(attempt, _standings(attempt))
    _take_words(last, recovered)
    return recovered


def _may_be_of(attempt: Path, node: Node | None) -> bool:
    """Whether it is an attempt of the node, as far as can be told: a step too high does no harm, one that is
    used twice does.
    """
    header = None if node is None else _first_header(attempt)
    return header is None or Node(header.role, header.uid) in (node, ("", ""))


def _first_header(attempt: Path) -> SegmentHeader | None:
    with contextlib.suppress(OSError):
        return next(filter(None, map(read_header, segment_paths(attempt))), None)
    return None


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


def is_companion(path: Path) -> bool:
    """Whether the delivery process wrote the segment: it says nothing of where the run stands or whether the
    node lives.
    """
    header = read_header(path)
    return header is not None and header.companion


def writer_of(path: Path) -> int:
    """Who wrote a segment: the number of that writer's first one. Where the header cannot be read, nothing
    says whether others are of the same writer; then it is the number of the segment itself.
    """
    header = read_header(path)
    return segment_number(path.name) if header is None else header.writer


class _Segment(NamedTuple):
    """A segment and what it says first."""

    path: Path
    header: SegmentHeader | None

    @property
    def writer(self) -> int:
        """See `writer_of`."""
        return segment_number(self.path.name) if self.header is None else self.header.writer


def _standings(attempt: Path) -> list[_Standing]:
    """How the last segment of every writer of the attempt ends, as far as anything of it can be read."""
    try:
        segments = [_Segment(path, read_header(path)) for path in reversed(segment_paths(attempt))]
    except OSError:
        return []
    segments = [segment for segment in segments if segment.header is None or not segment.header.companion]
    last: dict[int, _Segment] = {}
    for segment in segments:
        last.setdefault(segment.writer, segment)
    found = {writer: _standing(segment.path) for writer, segment in last.items()}
    standings = {writer: standing for writer, standing in found.items() if standing is not None}
    return _reconciled(standings, segments) if len(standings) > 1 else list(standings.values())


def _reconciled(standings: Mapping[int, _Standing], segments: list[_Segment]) -> list[_Standing]:
    """A writer does not know that another one went back. Those that stand furthest are told."""
    paths = {segment.writer: segment.path for segment in reversed(segments)}
    furthest = _Standing()
    furthest.step = furthest.counter = _BEFORE_ALL_STEPS
    for writer, standing in sorted(standings.items(), key=lambda item: item[1].step, reverse=True):
        if standing.step > furthest.step or standing.counter > furthest.counter:
            others = list(_rewinds_of_others(segments, writer, standing.since_ns))
            told = (_standing(paths[writer], others) if others else None) or standing
            furthest.step = max(furthest.step, told.step)
            furthest.counter = max(furthest.counter, told.counter)
    furthest.changes = [change for standing in standings.values() for change in standing.changes]
    return [furthest]


def _rewinds_of_others(segments: list[_Segment], writer: int, since_ns: int) -> Iterator[Event]:
    """The rewinds of the other writers, without those segments that were ended before `since_ns`."""
    ended: dict[int, int] = {}
    for segment in segments:
        if segment.writer != writer and ended.get(segment.writer, since_ns) >= since_ns:
            with contextlib.suppress(OSError, JournalError):
                yield from SegmentReader(segment.path).find_events("rewind")
        if segment.header is not None:
            ended[segment.writer] = segment.header.created_ns


class _Change(NamedTuple):
    """What was set by hand at one time. A header or a mark repeats what was set before."""

    time_ns: int
    summary: Mapping[str, object]
    labels: Mapping[str, object]
    repeated: bool = False


class _Standing:
    """The step, the counter and what was set by hand at the end of one segment.

    `others` are the rewinds of the other writers of the attempt. They concern what was logged before them.
    """

    def __init__(self, others: Sequence[Event] = ()) -> None:
        self.step = 0
        self.counter = 0
        #: Since when all that the writer did is taken in record by record.
        self.since_ns = 0
        self.rewound = False
        self.changes: list[_Change] = []
        self._others = [(rewind.time_ns, _step_of(rewind) + 1) for rewind in others]

    def see(self, record: Record) -> None:
        """Take in the next record."""
        if isinstance(record, Row):
            self._reach(record.time_ns, record.step + 1, record.step + 1 if record.counted else self.counter)
        elif isinstance(record, SummarySet):
            self._set(record.time_ns, record.summary, {})
        elif isinstance(record, RunEdited):
            self._set(record.time_ns, {}, record.fields)
        elif isinstance(record, Event) and record.name == "rewind":
            self.step = self.counter = _BEFORE_ALL_STEPS
            self._reach(record.time_ns, _step_of(record) + 1, _step_of(record) + 1)
            self.rewound = True
        elif isinstance(record, Event) and record.name == "checkpoint":
            self._reach(record.time_ns, _step_of(record), cast("int", record.data["counter"]))

    def begin(self, start: Mark | SegmentHeader) -> None:
        """Take in what stood where reading began, unless the run went back behind it."""
        self.since_ns = start.time_ns if isinstance(start, Mark) else start.created_ns
        if not self.rewound:
            self._reach(self.since_ns, start.step, start.counter)
        self.changes.insert(0, _Change(self.since_ns, start.summary, start.labels, repeated=True))

    def _reach(self, time_ns: int, step: int, counter: int) -> None:
        for rewound_ns, left in self._others:
            if time_ns <= rewound_ns:
                step, counter = min(step, left), min(counter, left)
        self.step, self.counter = max(self.step, step), max(self.counter, counter)

    def _set(self, time_ns: int, summary: Mapping[str, object], labels: Mapping[str, object]) -> None:
        """A clock that was set back does not change the order within a segment."""
        last = self.changes[-1].time_ns if self.changes else time_ns
        self.changes.append(_Change(max(time_ns, last), summary, labels))


def _step_of(event: Event) -> int:
    return cast("int", event.data["step"])


def _standing(path: Path, others: Sequence[Event] = ()) -> _Standing | None:
    """How a segment ends; None when nothing of it can be read."""
    return _standing_by_mark(path, others) or _standing_by_all(path, others)


def _standing_by_mark(path: Path, others: Sequence[Event]) -> _Standing | None:
    """From the last mark on; None where a segment is small or has none."""
    standing = None
    with contextlib.suppress(OSError, JournalError):  # of a later schema, which reading all of it says too
        next(SegmentReader(path).read(limit=_BEGINNING_BYTES), None)
        if path.stat().st_size > TAIL_BYTES:
            for record in SegmentReader(path).read_from_last_mark(TAIL_BYTES):
                if isinstance(record, Mark):
                    standing = _Standing(others)
                    standing.begin(record)
                elif standing is not None:
                    standing.see(record)
    return standing


def _standing_by_all(path: Path, others: Sequence[Event]) -> _Standing | None:
    reader = SegmentReader(path)
    standing = _Standing(others)
    try:
        for record in reader.read():
            standing.see(record)
    except (OSError, JournalError):
        return None  # `nodetrack journal verify` names such a file; a node must start without it
    if reader.header is not None:
        standing.begin(reader.header)
    return standing if reader.header is not None or reader.offset > len(MAGIC) else None


def _as_of_another(attempt: Path, found: list[_Standing]) -> list[_Standing]:
    """What another node repeats, it may have had since it began: what was set meanwhile is newer."""
    header = _first_header(attempt)
    began_ns = 0 if header is None else header.created_ns
    for standing in found:
        standing.changes = [
            change._replace(time_ns=began_ns) if change.repeated else change for change in standing.changes
        ]
    return found


def _take_steps(found: list[_Standing], recovered: Recovered) -> None:
    """The furthest step of all writers."""
    recovered.step = min(_MAX_STEP, max(standing.step for standing in found))
    recovered.counter = min(_MAX_STEP, max(standing.counter for standing in found))


def _take_words(found: list[_Standing], recovered: Recovered) -> None:
    """Of what was set by hand the newest."""
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
