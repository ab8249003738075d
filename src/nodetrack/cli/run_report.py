"""Everything about one run but its rows, as `nodetrack show --json` prints it and `show_page` tells it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import cast

import msgspec

from nodetrack.delivery.account import Account, accounts, removed
from nodetrack.journal.folder import AttemptFolder, AttemptState, RunDetail, RunFolder, Series
from nodetrack.records import JsonValue, StoredValue, SystemRow
from nodetrack.run_summary import differences
from nodetrack.version import version_key


class AttemptReport(msgspec.Struct, frozen=True):
    """One process start."""

    attempt: str
    version: str
    state: str
    reason: str
    exit_code: int | None
    host: str
    pid: int | None
    command: tuple[str, ...]
    git: Mapping[str, JsonValue] | None
    started_ns: int
    ended_ns: int | None
    duration_seconds: float
    #: None where the segment that says so was removed.
    starting_step: int | None
    #: What differs from the config that the previous attempt had in the end: dotted key → [before, now].
    config_changes: Mapping[str, list[JsonValue]]


class LastValues(msgspec.Struct, frozen=True):
    """The last values of one series, by version or by attempt."""

    metric: str
    context: Mapping[str, str]
    values: Mapping[str, StoredValue]


class EventReport(msgspec.Struct, frozen=True):
    """Something that happened."""

    attempt: str
    time_ns: int
    event: str
    data: Mapping[str, JsonValue]


class ConfigReport(msgspec.Struct, frozen=True):
    """A version of the config."""

    attempt: str
    time_ns: int
    config: Mapping[str, JsonValue]


class SystemReport(msgspec.Struct, frozen=True):
    """A sample of the machine."""

    time_ns: int
    values: Mapping[str, StoredValue]


class RunReport(msgspec.Struct, frozen=True):
    """A run as `show --json` prints it."""

    run: Mapping[str, JsonValue]
    #: Those in the journal.
    rows: int
    #: Segments that were removed from it since, and their rows as far as a backend counted them.
    removed_segments: int
    removed_rows: int
    duration_seconds: float
    attempts: list[AttemptReport]
    config: Mapping[str, JsonValue]
    config_history: list[ConfigReport]
    summary: Mapping[str, JsonValue]
    last_values_by: str
    last_values_of: list[str]
    last_values: list[LastValues]
    events: list[EventReport]
    system: SystemReport | None
    nonfinite: Mapping[str, int]
    damage: Mapping[str, JsonValue]
    #: What each backend has that the run was ever sent to.
    delivery: list[Account]


def read_report(run: RunFolder, *, by_attempt: bool = False) -> RunReport:
    """Reads the whole journal of a run once."""
    gone = removed(run.folder)
    detail = run.detail()
    attempts = _attempts(detail)
    columns = {attempt.id: attempt.id if by_attempt else attempt.version for attempt, _ in detail.attempts}
    shown = dict.fromkeys(columns.values())
    return RunReport(
        run=msgspec.to_builtins(detail.overview),
        rows=detail.rows,
        removed_segments=gone.segments,
        removed_rows=gone.rows,
        duration_seconds=sum(attempt.duration_seconds for attempt in attempts),
        attempts=attempts,
        config=detail.config_history[-1][2] if detail.config_history else {},
        config_history=[ConfigReport(*version) for version in detail.config_history],
        summary=detail.summary,
        last_values_by="attempt" if by_attempt else "version",
        last_values_of=list(shown) if by_attempt else sorted(shown, key=version_key),
        last_values=_last_values(detail, columns),
        events=[
            EventReport(attempt, event.time_ns, event.name, event.data) for attempt, event in detail.events
        ],
        system=_system(detail.system),
        nonfinite=dict(sorted(detail.nonfinite.items())),
        damage=msgspec.to_builtins(detail.damage),
        delivery=[*accounts(run.folder).values()],
    )


def _system(sample: SystemRow | None) -> SystemReport | None:
    if sample is None:
        return None
    return SystemReport(sample.time_ns, dict(zip(sample.names, sample.values, strict=True)))


def _attempts(detail: RunDetail) -> list[AttemptReport]:
    configs = {attempt: config for attempt, _, config in detail.config_history}  # the last of each attempt
    reports: list[AttemptReport] = []
    previous: Mapping[str, JsonValue] | None = None
    for attempt, state in detail.attempts:
        config = configs.get(attempt.id)
        changes = {} if previous is None or config is None else differences(previous, config)
        reports.append(_attempt(attempt, state, changes))
        previous = config if config is not None else previous
    return reports


def _attempt(
    attempt: AttemptFolder, state: AttemptState, changes: Mapping[str, list[JsonValue]]
) -> AttemptReport:
    facts = attempt.facts
    process = cast("Mapping[str, JsonValue]", facts.get("process") or {})
    until = state.ended_ns or (time.time_ns() if state.state == "running" else attempt.last_seen_ns)
    return AttemptReport(
        attempt=attempt.id,
        version=attempt.version,
        state=state.state,
        reason=state.reason,
        exit_code=state.exit_code,
        host=str(process.get("hostname", "")),
        pid=cast("int | None", process.get("pid")),
        command=tuple(cast("list[str]", process.get("command") or ())),
        git=cast("Mapping[str, JsonValue] | None", facts.get("git")),
        started_ns=attempt.started_ns,
        ended_ns=state.ended_ns,
        duration_seconds=max(0.0, (until - attempt.started_ns) / 1e9),
        starting_step=attempt.starting_step,
        config_changes=changes,
    )


def _last_values(detail: RunDetail, columns: Mapping[str, str]) -> list[LastValues]:
    found: dict[Series, dict[str, StoredValue]] = {}
    for attempt, values in detail.last_by_attempt.items():
        for series, value in values.items():
            found.setdefault(series, {})[columns[attempt]] = value
    return [LastValues(series.metric, dict(series.context), found[series]) for series in sorted(found)]
