"""What a node needs to come back: its tensors, and where its tracking stood."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar, cast

from nodetrack.demo.torch_files import load_tensors, save_atomically

State = TypeVar("State")


class Checkpoint(Generic[State]):
    """One file a node, replaced as a whole after each window."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, state: State) -> None:
        """Replaces the checkpoint."""
        save_atomically(state, self.path)

    def load(self) -> State | None:
        """The state as saved, or None at the very first start."""
        return cast("State", load_tensors(self.path)) if self.path.exists() else None
