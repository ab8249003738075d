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
from nodetrack.delivery.remarks import Remarks, refusal
from nodetrack.delivery.spec import Answer, End, Spec, decode_answer, encode_line, name_of
from nodetrack.machine import working_folder

#: How a delivery process ends: all sent, or the time was over before that.
ALL_SENT: Final = 0
SOME_LEFT: Final = 4
LOG_FILE: Final = "delivery.log"
#: The pauses before it is started again, in seconds. One that has lived for an hour has them all again.
RESTART_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
_RESTARTS_AT_THE_END: Final = 4
_GOOD_LIFE_SECONDS: Final = 3600.0
#: What an ended drain may take to leave, beyond its time.
_LEAVING_SECONDS: Final = 0.3
_SEND_SECONDS: Final = 2.0
#: What is settled without another answer is noticed so soon.
_LOOK_SECONDS: Final = 0.1
_MAIN: Final = Path(__file__).with_name("__main__.py")


class DeliveryProcess:
    """One delivery process after another for one attempt; at most one at a time.

    `warn` takes sentences for the person who trains; it must neither block nor raise.
    """

    def __init__(self, spec: Spec, sync_command: str, warn: Callable[[str], None]) -> None:
        self._line = encode_line(spec)
        self._log_path = spec.attempt_folder / LOG_FILE
        self._sync_command = sync_command
        self._warn = warn
        self._folder = working_folder()
        self._environment = _environment(self._folder, _import_path(self._folder))
        self._remarks = Remarks([name_of(given) for given in spec.backends], warn)
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._unread = b""
        self._started_at = 0.0
        self._restarts = 0
        self._restart_at: float | None = None
        self._given_up = False
        self._ended = False
        _processes.add(self)

    # -- beginning -----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the process. Does not wait for it."""
        _reap()
        python = _python()
        if python is None:
            self._give_up(f"{sys.executable or 'This program'} is no Python that could be started")
            return False
        with self._lock:
            self._close_pipes()
            try:
                process = self._popen([python, "-P", str(_MAIN)])
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._note_death(f"it could not be started ({error})")
                return False
            self._process, self._unread, self._started_at = process, b"", time.monotonic()
            return _send(process, self._line)

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        """In a session of its own: a Ctrl-C at the terminal, or its closing, is the trainer's affair."""
        with contextlib.ExitStack() as opened:
            errors: IO[bytes] | int = subprocess.DEVNULL
            with contextlib.suppress(OSError):  # a full disk: then nobody reads what the SDKs print
                errors = opened.enter_context(self._log_path.open("ab"))
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._folder if self._folder.is_dir() else None,
                env=self._environment,
                start_new_session=True,
            )
        os.set_blocking(_fd(process.stdin), False)
        os.set_blocking(_fd(process.stdout), False)
        return process

    def shake_hands(self, deadline: float) -> None:
        """Wait for one answer a backend, until `deadline` (monotonic). Raises BackendRefusedError if one
        refuses us; whoever is not there, or has not answered, is warned of.
        """
        with selectors.PollSelector() as waiting, self._lock:
            if self._process is None:
                return
            waiting.register(_fd(self._process.stdout), selectors.EVENT_READ)
            while self._remarks.unsettled and (left := deadline - time.monotonic()) > 0:
                if waiting.select(min(left, _LOOK_SECONDS)) and not self._listen():
                    break
            refused = self._remarks.refused
            if refused:
                raise refusal(refused)
            if self._remarks.unsettled and not self.is_alive:
                return  # `tend` tells of it
            self._remarks.begin()

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
            self._listen()
            self._remarks.speak()
            if self.is_alive:
                if self._restarts and time.monotonic() - self._started_at > _GOOD_LIFE_SECONDS:
                    self._restarts = 0
            elif not self._given_up:
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
        """Plan the next start, or give up."""
        self._write_down(f"There is no process now: {how}")
        if self._restarts >= len(RESTART_PAUSES):
            self._give_up(f"{how}, for the last of {self._restarts + 1} times")
        else:
            self._restart_at = time.monotonic() + RESTART_PAUSES[self._restarts]

    def _write_down(self, sentence: str) -> None:
        """Into the log of the process, which cannot say it itself any more."""
        with contextlib.suppress(OSError), self._log_path.open("a", encoding="utf-8") as log:
            log.write(log_line(sentence))

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._warn(
                f"There is no delivery process ({why}; see {self._log_path}): rows wait in the journal, and "
                f"`{self._sync_command}` sends them."
            )

    def _listen(self) -> bool:
        """Take in what the process has said; False if it will say nothing more."""
        process = self._process
        if process is None or process.stdout is None or process.stdout.closed:
            return False
        while True:
            try:
                said = os.read(process.stdout.fileno(), 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not said:
                return False
            *lines, self._unread = (self._unread + said).split(b"\n")
            for answer in map(decode_answer, lines):
                if answer is not None:
                    self._remarks.take(answer)

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
        _send(process, encode_line(End(drain_seconds)))
        _close(process.stdin)
        goes_on = patience < drain_seconds
        try:
            code: int | None = process.wait(patience if goes_on else patience + _LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        if code is None and not goes_on:
            process.kill()  # its own clock has failed it: an SDK holds all of it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        self._listen()
        return code

    def kill(self) -> None:
        """End it at once, as a test does, or a start that has failed."""
        if self._is_ours and self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._close_pipes()

    def let_go(self) -> None:
        """In a forked child: the process is the parent's, and our copy of the life line must not hold it."""
        process = self._process
        if process is not None:
            _close(process.stdin)
            _close(process.stdout)
            process.returncode = 0  # else Python complains of a child that was not waited for
        self._lock = threading.RLock()

    def _close_pipes(self) -> None:
        if self._process is not None:
            _close(self._process.stdin)
            _close(self._process.stdout)


_processes: weakref.WeakSet[DeliveryProcess] = weakref.WeakSet()
#: Those that nobody waited for: they are no zombies for longer than need be.
_left: list[subprocess.Popen[bytes]] = []


def _reap() -> None:
    _left[:] = [process for process in _left if process.poll() is None]


def _after_fork_in_child() -> None:
    _left.clear()
    for process in list(_processes):
        process.let_go()


def _send(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """Write a line to a process; False if it does not take it."""
    deadline = time.monotonic() + _SEND_SECONDS
    try:
        with selectors.PollSelector() as waiting:
            waiting.register(_fd(process.stdin), selectors.EVENT_WRITE)
            while line and waiting.select(max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(BlockingIOError):
                    line = line[os.write(_fd(process.stdin), line) :]
    except (OSError, ValueError):  # it has ended already, which is noticed elsewhere
        return False
    return not line


def _fd(pipe: IO[bytes] | None) -> int:
    """Raises ValueError for a pipe that is closed."""
    if pipe is None:
        raise ValueError("there is no such pipe")
    return pipe.fileno()


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()


def _python() -> str | None:
    """The interpreter; None where Python is part of another program, which must not be started twice."""
    name = Path(sys.executable or "").name.lower()
    return sys.executable if name.startswith(("python", "pypy")) else None


def _import_path(folder: Path) -> str:
    """Where this process imports from, as it is now, so that plug-ins beside a script are found as well."""
    entries = [str(folder / entry) for entry in sys.path]
    return os.pathsep.join(dict.fromkeys(entry for entry in entries if os.pathsep not in entry))


def _environment(folder: Path, import_path: str) -> dict[str, str]:
    """This environment, and what a `.env` in the working folder adds to it."""
    found: dict[str, str] = {}
    path = folder / ".env"
    with contextlib.suppress(OSError, ValueError):  # as `settings` does, which says so
        if path.is_file():
            from dotenv import dotenv_values

            found = {name: value for name, value in dotenv_values(path).items() if value is not None}
    return {**found, **os.environ, "PYTHONPATH": import_path}


os.register_at_fork(after_in_child=_after_fork_in_child)
