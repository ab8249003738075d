"""One live process a node: the lock file beside the run-id file.

The lock is a small JSON file (pid, the process's creation time, host, token) that appears in one instant:
it is written under another name and hard-linked into place, which fails if the name exists, on NFS too.
No mmap and no file-range lock is used.

A lock whose owner is gone is taken over. How that has exactly one winner: to take over from the owner with
token T a process must first create `<lock>.after-<T>`, in the same exclusive way. Only the one that did so
may replace the lock; a lock therefore changes hands only from its owner to that owner's one successor. A
successor that dies half-way is an owner like any other, and its successor goes the same way: the real owner
is the end of the chain.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nodetrack.errors import IdentityInUseError
from nodetrack.identity.id_file import read_small, remove_abandoned
from nodetrack.machine import (
    HostIdentity,
    process_created_at,
    process_is_alive,
    process_start_ticks,
    this_host,
)

DEFAULT_STALE_AFTER_SECONDS = 60.0
_HALF_WRITTEN_SECONDS = (
    5.0  # how long a lock file without readable content may be one that is just being made
)
_RETRY_SECONDS = 0.02
_TOKEN = re.compile(r"[0-9A-Za-z_-]{1,64}")  # it becomes part of a file's name
#: Tokens of the locks that this program holds. `os.execv` puts another program into the same process, with
#: the same number and start: a lock of this process whose token is not here is that earlier program's.
_held_here: set[str] = set()


class LockOwner(msgspec.Struct, frozen=True):
    """Who holds a lock. The process's creation is there so that a reused pid is noticed.

    It is told twice: `created_at` in epoch seconds, for people, and `start_ticks` since the boot, which no
    change of the clock moves. After `stale_after_seconds` without a sign of life, who cannot look at the
    process takes it for gone.
    """

    pid: int
    created_at: float
    host: HostIdentity
    token: str
    start_ticks: int | None = None
    stale_after_seconds: float | None = None


@dataclass(frozen=True)
class _Holder:
    """The end of a lock's chain: who holds it, and how long ago that was last confirmed."""

    owner: LockOwner
    age_seconds: float
    half_written: bool = False


class NodeLock:
    """The right to be one node, held by one process.

    `acquire` raises IdentityInUseError if another live process holds it, OSError if the folder refuses.
    An owner on this machine is gone when its process is; an owner that cannot be looked at (another machine
    or container) is gone when it has not called `touch` for the `stale_after_seconds` that it wrote into its
    lock, or the caller's if it wrote none.
    """

    def __init__(self, path: Path, owner: LockOwner) -> None:
        self.path = path
        self.owner = owner

    @classmethod
    def acquire(
        cls, path: Path, node: str, *, stale_after_seconds: float = DEFAULT_STALE_AFTER_SECONDS
    ) -> NodeLock:
        """Takes the lock, from a gone owner if need be. `node` is how the error message calls it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent, f".{glob.escape(path.name)}.*.claim")
        owner = _this_process(stale_after_seconds)
        claim = path.with_name(f".{path.name}.{owner.pid}.{owner.token}.claim")
        try:
            claim.write_bytes(msgspec.json.encode(owner))
            _held_here.add(owner.token)
            _Contest(path, claim, owner, stale_after_seconds).win(node)
        except BaseException:
            _held_here.discard(owner.token)  # should the lock be ours already, the next one may take it over
            raise
        finally:
            with contextlib.suppress(OSError):  # it has become the lock, or the folder refuses by now
                claim.unlink()
        return cls(path, owner)

    def touch(self) -> bool:
        """The heartbeat: confirms that the owner lives. False when the lock is no longer this process's."""
        if not self.is_held():
            return False
        try:
            os.utime(self.path)
        except FileNotFoundError:
            return False
        except OSError:  # a disk that refuses takes the lock from nobody
            return True
        return True

    def is_held(self) -> bool:
        """Whether the lock still is this process's: not a forked child's, not taken over, not removed."""
        if os.getpid() != self.owner.pid:
            return False
        try:
            content = read_small(self.path)
        except OSError as error:  # where we cannot look, nobody is known to have taken it
            return not isinstance(error, FileNotFoundError | IsADirectoryError)
        present = _parse_owner(content)
        return present is not None and present.token == self.owner.token

    def release(self) -> None:
        """Gives the lock up. Does nothing in a forked child, nor when another process has taken it over."""
        if self.is_held():
            with contextlib.suppress(OSError):  # what cannot be removed is a dead process's lock soon
                self.path.unlink()
        _held_here.discard(self.owner.token)


class _Contest:
    """One process's attempt to become the owner."""

    def __init__(self, path: Path, claim: Path, owner: LockOwner, stale_after_seconds: float) -> None:
        self._path = path
        self._claim = claim
        self._owner = owner
        self._stale_after_seconds = stale_after_seconds

    def win(self, node: str) -> None:
        """Returns as the owner, or raises IdentityInUseError with the one that holds the lock."""
        while not _create_exclusively(self._claim, self._path):
            chain = self._chain()
            if not chain:
                continue  # released in between
            holder = chain[-1]
            if holder.half_written and holder.age_seconds < _HALF_WRITTEN_SECONDS:
                time.sleep(_RETRY_SECONDS)
            elif not self._is_gone(holder):
                raise IdentityInUseError(node, holder.owner.pid, holder.owner.host.hostname)
            elif self._succeed(chain):
                return

    def _chain(self) -> list[_Holder]:
        """The lock's owner, its successor if one has begun to take over, and so on."""
        chain: list[_Holder] = []
        place = self._path
        while (holder := self._holder(place, _tokens(chain))) is not None:
            chain.append(holder)
            place = self._successor_place(holder.owner)
        return chain

    def _holder(self, place: Path, before: list[str]) -> _Holder | None:
        """Who holds that place. One that stands in the chain `before` it was put there by nobody of us."""
        try:
            found = place.lstat()  # a link to nowhere is there, too
        except FileNotFoundError:
            return None
        age_seconds = self._file_system_now() - found.st_mtime
        owner = _read_owner(place)
        if owner is not None and owner.token not in before:
            return _Holder(owner, age_seconds)
        token = f"unreadable-{found.st_ino}-{found.st_mtime_ns}"
        return _Holder(
            LockOwner(0, 0.0, HostIdentity("an unknown host", "", ""), token), age_seconds, half_written=True
        )

    def _successor_place(self, owner: LockOwner) -> Path:
        return self._path.with_name(f"{self._path.name}.after-{owner.token}")

    def _file_system_now(self) -> float:
        """The clock that stamps the lock: the file server's, which need not agree with this machine's."""
        os.utime(self._claim)
        return self._claim.stat().st_mtime

    def _is_gone(self, holder: _Holder) -> bool:
        owner = holder.owner
        if holder.half_written:
            return True
        here = self._owner.host
        if owner.host.shares_processes_with(here):
            return self._is_before_exec(owner) or not process_is_alive(
                owner.pid, owner.created_at, owner.start_ticks
            )
        rebooted = owner.host.hostname == here.hostname and owner.host.boot_id != here.boot_id
        if rebooted and holder.age_seconds > _uptime_seconds():
            return True  # last confirmed before this machine booted: its process ended with that boot
        return holder.age_seconds > (owner.stale_after_seconds or self._stale_after_seconds)

    def _is_before_exec(self, owner: LockOwner) -> bool:
        """Whether the owner is this process, as the program that it was before `os.execv`."""
        return owner.pid == self._owner.pid and owner.token not in _held_here

    def _succeed(self, chain: list[_Holder]) -> bool:
        """Takes over from the chain's last owner; False if another process was first."""
        place = self._successor_place(chain[-1].owner)
        if not _create_exclusively(self._claim, place):
            return False
        if _tokens(self._chain()) != [*_tokens(chain), self._owner.token]:
            place.unlink()  # the lock had changed hands before: this right is to something that is over
            return False
        try:
            self._claim.replace(self._path)
        except OSError:
            place.unlink()
            raise
        self._remove_successor_marks()
        return True

    def _remove_successor_marks(self) -> None:
        """All but the own one: they are rights to take over from owners that are no more."""
        own = self._successor_place(self._owner)
        for mark in self._path.parent.glob(f"{glob.escape(self._path.name)}.after-*"):
            if mark != own:
                with contextlib.suppress(FileNotFoundError):
                    mark.unlink()


def _tokens(chain: list[_Holder]) -> list[str]:
    return [holder.owner.token for holder in chain]


def _create_exclusively(claim: Path, place: Path) -> bool:
    """Puts the claim's content at `place` unless something is there; whether it did."""
    try:
        os.link(claim, place)
    except FileExistsError:
        # NFS may answer a repeated request so, although the first one did its work: the link count knows.
        return claim.stat().st_nlink > 1 and place.exists() and claim.samefile(place)
    except OSError:
        return _create_without_links(claim, place)  # FAT and some FUSE file systems have no hard links
    return True


def _create_without_links(claim: Path, place: Path) -> bool:
    try:
        descriptor = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
        file.write(claim.read_bytes())
    return True


def _read_owner(place: Path) -> LockOwner | None:
    """The owner that a lock or a mark names; None for one that nobody of us can have written."""
    try:
        return _parse_owner(read_small(place))
    except OSError:
        return None


def _parse_owner(content: bytes) -> LockOwner | None:
    try:
        owner = msgspec.json.decode(content, type=LockOwner)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return owner if _TOKEN.fullmatch(owner.token) else None


def _this_process(stale_after_seconds: float) -> LockOwner:
    token = secrets.token_hex(8)
    created_at, ticks = process_created_at() or 0.0, process_start_ticks()
    return LockOwner(os.getpid(), created_at, this_host(), token, ticks, stale_after_seconds)


def _uptime_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
