"""One process start of a run: everything that has to be opened, looked after and closed again.

`tracker.init` decides what the attempt is; `Run` is the face that the caller sees.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from nodetrack.backends.base import Backend
from nodetrack.console import console
from nodetrack.errors import UsageError
from nodetrack.identity.id_file import check_run_id
from nodetrack.identity.lock import NodeLock
from nodetrack.journal.null import NullJournal
from nodetrack.journal.recover import Recovered
from nodetrack.journal.writer import JournalWriter
from nodetrack.keeper import Keeper, touch
from nodetrack.machine import encodable
from nodetrack.process_end import describe_error, exit_code_of, process_end
from nodetrack.records import JsonValue, Kind
from nodetrack.redact import redact
from nodetrack.run_delivery import RunDelivery, segment_bytes
from nodetrack.run_files import remove_unused, write_side_files
from nodetrack.run_state import Identity, RunState, plain_values
from nodetrack.run_summary import Config
from nodetrack.settings import Settings

HEARTBEAT_FILE: Final = "heartbeat"
#: So much is logged between two marks; see `journal.recover`.
MARK_BYTES: Final = 1024 * 1024
_HANDLER_PATIENCE_SECONDS: Final = 0.1
#: How long an attempt that does not end well waits for deferred values: the device may be what failed.
_UNWELL_PATIENCE_SECONDS: Final = 2.0


class Labels(msgspec.Struct, frozen=True):
    """What a person may change about a run at any time."""

    name: str
    tags: tuple[str, ...] = ()
    notes: str | None = None


class Attempt:
    """The open resources of one attempt, and how it ends.

    `facts` describe the process and the machine; `rebase` finds the identity and the standing of another
    run id, for a checkpoint that names one. `retry` writes the id file that a full disk refused at the start.
    `backends` are called in this process, `delivered`, as given to `init`, by a process of their own.
    """

    def __init__(
        self,
        identity: Identity,
        recovered: Recovered,
        settings: Settings,
        *,
        labels: Labels,
        config: Mapping[str, object],
        facts: Mapping[str, JsonValue],
        lock: NodeLock | None = None,
        backends: Mapping[str, Backend[Any]] | None = None,
        delivered: Sequence[str | Mapping[str, object]] = (),
        retry: Callable[[], NodeLock | None] | None = None,
        rebase: Callable[[str], tuple[Identity, Recovered]] | None = None,
    ) -> None:
        self.labels = labels
        self.settings = settings
        self.lock = lock
        self._facts = facts
        self._rebase = rebase
        self._retry = retry
        self._pid = os.getpid()
        self._keeper: Keeper | None = None
        self._keeper_pid = 0
        self._closed = False
        self.config = Config(config, self._write_config)
        self.state = RunState(identity, step=recovered.step, counter=recovered.counter)
        self.state.backends.update(backends or {})
        self.state.watched = bool(self.state.backends)
        self._delivery = RunDelivery(self.state, settings, delivered, facts)
        self._take_over(recovered)
        self._open_journal()

    def _take_over(self, recovered: Recovered) -> None:
        self.starting_step = recovered.step
        self.resumed = recovered.attempt_number > 0
        self.state.summary.update(recovered.summary)
        self.state.labels.update(recovered.labels)

    def _open_journal(self) -> None:
        state = self.state
        if self.settings.mode == "disabled" or state.disabled:
            state.disabled = True
            state.journal = NullJournal()
            return
        state.journal = JournalWriter(
            state.identity.attempt_folder,
            state.header,
            lambda message: state.warn(f"Journal: {message}."),
            segment_bytes=segment_bytes(self.settings),
            backlog_records=self.settings.backlog_records,
            begun=self._look_after,
        )

    # -- beginning -----------------------------------------------------------------------------------

    def start(self, deadline: float) -> None:
        """Write what the attempt is, before its first row, and begin to look after it. The backends may
        answer until `deadline` (monotonic). Raises BackendRefusedError if one refuses us.
        """
        state = self.state
        self._write_beginning()
        if state.disabled:
            return
        process_end.watch(self)
        if self.settings.console:
            console.watch(state)
        self._delivery.start()
        self._delivery.shake_hands(deadline)
        state.say()

    def _look_after(self) -> None:
        """Have one keeper in each process that writes: this one, and a forked child once it logs."""
        if self._keeper_pid != os.getpid():
            self._keeper_pid = os.getpid()
            self._keeper = Keeper(self._tend, self._beat, self.settings.heartbeat_seconds)
            try:
                self._keeper.start()
            except RuntimeError as error:  # no more threads to be had, or the interpreter is about to end
                self.state.warn_once("keeper", f"Nobody syncs run {self.state.identity.run}: {error}.")

    def _write_beginning(self) -> None:
        state, identity = self.state, self.state.identity
        state.labels.update(
            name=self.labels.name,
            tags=self.labels.tags,
            notes=self.labels.notes,
            group=identity.group,
            job_type=identity.job_type,
        )
        with state.journal.lock:
            state.journal.open()
            state.record(Kind.ATTEMPT, self._description())
            state.record(Kind.TAGS, state.labels)
            state.record(Kind.CONFIG, self._public_config(self.config.as_dict()))
        self._write_side_files()

    def _description(self) -> dict[str, JsonValue]:
        identity = msgspec.to_builtins(self.state.identity, enc_hook=lambda value: encodable(str(value)))
        return {**self._facts, **identity}

    def _public_config(self, values: Mapping[str, object]) -> Mapping[str, JsonValue]:
        """The config as it may leave the process: plain values, secrets masked (P9)."""
        return cast("Mapping[str, JsonValue]", redact(plain_values(values), self.settings.redact))

    def _write_side_files(self) -> None:
        """The files beside the journal, for people: the journal says the same."""
        if self.state.disabled:
            return
        config = self._public_config(self.config.as_dict())
        try:
            write_side_files(self.state.identity, self._description(), config)
        except OSError as error:
            if not self.state.journal.failing:  # else the journal has said it of the same disk
                self.state.warn_once(
                    "side files", f"The files beside the journal could not be written: {error}."
                )

    # -- meanwhile -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait for the deferred rows and bring everything to the disk itself."""
        state, seconds = self.state, self.settings.finish_timeout
        if not state.deferral.drain(seconds):
            state.warn(
                f"Deferred rows of run {state.identity.run} still wait for their values after {seconds:g} "
                "seconds: flush goes on without them."
            )
            state.say()
        state.journal.sync()

    def await_deferred(self, seconds: float | None = None) -> None:
        """Have the rows that were deferred stand before what is recorded next. What is not there after
        `seconds`, by default `finish_timeout`, is counted as lost: it must not come after all. The caller
        does not hold the journal's lock.
        """
        seconds = self.settings.finish_timeout if seconds is None else seconds
        if not self.state.deferral.drain(seconds):
            with self.state.journal.lock:
                self.state.give_up_deferred()
            self.state.say()

    def set_labels(self, fields: Mapping[str, object]) -> None:
        """Change name, tags or notes."""
        texts = {name: _label(value) for name, value in fields.items()}
        self.labels = msgspec.structs.replace(self.labels, **texts)
        self.state.record(Kind.TAGS, texts)
        self.state.labels.update(texts)

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Go on with the run and the step of a checkpoint."""
        state = self.state
        run_id, step = saved.get("run"), saved.get("step")
        if not isinstance(run_id, str) or not isinstance(step, int):
            state.warn(f"The checkpoint has no run id, so run {state.identity.run} goes on as it is.")
            return
        if saved.get("project") not in (None, state.identity.project):
            raise UsageError(
                f"The checkpoint is of project {saved['project']!r}, this run of {state.identity.project!r}: "
                "call init with the checkpoint's project."
            )
        fault = check_run_id(run_id)
        if fault is not None:
            raise UsageError(f"The checkpoint's run id {run_id!r} cannot be one: {fault}.")
        if self._is_of_another_node(saved):
            state.warn(
                f"The checkpoint is of node {saved['role']}-{saved['uid']}: this node takes its step and "
                f"keeps its own run {state.identity.run}."
            )
        elif run_id != state.identity.run:
            self._move_to(run_id)
        self._go_to(state.whole_step(step), saved.get("counter"))

    def _is_of_another_node(self, saved: Mapping[str, object]) -> bool:
        """Whether another node saved it; a checkpoint without role and uid is nobody else's."""
        identity = self.state.identity
        return (saved.get("role", identity.role), saved.get("uid", identity.uid)) != (
            identity.role,
            identity.uid,
        )

    def _go_to(self, step: int, counter: object) -> None:
        """Go on at `step`: what was logged from there on is superseded, what lies before it is skipped."""
        state = self.state
        if step < state.step:
            state.rewind(step - 1)
        elif step > state.step:
            state.base_step = step
            state.counter = max(state.counter, state.whole_step(counter) if counter is not None else step)
            state.record(Kind.EVENT, "checkpoint", {"step": step, "counter": state.counter})

    def _move_to(self, run_id: str) -> None:
        """Leave the run that this attempt began with and go on as another attempt of `run_id`."""
        state = self.state
        if self._rebase is None or state.disabled:
            return
        if state.logged:
            state.warn(
                f"{state.logged} rows were logged to run {state.identity.run} before the checkpoint "
                f"named run {run_id}."
            )
        self._record_end("finished", 0, f"goes on as run {run_id}")
        state.journal.close()
        if not state.logged:
            remove_unused(state.identity)
        identity, recovered = self._rebase(run_id)
        self._retry = None  # the id file names the checkpoint's run now
        lock = state.journal.lock
        self._delivery.leave()
        state.forget_key_sets()
        state.identity, state.base_step, state.counter = identity, recovered.step, recovered.counter
        state.logged = state.out_of_order = 0
        self._take_over(recovered)
        self._open_journal()
        state.journal.lock = lock  # threads that wait to log wait for this one
        self._write_beginning()
        self._delivery.start()

    def note_signal(self, name: str) -> None:
        """A signal came; what follows is the user's handler's affair."""
        self.state.record(Kind.EVENT, "signal", {"signal": name})

    def _tend(self) -> None:
        console.tend()
        journal = self.state.journal
        if journal.tend(sync=not self._delivery.tend()):
            self._write_side_files()
        with journal.lock:
            if not self.state.finished:
                self._mark_now_and_then()
                self._notice_a_move()
        self.state.say()

    def _notice_a_move(self) -> None:
        """Rows follow a folder that is moved under a running node; a segment begun later lies in the old
        place.
        """
        if self.state.journal.is_elsewhere():
            self.state.warn_once(
                "moved",
                f"The journal of run {self.state.identity.run} was moved away from "
                f"{self.state.identity.attempt_folder} while it was written: restart the node where it is.",
            )

    def _mark_now_and_then(self) -> None:
        if self.state.journal.unmarked_bytes >= MARK_BYTES:
            self.state.mark()

    def _beat(self) -> None:
        touch(self.state.identity.attempt_folder / HEARTBEAT_FILE)
        if os.getpid() != self._pid:
            return
        if self._retry is not None and (lock := self._retry()) is not None:
            self.lock, self._retry = lock, None
        if self.lock is None:
            return
        if not self.lock.touch() and not self.state.finished:
            self.state.warn_once(
                "lock",
                f"Another process has taken over node {self.state.identity.role}-{self.state.identity.uid}: "
                "two of them may be logging to one run.",
            )

    # -- ending --------------------------------------------------------------------------------------

    def finish(self, exit_code: int) -> None:
        """The caller says that this is the end."""
        if exit_code:
            self.end("crashed", exit_code, f"exit code {exit_code}")
        else:
            self.end("finished", 0, "")

    def finish_after(self, error: BaseException | None) -> None:
        """The end of a `with` block."""
        if error is None:
            self.end("finished", 0, "")
        elif isinstance(error, SystemExit):
            self.finish(exit_code_of(error.code))
        elif isinstance(error, KeyboardInterrupt):
            self.end("terminated", 130, "SIGINT")
        else:
            self.end("crashed", 1, describe_error(error))

    def end(self, state: str, exit_code: int, reason: str) -> None:
        """Record how the attempt ended and close everything. Harmless when it has ended before.

        In a forked child only the child's own segment is closed: the attempt is its parent's.
        """
        deadline = time.monotonic() + self.settings.finish_timeout
        try:
            console.forget(self.state)
            is_well = state == "finished" and not process_end.handling
            self.await_deferred(
                None if is_well else min(self.settings.finish_timeout, _UNWELL_PATIENCE_SECONDS)
            )
            self._record_once(state, exit_code, reason)
            self._close_once(deadline)
        except Exception as error:  # training has ended well; a fault of ours must not make it look otherwise
            self.state.warn(
                f"Run {self.state.identity.run} could not be finished ({type(error).__name__}: {error}); "
                "what was logged is in its journal."
            )
        finally:  # a Ctrl-C too
            self.state.say()

    def _record_once(self, state: str, exit_code: int, reason: str) -> None:
        run = self.state
        with run.journal.lock:
            if run.finished:
                return
            run.give_up_deferred()  # what another thread has deferred in this instant
            if os.getpid() == self._pid:
                self._record_end(state, exit_code, reason)
            run.last_measured = run.measured_summary()
            run.finished = True
            run.forget_key_sets()

    def _close_once(self, deadline: float) -> None:
        """Close what is still open. A Ctrl-C may end this half-way; the next call, or the exit, goes on."""
        run = self.state
        if self._closed:
            return
        try:
            run.deferral.stop()
            if self._keeper is not None:
                self._keeper.stop(self._patience())
            run.journal.close()
            if os.getpid() == self._pid:
                self._close_backends()
                self._delivery.end(deadline)
        finally:
            if os.getpid() == self._pid and self.lock is not None:
                self.lock.release()
        self._closed = True
        process_end.forget(self)
        if run.journal.lost and os.getpid() == self._pid:
            run.warn(
                f"{run.journal.lost} records of run {run.identity.run} could not be kept "
                f"({run.journal.last_error})."
            )

    def _patience(self) -> float:
        """How long the keeper is waited for: hardly in a signal handler, below which its lock may be held."""
        return _HANDLER_PATIENCE_SECONDS if process_end.handling else self.settings.finish_timeout

    def _close_backends(self) -> None:
        for kind, backend in self.state.backends.items():
            try:
                backend.close()
            except Exception as error:  # the others have to be closed as well (P5)
                self.state.warn(f"The backend {kind} could not be closed ({describe_error(error)}).")

    def _record_end(self, state: str, exit_code: int, reason: str) -> None:
        self._mark_now_and_then()
        self.state.record(Kind.FINISH, state, exit_code, reason)

    def _write_config(self, values: Mapping[str, object]) -> None:
        self.state.require_open("config.update")
        with self.state.journal.lock:
            self.state.record(Kind.CONFIG, self._public_config(values))


def _label(value: object) -> object:
    """Names, notes and tags are texts; one text alone is one tag."""
    if value is None or isinstance(value, str):
        return value
    return tuple(str(part) for part in cast("Iterable[object]", value))
