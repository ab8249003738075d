"""The shared folder where nodes meet: window parameters one way, pseudo-gradients the other.

    exchange/
      window-000003/
        parameters.pt       what the window begins with: its being there opens the window
        miner-0.pt          a contribution
        closed              written when the validator has gathered
      joined/
        miner-0             the version that the node runs, written when it is ready

Each file is written by one node and appears whole. Nobody looks back: a contribution to a window that is
already closed is never read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypedDict, cast

from nodetrack.demo.compression import SparseTensor, Tensors
from nodetrack.demo.life_line import LifeLine
from nodetrack.demo.torch_files import load_tensors, save_atomically

logger = logging.getLogger("nodetrack")

POLL_SECONDS = 0.05
EMPTY_WINDOW_SECONDS = 120.0
"""How long a window waits for its first contribution."""


class Contribution(TypedDict):
    """What one miner made of one window."""

    miner: str
    window: int
    version: str
    pseudo_gradient: dict[str, SparseTensor]


class Exchange:
    """One node's view of the shared folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- the validator's side ------------------------------------------------------------------------

    def open_window(self, window: int, parameters: Tensors) -> None:
        """Publishes the parameters that miners start the window from; doing it again changes nothing."""
        save_atomically(parameters, self._window(window) / "parameters.pt")

    def gather(
        self, window: int, expected: Collection[str], patience_seconds: float, life_line: LifeLine
    ) -> list[Contribution]:
        """Waits for the expected miners until the deadline, and reads what is there, sorted by miner.

        The deadline is for the others: once the first contribution is in, they have `patience_seconds`, or
        half the time that the first one took if that is longer. So a dead miner cannot hold up the window, on
        a fast machine or a slow one. A file that no miner of this demo can have written is left out.
        """
        self._wait_for_contributions(window, expected, patience_seconds, life_line)
        present = sorted(self.contributors(window) & set(expected))
        return [contribution for name in present if (contribution := self._read(window, name))]

    def close_window(self, window: int) -> None:
        """From now on contributions to the window are late."""
        (self._window(window) / "closed").touch()

    def contributors(self, window: int) -> set[str]:
        """The miners whose contribution is there."""
        return {file.stem for file in self._window(window).glob("[!.]*.pt")} - {"parameters"}

    def wait_for_nodes(
        self, expected: Collection[str], version: str, seconds: float, life_line: LifeLine
    ) -> set[str]:
        """Waits until the expected nodes run `version`, at most `seconds`; returns those that do."""
        deadline = time.monotonic() + seconds
        while (ready := self._ready(expected, version)) != set(expected):
            if time.monotonic() >= deadline or life_line.wait(POLL_SECONDS):
                break
        return ready

    def forget_before(self, window: int) -> None:
        """Deletes the tensors of earlier windows, which nobody reads again."""
        for folder in self.folder.glob("window-*"):
            if int(folder.name.removeprefix("window-")) < window:
                for file in folder.glob("*.pt"):
                    file.unlink(missing_ok=True)

    # -- the miner's side ----------------------------------------------------------------------------

    def join(self, node: str, version: str) -> None:
        """Says that the node is ready, and under which version."""
        path = self.folder / "joined" / node
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(version)

    def newest_window(self) -> int | None:
        """The window that was opened last; None before the first."""
        opened = [path.parent.name for path in self.folder.glob("window-*/parameters.pt")]
        return int(max(opened).removeprefix("window-")) if opened else None

    def is_open(self, window: int) -> bool:
        """Whether contributions to the window are still read."""
        return not (self._window(window) / "closed").exists()

    def parameters(self, window: int) -> Tensors:
        """What the window begins with."""
        return cast("Tensors", load_tensors(self._window(window) / "parameters.pt"))

    def contribute(self, contribution: Contribution) -> bool:
        """Hands in a contribution. False when the window is closed: then nobody reads it."""
        window = contribution["window"]
        if self.is_open(window):
            save_atomically(contribution, self._window(window) / f"{contribution['miner']}.pt")
        return self.is_open(window)

    # -- inside --------------------------------------------------------------------------------------

    def _window(self, window: int) -> Path:
        return self.folder / f"window-{window:06d}"

    def _ready(self, expected: Collection[str], version: str) -> set[str]:
        joined = {file.name: file.read_text() for file in (self.folder / "joined").glob("*")}
        return {name for name in expected if joined.get(name) == version}

    def _wait_for_contributions(
        self, window: int, expected: Collection[str], patience_seconds: float, life_line: LifeLine
    ) -> None:
        opened_at = time.monotonic()
        deadline, first_seen = opened_at + EMPTY_WINDOW_SECONDS, False
        while not self.contributors(window) >= set(expected) and time.monotonic() < deadline:
            if not first_seen and self.contributors(window):
                first_seen, now = True, time.monotonic()
                deadline = now + max(patience_seconds, (now - opened_at) / 2)
            if life_line.wait(POLL_SECONDS):
                return

    def _read(self, window: int, miner: str) -> Contribution | None:
        path = self._window(window) / f"{miner}.pt"
        try:
            contribution = load_tensors(path)
        except Exception as error:  # whatever a miner's bytes make torch raise must not end the validator
            logger.warning("%s cannot be read and is left out: %s.", path, type(error).__name__)
            return None
        is_ours = isinstance(contribution, Mapping) and contribution.get("window") == window
        return cast("Contribution", contribution) if is_ours else None
