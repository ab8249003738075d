"""Real text that every machine with Python has: the source of its own standard library.

Files are split, not lines, so nothing of a held-out file is ever trained on. Which side a file falls on
depends on its name alone: the same on every node, and unchanged when Python adds a module.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

from nodetrack.errors import DemoError

HELD_OUT_SHARE = 10
"""One file in this many is held out."""


@dataclass(frozen=True)
class Corpus:
    """The two sides of the split, as bytes, and the names of the files that they are made of."""

    train: bytes
    held_out: bytes
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def standard_library() -> Path:
    """The folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def load_corpus(folder: Path | None = None) -> Corpus:
    """Reads the modules directly in `folder` (default: the standard library), in the order of their names.

    Raises DemoError when that leaves one side of the split empty, as where Python comes without sources.
    """
    folder = folder or standard_library()
    files = sorted(folder.glob("*.py"))
    train = [file for file in files if not is_held_out(file.name)]
    held_out = [file for file in files if is_held_out(file.name)]
    if not train or not held_out:
        raise DemoError(
            f"The demo trains on the Python sources in {folder}, and there are too few of them: "
            "use a Python that is installed with its standard library's sources."
        )
    return Corpus(_text(train), _text(held_out), _names(train), _names(held_out))


def is_held_out(file_name: str) -> bool:
    """Whether a file of that name is kept for evaluation."""
    return zlib.crc32(file_name.encode()) % HELD_OUT_SHARE == 0


def _text(files: list[Path]) -> bytes:
    return b"\n".join(file.read_bytes() for file in files)


def _names(files: list[Path]) -> tuple[str, ...]:
    return tuple(file.name for file in files)
