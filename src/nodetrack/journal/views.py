"""The rows of a run as a reader wants them: one row a step, the later attempt wins, and nothing is deleted.

A value is superseded when a later attempt of the same node (role and uid) logged the same metric in the same
context at the same step, or went back behind a step below it. Superseded values stay readable in `all_rows`.

Of several nodes that log to one run, none supersedes anything of another: at one step, each has a row.

Within one attempt, calls of one process at one step are one row; if they gave the same metric twice, the
last one counts. A forked child is another writer of the same attempt: at one step, its values join the row
of the other writers, unless one of them gave the same metric. Then neither hides the other: both are rows.

A rewind concerns all that earlier attempts of its node logged, and all that its own writer logged before it,
whatever the clock says. What another writer of its attempt logged, it concerns if the clock says that it was
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias, cast

import msgspec

from nodetrack.journal.folder import AttemptFolder, Damage, RunFolder, segment_records
from nodetrack.journal.recover import Node, writer_of
from nodetrack.journal.segment import segment_paths
from nodetrack.records import Event, Record, Row, StoredValue

_Context: TypeAlias = "tuple[tuple[str, str], ...]"
_Call: TypeAlias = "tuple[_Source, Row]"
_Calls: TypeAlias = "dict[tuple[int, _Context], list[_Call]]"


class ViewRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a view."""

    step: int
    time_ns: int
    version: str
    attempt: str
    context: Mapping[str, str]
    values: Mapping[str, StoredValue]


class _Source(NamedTuple):
    """Who logged."""

    node: Node
    attempt: AttemptFolder
    writer: int


class _Rewind(NamedTuple):
    """Where a writer went back to, and when."""

    source: _Source
    time_ns: int
    step: int

    def supersedes(self, source: _Source, row: Row) -> bool:
        """Whether a row that was read before it, or that is another writer's, does not count any more."""
        return (
            row.step > self.step
            and source.node == self.source.node
            and (
                source.attempt is not self.source.attempt
                or source.writer == self.source.writer
                or row.time_ns <= self.time_ns
            )
        )


def all_rows(run: RunFolder, damage: Damage | None = None) -> Iterator[ViewRow]:
    """Every row as it was logged, attempt by attempt."""
    for attempt in run.attempts:
        for record in attempt.records(damage):
            if isinstance(record, Row):
                yield _as_logged(attempt, record)


def current_rows(run: RunFolder, damage: Damage | None = None) -> list[ViewRow]:
    """One row for each step and context, in the order of steps; see the module for what wins.

    A row whose values come from several calls has the time, version and attempt of the last of them. Values
    of one step that come from two attempts are two rows, each under its own version; so are those of two
    nodes, and those of two writers that logged the same metric.
    """
    calls: _Calls = {}
    for attempt in run.attempts:
        node = _node_of(attempt)
        rewinds: list[_Rewind] = []
        for path in segment_paths(attempt.folder):
            source = _Source(node, attempt, writer_of(path))
            calls = _with_segment(calls, source, segment_records(path, damage), rewinds)
    return [row for place in sorted(calls) for row in _merged(calls[place])]


def _node_of(attempt: AttemptFolder) -> Node:
    return Node(str(attempt.facts.get("role", "")), str(attempt.facts.get("uid", "")))


def _with_segment(
    calls: _Calls, source: _Source, records: Iterator[Record], rewinds: list[_Rewind]
) -> _Calls:
    """The calls that count once the next segment of an attempt is read. `rewinds` are those of the attempt
    so far; the segment's are added.
    """
    others = [rewind for rewind in rewinds if rewind.source != source]
    for record in records:
        if isinstance(record, Row):
            if others and any(rewind.supersedes(source, record) for rewind in others):
                continue
            place = record.step, tuple(sorted(record.context.items()))
            calls.setdefault(place, []).append((source, record))
        elif isinstance(record, Event) and record.name == "rewind":
            rewinds.append(_Rewind(source, record.time_ns, cast("int", record.data["step"])))
            calls = _without_superseded(calls, rewinds[-1])
    return calls


def _without_superseded(calls: _Calls, rewind: _Rewind) -> _Calls:
    left: _Calls = {}
    for place, found in calls.items():
        if place[0] > rewind.step:
            found = [call for call in found if not rewind.supersedes(*call)]  # noqa: PLW2901 - fewer of the same
        if found:
            left[place] = found
    return left


def _merged(calls: list[_Call]) -> Iterator[ViewRow]:
    """The surviving values of the calls at one step in one context, attempt by attempt."""
    if len(calls) == 1:
        (source, row), *_ = calls
        yield _as_logged(source.attempt, row)
        return
    winner = {(source.node, name): source.attempt.id for source, row in calls for name in row.names}
    rows: dict[_Source, ViewRow] = {}
    for source, row in calls:
        attempt = source.attempt
        kept = {name: value for name, value in row.items() if winner[source.node, name] == attempt.id}
        if kept:
            before = rows[source].values if source in rows else {}
            rows[source] = _row(attempt, row, {**before, **kept})
    yield from _joined([rows[source] for source in sorted(rows, key=_age)])


def _age(source: _Source) -> tuple[int, str, int]:
    """The order in which rows of one step come, whichever segment was read first."""
    return source.attempt.number, source.attempt.id, source.writer


def _joined(rows: list[ViewRow]) -> list[ViewRow]:
    """The rows of several writers of one attempt in one row, unless they have the same metric."""
    joined: list[ViewRow] = []
    for row in rows:
        for index, other in enumerate(joined):
            if other.attempt == row.attempt and other.values.keys().isdisjoint(row.values):
                newer = max(other, row, key=lambda item: item.time_ns)
                joined[index] = msgspec.structs.replace(newer, values={**other.values, **row.values})
                break
        else:
            joined.append(row)
    return joined


def _as_logged(attempt: AttemptFolder, row: Row) -> ViewRow:
    return _row(attempt, row, dict(row.items()))


def _row(attempt: AttemptFolder, row: Row, values: Mapping[str, StoredValue]) -> ViewRow:
    return ViewRow(row.step, row.time_ns, attempt.version, attempt.id, row.context, values)
