"""`nodetrack runs`: the runs of a folder as a list that can be filtered and sorted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, get_args

import msgspec
import typer
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from nodetrack.cli.command import AsJson, Folder, Project, compiled, ends_well, note, open_folder
from nodetrack.cli.strict_json import json_text
from nodetrack.cli.terminal import (
    COLUMN_GAP,
    ago,
    console,
    counted,
    least_width,
    moment,
    print_table,
    printable,
    state_text,
    table,
)
from nodetrack.delivery.account import undelivered
from nodetrack.errors import UsageError
from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.folder import RunFolder, RunOverview, State
from nodetrack.version import matches, version_key

_STATES: Final[tuple[str, ...]] = get_args(State)
_USUAL_ENVIRONMENT: Final = "prod"


class ListedRun(RunOverview, frozen=True, kw_only=True):
    """A run, how many rows the backend that is furthest behind lacks, and how many one will never have,
    because they were removed before; None if it was never sent. What a running node is sending is no lack.
    """

    undelivered: int | None = None
    lost: int | None = None


def _listed(run: RunFolder) -> ListedRun:
    found = [undelivered(run.folder, cursor) for cursor in read_cursors(run.folder).values()]
    return ListedRun(
        **msgspec.structs.asdict(run.overview()),
        undelivered=max((backend.rows for backend in found), default=None),
        lost=max((backend.lost for backend in found), default=None),
    )


# ---------------------------------------------------------------------------------------------------
# Columns


class Column(NamedTuple):
    """How one column is titled (in the notation of `terminal.table`), filled and ordered."""

    title: str
    cell: Callable[[ListedRun], str | Text]
    order: Callable[[ListedRun], object]


def natural(text: str) -> list[tuple[int, int, str]]:
    """An order in which miner-9 stands before miner-10."""
    parts = re.split(r"([0-9]+)", text)
    return [(0, int(part), "") if index % 2 else (1, 0, part) for index, part in enumerate(parts)]


def _text(field: str, layout: str = "") -> Column:
    def cell(run: ListedRun) -> str:
        return printable(str(getattr(run, field) or ""))

    return Column(field.replace("_", " ") + layout, cell, lambda run: natural(cell(run)))


def _count(field: str) -> Column:
    return Column(f"{field}>", lambda run: str(getattr(run, field)), lambda run: getattr(run, field))


def _words(field: str) -> Column:
    def cell(run: ListedRun) -> str:
        return printable(" ".join(getattr(run, field)))

    return Column(f"{field}~", cell, cell)


def _rows(field: str, style: str) -> Column:
    """Empty for a run that was never sent anywhere."""

    def cell(run: ListedRun) -> str | Text:
        count = getattr(run, field)
        return Text(str(count), style=style) if count else "" if count is None else "0"

    return Column(f"{field}>", cell, lambda run: getattr(run, field) or 0)


_COLUMNS: Final[Mapping[str, Column]] = {
    "run": _text("run"),
    "name": _text("name", "~"),
    "role": _text("role"),
    "uid": _text("uid"),
    "state": Column("state", lambda run: state_text(run.state), lambda run: _STATES.index(run.state)),
    "version": Column("version", lambda run: run.version, lambda run: version_key(run.version)),
    "attempts": _count("attempts"),
    "step": _count("step"),
    "last_seen": Column("last seen>", lambda run: ago(run.last_seen_ns), lambda run: -run.last_seen_ns),
    "undelivered": _rows("undelivered", "yellow"),
    "lost": _rows("lost", "red"),
    "tags": _words("tags"),
    "project": _text("project"),
    "environment": _text("environment"),
    "group": _text("group", "~"),
    "job_type": _text("job_type", "~"),
    "started": Column("started", lambda run: moment(run.started_ns), lambda run: run.started_ns),
    "reason": _text("reason", "~"),
    "versions": _words("versions"),
    "notes": _text("notes", "~"),
    "previous_run": _text("previous_run"),
}
#: What a narrow terminal goes without, in this order. What is left is who a run is and how it stands.
_DISPENSABLE: Final = (
    "tags",
    "role",
    "uid",
    "attempts",
    "environment",
    "project",
    "step",
    "version",
    "undelivered",
    "lost",
    "last_seen",
)
#: What a long name is left at least: in less, it takes more lines than a list should.
_LEAST_NAME: Final = 24
_USUAL_COLUMNS: Final = tuple(_COLUMNS)[:12]
#: Of no use where no run has any.
_COUNTS: Final = ("undelivered", "lost")


def _column_name(text: str) -> str:
    """The column that a person means. Raises UsageError when there is none."""
    name = text.strip().replace(" ", "_").replace("-", "_")
    if name not in _COLUMNS:
        raise UsageError(f"There is no column {text!r}; there are {', '.join(_COLUMNS)}.")
    return name


# ---------------------------------------------------------------------------------------------------
# The command


@ends_well
def runs(
    project: Project = None,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help=f"Only runs in this state: {', '.join(_STATES)}. Repeatable."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Only live nodes: short for --state running.")] = False,
    role: Annotated[str | None, typer.Option(metavar="ROLE", help="Only nodes of this role.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Only runs with this tag. Repeated: with all.")
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Only runs of this group.")] = None,
    environment: Annotated[
        str, typer.Option(metavar="WORD", help="Only runs of this environment.")
    ] = _USUAL_ENVIRONMENT,
    all_environments: Annotated[
        bool, typer.Option("--all-environments", help="Runs of every environment.")
    ] = False,
    version: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help='Only runs on such a version: ">=0.2", "==0.1.*", ">=1.9,<2".'),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only runs in whose name this is found.")
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column to sort by; -COLUMN turns the order round.")
    ] = "name",
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,…", help=f"What to print, of: {', '.join(_COLUMNS)}.")
    ] = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List the runs: who they are, how they stand, which version they are on, when they were last seen."""
    chosen = [_column_name(text) for text in columns.split(",")] if columns else None
    order = _order(sort)
    wanted = _filter([*(state or ()), *(["running"] if live else [])], role, tag or (), group, version, name)
    tracking = open_folder(folder)
    all_runs = [_listed(run) for run in tracking.runs(project)]
    if not all_runs:
        note(tracking.nothing_there(project))
    shown, left_out = _of_environment(filter(wanted, all_runs), None if all_environments else environment)
    shown = order(shown)
    if as_json:
        typer.echo(json_text(_as_json(shown, left_out)))
    else:
        _print(shown, left_out, chosen, all_environments)


def _order(sort: str) -> Callable[[list[ListedRun]], list[ListedRun]]:
    """Sorts by a column; runs that are equal there stand by name, project and id."""
    column = _COLUMNS[_column_name(sort.removeprefix("-"))]
    turned = sort.startswith("-")

    def ordered(runs: list[ListedRun]) -> list[ListedRun]:
        by_name = sorted(runs, key=lambda run: (natural(run.name), run.project, run.run))
        return sorted(by_name, key=lambda run: (column.order(run),), reverse=turned)

    return ordered


def _filter(
    states: Sequence[str],
    role: str | None,
    tags: Sequence[str],
    group: str | None,
    version: str | None,
    name: str | None,
) -> Callable[[ListedRun], bool]:
    """Whether a run is wanted. Raises UsageError or SettingsError for a filter that means nothing."""
    for state in states:
        if state not in _STATES:
            raise UsageError(f"There is no state {state!r}; a run is {', '.join(_STATES)}.")
    matches("0", version or "")  # a filter that cannot be read is told even where there are no runs
    pattern = compiled(name)

    def wanted(run: ListedRun) -> bool:
        return (
            (not states or run.state in states)
            and role in (None, run.role)
            and set(tags) <= set(run.tags)
            and group in (None, run.group)
            and (version is None or matches(run.version, version))
            and pattern.search(run.name) is not None
        )

    return wanted


def _of_environment(
    runs: Iterable[ListedRun], environment: str | None
) -> tuple[list[ListedRun], Counter[str]]:
    """The runs of one environment (None: of all), and how many of each other are left out."""
    shown, left_out = [], Counter[str]()
    for run in runs:
        if environment in (None, run.environment):
            shown.append(run)
        else:
            left_out[run.environment] += 1
    return shown, left_out


def _as_json(shown: Sequence[ListedRun], left_out: Counter[str]) -> dict[str, object]:
    return {
        "runs": [msgspec.to_builtins(run) for run in shown],
        "left_out_environments": dict(sorted(left_out.items())),
    }


def _print(
    shown: Sequence[ListedRun], left_out: Counter[str], chosen: list[str] | None, all_environments: bool
) -> None:
    screen = console()
    if shown:
        dropped: list[str] = []
        if chosen is None:
            chosen, dropped = _fitting(shown, _usual_columns(shown, all_environments), screen.width)
        print_table(screen, _table(shown, chosen))
        if dropped:
            line = f"Too narrow for {', '.join(dropped)}: --columns chooses what to print."
            screen.print(Text(line, style="dim"))
    if left_out:
        screen.print(Text(_left_out_line(left_out), style="dim"))


def _usual_columns(shown: Sequence[ListedRun], all_environments: bool) -> list[str]:
    several_projects = len({run.project for run in shown}) > 1
    nought = [name for name in _COUNTS if not any(getattr(run, name) for run in shown)]
    return [
        *(["project"] if several_projects else []),
        *(name for name in _USUAL_COLUMNS if name not in nought),
        *(["environment"] if all_environments else []),
    ]


def _fitting(shown: Sequence[ListedRun], columns: list[str], room: int) -> tuple[list[str], list[str]]:
    """The columns that a terminal has room for, and those that it goes without although they say something.

    Better a column less than an id that is cut. A column that is empty in every row goes first.
    """
    widths = {name: least_width(_table(shown, [name])) for name in columns}
    empty = [name for name in columns if not any(map(_COLUMNS[name].cell, shown))]
    kept, dropped = list(columns), []
    for name in [*empty, *_DISPENSABLE]:
        if name in kept and sum(widths[each] + COLUMN_GAP for each in kept) - COLUMN_GAP > room:
            kept.remove(name)
            dropped += [] if name in empty else [name]
    return kept, dropped


def _table(shown: Sequence[ListedRun], chosen: Sequence[str]) -> Table:
    columns = [_COLUMNS[name] for name in chosen]
    listed = table(*(column.title for column in columns))
    for run in shown:
        listed.add_row(*(column.cell(run) for column in columns))
    for name, column in zip(chosen, listed.columns, strict=True):
        if name == "name":
            column.min_width = min(_LEAST_NAME, max(map(cell_len, map(str, column.cells)), default=0))
    return listed


def _left_out_line(left_out: Counter[str]) -> str:
    kinds = ", ".join(f"{count} of {printable(word)}" for word, count in sorted(left_out.items()))
    runs = counted(left_out.total(), "run")
    return f"{runs} of other environments left out ({kinds}): --all-environments shows them."
