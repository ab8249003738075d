"""TensorBoard's event records from our records. Imports TensorBoard: only for who opens the backend.

One event holds all values of one row, and is written as bytes at once: see `framed`.
"""

from __future__ import annotations

import functools
import io
import json
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
from PIL import Image as PillowImage
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE, masked_crc32c
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from nodetrack.backends.base import RunInfo
from nodetrack.naming import join, latest, with_context
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    JsonValue,
    Record,
    Row,
    RunEdited,
    StoredValue,
    SummarySet,
    SystemRow,
)
from nodetrack.records import Event as OurEvent

#: What TensorBoard keeps of a number has 32 bits.
_LARGEST: Final = float(np.finfo(np.float32).max)
#: Config and other texts about the attempt stand before all rows, so that no going back purges them.
_BEFORE_ROWS: Final = -1
_LARGEST_STEP: Final = 2**63 - 1
_MOST_TEMPLATES: Final = 256
#: From so many records of one length on, checking them together is faster.
_FEW: Final = 64
_STATUS: Final = {"finished": api_pb2.STATUS_SUCCESS, "crashed": api_pb2.STATUS_FAILURE}


class Encoder:
    """Makes events of the records of one attempt. `leave_out` is told what TensorBoard cannot hold."""

    def __init__(self, run: RunInfo, leave_out: Callable[[str], None]) -> None:
        self.run = run
        self._leave_out = leave_out
        self._templates: dict[tuple[object, ...], tuple[Event, list[tuple[Any, Any]]]] = {}

    def encode(self, record: Record, last_step: int | None) -> Sequence[bytes]:
        """The events of a record; `last_step` is that of the row before it in the file, None if none is.

        Console lines and most events have no place in TensorBoard: it gets none of them.
        """
        if isinstance(record, Row):
            return self._row(record, last_step)
        if isinstance(record, SystemRow):
            return [self._system(record)]
        return self._about(record, last_step)

    def _about(self, record: Record, last_step: int | None) -> Sequence[bytes]:
        match record:
            case ConfigSet(time_ns=time_ns):
                return [_text(time_ns, "run/config", record.config), self._hyper_parameters(record)]
            case AttemptStarted(time_ns=time_ns):
                return [_text(time_ns, "run/attempt", record.attempt)]
            case RunEdited(time_ns=time_ns):
                return [_text(time_ns, "run/labels", record.fields)]
            case SummarySet(time_ns=time_ns):
                return [_text(time_ns, "run/summary", record.summary)]
            case OurEvent(name="alert", time_ns=time_ns):
                return [_text(time_ns, "run/alert", record.data, last_step or 0)]
            case OurEvent(name="rewind", time_ns=time_ns, data={"step": int(step)}):
                return [_purge(time_ns, step + 1)]
            case AttemptFinished(time_ns=time_ns):
                how: JsonValue = {
                    "state": record.state,
                    "exit_code": record.exit_code,
                    "reason": record.reason,
                }
                return [_text(time_ns, "run/end", how), _end(record)]
        return []

    def _row(self, row: Row, last_step: int | None) -> Sequence[bytes]:
        event = self._numbers(row) if _all_fit(row.values) else self._mixed(row)
        if event is None:
            return []
        if (
            last_step is None and self.run.attempt_number > 1
        ):  # where folders are merged, it goes on from here
            return [_purge(row.time_ns, row.step), event]
        return [event]

    def _numbers(self, row: Row) -> bytes:
        event, pairs = self._template(row)
        event.wall_time = row.time_ns / 1e9
        event.step = row.step
        for value, (under_version, under_latest) in zip(row.values, pairs, strict=True):
            under_version.simple_value = value
            under_latest.simple_value = value
        return cast("bytes", event.SerializeToString())

    def _system(self, row: SystemRow) -> bytes:
        """A sample of the machine, whose step are the seconds since the attempt began."""
        seconds = max(row.time_ns - self.run.started_ns, 0) // 1_000_000_000
        event = Event(wall_time=row.time_ns / 1e9, step=seconds)
        for name, value in zip(row.names, row.values, strict=True):
            if not isinstance(value, Mapping):
                event.summary.value.add(tag=name, simple_value=value)
        return _bytes(event)

    def _hyper_parameters(self, record: ConfigSet) -> bytes:
        """The config as the HParams tab has it: flat, and numbers, booleans or text."""
        run, seconds = self.run, record.time_ns / 1e9
        config = {"version": run.version, "role": run.role, "uid": run.uid, **record.config}
        session = f"{run.run}/{run.attempt}"
        summary = hparams_pb(dict(_flat(config, "")), trial_id=session, start_time_secs=seconds)
        return _bytes(Event(wall_time=seconds, step=_BEFORE_ROWS, summary=summary))

    def _template(self, row: Row) -> tuple[Event, list[tuple[Any, Any]]]:
        """An event with the row's names, whose values are to be set: names are most of an event."""
        key = (row.names, tuple(sorted(row.context.items())) if row.context else ())
        if key not in self._templates:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            event = Event()
            pairs = []
            for name in row.names:
                tags = self._tags(name, row.context)
                pairs.append(tuple(event.summary.value.add(tag=tag) for tag in tags))
            self._templates[key] = event, cast("list[tuple[Any, Any]]", pairs)
        return self._templates[key]

    def _mixed(self, row: Row) -> bytes | None:
        """A row in which not everything is a number that fits."""
        event = Event(wall_time=row.time_ns / 1e9, step=row.step)
        for name, stored in row.items():
            value = self._value(stored)
            if value is not None:
                for tag in self._tags(name, row.context):
                    value.tag = tag
                    event.summary.value.append(value)
        return event.SerializeToString() if event.summary.value else None

    def _tags(self, name: str, context: Mapping[str, str]) -> tuple[str, str]:
        metric = with_context(name, context)
        return join(self.run.version, metric), latest(metric)

    def _value(self, stored: StoredValue) -> Summary.Value | None:
        if not isinstance(stored, Mapping):
            if _fits(stored):
                return Summary.Value(simple_value=stored)
            self._leave_out("number beyond the range of 32 bits")
            return None
        kind = stored["type"]
        if kind == "histogram":
            return self._histogram(stored)
        if kind == "text":
            return _text_value(str(stored["text"]))
        if kind == "table":
            return _text_value(_markdown_table(stored))
        if kind == "image":
            return self._image(stored)
        self._leave_out(str(kind))
        return None

    def _histogram(self, stored: Mapping[str, JsonValue]) -> Summary.Value:
        """The bins with their edges; without edges they are numbered. TensorBoard drops empty bins at both
        ends and takes `min` and `max` for the outer edges of what is left.
        """
        counts = cast("Sequence[float]", stored["counts"])
        edges = cast("Sequence[float] | None", stored.get("edges")) or range(len(counts) + 1)
        if stored.get("nonfinite"):
            self._leave_out("observations of a histogram that are not finite")
        filled = [index for index, count in enumerate(counts) if count > 0] or [0]
        histogram = HistogramProto(num=sum(counts), bucket=counts, bucket_limit=edges[1:])
        if counts:
            histogram.min, histogram.max = edges[filled[0]], edges[filled[-1] + 1]
        return Summary.Value(histo=histogram)

    def _image(self, stored: Mapping[str, JsonValue]) -> Summary.Value | None:
        data = cast("bytes", stored["data"])
        try:
            width, height = PillowImage.open(io.BytesIO(data)).size
        except (OSError, ValueError, SyntaxError):  # what Pillow raises for a damaged file
            self._leave_out("image that cannot be decoded")
            return None
        return Summary.Value(
            image=Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
        )


def file_version() -> bytes:
    """What every event file begins with. It has no time: it is the same whenever the file is written."""
    source = SourceMetadata(writer="nodetrack.backends.tensorboard")
    return _bytes(Event(file_version="brain.Event:2", source_metadata=source))


def _purge(time_ns: int, step: int) -> bytes:
    """From here on readers forget what the same folder holds of `step` and beyond."""
    log = SessionLog(status=SessionLog.START)
    return _bytes(Event(wall_time=time_ns / 1e9, step=min(step, _LARGEST_STEP), session_log=log))


def _text(time_ns: int, tag: str, value: JsonValue, step: int = _BEFORE_ROWS) -> bytes:
    """A value of ours in the Text tab, as indented JSON."""
    lines = json.dumps(value, indent=2, ensure_ascii=False, default=str).splitlines()
    summary = text_pb(tag, "".join(f"    {line}\n" for line in lines))
    return _bytes(Event(wall_time=time_ns / 1e9, step=step, summary=summary))


def _end(record: AttemptFinished) -> bytes:
    """How the session of the HParams tab ended."""
    info = plugin_data_pb2.SessionEndInfo(
        status=_STATUS.get(record.state, api_pb2.STATUS_UNKNOWN), end_time_secs=record.time_ns / 1e9
    )
    metadata = hparams_metadata.create_summary_metadata(
        plugin_data_pb2.HParamsPluginData(session_end_info=info)
    )
    event = Event(wall_time=record.time_ns / 1e9, step=_BEFORE_ROWS)
    event.summary.value.add(
        tag=hparams_metadata.SESSION_END_INFO_TAG, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR
    )
    return _bytes(event)


def framed(records: Sequence[bytes]) -> bytes:
    """The records as a file holds them, what TensorBoard's own RecordWriter would write:
    length, its checksum, record, its checksum.
    """
    parts: list[bytes] = []
    for record, checksum in zip(records, _checksums(records), strict=True):
        parts += (_frame_head(len(record)), record, checksum)
    return b"".join(parts)


@functools.lru_cache(maxsize=1024)
def _frame_head(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + struct.pack("<I", masked_crc32c(length))


def _checksums(records: Sequence[bytes]) -> list[bytes]:
    """The masked CRC-32C of each. TensorBoard's own works byte by byte, which is nine tenths of all work;
    many of one length, as the rows of a training are, are taken byte by byte all at once.
    """
    places: dict[int, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        places[len(record)].append(place)
    found = [b""] * len(records)
    for same in places.values():
        group = [records[place] for place in same]
        checksums = _one_by_one(group) if len(group) < _FEW else _together(group)
        for place, checksum in zip(same, checksums, strict=True):
            found[place] = checksum
    return found


def _one_by_one(records: Sequence[bytes]) -> list[bytes]:
    return [struct.pack("<I", masked_crc32c(record)) for record in records]


def _together(records: Sequence[bytes]) -> list[bytes]:
    table = np.array(CRC_TABLE, dtype=np.uint32)
    # One row a byte: each step below reads one piece of memory.
    columns = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1).T.copy()
    state = np.full(len(records), 0xFFFFFFFF, np.uint32)
    for column in columns:
        state = table[(state ^ column) & 0xFF] ^ (state >> 8)
    state ^= 0xFFFFFFFF
    masked = ((state >> 15) | (state << 17)) + np.uint32(0xA282EAD8)
    packed = masked.astype("<u4").tobytes()
    return [packed[start : start + 4] for start in range(0, len(packed), 4)]


def _all_fit(values: Sequence[StoredValue]) -> bool:
    """Whether all are numbers that fit: asked of every row, so without a call for each value."""
    for value in values:  # noqa: SIM110 - `all` with a generator takes three times as long
        if isinstance(value, Mapping) or not -_LARGEST <= value <= _LARGEST:
            return False
    return True


def _fits(value: float) -> bool:
    """Whether 32 bits hold it, rounded or as NaN or infinity."""
    return -_LARGEST <= value <= _LARGEST or not math.isfinite(value)


def _bytes(event: Event) -> bytes:
    return cast("bytes", event.SerializeToString())


def _text_value(content: str) -> Summary.Value:
    return text_pb("", content).value[0]


def _markdown_table(stored: Mapping[str, JsonValue]) -> str:
    columns = cast("Sequence[JsonValue]", stored["columns"])
    rows = cast("Sequence[Sequence[JsonValue]]", stored["data"])
    return "\n".join(_markdown_row(row) for row in (columns, ["---"] * len(columns), *rows))


def _markdown_row(cells: Sequence[JsonValue]) -> str:
    shown = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(shown)} |"


def _flat(config: Mapping[str, JsonValue], prefix: str) -> Iterator[tuple[str, bool | int | float | str]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        elif isinstance(value, bool | str) or (isinstance(value, int | float) and math.isfinite(value)):
            yield name, value
        else:
            yield name, json.dumps(value, ensure_ascii=False, default=str)
