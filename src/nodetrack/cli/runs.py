"""`nodetrack runs`: the runs of a folder as a list that can be filtered and sorted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, get_args

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from nodetrack.cli.command import AsJson, Folder, Project, compiled, ends_well, note, open_folder
from nodetrack.cli.strict_json import json_text
from nodetrack.cli.terminal import ago, console, moment, printable, state_text, table
from nodetrack.errors import UsageError
from nodetrack.journal.folder import RunOverview, State
from nodetrack.version import matches, version_key

_STATES: Final[tuple[str, ...]] = get_args(State)
_USUAL_ENVIRONMENT: Final = "prod"


# ---------------------------------------------------------------------------------------------------
# Columns


class Column(NamedTuple):
    """How one column is titled, filled, ordered and laid out."""

    title: str
    cell: Callable[[RunOverview], str | Text]
    order: Callable[[RunOverview], object]
    is_number: bool = False
    may_break: bool = False


def _natural(text: str) -> list[tuple[int, int, str]]:
    """An order in which miner-9 stands before miner-10."""
    parts = re.split(r"([0-9]+)", text)
    return [(0, int(part), "") if index % 2 else (1, 0, part) for index, part in enumerate(parts)]


def _text(field: str, *, may_break: bool = False) -> Column:
    def cell(run: RunOverview) -> str:
        return printable(str(getattr(run, field) or ""))

    return Column(field.replace("_", " "), cell, lambda run: _natural(cell(run)), may_break=may_break)


def _count(field: str) -> Column:
    return Column(field, lambda run: str(getattr(run, field)), lambda run: getattr(run, field), True)


def _words(field: str) -> Column:
    def cell(run: RunOverview) -> str:
        return printable(" ".join(getattr(run, field)))

    return Column(field, cell, cell, may_break=True)


_COLUMNS: Final[Mapping[str, Column]] = {
    "run": _text("run"),
    "name": _text("name", may_break=True),
    "role": _text("role"),
    "uid": _text("uid"),
    "state": Column("state", lambda run: state_text(run.state), lambda run: _STATES.index(run.state)),
    "version": Column("version", lambda run: run.version, lambda run: version_key(run.version)),
    "attempts": _count("attempts"),
    "step": _count("step"),
    "last_seen": Column("last seen", lambda run: ago(run.last_sign_ns), lambda run: -run.last_sign_ns, True),
    "tags": _words("tags"),
    "project": _text("project"),
    "environment": _text("environment"),
    "group": _text("group", may_break=True),
    "job_type": _text("job_type", may_break=True),
    "started": Column("started", lambda run: moment(run.started_ns), lambda run: run.started_ns),
    "reason": _text("reason", may_break=True),
    "versions": _words("versions"),
    "notes": _text("notes", may_break=True),
    "previous_run": _text("previous_run"),
}
_USUAL_COLUMNS: Final = tuple(_COLUMNS)[:10]


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
    chosen = [_column_name(text) for text in columns.split(",")] if columns else list(_USUAL_COLUMNS)
    order = _order(sort)
    wanted = _filter(state or (), role, tag or (), group, version, name)
    tracking = open_folder(folder)
    all_runs = [run.overview() for run in tracking.runs(project)]
    if not all_runs:
        note(f"There are no runs in {tracking.folder}: give another folder with --dir or NODETRACK_DIR.")
    shown, left_out = _of_environment(filter(wanted, all_runs), None if all_environments else environment)
    shown = order(shown)
    if as_json:
        typer.echo(json_text(_as_json(shown, left_out)))
    else:
        _print(shown, left_out, chosen, with_environment=all_environments and not columns)


def _order(sort: str) -> Callable[[list[RunOverview]], list[RunOverview]]:
    """Sorts by a column; runs that are equal there stand by name, project and id."""
    column = _COLUMNS[_column_name(sort.removeprefix("-"))]
    turned = sort.startswith("-")

    def ordered(runs: list[RunOverview]) -> list[RunOverview]:
        by_name = sorted(runs, key=lambda run: (_natural(run.name), run.project, run.run))
        return sorted(by_name, key=lambda run: (column.order(run),), reverse=turned)

    return ordered


def _filter(
    states: Sequence[str],
    role: str | None,
    tags: Sequence[str],
    group: str | None,
    version: str | None,
    name: str | None,
) -> Callable[[RunOverview], bool]:
    """Whether a run is wanted. Raises UsageError or SettingsError for a filter that means nothing."""
    for state in states:
        if state not in _STATES:
            raise UsageError(f"There is no state {state!r}; a run is {', '.join(_STATES)}.")
    matches("0", version or "")  # a filter that cannot be read is told even where there are no runs
    pattern = compiled(name)

    def wanted(run: RunOverview) -> bool:
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
    runs: Iterable[RunOverview], environment: str | None
) -> tuple[list[RunOverview], Counter[str]]:
    """The runs of one environment (None: of all), and how many of each other are left out."""
    shown, left_out = [], Counter[str]()
    for run in runs:
        if environment in (None, run.environment):
            shown.append(run)
        else:
            left_out[run.environment] += 1
    return shown, left_out


def _as_json(shown: Sequence[RunOverview], left_out: Counter[str]) -> dict[str, object]:
    return {
        "runs": [msgspec.to_builtins(run) for run in shown],
        "left_out_environments": dict(sorted(left_out.items())),
    }


def _print(
    shown: Sequence[RunOverview], left_out: Counter[str], chosen: list[str], *, with_environment: bool
) -> None:
    screen = console()
    if len({run.project for run in shown}) > 1 and "project" not in chosen:
        chosen = ["project", *chosen]
    if with_environment:
        chosen = [*chosen, "environment"]
    if shown:
        screen.print(_table(shown, [_COLUMNS[name] for name in chosen]))
    if left_out:
        screen.print(Text(_left_out_line(left_out), style="dim"))


def _table(shown: Sequence[RunOverview], columns: Sequence[Column]) -> Table:
    listed = table()
    for column in columns:
        listed.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=not column.may_break,
            overflow="fold",
        )
    for run in shown:
        listed.add_row(*(column.cell(run) for column in columns))
    return listed


def _left_out_line(left_out: Counter[str]) -> str:
    kinds = ", ".join(f"{count} of {printable(word)}" for word, count in sorted(left_out.items()))
    runs = "1 run" if left_out.total() == 1 else f"{left_out.total()} runs"
    return f"{runs} of other environments left out ({kinds}): --all-environments shows them."
