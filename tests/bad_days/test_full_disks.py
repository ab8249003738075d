"""Disks that are full for a while: the server's, that of a backend that writes files, and the node's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.bad_days.conftest import NewNode
from tests.bad_days.destinations import Influx, Lines, Tensorboard, Victoria
from tests.bad_days.node import Node, assert_arrived, until
from tests.servers.victoria_metrics import victoria_metrics

MIB = 1024 * 1024


@dataclass
class SmallDisk:
    """A file system of its own, of a few megabytes."""

    folder: Path

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self, leave_bytes: int = 0) -> None:
        """Leave so much room."""
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while shutil.disk_usage(self.folder).free > leave_bytes:
                file.write(bytes(4096))

    def make_room(self) -> None:
        """Take back what `fill` took."""
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(folder: Path, mebibytes: int) -> Iterator[SmallDisk]:
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted: it takes root and the right to mount")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def is_down(node: Node, kind: str) -> bool:
    """Whether the trainer knows that the backend cannot be had."""
    return bool(node.health()["backends"][kind]["state"] == "down")


def test_a_server_whose_disk_is_full(new_node: NewNode, tmp_path: Path) -> None:
    """VictoriaMetrics takes nothing while less than ten megabytes are free."""
    with mounted(tmp_path / "disk", 40) as disk, victoria_metrics(disk.folder / "victoria") as server:
        victoria = Victoria(server)
        node = new_node(victoria.config)
        node.start()
        node.wait_for_rows(30)
        disk.fill(leave_bytes=5 * MIB)
        until(lambda: is_down(node, "influxdb"), "the server's trouble")
        node.wait_for_rows(100)
        disk.make_room()
        node.finish()
        node.wait_until_alone()
        assert_arrived(node, victoria)


@pytest.mark.case("C025")
def test_a_folder_of_tensorboard_whose_disk_is_full(new_node: NewNode, tmp_path: Path, lines: Lines) -> None:
    with mounted(tmp_path / "disk", 1) as disk:
        tensorboard = Tensorboard(disk.folder / "tensorboard")
        node = new_node(tensorboard.config, lines.config)
        node.start()
        node.wait_for_rows(30)
        disk.fill()
        until(lambda: is_down(node, "tensorboard"), "the full disk")
        node.wait_for_rows(100)
        disk.make_room()
        node.finish()
        node.wait_until_alone()
        assert_arrived(node, tensorboard, lines)


def test_a_node_whose_own_disk_is_full(
    new_node: NewNode, tmp_path: Path, lines: Lines, influx: Influx
) -> None:
    """Rows wait in memory, cursors cannot be written, and what has arrived is still right in the end."""
    with mounted(tmp_path / "disk", 1) as disk:
        node = new_node(lines.config, influx.config, dir=str(disk.folder / "tracking"))
        node.tracking = disk.folder / "tracking"
        node.start()
        node.wait_for_rows(30)
        disk.fill()
        until(lambda: node.health()["pending"] > 0, "rows that wait in memory")
        node.wait_for_rows(30)
        disk.make_room()
        node.wait_for_rows(30)
        node.finish()
        node.wait_until_alone()
        assert_arrived(node, lines, influx)
