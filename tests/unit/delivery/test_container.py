"""What a container may use, read from folders that look like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodetrack.delivery.container import Container, CpuUse, MemoryUse


def group(tmp_path: Path, groups: str, **files: str) -> Container:
    """A process 7 with that list of groups; `files` are named with `__` for a slash and `_` for a dot."""
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "fs" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Container(7, tmp_path / "fs", tmp_path / "proc")


def test_limits_are_those_of_the_process_s_own_group(tmp_path: Path) -> None:
    container = group(
        tmp_path,
        "0::/node.slice\n",
        **{
            "node.slice__memory_DOT_max": "1000\n",
            "node.slice__memory_DOT_current": "700\n",
            "node.slice__memory_DOT_stat": "anon 400\ninactive_file 200\n",
            "node.slice__cpu_DOT_max": "150000 100000\n",
            "node.slice__cpu_DOT_stat": "usage_usec 2500000\nuser_usec 1\n",
            "memory_DOT_max": "5\n",
        },
    )
    assert container.memory() == MemoryUse(used_bytes=500, limit_bytes=1000)
    assert container.cpu() == CpuUse(used_seconds=2.5, cores=1.5)


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    container = group(
        tmp_path,
        "0::/docker/4f2a\n",
        memory_DOT_max="1000",
        memory_DOT_current="700",
        cpu_DOT_max="max 100000",
    )
    assert container.memory() == MemoryUse(used_bytes=700, limit_bytes=1000)
    assert container.cpu() is None


def test_the_first_version_of_the_interface_is_read_too(tmp_path: Path) -> None:
    container = group(
        tmp_path,
        "4:memory:/m\n1:cpu,cpuacct:/c\n",
        **{
            "memory__m__memory_DOT_limit_in_bytes": "1000",
            "memory__m__memory_DOT_usage_in_bytes": "900",
            "memory__m__memory_DOT_stat": "inactive_file 1\ntotal_inactive_file 300\n",
            "cpu,cpuacct__c__cpu_DOT_cfs_quota_us": "50000",
            "cpu,cpuacct__c__cpu_DOT_cfs_period_us": "100000",
            "cpu,cpuacct__c__cpuacct_DOT_usage": "3000000000",
        },
    )
    assert container.memory() == MemoryUse(used_bytes=600, limit_bytes=1000)
    assert container.cpu() == CpuUse(used_seconds=3.0, cores=0.5)


@pytest.mark.parametrize("groups", ["", "0::/\n", "4:memory:/\n1:cpu:/\n"])
def test_without_limits_nothing_is_known(tmp_path: Path, groups: str) -> None:
    container = group(tmp_path, groups, memory_DOT_max="max", memory_DOT_current="700")
    assert container.memory() is None
    assert container.cpu() is None


def test_the_machine_that_the_tests_run_on_is_read_without_an_error() -> None:
    container = Container(os.getpid())
    container.memory()
    container.cpu()
    assert Container(2**22).memory() == Container(2**22).memory()  # nobody's number
