"""What one peer keeps on disk for many rows: run by `disk.py`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from benchmarks.peers import FILES, open_peer
from benchmarks.processes import answer

#: As in a run that has gone on for a while: a small step would take fewer bytes.
_FIRST_STEP: Final = 100_000


def main(folder: Path, name: str, width: str, rows: str) -> int:
    """Bytes of the files that hold the values, after `rows` calls of `width` floats and a clean end."""
    peer = open_peer(name, folder)
    draw = random.Random(0)
    names = [f"train/metric_{number}" for number in range(int(width))]
    for step in range(_FIRST_STEP, _FIRST_STEP + int(rows)):
        peer.log({metric: draw.random() for metric in names}, step)
    peer.finish()
    return sum(path.stat().st_size for path in folder.glob(FILES[name]) if path.is_file())


if __name__ == "__main__":
    answer(main)
