"""What `nodetrack sync` is to do: which runs, which of their attempts, and to which backends."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from nodetrack.backends.base import BackendConfig
from nodetrack.backends.factory import backend_class, kind_of, known_kinds, parse_backends
from nodetrack.cli.command import find_run, note
from nodetrack.cli.terminal import counted
from nodetrack.delivery.account import has_grown_beyond
from nodetrack.errors import NodetrackError, RunNotFoundError, UsageError
from nodetrack.invalid import reason, shown
from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.folder import RunFolder, TrackingFolder
from nodetrack.journal.recover import attempt_folders, attempt_number, recover
from nodetrack.settings import (
    BackendList,
    Backends,
    Written,
    environment,
    resolve,
    resolve_backends,
    with_options,
)

__all__ = ["Written"]


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


class Planner:
    """Finds the jobs, and those of runs that begin later. `unusable` counts the backends of runs that cannot
    be sent to as things are: each was told in a remark.
    """

    def __init__(
        self,
        tracking: TrackingFolder,
        names: Sequence[str],
        project: str | None,
        given: str | None,
        attempts: Sequence[str],
    ) -> None:
        self.jobs: list[Job] = []
        self.unusable = 0
        self._tracking, self._names, self._project = tracking, names, project
        self._written = written_backends(given)
        self._configured = Backends() if given is not None else configured_backends()
        self._attempts = attempts
        self._known: set[Path] = set()

    def plan(self) -> list[Job]:
        """The jobs. Raises UsageError where there are none, RunNotFoundError, or what is wrong with a
        backend's name or options.
        """
        runs = self._new_runs()
        if not runs:
            raise UsageError(self._tracking.nothing_there(self._project))
        _check_attempts(self._attempts, runs)
        if not self._jobs_of(runs) and not self.unusable:
            raise UsageError(
                "Nothing says where to send the rows: name backends with --backends or NODETRACK_BACKENDS."
            )
        return self.jobs

    def look(self) -> list[Job]:
        """The jobs of runs that have begun since the last look."""
        return self._jobs_of(self._new_runs())

    def _new_runs(self) -> list[RunFolder]:
        runs = choose_runs(tracking_folders(self._tracking), self._names, self._project)
        return [run for run in runs if run.folder not in self._known]

    def _jobs_of(self, runs: Sequence[RunFolder]) -> list[Job]:
        found: list[Job] = []
        nowhere = 0
        for run in runs:
            self._known.add(run.folder)
            ids = choose_attempts(run, self._attempts)
            configs = [] if ids == () else self._configs(run)
            nowhere += configs is None
            found += [Job(run, _name(run), config, ids) for config in configs or ()]
        if nowhere:
            note(f"Never sent anywhere so far: {counted(nowhere, 'run')}. --backends says where to.")
        self.jobs += found
        return found

    def _configs(self, run: RunFolder) -> list[BackendConfig] | None:
        """The backends to send the run to; None if nothing names any. One of an earlier time may be unusable
        by now, which costs no other.
        """
        recorded = {kind: cursor.config for kind, cursor in read_cursors(run.folder).items()}
        asked_for = self._configured if self._written is None else self._written
        sent_before = Backends(recorded.values(), f"an earlier time that {run.id} was sent")
        if not asked_for and not sent_before:
            return None
        entries = with_options(asked_for, [sent_before]) if asked_for else sent_before
        take_variables_from_dotenv(entries)
        parsed = parse_backends(entries).values() if asked_for else self._recorded_configs(entries)
        is_named = self._written is not None
        return [config for config in parsed if _is_delivered_to(config, is_named=is_named)]

    def _recorded_configs(self, entries: Backends) -> Iterator[BackendConfig]:
        for entry, origin in zip(entries, entries.origins, strict=True):
            try:
                yield from parse_backends(Backends([entry], origin)).values()
            except NodetrackError as error:  # the others are sent all the same
                self.unusable += 1
                note(str(error))


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


def _check_attempts(wanted: Sequence[str], runs: Sequence[RunFolder]) -> None:
    """Raises UsageError for an attempt that no run has."""
    ids = {folder.name for run in runs for folder in attempt_folders(run.folder)}
    known = ids | {str(attempt_number(name)) for name in ids}
    for word in wanted:
        if word not in known:
            named = " or ".join(run.id for run in runs)
            raise UsageError(f"There is no attempt {word!r} of {named}; `nodetrack show` lists them.")


# -- backends ------------------------------------------------------------------------------------------


def written_backends(given: str | None) -> Backends | None:
    """What `--backends` says, names or JSON with options, with the options that the settings have for a name.
    Raises UsageError.
    """
    if given is None:
        return None
    try:
        TypeAdapter(BackendList).validate_python(given)
    except ValidationError as error:
        raise UsageError(
            f"--backends takes names (a,b) or a JSON list of them and of objects, not {shown(given)}: "
            f"{reason(error.errors()[0])}."
        ) from None
    return resolve_backends(given, "--backends")


def configured_backends() -> Backends:
    """Those of `NODETRACK_BACKENDS` or the setting, with the place that each is from."""
    backends = resolve().settings.backends
    return backends if isinstance(backends, Backends) else Backends(backends)


def _is_delivered_to(config: BackendConfig, *, is_named: bool) -> bool:
    """Whether it is a backend that rows are sent to, and not one that the run itself calls."""
    kind = kind_of(config)
    in_process = backend_class(kind).in_process
    if in_process and is_named:
        note(f"Nothing is sent to the backend {kind!r}: a node calls it itself while it logs.")
    return not in_process


def has_something_to_send(job: Job) -> bool:
    """Whether there may be anything; if not, the backend need not even be asked."""
    cursor = read_cursors(job.run.folder).get(job.backend)
    if cursor is None or cursor.destination != job.config.destination():
        return True
    return has_grown_beyond(job.run.folder, cursor, job.attempts)


def _name(run: RunFolder) -> str:
    return str(recover(run.folder).labels.get("name") or run.id)


def take_variables_from_dotenv(entries: Sequence[Written]) -> None:
    """Credentials may stand in `.env`: what the backends read is set, unless it is already."""
    values = environment()
    kinds = {entry if isinstance(entry, str) else str(entry.get("kind")) for entry in entries}
    for kind in kinds.intersection(known_kinds()):
        for name in backend_class(kind).variables:
            if values.get(name):
                os.environ.setdefault(name, values[name])
