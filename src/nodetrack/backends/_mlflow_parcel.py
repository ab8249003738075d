"""A batch as MLflow wants it: metrics, params, tags and the state of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nodetrack.backends._mlflow_names import (
    CUT_NAME_TAG,
    INFINITE,
    cut_mark,
    legal,
    params_of,
    short,
    value_text,
)
from nodetrack.naming import join, latest, with_context
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    Record,
    Row,
    RunEdited,
    StoredValue,
    SummarySet,
    SystemRow,
)

TAGS_TAG: Final = "nodetrack.tags"
#: Before a summary entry's name, in the name of its tag.
SUMMARY_TAG: Final = "summary"

_LONGEST_TAG: Final = 5_000
_NS_A_MS: Final = 1_000_000
_NS_A_SECOND: Final = 1_000_000_000
_STATES: Final = {"finished": "FINISHED", "crashed": "FAILED", "terminated": "KILLED"}
_LABELS: Final = {
    "name": "mlflow.runName",
    "notes": "mlflow.note.content",
    "group": "nodetrack.group",
    "job_type": "nodetrack.job_type",
}


class Point(NamedTuple):
    """One value of a metric, in the order of the arguments of MLflow's `Metric`."""

    key: str
    value: float
    time_ms: int
    step: int


@dataclass
class Parcel:
    """Metrics, params, tags and status of a batch, not sent yet."""

    version: str
    attempt: str
    times: dict[str, int]
    metrics: list[Point] = field(default_factory=list)
    configs: list[dict[str, str]] = field(default_factory=list)
    tags: dict[str, str | None] = field(default_factory=dict)
    #: The state of the run, and when it ended, in milliseconds.
    status: tuple[str, int | None] | None = None

    def add(self, record: Record) -> None:
        """Console lines and events are not for MLflow; everything else is."""
        if isinstance(record, Row):
            self._add_row(record)
        elif isinstance(record, SystemRow):
            self._add_values(
                zip(record.names, record.values, strict=True), record.time_ns, record.time_ns // _NS_A_SECOND
            )
        elif isinstance(record, ConfigSet):
            self.configs.append(params_of(record.config))
        elif isinstance(record, SummarySet):
            for name, value in record.summary.items():
                text = None if value is None else short(value_text(value))
                self._tag(legal(f"{SUMMARY_TAG}/{name}"), text, record.time_ns)
        elif isinstance(record, RunEdited):
            self._add_labels(record)
        elif isinstance(record, AttemptStarted):
            self._add_start(record)
        elif isinstance(record, AttemptFinished) and self._is_newest("status", record.time_ns):
            failed = record.state == "finished" and record.exit_code != 0
            state = "FAILED" if failed else _STATES.get(record.state, "FAILED")
            self.status = (state, max(record.time_ns // _NS_A_MS, 0))

    def _add_row(self, row: Row) -> None:
        named = [
            (with_context(name, row.context) if row.context else name, value) for name, value in row.items()
        ]
        for view in (lambda name: join(self.version, name), latest):
            self._add_values(((view(name), value) for name, value in named), row.time_ns, row.step)

    def _add_values(self, values: Iterable[tuple[str, StoredValue]], time_ns: int, step: int) -> None:
        time_ms = max(time_ns // _NS_A_MS, 0)
        for name, value in values:
            if isinstance(value, Mapping):
                continue
            key = self._key(name, time_ns)
            self.metrics.append(Point(key, value, time_ms, step))
            if math.isinf(value):  # which databases hold as the largest float
                self.metrics.append(Point(key + INFINITE, math.copysign(1, value), time_ms, step))

    def _key(self, name: str, time_ns: int) -> str:
        key = legal(name)
        cut = cut_mark(key)
        if cut is not None:
            self._tag(CUT_NAME_TAG + cut, name, time_ns)
        return key

    def _add_labels(self, record: RunEdited) -> None:
        for label, key in _LABELS.items():
            if isinstance(value := record.fields.get(label), str) and value:
                self._tag(key, short(value, _LONGEST_TAG if label == "notes" else 500), record.time_ns)
        tags = record.fields.get("tags")
        if isinstance(tags, Sequence) and not isinstance(tags, str):
            self._tag(TAGS_TAG, short(", ".join(map(str, tags)), _LONGEST_TAG) or None, record.time_ns)

    def _add_start(self, record: AttemptStarted) -> None:
        git = record.attempt.get("git")
        commit = git.get("commit") if isinstance(git, Mapping) else None
        facts = {
            "nodetrack.version": self.version,
            "nodetrack.attempt": self.attempt,
            "mlflow.source.git.commit": commit if isinstance(commit, str) else None,
        }
        for key, value in facts.items():
            self._tag(key, value, record.time_ns)
        if self._is_newest("status", record.time_ns):
            self.status = ("RUNNING", None)

    def _tag(self, key: str, value: str | None, time_ns: int) -> None:
        if self._is_newest(key, time_ns):
            self.tags[key] = value

    def _is_newest(self, what: str, time_ns: int) -> bool:
        if time_ns < self.times.get(what, 0):
            return False
        self.times[what] = time_ns
        return True
