"""The frozen values that travel: what a journal record says, after decoding.

Everything above may import this module; it imports nothing of ours. Times are nanoseconds since the
epoch (`*_ns`), stamped by the caller's process at the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
#: A value as the journal holds it: a number, or the encoded form of a typed value (see `values.py`).
StoredValue: TypeAlias = "int | float | Mapping[str, JsonValue]"
#: What a record is encoded from: a short array whose first item is the kind.
Payload: TypeAlias = "list[object]"


class Kind(IntEnum):
    """The first item of every record. A number is never given a second meaning."""

    ATTEMPT = 0
    KEYSET = 1
    ROW = 2
    CONFIG = 3
    SUMMARY = 4
    TAGS = 5
    CONSOLE = 6
    SYSTEM = 7
    EVENT = 8
    FINISH = 9
    MARK = 10


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the first record of every segment says, so that each file can be read on its own."""

    schema_version: int
    project: str
    run: str
    attempt: str
    writer: int
    segment: int
    version: str
    role: str = ""
    uid: str = ""
    environment: str = "prod"
    created_ns: int = 0
    #: One past the highest step of the run when the segment was begun.
    step: int = 0
    #: The next step of calls that give none, when the segment was begun.
    counter: int = 0
    #: What the user had set in `run.summary` when the segment was begun.
    summary: dict[str, object] = {}
    #: Name, tags, notes, group and job type when the segment was begun.
    labels: dict[str, object] = {}
    #: Whether the delivery process wrote it, beside the node: samples of the machine and nothing of the run.
    companion: bool = False


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The root of all records; `offset` is the place of the frame in its segment, in bytes."""

    offset: int


class Row(Record, frozen=True, kw_only=True, gc=False):
    """What one `log` call recorded. `names[i]` has `values[i]`."""

    names: tuple[str, ...]
    values: list[StoredValue]
    step: int
    time_ns: int
    context: Mapping[str, str]
    #: Whether the step is the run's own counter, because the call gave none.
    counted: bool = False

    def items(self) -> zip[tuple[str, StoredValue]]:
        """The pairs of name and value."""
        return zip(self.names, self.values, strict=True)


class AttemptStarted(Record, frozen=True, kw_only=True):
    """One process start of a run: version, host, process, git state, and what identifies the node."""

    time_ns: int
    attempt: Mapping[str, JsonValue]


class ConfigSet(Record, frozen=True, kw_only=True):
    """The whole config as it stood at `time_ns`, secrets masked."""

    time_ns: int
    config: Mapping[str, JsonValue]


class SummarySet(Record, frozen=True, kw_only=True):
    """Summary entries that the user set by hand; None removes one."""

    time_ns: int
    summary: Mapping[str, JsonValue]


class RunEdited(Record, frozen=True, kw_only=True):
    """Name, tags, notes, group or job type, as far as given."""

    time_ns: int
    fields: Mapping[str, JsonValue]


class ConsoleLine(Record, frozen=True, kw_only=True):
    """One line of the node's standard output or error."""

    time_ns: int
    stream: str
    text: str


class SystemRow(Record, frozen=True, kw_only=True):
    """One sample of the machine's and the process's resources."""

    names: tuple[str, ...]
    values: list[StoredValue]
    time_ns: int


class Event(Record, frozen=True, kw_only=True):
    """Something that happened: `rewind`, `checkpoint`, `alert`, `define_metric`, `provenance`, `signal`."""

    time_ns: int
    name: str
    data: Mapping[str, JsonValue]


class Mark(Record, frozen=True, kw_only=True):
    """Where the run stands here, written now and then so that nobody has to read all to know."""

    time_ns: int
    step: int
    counter: int
    summary: Mapping[str, JsonValue]
    labels: Mapping[str, JsonValue]


class AttemptFinished(Record, frozen=True, kw_only=True):
    """How an attempt ended: `state` is finished, crashed or terminated; `reason` says more."""

    time_ns: int
    state: str
    exit_code: int
    reason: str
