"""What `nodetrack sync` is to do: which runs, which of their attempts, and to which backends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from nodetrack.backends.base import BackendConfig
from nodetrack.backends.factory import backend_class, kind_of, parse_backends
from nodetrack.cli.command import find_run, note
from nodetrack.cli.terminal import counted
from nodetrack.errors import NodetrackError, RunNotFoundError, UsageError
from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.recover import attempt_folders, attempt_number, recover
from nodetrack.settings import BackendList, resolve

Written = str | Mapping[str, object]


class Job(NamedTuple):
    """One run to one backend. `attempts`: the ids of those that are sent, in this order; None: all."""

    run: RunFolder
    name: str
    config: BackendConfig
    attempts: tuple[str, ...] | None

    @property
    def backend(self) -> str:
        """The backend's kind."""
        return kind_of(self.config)


class Plan(NamedTuple):
    """The jobs, and how many backends cannot be sent to as things are: each was told in a remark."""

    jobs: list[Job]
    unusable: int


# -- runs ----------------------------------------------------------------------------------------------


def choose_runs(
    folders: Sequence[TrackingFolder], names: Sequence[str], project: str | None
) -> list[RunFolder]:
    """The runs that are named, or all. A name may be the path of a run's folder. Raises RunNotFoundError."""
    if names:
        found = [_find(folders, name, project) for name in names]
    else:
        found = [run for tracking in folders for run in tracking.runs(project)]
    return list({run.folder.absolute(): run for run in found}.values())


def tracking_folders(given: TrackingFolder) -> list[TrackingFolder]:
    """The folder itself if it holds runs, else every tracking folder below it."""
    if given.projects() or not given.folder.is_dir():
        return [given]
    holders = {runs.parent.parent for runs in given.folder.rglob("runs") if runs.is_dir()}
    found = [TrackingFolder(folder) for folder in sorted(holders)]
    return [tracking for tracking in found if tracking.runs()] or [given]


def _find(folders: Sequence[TrackingFolder], name: str, project: str | None) -> RunFolder:
    path = Path(name)
    if os.sep in name and attempt_folders(path):
        return RunFolder(path.absolute(), _project_of(path))
    for tracking in folders[:-1]:
        try:
            return find_run(tracking, name, project)
        except RunNotFoundError:
            continue
    return find_run(folders[-1], name, project)


def _project_of(path: Path) -> str:
    """What the journal says; a run's folder that was copied alone is below no project's."""
    facts = RunFolder(path, "").attempts[-1].facts
    return str(facts.get("project") or unquote(path.absolute().parent.parent.name))


def choose_attempts(run: RunFolder, wanted: Sequence[str]) -> tuple[str, ...] | None:
    """The ids of the attempts that are wanted by number or id, in this order; None if all are."""
    if not wanted:
        return None
    there = [folder.name for folder in attempt_folders(run.folder)]
    found = [name for word in wanted for name in there if word in (name, str(attempt_number(name)))]
    return tuple(dict.fromkeys(found))


# -- backends ------------------------------------------------------------------------------------------


def written_backends(given: str | None) -> tuple[Written, ...] | None:
    """What `--backends` says: names, or JSON with options. Raises UsageError."""
    if given is None:
        return None
    text = f"[{given}]" if given.lstrip().startswith("{") else given
    try:
        return TypeAdapter(BackendList).validate_python(text)
    except (ValidationError, ValueError):
        raise UsageError(
            f"--backends takes names (a,b) or a JSON list of them and of objects, not {given!r}."
        ) from None


def make_plan(runs: Sequence[RunFolder], given: str | None, attempts: Sequence[str]) -> Plan:
    """A job for each run and backend. Raises UsageError, or what a backend's own name or options raise."""
    written, configured = written_backends(given), resolve().settings.backends
    jobs: list[Job] = []
    unusable = nowhere = 0
    chosen = {run: choose_attempts(run, attempts) for run in runs}
    _check_attempts(attempts, chosen)
    for run, ids in chosen.items():
        if ids == ():
            continue
        recorded = {kind: cursor.config for kind, cursor in read_cursors(run.folder).items()}
        entries = written if written is not None else configured or tuple(recorded.values())
        is_recorded = written is None and not configured
        nowhere += not entries
        for config in _configs(_with_options(entries, configured, recorded), skip_unusable=is_recorded):
            unusable += config is None
            if config is not None and _is_delivered_to(config, is_named=written is not None):
                jobs.append(Job(run, _name(run), config, ids))
    if not jobs and not unusable:
        raise UsageError(
            "Nothing says where to send the rows: name backends with --backends or NODETRACK_BACKENDS."
        )
    if nowhere:
        note(f"Never sent anywhere so far: {counted(nowhere, 'run')}. --backends says where to.")
    return Plan(jobs, unusable)


def _check_attempts(wanted: Sequence[str], chosen: Mapping[RunFolder, tuple[str, ...] | None]) -> None:
    """Raises UsageError for an attempt that no run has."""
    found = {name for ids in chosen.values() for name in ids or ()}
    known = found | {str(attempt_number(name)) for name in found}
    for word in wanted:
        if word not in known:
            runs = " or ".join(run.id for run in chosen)
            raise UsageError(f"There is no attempt {word!r} of {runs}; `nodetrack show` lists them.")


def _with_options(
    entries: Sequence[Written], configured: Sequence[Written], recorded: Mapping[str, Mapping[str, Any]]
) -> Iterator[Written]:
    """A bare name stands for the options that the settings have for it, else for those it was sent with."""
    options = {str(entry.get("kind")): entry for entry in configured if isinstance(entry, Mapping)}
    for entry in entries:
        yield options.get(entry) or recorded.get(entry) or entry if isinstance(entry, str) else entry


def _configs(entries: Iterator[Written], *, skip_unusable: bool) -> Iterator[BackendConfig | None]:
    if not skip_unusable:
        yield from parse_backends(list(entries)).values()
        return
    for entry in entries:
        try:
            yield from parse_backends([entry]).values()
        except NodetrackError as error:  # the others are sent all the same
            note(str(error))
            yield None


def _is_delivered_to(config: BackendConfig, *, is_named: bool) -> bool:
    """Whether it is a backend that rows are sent to, and not one that the run itself calls."""
    kind = kind_of(config)
    in_process = backend_class(kind).in_process
    if in_process and is_named:
        note(f"Nothing is sent to the backend {kind!r}: a node calls it itself while it logs.")
    return not in_process


def _name(run: RunFolder) -> str:
    return str(recover(run.folder).labels.get("name") or run.id)


def take_variables_from_dotenv(jobs: Sequence[Job]) -> None:
    """Credentials may stand in `.env`: what the backends read is set, unless it is already."""
    from dotenv import dotenv_values

    names = {name for job in jobs for name in backend_class(job.backend).variables}
    try:
        values = dotenv_values(".env")
    except (OSError, ValueError):  # another program's, or no UTF-8
        return
    for name in names - os.environ.keys():
        if values.get(name):
            os.environ[name] = str(values[name])
