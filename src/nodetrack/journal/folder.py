"""Reading a tracking folder: projects, runs, attempts and their state, from the files alone.

Nothing is locked and nothing is written, so it works beside running nodes, on a copy, and after a crash.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard, cast
from urllib.parse import unquote

import msgspec

from nodetrack.aggregate import Aggregates, SummaryKind
from nodetrack.errors import JournalError, RunNotFoundError
from nodetrack.identity.id_file import file_name_part
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import attempt_folders, attempt_number, is_companion, read_header, recover
from nodetrack.journal.segment import segment_number, segment_paths
from nodetrack.journal.shape import are_facts, are_plain
from nodetrack.machine import HostIdentity, process_is_alive, this_host
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    Event,
    JsonValue,
    Record,
    Row,
    StoredValue,
    SummarySet,
    SystemRow,
)
from nodetrack.version import version_key

State = Literal["running", "finished", "crashed", "terminated", "stale"]
_DEFAULT_STALE_SECONDS = 300.0
_BEGINNING_BYTES = 1024 * 1024


class Damage(msgspec.Struct):
    """What could not be read of a run, with the files that it concerns."""

    corrupt: int = 0
    torn_bytes: int = 0
    unnamed_rows: int = 0
    unknown_records: int = 0
    problems: list[str] = []

    def add(self, reader: SegmentReader) -> None:
        """Count what one segment's reader had to leave out."""
        self.corrupt += reader.damage.corrupt
        self.torn_bytes += reader.damage.torn_bytes
        self.unnamed_rows += reader.unnamed_rows
        self.unknown_records += reader.unknown_records


def segment_records(path: Path, damage: Damage | None = None) -> Iterator[Record]:
    """Every record of a segment. A file that is none is named in `damage`; one that was removed since it was
    listed has none.
    """
    reader = SegmentReader(path)
    try:
        yield from reader.read()
    except FileNotFoundError:
        return
    except (JournalError, OSError) as error:
        if damage is not None:
            damage.problems.append(str(error))
    if damage is not None:
        damage.add(reader)


class AttemptState(msgspec.Struct, frozen=True):
    """How an attempt stands: `reason` says more, `ended_ns` is None while it may still log."""

    state: State
    reason: str = ""
    exit_code: int | None = None
    ended_ns: int | None = None


class AttemptFolder:
    """One attempt on disk."""

    def __init__(self, folder: Path, *, is_last: bool) -> None:
        self.folder = folder
        self.id = folder.name
        self.number = attempt_number(folder.name)
        #: Whether no later attempt had begun when this was looked at.
        self.is_last = is_last
        #: The attempt that began next, if there is one.
        self.later: AttemptFolder | None = None

    def records(self, damage: Damage | None = None) -> Iterator[Record]:
        """Every record, segment by segment. A file that is no segment is named in `damage`."""
        for path in segment_paths(self.folder):
            yield from segment_records(path, damage)

    @functools.cached_property
    def facts(self) -> Mapping[str, JsonValue]:
        """What the attempt's record says of process, machine and version. Where it is damaged or removed, the
        file beside it says the same; without that, the headers and the run's file say something of it.
        """
        return (
            self._facts_of_record()
            or _read_json(self.folder / "metadata.json", are_facts)
            or self._facts_of_header()
            or _read_json(self.folder.parent / "run.json", are_facts)
        )

    def _facts_of_record(self) -> Mapping[str, JsonValue]:
        if self.has_beginning:
            with contextlib.suppress(JournalError, OSError):
                for record in SegmentReader(segment_paths(self.folder)[0]).read(limit=_BEGINNING_BYTES):
                    if isinstance(record, AttemptStarted):
                        return {"started_ns": record.time_ns, **record.attempt}
        return {}

    def _facts_of_header(self) -> Mapping[str, JsonValue]:
        for path in segment_paths(self.folder):
            header = read_header(path)
            if header is not None:
                facts = cast("dict[str, JsonValue]", msgspec.to_builtins(header))
                return {"started_ns": header.created_ns, **facts}
        return {}

    @property
    def has_beginning(self) -> bool:
        """Whether the first segment is still there, which says how the attempt began."""
        return any(segment_number(path.name) == 1 for path in segment_paths(self.folder)[:1])

    def removed(self) -> tuple[Mapping[str, JsonValue], Mapping[str, JsonValue]]:
        """Of an attempt whose first segment was removed: the config that it began with, and what was set in
        the summary by hand before the rows that are left. Both {} where nothing was removed.
        """
        if self.has_beginning:
            return {}, {}
        config = _read_json(self.folder / "config.json", are_plain)
        for path in segment_paths(self.folder):
            header = read_header(path)
            if header is not None and not header.companion:
                return config, cast("dict[str, JsonValue]", header.summary)
        return config, {}

    @property
    def version(self) -> str:
        """The version of the code that ran."""
        return str(self.facts.get("version", "unknown"))

    @property
    def started_ns(self) -> int:
        """When the process started the attempt."""
        return cast("int", self.facts.get("started_ns", 0))

    @property
    def starting_step(self) -> int | None:
        """Where the attempt logs from: behind the run's highest step, or where it went back to at first. None
        where the segment that says so was removed.
        """
        for path in segment_paths(self.folder)[:1]:
            header = read_header(path)
            if not self.has_beginning:  # the samples of the machine begin with the attempt as well
                return header.step if header is not None and header.companion else None
            step = 0 if header is None else header.step
            return [step, *_steps_gone_back_to(path)][-1]
        return 0

    @property
    def last_seen_ns(self) -> int:
        """When the attempt last wrote anything or showed a sign of life, by the clock of the file system."""
        times = [self.started_ns]
        own = [path for path in segment_paths(self.folder)[-3:] if not is_companion(path)]
        for path in (*own, self.folder / "heartbeat"):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime_ns)
        return max(times)

    def state(self, finish: AttemptFinished | None) -> AttemptState:
        """How the attempt stands, given its finish record if one was found."""
        if finish is not None:
            state = cast("State", finish.state)
            return AttemptState(state, finish.reason, finish.exit_code, finish.time_ns)
        if self._process_is_gone():
            return AttemptState(
                "crashed", "killed: the process ended without a word", None, self.last_seen_ns
            )
        silent_seconds = (time.time_ns() - self.last_seen_ns) / 1e9
        if silent_seconds > self._stale_after_seconds:
            return AttemptState("stale", f"no sign of life for {silent_seconds:.0f} s")
        return AttemptState("running")

    @property
    def is_running(self) -> bool:
        """Whether it may still log, as far as can be known."""
        return self.state(self.finish_record()).state == "running"

    @property
    def _stale_after_seconds(self) -> float:
        return cast("float", self.facts.get("stale_after_seconds", _DEFAULT_STALE_SECONDS))

    def _process_is_gone(self) -> bool:
        """Whether the process is known to have ended: it ran here and is gone, or a later attempt began."""
        process = self.facts.get("process")
        if isinstance(process, Mapping) and self.is_of_this_machine:
            return self._process_here_is_gone(cast("int", process["pid"]))
        return not self.is_last

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its process, if there still is one, can be seen from here."""
        host = self.facts.get("host")
        if isinstance(host, Mapping):
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(host, HostIdentity).shares_processes_with(this_host())
        return False

    def _process_here_is_gone(self, pid: int) -> bool:
        """Whether the process, which ran on this machine, is gone or has gone on as another attempt
        (`exec`).
        """
        if self._same_process_as(self.later):
            return True
        created, ticks = self.facts.get("process_created_at"), self.facts.get("process_start_ticks")
        if not isinstance(created, int | float) and not isinstance(ticks, int):
            return not self.is_last  # without either, another process may have the number by now
        return not process_is_alive(
            pid,
            created if isinstance(created, int | float) else 0.0,
            ticks if isinstance(ticks, int) else None,
        )

    def _same_process_as(self, other: AttemptFolder | None) -> bool:
        keys = ("process_start_ticks", "process_created_at", "host")
        mine = [self.facts.get(key) for key in keys]
        return other is not None and any(mine) and mine == [other.facts.get(key) for key in keys]

    def finish_record(self) -> AttemptFinished | None:
        """The finish record, looked for at the ends of the segments."""
        for path in reversed(segment_paths(self.folder)):
            with contextlib.suppress(OSError):
                record = SegmentReader(path).read_finish()
                if record is not None:
                    return record
        return None


def _read_json(
    path: Path, fits: Callable[[object], TypeGuard[Mapping[str, JsonValue]]]
) -> Mapping[str, JsonValue]:
    """One of the files that say the same as records of the journal; {} where it cannot be used."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        entries = msgspec.json.decode(path.read_bytes())
        return entries if fits(entries) else {}
    return {}


def _steps_gone_back_to(path: Path) -> Iterator[int]:
    """The steps that an attempt went back to before it logged its first row."""
    with contextlib.suppress(JournalError, OSError):
        for record in SegmentReader(path).read(limit=_BEGINNING_BYTES):
            if isinstance(record, Row):
                return
            if isinstance(record, Event) and record.name == "rewind":
                step = record.data.get("step")
                if isinstance(step, int):
                    yield step + 1


class RunOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A run in one line: what `nodetrack runs` lists."""

    project: str
    run: str
    name: str
    role: str
    uid: str
    environment: str
    state: State
    reason: str
    version: str
    versions: tuple[str, ...]
    attempts: int
    step: int
    started_ns: int
    last_seen_ns: int
    tags: tuple[str, ...] = ()
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    previous_run: str | None = None


class Series(NamedTuple):
    """What has one value a step: a metric in a context, whose pairs are sorted."""

    metric: str
    context: tuple[tuple[str, str], ...] = ()


class RunDetail(msgspec.Struct, kw_only=True):
    """A run as `nodetrack show` tells it; filled by one pass over its records."""

    overview: RunOverview
    attempts: list[tuple[AttemptFolder, AttemptState]]
    rows: int = 0
    config_history: list[tuple[str, int, Mapping[str, JsonValue]]] = []
    summary: dict[str, JsonValue] = {}
    #: The newest values that each attempt logged.
    last_by_attempt: dict[str, dict[Series, StoredValue]] = {}
    events: list[tuple[str, Event]] = []
    #: The newest sample of the machine.
    system: SystemRow | None = None
    nonfinite: dict[str, int] = {}
    damage: Damage = msgspec.field(default_factory=Damage)

    @property
    def last_by_version(self) -> dict[str, dict[str, StoredValue]]:
        """The newest values that each version logged, by metric: of several contexts, the last to come."""
        found: dict[str, dict[str, StoredValue]] = {}
        for attempt, _ in self.attempts:
            of_version = found.setdefault(attempt.version, {})
            for series, value in self.last_by_attempt.get(attempt.id, {}).items():
                of_version[series.metric] = value
        return {version: values for version, values in found.items() if values}


class RunFolder:
    """One run on disk."""

    def __init__(self, folder: Path, project: str) -> None:
        self.folder = folder
        self.project = project
        self.id = folder.name

    @property
    def attempts(self) -> list[AttemptFolder]:
        """The attempts, first to last."""
        folders = attempt_folders(self.folder)
        attempts = [AttemptFolder(folder, is_last=folder == folders[-1]) for folder in folders]
        for attempt, later in pairwise(attempts):
            attempt.later = later
        return attempts

    def overview(self) -> RunOverview:
        """The run in one line, from the ends of its journal."""
        attempts = self.attempts
        recovered = recover(self.folder)
        last = attempts[-1]
        state = last.state(last.finish_record())
        labels = recovered.labels
        versions = dict.fromkeys(attempt.version for attempt in attempts)
        return RunOverview(
            project=self.project,
            run=self.id,
            name=str(labels.get("name") or self.id),
            role=str(last.facts.get("role", "")),
            uid=str(last.facts.get("uid", "")),
            environment=str(last.facts.get("environment", "prod")),
            state=state.state,
            reason=state.reason,
            version=last.version,
            versions=tuple(sorted(versions, key=version_key)),
            attempts=len(attempts),
            step=recovered.step,
            started_ns=attempts[0].started_ns,
            last_seen_ns=last.last_seen_ns,
            tags=tuple(cast("list[str]", labels.get("tags") or ())),
            group=cast("str | None", labels.get("group")),
            job_type=cast("str | None", labels.get("job_type")),
            notes=cast("str | None", labels.get("notes")),
            previous_run=cast("str | None", last.facts.get("previous_run")),
        )

    def detail(self) -> RunDetail:
        """Everything about the run but its rows, from one pass over the whole journal."""
        detail = RunDetail(overview=self.overview(), attempts=[])
        aggregates = Aggregates()
        explicit: dict[str, JsonValue] = {}
        for attempt in self.attempts:
            finish, newest = None, _Newest(detail.nonfinite)
            config, summary = attempt.removed()
            if config:
                detail.config_history.append((attempt.id, attempt.started_ns, config))
            explicit.update(summary)
            for record in attempt.records(detail.damage):
                if isinstance(record, Row):
                    detail.rows += 1
                    newest.see(record)
                    if aggregates:
                        aggregates.see(record.items())
                elif isinstance(record, SystemRow):
                    detail.system = record
                elif isinstance(record, AttemptFinished):
                    finish = record
                elif isinstance(record, ConfigSet):
                    detail.config_history.append((attempt.id, record.time_ns, record.config))
                elif isinstance(record, SummarySet):
                    explicit.update(record.summary)
                elif isinstance(record, Event):
                    detail.events.append((attempt.id, record))
                    _define(aggregates, record)
            detail.attempts.append((attempt, attempt.state(finish)))
            detail.last_by_attempt[attempt.id] = newest.values()
        detail.summary = _summary(detail, aggregates, explicit)
        return detail


class _Newest:
    """The newest value of each series of one attempt, and how many were not finite.

    Rows that look alike share their names and context within a segment: one row of each look is kept.
    """

    def __init__(self, nonfinite: dict[str, int]) -> None:
        self._nonfinite = nonfinite
        self._rows: dict[tuple[int, int], Row] = {}

    def see(self, row: Row) -> None:
        look = id(row.names), id(row.context)  # the row that is kept keeps both alive
        self._rows.pop(look, None)
        self._rows[look] = row
        try:
            total = sum(row.values)  # type: ignore[arg-type]  # what is no number raises TypeError
        except TypeError:
            self._count(row)
        else:
            if total - total != 0.0:  # only NaN and the infinities differ from themselves
                self._count(row)

    def _count(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, float) and value - value != 0.0:
                self._nonfinite[name] = self._nonfinite.get(name, 0) + 1

    def values(self) -> dict[Series, StoredValue]:
        """The newest values, those that came last at the end."""
        found: dict[Series, StoredValue] = {}
        for row in self._rows.values():
            context = tuple(sorted(row.context.items()))
            for name, value in row.items():
                found.pop(Series(name, context), None)
                found[Series(name, context)] = value
        return found


def _summary(
    detail: RunDetail, aggregates: Aggregates, explicit: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """The newest value of each metric or what `define_metric` asked for, below what the user set."""
    newest: dict[str, StoredValue] = {}
    for values in detail.last_by_attempt.values():
        newest.update({series.metric: value for series, value in values.items()})
    measured = {name: aggregates.value(name, value) for name, value in newest.items()}
    given = {name: value for name, value in explicit.items() if value is not None}
    return {**{name: value for name, value in measured.items() if value is not None}, **given}


def _define(aggregates: Aggregates, event: Event) -> None:
    if event.name == "define_metric" and event.data.get("summary"):
        aggregates.define(str(event.data["name"]), cast("SummaryKind", event.data["summary"]))


class TrackingFolder:
    """A folder of journals, `.nodetrack` by default."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def projects(self) -> list[str]:
        """The projects that have runs, by name."""
        if not self.folder.is_dir():
            return []
        return sorted(unquote(entry.name) for entry in self.folder.iterdir() if (entry / "runs").is_dir())

    def runs(self, project: str | None = None) -> list[RunFolder]:
        """The runs that have begun, of one project or of all, by project and id."""
        found = []
        for name in self.projects() if project is None else [project]:
            runs = self.folder / file_name_part(name) / "runs"
            entries = sorted(runs.iterdir()) if runs.is_dir() else []
            found += [RunFolder(entry, name) for entry in entries if attempt_folders(entry)]
        return found

    def find(self, reference: str, project: str | None = None) -> RunFolder:
        """The run that is meant by `reference`: the first of `find_all`."""
        return self.find_all(reference, project)[0]

    def find_all(self, reference: str, project: str | None = None) -> list[RunFolder]:
        """The run whose id is `reference`, or the runs whose display name or `role-uid` that is.

        Those that are running come first, then the newest. If there are none, the run whose id begins like
        that. Raises RunNotFoundError when there is none either, or when several ids begin like that.
        """
        runs = self.runs(project)
        exact = [run for run in runs if run.id == reference]
        if exact:
            return exact
        names = {run.folder: _names_of(run) for run in runs}
        named = [run for run in runs if reference in names[run.folder]]
        if named:
            return sorted(named, key=_likelihood, reverse=True)
        starting = [run for run in runs if run.id.startswith(reference)]
        if len(starting) == 1:
            return starting
        if starting:
            raise RunNotFoundError(
                f"{len(starting)} runs begin with {reference!r}: {', '.join(run.id for run in starting)}."
            )
        known = [name for run in runs for name in (*names[run.folder], run.id)]
        raise RunNotFoundError(self._not_found(reference, project, len(runs), known))

    def _not_found(self, reference: str, project: str | None, count: int, known: Sequence[str]) -> str:
        if not count:
            return self.nothing_there(project)
        near = difflib.get_close_matches(reference, known, n=1)
        there = "the one that is" if count == 1 else f"the {count} that are"
        advice = f"did you mean {near[0]!r}?" if near else f"`nodetrack runs` lists {there} there."
        place = (
            self.folder.absolute() if project is None else f"project {project!r} of {self.folder.absolute()}"
        )
        return f"There is no run {reference!r} in {place}; {advice}"

    def nothing_there(self, project: str | None = None) -> str:
        """The sentence for a folder without runs, or without that project."""
        projects = self.projects()
        if project is None or not projects:
            return (
                f"There are no runs in {self.folder.absolute()}: "
                "give another folder with --dir or NODETRACK_DIR."
            )
        known = ", ".join(map(repr, projects))
        return f"There is no project {project!r} with runs in {self.folder.absolute()}; there are {known}."


def _names_of(run: RunFolder) -> tuple[str, str]:
    facts = run.attempts[-1].facts
    return f"{facts.get('role')}-{facts.get('uid')}", str(recover(run.folder).labels.get("name"))


def _likelihood(run: RunFolder) -> tuple[bool, int]:
    """How likely it is that of several runs with one name this is meant."""
    last = run.attempts[-1]
    return last.state(last.finish_record()).state == "running", last.started_ns
