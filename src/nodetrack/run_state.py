"""What all views of one run share: identity, counters, what went wrong. `live_run.Run` is the face of it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from nodetrack.aggregate import Aggregates
from nodetrack.backends.base import Backend, Batch, RunInfo
from nodetrack.deferral import Deferral
from nodetrack.delivery.process import DeliveryProcess
from nodetrack.delivery.progress import Backlog, Logged, Reached, progress
from nodetrack.errors import RunFinishedError
from nodetrack.health import BackendHealth, Health, Skipped
from nodetrack.journal.cursor import read_cursors
from nodetrack.journal.segment import SCHEMA_VERSION
from nodetrack.journal.writer import BEFORE_ALL_STEPS, JournalWriter, KeySet
from nodetrack.process_end import describe_error
from nodetrack.records import JsonValue, Kind, Row, SegmentHeader, StoredValue

#: More key sets than this and the run lets go of them all: names that never repeat must not fill the memory.
MAX_KEY_SETS: Final = 4096
MAX_STEP: Final = 2**63 - 1

logger = logging.getLogger("nodetrack")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a run is, for the life of one attempt."""

    project: str
    run: str
    attempt: str
    attempt_number: int
    role: str
    uid: str
    environment: str
    version: str
    version_origin: str
    folder: Path
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    previous_run: str | None = None
    previous_attempt: str | None = None

    @property
    def attempt_folder(self) -> Path:
        """The folder of this attempt's segments."""
        return self.folder / self.attempt


class RunState:
    """The mutable part of a run. Whoever touches it holds `journal.lock`.

    `key_sets` are kept by context and names, so that rows that look alike share one.
    """

    def __init__(self, identity: Identity, *, step: int = 0, counter: int = 0) -> None:
        self.identity = identity
        self.journal: JournalWriter
        self.counter = counter
        self.base_step = step
        self.logged = 0
        #: Rows whose values were still being computed when they were needed.
        self.never_computed = 0
        self.deferral = Deferral(lambda: self.journal.lock)
        self.out_of_order = 0
        self.nonfinite: dict[str, int] = {}
        self.first_nonfinite: dict[str, int] = {}
        self.skipped: dict[str, Skipped] = {}
        self.warnings: list[str] = []
        self.unsaid: deque[str] = deque()
        self.summary: dict[str, object] = {}
        self.labels: dict[str, object] = {}
        self.aggregates = Aggregates()
        self.backends: dict[str, Backend[Any]] = {}
        self.backend_counts: dict[str, list[int]] = {}
        self.backend_errors: dict[str, str] = {}
        #: The backends that a process of their own delivers to, and that process.
        self.delivered: tuple[str, ...] = ()
        self.delivery: DeliveryProcess | None = None
        #: Whether each row has to be shown to somebody besides the journal.
        self.watched = False
        self.finished = False
        self.last_measured: dict[str, object] = {}
        self.disabled = False
        self._views: dict[tuple[tuple[str, str], ...], dict[tuple[str, ...], KeySet]] = {}
        self._key_set_count = 0
        self._let_go: dict[str, StoredValue] = {}
        self._told: set[str] = set()
        self.after_fork_in_child()
        _states.add(self)

    def after_fork_in_child(self) -> None:
        """Forget what was read for `health`, with a lock that nobody holds."""
        self._backlog_lock = threading.Lock()
        self._backlogs: defaultdict[str, Backlog] = defaultdict(Backlog)

    # -- steps ---------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """One past the highest step so far, 0 before the first row."""
        steps = [key_set.last_step for key_set in self._all_key_sets()]
        return min(max(self.base_step, max(steps, default=BEFORE_ALL_STEPS) + 1), MAX_STEP)

    def _all_key_sets(self) -> list[KeySet]:
        """As they are now; a signal handler or another thread may add to them at any time."""
        return [key_set for view in list(self._views.values()) for key_set in list(view.values())]

    def whole_step(self, step: object) -> int:
        """The step as an integer within 64 bits. What cannot be one is kept at the nearest, with a
        warning.
        """
        try:
            number = step.__index__() if hasattr(step, "__index__") else math.floor(cast("float", step))
        except (TypeError, ValueError, OverflowError):
            self.warn_once(
                "step", f"The step {step!r} is no integer; the row is kept under the run's own counter."
            )
            return self.counter
        if number != step:
            self.warn_once("step", f"The step {step!r} is no integer; the row is kept under step {number}.")
        if not -MAX_STEP <= number <= MAX_STEP:
            self.warn_once(
                "step", f"The step {number} does not fit into 64 bits; the row is kept at the limit."
            )
            number = max(-MAX_STEP, min(MAX_STEP, number))
        return number

    def rewind(self, step: int) -> None:
        """Later rows go on behind `step`; what was logged behind it is superseded, not deleted."""
        self.forget_key_sets()
        self.base_step = self.counter = step + 1
        self.record(Kind.EVENT, "rewind", {"step": step})

    # -- key sets ------------------------------------------------------------------------------------

    def view(self, context: Mapping[str, str]) -> dict[tuple[str, ...], KeySet]:
        """The key sets of one context, to be filled by whoever logs under it."""
        key = tuple(sorted(context.items()))
        with self.journal.lock:
            if len(self._views) >= MAX_KEY_SETS and key not in self._views:
                self.forget_key_sets()  # whoever holds a view that is let go of here asks for it again
                self._views.clear()
            return self._views.setdefault(key, {})

    def new_key_set(
        self, view: dict[tuple[str, ...], KeySet], names: tuple[str, ...], context: Mapping[str, str]
    ) -> KeySet:
        """Register a key set that the view has not seen."""
        if self._key_set_count >= MAX_KEY_SETS:
            self.forget_key_sets()
            self.journal.forget_key_sets()
        key_set = KeySet(names, context)
        view[names] = key_set
        self._key_set_count += 1
        return key_set

    def forget_key_sets(self) -> None:
        """Let go of all key sets, keeping the step and the last values."""
        self.base_step = self.step
        self._let_go = self.last_values()
        for view in list(self._views.values()):
            view.clear()
        self._key_set_count = 0

    def count(self, key_set: KeySet, step: int, values: list[StoredValue]) -> None:
        """Take note of a row that was written; `Run.log` has the same in its fast path."""
        if step >= key_set.last_step:
            key_set.last_step = step
        else:
            self.out_of_order += 1
        self.logged = key_set.order = self.logged + 1
        key_set.values = values

    def expect_row(self, step: int) -> int:
        """Count a row that is written later, and whose step counts from now on; its place among the rows."""
        self.base_step = max(self.base_step, min(step + 1, MAX_STEP))
        self.logged += 1
        return self.logged

    def count_late(self, key_set: KeySet, step: int, values: list[StoredValue], order: int) -> None:
        """Take note that a row which `expect_row` has counted was written. One that was logged after it may
        have been written before it; then that one has the newest values.
        """
        if order > key_set.order:
            self.out_of_order += step < key_set.last_step
            key_set.order, key_set.values = order, values
        key_set.last_step = max(key_set.last_step, step)

    def give_up_deferred(self) -> None:
        """Count the deferred rows that nobody waits for any longer as lost. The caller has waited."""
        lost = self.deferral.give_up()
        if lost:
            self.never_computed += lost
            self.warn(
                f"The values of {lost} deferred rows of run {self.identity.run} were not computed in time; "
                "the rows are lost."
            )

    def last_values(self) -> dict[str, StoredValue]:
        """The newest value of every metric that this attempt has logged."""
        key_sets = [key_set for key_set in self._all_key_sets() if key_set.order]
        last = dict(self._let_go)
        for key_set in sorted(key_sets, key=lambda item: item.order):
            last.update(zip(key_set.names, key_set.values, strict=True))
        return last

    def measured_summary(self) -> dict[str, object]:
        """The summary of every metric as `define_metric` asks, without what the user set."""
        if self.finished:
            return dict(self.last_measured)
        last = self.last_values()
        if not self.aggregates:
            return dict(last)
        shown = {name: self.aggregates.value(name, value) for name, value in last.items()}
        return {name: value for name, value in shown.items() if value is not None}

    # -- records -------------------------------------------------------------------------------------

    def record(self, kind: Kind, *fields: object) -> None:
        """Write a record of `kind`, stamped now."""
        self.journal.write([int(kind), time.time_ns(), *fields])

    def mark(self) -> None:
        """Write where the run stands, so that the next attempt need not read the whole segment to know."""
        standing = (self.step, self.counter, plain_values(self.summary), self.labels)
        self.journal.mark([int(Kind.MARK), time.time_ns(), *standing])

    def header(self, writer: int, segment: int) -> SegmentHeader:
        """What the header of the next segment says."""
        identity = self.identity
        return SegmentHeader(
            schema_version=SCHEMA_VERSION,
            project=identity.project,
            run=identity.run,
            attempt=identity.attempt,
            writer=writer,
            segment=segment,
            version=identity.version,
            role=identity.role,
            uid=identity.uid,
            environment=identity.environment,
            created_ns=time.time_ns(),
            step=self.step,
            counter=self.counter,
            summary=dict(plain_values(self.summary)),
            labels=self.labels,
        )

    def require_open(self, call: str) -> None:
        """Raises RunFinishedError after `finish`."""
        if self.finished:
            raise RunFinishedError(self.identity.run, call)

    # -- rows that need a second look ----------------------------------------------------------------

    def note_nonfinite(self, names: Sequence[str], values: Sequence[StoredValue], step: int) -> None:
        """Count the NaN and infinite values of a row."""
        for name, value in zip(names, values, strict=True):
            if isinstance(value, float) and not math.isfinite(value):
                self.nonfinite[name] = self.nonfinite.get(name, 0) + 1
                self.first_nonfinite.setdefault(name, step)

    def skip(self, name: str, reason: str) -> None:
        """Count a value that is left out of its row, and warn of the first of its name."""
        before = self.skipped.get(name)
        shown = name if len(name) <= 80 else f"{name[:80]}…"
        if before is None:
            self.warn(f"{shown!r} is left out of its rows: {reason}.")
        elif len(self.skipped) >= MAX_KEY_SETS and name not in self.skipped:
            name = "(more names)"
        self.skipped[name] = Skipped(before.count + 1 if before else 1, reason)

    def skip_row(self, error: Exception) -> None:
        """Count a row that could not be read at all."""
        with self.journal.lock:
            self.skip(*unreadable_row(error))
        self.say()

    def show(self, key_set: KeySet, step: int, time_ns: int, values: list[StoredValue]) -> None:
        """Give a row to the aggregates and the backends of this process."""
        self.aggregates.see(zip(key_set.names, values, strict=True))
        if not self.backends:
            return
        row = Row(
            offset=0, names=key_set.names, values=values, step=step, time_ns=time_ns, context=key_set.context
        )
        batch = Batch(run=self.info(), records=(row,))
        for kind, backend in self.backends.items():
            self._give(kind, backend, batch)

    def info(self) -> RunInfo:
        """What a backend is told about the run."""
        identity = self.identity
        return RunInfo(
            project=identity.project,
            run=identity.run,
            attempt=identity.attempt,
            attempt_number=identity.attempt_number,
            version=identity.version,
            role=identity.role,
            uid=identity.uid,
            environment=identity.environment,
            entity=identity.entity,
            group=identity.group,
            job_type=identity.job_type,
            previous_run=identity.previous_run,
            folder=identity.folder,
        )

    def _give(self, kind: str, backend: Backend[Any], batch: Batch) -> None:
        counts = self.backend_counts.setdefault(kind, [0, 0])
        counts[0] += 1
        try:
            backend.write(batch)
        except Exception as error:  # one backend's failure touches neither the trainer nor the others (P5)
            self.backend_errors[kind] = f"{type(error).__name__}: {error}"
            self.warn_once(
                f"backend {kind}", f"The backend {kind} failed ({error}); its rows are in the journal."
            )
        else:
            counts[1] += 1

    # -- health --------------------------------------------------------------------------------------

    def warn(self, message: str) -> None:
        """Keep a warning for `health`, and log it when `say` is called.

        Not at once: this is called under the journal's lock, and a handler of the user's may log to the run.
        """
        if len(self.warnings) < MAX_KEY_SETS:
            self.warnings.append(message)
        self.unsaid.append(message)

    def say(self) -> None:
        """Log the warnings that wait. The caller holds no lock; a handler that fails fails alone."""
        while self.unsaid:
            try:
                logger.warning("%s", self.unsaid.popleft())
            except IndexError:  # another thread was faster
                return
            except Exception as error:  # a handler of the user's must not end a row, a keeper or a run
                self.warnings.append(f"A handler of the program's logging failed ({describe_error(error)}).")

    def warn_once(self, about: str, message: str) -> None:
        """As `warn`, the first time only."""
        if about not in self._told:
            self._told.add(about)
            self.warn(message)

    def cursors(self) -> dict[str, Reached]:
        """How far delivery has come, from the disk: not to be asked for under the journal's lock."""
        if not self.delivered:
            return {}
        cursors, folder = read_cursors(self.identity.folder), self.identity.attempt_folder
        with self._backlog_lock:
            return {
                kind: Reached(cursor, self._backlogs[kind].steps(folder, self.journal.writer, cursor))
                for kind in self.delivered
                for cursor in [cursors.get(kind)]
            }

    def health(self, cursors: Mapping[str, Reached]) -> Health:
        """See `Run.health`."""
        journal = self.journal
        backends = {kind: self._backend_health(kind) for kind in self.backends}
        backends |= {kind: self._progress(cursors.get(kind, Reached())) for kind in self.delivered}
        return Health(
            state=self._state(),
            logged=self.logged,
            written=journal.written,
            pending=journal.pending + self.deferral.waiting,
            lost=journal.lost + self.never_computed,
            out_of_order=self.out_of_order,
            nonfinite=dict(self.nonfinite),
            first_nonfinite=dict(self.first_nonfinite),
            skipped=dict(self.skipped),
            backends=backends,
            last_error=journal.last_error,
            warnings=list(self.warnings),
        )

    def _state(self) -> Literal["ok", "degraded", "finished", "disabled"]:
        if self.disabled:
            return "disabled"
        if self.journal.failing or self.journal.lost or self.never_computed:
            return "degraded"
        return "finished" if self.finished else "ok"

    def _backend_health(self, kind: str) -> BackendHealth:
        logged, delivered = self.backend_counts.get(kind, (0, 0))
        return BackendHealth(
            "ok" if logged == delivered else "down", logged, delivered, self.backend_errors.get(kind, "")
        )

    def _progress(self, reached: Reached) -> BackendHealth:
        logged = self.logged - self.never_computed
        return progress(reached, Logged(self.identity.attempt, self.journal.writer, logged))


_states: weakref.WeakSet[RunState] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A child shares the run but not its file, its thread or its lock."""
    for state in list(_states):
        if not state.finished:
            state.journal.after_fork_in_child()
            state.deferral.after_fork_in_child()
            state.after_fork_in_child()


def unreadable_row(error: Exception) -> tuple[str, str]:
    """What `skip` is told of a row that could not be read at all."""
    return "(whole row)", f"it could not be read ({describe_error(error)})"


def plain_values(values: Mapping[str, object]) -> Mapping[str, JsonValue]:
    """A mapping that the journal can hold, whatever the caller put into it."""
    from nodetrack.plain import plain

    return cast("Mapping[str, JsonValue]", plain(values))


os.register_at_fork(after_in_child=_after_fork_in_child)
