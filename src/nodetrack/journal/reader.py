"""Reading a segment: every whole record, from a file that is finished, growing, torn or damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import msgspec

from nodetrack.errors import JournalError
from nodetrack.journal.segment import (
    FRAME_HEAD,
    MAGIC,
    Damage,
    decode_header,
    find_frame,
    find_last_frame,
    is_frame,
    payload_at,
    scan_frames,
)
from nodetrack.journal.shape import (
    Check,
    are_facts,
    are_labels,
    are_names,
    are_plain,
    are_values,
    is_complete,
    is_context,
    is_integer,
    is_state,
    is_text,
)
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    Kind,
    Mark,
    Record,
    Row,
    RunEdited,
    SegmentHeader,
    StoredValue,
    SummarySet,
    SystemRow,
)

_Names = tuple[tuple[str, ...], Mapping[str, str]]
_RowFields = tuple[int, int, list[StoredValue], int, int]
_decode: Callable[[bytes], list[object]] = msgspec.msgpack.Decoder(list).decode
_KEYSET = int(Kind.KEYSET)
_SAYS_WHO: Final = (Kind.KEYSET, Kind.ATTEMPT, Kind.TAGS)
_SKIP_BYTES: Final = 4 * 1024 * 1024
_MARK_BEGINS: Final = bytes((0x96, Kind.MARK))  # an array of six
#: Before the name of an event: a frame's head, the array's length, the kind, and a time of up to nine bytes.
_MOST_BEFORE_NAME: Final = FRAME_HEAD.size + 1 + 1 + 9


class SegmentReader:
    """Reads one segment, and can be asked again for what has been added since.

    `header` is None until it has been read, and stays None when its record is damaged: the records are
    read all the same. `damage` counts what had to be left out. `unnamed_rows` are rows whose key set is
    damaged in both its copies, `unknown_records` are of a kind that a later version writes. Who has no use
    for names (`names_are_needed`) may begin at any record: a row whose names are not known has none then.
    """

    def __init__(self, path: Path, *, names_are_needed: bool = True) -> None:
        self.path = path
        self.header: SegmentHeader | None = None
        self.damage = Damage()
        self.unnamed_rows = 0
        self.unknown_records = 0
        #: Where the next `read` begins: behind the last whole record.
        self.offset = 0
        self._key_sets: dict[int, _Names] = {}
        self._magic_is_damaged = False
        self._names_are_needed = names_are_needed

    def read(self, limit: int = -1) -> Iterator[Record]:
        """Every whole record behind `offset`, in the order written; within the next `limit` bytes, if given.

        Raises JournalError for another kind of file or a later schema, and OSError when the file cannot be
        opened.
        """
        data, base = self._load(limit)
        self.damage.torn_bytes = 0
        for offset, begin, end in scan_frames(data, 0, self.damage):
            record = self._record(base + offset, data[begin:end])
            self.offset = base + end
            if record is not None:
                yield record
        self._check_kind_of_file()

    def skip_to(self, offset: int) -> Iterator[Record]:
        """Go on at `offset`, behind a record. What names and labels what follows is taken in on the way; the
        records that say who the attempt is are yielded.
        """
        block = _SKIP_BYTES
        while self.offset < offset:
            data, base = self._load(min(block, offset - self.offset))
            start = self.offset
            for place, begin, end in scan_frames(data, 0, Damage()):
                if data[begin + 1] in _SAYS_WHO or data[begin] & 0xF0 != 0x90:
                    record = self._record(base + place, data[begin:end])
                    if record is not None:
                        yield record
                self.offset = base + end
            if self.offset == start:
                if base + len(data) >= offset or len(data) < block:
                    self.offset = offset  # a damaged stretch, or a file that was longer once
                block *= 2

    def _load(self, limit: int) -> tuple[bytes, int]:
        """What lies behind `offset`, and where that begins. Half a magic is a file that was just made."""
        with self.path.open("rb") as file:
            if self.offset == 0:
                magic = file.read(len(MAGIC))
                if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
                    return b"", 0
                if len(magic) < len(MAGIC):
                    raise self._no_segment()
                self._magic_is_damaged = magic != MAGIC
                self.damage.corrupt += self._magic_is_damaged
                self.offset = len(MAGIC)
            file.seek(self.offset)
            return file.read(limit), self.offset

    def _check_kind_of_file(self) -> None:
        """A wrong magic alone is a damaged byte; a wrong magic and not one whole record is another file."""
        if self._magic_is_damaged and self.offset == len(MAGIC):
            self.damage.corrupt -= 1
            self.offset = 0
            raise self._no_segment()

    def _no_segment(self) -> JournalError:
        return JournalError(f"{self.path} is not a nodetrack journal segment.", self.path)

    def read_finish(self, tail_bytes: int = 64 * 1024) -> AttemptFinished | None:
        """The finish record, if the segment ends with it, without reading more than the end of the file."""
        found = None
        for offset, payload in self._tail(tail_bytes):
            if payload[0] & 0xF0 == 0x90 and payload[1:2] == bytes((Kind.FINISH,)):
                record = self._record(offset, payload)
                found = record if isinstance(record, AttemptFinished) else found
        return found

    def read_from_last_mark(self, block_bytes: int) -> Iterator[Record]:
        """The last mark and what stands behind it, looked for from the end; nothing if there is none.

        A row whose names are said before the mark has none here.
        """
        self._names_are_needed = False
        data, mark = b"", None
        with self.path.open("rb") as file:
            start = file.seek(0, 2)
            while mark is None and start > len(MAGIC):
                end, start = start, max(len(MAGIC), start - block_bytes)
                file.seek(start)
                data = file.read(end - start) + data
                mark = find_last_frame(data, _MARK_BEGINS, end - start)
        for offset, begin, end in scan_frames(data, len(data) if mark is None else mark, Damage()):
            record = self._record(start + offset, data[begin:end])
            if record is not None:
                yield record

    def find_events(self, name: str) -> Iterator[Event]:
        """The events of that name, without decoding what stands between them."""
        data, packed = self.path.read_bytes(), msgspec.msgpack.encode(name)
        place = data.find(packed)
        while place >= 0:
            for offset in range(max(len(MAGIC), place - _MOST_BEFORE_NAME), place - FRAME_HEAD.size):
                if is_frame(data, offset):
                    record = self._record(offset, payload_at(data, offset))
                    if isinstance(record, Event) and record.name == name:
                        yield record
            place = data.find(packed, place + 1)

    def _tail(self, tail_bytes: int) -> Iterator[tuple[int, bytes]]:
        with self.path.open("rb") as file:
            start = max(len(MAGIC), file.seek(0, 2) - tail_bytes)
            file.seek(start)
            data = file.read()
        first = find_frame(data, 0)  # the look may begin in the middle of a record
        for offset, begin, end in scan_frames(data, len(data) if first is None else first, Damage()):
            yield start + offset, data[begin:end]

    def _record(self, offset: int, payload: bytes) -> Record | None:
        if offset == len(MAGIC) and (payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF)):  # a map
            self.header = decode_header(payload, self.path)
            self.damage.corrupt += self.header is None
            return None
        try:
            return self._made(offset, _decode(payload))
        except (msgspec.DecodeError, TypeError, ValueError, IndexError, RecursionError):
            self.damage.corrupt += 1  # whole, but not as any version writes it
            return None

    def _made(self, offset: int, fields: list[object]) -> Record | None:
        kind = fields[0]
        if kind == _KEYSET:
            self._key_sets[_number(fields)] = _names(fields)
            return None
        make = _MAKERS.get(cast("int", kind))
        if make is None:
            self.unknown_records += 1
            return None
        return make(self, offset, fields)

    def row(self, offset: int, fields: list[object]) -> Row | None:
        """A row with its names in place; None when its key set is damaged."""
        _, number, values, step, time_ns = cast("_RowFields", fields[:5])
        if step.__class__ is not int or time_ns.__class__ is not int or not are_values(values):
            raise TypeError
        named = self._key_sets.get(number)
        if named is None:
            if self._names_are_needed:
                self.unnamed_rows += 1
                return None
            named, values = ((), {}), []
        names, context = named
        if len(values) != len(names):
            raise ValueError
        counted = len(fields) > 5
        return Row(
            offset=offset,
            names=names,
            values=values,
            step=step,
            time_ns=time_ns,
            context=context,
            counted=counted,
        )

    def system_row(self, offset: int, fields: list[object]) -> SystemRow | None:
        """A sample of the machine's resources with its names in place."""
        values, time_ns = fields[2], fields[3]
        if not (is_integer(time_ns) and are_values(values)):
            raise TypeError
        named = self._key_sets.get(_number(fields))
        if named is None:
            self.unnamed_rows += 1
            return None
        if len(values) != len(named[0]):
            raise ValueError
        return SystemRow(offset=offset, names=named[0], values=values, time_ns=time_ns)


def _number(fields: list[object]) -> int:
    """The number of a key set."""
    number = fields[1]
    if not is_integer(number):
        raise TypeError
    return number


def _names(fields: list[object]) -> _Names:
    names, context = fields[2], fields[3]
    if not (are_names(names) and is_context(context)):
        raise TypeError
    return tuple(names), context


def _plain(record: type[Record], **checks: Check) -> Callable[[SegmentReader, int, list[object]], Record]:
    """Makes a record of the items behind the kind, in this order, each of which has to pass its check."""

    def make(_: SegmentReader, offset: int, fields: list[object]) -> Record:
        named = dict(zip(checks, fields[1:], strict=False))
        if not all(checks[name](item) for name, item in named.items()):
            raise TypeError
        return record(offset=offset, **named)

    return make


def _event(_: SegmentReader, offset: int, fields: list[object]) -> Event:
    time_ns, name, data = fields[1:4]
    if not (is_integer(time_ns) and is_text(name) and are_plain(data) and is_complete(name, data)):
        raise TypeError
    return Event(offset=offset, time_ns=time_ns, name=name, data=data)


_MAKERS: Mapping[int, Callable[[SegmentReader, int, list[object]], Record | None]] = {
    Kind.ROW: SegmentReader.row,
    Kind.SYSTEM: SegmentReader.system_row,
    Kind.ATTEMPT: _plain(AttemptStarted, time_ns=is_integer, attempt=are_facts),
    Kind.CONFIG: _plain(ConfigSet, time_ns=is_integer, config=are_plain),
    Kind.SUMMARY: _plain(SummarySet, time_ns=is_integer, summary=are_plain),
    Kind.TAGS: _plain(RunEdited, time_ns=is_integer, fields=are_labels),
    Kind.CONSOLE: _plain(ConsoleLine, time_ns=is_integer, stream=is_text, text=is_text),
    Kind.EVENT: _event,
    Kind.MARK: _plain(
        Mark, time_ns=is_integer, step=is_integer, counter=is_integer, summary=are_plain, labels=are_labels
    ),
    Kind.FINISH: _plain(
        AttemptFinished, time_ns=is_integer, state=is_state, exit_code=is_integer, reason=is_text
    ),
}
