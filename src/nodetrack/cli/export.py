"""`nodetrack export`: all rows of runs, complete and the same each time, for other programs."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from nodetrack.cli.command import Folder, Project, RunNames, ends_well, find_run, note, open_folder
from nodetrack.cli.formats import WRITERS, ExportRow
from nodetrack.cli.terminal import counted
from nodetrack.errors import UsageError
from nodetrack.journal.folder import Damage, RunFolder
from nodetrack.journal.views import all_rows, current_rows

_FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}


@ends_well
def export(
    runs: RunNames,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(WRITERS),
            help="Default: what the name of the output file says, jsonl without one.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write, at once when all is there."),
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Every row as it was logged, superseded ones too.")
    ] = False,
    project: Project = None,
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format jsonl.")] = False,
) -> None:
    """Write all rows of runs to a file or standard output.

    By default one row a step, the later attempt wins. The same journal gives the same bytes each time.
    """
    write = WRITERS[_format("jsonl" if as_json and format is None else format, output)]
    tracking = open_folder(folder)
    found = {run.folder: run for run in (find_run(tracking, name, project) for name in runs)}
    damage = Damage()
    with _opened(output) as file:
        write(_rows(list(found.values()), damage, all_attempts=all_attempts), file)
    _tell_damage(damage)


def _format(given: str | None, output: Path | None) -> str:
    chosen = given or ("jsonl" if output is None else _format_of(output))
    if chosen not in WRITERS:
        raise UsageError(f"There is no format {chosen!r}; there are {', '.join(WRITERS)}.")
    if chosen == "parquet" and output is None and _is_terminal():
        raise UsageError("Parquet is nothing for a terminal: name a file with --output.")
    return chosen


def _format_of(output: Path) -> str:
    """What the suffix says. `.json` is refused: who reads such a file expects one value, not one a line."""
    chosen = _FORMAT_OF_SUFFIX.get(output.suffix.lower())
    if chosen is None:
        raise UsageError(
            f"The name of {output} says no format: end it in .jsonl, .csv or .parquet, "
            f"or choose with --format {'|'.join(WRITERS)}."
        )
    return chosen


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _rows(runs: list[RunFolder], damage: Damage, *, all_attempts: bool) -> Iterator[ExportRow]:
    for run in runs:
        for row in all_rows(run, damage) if all_attempts else current_rows(run, damage):
            yield ExportRow(run.id, row)


def _tell_damage(damage: Damage) -> None:
    """An export that lacks rows must not look complete."""
    if damage.corrupt or damage.unnamed_rows:
        lost = counted(damage.corrupt + damage.unnamed_rows, "damaged record")
        note(f"{lost} left out: `nodetrack journal verify` names the files.")
    for problem in damage.problems:
        note(problem)


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or the named file, which changes in one instant and only if all went well."""
    if output is None:
        yield sys.stdout.buffer
        return
    if not output.parent.is_dir() or output.is_dir():
        raise UsageError(f"{output} cannot be written: name a file in a folder that exists.")
    temporary = output.with_name(f".{output.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
