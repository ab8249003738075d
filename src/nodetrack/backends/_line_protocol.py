"""Records as InfluxDB line protocol: what becomes a tag, what a field, and at which time.

    metrics,environment=prod,project=p,role=miner,run=ab12,uid=7,version=0.1.0 loss=0.5,step=7,attempt=1,… 17…

Tags say who, and are few: each new value of one is a new series for the server. Whatever grows with time or
restarts is a field. Every number is a float, so that no field ever changes its type; what is no finite number
stands in a field of another name (`loss_nonfinite="nan"`, `sample_text="…"`).

The client's own `Point` writes the same text about five times slower, drops NaN in silence, and loses a
backslash at the end of a tag, so lines are written here. Characters that a server would misread are replaced,
see `escape_key` and `quote`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, cast

from nodetrack.backends.base import Batch, RunInfo
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    Event,
    JsonValue,
    Record,
    Row,
    StoredValue,
    SystemRow,
)

#: The key of a row's context that names its measurement.
MEASUREMENT: Final = "measurement"
SYSTEM: Final = "system"
EVENTS: Final = "events"
#: Processes that log to one run at the same time are told apart by so many values of the tag `writer`.
WRITERS: Final = 32
#: A text longer than this is cut; InfluxDB takes no more than 64 KiB in a field.
LONGEST_TEXT_BYTES: Final = 60_000
_STANDARD_TAGS: Final = (
    "environment",
    "group",
    "job_type",
    "project",
    "role",
    "run",
    "uid",
    "version",
    "writer",
)
_ROW_FIELDS: Final = ("attempt", "runtime_id", "step")
#: Field names that are taken: ours, and those that InfluxDB keeps for itself.
_TAKEN: Final = frozenset(
    {*_STANDARD_TAGS, *_ROW_FIELDS, "", "time", "_time", "_field", "_measurement", "_start", "_stop"}
)
_OUR_ENDING: Final = re.compile(r"_(text|nonfinite|histogram(_[a-z0-9]+)?)$")
_AWAY: Final = "_value"
_SPECIAL: Final = str.maketrans({",": r"\,", "=": r"\=", " ": r"\ "})
_MOST_LAYOUTS: Final = 4096
_NUMBERS: Final = frozenset({int, float})

#: Told of each value that has no form here.
LeaveOut = Callable[[str], None]


def escape_key(name: str) -> str:
    """A measurement, tag key, tag value or field key.

    A backslash, a quotation mark and what cannot be printed are written as Python may write them (`\\x5c`,
    `\\x22`, `\\n`): the protocol cannot write a backslash everywhere, VictoriaMetrics takes a quotation mark
    for the beginning of a text, and a line feed ends the line. No two names become one.
    """
    if not name.isprintable() or "\\" in name or '"' in name:
        name = "".join(map(_written, name))
    return name.translate(_SPECIAL)


def _written(char: str) -> str:
    if char in '\\"':
        return f"\\x{ord(char):x}"
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def field_key(metric: str) -> str:
    """The name of a metric's field: its own, with `_value` behind it where that is taken (`step_value`)."""
    stem = metric
    while stem.endswith(_AWAY):
        stem = stem.removesuffix(_AWAY)
    return f"{metric}{_AWAY}" if stem in _TAKEN or _OUR_ENDING.search(stem) else metric


def quote(text: str) -> str:
    """The value of a text field. A line feed is written as `\\n`: servers that split at line ends would take
    what follows for points.
    """
    if not text.isprintable():
        text = text.replace("\r\n", "\n").replace("\n", r"\n").replace("\r", r"\r").replace("\0", r"\0")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


class Lines:
    """Makes the lines of one run's batches. What depends on names alone is kept from row to row."""

    def __init__(self, measurement: str, leave_out: LeaveOut) -> None:
        self._measurement = measurement
        self._leave_out = leave_out
        self._run: RunInfo | None = None
        self._writer = 0
        self._tags: dict[str, str] = {}
        self._common = ""
        self._layouts: dict[tuple[object, ...], tuple[str, tuple[str, ...]]] = {}

    def of(self, batch: Batch, times_ns: Iterable[int]) -> Iterator[str]:
        """The lines of a batch; each record has its time. A record that has nothing to show has no line."""
        self._enter(batch)
        for record, time_ns in zip(batch.records, times_ns, strict=True):
            if isinstance(record, Row):
                line = self._row(record, time_ns)
            elif isinstance(record, SystemRow):
                line = self._system(record, time_ns)
            else:
                line = self._event(record, time_ns)
            if line:
                yield line

    def _enter(self, batch: Batch) -> None:
        if batch.run == self._run and batch.writer == self._writer:
            return
        run = self._run = batch.run
        self._writer = batch.writer
        self._layouts.clear()
        self._tags = {
            name: str(value)
            for name in _STANDARD_TAGS
            if name != "writer" and (value := getattr(run, name)) not in (None, "")
        }
        self._common = f"attempt={run.attempt_number},runtime_id={quote(run.attempt)}"

    # -- rows ----------------------------------------------------------------------------------------

    def _row(self, row: Row, time_ns: int) -> str:
        head, keys = self._layout(row)
        values = row.values
        if _NUMBERS.issuperset(map(type, values)) and _all_finite(values):
            fields = ",".join(map(str.__add__, keys, map(repr, values)))
        else:
            fields = ",".join(self._mixed(row.names, keys, values))
        return f"{head} {fields},step={row.step},{self._common} {time_ns}" if fields else ""

    def _layout(self, row: Row) -> tuple[str, tuple[str, ...]]:
        """What stands in front of the fields, and the fields' names up to the equals sign."""
        context = row.context
        key = (row.names, *context.items()) if context else (row.names,)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            tags = self._row_tags(context)
            head = _head(context.get(MEASUREMENT) or self._measurement, tags)
            layout = head, tuple(_key_of(name, tags) for name in row.names)
            self._layouts[key] = layout
        return layout

    def _row_tags(self, context: Mapping[str, str]) -> dict[str, str]:
        tags = dict(self._tags)
        if self._writer > 1:
            tags["writer"] = str(self._writer % WRITERS)
        for name, value in context.items():
            if name != MEASUREMENT:
                tags[f"context_{name}" if name in _TAKEN else name] = value
        return tags

    def _mixed(
        self, names: Sequence[str], keys: Sequence[str], values: Sequence[StoredValue]
    ) -> Iterator[str]:
        """Fields of a row that has other than finite numbers."""
        for name, key, value in zip(names, keys, values, strict=True):
            if isinstance(value, Mapping):
                yield from self._typed(name, value)
            elif math.isfinite(value):
                yield f"{key}{float(value) if isinstance(value, bool) else value!r}"
            else:
                yield f'{escape_key(name)}_nonfinite="{value!r}"'

    def _typed(self, name: str, value: Mapping[str, JsonValue]) -> Iterator[str]:
        kind = value.get("type")
        if kind == "text":
            yield f"{escape_key(name)}_text={self._text(str(value.get('text', '')))}"
        elif kind == "histogram":
            key = f"{escape_key(name)}_histogram"
            yield from (f"{key}_{stat}={number!r}" for stat, number in histogram_statistics(value).items())
            yield f"{key}={self._text(json.dumps({**value, 'type': 'histogram'}, separators=(',', ':')))}"
        else:
            self._leave_out(f"{kind}: InfluxDB has no such values")

    def _text(self, text: str) -> str:
        encoded = text.encode("utf-8", "backslashreplace")
        if len(encoded) > LONGEST_TEXT_BYTES:
            self._leave_out(f"the end of a text, behind {LONGEST_TEXT_BYTES} bytes")
            encoded = encoded[:LONGEST_TEXT_BYTES]
        return quote(encoded.decode("utf-8", "ignore"))

    # -- all else ------------------------------------------------------------------------------------

    def _system(self, row: SystemRow, time_ns: int) -> str:
        names = [name.removeprefix(f"{SYSTEM}/") for name in row.names]
        keys = [f"{escape_key(field_key(name))}=" for name in names]
        fields = ",".join(self._mixed(names, keys, row.values))
        return f"{_head(SYSTEM, self._tags)} {fields},{self._common} {time_ns}" if fields else ""

    def _event(self, record: Record, time_ns: int) -> str:
        event = self._described(record)
        if event is None:
            return ""
        kind, title, texts, numbers = event
        fields = [f"title={quote(title)}"]
        fields += [f"{name}={self._text(text)}" for name, text in texts.items()]
        fields += [f"{name}={number!r}" for name, number in numbers.items()]
        head = _head(EVENTS, {**self._tags, "event": kind})
        return f"{head} {','.join(fields)},{self._common} {time_ns}"

    def _described(self, record: Record) -> tuple[str, str, dict[str, str], dict[str, float]] | None:
        """Kind, title, text fields and number fields of what happened; None for what is not sent."""
        number = self._run.attempt_number if self._run is not None else 0
        if isinstance(record, AttemptStarted):
            version = self._run.version if self._run is not None else ""
            return "attempt_started", f"attempt {number} of version {version} started", {}, {}
        if isinstance(record, AttemptFinished):
            texts = {"text": record.reason, "state": record.state}
            return (
                "attempt_finished",
                f"attempt {number} {record.state}",
                texts,
                {"exit_code": record.exit_code},
            )
        if isinstance(record, ConfigSet):
            return "config", f"config of attempt {number}", {"text": _json(record.config)}, {}
        if isinstance(record, Event) and record.name != "define_metric":
            return _described_event(record)
        return None


def _described_event(event: Event) -> tuple[str, str, dict[str, str], dict[str, float]]:
    title, text, step = event.data.get("title"), event.data.get("text"), event.data.get("step")
    has_step = isinstance(step, int | float) and math.isfinite(step)
    return (
        event.name,
        str(title) if title is not None else f"{event.name} {step}" if has_step else event.name,
        {"text": str(text) if title is not None else _json(event.data)},
        {"step": cast("float", step)} if has_step else {},
    )


def histogram_statistics(histogram: Mapping[str, JsonValue]) -> dict[str, float]:
    """Count, and where the edges are known mean, least, greatest, and quantiles that are straight within a
    bin.
    """
    counts = [float(count) for count in cast("Sequence[float]", histogram.get("counts") or ())]
    edges = [float(edge) for edge in cast("Sequence[float]", histogram.get("edges") or ())]
    total = sum(counts)
    known = {"count": total, "nonfinite": float(cast("float", histogram.get("nonfinite") or 0))}
    if not edges or not 0 < total < math.inf or not all(map(math.isfinite, edges)):
        return {name: number for name, number in known.items() if math.isfinite(number)}
    filled = [index for index, count in enumerate(counts) if count]
    known["mean"] = sum(
        count * (low + high) / 2 for count, low, high in zip(counts, edges, edges[1:], strict=False)
    )
    known["mean"] /= total
    known["min"], known["max"] = edges[filled[0]], edges[filled[-1] + 1]
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        known[name] = _quantile(counts, edges, share * total)
    return known


def _quantile(counts: Sequence[float], edges: Sequence[float], rank: float) -> float:
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        if count and rank <= count:
            return low + (high - low) * rank / count
        rank -= count
    return edges[-1]


def _head(measurement: str, tags: Mapping[str, str]) -> str:
    """Measurement and tags: sorted, else the server sorts them, and without empty ones, which it refuses."""
    name = escape_key(measurement)
    if name.startswith("#"):  # the line would be a comment
        name = rf"\x23{name[1:]}"
    pairs = [f"{escape_key(key)}={escape_key(value)}" for key, value in sorted(tags.items()) if key and value]
    return ",".join([name, *pairs])


def _key_of(metric: str, tags: Mapping[str, str]) -> str:
    name = field_key(metric)
    return f"{escape_key(f'{name}{_AWAY}' if name in tags else name)}="


def _all_finite(values: Sequence[StoredValue]) -> bool:
    """Of plain numbers. A sum may overflow where no value does; then the slow way has a look."""
    total = sum(cast("Sequence[float]", values))
    return total - total == 0


def _json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))
