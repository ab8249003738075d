"""The few things that the writer does with files, each of which the disk may refuse with an OSError."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
_COPY_BYTES: Final = 1024 * 1024


def open_new(path: Path) -> int:
    """A new file for appending; raises FileExistsError where the name is taken."""
    return os.open(path, _OPEN_FLAGS, 0o644)


def write_all(fd: int, data: bytes, done: int = 0) -> None:
    """Append the rest of `data`, of which `done` bytes are written.

    After a short write the kernel says only at the next one whether anything is wrong. Then what was torn is
    cut off again and OSError is raised, so a file ends with whole frames.
    """
    try:
        while done < len(data):
            done += _write(fd, data[done:])
    except OSError:
        if done:
            _cut(fd, done)
        raise


def _write(fd: int, data: bytes) -> int:
    count = os.write(fd, data)
    if count == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return count


def _cut(fd: int, count: int) -> None:
    """Take the last bytes off a file; EIO is raised if that fails, and the file must not be written any more.

    By the size that the file has, not the one that somebody remembers: a Ctrl-C may have come between a write
    and the note of it.
    """
    try:
        os.ftruncate(fd, os.fstat(fd).st_size - count)
    except OSError as error:
        raise OSError(
            errno.EIO, f"what a failed write left could not be cut off: {error.strerror}"
        ) from error


def copy(source: int, target: int) -> int:
    """Append a whole file to another, and return its size."""
    position = 0
    while block := os.pread(source, _COPY_BYTES, position):
        write_all(target, block)
        position += len(block)
    return position


def sync(fd: int) -> None:
    """Bring a file's content to the disk itself."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:  # macOS
        os.fsync(fd)


def is_elsewhere(fd: int, path: Path) -> bool:
    """Whether an open file that still has a name is not to be found under the one that it was given."""
    try:
        here = os.fstat(fd)
        return here.st_nlink > 0 and not (path.exists() and os.path.samestat(here, path.stat()))
    except OSError:  # a file server that does not answer now
        return False


def is_deleted(fd: int) -> bool:
    """Whether a file has no name any more, because it or its folder was deleted."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:  # a file server that forgot the file: the next write says so
        return False


def close(fd: int) -> None:
    """Close a file; the number is free again, whatever a file server says."""
    with contextlib.suppress(OSError):
        os.close(fd)


def discard(fd: int, path: Path) -> None:
    """Close and remove a file that did not come to be; what cannot be removed holds no whole header."""
    close(fd)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
