"""`nodetrack sync`: send by hand what the journals hold, as the nodes themselves do.

Exit codes: 0 all is delivered or left to running nodes, 1 something is missing, 2 wrong usage or unknown run,
130 stopped by Ctrl-C (with --follow, which is ended so, 0 or 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console

from nodetrack.cli.command import (
    FOUND_WRONG,
    INTERRUPTED,
    AsJson,
    Folder,
    Project,
    ends_well,
    note,
    open_folder,
)
from nodetrack.cli.delivery_page import Line, delivery_json, print_delivery, print_places, sync_command
from nodetrack.cli.runs import natural
from nodetrack.cli.strict_json import json_text
from nodetrack.cli.sync_display import LiveDisplay, PlainDisplay
from nodetrack.cli.sync_jobs import Job, Planner, has_something_to_send
from nodetrack.cli.sync_sending import End, Sender
from nodetrack.cli.terminal import console, counted
from nodetrack.delivery.account import Account, account_of
from nodetrack.journal.cursor import Cursor, read_cursors
from nodetrack.journal.folder import RunFolder

_MOST_COMMANDS: Final = 5

RunNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN",
        help="Run ids or their beginnings, names, role-uids, or folders of runs. Default: every run.",
    ),
]
Backends = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,…",
        help="Names of backends, or JSON with options. Default: NODETRACK_BACKENDS or the setting, else "
        "where each run was sent before.",
    ),
]
Attempts = Annotated[
    list[str] | None,
    typer.Option(
        "--attempt", metavar="N", help="Only this attempt, by number or id. Repeatable: sent in this order."
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")]
Timeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0, help="Give up after so long. Default: never.")
]


@ends_well
def sync(
    runs: RunNames = None,
    backends: Backends = None,
    attempts: Attempts = None,
    follow: Follow = False,
    timeout: Timeout = None,
    project: Project = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Send what the backends do not have yet of some runs, or of all. What was sent is not sent again."""
    planner = Planner(open_folder(folder), runs or (), project, backends, attempts or ())
    jobs = planner.plan()
    screen = Console(stderr=True, highlight=False, emoji=False, markup=False)
    with LiveDisplay(screen) if screen.is_terminal else PlainDisplay() as display:
        if follow:
            sender = Sender(jobs, display, follow=True, find=None if runs else planner.look)
        else:
            sender = Sender(list(filter(has_something_to_send, jobs)), display)
        end = sender.run(timeout)
    jobs = sorted(planner.jobs, key=lambda job: (natural(job.name), job.run.project, job.run.id))
    lines = [Line(job.run, job.name, _account(job)) for job in jobs]
    if as_json:
        typer.echo(json_text(_as_json(lines)))
    elif lines:
        print_delivery(console(), lines)
        print_places(console(), [line.account for line in lines], of_one_run=False)
    incomplete = [line for line in lines if not line.account.is_complete]
    _tell_what_is_left(incomplete, end)
    incomplete = [line for line in incomplete if not _is_left_to_node(line)]
    if end == "stopped by Ctrl-C" and not follow:
        raise typer.Exit(INTERRUPTED)
    if incomplete or planner.unusable:
        raise typer.Exit(FOUND_WRONG)


def _account(job: Job) -> Account:
    """What the backend has now, where it was to be sent, of the attempts that were to be. A running node may
    go on sending elsewhere.
    """
    cursor, place = read_cursors(job.run.folder).get(job.backend), job.config.destination()
    if cursor is None or cursor.destination != place:
        cursor = Cursor(backend=job.backend, destination=place)
    return account_of(job.run.folder, cursor, job.attempts)


def _as_json(lines: Sequence[Line]) -> dict[str, object]:
    found: dict[RunFolder, list[Line]] = {}
    for line in lines:
        found.setdefault(line.run, []).append(line)
    return {
        "runs": [
            {
                "project": run.project,
                "run": run.id,
                "name": of_run[0].name,
                "backends": delivery_json(line.account for line in of_run),
            }
            for run, of_run in found.items()
        ],
        "complete": all(line.account.is_complete for line in lines),
    }


def _is_left_to_node(line: Line) -> bool:
    """Whether the run's own delivery is at it, and well."""
    return line.account.state == "sending"


def _tell_what_is_left(incomplete: Sequence[Line], end: End) -> None:
    """The commands that send it, on standard error: they are no part of the table."""
    if end != "done":
        note(f"Sending was ended: {end}.")
    left = [line for line in incomplete if _is_left_to_node(line)]
    incomplete = [line for line in incomplete if line not in left]
    if left:
        rows, nodes = sum(line.account.missing_rows for line in left), len({line.run for line in left})
        who = "the running node" if nodes == 1 else f"{nodes} running nodes"
        note(f"{counted(rows, 'row')} {'is' if rows == 1 else 'are'} left to {who}.")
    runs = list(dict.fromkeys(line.run for line in incomplete))
    if runs:
        rows = sum(line.account.missing_rows for line in incomplete)
        note(f"{counted(rows, 'row')} of {counted(len(runs), 'run')} not delivered. To send the rest:")
    for run in runs[:_MOST_COMMANDS]:
        typer.echo(f"  {sync_command(run)}", err=True)
    if len(runs) > _MOST_COMMANDS:
        typer.echo(f"  and {len(runs) - _MOST_COMMANDS} more", err=True)
