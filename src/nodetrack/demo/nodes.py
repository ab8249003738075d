"""A node as the one who starts it sees it: a process that can be stopped, killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nodetrack.demo.folder import DemoFolder
from nodetrack.errors import DemoNodeError

Written = str | Mapping[str, object]
"""A backend as a user writes it: its name, or a mapping with a `kind` and options."""
STOP_SECONDS = 15.0
"""How long a node may take to end by itself once its life line is cut."""
_OF_ONE_RUN = ("NODETRACK_ID", "NODETRACK_RESUME", "NODETRACK_NAME", "NODETRACK_MODE")


class NodeProcess:
    """One node of the demo, over all its starts."""

    def __init__(
        self, role: str, uid: int, miners: int, folder: DemoFolder, backends: Sequence[Written] = ()
    ) -> None:
        self.role = role
        self.uid = str(uid)
        self.name = f"{role}-{uid}"
        self.version = ""
        self.starts = 0
        self.was_killed = False
        self._miners = miners
        self._folder = folder
        self._backends = backends
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, version: str, stop_before_window: int) -> None:
        """Starts the process in its own session: Ctrl-C reaches the demo alone, which stops its nodes."""
        self.version = version
        self.starts += 1
        self.was_killed = False
        self.output.parent.mkdir(exist_ok=True)
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command(stop_before_window),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(os.environ, self._backends),
            )

    @property
    def output(self) -> Path:
        """What the node printed since its last start."""
        return self._folder.output(self.name, self.starts)

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs and before its first start."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raises DemoNodeError, with the last lines that the node printed, when it failed by itself."""
        if self.exit_code not in (None, 0) and not self.was_killed:
            raise DemoNodeError(self.name, self.exit_code or 0, self.last_lines(), self.output)

    def kill(self) -> None:
        """SIGKILL: the node has no chance to say or save anything."""
        if self._process is not None:
            self.was_killed = True
            self._process.kill()
            self._process.wait()

    def cut_life_line(self) -> None:
        """Asks the node to end by itself."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def wait_or_end(self, seconds: float = STOP_SECONDS) -> None:
        """Waits for a node whose life line is cut; one that does not end is terminated, then killed."""
        if self._process is None:
            return
        for next_signal in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.send_signal(next_signal)
        self._process.wait()

    def last_lines(self, count: int = 12) -> str:
        """The end of what the node printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-count:])

    def _command(self, stop_before_window: int) -> list[str]:
        return [
            *(sys.executable, "-m", "nodetrack.demo.node"),
            *("--role", self.role, "--uid", self.uid, "--version", self.version),
            *("--folder", str(self._folder.path), "--miners", str(self._miners)),
            *("--stop-before-window", str(stop_before_window)),
        ]


def stop_all(nodes: Iterable[NodeProcess]) -> None:
    """Stops all nodes at once, then waits for each: afterwards none is left."""
    nodes = list(nodes)
    for node in nodes:
        node.cut_life_line()
    for node in nodes:
        node.wait_or_end()


def _environment(of_the_demo: Mapping[str, str], backends: Sequence[Written]) -> dict[str, str]:
    """The demo's environment without what is meant for one run alone, with backends and one thread a node."""
    kept = {name: value for name, value in of_the_demo.items() if name not in _OF_ONE_RUN}
    return {**kept, "NODETRACK_BACKENDS": json.dumps(list(backends)), "OMP_NUM_THREADS": "1"}
