"""One process a run and backend: the live delivery process and a `nodetrack sync` must not both send."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class BackendLock:
    """A file lock that the system gives back when its process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self) -> bool:
        """Take it; False while another process has it. Raises OSError where the folder cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:  # a file server without locks: two senders repeat rows, none costs them all
            pass
        self._fd = fd
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only its owner has no name
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        return True

    def owner(self) -> int | None:
        """The process that has it, or had it last."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.path.read_text())
        return None

    def release(self) -> None:
        """Give it back. Twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
