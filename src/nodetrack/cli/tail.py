"""`nodetrack tail`: the newest rows of a run, one line each, and those that come; or what it printed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
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
from nodetrack.cli.follow import Logged, RunFollower
from nodetrack.cli.rows import row_as_json
from nodetrack.cli.strict_json import json_line
from nodetrack.cli.terminal import clock, console, event_text, moment, printable, state_text, value_text
from nodetrack.errors import UsageError
from nodetrack.journal.folder import AttemptFolder, AttemptState
from nodetrack.journal.views import ViewRow
from nodetrack.records import AttemptFinished, ConsoleLine, Event, Record, Row, StoredValue

_LOOK_SECONDS: Final = 0.5
_GAP: Final = "  "
#: Of one row in a terminal.
_MOST_LINES: Final = 8
_TOLD_IN_A_SENTENCE: Final = ("rewind", "signal")


@ends_well
def tail(
    run: RunName,
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", min=0, help="How many rows.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with the rows that come, until Ctrl-C.")
    ] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Only metrics in whose name this is found, and rows that have one."
        ),
    ] = None,
    of_console: Annotated[
        bool, typer.Option("--console", help="Instead: the lines that the node printed, with their times.")
    ] = False,
    project: Project = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest rows as they were logged, one line each. --json prints one object a line."""
    if of_console and metric is not None:
        raise UsageError("A printed line has no metrics: give --console or --metric.")
    pattern = compiled(metric)
    found = find_run(open_folder(folder), run, project)
    teller: _Teller
    if of_console:
        teller = _JsonConsole(found.id) if as_json else _ConsoleLines(console())
    else:
        teller = _JsonLines(found.id, pattern) if as_json else _Lines(console(), pattern)
    try:
        _tell(RunFollower(found), teller, count, follow=follow)
    except KeyboardInterrupt:  # the way to end --follow
        if sys.stdout.isatty():
            typer.echo()  # behind the ^C


class _Teller(Protocol):
    """Prints records, one line each."""

    @property
    def nothing_fits(self) -> str:
        """The remark for a run of which nothing is wanted; "" if there is nothing to say."""
        ...

    def newest(self, follower: RunFollower, count: int) -> list[Logged]:
        """The last records that are worth printing."""
        ...

    def tell(self, attempt: AttemptFolder, record: Record | AttemptState) -> None:
        """Print what there is to print of a record."""
        ...


def _tell(follower: RunFollower, teller: _Teller, count: int, *, follow: bool) -> None:
    newest = teller.newest(follower, count)
    for attempt, record in newest:
        teller.tell(attempt, record)
    if count and not newest and teller.nothing_fits:
        note(teller.nothing_fits)
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

    @property
    def nothing_fits(self) -> str:
        """See _Teller."""
        pattern = self._pattern.pattern
        return f"No row has a metric in whose name {pattern!r} is found." if pattern else ""

    def newest(self, follower: RunFollower, count: int) -> list[Logged]:
        """See _Teller."""
        return follower.newest(Row, count, self.wants)

    def wants(self, row: Row) -> bool:
        """Whether the row has anything to print."""
        return any(self._pattern.search(name) for name in row.names)

    def chosen(self, row: Row) -> dict[str, StoredValue]:
        """The values to print."""
        return {name: value for name, value in row.items() if self._pattern.search(name)}


class _JsonLines(_Chooser):
    """Rows in the shape of `nodetrack export`; nothing else."""

    def __init__(self, run: str, pattern: re.Pattern[str]) -> None:
        super().__init__(pattern)
        self._run = run

    def tell(self, attempt: AttemptFolder, record: Record | AttemptState) -> None:
        """See _Teller."""
        if isinstance(record, Row) and self.wants(record):
            values = self.chosen(record)
            row = ViewRow(record.step, record.time_ns, attempt.version, attempt.id, record.context, values)
            typer.echo(json_line(row_as_json(self._run, row)))


class _Printer:
    """Prints for people, with a line where an attempt begins, ends, or something happens to it."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._attempt = ""

    def tell(self, attempt: AttemptFolder, record: Record | AttemptState) -> None:
        """See _Teller."""
        line = self._line(record)
        if line is None:
            return
        if attempt.id != self._attempt:
            self._attempt = attempt.id
            self._print(_attempt_line(attempt))
        self._print(line)

    def _print(self, line: Text) -> None:
        self._screen.print(line, soft_wrap=True)

    def _line(self, record: Record | AttemptState) -> Text | None:
        if isinstance(record, Event) and record.name != "define_metric":
            return _timed(record.time_ns, Text(_event_words(record), style="yellow"))
        if isinstance(record, AttemptFinished):
            return _timed(record.time_ns, state_text(record.state, record.reason))
        if isinstance(record, AttemptState):
            return _timed(record.ended_ns or time.time_ns(), state_text(record.state, record.reason))
        return None


class _Lines(_Chooser, _Printer):
    """Rows for people."""

    def __init__(self, screen: Console, pattern: re.Pattern[str]) -> None:
        _Chooser.__init__(self, pattern)
        _Printer.__init__(self, screen)

    def _line(self, record: Record | AttemptState) -> Text | None:
        if isinstance(record, Row):
            return self._row(record) if self.wants(record) else None
        return super()._line(record)

    def _row(self, row: Row) -> Text:
        """One line; in a terminal that is too narrow, the values go on below, up to a bound."""
        head = _timed(row.time_ns, Text(f"{row.step:>7}", style="bold"))
        indent = head.cell_len + len(_GAP)
        room = self._screen.width - indent if self._screen.is_terminal else sys.maxsize
        lines = _packed([*_context_words(row), *_value_words(self.chosen(row))], room)
        if len(lines) > _MOST_LINES:
            left_out = sum(len(line) for line in lines[_MOST_LINES - 1 :])
            lines = [*lines[: _MOST_LINES - 1], [Text(f"and {left_out} more: --metric chooses", style="dim")]]
        between = Text("\n" + " " * indent)
        return head.append(_GAP).append_text(between.join(Text(_GAP).join(line) for line in lines))


class _OfConsole:
    """Wants all lines that were printed."""

    nothing_fits = "No line that the node printed was kept."

    def newest(self, follower: RunFollower, count: int) -> list[Logged]:
        """See _Teller."""
        return follower.newest(ConsoleLine, count, lambda _: True)


class _JsonConsole(_OfConsole):
    """Printed lines as objects; nothing else."""

    def __init__(self, run: str) -> None:
        self._run = run

    def tell(self, attempt: AttemptFolder, record: Record | AttemptState) -> None:
        """See _Teller."""
        if isinstance(record, ConsoleLine):
            told = {"time_ns": record.time_ns, "stream": record.stream, "text": record.text}
            typer.echo(json_line({"run": self._run, "attempt": attempt.id, **told}))


class _ConsoleLines(_OfConsole, _Printer):
    """Printed lines for people; those of standard error in another colour."""

    def _line(self, record: Record | AttemptState) -> Text | None:
        if isinstance(record, ConsoleLine):
            style = "yellow" if record.stream == "stderr" else ""
            return _timed(record.time_ns, Text(printable(record.text.expandtabs()), style=style))
        return super()._line(record)


def _attempt_line(attempt: AttemptFolder) -> Text:
    started = moment(attempt.started_ns)
    return Text(f"attempt {attempt.id}, version {attempt.version}, started {started}", style="dim")


def _timed(time_ns: int, text: Text) -> Text:
    return Text(clock(time_ns), style="dim").append(_GAP).append_text(text)


def _event_words(event: Event) -> str:
    """What happened, in words that stand alone."""
    words = event_text(event.name, event.data)
    return words if event.name in _TOLD_IN_A_SENTENCE else f"{printable(event.name)} {words}"


def _context_words(row: Row) -> Iterator[Text]:
    for key, word in sorted(row.context.items()):
        yield Text(f"{printable(key)}={printable(word)}", style="magenta")


def _value_words(values: Mapping[str, StoredValue]) -> Iterator[Text]:
    for name, value in values.items():
        yield Text(f"{printable(name)} ").append(value_text(value), style="cyan")


def _packed(words: Iterable[Text], room: int) -> list[list[Text]]:
    """The words in as few lines as they need, none of them broken; one that has no room stands alone."""
    lines: list[list[Text]] = [[]]
    taken = 0
    for word in words:
        if taken and taken + len(_GAP) + word.cell_len > room:
            lines.append([])
            taken = 0
        taken += word.cell_len + (len(_GAP) if taken else 0)
        lines[-1].append(word)
    return lines
