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
    MAX_PAYLOAD_BYTES,
    encode_header,
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

BEFORE_ALL_STEPS: Final = -(2**63)

_encode = msgspec.msgpack.Encoder().encode
_write = os.write
_pack_head = FRAME_HEAD.pack
_ROW = int(Kind.ROW)


class KeySet:
    """The metric names and the context that rows share; written once a segment, then referred to by number."""

    __slots__ = ("all_floats", "context", "last_step", "names", "number", "order", "tail", "values")

    def __init__(self, names: tuple[str, ...], context: Mapping[str, str]) -> None:
        self.names = names
        self.context = context
        # MessagePack writes a float as 0xCB and eight bytes. A row ends with its values, so if every ninth byte of
        # its last 9n is 0xCB, all n are floats: the type check of the hot path, in one comparison.
        self.tail = -9 * len(names)
        self.all_floats = b"\xcb" * len(names)
        #: Its number in the current segment; 0 while the segment does not know it.
        self.number = 0
        #: The highest step of its rows so far.
        self.last_step = BEFORE_ALL_STEPS
        #: The newest values, and the place of that row among all rows of the run.
        self.values: list[StoredValue] = []
        self.order = 0


_Waiting: TypeAlias = "tuple[KeySet, int, int, list[StoredValue], bool] | Payload"


class JournalWriter:
    """Appends records to the segments of one attempt.

    `header` says what each new segment's header shall hold at that moment (the step counters change).
    `trouble` is told once when writing begins to fail and once when it works again. The caller holds
    `lock` around every method here; `tend` takes it by itself.
    """

    def __init__(
        self,
        folder: Path,
        header: Callable[[int, int], SegmentHeader],
        trouble: Callable[[str], None],
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        backlog_records: int = BACKLOG_RECORDS,
    ) -> None:
        self.folder = folder
        self.lock = threading.RLock()  # re-entrant: a signal handler may log while its thread is in `log`
        self.written = 0
        self.lost = 0
        self.last_error = ""
        self.path: Path | None = None
        self._header = header
        self._trouble = trouble
        self._segment_bytes = segment_bytes
        self._backlog_records = backlog_records
        self._backlog: deque[_Waiting] = deque()
        self._key_sets: list[KeySet] = []
        self._fd = -1
        self._size = 0
        self._rotate_at = segment_bytes
        self._dirty = False
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

        Unless the values are `checked`, TypeError is raised for one that is neither an int nor a float, OverflowError
        for an integer beyond 64 bits. Nothing else is raised.
        """
        if (not key_set.number or self._backlog) and not (self._ready() and self._define(key_set)):
            self._keep((key_set, step, time_ns, self._checked(values, checked), counted))
            return
        payload = _encode(
            (_ROW, key_set.number, step, time_ns, True, values)
            if counted
            else (_ROW, key_set.number, step, time_ns, values)
        )
        if payload[key_set.tail :: 9] != key_set.all_floats:
            self._checked(values, checked)
        framed = _pack_head(len(payload), crc32(payload)) + payload  # `frame`, without the call
        try:
            done = _write(self._fd, framed)
        except OSError as error:
            self._write_failed(error)
            self._keep((key_set, step, time_ns, values, counted))
            return
        if done != len(framed):
            self._write_failed(_no_space())
            self._keep((key_set, step, time_ns, values, counted))
            return
        self.written += 1
        self._dirty = True
        self._size += done
        if self._size >= self._rotate_at:
            self._begin_segment()

    @staticmethod
    def _checked(values: list[StoredValue], checked: bool) -> list[StoredValue]:
        """The values; raises TypeError or OverflowError as `write_row` says."""
        if not checked:
            for value in values:
                if value.__class__ is not float and value.__class__ is not int:
                    raise TypeError
            _encode(values)
        return values

    def write(self, payload: Payload) -> None:
        """Record anything that is not a row. A record beyond the size limit is counted as lost."""
        if not (self._ready() and self._append(payload)):
            self._keep(payload)

    def tend(self) -> bool:
        """Once a second: fsync, notice a deleted folder, try the backlog again. True if a folder was remade."""
        self._sync_retired()
        remade = False
        with self.lock:
            if self._closed:
                return False
            if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
                remade = self._remake()
            if self._backlog or self._fd < 0:
                self._retry()
            fd, dirty = self._fd, self._dirty
            self._dirty = False
        if dirty and fd >= 0:
            with contextlib.suppress(OSError):  # the next write reports a disk that is in trouble
                os.fdatasync(fd)
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
        self._fd = -1
        self._retired = []
        self._backlog = deque()  # the parent still holds these rows and writes them
        self._writer = 0
        self._dirty = False
        for key_set in self._key_sets:
            key_set.number = 0
        self._key_sets = []
        for fd in inherited:
            if fd >= 0:
                os.close(fd)

    # -- the file ------------------------------------------------------------------------------------

    def _begin_segment(self) -> None:
        """Retire the current file, take the next free name and write its header."""
        try:
            fd, path, size = self._create_segment()
        except OSError as error:
            if self._fd < 0:
                self._report(error)
            self._rotate_at = self._size + _ROTATE_RETRY_BYTES  # better too long a segment than a lost row
            return
        self._leave_segment()
        self._fd, self.path, self._size, self._dirty = fd, path, size, True
        self._rotate_at = self._segment_bytes

    def _leave_segment(self) -> None:
        """Hand the file to `tend`, which syncs and closes it; the next segment knows no key set yet."""
        if self._fd >= 0:
            self._retired.append(self._fd)
            self._fd = -1
        for key_set in self._key_sets:
            key_set.number = 0
        self._key_sets = []

    def _ready(self) -> bool:
        """Whether a record can be written now. A child after a fork opens its segment here, when it first logs."""
        if self._backlog or self._closed:
            return False
        if self._fd < 0 and not self._failing:
            self._begin_segment()
        return self._fd >= 0

    def _create_segment(self) -> tuple[int, Path, int]:
        self.folder.mkdir(parents=True, exist_ok=True)
        existing = segment_paths(self.folder)
        number = int(existing[-1].stem.rpartition("-")[2]) + 1 if existing else 1
        while True:
            path = self.folder / segment_name(number)
            try:
                fd = os.open(path, _OPEN_FLAGS, 0o644)
            except FileExistsError:  # another writer of this attempt took it first
                number += 1
                continue
            return fd, path, self._write_header(fd, path, number)

    def _write_header(self, fd: int, path: Path, number: int) -> int:
        writer = self._writer or number
        try:
            header = encode_header(self._header(writer, number))
            if _write(fd, header) != len(header):
                raise _no_space()
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._writer = writer
        return len(header)

    def _define(self, key_set: KeySet) -> bool:
        """Write a key set, twice: every row of the segment needs it, so no single fault may take it away."""
        if key_set.number:
            return True
        number = len(self._key_sets) + 1
        payload: Payload = [int(Kind.KEYSET), number, key_set.names, key_set.context]
        if not (self._append(payload) and self._append(payload)):
            return False
        key_set.number = number
        self._key_sets.append(key_set)
        return True

    def _append(self, payload: Payload) -> bool:
        encoded = _encode(payload)
        if len(encoded) > MAX_PAYLOAD_BYTES:
            self.lost += 1
            self.last_error = f"a record of {len(encoded)} bytes is over the limit of {MAX_PAYLOAD_BYTES}"
            return True
        framed = frame(encoded)
        try:
            done = _write(self._fd, framed)
            if done != len(framed):
                raise _no_space()
        except OSError as error:
            self._write_failed(error)
            return False
        self._size += done
        self._dirty = True
        return True

    def _write_failed(self, error: OSError) -> None:
        """Cut off what was torn; where that fails too, leave the file and begin another later."""
        self._report(error)
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._leave_segment()

    def _remake(self) -> bool:
        """The file was deleted under us: put its bytes, which we still hold, into a new one."""
        old, name = self._fd, self.path
        assert name is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(name, _OPEN_FLAGS, 0o644)
        except FileExistsError:
            self._begin_segment()
            return False
        except OSError as error:
            self._report(error)
            return False
        try:
            _copy(old, fd, self._size)
        except OSError as error:
            self._report(error)
            os.close(fd)
            name.unlink(missing_ok=True)
            return False
        self._fd = fd
        self._retired.append(old)
        self._trouble(f"{name} was deleted while it was written; its rows were kept and the file made again")
        return True

    def _sync_retired(self) -> None:
        with self.lock:
            retired, self._retired = self._retired, []
        for fd in retired:
            with contextlib.suppress(OSError):  # a deleted or failing file has nothing left to save
                os.fdatasync(fd)
            os.close(fd)

    # -- the backlog ---------------------------------------------------------------------------------

    def _keep(self, waiting: _Waiting) -> None:
        if self._closed or len(self._backlog) >= self._backlog_records:
            self.lost += 1
            return
        self._backlog.append(waiting)

    def _retry(self) -> None:
        waiting, self._backlog = self._backlog, deque()
        if self._fd < 0:
            self._begin_segment()
        while waiting and self._fd >= 0 and self._write_waiting(waiting[0]):
            waiting.popleft()
        waiting.extend(self._backlog)
        self._backlog = waiting
        if not waiting and self._fd >= 0 and self._failing:
            self._failing = False
            self._trouble(f"{self.folder} can be written again; {self.lost} records were lost meanwhile")

    def _write_waiting(self, waiting: _Waiting) -> bool:
        if isinstance(waiting, list):
            return self._append(waiting)
        before = self.written
        self.write_row(*waiting, checked=True)
        if self.written == before:
            self._backlog.clear()
            return False
        return True

    def _report(self, error: OSError) -> None:
        self.last_error = str(error)
        if not self._failing:
            self._failing = True
            self._trouble(
                f"cannot write {self.folder} ({error.strerror or error}); up to {self._backlog_records} records "
                "wait in memory and are written when it works again, later ones are counted as lost"
            )


def _no_space() -> OSError:
    """A short write to a file means that the disk is full; the kernel says so only at the next call."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy(source: int, target: int, size: int) -> None:
    position = 0
    while position < size:
        block = os.pread(source, min(_COPY_BYTES, size - position), position)
        if not block:
            raise OSError(errno.EIO, "the deleted file ended early")
        if _write(target, block) != len(block):
            raise _no_space()
        position += len(block)
