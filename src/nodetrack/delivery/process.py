"""The delivery process as its trainer sees it: started, listened to, started again when it dies, and ended.

Nothing here raises but `shake_hands`, for a backend that refuses us, and nothing waits but `shake_hands` and
`end`, each for so long as it is told. Whatever else goes wrong is warned of: the rows are in the journal.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Final

from nodetrack.delivery.diary import log_line
from nodetrack.delivery.life_line import Pipe
from nodetrack.delivery.remarks import Remarks, refusal
from nodetrack.delivery.spec import (
    Answer,
    End,
    Spec,
    decode_answer,
    encode_import_path,
    encode_line,
    environment_to_start_with,
    name_of,
)
from nodetrack.machine import working_folder
from nodetrack.redact import redact_text

#: How a delivery process ends: all sent, or the time was over before that.
ALL_SENT: Final = 0
SOME_LEFT: Final = 4
LOG_FILE: Final = "delivery.log"
#: The pauses before it is started again, in seconds. One that has lived for an hour has them all again.
RESTART_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
#: After the last of them: what ails it may pass, and a start costs less than a second.
_LATE_PAUSE_SECONDS: Final = 600.0
_RESTARTS_AT_THE_END: Final = 4
_GOOD_LIFE_SECONDS: Final = 3600.0
#: One that dies so soon has something wrong with its set-up.
_EARLY_SECONDS: Final = 60.0
#: What an ended drain may take to leave, beyond its time.
_LEAVING_SECONDS: Final = 0.3
_SEND_SECONDS: Final = 2.0
#: What is settled without another answer is noticed so soon.
_LOOK_SECONDS: Final = 0.1
#: What the other backends have to answer once one has refused us: `init` names all that refuse.
_OTHERS_SECONDS: Final = 0.5
#: A process whose pipe has ended is gone so soon.
_VANISHING_SECONDS: Final = 0.5
#: Of the log's end, for a warning.
_MOST_LAST_BYTES: Final = 4096
_MOST_LINE_CHARACTERS: Final = 300
_MAIN: Final = Path(__file__).with_name("__main__.py")


class DeliveryProcess:
    """One delivery process after another for one attempt; at most one at a time.

    `warn` takes sentences for the person who trains; it must neither block nor raise.
    """

    def __init__(self, spec: Spec, sync_command: str, warn: Callable[[str], None]) -> None:
        self._spec = encode_line(spec)
        self._limits = [name for name in ("keep_bytes", "max_bytes") if getattr(spec, name) is not None]
        self._log_path = spec.attempt_folder / LOG_FILE
        self._sync_command = sync_command
        self._warn = warn
        self._folder = working_folder()
        self._environment = environment_to_start_with()
        self._import_path = encode_import_path(self._folder)
        self._remarks = Remarks([name_of(given) for given in spec.backends], warn)
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._input: Pipe | None = None
        self._output: Pipe | None = None
        #: Of what it has to be told first: it may be slow to read, and half of it would be nothing.
        self._unsent = b""
        self._unread = b""
        self._log_length = 0
        self._started_at = 0.0
        self._restarts = 0
        self._restart_at: float | None = None
        self._is_python = True
        self._has_given_up = False
        self._ended = False
        _processes.add(self)

    # -- beginning -----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the process. Does not wait for it, not even until it has read what it has to do."""
        _reap()
        python = _python()
        if python is None:
            self._is_python = False
            self._warn(
                f"{sys.executable or 'This program'} is no Python that could be started: {self._waiting}"
            )
            return False
        with self._lock:
            self._close_pipes()
            self._process, self._unread, self._started_at = None, b"", time.monotonic()
            try:
                self._process = self._popen([python, "-P", str(_MAIN)])
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._note_death(f"it could not be started: {error}")
                return False
            self._unsent = self._import_path + self._spec
            self._send()
            return True

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        """In a session of its own: a Ctrl-C at the terminal, or its closing, is the trainer's affair."""
        with contextlib.ExitStack() as opened:
            errors: IO[bytes] | int = subprocess.DEVNULL
            with contextlib.suppress(OSError):  # a full disk: then nobody reads what the SDKs print
                errors = opened.enter_context(self._log_path.open("ab"))
                self._log_length = errors.tell()
            theirs, ours = os.pipe()
            opened.callback(os.close, theirs)
            self._input = Pipe(ours)
            ours, said = os.pipe()
            opened.callback(os.close, said)
            self._output = Pipe(ours)
            return subprocess.Popen(
                command,
                stdin=theirs,
                stdout=said,
                stderr=errors,
                cwd=self._folder if self._folder.is_dir() else None,
                env=self._environment,
                start_new_session=True,
            )

    def shake_hands(self, deadline: float) -> None:
        """Wait for one answer a backend, until `deadline` (monotonic). Raises BackendRefusedError if one
        refuses us; whoever is not there, or has not answered, is warned of.
        """
        with self._lock:
            if self._process is None:
                return
            is_refused = False
            while self._remarks.unsettled and (left := deadline - time.monotonic()) > 0:
                self._wait(min(left, _LOOK_SECONDS))
                self._send()
                if not self._listen():  # it is gone in a moment
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_VANISHING_SECONDS)
                    break
                if self._remarks.refused and not is_refused:
                    is_refused = True
                    deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
            if self._remarks.refused:
                raise refusal(self._remarks.refused)
            if self._remarks.unsettled and not self.is_alive:
                self._note_death(f"it ended with exit code {self._process.returncode}")
            else:
                self._remarks.begin()

    def _wait(self, seconds: float) -> None:
        """Until the process says something, or can be told more."""
        with selectors.PollSelector() as waiting:
            if self._output is not None and self._output.is_open:
                waiting.register(self._output.fd, selectors.EVENT_READ)
            if self._unsent and self._input is not None and self._input.is_open:
                waiting.register(self._input.fd, selectors.EVENT_WRITE)
            waiting.select(max(0.0, seconds))

    def _send(self) -> None:
        """Tell the process as much of what it has to be told as it takes now."""
        try:
            while self._unsent and self._input is not None and (count := self._input.write(self._unsent)):
                self._unsent = self._unsent[count:]
        except OSError:  # it has ended already, which is noticed elsewhere
            self._unsent = b""

    # -- meanwhile -----------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether there is a process, as far as is known here. In a forked child of the trainer: never."""
        return self._is_ours and self._process is not None and self._process.poll() is None

    @property
    def _is_ours(self) -> bool:
        return self._owner == os.getpid()

    @property
    def answers(self) -> Mapping[str, Answer]:
        """The newest answer of each backend that has given one."""
        return self._remarks.answers

    @property
    def pid(self) -> int | None:
        """The number of the process, None while there is none."""
        return self._process.pid if self.is_alive and self._process is not None else None

    def tend(self) -> None:
        """Once a second: tell what has changed, and start the process again if it died."""
        _reap()
        if not self._is_ours or self._ended or not self._lock.acquire(blocking=False):
            return
        try:
            self._send()
            self._listen()
            self._remarks.speak()
            if self.is_alive:
                if self._restarts and time.monotonic() - self._started_at > _GOOD_LIFE_SECONDS:
                    self._restarts, self._has_given_up = 0, False
            elif self._is_python:
                self._restart_when_due()
        finally:
            self._lock.release()

    def _restart_when_due(self) -> None:
        if self._restart_at is None:
            code = self._process.returncode if self._process is not None else None
            self._note_death(f"it ended with exit code {code}")
        elif time.monotonic() >= self._restart_at:
            self._restart_at = None
            self._restarts += 1
            self.start()

    def _note_death(self, how: str) -> None:
        """Plan the next start, and tell of what will not pass by itself."""
        how = f"{how}{self._last_words()}"
        self._write_down(f"There is no process now: {how}")
        now = time.monotonic()
        if self._restarts < len(RESTART_PAUSES):
            self._restart_at = now + RESTART_PAUSES[self._restarts]
            is_early = now - self._started_at < _EARLY_SECONDS and not self._remarks.answers
            if is_early and not self._restarts:
                self._warn(f"There is no delivery process yet ({how}). It is started again; {self._waiting}")
            return
        self._restart_at = now + _LATE_PAUSE_SECONDS
        if not self._has_given_up:
            self._has_given_up = True
            unkept = f" Until then {' and '.join(self._limits)} cannot be kept." if self._limits else ""
            self._warn(
                f"There is no delivery process ({how}, for the last of {self._restarts + 1} times): "
                f"{self._waiting} It is started again every 10 minutes.{unkept}"
            )

    @property
    def _waiting(self) -> str:
        return (
            f"rows wait in the journal, and `{self._sync_command}` sends them. What it said is in "
            f"{self._log_path}."
        )

    def _last_words(self) -> str:
        """The last line that the process left in its log, in brackets."""
        try:
            with self._log_path.open("rb") as log:
                length = log.seek(0, os.SEEK_END)
                log.seek(max(min(self._log_length, length), length - _MOST_LAST_BYTES))
                *_, last = [b"", *filter(None, map(bytes.strip, log.read().splitlines()))]
        except OSError:
            return ""
        words = redact_text(last.decode("utf-8", "replace"))
        return f" ({words[:_MOST_LINE_CHARACTERS]})" if words else ""

    def _write_down(self, sentence: str) -> None:
        """Into the log of the process, which cannot say it itself any more."""
        with contextlib.suppress(OSError), self._log_path.open("a", encoding="utf-8") as log:
            log.write(log_line(sentence))

    def _listen(self) -> bool:
        """Take in what the process has said; False if it will say nothing more."""
        while self._output is not None:
            said = self._output.read()
            if said is None:
                return True
            if not said:
                return False
            *lines, self._unread = (self._unread + said).split(b"\n")
            for answer in map(decode_answer, lines):
                if answer is not None:
                    self._remarks.take(answer)
        return False

    # -- ending --------------------------------------------------------------------------------------

    def end(self, drain_seconds: float, patience: float) -> bool:
        """No more rows are coming: have the rest sent, for at most `drain_seconds`, and wait for it for at
        most `patience` seconds. True if all was sent. Twice is harmless.
        """
        if not self._is_ours or self._ended:
            return True
        self._ended = True
        try:
            return self._end_within(drain_seconds, patience) == ALL_SENT
        finally:  # a Ctrl-C too
            self._close_pipes()
            if self._process is not None and self._process.returncode is None:
                _left.append(self._process)  # it goes on without us

    def _end_within(self, drain_seconds: float, patience: float) -> int | None:
        began = time.monotonic()
        code = self._end_one(drain_seconds, patience)
        for _ in range(_RESTARTS_AT_THE_END):  # it died, now or before: another sends the rest
            spent = time.monotonic() - began
            if code in (ALL_SENT, SOME_LEFT, None) or spent >= patience or not self.start():
                break
            code = self._end_one(max(0.0, drain_seconds - spent), patience - spent)
        return code

    def _end_one(self, drain_seconds: float, patience: float) -> int | None:
        """End the process that there is; its exit code, None if it goes on without us."""
        process = self._process
        if process is None:
            return -1
        goes_on = patience < drain_seconds
        began = time.monotonic()
        self._unsent += encode_line(End(drain_seconds))
        self._send_until(began + max(patience, _SEND_SECONDS))
        if self._input is not None:
            self._input.close()
        left = max(0.0, began + patience - time.monotonic())
        try:
            code: int | None = process.wait(left if goes_on else left + _LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        if code is None and not goes_on:
            process.kill()  # its own clock has failed it: an SDK holds all of it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        self._listen()
        return code

    def _send_until(self, deadline: float) -> None:
        while self._unsent and self.is_alive and (left := deadline - time.monotonic()) > 0:
            self._send()
            if self._unsent:
                self._wait(min(left, _LOOK_SECONDS))
                self._listen()

    def kill(self) -> None:
        """End it at once, as a test does, or a start that has failed."""
        if self._is_ours and self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._close_pipes()

    def let_go(self) -> None:
        """In a forked child: the process is the parent's, and our copy of the life line must not hold it."""
        self._close_pipes()
        if self._process is not None:
            self._process.returncode = 0  # else Python complains of a child that was not waited for
        self._lock = threading.RLock()

    def _close_pipes(self) -> None:
        for pipe in (self._input, self._output):
            if pipe is not None:
                pipe.close()


_processes: weakref.WeakSet[DeliveryProcess] = weakref.WeakSet()
#: Those that nobody waited for: they are no zombies for longer than need be.
_left: list[subprocess.Popen[bytes]] = []


def _reap() -> None:
    _left[:] = [process for process in _left if process.poll() is None]


def _after_fork_in_child() -> None:
    _left.clear()
    for process in list(_processes):
        process.let_go()


def _python() -> str | None:
    """The interpreter; None where Python is part of another program, which must not be started twice."""
    name = Path(sys.executable or "").name.lower()
    return sys.executable if name.startswith(("python", "pypy")) else None


os.register_at_fork(after_in_child=_after_fork_in_child)
