"""What a node is doing, read from its journal while it writes: there is no other channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nodetrack.errors import JournalError, RunNotFoundError
from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import segment_paths
from nodetrack.records import Row, StoredValue


@dataclass
class JournalWatch:
    """The newest values of one node, and all that came since the last look.

    `attempts`, `step` and `latest` are as of the last look; `latest` leaves out rows with a context.
    """

    journals: Path
    project: str
    node: str
    step: int | None = None
    attempts: int = 0
    latest: dict[str, StoredValue] = field(default_factory=dict)
    _run: RunFolder | None = None
    _readers: dict[Path, SegmentReader] = field(default_factory=dict)

    def look(self) -> list[Row]:
        """The rows logged since the last look, in order; none before the node's first attempt."""
        rows = [record for reader in self._open_readers() for record in _new_rows(reader)]
        for row in rows:
            self.step = row.step
            if not row.context:
                self.latest.update(row.items())
        return rows

    @property
    def window(self) -> int | None:
        """The window of the newest row."""
        window = self.latest.get("window")
        return window if isinstance(window, int) else None

    def metric(self, name: str) -> float | None:
        """The newest value of a metric; None before the first."""
        value = self.latest.get(name)
        return float(value) if isinstance(value, int | float) else None

    def _open_readers(self) -> list[SegmentReader]:
        run = self._run = self._run or self._find()
        attempts = run.attempts if run else []
        self.attempts = len(attempts)
        paths = [path for attempt in attempts for path in segment_paths(attempt.folder)]
        return [self._readers.setdefault(path, SegmentReader(path)) for path in paths]

    def _find(self) -> RunFolder | None:
        try:
            return TrackingFolder(self.journals).find(self.node, self.project)
        except RunNotFoundError:
            return None


def _new_rows(reader: SegmentReader) -> list[Row]:
    try:
        return [record for record in reader.read() if isinstance(record, Row)]
    except (JournalError, FileNotFoundError):
        return []  # a segment that is only just being made; the next look sees it
