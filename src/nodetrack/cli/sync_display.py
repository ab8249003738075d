"""What `nodetrack sync` shows while it sends: a bar for each job on a terminal, lines elsewhere.

All of it goes to standard error: standard output is the closing table's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from nodetrack.cli.command import note
from nodetrack.cli.sync_sending import Sending
from nodetrack.cli.terminal import counted, print_text, printable
from nodetrack.redact import redact_text

_LONGEST_NAME: Final = 28


class PlainDisplay:
    """Nothing but what a person should know."""

    def show(self, active: Sequence[Sending], waiting: int) -> None:
        """Nothing: standard error is no terminal."""

    def tell(self, message: str) -> None:
        """As all remarks."""
        note(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay(PlainDisplay):
    """A bar for each job under way: how much of the journal has arrived, rows, rows a second, and its state.

    It is gone in the end, when the table tells what came of it.
    """

    def __init__(self, screen: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None, table_column=Column(min_width=8, ratio=1)),
            TaskProgressColumn(),
            _Rows(),
            TextColumn("{task.fields[state]}", style="yellow"),
            console=screen,
            transient=True,
            expand=True,
        )
        self._tasks: dict[int, TaskID] = {}
        self._waiting: TaskID | None = None

    def show(self, active: Sequence[Sending], waiting: int) -> None:
        """Redraw the bars."""
        there = {id(sending) for sending in active}
        for gone in self._tasks.keys() - there:
            self._progress.remove_task(self._tasks.pop(gone))
        for sending in active:
            done, total = sending.bytes_done()
            self._progress.update(
                self._task_of(sending), completed=done, total=total, rows=sending.rows, state=_state(sending)
            )
        self._show_waiting(waiting)

    def tell(self, message: str) -> None:
        """As all remarks, above the bars."""
        print_text(self._progress.console, Text(f"nodetrack: {redact_text(message)}"))

    def _task_of(self, sending: Sending) -> TaskID:
        if id(sending) not in self._tasks:
            name = printable(f"{sending.job.name} → {sending.job.backend}")
            shown = name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"
            self._tasks[id(sending)] = self._progress.add_task(shown, total=None, rows=0, state="")
        return self._tasks[id(sending)]

    def _show_waiting(self, waiting: int) -> None:
        if self._waiting is not None:
            self._progress.remove_task(self._waiting)
            self._waiting = None
        if waiting:
            self._waiting = self._progress.add_task(
                f"and {counted(waiting, 'more')}"[:_LONGEST_NAME], total=None, rows=0, state=""
            )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class _Rows(ProgressColumn):
    """`18240 rows, 9120/s`."""

    def render(self, task: Task) -> Text:
        rows = task.fields["rows"]
        seconds = max(0.1, task.elapsed or 0.0)
        return Text(f"{rows} rows, {rows / seconds:.0f}/s" if rows else "", style="cyan")


def _state(sending: Sending) -> str:
    """One word of what is waited for."""
    if sending.status is None or sending.status.state in ("ok", "done"):
        return ""
    return sending.status.state
