"""A journal as a test uses it: written as `Run.log` writes, read back as a reader reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import Damage, segment_paths
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.records import Kind, Record, Row, SegmentHeader, StoredValue


class Journal:
    """A writer with the little of a run that it needs, and what is on the disk."""

    def __init__(
        self, folder: Path, *, segment_bytes: int = 1_000_000, backlog_records: int = 10_000
    ) -> None:
        self.folder = folder
        self.troubles: list[str] = []
        self.step = 0
        self.key_sets: dict[tuple[object, ...], KeySet] = {}
        self.writer = JournalWriter(
            folder,
            self.header,
            self.troubles.append,
            segment_bytes=segment_bytes,
            backlog_records=backlog_records,
        )

    def header(self, writer: int, segment: int) -> SegmentHeader:
        """What the next segment's header says: the step is that of all rows that have been logged."""
        return SegmentHeader(
            schema_version=1,
            project="p",
            run="r",
            attempt=self.folder.name,
            writer=writer,
            segment=segment,
            version="0.1.0",
            step=self.step,
            counter=self.step,
            summary={"best": self.step},
            labels={"name": "n"},
        )

    def key_set(self, *names: str, **context: str) -> KeySet:
        """The key set of these names in this context."""
        return self.key_sets.setdefault((names, *context.items()), KeySet(names, context))

    def log(self, values: Mapping[str, StoredValue] | None = None, step: int | None = None) -> None:
        """Log one row as `Run.log` does: the run counts it only after the writer has it."""
        step = self.step if step is None else step
        values = {"loss": step / 8} if values is None else values
        with self.writer.lock:
            self.writer.write_row(self.key_set(*values), step, 1_000 + step, [*values.values()], True)
            self.step = max(self.step, step + 1)

    def log_many(self, count: int) -> None:
        """Log that many rows."""
        for _ in range(count):
            self.log()

    def say(self, text: str) -> None:
        """Record a line of console output."""
        with self.writer.lock:
            self.writer.write([Kind.CONSOLE, 1, "stdout", text])

    @property
    def paths(self) -> list[Path]:
        """The segments on disk."""
        return segment_paths(self.folder)

    def records(self) -> list[Record]:
        """What a reader finds on disk; it must be whole."""
        found = []
        for path in self.paths:
            reader = SegmentReader(path)
            found += reader.read()
            assert reader.damage == Damage()
            assert (reader.unnamed_rows, reader.unknown_records) == (0, 0)
            assert reader.header is not None
        return found

    def rows(self) -> list[Row]:
        """The rows on disk."""
        return [record for record in self.records() if isinstance(record, Row)]

    def steps(self) -> list[int]:
        """The steps of the rows on disk, in the order in which they lie there."""
        return [row.step for row in self.rows()]


@pytest.fixture
def new_journal(tmp_path: Path) -> Iterator[Callable[..., Journal]]:
    """Makes journals in a folder of the test; they are closed behind it."""
    made: list[Journal] = []

    def make(folder: Path = tmp_path / "0001-aaaa", **options: int) -> Journal:
        made.append(Journal(folder, **options))
        return made[-1]

    yield make
    for journal in made:
        journal.writer.close()


@pytest.fixture
def journal(new_journal: Callable[..., Journal]) -> Journal:
    """A journal with nothing in it."""
    return new_journal()
