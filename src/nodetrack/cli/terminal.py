"""What is printed for people: one console, one look of tables, and how times, numbers and states are written.

In a terminal, tables fit its width and states have colours (NO_COLOR is honoured). Anywhere else there are no
colours, and lines are as long as they need to be, so that nothing is cut for the program that reads them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from nodetrack.cli.strict_json import json_line, nonfinite_word

if TYPE_CHECKING:
    from nodetrack.records import JsonValue, StoredValue

_WIDER_THAN_ANY_TABLE: Final = 100_000
#: Between two columns of a table.
COLUMN_GAP: Final = 2
#: What a text that may be broken is left at least, and any column of a table that cannot but break words.
_LEAST_TEXT: Final = 16
_LEAST_FOLDED: Final = 6
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_STATE_STYLES: Final = {
    "running": "green",
    "finished": "blue",
    "crashed": "red",
    "stale": "yellow",
    "terminated": "magenta",
}


class _PipeConsole(Console):
    """Lets a closed pipe be the command's affair, which ends it quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """The console of standard output as it is now."""
    made = _PipeConsole(highlight=False, emoji=False, markup=False, soft_wrap=False)
    if not made.is_terminal:
        made.width = _WIDER_THAN_ANY_TABLE
    return made


def table(*titles: str) -> Table:
    """An empty table in the look that all commands share.

    The end of a title says how its column is laid out: `>` for numbers, on the right; `~` for text that may
    be broken into lines; else it is a word that stays whole.
    """
    made = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim"
    )
    for title in titles:
        made.add_column(
            title.rstrip(">~"),
            justify="right" if title.endswith(">") else "left",
            no_wrap=not title.endswith("~"),
            overflow="fold",
        )
    return made


def print_table(screen: Console, listed: Table) -> None:
    """Print a table of which no character is lost: a terminal too narrow for whole words gets them folded."""
    if least_width(listed) > screen.width:
        for column in listed.columns:
            column.no_wrap, column.min_width = False, None
        listed.width = max(screen.width, len(listed.columns) * _LEAST_FOLDED)
    print_grid(screen, listed)


def print_grid(screen: Console, grid: Table) -> None:
    """Print a table as it is; where a program reads, without the blanks that fill its lines."""
    if screen.is_terminal:
        screen.print(grid, crop=False)
        return
    with screen.capture() as captured:
        screen.print(grid, crop=False)
    for line in captured.get().splitlines():
        print_whole(screen, Text(line.rstrip()))


def print_text(screen: Console, text: Text) -> None:
    """Print a text in lines that fit; what has no blank in it, a URL or a path, is never broken."""
    screen.print(text, overflow="ignore", crop=False)


def print_whole(screen: Console, line: Text) -> None:
    """Print a line that can be selected and copied in one piece, however long it is."""
    screen.print(line, soft_wrap=True)


def least_width(listed: Table) -> int:
    """How wide a table has to be so that whole words stay whole and texts have some room."""
    widths = []
    for column in listed.columns:
        widest = max(map(_cell_width, [column.header, *column.cells]))
        least = widest if column.no_wrap else column.min_width or _LEAST_TEXT
        widths.append(min(widest, least))
    return sum(widths) + (len(widths) - 1) * COLUMN_GAP


def _cell_width(cell: RenderableType) -> int:
    return max(map(cell_len, str(cell).split("\n")))


# ---------------------------------------------------------------------------------------------------
# Text


def printable(text: str) -> str:
    """The text in one line: what would move the cursor or change the terminal is shown as its escape."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def state_text(state: str, reason: str = "") -> Text:
    """A state in its colour, with the reason behind it if there is one."""
    text = Text(state, style=_STATE_STYLES.get(state, ""))
    return text.append(f" ({printable(reason)})", style="default") if reason else text


def event_text(event: str, data: Mapping[str, JsonValue]) -> str:
    """What an event says: a sentence where its kind is known, else `name value` pairs."""
    if event == "alert":
        return printable(": ".join(str(data[key]) for key in ("title", "text") if data.get(key)))
    if event == "rewind" and isinstance(step := data.get("step"), int):
        return f"went back to step {step + 1}: earlier rows from there on are superseded"
    if event == "checkpoint" and isinstance(step := data.get("step"), int):
        return f"a checkpoint led on to step {step}"
    if event == "signal" and "signal" in data:
        return printable(f"{data['signal']} received")
    pairs = (f"{key} {value if isinstance(value, str) else json_line(value)}" for key, value in data.items())
    return printable(", ".join(pairs))


def counted(count: int, what: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


# ---------------------------------------------------------------------------------------------------
# Times


def ago(time_ns: int, now_ns: int | None = None) -> str:
    """How long ago something was, in its largest unit: `4 min ago`."""
    seconds = ((now_ns or time.time_ns()) - time_ns) / 1e9
    return f"{_largest_unit(max(0.0, seconds))} ago"


def _largest_unit(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def duration(seconds: float) -> str:
    """A length of time in its two largest units: `2 h 5 min`, `3 min 20 s`, `4.2 s`."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    for (unit, size), (smaller, part) in (
        (("d", 86_400), ("h", 3_600)),
        (("h", 3_600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // part)} {smaller}"
    raise AssertionError(seconds)


def moment(time_ns: int) -> str:
    """A point in time as the clock on this machine's wall shows it."""
    return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def clock(time_ns: int, *, milliseconds: bool = True) -> str:
    """A point in time, without the date if that is today's."""
    then = datetime.fromtimestamp(time_ns / 1e9).astimezone()
    is_today = then.date() == datetime.now().astimezone().date()
    text = then.strftime("%H:%M:%S.%f" if is_today else "%Y-%m-%d %H:%M:%S.%f")
    return text[:-3] if milliseconds else text[:-7]


# ---------------------------------------------------------------------------------------------------
# Values


def number(value: float) -> str:
    """An integer in full, another number to six significant digits."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if value - value == 0.0 else nonfinite_word(value)


def in_bytes(value: float) -> str:
    """A number of bytes in its largest unit: `1.50 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} bytes"


def value_text(value: StoredValue) -> str:
    """A logged value in a few words: a number, or what kind of typed value it is."""
    if not isinstance(value, Mapping):
        return number(value)
    kind = str(value.get("type", "value"))
    if kind == "histogram":
        return f"histogram of {_length(value.get('counts'))} bins"
    if kind == "image":
        return f"{value.get('format')} image of {_length(value.get('data'))} bytes"
    if kind == "table":
        return f"table of {_length(value.get('data'))} × {_length(value.get('columns'))}"
    return shortened(str(value["text"])) if kind == "text" and "text" in value else kind


def shortened(text: str, longest: int = 40) -> str:
    """The text in one line and quotation marks, cut where it is longer than a table should hold."""
    return f"“{printable(text[:longest])}{'…' if len(text) > longest else ''}”"


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sequence) else 0
