"""How a delivery process knows whether its trainer lives: by a pipe, and by the list of processes.

`Pipe` is the trainer's end of it, `LifeLine` that of the delivery process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import time

from nodetrack.delivery.spec import End, TrainerProcess, decode_end
from nodetrack.machine import process_is_alive

#: How long the trainer may take to vanish from the list of processes after its pipe has.
_VANISHING_SECONDS = 2.0


class Pipe:
    """One end of a pipe in the trainer, which may close descriptors that are not its own (`os.closerange`, as
    a daemon does) and open files under their numbers: those are left alone.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._identity = _identity(fd)
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether it is still there."""
        return not self._is_closed and _identity(self.fd) == self._identity

    def write(self, data: bytes) -> int:
        """As many bytes as it takes now. Raises OSError if nobody will read them."""
        if not self.is_open:
            raise BrokenPipeError(errno.EPIPE, "the pipe is closed")
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0

    def read(self) -> bytes | None:
        """What is there, None if nothing is, and nothing (`b""`) at the end."""
        try:
            return os.read(self.fd, 65536) if self.is_open else b""
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Twice is harmless."""
        if self.is_open:
            os.close(self.fd)
        self._is_closed = True


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class LifeLine:
    """Reads what the trainer says after its `Spec`, and waits for it.

    A forked child of the trainer's may hold a copy of the pipe, where C code made the fork. So an `End` is
    said in words, and a trainer that was killed is looked for in the list of processes.
    """

    def __init__(self, fd: int, trainer: TrainerProcess) -> None:
        #: What the trainer said last, if it has finished.
        self.end: End | None = None
        self._fd = fd
        self._trainer = trainer
        self._unread = b""
        self._is_cut = False
        self._is_gone = False
        self._wake_fd, self._woken_fd = os.pipe()
        for pipe in (fd, self._wake_fd, self._woken_fd):
            os.set_blocking(pipe, False)
        self._waiting = selectors.PollSelector()
        self._waiting.register(fd, selectors.EVENT_READ)
        self._waiting.register(self._wake_fd, selectors.EVENT_READ)

    @property
    def is_over(self) -> bool:
        """Whether the trainer has finished or is gone."""
        return self.end is not None or self._is_cut or self._is_gone

    def wake(self) -> None:
        """Have `wait` return; from any thread."""
        with contextlib.suppress(BlockingIOError):  # it is awake enough
            os.write(self._woken_fd, b"!")

    def wait(self, seconds: float) -> None:
        """Until the trainer says something, somebody calls `wake`, or so many seconds have passed."""
        for key, _ in self._waiting.select(max(0.0, seconds)):
            if key.fd == self._fd:
                self._read()
            else:
                os.read(self._wake_fd, 4096)

    def look(self) -> None:
        """Look for the trainer in the list of processes."""
        trainer = self._trainer
        self._is_gone = not process_is_alive(trainer.pid, trainer.created_at, trainer.start_ticks)

    def trainer_is_gone(self) -> bool:
        """Whether the trainer is no more, or does it only no longer hold the pipe? It may go on as another
        program (`exec`). Waits a moment for one that is about to go.
        """
        deadline = time.monotonic() + _VANISHING_SECONDS
        self.look()
        while not self._is_gone and time.monotonic() < deadline:
            time.sleep(0.05)
            self.look()
        return self._is_gone

    def _read(self) -> None:
        try:
            said = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._is_cut = True
            self._waiting.unregister(self._fd)
            return
        *lines, self._unread = (self._unread + said).split(b"\n")
        for line in lines:
            self.end = decode_end(line) or self.end
