"""`nodetrack tail`: the newest rows of a run, one line each, and those that come."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Protocol

import typer
from rich.console import Console
from rich.text import Text

from nodetrack.cli.command import (
    AsJson,
    Folder,
    Project,
    RunName,
    compiled,
    ends_well,
    find_run,
    note,
    open_folder,
)
from nodetrack.cli.follow import RunFollower
from nodetrack.cli.rows import row_as_json
from nodetrack.cli.strict_json import json_line
from nodetrack.cli.terminal import clock, console, event_text, moment, printable, state_text, value_text
from nodetrack.journal.folder import AttemptFolder
from nodetrack.journal.views import ViewRow
from nodetrack.records import AttemptFinished, Event, Record, Row, StoredValue

_LOOK_SECONDS: Final = 0.5


@ends_well
def tail(
    run: RunName,
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="How many rows.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with the rows that come, until Ctrl-C.")
    ] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Only metrics in whose name this is found, and rows that have one."
        ),
    ] = None,
    project: Project = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest rows as they were logged, one line each. --json prints one object a line."""
    pattern = compiled(metric)
    found = find_run(open_folder(folder), run, project)
    lines = _JsonLines(found.id, pattern) if as_json else _Lines(console(), pattern)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --follow
        _tell(RunFollower(found), lines, count, follow=follow)


class _Teller(Protocol):
    """Prints records, one line each."""

    def wants(self, row: Row) -> bool:
        """Whether the row has anything to print."""
        ...

    def tell(self, attempt: AttemptFolder, record: Record) -> None:
        """Print what there is to print of a record."""
        ...


def _tell(follower: RunFollower, teller: _Teller, count: int, *, follow: bool) -> None:
    for attempt, row in follower.newest(count, teller.wants):
        teller.tell(attempt, row)
    told: set[Path] = set()
    while True:
        for path in follower.problems.keys() - told:
            told.add(path)
            note(follower.problems[path])
        if not follow:
            return
        sys.stdout.flush()
        time.sleep(_LOOK_SECONDS)
        for attempt, record in follower.added():
            teller.tell(attempt, record)


class _Chooser:
    """Chooses the metrics whose names fit."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def wants(self, row: Row) -> bool:
        """See _Teller."""
        return any(self._pattern.search(name) for name in row.names)

    def chosen(self, row: Row) -> dict[str, StoredValue]:
        """The values to print."""
        return {name: value for name, value in row.items() if self._pattern.search(name)}


class _JsonLines(_Chooser):
    """Rows in the shape of `nodetrack export`; nothing else."""

    def __init__(self, run: str, pattern: re.Pattern[str]) -> None:
        super().__init__(pattern)
        self._run = run

    def tell(self, attempt: AttemptFolder, record: Record) -> None:
        """See _Teller."""
        if isinstance(record, Row) and self.wants(record):
            values = self.chosen(record)
            row = ViewRow(record.step, record.time_ns, attempt.version, attempt.id, record.context, values)
            typer.echo(json_line(row_as_json(self._run, row)))


class _Lines(_Chooser):
    """Rows for people, with a line where an attempt begins, ends, or something happens to it."""

    def __init__(self, screen: Console, pattern: re.Pattern[str]) -> None:
        super().__init__(pattern)
        self._screen = screen
        self._attempt = ""

    def tell(self, attempt: AttemptFolder, record: Record) -> None:
        """See _Teller."""
        line = self._line(record)
        if line is None:
            return
        if attempt.id != self._attempt:
            self._attempt = attempt.id
            self._print(_attempt_line(attempt))
        self._print(line)

    def _print(self, line: Text) -> None:
        """One line each: what a terminal is too narrow for is cut, a pipe gets all of it."""
        self._screen.print(line, no_wrap=True, overflow="ellipsis")

    def _line(self, record: Record) -> Text | None:
        if isinstance(record, Row) and self.wants(record):
            return _row_line(record, self.chosen(record))
        if isinstance(record, Event) and record.name != "define_metric":
            words = f"{record.name} {event_text(record.name, record.data)}"
            return Text(clock(record.time_ns), style="dim").append(f"  {words}", style="yellow")
        if isinstance(record, AttemptFinished):
            line = Text(clock(record.time_ns), style="dim").append("  ")
            return line.append_text(state_text(record.state, record.reason))
        return None


def _attempt_line(attempt: AttemptFolder) -> Text:
    started = moment(attempt.started_ns)
    return Text(f"attempt {attempt.id}, version {attempt.version}, started {started}", style="dim")


def _row_line(row: Row, values: Mapping[str, StoredValue]) -> Text:
    line = Text(clock(row.time_ns), style="dim").append(f"  {row.step:>7}", style="bold")
    for key, word in sorted(row.context.items()):
        line.append(f"  {printable(key)}={printable(word)}", style="magenta")
    for name, value in values.items():
        line.append(f"  {printable(name)} ").append(value_text(value), style="cyan")
    return line
