"""`nodetrack journal cat | verify`: the journal itself, record by record and file by file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from nodetrack.cli.command import FOUND_WRONG, AsJson, Folder, Project, ends_well, find_run, note, open_folder
from nodetrack.cli.plain_help import PlainCommand, PlainGroup
from nodetrack.cli.strict_json import json_line, json_text
from nodetrack.cli.terminal import console, counted, least_width, print_table, printable, table
from nodetrack.errors import JournalError, UsageError
from nodetrack.journal.folder import AttemptFolder, RunFolder, TrackingFolder
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import ATTEMPT_NAME, read_header
from nodetrack.journal.segment import segment_paths
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    Mark,
    Record,
    Row,
    RunEdited,
    SummarySet,
    SystemRow,
)

app = typer.Typer(
    name="journal",
    help="Look at the journal's records as they are, and check its files for damage.",
    cls=PlainGroup,
    no_args_is_help=True,
)

_KINDS: Final[dict[type[Record], str]] = {
    AttemptStarted: "attempt",
    Row: "row",
    ConfigSet: "config",
    SummarySet: "summary",
    RunEdited: "tags",
    ConsoleLine: "console",
    SystemRow: "system",
    Event: "event",
    Mark: "mark",
    AttemptFinished: "finish",
}
_KIND_NAMES: Final = ("header", *_KINDS.values())

Target = Annotated[
    str, typer.Argument(metavar="RUN_OR_FILE", help="A run as in other commands, or a segment file.")
]
Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN_OR_FILE]...", help="Runs or segment files. Default: every run."),
]


# ---------------------------------------------------------------------------------------------------
# cat


@app.command(cls=PlainCommand)
@ends_well
def cat(
    target: Target,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help=f"Only records of this kind: {', '.join(_KIND_NAMES)}. Repeatable."
        ),
    ] = None,
    project: Project = None,
    folder: Folder = None,
    as_json: Annotated[  # noqa: ARG001 - every reading command takes --json, and this one knows nothing else
        bool, typer.Option("--json", help="Records are always printed as JSON.")
    ] = True,
) -> None:
    """Print the records, one JSON object a line, in the order in which they were written."""
    kinds = set(kind or _KIND_NAMES)
    if unknown := sorted(kinds - set(_KIND_NAMES)):
        raise UsageError(f"There is no kind {unknown[0]!r}; there are {', '.join(_KIND_NAMES)}.")
    for path, _ in _segments([target], folder, project):
        for record in _records_of(path):
            if record["kind"] in kinds:
                typer.echo(json_line(record))


def _records_of(path: Path) -> Iterator[dict[str, object]]:
    """The records of a file as JSON objects, its header first; what could not be read is told at the end."""
    header = read_header(path)
    if header is not None:
        yield {"file": str(path), "offset": 0, "kind": "header", **msgspec.structs.asdict(header)}
    reader = SegmentReader(path)
    for record in reader.read():
        yield {"file": str(path), "offset": record.offset, "kind": _KINDS[type(record)], **_fields(record)}
    lost = reader.damage.corrupt + reader.unnamed_rows
    if lost:
        note(f"{counted(lost, 'damaged record')} of {path} left out.")


def _fields(record: Record) -> dict[str, object]:
    fields = msgspec.structs.asdict(record)
    if isinstance(record, Row | SystemRow):  # the values stand last, under their names
        del fields["names"], fields["values"]
        fields["values"] = dict(zip(record.names, record.values, strict=True))
    return {name: value for name, value in fields.items() if name != "offset"}


# ---------------------------------------------------------------------------------------------------
# verify


class SegmentCheck(msgspec.Struct, frozen=True):
    """What one file holds, and what of it cannot be read."""

    file: str
    records: int
    rows: int
    corrupt: int
    torn_bytes: int
    unnamed_rows: int
    unknown_records: int
    verdict: str
    problem: str = ""

    @property
    def is_damaged(self) -> bool:
        """Whether anything is lost. The tail that a running process is writing is not."""
        return self.verdict not in ("ok", "growing")


@app.command(cls=PlainCommand)
@ends_well
def verify(
    targets: Targets = None, project: Project = None, folder: Folder = None, as_json: AsJson = False
) -> None:
    """Read every record and say what is damaged. Exit code 1 when anything is.

    The tail that a running process is just writing is no damage.
    """
    checks = [_check(path, attempt) for path, attempt in _segments(targets, folder, project)]
    damaged = sum(check.is_damaged for check in checks)
    if as_json:
        typer.echo(json_text({"files": msgspec.to_builtins(checks), "damaged_files": damaged}))
    else:
        _print_checks(checks, damaged, open_folder(folder).folder)
    if damaged:
        raise typer.Exit(FOUND_WRONG)


def _check(path: Path, attempt: AttemptFolder | None) -> SegmentCheck:
    reader = SegmentReader(path)
    records = rows = 0
    problem = ""
    try:
        for record in reader.read():
            records += 1
            rows += isinstance(record, Row)
    except (JournalError, OSError) as error:
        problem = str(error)
    return SegmentCheck(
        file=str(path),
        records=records,
        rows=rows,
        corrupt=reader.damage.corrupt,
        torn_bytes=reader.damage.torn_bytes,
        unnamed_rows=reader.unnamed_rows,
        unknown_records=reader.unknown_records,
        verdict="unreadable" if problem else _verdict(reader, attempt),
        problem=problem,
    )


def _verdict(reader: SegmentReader, attempt: AttemptFolder | None) -> str:
    if reader.damage.corrupt or reader.unnamed_rows:
        return "damaged"
    if not reader.damage.torn_bytes:
        return "ok"
    return "growing" if attempt is not None and _may_grow(reader, attempt) else "torn"


def _may_grow(reader: SegmentReader, attempt: AttemptFolder) -> bool:
    """Whether a process may still write to it: the attempt has not ended, and it is its writer's last."""
    if attempt.state(attempt.finish_record()).state not in ("running", "stale"):
        return False
    writer = reader.header.writer if reader.header is not None else 0
    later = [path for path in segment_paths(attempt.folder) if path.name > reader.path.name]
    headers = [read_header(path) for path in later]
    return all(header is None or header.writer != writer for header in headers)


def _print_checks(checks: Sequence[SegmentCheck], damaged: int, folder: Path) -> None:
    """Files in the tracking folder are named as they lie in it. A narrow terminal has no counts of zeros."""
    screen = console()
    files = [_within(folder, check.file) for check in checks]
    listed = _checks_table(checks, files)
    if least_width(listed) > screen.width:
        room = screen.width - least_width(_checks_table(checks, ["" for _ in files], without_zeros=True))
        broken = [_broken(file, room + len("file")) for file in files]
        listed = _checks_table(checks, broken, without_zeros=True)
    if checks:
        print_table(screen, listed)
    line = f"{counted(len(checks), 'file')}, {damaged or 'none'} damaged."
    screen.print(Text(line, style="red" if damaged else "dim"))
    for check in checks:
        if check.problem:
            note(check.problem)


def _checks_table(
    checks: Sequence[SegmentCheck], files: Sequence[str], *, without_zeros: bool = False
) -> Table:
    counts = {
        "records": [check.records for check in checks],
        "rows": [check.rows for check in checks],
        "corrupt": [check.corrupt + check.unnamed_rows for check in checks],
        "torn bytes": [check.torn_bytes for check in checks],
        "unknown": [check.unknown_records for check in checks],
    }
    shown = {title: column for title, column in counts.items() if any(column) or not without_zeros}
    listed = table("file", *(f"{title}>" for title in shown), "verdict")
    for check, file, *numbers in zip(checks, files, *shown.values(), strict=True):
        verdict = Text(check.verdict, style="red" if check.is_damaged else "green")
        listed.add_row(file, *map(str, numbers), verdict)
    return listed


def _broken(file: str, room: int) -> str:
    """The path in as few lines as fit, each but the last ended by a slash."""
    lines = [""]
    for part in re.findall(r"[^/]*/|[^/]+", file):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _within(folder: Path, file: str) -> str:
    path = Path(file)
    return printable(str(path.relative_to(folder)) if path.is_relative_to(folder) else file)


# ---------------------------------------------------------------------------------------------------
# What is meant


def _segments(
    targets: Sequence[str] | None, folder: Path | None, project: str | None
) -> Iterator[tuple[Path, AttemptFolder | None]]:
    """The files of all targets, each with the attempt that it belongs to, if it lies in one."""
    if not targets:
        for run in open_folder(folder).runs(project):
            yield from _segments_of(run)
    tracking: TrackingFolder | None = None
    for target in targets or ():
        path = Path(target)
        if path.is_file():
            yield path, _attempt_around(path)
        else:
            tracking = tracking or open_folder(folder)
            yield from _segments_of(find_run(tracking, target, project))


def _segments_of(run: RunFolder) -> Iterator[tuple[Path, AttemptFolder | None]]:
    for attempt in run.attempts:
        for path in segment_paths(attempt.folder):
            yield path, attempt


def _attempt_around(path: Path) -> AttemptFolder | None:
    folder = path.absolute().parent
    if not ATTEMPT_NAME.fullmatch(folder.name):
        return None
    attempts = RunFolder(folder.parent, "").attempts
    return next((attempt for attempt in attempts if attempt.id == folder.name), None)
