"""A topic's result as a table, for the terminal and for the page that keeps the last one."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

_PACKAGES: Final = ("nodetrack", "msgspec", "pydantic", "wandb", "trackio", "tensorboard", "torch")
#: Columns of words; all others are numbers.
_WORDS: Final = ("tracker", "target")


@dataclass
class Topic:
    """What was measured about one thing; a column `target` says what nodetrack shall reach, and if it did."""

    title: str
    method: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """One more row; a cell that is missing at the end is empty."""
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))

    def print(self, console: Console) -> None:
        """Show it in the terminal."""
        table = Table(
            title=self.title,
            caption=self.method,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for column in self.columns:
            table.add_column(
                column, justify="left" if column in _WORDS else "right", no_wrap=column == "tracker"
            )
        for row in self.rows:
            table.add_row(
                *row[:-1],
                row[-1].replace(", ", "\n"),
                style="bold" if row[0].startswith("nodetrack") else None,
            )
        console.print(table, "")

    def markdown(self) -> str:
        """The same for a page."""
        rule = ["---" if column in _WORDS else "---:" for column in self.columns]
        lines = [self.columns, rule, *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{self.method}\n\n{table}\n"


def target(value: float, limit: float) -> str:
    """What shall be reached, and whether it is: `≤ 5 ✓`."""
    return f"≤ {limit:g} {'✓' if value <= limit else '✗'}"


def machine() -> str:
    """The machine by cores and CPU, nothing else."""
    found = re.search(
        r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    return f"{cpu_count()} cores, {found[1] if found else platform.machine()}"


def versions() -> str:
    """What was measured with."""
    packages = [f"{name} {known}" for name in _PACKAGES if (known := _version(name))]
    return ", ".join([f"Python {platform.python_version()}", *packages])


def page(topics: Iterable[Topic]) -> str:
    """`docs/benchmarks.md`."""
    today = datetime.now(UTC).date().isoformat()
    head = (
        "# Benchmarks\n\n"
        "Written by `make bench`; nothing in the test suite is timed.\n\n"
        f"- Machine: {machine()}, shared with other work\n- Date: {today}\n- Versions: {versions()}\n"
    )
    return "\n".join([head, *(topic.markdown() for topic in topics)])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
