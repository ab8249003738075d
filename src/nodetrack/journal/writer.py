"""The append-only writer of one process: a row is in the operating system's hands when `write_row` returns.

One file has one writer, so nothing is locked between processes: a segment's name is taken with `O_EXCL`,
and a forked child goes on in a segment of its own. Nothing here raises for the disk. When a write fails
(full, read-only, gone), the torn bytes are cut off, the record waits in a bounded backlog, and `tend`
tries again about once a second; what the backlog cannot hold is counted as lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

from nodetrack.journal import disk
from nodetrack.journal.segment import (
    FRAME_HEAD,
    LENGTH_FACTOR,
    MAX_PAYLOAD_BYTES,
    NOT_ENCODABLE,
    encode_header,
    encode_payload,
    frame,
    segment_name,
    segment_paths,
)
from nodetrack.records import Kind, Payload, SegmentHeader, StoredValue

DEFAULT_SEGMENT_BYTES: Final = 64 * 1024 * 1024
BACKLOG_RECORDS: Final = 10_000
_ROTATE_RETRY_BYTES: Final = 1024 * 1024
_MOST_RETIRED: Final = 16

BEFORE_ALL_STEPS: Final = -(2**63)

_encode = msgspec.msgpack.Encoder().encode
_write = os.write
_pack_head = FRAME_HEAD.pack
_ROW = int(Kind.ROW)
_SYSTEM = int(Kind.SYSTEM)


class KeySet:
    """The metric names and the context that rows share, defined in each segment and then known by number."""

    __slots__ = (
        "all_floats",
        "context",
        "last_step",
        "names",
        "number",
        "order",
        "segment",
        "too_large",
        "types",
        "values",
    )

    def __init__(self, names: tuple[str, ...], context: Mapping[str, str]) -> None:
        self.names = names
        self.context = context
        # MessagePack writes a float as 0xCB and eight bytes, and a row begins with its values. So if 0xCB
        # stands where the first value begins and at every ninth byte from there, all are floats: the type
        # check of the hot path, in one comparison. `types` are those places; they are known with the number.
        self.all_floats = b"\xcb" * len(names)
        self.types = slice(0)
        #: The segment that knows it, and its number there.
        self.segment: _Segment | None = None
        self.number = 0
        #: Whether the key set itself, or a row of it, is over the size limit of a record.
        self.too_large = False
        #: The highest step of its rows so far.
        self.last_step = BEFORE_ALL_STEPS
        #: The newest values, and the place of that row among all rows of the run.
        self.values: list[StoredValue] = []
        self.order = 0

    def places_of_types(self, number: int) -> slice:
        """Where a row under `number` says the types of its values, if all are floats."""
        size = 9 * len(self.names)
        begin = len(_encode((_ROW, number, [0.0] * len(self.names)))) - size
        return slice(begin, begin + size, 9)


class _Segment:
    """The file that is written now, and what the writer knows of it.

    A key set remembers the segment that knows it, so that to go over to another segment is one assignment: a
    signal handler that logs sees either the one or the other.
    """

    __slots__ = ("defined", "fd", "is_full", "marked_size", "path", "rotate_at", "size", "synced_size")

    def __init__(self, fd: int, path: Path, size: int, rotate_at: int, defined: int = 0) -> None:
        self.fd = fd
        self.path = path
        self.size = size
        self.synced_size = 0
        self.marked_size = 0
        self.rotate_at = rotate_at
        #: How many key sets have a number in it.
        self.defined = defined
        #: Whether the next record begins another segment.
        self.is_full = False


_NO_SEGMENT: Final = _Segment(-1, Path(), 0, 0)

_Waiting: TypeAlias = "tuple[KeySet, int, int, list[StoredValue], bool] | Payload"
_RowRecord: TypeAlias = (
    "tuple[int, int, list[StoredValue], int, int] | tuple[int, int, list[StoredValue], int, int, bool]"
)


class JournalWriter:
    """Appends records to the segments of one attempt.

    `header` says what each new segment's header shall hold at that moment (the step counters change).
    `trouble` is told once when writing begins to fail and once when it works again. The caller holds
    `lock` around every method here; `tend`, `sync` and `close` take it by themselves. `begun` is called by
    each process that begins a segment, so that somebody calls `tend` there.
    """

    def __init__(
        self,
        folder: Path,
        header: Callable[[int, int], SegmentHeader],
        trouble: Callable[[str], None],
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        backlog_records: int = BACKLOG_RECORDS,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.lock = threading.RLock()  # re-entrant: a signal handler may log while its thread is in `log`
        self.written = 0
        self.lost = 0
        self.last_error = ""
        self._header = header
        self._trouble = trouble
        self._begun = begun
        self._segment_bytes = segment_bytes
        self._backlog_records = max(1, backlog_records)  # one always waits: it shows when writing works again
        self._backlog: deque[_Waiting] = deque()
        self._segment = _NO_SEGMENT
        self._failing = False
        self._retired: list[int] = []
        self._writer = 0
        self._closed = False

    @property
    def pending(self) -> int:
        """How many records wait for the disk."""
        return len(self._backlog)

    @property
    def writer(self) -> int:
        """Who this process is among the writers of the attempt; 0 before its first segment."""
        return self._writer

    @property
    def unmarked_bytes(self) -> int:
        """How much this segment has grown since `mark`, or since it was begun."""
        return self._segment.size - self._segment.marked_size

    def mark(self, payload: Payload) -> None:
        """Record where the run stands; see `journal.recover`."""
        self.write(payload)
        self._segment.marked_size = self._segment.size

    @property
    def failing(self) -> bool:
        """Whether the disk refused the last write."""
        return self._failing

    def open(self) -> None:
        """Begin the first segment, so that the attempt is visible before its first row."""
        if self._segment is _NO_SEGMENT:
            self._begin_segment()

    def write_row(
        self,
        key_set: KeySet,
        step: int,
        time_ns: int,
        values: list[StoredValue],
        counted: bool,
        checked: bool = False,
    ) -> None:
        """Record one row; `counted` says that its step is the run's own counter.

        Unless the values are `checked`, TypeError is raised for one that is neither an int nor a float,
        OverflowError for an integer beyond 64 bits. Nothing else is raised.
        """
        while key_set.segment is not self._segment or self._backlog:
            if not checked:
                self._check(step, values)
            if not (self._ready() and self._define(key_set)):
                self._keep((key_set, step, time_ns, values, counted))
                return
        segment, number = self._segment, key_set.number
        record = (
            (_ROW, number, values, step, time_ns, True) if counted else (_ROW, number, values, step, time_ns)
        )
        try:
            payload = _encode(record)
        except NOT_ENCODABLE:
            payload = self._encode_unusual(record, checked)
        if payload[key_set.types] != key_set.all_floats and not self._admit(record, len(payload), checked):
            return
        # This is `frame`, without the call:
        framed = _pack_head(len(payload) * LENGTH_FACTOR, crc32(payload)) + payload
        if segment is not self._segment:  # a signal handler logged meanwhile, and another segment was begun
            self.write_row(key_set, step, time_ns, values, counted, checked)
            return
        try:
            done = _write(segment.fd, framed)
            if done != len(framed):
                disk.write_all(segment.fd, framed, done)
                done = len(framed)
        except OSError as error:
            self._write_failed(error)
            self._keep((key_set, step, time_ns, values, counted))
            return
        self.written += 1
        segment.size = size = segment.size + done
        if size >= segment.rotate_at:
            self._end_segment_soon()

    def _encode_unusual(self, record: _RowRecord, checked: bool) -> bytes:
        """A row that MessagePack cannot hold as it is."""
        if not checked:
            self._check(record[3], record[2])
        return encode_payload(record)

    def _admit(self, record: _RowRecord, size: int, checked: bool) -> bool:
        """Whether a row whose values are not all floats may be written. One over the size limit is lost."""
        if not checked:
            self._check(record[3], record[2])
        return self._fits(size)

    @staticmethod
    def _check(step: int, values: list[StoredValue]) -> None:
        """Raises TypeError or OverflowError as `write_row` says."""
        for value in values:
            if value.__class__ is not float and value.__class__ is not int:
                raise TypeError
        _encode((step, values))

    def write(self, payload: Payload) -> None:
        """Record anything that is not a row. A record beyond the size limit is counted as lost."""
        encoded = encode_payload(payload)
        if self._fits(len(encoded)) and not (self._ready() and self._append(frame(encoded))):
            self._keep(payload)

    def write_system(self, key_set: KeySet, time_ns: int, values: list[StoredValue]) -> None:
        """Record one sample of the machine. One that the disk refuses is lost: the next comes soon."""
        while key_set.segment is not self._segment:
            if not (self._ready() and self._define(key_set)):
                self.lost += 1
                return
        payload = encode_payload((_SYSTEM, key_set.number, values, time_ns))
        if self._fits(len(payload)) and not self._append(frame(payload), key_set.segment):
            self.lost += 1

    def tend(self, *, sync: bool = True) -> bool:
        """Once a second: sync, notice a deleted folder, try the backlog again. True if a folder was made.

        Without `sync` only what has been retired is synced: the delivery process does the rest.
        """
        with self.lock:
            if self._closed:
                return False
            deleted = self._segment is not _NO_SEGMENT and disk.is_deleted(self._segment.fd)
            remade = deleted and self._remake()
            if (remade or not deleted) and (self._backlog or self._failing):
                self._retry()
            segment, size = self._segment, self._segment.size
        self._sync_retired()
        if sync and size != segment.synced_size:
            self._sync(segment, size)
        return remade

    def is_elsewhere(self) -> bool:
        """Whether the file that is written was moved away, with its folder or alone."""
        segment = self._segment
        return segment is not _NO_SEGMENT and disk.is_elsewhere(segment.fd, segment.path)

    def sync(self) -> None:
        """Bring everything to the disk itself, the backlog included as far as the disk allows."""
        self.tend()

    def close(self) -> None:
        """Sync and close; what still waits is counted as lost. Later writes are lost too, and counted."""
        self.tend()
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.lost += len(self._backlog)
            self._backlog.clear()
            self._leave_segment()
        self._sync_retired()

    def forget_key_sets(self) -> None:
        """Let go of all key sets; the next rows define theirs anew under fresh numbers."""
        self._begin_segment()

    def after_fork_in_child(self) -> None:
        """The child goes on in a segment of its own, with a lock that nobody holds."""
        self.lock = threading.RLock()
        inherited = [self._segment.fd, *self._retired]
        self._segment, self._retired = _NO_SEGMENT, []
        self._backlog = deque()  # the parent still holds these rows and writes them
        self._writer = 0
        self._failing = False
        for fd in inherited:
            if fd >= 0:
                disk.close(fd)

    # -- the file ------------------------------------------------------------------------------------

    def _begin_segment(self) -> None:
        """Take the next free name, write its header, and retire the current file."""
        self._begun()
        try:
            begun = self._create_segment()
        except OSError as error:
            if self._segment is _NO_SEGMENT:
                self._report(error)
            else:  # better too long a segment than a lost row
                self._segment.is_full = False
                self._segment.rotate_at = self._segment.size + _ROTATE_RETRY_BYTES
            return
        left, self._segment = self._segment, begun
        self._retire(left.fd)

    def _end_segment_soon(self) -> None:
        """The next record begins a new segment. Not this one, whose step the run has not counted yet: the
        header of the new segment has to say it.

        To the key sets it is another segment from now on, so that the next row comes to look.
        """
        full = self._segment
        again = _Segment(full.fd, full.path, full.size, full.rotate_at, full.defined)
        again.synced_size, again.is_full = full.synced_size, True
        if self._segment is full:
            self._segment = again

    def _leave_segment(self) -> None:
        """Hand the file to `tend`; the next record begins another."""
        left, self._segment = self._segment, _NO_SEGMENT
        self._retire(left.fd)

    def _retire(self, fd: int) -> None:
        """Have a file synced and closed by `tend`."""
        if fd >= 0:
            self._retired.append(fd)
        if len(self._retired) > _MOST_RETIRED:  # tiny segments: the process must not run out of file numbers
            self._sync_retired()

    def _ready(self) -> bool:
        """Whether a record can be written now. A forked child opens its segment here, when it first logs."""
        if self._backlog or self._closed:
            return False
        if self._segment.is_full or (self._segment is _NO_SEGMENT and not self._failing):
            self._begin_segment()
        return self._segment is not _NO_SEGMENT

    def _create_segment(self) -> _Segment:
        fd, path, number = self._take_name()
        writer = self._writer or number
        try:
            header = encode_header(self._header(writer, number))
            disk.write_all(fd, header)
        except BaseException:  # a Ctrl-C too
            disk.discard(fd, path)
            raise
        self._writer = writer
        return _Segment(fd, path, len(header), len(header) + self._segment_bytes)

    def _take_name(self) -> tuple[int, Path, int]:
        """The next free name, and its file, open. Other writers of this attempt may be after the same one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        existing = segment_paths(self.folder)
        number = int(existing[-1].stem.rpartition("-")[2]) + 1 if existing else 1
        while True:
            path = self.folder / segment_name(number)
            try:
                return disk.open_new(path), path, number
            except FileExistsError:
                number += 1

    def _define(self, key_set: KeySet) -> bool:
        """Write a key set, twice: every row of the segment needs it, so no single fault may take it away.

        When this returns True, a signal handler may have begun another segment, which does not know it.
        """
        segment = self._segment
        if key_set.segment is segment:
            return True
        segment.defined += 1  # the number is taken before a signal handler that logs can take it
        number = segment.defined
        payload = encode_payload((Kind.KEYSET, number, key_set.names, key_set.context))
        if not self._fits(max(len(payload), 9 * len(key_set.names) + 32), count=0):
            key_set.too_large = True
            return False
        twice = frame(payload) * 2
        types = key_set.places_of_types(number)
        segment.rotate_at += len(twice)  # a segment is full by its rows, not by its key sets
        if not self._append(twice, segment):
            return False
        key_set.number, key_set.types, key_set.segment = number, types, segment
        return True

    def _fits(self, size: int, count: int = 1) -> bool:
        """Whether a record of `size` bytes may be written; if not, `count` records are lost."""
        if size <= MAX_PAYLOAD_BYTES:
            return True
        self.lost += count
        self.last_error = f"a record of {size} bytes is over the limit of {MAX_PAYLOAD_BYTES}"
        return False

    def _append(self, framed: bytes, only_to: _Segment | None = None) -> bool:
        """Whether frames need not wait: they are written, or `only_to` is no longer the current segment."""
        segment = self._segment
        if only_to is not None and only_to is not segment:
            return True
        try:
            done = _write(segment.fd, framed)  # without a call since the look: a handler might close the file
            if done != len(framed):
                disk.write_all(segment.fd, framed, done)
        except OSError as error:
            self._write_failed(error)
            return False
        segment.size += len(framed)
        if segment.size >= segment.rotate_at:
            self._end_segment_soon()
        return True

    def _write_failed(self, error: OSError) -> None:
        """The file goes on when the disk has room again; after any other fault another is begun later."""
        self._report(error)
        if error.errno not in disk.NO_ROOM:
            self._leave_segment()

    def _remake(self) -> bool:
        """The file was deleted under us: put its bytes, which we still hold, into a new one."""
        deleted = self._segment
        try:
            fd, path = self._open_again(deleted.path)
        except OSError as error:
            self._report(error)
            return False
        try:
            size = disk.copy(deleted.fd, fd)
        except OSError as error:
            self._report(error)
            disk.discard(fd, path)
            return False
        self._segment = _Segment(fd, path, size, deleted.rotate_at, deleted.defined)
        self._retire(deleted.fd)
        self._trouble(
            f"{deleted.path} was deleted while it was written; its rows were kept and the file made again"
        )
        return True

    def _open_again(self, path: Path) -> tuple[int, Path]:
        """A new file under the old name, or under the next free one if something else has that name now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return disk.open_new(path), path
        except FileExistsError:
            return self._take_name()[:2]

    def _sync_retired(self) -> None:
        """Sync and close the files that are written no more. Each stays listed until it is synced, so that
        whoever calls meanwhile waits for it too.
        """
        for fd in list(self._retired):
            with contextlib.suppress(OSError):  # a deleted or failing file has nothing left to save
                disk.sync(fd)
            with self.lock:
                if fd in self._retired:
                    self._retired.remove(fd)
                    disk.close(fd)

    def _sync(self, segment: _Segment, size: int) -> None:
        try:
            disk.sync(segment.fd)
        except OSError as error:  # the next write reports a disk that is in trouble
            self.last_error = str(error)
            return
        segment.synced_size = size

    # -- the backlog ---------------------------------------------------------------------------------

    def _keep(self, waiting: _Waiting) -> None:
        never = isinstance(waiting, tuple) and waiting[0].too_large
        if never or self._closed or len(self._backlog) >= self._backlog_records:
            self.lost += 1
            return
        self._backlog.append(waiting)

    def _retry(self) -> None:
        """Write what waits, until something has to wait again."""
        waiting, self._backlog = self._backlog, deque()
        if self._segment is _NO_SEGMENT:
            self._begin_segment()
        try:
            while waiting and self._segment is not _NO_SEGMENT and not self._backlog:
                record = waiting[0]
                if isinstance(record, tuple):
                    self.write_row(*record, checked=True)
                else:
                    self.write(record)
                waiting.popleft()  # only now: a Ctrl-C in between may write a record twice, never lose one
        finally:
            self._backlog.extend(waiting)
        if not self._backlog and self._segment is not _NO_SEGMENT and self._failing:
            self._failing = False
            self._trouble(f"{self.folder} can be written again; {self.lost} records were lost meanwhile")

    def _report(self, error: OSError) -> None:
        self.last_error = str(error)
        if not self._failing:
            self._failing = True
            self._trouble(
                f"cannot write {self.folder} ({error.strerror or error}); up to {self._backlog_records} "
                "records wait in memory and are written when it works again, later ones are counted as lost"
            )
