"""The append-only writer of one process: a row is in the operating system's hands when `write_row` returns.

One file has one writer, so nothing is locked between processes: a segment's name is taken with `O_EXCL`,
and a forked child goes on in a segment of its own. Nothing here raises for the disk. When a write fails
(full, read-only, gone), the torn bytes are cut off, the record waits in a bounded backlog, and `tend`
tries again about once a second; what the backlog cannot hold is counted as lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias
from zlib import crc32

import msgspec

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
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
_COPY_BYTES: Final = 1024 * 1024
_ROTATE_RETRY_BYTES: Final = 1024 * 1024
_MOST_RETIRED: Final = 16
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

BEFORE_ALL_STEPS: Final = -(2**63)

_encode = msgspec.msgpack.Encoder().encode
_write = os.write
_pack_head = FRAME_HEAD.pack
_ROW = int(Kind.ROW)


class KeySet:
    """The metric names and the context that rows share, defined in each segment and then known by number."""

    __slots__ = (
        "all_floats",
        "context",
        "last_step",
        "names",
        "number",
        "order",
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
        #: Its number in the current segment; 0 while the segment does not know it.
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


_Waiting: TypeAlias = "tuple[KeySet, int, int, list[StoredValue], bool] | Payload"
_RowRecord: TypeAlias = (
    "tuple[int, int, list[StoredValue], int, int] | tuple[int, int, list[StoredValue], int, int, bool]"
)


class JournalWriter:
    """Appends records to the segments of one attempt.

    `header` says what each new segment's header shall hold at that moment (the step counters change).
    `trouble` is told once when writing begins to fail and once when it works again. The caller holds
    `lock` around every method here; `tend`, `sync` and `close` take it by themselves. `begun` is called by each
    process that begins a segment, so that somebody calls `tend` there.
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
        self.path: Path | None = None
        self._header = header
        self._trouble = trouble
        self._begun = begun
        self._segment_bytes = segment_bytes
        self._backlog_records = max(1, backlog_records)  # one always waits: it shows when writing works again
        self._backlog: deque[_Waiting] = deque()
        self._key_sets: list[KeySet] = []
        self._fd = -1
        self._size = 0
        self._synced_size = 0
        self._rotate_at = segment_bytes
        self._is_full = False
        self._failing = False
        self._retired: list[int] = []
        self._writer = 0
        self._closed = False

    @property
    def pending(self) -> int:
        """How many records wait for the disk."""
        return len(self._backlog)

    @property
    def failing(self) -> bool:
        """Whether the disk refused the last write."""
        return self._failing

    def open(self) -> None:
        """Begin the first segment, so that the attempt is visible before its first row."""
        if self._fd < 0:
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
        if (not key_set.number or self._backlog) and not (self._ready() and self._define(key_set)):
            if not checked:
                self._check(step, values)
            self._keep((key_set, step, time_ns, values, counted))
            return
        number = key_set.number
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
        if key_set.number != number:  # a signal handler logged meanwhile, and a new segment was begun
            self.write_row(key_set, step, time_ns, values, counted, checked)
            return
        try:
            done = _write(self._fd, framed)
            if done != len(framed):
                _write_all(self._fd, framed[done:])
        except OSError as error:
            self._write_failed(error)
            self._keep((key_set, step, time_ns, values, counted))
            return
        self.written += 1
        self._size += len(framed)
        if self._size >= self._rotate_at:
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

    def tend(self) -> bool:
        """Once a second: sync, notice a deleted folder, try the backlog again. True if a folder was made."""
        with self.lock:
            if self._closed:
                return False
            deleted = self._is_deleted()
            remade = deleted and self._remake()
            if (remade or not deleted) and (self._backlog or self._failing):
                self._retry()
            fd, size = self._fd, self._size
        self._sync_retired()
        if fd >= 0 and size != self._synced_size:
            self._sync(fd, size)
        return remade

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
        inherited = [self._fd, *self._retired]
        self._fd, self.path, self._retired = -1, None, []
        self._backlog = deque()  # the parent still holds these rows and writes them
        self._writer = 0
        self._is_full = self._failing = False
        self._undefine_key_sets()
        self._key_sets = []
        for fd in inherited:
            if fd >= 0:
                _close(fd)

    # -- the file ------------------------------------------------------------------------------------

    def _begin_segment(self) -> None:
        """Retire the current file, take the next free name and write its header."""
        self._is_full = False
        self._begun()
        try:
            fd, path, size = self._create_segment()
        except OSError as error:
            if self._fd < 0:
                self._report(error)
            self._rotate_at = self._size + _ROTATE_RETRY_BYTES  # better too long a segment than a lost row
            return
        self._leave_segment()
        self._fd, self.path, self._size, self._synced_size = fd, path, size, 0
        self._rotate_at = size + self._segment_bytes

    def _end_segment_soon(self) -> None:
        """The next record begins a new segment. Not this one, whose step the run has not counted yet: the
        header of the new segment has to say it.
        """
        self._is_full = True
        self._undefine_key_sets()

    def _undefine_key_sets(self) -> None:
        for key_set in self._key_sets:
            key_set.number = 0

    def _leave_segment(self) -> None:
        """Hand the file to `tend`, which syncs and closes it; the next segment knows no key set yet."""
        if self._fd >= 0:
            self._retired.append(self._fd)
            self._fd = -1
        self._undefine_key_sets()
        self._key_sets = []
        if len(self._retired) > _MOST_RETIRED:  # tiny segments: the process must not run out of file numbers
            self._sync_retired()

    def _ready(self) -> bool:
        """Whether a record can be written now. A forked child opens its segment here, when it first logs."""
        if self._backlog or self._closed:
            return False
        if self._is_full or (self._fd < 0 and not self._failing):
            self._begin_segment()
        return self._fd >= 0

    def _create_segment(self) -> tuple[int, Path, int]:
        fd, path, number = self._take_name()
        writer = self._writer or number
        try:
            header = encode_header(self._header(writer, number))
            _write_all(fd, header)
        except OSError:
            _discard(fd, path)
            raise
        self._writer = writer
        return fd, path, len(header)

    def _take_name(self) -> tuple[int, Path, int]:
        """The next free name, and its file, open. Other writers of this attempt may be after the same one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        existing = segment_paths(self.folder)
        number = int(existing[-1].stem.rpartition("-")[2]) + 1 if existing else 1
        while True:
            path = self.folder / segment_name(number)
            try:
                return os.open(path, _OPEN_FLAGS, 0o644), path, number
            except FileExistsError:
                number += 1

    def _define(self, key_set: KeySet) -> bool:
        """Write a key set, twice: every row of the segment needs it, so no single fault may take it away."""
        if key_set.number:
            return True
        segment = self._key_sets
        segment.append(key_set)  # takes the number before a signal handler that logs can take it
        number = len(segment)
        payload = encode_payload((Kind.KEYSET, number, key_set.names, key_set.context))
        if not self._fits(max(len(payload), 9 * len(key_set.names) + 32), count=0):
            key_set.too_large = True
            return False
        twice = frame(payload) * 2
        self._rotate_at += len(twice)  # a segment is full by its rows, not by its key sets
        if not self._append(twice):
            return False
        key_set.types = key_set.places_of_types(number)
        if segment is not self._key_sets:  # such a handler came, and a new segment was begun
            return self._define(key_set)
        key_set.number = number
        return True

    def _fits(self, size: int, count: int = 1) -> bool:
        """Whether a record of `size` bytes may be written; if not, `count` records are lost."""
        if size <= MAX_PAYLOAD_BYTES:
            return True
        self.lost += count
        self.last_error = f"a record of {size} bytes is over the limit of {MAX_PAYLOAD_BYTES}"
        return False

    def _append(self, framed: bytes) -> bool:
        try:
            _write_all(self._fd, framed)
        except OSError as error:
            self._write_failed(error)
            return False
        self._size += len(framed)
        if self._size >= self._rotate_at:
            self._end_segment_soon()
        return True

    def _write_failed(self, error: OSError) -> None:
        """Cut off what was torn. The file goes on when the disk has room again; after any other fault, or if
        it cannot be cut, another is begun later.
        """
        self._report(error)
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._leave_segment()
        else:
            if error.errno not in _NO_ROOM:
                self._leave_segment()

    def _is_deleted(self) -> bool:
        """Whether the file has no name any more, because it or its folder was deleted."""
        try:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0
        except OSError:  # a file server that forgot the file: the next write says so
            return False

    def _remake(self) -> bool:
        """The file was deleted under us: put its bytes, which we still hold, into a new one."""
        assert self.path is not None
        try:
            fd, path = self._open_again(self.path)
        except OSError as error:
            self._report(error)
            return False
        try:
            _copy(self._fd, fd, self._size)
        except OSError as error:
            self._report(error)
            _discard(fd, path)
            return False
        self._retired.append(self._fd)
        self._trouble(
            f"{self.path} was deleted while it was written; its rows were kept and the file made again"
        )
        self._fd, self.path, self._synced_size = fd, path, 0
        return True

    def _open_again(self, path: Path) -> tuple[int, Path]:
        """A new file under the old name, or under the next free one if something else has that name now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, _OPEN_FLAGS, 0o644), path
        except FileExistsError:
            return self._take_name()[:2]

    def _sync_retired(self) -> None:
        """Sync and close the files that are written no more. Each stays listed until it is synced, so that
        whoever calls meanwhile waits for it too.
        """
        for fd in list(self._retired):
            with contextlib.suppress(OSError):  # a deleted or failing file has nothing left to save
                _sync_file(fd)
            with self.lock:
                if fd in self._retired:
                    self._retired.remove(fd)
                    _close(fd)

    def _sync(self, fd: int, size: int) -> None:
        try:
            _sync_file(fd)
        except OSError as error:  # the next write reports a disk that is in trouble
            self.last_error = str(error)
            return
        with self.lock:
            if fd == self._fd:
                self._synced_size = size

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
        if self._fd < 0:
            self._begin_segment()
        while waiting and self._fd >= 0 and not self._backlog:
            record = waiting.popleft()
            if isinstance(record, tuple):
                self.write_row(*record, checked=True)
            else:
                self.write(record)
        self._backlog.extend(waiting)
        if not self._backlog and self._fd >= 0 and self._failing:
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


def _write_all(fd: int, data: bytes) -> None:
    """Write all of it. After a short write the kernel says only at the next one whether anything is wrong."""
    while data:
        done = _write(fd, data)
        if done == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[done:]


def _sync_file(fd: int) -> None:
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:  # macOS
        os.fsync(fd)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the number is free again, whatever the file server says
        os.close(fd)


def _discard(fd: int, path: Path) -> None:
    """Close and remove a file that did not come to be."""
    _close(fd)
    with contextlib.suppress(OSError):  # a file without a whole header holds no row
        path.unlink(missing_ok=True)


def _copy(source: int, target: int, size: int) -> None:
    position = 0
    while position < size:
        block = os.pread(source, min(_COPY_BYTES, size - position), position)
        if not block:
            raise OSError(errno.EIO, "the deleted file ended early")
        _write_all(target, block)
        position += len(block)
