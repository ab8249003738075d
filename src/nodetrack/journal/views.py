"""The rows of a run as a reader wants them: one row a step, the later attempt wins, and nothing is deleted.

A value is superseded when a later attempt logged the same metric in the same context at the same step, or
when the run was rewound behind a step below it. Within one attempt, calls at one step are one row; if they
gave the same metric twice, the last one counts. Superseded values stay readable in `all_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias, cast

import msgspec

from nodetrack.journal.folder import AttemptFolder, Damage, RunFolder
from nodetrack.records import Event, Row, StoredValue

_Context: TypeAlias = "tuple[tuple[str, str], ...]"
_Call: TypeAlias = "tuple[AttemptFolder, Row]"


class ViewRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a view."""

    step: int
    time_ns: int
    version: str
    attempt: str
    context: Mapping[str, str]
    values: Mapping[str, StoredValue]


def all_rows(run: RunFolder, damage: Damage | None = None) -> Iterator[ViewRow]:
    """Every row as it was logged, attempt by attempt."""
    for attempt in run.attempts:
        for record in attempt.records(damage):
            if isinstance(record, Row):
                yield _as_logged(attempt, record)


def current_rows(run: RunFolder, damage: Damage | None = None) -> list[ViewRow]:
    """One row for each step and context, in the order of steps; see the module for what wins.

    A row whose values come from several calls has the time, version and attempt of the last of them. Values
    of one step that come from two attempts are two rows, each under its own version.
    """
    calls: dict[tuple[int, _Context], list[_Call]] = {}
    for attempt in run.attempts:
        for record in attempt.records(damage):
            if isinstance(record, Row):
                place = record.step, tuple(sorted(record.context.items()))
                calls.setdefault(place, []).append((attempt, record))
            elif isinstance(record, Event) and record.name == "rewind":
                rewound = cast("int", record.data["step"])
                calls = {place: found for place, found in calls.items() if place[0] <= rewound}
    return [row for place in sorted(calls) for row in _merged(calls[place])]


def _merged(calls: list[_Call]) -> Iterator[ViewRow]:
    """The surviving values of the calls at one step in one context: one row an attempt, in their order."""
    if len(calls) == 1:
        yield _as_logged(*calls[0])
        return
    winner = {name: attempt.id for attempt, row in calls for name in row.names}
    values: dict[str, dict[str, StoredValue]] = {}
    last: dict[str, _Call] = {}
    for attempt, row in calls:
        kept = {name: value for name, value in row.items() if winner[name] == attempt.id}
        if kept:
            values.setdefault(attempt.id, {}).update(kept)
            last[attempt.id] = attempt, row
    for attempt_id, merged in values.items():
        attempt, row = last[attempt_id]
        yield ViewRow(row.step, row.time_ns, attempt.version, attempt_id, row.context, merged)


def _as_logged(attempt: AttemptFolder, row: Row) -> ViewRow:
    return ViewRow(row.step, row.time_ns, attempt.version, attempt.id, row.context, dict(row.items()))
