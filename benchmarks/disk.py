"""Bytes on disk for each value that was logged: `python -m benchmarks.disk`."""

from __future__ import annotations

from typing import Final

from rich.console import Console

from benchmarks.peers import PEERS, TITLES
from benchmarks.processes import measure
from benchmarks.report import Topic, target

#: How many rows of so many floats.
_ROWS: Final = {1: 2000, 10: 2000, 100: 300}


def topics(console: Console) -> list[Topic]:
    """The one table."""
    method = (
        "Bytes a point (one value of one metric) in the files that hold the values, after "
        + ", ".join(f"{rows} rows of {width}" for width, rows in _ROWS.items())
        + " random floats and a clean end, before any compression of files."
    )
    columns = ("tracker", *(f"{width} a row" for width in _ROWS), "target")
    topic = Topic("Bytes a point on disk", method, columns)
    for name in PEERS:
        console.print(f"disk: {TITLES[name]}", style="dim")
        sizes = {width: _bytes_a_point(name, width, rows) for width, rows in _ROWS.items()}
        goal = f"at 10 a row {target(sizes[10], 12)}" if name == "nodetrack" else ""
        topic.add(TITLES[name], *(f"{size:.1f}" for size in sizes.values()), goal)
    return [topic]


def _bytes_a_point(name: str, width: int, rows: int) -> float:
    size: int = measure("benchmarks.measure_disk", name, str(width), str(rows))
    return size / (width * rows)


if __name__ == "__main__":
    for each in topics(Console()):
        each.print(Console())
