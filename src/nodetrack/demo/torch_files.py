"""Files of tensors that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def save_atomically(content: object, path: Path) -> None:
    """Writes beside `path` and renames: a reader never sees half a file, whenever the writer is killed.

    Not fsynced: what a killed process wrote survives it, and a demo need not survive a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(content, unfinished)
    unfinished.replace(path)


def load_tensors(path: Path) -> object:
    """Reads tensors and plain values, to be cast to what was saved. Code in the file is refused."""
    content: object = torch.load(path, weights_only=True)
    return content
