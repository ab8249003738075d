"""What all commands share: the options that name a place, and how an error or an interruption ends them."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, ParamSpec

import typer

from nodetrack.errors import NodetrackError, UsageError

if TYPE_CHECKING:
    from nodetrack.journal.folder import RunFolder, TrackingFolder

DONE: Final = 0
FOUND_WRONG: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130
_MOST_IDS: Final = 5

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id or its beginning, display name, or role-uid.")
]
RunNames = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Run ids or their beginnings, display names, or role-uids."),
]
Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="FOLDER", help="Tracking folder. Default: NODETRACK_DIR or the setting."),
]
Project = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="Only this project. Default: every project.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print strict JSON with stable keys.")]

Parameters = ParamSpec("Parameters")


def open_folder(given: Path | None) -> TrackingFolder:
    """The tracking folder to read. Raises UsageError when a folder was named that does not exist."""
    from nodetrack.journal.folder import TrackingFolder

    if given is not None:
        if not given.is_dir():
            raise UsageError(
                f"There is no folder {given.absolute()}: --dir takes the one that holds the journals."
            )
        return TrackingFolder(given)
    from nodetrack.settings import resolve

    return TrackingFolder(resolve().settings.dir)


def find_run(tracking: TrackingFolder, reference: str, project: str | None) -> RunFolder:
    """The run that is meant, with a remark if others have that name. Raises RunNotFoundError."""
    meant, *others = tracking.find_all(reference, project)
    if others:
        ids = [run.id for run in others[:_MOST_IDS]]
        more = f" and {len(others) - len(ids)} more" if len(others) > len(ids) else ""
        note(f"{reference!r} is taken to be run {meant.id}; it is also the name of {', '.join(ids)}{more}.")
    return meant


def compiled(pattern: str | None) -> re.Pattern[str]:
    """The regular expression; it fits everything if none is given. Raises UsageError for a broken one."""
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise UsageError(f"{pattern!r} is no regular expression: {error}.") from None


def ends_well(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Tell an error in one sentence, and end quietly when the reader of the output or the user has enough."""

    @functools.wraps(function)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        try:
            function(*arguments, **options)
            sys.stdout.flush()
        except NodetrackError as error:
            fail(str(error))
        except BrokenPipeError:
            _leave_closed_pipe()
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}." if error.filename else f"{error}.")
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return run


def fail(message: str) -> None:
    """End with one sentence on standard error. Raises typer.Exit."""
    note(message)
    raise typer.Exit(WRONG_USE)


def note(message: str) -> None:
    """A remark for the person, on standard error never taken for the result, and without secrets."""
    from nodetrack.redact import redact_text

    typer.echo(f"nodetrack: {redact_text(message)}", err=True)


def _leave_closed_pipe() -> None:
    """The reader has enough, as `head` has: nobody wants the rest, nor a word about Python's last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(DONE)
