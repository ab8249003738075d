"""What a container may use: the limits of its control group, where they are tighter than the machine.

Version 2 of the kernel's interface, and version 1 as far as machines still have it:
https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path("/sys/fs/cgroup")
_MICROSECONDS: Final = 1e6
_NANOSECONDS: Final = 1e9


class MemoryUse(NamedTuple):
    """Of a group with a limit, in bytes. What the kernel would give back first is not counted as used."""

    used_bytes: int
    limit_bytes: int


class CpuUse(NamedTuple):
    """Of a group with a quota: seconds that it has used, and how many cores' worth it may use."""

    used_seconds: float
    cores: float


class Container:
    """The control group of a process. Without one, or without limits, it knows nothing: None."""

    def __init__(self, pid: int, root: Path = _ROOT, processes: Path = Path("/proc")) -> None:
        self._groups = _groups(processes / str(pid) / "cgroup", root)

    def memory(self) -> MemoryUse | None:
        """What its memory is limited to, and how much of it is used."""
        for folder in self._groups:
            limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
            if limit and used:
                spare = _entry(folder / "memory.stat", "inactive_file", "total_inactive_file")
                return MemoryUse(max(0, used - spare), limit)
        return None

    def cpu(self) -> CpuUse | None:
        """What its time on the CPUs is limited to, and how much it has had."""
        for folder in self._groups:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
            if quota.isdigit() and period.isdigit():
                used = _entry(folder / "cpu.stat", "usage_usec")
                return CpuUse(used / _MICROSECONDS, int(quota) / int(period))
            limit = _number(folder / "cpu.cfs_quota_us")
            length = _number(folder / "cpu.cfs_period_us")
            spent = _number(folder / "cpuacct.usage")
            if limit and length and spent:
                return CpuUse(spent / _NANOSECONDS, limit / length)
        return None


def _groups(list_of_groups: Path, root: Path) -> list[Path]:
    """The folders that may describe the process's group: by its path, and as a container sees its own."""
    folders = []
    for line in _text(list_of_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        mounted = root / controllers if controllers else root
        folders += [mounted / path.lstrip("/"), mounted]
    return list(dict.fromkeys(folders))


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def _number(path: Path) -> int:
    """The number in a file; 0 where there is none, such as `max`."""
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _entry(path: Path, *names: str) -> int:
    """The last of the named entries that a file of `name number` lines has; 0 without any."""
    entries = dict(line.split(" ", 1) for line in _text(path).splitlines() if " " in line)
    found = [entries[name] for name in names if entries.get(name, "").isdigit()]
    return int(found[-1]) if found else 0
