"""The thread that feeds one backend of one run: lock, open, then batch after batch, for as long as it takes.

A batch that fails is sent again with growing pauses, as long as the run lives. One that the backend refuses
for good is halved until the refused records stand alone; they go to quarantine and the rest arrives.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from nodetrack.backends.base import Backend, Batch, RunInfo
from nodetrack.delivery.connection import describe_failure
from nodetrack.delivery.lock import BackendLock
from nodetrack.delivery.patience import Patience
from nodetrack.delivery.quarantine import Quarantine
from nodetrack.delivery.source import Source, Taken, has_all
from nodetrack.delivery.spec import revealed
from nodetrack.errors import BackendRefusedError, BatchRejectedError, describe
from nodetrack.journal.cursor import CURSORS, BackendState, Cursor, CursorFile
from nodetrack.machine import encodable
from nodetrack.records import Record, Row

#: waiting: another process has the backend. done: everything that there is has been sent.
WorkerState = Literal[BackendState, "waiting", "done"]
#: A batch that was sent, and the records of it that were refused for good, with the reasons.
_Sent: TypeAlias = tuple[Taken, list[tuple[Record, str]]]

_LOCK_POLL_SECONDS: Final = 0.2
#: After so many failures in a row the backend is closed and opened anew.
_FAILURES_TO_REOPEN: Final = 3
#: So many records refused and no row taken: then it is not the records.
_REFUSES_EVERYTHING: Final = 32

_log = logging.getLogger("nodetrack.delivery")


class Status(msgspec.Struct, frozen=True):
    """Where a backend stands. Counts are rows of the whole run."""

    backend: str
    state: WorkerState
    error: str
    url: str | None
    delivered: int
    quarantined: int
    lost: int


class Worker:
    """Feeds `backend` from its cursor until it is told to stop, or has sent all and `draining` is set.

    `own_attempt`: the one that it answers for. While another process has the backend, it is done once that
    one has sent all of this attempt; without it, it waits for the backend.
    """

    def __init__(
        self,
        run_folder: Path,
        project: str,
        kind: str,
        backend: Backend[Any],
        draining: threading.Event,
        attempts: Collection[str] | None,
        changed: Callable[[Status], None],
        own_attempt: str | None = None,
    ) -> None:
        self.kind = kind
        self._backend = backend
        self._patience = Patience(draining)
        self._draining, self._stopping = draining, self._patience.stopping
        self._changed = changed
        self._file = CursorFile(run_folder, kind)
        self._lock = BackendLock(run_folder / CURSORS / f"{kind}.lock")
        self._quarantine = Quarantine(run_folder, kind)
        self._destination = encodable(backend.config.destination())
        self._cursor = Cursor(backend=kind, destination=self._destination)
        self._cursor_lock = threading.Lock()
        self._run_folder, self._project, self._attempts = run_folder, project, attempts
        self._own_attempt = own_attempt
        #: Whether the cursor is ours to write, and whether it ever was: others only move it on.
        self._has_cursor = self._had_cursor = False
        self._state: WorkerState = "starting"
        self._opened = False
        self._has_taken_any = False
        self._held: list[_Sent] = []
        self._thread = threading.Thread(target=self._run, name=f"nodetrack-{kind}", daemon=True)

    # -- from other threads --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Look for records, or try again, now."""
        self._patience.wake()

    def stop(self) -> None:
        """End after the call that is under way."""
        self._patience.stop()

    def join(self, timeout: float | None) -> bool:
        """Whether the thread has ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def status(self) -> Status:
        """Where the backend stands now."""
        with self._cursor_lock:
            cursor = self._cursor
            return Status(
                backend=self.kind,
                state=self._state,
                error=cursor.last_error if self._state in ("down", "refused", "waiting") else "",
                url=cursor.url,
                delivered=cursor.rows(),
                quarantined=cursor.quarantined,
                lost=cursor.lost,
            )

    def lock_owner(self) -> int | None:
        """The process that keeps this worker waiting."""
        return self._lock.owner() if self._state == "waiting" else None

    def offset(self, attempt: str, segment_name: str) -> int | None:
        """How far the backend has come in a segment, at least; None until the worker has had its cursor."""
        with self._cursor_lock:
            if not self._had_cursor:
                return None
            return self._cursor.progress(attempt, segment_name).offset

    def note_lost(self, attempt: str, segment_name: str, writer: int, rows: int) -> bool:
        """So many rows of a segment are removed from the journal before the backend had them. False if that
        cannot be noted: the cursor is another process's by now.
        """
        with self._cursor_lock:
            if not self._has_cursor:
                return False
            entry = self._cursor.progress(attempt, segment_name)
            entry.writer = writer
            entry.lost += rows
        self._save()  # on a full disk it is counted in memory, and written when there is room again
        return True

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    if self._have_lock():
                        self._feed()
                except Exception as error:  # a fault of ours: the others go on, and this one begins again
                    _log.exception("Delivery to %s stumbled", self.kind)
                    self._enter("down", f"delivery stumbled, and begins again ({describe(error)})")
                    self._leave()
                    self._patience.rest()
                else:
                    return
        finally:
            self._leave()

    def _leave(self) -> None:
        """Close the backend, and let go of the cursor before another process can have it."""
        self._close()
        self._held.clear()
        with self._cursor_lock:
            self._has_cursor = False
        self._lock.release()

    def _have_lock(self) -> bool:
        while not self._acquired():
            if self._state != "waiting":
                self._state = "waiting"
                self._tell()
            if self._draining.is_set() and self._is_sent_by_another():
                self._state = "done"  # and not by `_enter`: the cursor is the other's to write
                self._tell()
                return False
            if self._stopping.wait(_LOCK_POLL_SECONDS):
                return False
        return True

    def _acquired(self) -> bool:
        """Whether the lock is ours now. A disk that is full or may not be written is waited for."""
        while True:
            try:
                return self._lock.acquire()
            except OSError as error:
                self._enter("down", f"{self._lock.path} cannot be written: {error.strerror or error}")
                if self._stopping.wait(_LOCK_POLL_SECONDS):
                    return False

    def _is_sent_by_another(self) -> bool:
        """Whether the process that has the backend has sent all of our attempt: another node of this run may
        go on for weeks.
        """
        cursor, attempt = self._file.read(), self._own_attempt
        if attempt is None or cursor is None or cursor.destination != self._destination:
            return False
        return has_all(cursor, self._run_folder, self._project, attempt)

    def _feed(self) -> None:
        config = self._backend.config
        cursor = self._file.take_up(self._destination)
        cursor.config = cast("dict[str, Any]", revealed(config.public()))  # which leaves the secrets out
        cursor.state = "starting"
        self._backend.memory = copy.deepcopy(cursor.memory)
        with self._cursor_lock:
            self._cursor, self._state = cursor, "starting"
            self._has_cursor = self._had_cursor = True
        self._save()
        self._tell()
        source = Source(self._run_folder, self._project, cursor, self._attempts)
        if not self._persist(lambda: self._open(source)):
            return
        since, same_round = time.monotonic(), False
        while not self._stopping.is_set():
            last_look = self._draining.is_set()
            taken = source.next(
                config.batch_rows, config.batch_bytes, same_round=same_round and not last_look
            )
            if taken is None and last_look:
                taken = source.next(config.batch_rows, config.batch_bytes, look=True)
            if taken is not None or (last_look and self._held):
                since, same_round = time.monotonic(), True
                if not self._deliver(source, self._wait_out() if taken is None else [taken]):
                    return
            elif last_look:
                self._close()
                self._enter("done")
                return
            else:  # what grew meanwhile waits for others, so long as was asked for
                self._patience.wait(max(0.0, since + config.batch_seconds - time.monotonic()))
                since, same_round = time.monotonic(), False

    def _open(self, source: Source) -> None:
        run = source.newest_attempt()
        while run is None and not self._stopping.wait(_LOCK_POLL_SECONDS) and not self._draining.is_set():
            run = source.newest_attempt()
        if run is not None:
            self._open_for(run)

    def _open_for(self, run: RunInfo) -> None:
        self._backend.open(run)
        self._opened = True
        with self._cursor_lock:
            self._cursor.url = self._backend.url
        self._enter("ok")

    def _close(self) -> None:
        if self._opened:
            self._opened = False
            try:
                self._backend.close()
            except Exception:  # what was acknowledged has arrived; the rest is sent again
                _log.warning("The backend %s could not be closed", self.kind, exc_info=True)

    # -- one batch -----------------------------------------------------------------------------------

    def _deliver(self, source: Source, batches: list[Taken]) -> bool:
        """Send batches and move the cursor behind them; False if the worker was stopped before that.

        As long as the backend has taken no row, it may not be the rows that it refuses: batches are held
        until it is known, and sent again.
        """
        while batches:
            sent = self._send(batches.pop(0))
            if sent is None:
                return False
            self._held.append(sent)
            if self._refused_count() >= _REFUSES_EVERYTHING:
                batches = self._wait_out() + batches
        if not self._refused_count():
            for sent in self._held:
                self._acknowledge(source, sent)
            self._held.clear()
        return True

    def _refused_count(self) -> int:
        """How many records were refused by a backend that has taken no row yet."""
        return 0 if self._has_taken_any else sum(len(refused) for _, refused in self._held)

    def _send(self, taken: Taken) -> _Sent | None:
        """Send a batch, or as much as tells that the backend refuses everything; None if stopped."""
        refused: list[tuple[Record, str]] = []
        waiting = [taken.batch.records] if taken.batch.records else []
        while waiting and (self._has_taken_any or len(refused) < _REFUSES_EVERYTHING):
            part = waiting.pop()
            try:
                if not self._persist(functools.partial(self._write, taken.batch, part)):
                    return None
                self._has_taken_any |= any(isinstance(record, Row) for record in part)
            except BatchRejectedError as error:
                if len(part) > 1:
                    middle = len(part) // 2
                    waiting += [part[middle:], part[:middle]]
                else:
                    refused.append((part[0], str(error)))
        return taken, refused

    def _write(self, batch: Batch, records: Sequence[Record]) -> None:
        """One call of the backend, which remembers nothing of a call that failed."""
        backend = self._backend
        memory, left_out = copy.deepcopy(backend.memory), dict(backend.left_out)
        part = (
            batch if len(records) == len(batch.records) else msgspec.structs.replace(batch, records=records)
        )
        try:
            if not self._opened:
                self._open_for(batch.run)
            backend.write(part)
        except BaseException:
            backend.memory, backend.left_out = memory, left_out
            raise
        if self._state != "ok":
            self._enter("ok")

    def _acknowledge(self, source: Source, sent: _Sent) -> None:
        taken, refused = sent
        for record, reason in refused:
            self._keep_refused(taken.batch, record, reason)
        rows = sum(isinstance(record, Row) for record, _ in refused)
        with self._cursor_lock:
            cursor = self._cursor
            source.acknowledge(taken, refused=rows)
            cursor.quarantined_records += len(refused) - rows
            for reason, count in self._backend.left_out.items():
                cursor.left_out[reason] = cursor.left_out.get(reason, 0) + count
            self._backend.left_out = {}
            cursor.memory = copy.deepcopy(self._backend.memory)
            cursor.last_ack_ns = time.time_ns()
        self._save()
        self._tell()

    def _keep_refused(self, batch: Batch, record: Record, reason: str) -> None:
        try:
            self._quarantine.add(batch, record, reason)
        except OSError as error:  # it is counted all the same, and the journal has it
            _log.warning("%s cannot be written: %s", self._quarantine.path, error)

    def _wait_out(self) -> list[Taken]:
        """The backend has refused all rows that it was ever given: it cannot be the rows. Returns after a
        while what is to be sent again.
        """
        held = [taken for taken, _ in self._held]
        reason = next(refused[-1][1] for _, refused in reversed(self._held) if refused)
        self._held.clear()
        self._enter("refused", f"{self.kind} takes no record at all: {reason}")
        self._patience.rest()
        return held

    def _persist(self, call: Callable[[], None]) -> bool:
        """Call until it succeeds; False if the worker was stopped before. Raises BatchRejectedError."""
        return self._patience.persist(call, self._note_failure)

    def _note_failure(self, error: BaseException | None, in_a_row: int) -> None:
        if self._opened and in_a_row % _FAILURES_TO_REOPEN == 0:
            self._close()
        refused = isinstance(error, BackendRefusedError)
        self._enter("refused" if refused else "down", describe_failure(error, self._destination))

    # -- what others see -----------------------------------------------------------------------------

    def _enter(self, state: WorkerState, error: str = "") -> None:
        with self._cursor_lock:
            self._state = state
            if state in ("down", "refused"):
                self._cursor.note_error(state, error)
            elif state in ("ok", "done"):
                self._cursor.state = "ok"
        self._save()
        self._tell()

    def _save(self) -> bool:
        """Write the cursor, if it is ours; False if that could not be done."""
        try:
            with self._cursor_lock:
                if self._has_cursor:
                    self._file.write(self._cursor)
                    return True
        except (OSError, ValueError, TypeError) as error:  # what arrived since is sent again after a crash
            _log.warning("%s cannot be written: %s", self._file.path, error)
        return False

    def _tell(self) -> None:
        try:
            self._changed(self.status())
        except Exception:  # whoever listens must not end the delivery
            _log.exception("A listener of the delivery failed")
