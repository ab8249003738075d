"""`Run`: what `nodetrack.init` returns, and what training code holds.

`log` is the hot path. For a row whose metric names have been seen, of plain floats and integers, it costs a
look-up, one MessagePack encode and one `write`; everything unusual goes through `_log_unusual`.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Final

import msgspec

from nodetrack.aggregate import SUMMARY_KINDS, SummaryKind
from nodetrack.deferral import DeferredRow, held
from nodetrack.errors import UsageError
from nodetrack.health import Health
from nodetrack.records import Kind, StoredValue
from nodetrack.run_face import RunFace
from nodetrack.run_state import MAX_STEP, RunState, unreadable_row
from nodetrack.values import coerce

if TYPE_CHECKING:
    from nodetrack.attempt import Attempt

STATE_SCHEMA_VERSION: Final = 1
_MAX_BOUND_RUNS: Final = 256


class Run(RunFace):
    """One attempt of one node's history, open for logging.

    Nothing here raises for disk, network or backends; `health` tells of them. What is the caller's own
    mistake raises UsageError: a metric name that is no string, a call after `finish`. Threads may share a
    run, and a forked child may go on logging to its copy. Used as a context manager it is finished at the
    end of the block.
    """

    def __init__(self, attempt: Attempt, context: Mapping[str, str] | None = None) -> None:
        self._attempt = attempt
        self._state: RunState = attempt.state
        self._context: Mapping[str, str] = context or {}
        self._key_sets = self._state.view(self._context)
        self._bound: dict[tuple[tuple[str, str], ...], Run] = {}

    # -- logging -------------------------------------------------------------------------------------

    def log(  # noqa: C901 - in one piece: a call more would cost each row a tenth of a microsecond
        self,
        values: Mapping[str, object],
        step: int | None = None,
        *,
        context: Mapping[str, object] | None = None,
        commit: bool | None = None,
        defer: bool = False,
    ) -> None:
        """Record one row: metric names and their values at `step`.

        Without a step the run counts: 0, 1, 2, … , going on after a restart. `commit=False` leaves that
        counter where it is, so that the next call shares the step. Calls at one step are one row for the
        reader. No value is dropped for its step. `context` (such as `{"stage": "train"}`) is kept with the
        row; see `bind`.

        Values are numbers, numpy or torch scalars, or `Histogram`, `Text`, `Image`, `Table`; anything else
        is left out with one warning a name. When this returns, the row is in the operating system's hands.

        `defer=True` is for values that are computed lazily, such as JAX arrays: the call does not wait for
        them. It takes the time and the step; another thread reads the values, which must not be changed in
        place after the call, and writes the row. At most 256 rows wait like this: beyond that a call reads
        its own values as without `defer`, so that nothing is lost. `flush` and `finish` wait for what was
        deferred. A row whose values never come is counted in `health().lost`.
        """
        now = time_ns()
        if context or defer:
            if context:
                self._log_within(context, values, step, commit, defer)
            else:
                self._defer(values, step, now, commit)
            return
        state = self._state
        lock = state.journal.lock
        key_set = None
        try:
            lock.acquire()  # in here, so that a Ctrl-C right behind it does not keep the lock for ever
            counted = step is None
            if counted:
                number = state.counter
            elif step.__class__ is int and step <= MAX_STEP:
                number = step
            else:
                number = state.whole_step(step)
            try:
                known = self._key_sets[tuple(values)]
                items: list[StoredValue] = [*values.values()]  # type: ignore[list-item]  # write_row checks them
                state.journal.write_row(known, number, now, items, counted)
                key_set = known
            except (KeyError, TypeError, AttributeError, OverflowError):
                pass  # new names, values that are no plain numbers, no mapping at all, or `finish` was called
            else:
                try:
                    total = sum(items)  # type: ignore[arg-type]  # plain numbers, as write_row has seen
                except TypeError:  # an enumeration, which MessagePack writes as the float that it stands for
                    items = msgspec.to_builtins(items)
                    total = sum(items)  # type: ignore[arg-type]  # as above
                if total - total != 0.0:  # only NaN and the infinities differ from themselves
                    state.note_nonfinite(known.names, items, number)
                if counted and commit is not False:
                    state.counter = number + 1
                if number >= known.last_step:
                    known.last_step = number
                else:
                    state.out_of_order += 1
                state.logged = known.order = state.logged + 1
                known.values = items
                if state.watched:
                    state.show(known, number, now, items)
        except Exception as error:  # whatever the caller's own classes raise, training goes on (P1)
            state.skip_row(error)
            return
        finally:
            try:
                lock.release()
            except RuntimeError:
                del lock  # a Ctrl-C came before it was taken
        if key_set is None:
            self._log_unusual(values, step, now, commit)
            state.say()  # what the fast path has to say, of a full disk, the keeper says within a second

    def _log_within(
        self,
        context: Mapping[str, object],
        values: Mapping[str, object],
        step: int | None,
        commit: bool | None,
        defer: bool,
    ) -> None:
        try:
            bound = self._within(context)
        except UsageError:
            raise
        except Exception as error:  # a context value that cannot be written as text
            self._state.skip_row(error)
        else:
            bound.log(values, step, commit=commit, defer=defer)

    def _defer(self, values: Mapping[str, object], step: int | None, now: int, commit: bool | None) -> None:
        """Give the row its step and its place now; the rest is done elsewhere. Without room for it, it is
        written here.
        """
        state = self._state
        state.require_open("log")
        _require_names(values)
        try:
            values = held(values)
            with state.journal.lock:
                state.require_open("log")
                has_room = state.deferral.has_room()
                if has_room and values:
                    number = state.counter if step is None else state.whole_step(step)
                    row = DeferredRow(
                        values,
                        number,
                        now,
                        counted=step is None,
                        order=state.expect_row(number),
                        read=_read_deferred,
                        write=self._write_deferred,
                    )
                    if step is None and commit is not False:
                        state.counter = number + 1
                    state.deferral.put(row)
        except UsageError:
            raise
        except Exception as error:  # as in `log`
            state.skip_row(error)
            return
        if not has_room:
            self._log_unusual(values, step, now, commit)
        state.say()

    def _write_deferred(self, row: DeferredRow) -> None:
        state = self._state
        try:
            for name, reason in row.skipped:
                state.skip(name, reason)
            if row.kept:
                self._write_kept(row.kept, row.step, row.time_ns, row.counted, commit=False, order=row.order)
            else:
                state.logged -= 1
        except Exception as error:  # a fault of ours must not keep the rows behind it
            state.skip(*unreadable_row(error))

    def _log_unusual(
        self, values: Mapping[str, object], step: int | None, now: int, commit: bool | None
    ) -> None:
        """A row that the fast path does not know. Its values are read before the lock is taken: one of them
        may have to wait for a device.
        """
        state = self._state
        state.require_open("log")
        _require_names(values)
        skipped: list[tuple[str, str]] = []
        try:
            kept = coerce(values, lambda name, reason: skipped.append((name, reason)))
            with state.journal.lock:
                state.require_open("log")
                for name, reason in skipped:
                    state.skip(name, reason)
                if kept:
                    self._write_checked(kept, step, now, commit)
        except UsageError:
            raise
        except Exception as error:  # as in `log`
            state.skip_row(error)

    def _write_checked(
        self, kept: dict[str, StoredValue], step: int | None, now: int, commit: bool | None
    ) -> None:
        state = self._state
        number = state.counter if step is None else state.whole_step(step)
        self._write_kept(kept, number, now, step is None, commit)

    def _write_kept(
        self,
        kept: dict[str, StoredValue],
        step: int,
        now: int,
        counted: bool,
        commit: bool | None,
        order: int | None = None,
    ) -> None:
        """`order`: the place among the rows of one that has been counted; without it this is the newest."""
        state = self._state
        names, items = tuple(kept), [*kept.values()]
        self._key_sets = state.view(self._context)
        key_set = self._key_sets.get(names) or state.new_key_set(self._key_sets, names, self._context)
        state.note_nonfinite(names, items, step)
        state.journal.write_row(key_set, step, now, items, counted, checked=True)
        if counted and commit is not False:
            state.counter = step + 1
        if order is None:
            state.count(key_set, step, items)
        else:
            state.count_late(key_set, step, items, order)
        if state.watched:
            state.show(key_set, step, now, items)

    def bind(self, **context: object) -> Run:
        """The same run with a context added to each row: `run.bind(stage="eval").log(...)`.

        The run itself is not changed, so two threads never fight over one context.
        """
        return self._within(context)

    def _within(self, context: Mapping[str, object]) -> Run:
        if not isinstance(context, Mapping):
            raise UsageError(f"context takes a mapping such as {{'stage': 'eval'}}, not {context!r}.")
        key = tuple((str(name), str(value)) for name, value in context.items())
        bound = self._bound.get(key)
        if bound is None:
            bound = Run(self._attempt, {**self._context, **dict(key)})
            if len(self._bound) < _MAX_BOUND_RUNS:
                self._bound[key] = bound
        return bound

    def define_metric(
        self, name: str, step_metric: str | None = None, summary: SummaryKind | None = None
    ) -> None:
        """Say how a metric is plotted and summarised. `name` may be a pattern such as `val/*`.

        `step_metric`: the logged metric that is its x axis. `summary`: last (default), min, max, mean,
        first, none.
        """
        if not isinstance(name, str):
            raise UsageError(f"define_metric takes the name of a metric, not {name!r}.")
        if summary is not None and summary not in SUMMARY_KINDS:
            raise UsageError(f"summary={summary!r} is not known; it can be {', '.join(SUMMARY_KINDS)}.")
        self._attempt.await_deferred()
        with self._open("define_metric") as state:
            if summary is not None:
                state.aggregates.define(name, summary)
                state.watched = True
            state.record(
                Kind.EVENT, "define_metric", {"name": name, "step_metric": step_metric, "summary": summary}
            )

    def alert(self, title: str, text: str = "") -> None:
        """Record that something needs a person's attention."""
        with self._open("alert") as state:
            state.record(Kind.EVENT, "alert", {"title": str(title), "text": str(text)})

    def rewind(self, step: int) -> None:
        """Go back: what was logged behind `step` is superseded in views and stays readable; counting
        goes on behind it.
        """
        self._attempt.await_deferred()
        with self._open("rewind") as state:
            state.rewind(state.whole_step(step))

    # -- ending --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring all rows to the disk itself. On return a power cut loses none of them, unless the disk
        refuses. Rows that were deferred are waited for, at most `finish_timeout` seconds.
        """
        self._attempt.flush()

    def finish(self, exit_code: int = 0) -> None:
        """End the attempt. The run's id stays the node's; the next `init` goes on with it. Twice is
        harmless.
        """
        self._attempt.finish(exit_code)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._attempt.finish_after(error)

    # -- what is known -------------------------------------------------------------------------------

    def health(self) -> Health:
        """Whether anything is lost, late or odd: counts of rows, of odd values and steps, by backend."""
        cursors = self._state.cursors()
        with self._state.journal.lock:
            return self._state.health(cursors)

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps, so that a node that comes back from it goes on with this run at this
        step.
        """
        with self._state.journal.lock:
            identity = self._state.identity
            return {
                "schema_version": STATE_SCHEMA_VERSION,
                "project": identity.project,
                "run": identity.run,
                "attempt": identity.attempt,
                "role": identity.role,
                "uid": identity.uid,
                "version": identity.version,
                "step": self._state.step,
                "counter": self._state.counter,
            }

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go on with the run of a checkpoint, at its step; steps logged behind it are superseded in views.

        A checkpoint without a run id (an old one) is warned of, and the run stays as it is.
        """
        self._attempt.await_deferred()
        with self._open("load_state_dict"):
            self._attempt.load_state_dict(state_dict)
            self._key_sets = self._state.view(self._context)


def _read_deferred(row: DeferredRow) -> None:
    try:
        row.kept = coerce(row.values, lambda name, reason: row.skipped.append((name, reason)))
    except Exception as error:  # as in `log`
        row.skipped.append(unreadable_row(error))
    row.values = {}  # they may lie in the memory of a device


def _require_names(values: object) -> None:
    """Raises UsageError unless `values` is a mapping whose keys are strings."""
    if not isinstance(values, Mapping):
        raise UsageError(
            "run.log takes a mapping of metric names to values, such as {'loss': 0.1}, "
            f"not {type(values).__name__}."
        )
    for name in values:
        if not isinstance(name, str):
            raise UsageError(f"A metric name must be a string; {name!r} is {type(name).__name__}.")
