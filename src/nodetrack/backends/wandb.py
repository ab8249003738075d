"""The backend that feeds Weights & Biases, or any service that speaks its protocol.

One node is one W&B run, under the node's run id, taken up again at every start. `wandb` uploads in a process
of its own and tells nobody when a row has arrived; so a batch counts as delivered only once the service
itself counts its rows. What arrived of a batch that is sent again is recognised: in this process by what was
handed over, after a crash by what the service gives back. No row is lost or repeated for a lost answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import ClassVar, Final, cast

import msgspec

from nodetrack.backends._wandb_lineage import Lineage, Metric, WandbConfig
from nodetrack.backends._wandb_rows import Line, Sent, UnshownError, bytes_in_line, for_wandb, named
from nodetrack.backends._wandb_session import Core, told
from nodetrack.backends.base import Backend, Batch, RunInfo, Sdk
from nodetrack.errors import BackendRefusedError, BackendUnavailableError, BatchRejectedError
from nodetrack.identity.wandb_verifier import check_reachable, has_credentials
from nodetrack.naming import join, latest
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    JsonValue,
    Record,
    Row,
    RunEdited,
    SummarySet,
    SystemRow,
)

_LARGEST_BYTES: Final = 9_000_000  # the client drops rows above 10 383 360 bytes in silence
_CONSOLE_LINES: Final = 100_000  # what W&B shows of one run
_TOO_OLD: Final = "this release of wandb has no way to send"

_log = logging.getLogger("nodetrack")


class WandbBackend(Backend[WandbConfig]):
    """See the module."""

    config_class = WandbConfig
    sdk = Sdk("wandb", "wandb")
    variables: ClassVar = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE")

    def __init__(self, config: WandbConfig) -> None:
        super().__init__(config)
        self._open_lineage: Lineage | None = None
        self._url: str | None = None
        self._last_write_failed = False
        self._warned_of_rewind = False
        #: The batch that is being written: rows that are there already, the open row, and how it ends.
        self._expected = Sent()
        self._line: Line | None = None
        self._must_settle = False
        self._must_mark = False

    # -- open and close ------------------------------------------------------------------------------

    def open(self, run: RunInfo) -> None:
        """See Backend."""
        self._point_client()
        Core.hold()
        self._open_lineage = Lineage(self.config, run, self.memory)
        self._last_write_failed = False
        try:
            if not self.config.offline:
                _check_access()
            self._url = self._lineage.current().url
        except Exception as error:
            self._let_go(healthy=False)
            raise told(error) from error

    def _point_client(self) -> None:
        """W&B's package looks for these in the environment wherever it goes."""
        os.environ["WANDB_SILENT"] = "true"
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # our faults are not W&B's to collect
        if self.config.base_url is not None:
            os.environ["WANDB_BASE_URL"] = self.config.base_url
        if self.config.api_key is not None:
            os.environ["WANDB_API_KEY"] = self.config.api_key.get_secret_value()

    @property
    def _lineage(self) -> Lineage:
        assert self._open_lineage is not None, "the backend is not open"
        return self._open_lineage

    @property
    def url(self) -> str | None:
        """See Backend."""
        return self._url

    def close(self) -> None:
        """See Backend."""
        if self._open_lineage is None:
            return
        healthy = not self._last_write_failed
        try:
            if healthy and self._lineage.session is not None:
                self._lineage.settle()
                self._mark_end()
        except Exception as error:
            healthy = False
            _log.warning("W&B run %s could not be closed: %s", self._lineage.id, told(error))
        self._let_go(healthy=healthy)

    def _let_go(self, *, healthy: bool) -> None:
        self._lineage.abandon()
        Core.release(healthy=healthy)
        self._lineage.remove_files()
        self._open_lineage = None

    # -- write ---------------------------------------------------------------------------------------

    def write(self, batch: Batch) -> None:
        """See Backend."""
        _check_sizes(batch)
        lineage = self._lineage
        self._line, self._must_settle, self._must_mark = None, False, False
        try:
            lineage.current()
            self._expected = lineage.sent.copy()
            self._take_all(batch)
            if self._must_settle or self._must_mark:
                lineage.settle()
            lineage.confirm()
            if self._must_mark:
                self._mark_end()
        except Exception as error:
            self._last_write_failed = True
            lineage.fail(error, self.memory)
            raise told(error) from error
        self._last_write_failed = False
        lineage.sent = self._expected
        lineage.standing.early = [] if self._must_mark else self._expected.lines()
        self.memory = cast("dict[str, JsonValue]", msgspec.to_builtins(lineage.standing))

    def _take_all(self, batch: Batch) -> None:
        self._use_version(batch.run)
        for record in batch.records:
            if not isinstance(record, Row):
                self._take_other(record, batch.run)
            elif not self._expected.take(record):
                self._take_row(batch.run.version, record)
        self._end_line()

    def _take_other(self, record: Record, run: RunInfo) -> None:
        match record:
            case ConsoleLine():
                self._take_console(record)
            case SystemRow():
                self._take_system(record)
            case Event():
                self._take_event(record, run)
            case ConfigSet() | SummarySet() | RunEdited() | AttemptStarted() | AttemptFinished():
                if self._is_newest(run):
                    self._take_fact(record, run)

    def _take_fact(self, record: Record, run: RunInfo) -> None:
        """What holds for the whole run: the newest attempt has the last word."""
        match record:
            case AttemptStarted():
                self._lineage.standing.exit_code = None
            case ConfigSet():
                self._lineage.values = dict(record.config)
                self._lineage.current().set_config(record.config)
                self._must_settle = True
            case RunEdited():
                self._lineage.relabel(record.fields)
                self._must_settle = True
            case SummarySet():
                self._take_summary(record)
            case AttemptFinished():
                if run.attempt_number >= self._lineage.run.attempt_number:
                    failed = record.state != "finished"
                    self._lineage.standing.exit_code = abs(record.exit_code) or int(failed)
                    self._must_mark = True

    def _mark_end(self) -> None:
        code = self._lineage.standing.exit_code
        if code is not None and not self.config.offline:
            self._lineage.mark(code)

    # -- rows ----------------------------------------------------------------------------------------

    def _take_row(self, version: str, row: Row) -> None:
        if self._line is None or not self._line.take(version, row):
            self._end_line()
            self._line = Line(version, row.step, row.time_ns, named(row))

    def _end_line(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        shown: dict[str, object] = {"_timestamp": line.seconds}
        for name, value in line.flat().items():
            try:
                shown[name] = for_wandb(value)
            except UnshownError as reason:
                self.leave_out(str(reason))
        self._lineage.send(line, shown)
        self._must_settle |= line.has_files

    # -- the other kinds of record -------------------------------------------------------------------

    def _use_version(self, run: RunInfo) -> None:
        """The first batch of an attempt brings its version, whose metrics are drawn over their own step."""
        standing, number = self._lineage.standing, str(run.attempt_number)
        if standing.versions.get(number) == run.version:
            return
        standing.versions[number] = run.version
        self._define(Metric(join(run.version, "*"), join(run.version, "step")))
        if self._is_newest(run):
            self._define(Metric(latest("*"), latest("step")))
        self._lineage.announce_versions()
        self._must_settle = True

    def _is_newest(self, run: RunInfo) -> bool:
        """Whether no later attempt has spoken: attempts may come in any order."""
        standing = self._lineage.standing
        standing.newest = max(standing.newest, run.attempt_number)
        return run.attempt_number == standing.newest

    def _define(self, metric: Metric) -> None:
        standing = self._lineage.standing
        standing.metrics = [known for known in standing.metrics if known.name != metric.name] + [metric]
        self._lineage.current().define(metric.name, metric.step_metric, metric.summary)

    def _take_summary(self, record: SummarySet) -> None:
        standing = self._lineage.standing
        summary = {**standing.summary, **record.summary}
        standing.summary = {name: value for name, value in summary.items() if value is not None}
        self._lineage.current().set_summary(record.summary)

    def _take_console(self, record: ConsoleLine) -> None:
        standing = self._lineage.standing
        if standing.console >= _CONSOLE_LINES:
            self.leave_out(f"console lines beyond the {_CONSOLE_LINES} that W&B shows of one run")
            return
        standing.console += 1
        if not self._lineage.current().write_console(record):
            self.leave_out(f"console lines: {_TOO_OLD} them")

    def _take_system(self, record: SystemRow) -> None:
        if not self._lineage.current().write_system(record):
            self.leave_out(f"system metrics: {_TOO_OLD} them")

    def _take_event(self, record: Event, run: RunInfo) -> None:
        if record.name == "define_metric":
            self._take_metric(record.data, run.version)
        elif record.name == "alert":
            data = record.data
            self._lineage.current().run.alert(str(data.get("title", "")), str(data.get("text", "")))
        elif record.name == "rewind" and self.config.rewind:
            self._end_line()
            self._rewind(cast("int", record.data["step"]))

    def _take_metric(self, data: Mapping[str, JsonValue], version: str) -> None:
        name, over, summary = str(data["name"]), data.get("step_metric"), data.get("summary")
        for view in (lambda metric: join(version, metric), latest):
            step_metric = view(str(over)) if over else None
            self._define(Metric(view(name), step_metric, str(summary) if summary else None))

    def _rewind(self, step: int) -> None:
        """Going back never depends on W&B (P7): where it will not, later rows come under their own step."""
        reason = self._lineage.rewind(step)
        if reason is None:
            self._expected.forget_behind(step)
        elif not self._warned_of_rewind:
            self._warned_of_rewind = True
            _log.warning(
                "W&B run %s was not taken back to step %d (%s): later rows stay, and new ones follow them.",
                self._lineage.id,
                step,
                reason,
            )


def _check_access() -> None:
    if not has_credentials():
        raise BackendRefusedError("W&B has no credentials: set WANDB_API_KEY or run `wandb login`.")
    try:
        check_reachable()
    except ConnectionError as error:
        raise BackendUnavailableError(f"W&B: {error}") from error


def _check_sizes(batch: Batch) -> None:
    """Raises BatchRejectedError before anything is sent: W&B's client would drop it and say nothing."""
    for record in batch.records:
        if isinstance(record, Row):
            size, what = bytes_in_line(record), f"the row of step {record.step}"
        elif isinstance(record, ConfigSet):
            size, what = len(msgspec.json.encode(record.config)), "the config"
        else:
            continue
        if size > _LARGEST_BYTES:
            raise BatchRejectedError(
                f"W&B takes at most {_LARGEST_BYTES} bytes at once, and {what} has about {size}."
            )
