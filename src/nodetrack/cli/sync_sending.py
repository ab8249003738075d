"""Carrying out what `nodetrack sync` is to do: a few jobs at a time, until all are done or it is enough.

Each job runs the engine that the node itself delivers with.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from nodetrack.backends.factory import build_backend
from nodetrack.cli.delivery_page import sync_command
from nodetrack.cli.sync_jobs import Job
from nodetrack.delivery.engine import Delivery
from nodetrack.delivery.worker import Status, Worker
from nodetrack.journal.cursor import Cursor, read_cursors
from nodetrack.journal.recover import attempt_folders
from nodetrack.journal.segment import segment_paths

#: Each has its own connection and a batch in memory.
_AT_ONCE: Final = 8
_LOOK_SECONDS: Final = 0.1
#: With --follow, how often runs are looked for that have begun meanwhile.
_FIND_SECONDS: Final = 2.0
#: How long those who are told to stop may take over the call that they are in.
_STOP_SECONDS: Final = 10.0
#: How long the last rows may take when --follow is ended.
_DRAIN_SECONDS: Final = 10.0

End = Literal["done", "stopped by Ctrl-C", "the time is up"]


class Display(Protocol):
    """Where it is shown how the jobs stand."""

    def show(self, active: Sequence[Sending], waiting: int) -> None:
        """The jobs under way, and how many have not begun."""
        ...

    def tell(self, message: str) -> None:
        """Something that a person should know."""
        ...


class Sending:
    """One job under way. With attempts given, one after the other, in that order."""

    def __init__(self, job: Job, *, follow: bool) -> None:
        self.job = job
        self.status: Status | None = None
        #: Who has the backend, while this job waits for it.
        self.held_by: int | None = None
        self.rows_before: int | None = None
        #: Where the backend of this run was, until it is known to be elsewhere now.
        self._cursor_before = read_cursors(job.run.folder).get(job.backend)
        self._follow = follow
        self._parts: list[tuple[str, ...] | None] = [job.attempts]
        if job.attempts is not None and not follow:
            self._parts = [(attempt,) for attempt in job.attempts]
        self._begin()

    def _begin(self) -> None:
        self._delivery = Delivery(
            self.job.run.folder,
            self.job.run.project,
            {self.job.backend: build_backend(self.job.config)},
            follow=self._follow,
            attempts=self._parts.pop(0),
        )
        self._delivery.start()

    @property
    def _worker(self) -> Worker:
        return self._delivery.workers[self.job.backend]

    def look(self) -> bool:
        """See how it stands; False once it has ended, also because it is of no use to go on."""
        has_ended = self._delivery.join(0)
        status = self._delivery.statuses()[self.job.backend]
        self.held_by = self._worker.lock_owner()
        if status.state not in ("starting", "waiting") and self.rows_before is None:
            self.rows_before = status.delivered
        self.status = status
        if status.state == "refused" or (status.state == "waiting" and not self._follow):
            self.stop()
        elif has_ended and status.state == "done" and self._parts:
            self._begin()
            return True
        return not has_ended

    def left_place(self) -> Cursor | None:
        """The cursor of the place that the run was sent to before, once this job has turned to another."""
        before, config = self._cursor_before, self.job.config
        if before is None or before.destination == config.destination():
            return None
        now = read_cursors(self.job.run.folder).get(self.job.backend)
        if now is None or now.destination != config.destination():
            return None
        self._cursor_before = None
        return before

    @property
    def rows(self) -> int:
        """How many rows were delivered by this job."""
        if self.status is None or self.rows_before is None:
            return 0
        return max(0, self.status.delivered - self.rows_before)

    def bytes_done(self) -> tuple[int, int]:
        """How much of the journal the backend has, and how much there is."""
        done = total = 0
        for attempt, path, size in _segments(self.job):
            offset = self._worker.offset(attempt, path.name)
            done, total = done + min(offset or 0, size), total + size
        return done, total

    def drain(self) -> None:
        """Send what is there, then end."""
        self._delivery.drain()

    def stop(self) -> None:
        """End after the call that is under way."""
        self._parts.clear()
        self._delivery.stop()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end; False if it does not come."""
        return self._delivery.join(seconds)


class Sender:
    """All jobs, some of them under way. `find` is asked now and then for those that came since."""

    def __init__(
        self,
        jobs: Sequence[Job],
        display: Display,
        *,
        follow: bool = False,
        find: Callable[[], Sequence[Job]] | None = None,
    ) -> None:
        self._waiting = deque(jobs)
        self._display = display
        self._follow = follow
        self._find = find
        self._found_at = time.monotonic()
        self._active: list[Sending] = []
        self._told: dict[int, str] = {}

    def run(self, timeout: float | None) -> End:
        """Until all jobs have ended, `timeout` seconds are over, or Ctrl-C. None is then under way."""
        deadline = None if timeout is None else time.monotonic() + timeout
        end: End = "the time is up"
        try:
            while deadline is None or time.monotonic() < deadline:
                self._look()
                if not self._active and self._find is None:
                    return "done"
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:  # the way to end --follow
            end = "stopped by Ctrl-C"
        try:
            if self._follow:
                self._send_the_last()
        except KeyboardInterrupt:  # somebody has really enough
            pass
        self._stop()
        return end

    def _look(self) -> None:
        if self._find is not None and time.monotonic() > self._found_at + _FIND_SECONDS:
            self._waiting.extend(self._find())
            self._found_at = time.monotonic()
        while self._waiting and (self._follow or len(self._active) < _AT_ONCE):
            self._active.append(Sending(self._waiting.popleft(), follow=self._follow))
        for sending in list(self._active):
            goes_on = sending.look()
            self._tell_of(sending)
            if not goes_on:
                self._active.remove(sending)
        self._display.show(self._active, len(self._waiting))

    def _tell_of(self, sending: Sending) -> None:
        """What keeps a job from going on, once for each reason."""
        left = sending.left_place()
        if left is not None:
            self._display.tell(_moved(sending.job, left))
        message = _hindrance(sending, follow=self._follow)
        if message and self._told.get(id(sending)) != message:
            self._display.tell(message)
        self._told[id(sending)] = message

    def _send_the_last(self) -> None:
        self._find = None
        for sending in self._active:
            sending.drain()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._active and time.monotonic() < deadline:
            self._look()
            time.sleep(_LOOK_SECONDS)

    def _stop(self) -> None:
        for sending in self._active:
            sending.stop()
        deadline = time.monotonic() + _STOP_SECONDS
        for sending in self._active:
            if not sending.ends_within(max(0.0, deadline - time.monotonic())):
                self._display.tell(f"{_who(sending.job)}: a call of the backend does not come back.")
        self._active.clear()


def _moved(job: Job, left: Cursor) -> str:
    """That the backend is another one from now on, and how it was."""
    options, there = shlex.quote(json.dumps([left.config])), job.config.destination()
    return (
        f"{job.backend} of {job.name} was at {left.destination} and is at {there} from now on; "
        f"to go back: {sync_command(job.run, options)}"
    )


def _hindrance(sending: Sending, *, follow: bool) -> str:
    status, who = sending.status, _who(sending.job)
    if status is None or status.state in ("starting", "ok", "done"):
        return ""
    if status.state == "waiting":
        holder = _holder(sending)
        what = "waiting for it" if follow else "left to it; --follow waits for it"
        return f"{who} is being sent by {holder}: {what}."
    if status.state == "refused":
        return f"{who} refuses this run: {status.error.rstrip('.')}."
    return f"{who} cannot be had, and is tried again: {status.error.rstrip('.')}."


def _holder(sending: Sending) -> str:
    """Who sends the run: its own node, or a `nodetrack sync`."""
    last = sending.job.run.attempts[-1]
    is_running = last.state(last.finish_record()).state == "running"
    process = "" if sending.held_by is None else f" (process {sending.held_by})"
    return f"{'the running node' if is_running else 'another process'}{process}"


def _who(job: Job) -> str:
    return f"{job.name} → {job.backend}"


def _segments(job: Job) -> Iterator[tuple[str, Path, int]]:
    for attempt in attempt_folders(job.run.folder):
        if job.attempts is None or attempt.name in job.attempts:
            for path in segment_paths(attempt):
                with contextlib.suppress(OSError):  # pruned meanwhile
                    yield attempt.name, path, path.stat().st_size
