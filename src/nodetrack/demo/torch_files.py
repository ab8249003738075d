"""Files of tensors that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

# What torch.save takes and torch.load gives back; the caller's TypedDict says what is inside.
State = Any


def save_atomically(state: State, path: Path) -> None:
    """Writes beside `path` and renames: a reader never sees half a file, whenever the writer is killed.

    Not fsynced: what a killed process wrote survives it, and a demo need not survive a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load_tensors(path: Path) -> State:
    """Reads tensors and plain values; a file with anything executable in it is refused."""
    return torch.load(path, weights_only=True)
