"""The course of the demo: start the nodes, kill one, restart it, then bring all of them to the next version.

It talks to its nodes through their life lines only, and knows of them what their journals say.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nodetrack.demo.display import Display, NodeView
from nodetrack.demo.folder import DemoFolder
from nodetrack.demo.nodes import NodeProcess, Written, stop_all
from nodetrack.demo.shape import ModelShape
from nodetrack.demo.versions import VERSIONS
from nodetrack.demo.watch import JournalWatch
from nodetrack.errors import DemoError
from nodetrack.hparams.namespace import Namespace

POLL_SECONDS = 0.1
FEWEST_WINDOWS = 4


@dataclass(frozen=True)
class Killed:
    """A node that was killed: what it had printed as logged until then is in `output` of its `start`."""

    node: str
    start: int
    window: int


@dataclass(frozen=True)
class Course:
    """When things happen, in windows: the kill early in the first version, the switch at half-time."""

    windows: int

    def __post_init__(self) -> None:
        if self.windows < FEWEST_WINDOWS:
            raise DemoError(
                f"{self.windows} windows are too few to kill a node and to switch the version: "
                f"take at least {FEWEST_WINDOWS} (--windows, or `windows` in hparams.json)."
            )

    @property
    def switch_window(self) -> int:
        """The first window of the next version."""
        return self.windows // 2

    @property
    def kill_window(self) -> int:
        """The window in which a miner is killed; early, so that it is back before the switch."""
        return max(1, self.switch_window // 3)


class Demo:
    """One run of the demo."""

    def __init__(
        self,
        hparams: Namespace,
        miners: int,
        folder: DemoFolder,
        display: Display,
        backends: Sequence[Written] = (),
    ) -> None:
        self.hparams = hparams
        self.miners = miners
        self.folder = folder
        self.display = display
        self.course = Course(hparams.windows)
        self.shape = ModelShape.from_hparams(hparams)
        self.nodes = [
            *(NodeProcess("miner", uid, miners, folder, backends) for uid in range(miners)),
            NodeProcess("validator", 0, miners, folder, backends),
        ]
        self.watches = {
            node.name: JournalWatch(folder.journals, hparams.project, node.name) for node in self.nodes
        }
        self.killed: list[Killed] = []

    def run(self) -> None:
        """The whole course. Whatever happens on the way, no node is left running.

        Raises DemoNodeError when a node fails by itself.
        """
        self.folder.hparams.write_text(json.dumps(self.hparams.to_dict(), indent=2))
        old, new = VERSIONS
        try:
            self.display.tell(f"Starting {len(self.nodes)} nodes, each its own process, under version {old}.")
            self._phase(old, self.course.switch_window)
            if not self.killed:
                self.display.tell(
                    "No miner could be killed in time; it will be under the next version.", "yellow"
                )
            self.display.tell(f"All nodes have stopped. Restarting them under version {new}.", "bold")
            self._phase(new, self.course.windows)
        finally:
            stop_all(self.nodes)

    def _phase(self, version: str, stop_before_window: int) -> None:
        """All nodes under one version, until each has done its part."""
        for node in self.nodes:
            node.start(version, stop_before_window)
        while any(node.is_running for node in self.nodes):
            self._look()
            if not self.killed and self._is_time_to_kill():
                self._kill_and_restart(self._victim, version, stop_before_window)
            time.sleep(POLL_SECONDS)
        self._look()

    @property
    def _victim(self) -> NodeProcess:
        """The last of the miners."""
        return [node for node in self.nodes if node.role == "miner"][-1]

    def _is_time_to_kill(self) -> bool:
        """Half-way through the course's window, or as soon after as it is seen."""
        step = self.watches[self._victim.name].step
        kill_at = (self.course.kill_window + 0.5) * self.hparams.inner_steps
        return step is not None and step >= kill_at and self._victim.is_running

    def _kill_and_restart(self, node: NodeProcess, version: str, stop_before_window: int) -> None:
        node.kill()
        watch = self.watches[node.name]
        self._look()
        self.killed.append(Killed(node.name, node.starts, watch.window or 0))
        self.display.tell(
            f"Killed {node.name} with SIGKILL in window {watch.window} at step {watch.step}. Restarting it.",
            "red",
        )
        node.start(version, stop_before_window)

    def _look(self) -> None:
        """Reads the journals, tells what is new in them, and raises DemoNodeError for a failed node."""
        for node in self.nodes:
            watch = self.watches[node.name]
            known_attempts = watch.attempts
            rows = watch.look()
            if known_attempts and watch.attempts > known_attempts:
                self._tell_resumed(node)
            if node.role == "validator":
                for row in rows:
                    self._tell_window(dict(row.items()), node.version)
            node.check()
        views = [self._view(node) for node in self.nodes]
        self.display.show(views, self._windows_done(), self.hparams.windows)

    def _tell_resumed(self, node: NodeProcess) -> None:
        watch = self.watches[node.name]
        self.display.tell(
            f"{node.name} is back: attempt {watch.attempts} of the same run, under version {node.version}."
        )

    def _tell_window(self, values: dict[str, object], version: str) -> None:
        if "eval/loss" in values:
            self.display.tell(
                f"window {values['window']!s:>3}  version {version}  eval/loss {values['eval/loss']:.3f}  "
                f"contributions {values['gather/contributions']} of {self.miners}"
            )

    def _windows_done(self) -> int:
        window = self.watches["validator-0"].window
        return 0 if window is None else window + 1

    def _view(self, node: NodeProcess) -> NodeView:
        watch = self.watches[node.name]
        metric = "eval/loss" if node.role == "validator" else "train/loss"
        return NodeView(
            name=node.name,
            version=node.version,
            attempts=watch.attempts,
            state=self._state(node),
            window=watch.window,
            step=watch.step,
            metric=metric,
            value=watch.metric(metric),
        )

    def _state(self, node: NodeProcess) -> str:
        if not node.is_running:
            return "killed" if node.was_killed else "done"
        return "running" if self.watches[node.name].attempts >= node.starts else "starting"
