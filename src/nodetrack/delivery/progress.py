"""How far a backend has come with what one process logged, for `run.health()`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nodetrack.health import BackendHealth
from nodetrack.journal.cursor import Cursor, SegmentProgress


class Logged(NamedTuple):
    """What one process has logged: so many rows from one step to another, as that writer of the attempt."""

    attempt: str
    writer: int
    rows: int
    first_step: int
    last_step: int


def progress(cursor: Cursor | None, logged: Logged) -> BackendHealth:
    """What the cursor says of it; None: nothing was ever sent."""
    if cursor is None:
        return BackendHealth("starting", logged.rows, 0, missing=_missing(logged, None, logged.rows))
    entries = [entry for entry in cursor.segments(logged.attempt) if entry.writer == logged.writer]
    rows = sum(entry.rows for entry in entries)
    quarantined = sum(entry.quarantined for entry in entries)
    lost = sum(entry.lost for entry in entries)
    return BackendHealth(
        cursor.state,
        logged.rows,
        rows,
        cursor.last_error,
        quarantined,
        lost,
        _missing(logged, _highest_step(entries), logged.rows - rows - quarantined - lost),
        dict(cursor.left_out),
        cursor.url,
    )


def _missing(logged: Logged, delivered: int | None, pending: int) -> tuple[int, int] | None:
    """The range of steps behind `delivered`; None if nothing is pending."""
    if pending <= 0:
        return None
    first = logged.first_step if delivered is None else delivered + 1
    return min(first, logged.last_step), logged.last_step


def _highest_step(entries: Iterable[SegmentProgress]) -> int | None:
    return max((entry.step for entry in entries if entry.step is not None), default=None)
