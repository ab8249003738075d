"""What the demo shows while it runs: a table that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

STATE_STYLES = {"running": "green", "killed": "red", "starting": "yellow", "done": "dim"}

#: Wide enough for whatever will stand there, so that nothing moves while it runs.
COLUMN_WIDTHS = {
    "node": 11,
    "version": 7,
    "attempts": 8,
    "state": 8,
    "window": 6,
    "step": 5,
    "newest value": 17,
}


@dataclass(frozen=True)
class NodeView:
    """One node at one moment."""

    name: str
    version: str
    attempts: int
    state: str
    window: int | None
    step: int | None
    metric: str
    value: float | None


class Display(Protocol):
    """Where the demo tells what happens."""

    def tell(self, message: str, style: str = "") -> None:
        """One event, kept on the screen; `style` is rich's word for how it looks on a terminal."""

    def show(self, nodes: Sequence[NodeView], windows_done: int, windows: int) -> None:
        """How things stand, replacing what was shown before."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def tell(console: Console, message: str, style: str = "") -> None:
    """Prints a text: broken between words to fit a terminal, in one line for a program that reads it."""
    console.print(Text(message, style=style), soft_wrap=not console.is_terminal)


class PlainDisplay:
    """Events as lines, for a pipe, a log file, or nobody (with a quiet console)."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def tell(self, message: str, style: str = "") -> None:
        """Prints the event."""
        tell(self._console, message, style)

    def show(self, nodes: Sequence[NodeView], windows_done: int, windows: int) -> None:
        """Nothing: only events are worth a line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay(PlainDisplay):
    """The same lines, above a table of the nodes and a bar of the windows."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            TextColumn("windows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._progress.add_task("windows", total=None)
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def show(self, nodes: Sequence[NodeView], windows_done: int, windows: int) -> None:
        """Redraws the table."""
        self._progress.update(self._task, completed=windows_done, total=windows)
        self._live.update(Group(_table(nodes), self._progress))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def _table(nodes: Sequence[NodeView]) -> Table:
    table = Table(box=None)
    for title, width in COLUMN_WIDTHS.items():
        table.add_column(title, min_width=width, no_wrap=True)
    for node in nodes:
        table.add_row(*_cells(node))
    return table


def _cells(node: NodeView) -> list[RenderableType]:
    state = Text(node.state, style=STATE_STYLES.get(node.state, ""))
    place = [_or_dash(node.window), _or_dash(node.step)]
    value = "" if node.value is None else f"{node.metric} {node.value:.3f}"
    return [node.name, node.version, str(node.attempts), state, *place, value]


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
