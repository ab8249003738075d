"""Where everything of one demo lies."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from nodetrack.errors import DemoError
from nodetrack.machine import process_created_at, process_is_alive

MARKER = ".nodetrack-demo"
_WRITTEN_BY = re.compile(r"(?P<pid>\d+) (?P<created_at>[\d.]+)\n")
_MARKER_TEXT = "This folder was made by `nodetrack demo`, which may clear it when it runs again.\n"


@dataclass(frozen=True)
class DemoFolder:
    """The folder and the places in it."""

    path: Path

    @property
    def journals(self) -> Path:
        """What the reading commands take as --dir."""
        return self.path / ".nodetrack"

    @property
    def exchange(self) -> Path:
        """Where nodes meet."""
        return self.path / "exchange"

    @property
    def tensorboard(self) -> Path:
        """What TensorBoard takes as --logdir, unless the demo is told to deliver elsewhere."""
        return self.path / "tensorboard"

    @property
    def hparams(self) -> Path:
        """The hyper-parameters that all nodes run with, resolved."""
        return self.path / "hparams.json"

    def checkpoint(self, node: str) -> Path:
        """The node's checkpoint."""
        return self.path / "checkpoints" / f"{node}.pt"

    def output(self, node: str, start: int) -> Path:
        """What the node printed after its n-th start."""
        return self.path / "output" / f"{node}-start-{start}.log"

    def prepare(self) -> bool:
        """Makes the folder, empty; True when an earlier demo was cleared away for it.

        Only a demo's own folder is ever cleared: it has a marker file. Raises DemoError for another folder
        that has something in it, and for that of a demo that is still running.
        """
        marker = self.path / MARKER
        had_earlier_demo = marker.is_file()
        if had_earlier_demo:
            self._check_that_it_has_ended(marker.read_text())
            shutil.rmtree(self.path)
        elif self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir())):
            raise DemoError(
                f"{self.path} is not empty and not from an earlier demo: name another folder with --folder."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        marker.write_text(f"{os.getpid()} {process_created_at()}\n{_MARKER_TEXT}")
        return had_earlier_demo

    def _check_that_it_has_ended(self, marker: str) -> None:
        written = _WRITTEN_BY.match(marker)
        if written and process_is_alive(int(written["pid"]), float(written["created_at"])):
            raise DemoError(
                f"A demo is running in {self.path} (process {written['pid']}): wait for it, or name another "
                "folder with --folder."
            )
