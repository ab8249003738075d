"""Rows, tags and versions in the form that W&B takes; used by the backend and by `initialize_wandb`.

W&B knows one rising `_step` a run and drops, in silence, every row whose step is lower. So a row is given
the caller's step while that grows, and the next free number where it does not (`number_for`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from nodetrack.naming import flatten_row, unflatten_row, with_context
from nodetrack.records import Row, StoredValue

LONGEST_TAG: Final = 64  # wandb raises for longer ones
_LARGEST_NUMBER: Final = 2**53  # W&B's page reads numbers as floats; beyond, rows are numbered in a row
_MOST_BINS: Final = 512  # of a wandb.Histogram
_SAME_SECONDS: Final = 1e-6  # a time in seconds as a float is this exact
_CLIENTS_OWN: Final = {"_timestamp", "_runtime", "_step", "_wandb"}
_PICTURES: Final = ("image", "table")  # these travel as files, not in the row


def number_for(step: int, lowest: int) -> int:
    """W&B's `_step` for a row of the caller's `step`; `lowest` is the first that W&B would still take."""
    return step if lowest <= step <= _LARGEST_NUMBER else lowest


def union(*lists: Iterable[str]) -> list[str]:
    """All tags once, in order, as wandb takes them: a longer one is cut."""
    tags = (
        tag if len(tag) <= LONGEST_TAG else f"{tag[: LONGEST_TAG - 1]}…" for tags in lists for tag in tags
    )
    return list(dict.fromkeys(tag for tag in tags if tag))


def version_history(config: Mapping[str, object], ours: Iterable[str], current: str) -> list[str]:
    """The service's list, completed by what only the journal saw, ending in `current`."""
    told = config.get("version_history")
    history = [str(version) for version in told] if isinstance(told, list | tuple) else []
    history += [version for version in ours if version not in history]
    return history if history[-1:] == [current] else [*history, current]


# ---------------------------------------------------------------------------------------------------
# Values


class UnshownError(Exception):
    """A value that cannot be shown; the text says which kind of value and why."""


def for_wandb(value: StoredValue) -> object:
    """A value of the journal as W&B's. Raises UnshownError."""
    if not isinstance(value, Mapping):
        return value
    convert = _CONVERSIONS.get(str(value.get("type")))
    if convert is None:
        raise UnshownError(f"a {value.get('type')!r} value")
    return convert(value)


def _histogram(value: Mapping[str, object]) -> object:
    import numpy
    import wandb

    counts = list(cast("Sequence[float]", value["counts"]))
    edges = list(cast("Sequence[float] | None", value["edges"]) or range(len(counts) + 1))
    together = -(-len(counts) // _MOST_BINS)  # neighbours are added up where W&B takes fewer bins
    if together > 1:
        counts = [sum(counts[start : start + together]) for start in range(0, len(counts), together)]
        edges = [*edges[:-1:together], edges[-1]]
    return wandb.Histogram(np_histogram=(numpy.asarray(counts), numpy.asarray(edges)))


def _table(value: Mapping[str, object]) -> object:
    import wandb

    return wandb.Table(columns=list(cast("Sequence[str]", value["columns"])), data=value["data"])


def _image(value: Mapping[str, object]) -> object:
    import wandb

    try:
        from PIL import Image as Pillow
    except ImportError:
        raise UnshownError("an image, because Pillow is not installed") from None
    try:
        image = Pillow.open(io.BytesIO(cast("bytes", value["data"])))
        image.load()
    except (OSError, ValueError):
        raise UnshownError("an image that Pillow cannot read") from None
    return wandb.Image(image, caption=cast("str | None", value["caption"]))


_CONVERSIONS: Final[Mapping[str, Callable[[Mapping[str, object]], object]]] = {
    "histogram": _histogram,
    "image": _image,
    "table": _table,
    "text": lambda value: value["text"],
}


# ---------------------------------------------------------------------------------------------------
# Lines: what one or more rows of the journal become in W&B's history


@dataclass
class Line:
    """One row of W&B: the rows of one step that come one after another, under the first one's time."""

    version: str
    step: int
    time_ns: int
    values: dict[str, StoredValue] = field(default_factory=dict)

    def take(self, version: str, row: Row) -> bool:
        """Add a row, if it belongs here and overwrites nothing."""
        values = named(row)
        fits = (self.version, self.step) == (version, row.step) and self.values.keys().isdisjoint(values)
        if fits:
            self.values.update(values)
        return fits

    def flat(self) -> dict[str, StoredValue]:
        """Under the names that W&B shows."""
        return cast("dict[str, StoredValue]", flatten_row(self.version, self.step, self.values))

    def number(self, lowest: int) -> int:
        """See `number_for`."""
        return number_for(self.step, lowest)

    @property
    def seconds(self) -> float:
        """W&B's `_timestamp`."""
        return self.time_ns / 1e9

    @property
    def has_files(self) -> bool:
        """Whether a part of it is uploaded beside the row."""
        return any(
            isinstance(value, Mapping) and value["type"] in _PICTURES for value in self.values.values()
        )


def named(row: Row) -> dict[str, StoredValue]:
    """A row's values by name, its context before the name."""
    if not row.context:
        return dict(row.items())
    return {with_context(name, row.context): value for name, value in row.items()}


def bytes_in_line(row: Row) -> int:
    """About what a row takes in W&B's history, where each value stands twice; files do not count."""
    inline = [
        value for value in row.values if not (isinstance(value, Mapping) and value["type"] in _PICTURES)
    ]
    return 2 * (len(msgspec.json.encode(inline)) + sum(len(name.encode()) + 16 for name in row.names))


class SentLine(msgspec.Struct):
    """What a line is recognised by: its step, the time of its first row, and the names still to come."""

    step: int
    seconds: float
    names: set[str]
    #: Whether its first row has come again.
    begun: bool = False

    def holds(self, row: Row, names: set[str]) -> bool:
        """Whether the row is a part of it."""
        same_time = abs(self.seconds - row.time_ns / 1e9) < _SAME_SECONDS
        return names <= self.names and (bool(names) if self.begun else same_time)


class Sent:
    """Lines that were sent before, to recognise their rows when these come again.

    A batch that is sent again may be cut elsewhere, so that rows that shared a line come apart.
    """

    def __init__(self, lines: Iterable[SentLine] = ()) -> None:
        self._by_step: dict[int, list[SentLine]] = {}
        for line in lines:
            self._add(line)

    def add(self, line: Line) -> None:
        """A line that was handed to W&B."""
        self._add(SentLine(line.step, line.seconds, set(line.values)))

    def add_stored(self, row: Mapping[str, object]) -> None:
        """A line as the service gives it back; one that is none of ours is passed over."""
        seconds, flat = row.get("_timestamp"), unflatten_row(row)
        if isinstance(seconds, int | float) and isinstance(flat.step, int):
            self._add(SentLine(flat.step, float(seconds), set(flat.values) - _CLIENTS_OWN))

    def _add(self, line: SentLine) -> None:
        self._by_step.setdefault(line.step, []).append(line)

    def lines(self) -> list[SentLine]:
        """All of them, as they can be kept."""
        return [line for lines in self._by_step.values() for line in lines]

    def copy(self) -> Sent:
        """One from which rows can be taken while this one keeps them."""
        return Sent(msgspec.structs.replace(line, names=set(line.names)) for line in self.lines())

    def forget_behind(self, step: int) -> None:
        """The lines of later steps are no longer there."""
        self._by_step = {known: lines for known, lines in self._by_step.items() if known <= step}

    def take(self, row: Row) -> bool:
        """Whether the row was sent. Rows are asked about in their order; each is found once."""
        names = set(named(row))
        lines = self._by_step.get(row.step, [])
        found = next((line for line in lines if line.holds(row, names)), None)
        if found is None:
            return False
        found.names -= names
        found.begun = True
        if not found.names:
            lines.remove(found)
        return True
