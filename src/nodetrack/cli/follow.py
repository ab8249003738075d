"""Reading a run while it grows: its newest rows first, then whatever is added."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from nodetrack.errors import JournalError
from nodetrack.journal.folder import AttemptFolder, AttemptState, RunFolder, State
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import read_header
from nodetrack.journal.segment import segment_paths
from nodetrack.records import AttemptFinished, ConsoleLine, Record, Row

Timed = TypeVar("Timed", Row, ConsoleLine)


class Logged(NamedTuple):
    """A record and the attempt that wrote it; or how that attempt stands, if no record said so."""

    attempt: AttemptFolder
    record: Record | AttemptState


class RunFollower:
    """Remembers how far each segment of a run has been read.

    New segments and attempts are found by themselves. A torn tail is read once the rest of it is there; if
    that never comes, nothing but the tail is missing. A file that cannot be read raises nothing: `problems`
    names it.
    """

    def __init__(self, run: RunFolder) -> None:
        self.problems: dict[Path, str] = {}
        self._run = run
        self._readers: dict[Path, SegmentReader] = {}
        self._passed: set[Path] = set()
        self._attempts: dict[str, AttemptFolder] = {}
        #: How each attempt stood at the last look, and those of which no more is to be told.
        self._states: dict[str, State] = {}
        self._settled: set[str] = set()

    def newest(self, kind: type[Timed], count: int, wanted: Callable[[Timed], bool]) -> list[Logged]:
        """The last `count` records of a kind that are wanted, in order, reading no more segments than that
        takes.

        What is added later is what `added` begins with.
        """
        found: list[Logged] = []
        for attempt in reversed(self._known_attempts()):
            missing = count - len(found)
            last: list[Timed] = self._newest_of(attempt, kind, missing, wanted, is_last=not self._readers)
            found[:0] = [Logged(attempt, record) for record in last]
        self._settled = {attempt.id for attempt in self._known_attempts()[:-1]}
        return found

    def added(self) -> Iterator[Logged]:
        """Every record that was written since the last look, attempt by attempt, and once how each ended."""
        for attempt in self._known_attempts():
            state = self._state(attempt)  # before the last look into its files: what it wrote comes first
            for path in segment_paths(attempt.folder):
                if path not in self._passed:
                    for record in self._read(path):
                        if isinstance(record, AttemptFinished):
                            self._settled.add(attempt.id)
                        yield Logged(attempt, record)
            if attempt.id not in self._settled:
                yield from self._news(attempt, state)

    def _state(self, attempt: AttemptFolder) -> AttemptState:
        """How the attempt stands. While its process lives, its last words are not looked for at each look."""
        state = attempt.state(None)
        is_new = attempt.id not in self._states
        return attempt.state(attempt.finish_record()) if is_new or state.state != "running" else state

    def _news(self, attempt: AttemptFolder, state: AttemptState) -> Iterator[Logged]:
        before = self._states.get(attempt.id, "running")
        self._states[attempt.id] = state.state
        if state.state not in (before, "running"):
            yield Logged(attempt, state)
        if state.state not in ("running", "stale"):
            self._settled.add(attempt.id)

    def _known_attempts(self) -> list[AttemptFolder]:
        """They are kept for what they have read of themselves, until another one has begun behind them."""
        present = self._run.attempts
        for attempt in present:
            known = self._attempts.get(attempt.id)
            if known is None or known.is_last != attempt.is_last:
                self._attempts[attempt.id] = attempt
        return [self._attempts[attempt.id] for attempt in present]

    def _newest_of(
        self,
        attempt: AttemptFolder,
        kind: type[Timed],
        count: int,
        wanted: Callable[[Timed], bool],
        *,
        is_last: bool,
    ) -> list[Timed]:
        """The last records of an attempt. The processes that share it (after a fork) are merged by time."""
        streams = []
        for paths in _by_writer(segment_paths(attempt.folder)):
            stream: deque[Timed] = deque(maxlen=max(0, count))
            for path in reversed(paths):
                may_grow = is_last and path == paths[-1]
                if len(stream) < count or may_grow:
                    of_kind = (record for record in self._read(path) if isinstance(record, kind))
                    records = deque(filter(wanted, of_kind), maxlen=count - len(stream))
                    stream.extendleft(reversed(records))
                else:
                    self._passed.add(path)
            streams.append(stream)
        merged = heapq.merge(*streams, key=lambda record: record.time_ns)
        return list(deque(merged, maxlen=max(0, count)))

    def _read(self, path: Path) -> Iterator[Record]:
        """What is new in one segment."""
        reader = self._readers.setdefault(path, SegmentReader(path))
        with contextlib.suppress(FileNotFoundError):  # deleted, or not there yet: the next look tells
            if path.stat().st_size == reader.offset:
                return
            try:
                yield from reader.read()
            except JournalError as error:
                self.problems[path] = str(error)


def _by_writer(paths: list[Path]) -> list[list[Path]]:
    """The segments of each process, in order; one whose header cannot be read stands alone."""
    writers: dict[int | Path, list[Path]] = {}
    for path in paths:
        header = read_header(path)
        writers.setdefault(path if header is None else header.writer, []).append(path)
    return list(writers.values())
