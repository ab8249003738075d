"""Keeps the journal of a run within its limits: whole segments are removed, the oldest first.

| above        | what is removed                                                                     |
|--------------|-------------------------------------------------------------------------------------|
| `keep_bytes` | what every backend of the run has, and only where the run has backends              |
| `max_bytes`  | what they do not have as well; its rows are counted as lost, by backend, and told of |

The newest segment of each writer stays, so that a restarted node knows where it stood. If that is not enough,
earlier attempts that have ended go as a whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from nodetrack.delivery.worker import Worker
from nodetrack.errors import JournalError
from nodetrack.journal.folder import AttemptFolder
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import attempt_folders, writer_of
from nodetrack.journal.segment import segment_paths
from nodetrack.records import Mark, Row

_SIDE_FILES: Final = ("metadata.json", "config.json", "heartbeat", "delivery.log")
#: A torn end is looked at if it is not larger: nothing behind it will ever be delivered.
_MOST_TORN_BYTES: Final = 1024 * 1024


class _Segment(msgspec.Struct, frozen=True):
    path: Path
    size: int

    @property
    def attempt(self) -> str:
        return self.path.parent.name


class Pruner:
    """Removes segments of the run in `run_folder`, whose newest attempt is `attempt`.

    `workers` know how far each backend has come; `is_whole` says whether every backend has one. `warn` takes
    the sentence about lost rows, once, and `note` what was removed, for the log.
    """

    def __init__(
        self,
        run_folder: Path,
        attempt: str,
        workers: Mapping[str, Worker],
        *,
        is_whole: bool,
        keep_bytes: int | None,
        max_bytes: int | None,
        warn: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._run_folder = run_folder
        self._attempt = attempt
        self._workers = workers
        self._is_whole = is_whole
        self._keep_bytes = keep_bytes
        self._max_bytes = max_bytes
        self._warn = warn
        self._note = note
        self._has_warned = False
        self._removed = 0
        self._lost: Counter[str] = Counter()
        self._writers: dict[Path, int] = {}
        self._ended: dict[Path, bool] = {}

    def prune(self) -> None:
        """Remove what is over the limits now. Raises OSError where the folder cannot be read."""
        if self._keep_bytes is None and self._max_bytes is None:
            return
        removed = self._removed
        try:
            self._prune()
        finally:
            if self._removed > removed:
                lost = ", ".join(f"{count} of {name}" for name, count in self._lost.items()) or "none"
                self._note(f"{self._removed} segments pruned so far; rows removed unsent: {lost}")

    def _prune(self) -> None:
        segments = list(self._segments())
        size = sum(segment.size for segment in segments)
        if self._keep_bytes is not None and self._workers and self._is_whole:
            size = self._prune_delivered(segments, size, self._keep_bytes)
        if self._max_bytes is not None and size > self._max_bytes:
            self._prune_any(segments, size, self._max_bytes)

    def _prune_delivered(self, segments: list[_Segment], size: int, limit: int) -> int:
        for removable in (self._complete, self._left_of_ended):
            for segment in removable(segments):
                if size <= limit:
                    return size
                if self._is_delivered(segment):
                    size -= self._remove(segment, segments)
        return size

    def _prune_any(self, segments: list[_Segment], size: int, limit: int) -> None:
        for removable in (self._complete, self._left_of_ended):
            for segment in removable(segments):
                if size <= limit:
                    return
                lost = self._lost_with(segment)
                if lost is not None and self._count(segment, lost):
                    size -= self._remove_counted(segment, segments, lost)

    # -- what there is -------------------------------------------------------------------------------

    def _segments(self) -> Iterator[_Segment]:
        for folder in attempt_folders(self._run_folder):
            for path in segment_paths(folder):
                with contextlib.suppress(FileNotFoundError):
                    yield _Segment(path, path.stat().st_size)

    def _complete(self, segments: list[_Segment]) -> list[_Segment]:
        """Those whose writer has begun another since."""
        newest = {(segment.attempt, self._writer(segment)): segment.path for segment in segments}
        return [
            segment for segment in segments if newest[segment.attempt, self._writer(segment)] != segment.path
        ]

    def _left_of_ended(self, segments: list[_Segment]) -> list[_Segment]:
        """Those of the earlier attempts that have ended."""
        return [
            segment
            for segment in segments
            if segment.attempt != self._attempt and self._has_ended(segment.path.parent)
        ]

    def _writer(self, segment: _Segment) -> int:
        if segment.path not in self._writers:
            self._writers[segment.path] = writer_of(segment.path)
        return self._writers[segment.path]

    def _has_ended(self, folder: Path) -> bool:
        if not self._ended.get(folder):
            self._ended[folder] = AttemptFolder(folder, is_last=False).finish_record() is not None
        return self._ended[folder]

    # -- what the backends have ------------------------------------------------------------------------

    def _offsets(self, segment: _Segment) -> dict[str, int] | None:
        """How far each backend has come; None while one does not know."""
        offsets = {}
        for backend, worker in self._workers.items():
            offset = worker.offset(segment.attempt, segment.path.name)
            if offset is None:
                return None
            offsets[backend] = offset
        return offsets

    def _is_delivered(self, segment: _Segment) -> bool:
        offsets = self._offsets(segment)
        if offsets is None:
            return False
        offset = min(offsets.values(), default=0)
        if offset >= segment.size:
            return True
        return segment.size - offset <= _MOST_TORN_BYTES and not _records_behind(segment.path, offset)[1]

    def _lost_with(self, segment: _Segment) -> dict[str, int] | None:
        """The rows of a segment that each backend does not have; None while that is not known."""
        offsets = self._offsets(segment)
        if offsets is None:
            return None
        behind = {
            backend: _records_behind(segment.path, offset)[0] if offset < segment.size else 0
            for backend, offset in offsets.items()
        }
        return {backend: rows for backend, rows in behind.items() if rows}

    def _count(self, segment: _Segment, lost: Mapping[str, int]) -> bool:
        """Count rows as lost; False, with nothing counted, if a cursor is another process's by now."""
        writer, counted = self._writer(segment), dict[str, int]()
        for backend, rows in lost.items():
            if not self._workers[backend].note_lost(segment.attempt, segment.path.name, writer, rows):
                self._count(segment, {name: -count for name, count in counted.items()})
                return False
            counted[backend] = rows
        return True

    def _remove_counted(self, segment: _Segment, segments: list[_Segment], lost: Mapping[str, int]) -> int:
        """Remove a segment whose rows are counted as lost. Raises OSError if it stays: then none is."""
        told = lost if self._workers else {"the journal": _records_behind(segment.path, 0)[0]}
        try:
            size = self._remove(segment, segments)
        except OSError:
            self._count(segment, {backend: -rows for backend, rows in lost.items()})
            raise
        self._tell(told)
        return size

    def _tell(self, lost: Mapping[str, int]) -> None:
        self._lost.update(lost)
        if lost and not self._has_warned:
            self._has_warned = True
            rows = ", ".join(f"{count} of {name}" for name, count in lost.items())
            self._warn(
                f"The journal of run {self._run_folder.name} is over its limit of {self._max_bytes} bytes: "
                f"rows are removed before they were sent (first {rows}) and counted as lost. "
                "Raise max_bytes, or see why the backend is behind."
            )

    # -- removing --------------------------------------------------------------------------------------

    def _remove(self, segment: _Segment, segments: list[_Segment]) -> int:
        """Remove a file, and with the last one of an attempt what stands beside it; its size."""
        with contextlib.suppress(FileNotFoundError):
            segment.path.unlink()
        self._removed += 1
        segments.remove(segment)
        self._writers.pop(segment.path, None)
        if all(other.attempt != segment.attempt for other in segments):
            folder = segment.path.parent
            with contextlib.suppress(OSError):  # somebody else's files are in it
                for name in _SIDE_FILES:
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()
        return segment.size


def _records_behind(path: Path, offset: int) -> tuple[int, int]:
    """How many rows, and how many records, stand at that place or behind it."""
    rows = records = 0
    reader = SegmentReader(path)
    reader.offset = offset
    with contextlib.suppress(JournalError, OSError):
        for record in reader.read():
            rows += isinstance(record, Row)
            records += not isinstance(record, Mark)
    return rows + reader.unnamed_rows, records + reader.unnamed_rows
