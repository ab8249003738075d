"""Which run does this process continue? The whole decision at start-up, in one place.

| the id file                    | what happens                                                            |
|--------------------------------|-------------------------------------------------------------------------|
| is not there                   | new id, written                                                         |
| cannot be used (damaged)       | kept as `<name>.damaged-<time>`, new id, warning                        |
| cannot be read, or written     | the id lives in memory for this attempt, warning                        |
| is another node's (C006)       | kept as `<name>.<id>.bak`, new id, warning; that node's run is untouched |
| names a run that EXISTS        | same id                                                                 |
| names a run that is GONE       | kept as `<name>.<id>.bak`, new id with `previous_run`, warning          |
| names a run and we cannot know | file byte for byte as it was, same id, warning (promise P6)             |

An explicit id is used and written; `resume` says what must hold for it: "must" an existing run, "never" none.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from nodetrack.errors import IdentityInUseError, RunExistsError, RunNotFoundError, UsageError
from nodetrack.identity.id_file import (
    Fingerprint,
    IdFileReading,
    IdFileState,
    RunIdFile,
    RunIdRecord,
    check_run_id,
    folder_text,
    new_run_id,
    now_text,
)
from nodetrack.identity.lock import DEFAULT_STALE_AFTER_SECONDS, NodeLock
from nodetrack.identity.verdict import Verdict, Verification, Verifier
from nodetrack.machine import encodable

Resume = Literal["allow", "must", "never", "auto"]
OnConflict = Literal["error", "new"]

_log = logging.getLogger("nodetrack")


@dataclass(frozen=True)
class TakenUp:
    """The run to continue or to begin.

    `resumed`: the run has, or may have, a history. `warnings` have been logged already and are kept here so
    that they can be journalled. `lock` is None where the node's folder cannot be written, or where
    `on_conflict="new"` made this a run beside the node's own. Where the folder refused, `retry` is there to
    be called now and then: it returns the lock once it has taken it and written the id, None until then.
    It says itself what a person must know, and raises nothing.
    """

    run_id: str
    resumed: bool
    previous_run: str | None
    warnings: tuple[str, ...]
    verification: Verification | None
    lock: NodeLock | None
    retry: Callable[[], NodeLock | None] | None = None


def take_up(
    id_file: RunIdFile,
    fingerprint: Fingerprint,
    verifier: Verifier,
    *,
    folder: Path,
    explicit_id: str | None = None,
    resume: Resume = "allow",
    entity: str | None = None,
    on_conflict: OnConflict = "error",
    stale_after_seconds: float = DEFAULT_STALE_AFTER_SECONDS,
    begun: Callable[[str], None] = lambda _run_id: None,
) -> TakenUp:
    """Finds this node's run and takes the node's lock; `folder` is the tracking folder, recorded in the file.

    `begun` is called with the id before it is written down; the lock is a silent owner's for
    `stale_after_seconds` where nobody can look at its process.

    Raises UsageError (an id that cannot be one), IdentityInUseError (another live process is this node, and
    `on_conflict` is "error"), RunNotFoundError and RunExistsError (`resume` cannot be honoured).
    """
    _check_arguments(explicit_id, resume, on_conflict)
    decision = _Decision(id_file, fingerprint, verifier, folder, entity, stale_after_seconds, begun)
    try:
        decision.acquire()
    except IdentityInUseError as error:
        if on_conflict == "error":
            raise
        return decision.beside(error, explicit_id, resume)
    except OSError as error:
        decision.cannot_write(error)
    try:
        return decision.explicit(explicit_id, resume) if explicit_id else decision.from_file(resume)
    except BaseException:
        if decision.lock is not None:
            decision.lock.release()
        raise


def _check_arguments(explicit_id: str | None, resume: Resume, on_conflict: OnConflict) -> None:
    if explicit_id is not None and (problem := check_run_id(explicit_id)):
        raise UsageError(f"The run id {explicit_id!r} cannot be used: {problem}. Pass another id=.")
    if resume not in get_args(Resume):
        raise UsageError(f"resume={resume!r} is not known: pass one of {', '.join(get_args(Resume))}.")
    if on_conflict not in get_args(OnConflict):
        raise UsageError(f"on_conflict={on_conflict!r} is not known: pass error or new.")


@dataclass
class _Decision:
    """The facts of one start and what has been said about them so far."""

    id_file: RunIdFile
    fingerprint: Fingerprint
    verifier: Verifier
    folder: Path
    entity: str | None
    stale_after_seconds: float
    begun: Callable[[str], None]
    lock: NodeLock | None = None
    warnings: list[str] = field(default_factory=list)
    writable: bool = True
    kept: Path | None = None
    wanted: RunIdRecord | None = None
    found: str | None = None
    refused: bool = False

    def acquire(self) -> None:
        """Takes the node's lock."""
        path = self.id_file.path.with_suffix(".lock")
        self.lock = NodeLock.acquire(
            path, str(self.fingerprint), stale_after_seconds=self.stale_after_seconds
        )

    def explicit(self, run_id: str, resume: Resume) -> TakenUp:
        """The caller names the run."""
        verification = self._verify(run_id)
        self._check_explicit(run_id, resume, verification)
        reading = self._read()
        known = reading.record is not None and reading.record.id == run_id
        record = self._record(run_id, reading.record, verification)
        if not known:
            self._make_room(reading)
        if not known or (verification.verdict is Verdict.EXISTS and reading.state is IdFileState.READABLE):
            self._write(record)
        resumed = verification.verdict is Verdict.EXISTS or (
            known and verification.verdict is Verdict.UNKNOWN
        )
        return self._taken(run_id, resumed, record.previous_run, verification)

    def from_file(self, resume: Resume) -> TakenUp:
        """The node's own file names the run, or there is none yet."""
        reading = self._read()
        record = reading.record
        if record is None or self._is_foreign(record):
            return self._begin_without(reading, resume)
        if resume == "never":
            run_id = self._begin(reading, previous_run=record.id)
            return self._taken(run_id, False, record.id, None)
        verification = self._verify(record.id)
        if resume == "must" and verification.found_nothing:
            raise self._not_found(f"run {record.id} was not found: {verification.reason}")
        if verification.verdict is Verdict.GONE:
            return self._replace_gone(reading, record, verification)
        return self._continue(reading, record, verification)

    def beside(self, conflict: IdentityInUseError, explicit_id: str | None, resume: Resume) -> TakenUp:
        """Another live process is this node: a run of its own, and the node's file stays that process's."""
        reading = self.id_file.read()
        taken = reading.record.id if reading.record is not None else None
        if explicit_id is None or explicit_id == taken:
            run_id, verification = new_run_id(), None
        else:
            run_id, verification = explicit_id, self._verify(explicit_id)
            self._check_explicit(run_id, resume, verification)
        self._warn(
            f"Node {conflict.node} is already running as process {conflict.pid} on {conflict.host}; "
            f"this process logs to run {run_id} beside it."
        )
        resumed = verification is not None and verification.verdict is Verdict.EXISTS
        return self._taken(run_id, resumed, None, verification)

    def cannot_write(self, error: OSError) -> None:
        """The node's folder refuses: said once, and nothing more is tried there."""
        if self.writable:
            self.writable = False
            self.refused = True
            self._warn(
                f"{self.id_file.path.parent} cannot be written ({error.strerror or error}): the next start "
                f"of {self.fingerprint} may not find this run, nor would a second process of it be noticed. "
                "Make the folder writable, or pass id= at the next start."
            )

    def retry(self) -> NodeLock | None:
        """What the folder refused at the start, once more: the lock, once that and the id file are there."""
        if not self.refused:
            return None
        held = self.lock
        try:
            if held is None:
                self.acquire()
            self._write_late()
        except IdentityInUseError as error:
            self.refused = False
            self._warn(f"{error} This process has logged to a run of its own meanwhile.")
        except OSError as error:
            _log.debug("%s still cannot be written: %s.", self.id_file.path.parent, error)
            if held is None and self.lock is not None:
                self.lock.release()  # the caller, who would release it, does not know of it
            self.lock = held
            return None
        return self.lock

    def _write_late(self) -> None:
        """The record of this start, unless another start has written its own meanwhile. Raises OSError."""
        reading = self.id_file.read()
        if self.wanted is None or self.wanted == reading.record:
            return
        if reading.state is IdFileState.UNREADABLE:
            raise OSError(errno.EACCES, reading.reason)
        present = reading.record.id if reading.record is not None else None
        if present not in (None, self.found, self.wanted.id):
            self._warn(
                f"{self.id_file.path} names run {present} by now and is left so: to go on with this run, "
                f"pass id={self.wanted.id!r} at the next start."
            )
            return
        if present is not None and present != self.wanted.id:
            self.id_file.archive(present)
        elif present is None and reading.state is not IdFileState.MISSING:
            self.id_file.set_aside()
        self.begun(self.wanted.id)
        self.id_file.write(self.wanted)

    def _continue(self, reading: IdFileReading, record: RunIdRecord, verification: Verification) -> TakenUp:
        self._note_other_host(record)
        self._note_copied_folder(record)
        if verification.verdict is Verdict.UNKNOWN:
            self._warn(f"Run {record.id} could not be verified ({verification.reason}); it is continued.")
        elif reading.state is IdFileState.NEWER:
            self._warn(f"The run id file {self.id_file.path} is left as it is: {reading.reason}.")
        else:
            self._write(self._record(record.id, record, verification))
        return self._taken(record.id, True, record.previous_run, verification)

    def _replace_gone(
        self, reading: IdFileReading, record: RunIdRecord, verification: Verification
    ) -> TakenUp:
        run_id = self._begin(reading, previous_run=record.id)
        self._warn(
            f"Run {record.id} is gone ({verification.reason}): this node goes on as run {run_id}"
            f"{self._where_kept()}."
        )
        return self._taken(run_id, False, record.id, verification)

    def _begin_without(self, reading: IdFileReading, resume: Resume) -> TakenUp:
        """No id of this node's: the file is missing, cannot be used, or is another node's."""
        owner = reading.record.fingerprint if reading.record is not None else None
        reason = f"it belongs to {owner}" if owner is not None else reading.reason
        if resume == "must":
            raise self._not_found(f"the run id file {self.id_file.path} names none: {reason}")
        run_id = self._begin(reading, previous_run=None)
        if reading.state is not IdFileState.MISSING:
            self._warn(
                f"The run id file {self.id_file.path} is not used, because {reason}: run {run_id} is begun"
                f"{self._where_kept()}."
            )
        return self._taken(run_id, False, None, None)

    def _begin(self, reading: IdFileReading, previous_run: str | None) -> str:
        """A new id, written in the place of what the file held."""
        self._make_room(reading)
        record = RunIdRecord(
            id=new_run_id(),
            fingerprint=self.fingerprint,
            folder=folder_text(self.folder),
            previous_run=previous_run,
            created_at=now_text(),
        )
        self._write(record)
        return record.id

    def _read(self) -> IdFileReading:
        reading = self.id_file.read()
        self.found = reading.record.id if reading.record is not None else None
        return reading

    def _make_room(self, reading: IdFileReading) -> None:
        """Keeps what the file holds under another name, before it is written anew."""
        if reading.state is IdFileState.UNREADABLE:
            self.writable = False  # nothing is known about what lies there, so nothing replaces it
        if not self.writable or reading.state is IdFileState.MISSING:
            return
        try:
            if reading.record is not None:
                self.kept = self.id_file.archive(reading.record.id)
            else:
                self.kept = self.id_file.set_aside()
        except OSError as error:
            self.cannot_write(error)

    def _where_kept(self) -> str:
        return f", and the old file is kept as {self.kept}" if self.kept is not None else ""

    def _record(self, run_id: str, before: RunIdRecord | None, verification: Verification) -> RunIdRecord:
        """What the file shall say about a run that goes on, or that the caller named."""
        mine = before if before is not None and not self._is_foreign(before) else None
        same = mine if mine is not None and mine.id == run_id else None
        previous = same.previous_run if same is not None else mine.id if mine is not None else None
        return RunIdRecord(
            id=run_id,
            fingerprint=self.fingerprint,
            folder=folder_text(self.folder),
            previous_run=previous,
            created_at=(same.created_at if same is not None else "") or now_text(),
            verified_at=now_text() if verification.verdict is Verdict.EXISTS else None,
        )

    def _write(self, record: RunIdRecord) -> None:
        self.wanted = record
        if not self.writable:
            return
        try:
            self.begun(record.id)
            self.id_file.write(record)
        except OSError as error:
            self.cannot_write(error)

    def _verify(self, run_id: str) -> Verification:
        return self.verifier.verify(run_id, self.fingerprint.project, self.entity)

    def _check_explicit(self, run_id: str, resume: Resume, verification: Verification) -> None:
        if resume == "must" and verification.found_nothing:
            raise self._not_found(f"run {run_id} was not found: {verification.reason}")
        if resume == "never" and verification.verdict is Verdict.EXISTS:
            raise RunExistsError(
                f"Run {run_id} of project {self.fingerprint.project} exists ({verification.reason}), and "
                'resume="never" was asked: pass another id=, or resume="allow" to continue it.'
            )

    def _not_found(self, what: str) -> RunNotFoundError:
        return RunNotFoundError(
            f'resume="must" cannot be honoured for {self.fingerprint}, because {what}. '
            'Pass id= of an existing run, or resume="allow".'
        )

    def _is_foreign(self, record: RunIdRecord) -> bool:
        """Another node's; a record without a fingerprint is nobody else's."""
        return record.fingerprint is not None and not record.fingerprint.same_node(self.fingerprint)

    def _note_copied_folder(self, record: RunIdRecord) -> None:
        """A tracking folder that was moved is fine; in a copied one, one run would grow in two places."""
        here, before = self.folder.absolute(), Path(record.folder)
        if not record.folder or record.folder == folder_text(here):
            return
        place = self.id_file.path
        other = type(self.id_file)(before / place.relative_to(here)) if place.is_relative_to(here) else None
        known = other.read().record if other is not None else None
        if known is not None and known.id == record.id and not _same_folder(before, here):
            self._warn(
                f"{here} seems to be a copy: run {record.id} is in {before} too, and grows in both from now "
                'on. Pass resume="never" to begin a run of its own here.'
            )

    def _note_other_host(self, record: RunIdRecord) -> None:
        before = record.fingerprint.host if record.fingerprint is not None else self.fingerprint.host
        if before != self.fingerprint.host:
            _log.info("Run %s moved from host %s to %s.", record.id, before, self.fingerprint.host)

    def _warn(self, message: str) -> None:
        message = encodable(message)  # a path may be no text
        _log.warning(message)
        self.warnings.append(message)

    def _taken(
        self, run_id: str, resumed: bool, previous_run: str | None, verification: Verification | None
    ) -> TakenUp:
        retry = self.retry if self.refused else None
        return TakenUp(run_id, resumed, previous_run, tuple(self.warnings), verification, self.lock, retry)


def _same_folder(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder, over links and mounts."""
    try:
        return one.samefile(other)
    except OSError:
        return False
