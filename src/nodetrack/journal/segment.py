"""The segment file: a magic, then frames. `docs/journal-format.md` describes it byte by byte.

    segment = magic frame frame …          frame = 263·length(u32 LE) crc32(u32 LE) payload(length bytes)

The first frame's payload is the header, a MessagePack map; every later payload is a MessagePack array of
two to fifteen items whose first item is the kind (`records.Kind`). The CRC is zlib's, over the payload.

Why frames and not lines: a torn tail or a flipped byte costs the records that it touches and no other.
Why 263 times the length: no change of one byte makes another multiple of 263, and no four equal bytes are
one, so a reader knows whether the length or the payload was damaged, and whether the last frame is torn or
only claims to reach so far.
What is not promised: that two segments can be concatenated, or that a frame never spans a page.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec

from nodetrack.errors import JournalError
from nodetrack.journal.shape import are_labels, are_plain
from nodetrack.records import SegmentHeader

MAGIC: Final = b"\x89NTJ\r\n\x1a\n"  # like PNG's: shows a transfer that touched line ends or the eighth bit
SCHEMA_VERSION: Final = 1
FRAME_HEAD: Final = struct.Struct("<II")
LENGTH_FACTOR: Final = 263
MAX_PAYLOAD_BYTES: Final = 16_000_000  # 263 times as much still fits into 32 bits
SEGMENT_NAME: Final = re.compile(r"segment-([0-9]{6,})\.ntj")


class _Schema(msgspec.Struct):
    """The part of a header that every version understands."""

    schema_version: int


_encode = msgspec.msgpack.Encoder().encode
_decode_schema = msgspec.msgpack.Decoder(_Schema).decode
_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode
_pack_head = FRAME_HEAD.pack

# A payload begins with an array of 2-15 items and a kind below 128. Used to find the next frame behind a
# damaged one without trying every byte in Python.
_PAYLOAD_START = re.compile(rb"[\x92-\x9f][\x00-\x7f]")
NOT_ENCODABLE: Final = (TypeError, ValueError, OverflowError, RecursionError)


def segment_name(number: int) -> str:
    """`segment-000001.ntj` for 1."""
    return f"segment-{number:06d}.ntj"


def segment_paths(attempt_folder: Path) -> list[Path]:
    """The segments of an attempt in the order in which they were begun; [] when there is no folder."""
    try:
        names = [entry.name for entry in attempt_folder.iterdir() if SEGMENT_NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [attempt_folder / name for name in sorted(names, key=segment_number)]


def segment_number(name: str) -> int:
    """1 for `segment-000001.ntj`; 0 for any other file."""
    match = SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def frame(payload: bytes) -> bytes:
    """A payload with its length and checksum in front, ready for one `write`."""
    return _pack_head(len(payload) * LENGTH_FACTOR, crc32(payload)) + payload


def encode_payload(payload: object) -> bytes:
    """The payload in MessagePack. What MessagePack cannot hold is written as text; nothing raises."""
    try:
        return _encode(payload)
    except NOT_ENCODABLE:
        return _encode(_encodable(payload))


def _encodable(value: object, depth: int = 32) -> object:
    if value is None or isinstance(value, bool | float | bytes):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int(value)
    if isinstance(value, Mapping) and depth:
        return {_encodable(key, 0): _encodable(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_encodable(item, depth - 1) for item in value]
    return str(value).encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no UTF-8


def encode_header(header: SegmentHeader) -> bytes:
    """The first bytes of a segment: magic and header frame. A summary too large for a record is left out."""
    try:
        payload = _encode(header)
    except NOT_ENCODABLE:
        payload = encode_payload(msgspec.structs.asdict(header))
    if len(payload) > MAX_PAYLOAD_BYTES:
        payload = encode_payload(msgspec.structs.asdict(header) | {"summary": {}, "labels": {}})
    return MAGIC + frame(payload)


def decode_header(payload: bytes, path: Path) -> SegmentHeader | None:
    """The header; None when it is none. Raises JournalError for a schema that this version does not know."""
    try:
        schema_version = _decode_schema(payload).schema_version
        if schema_version > SCHEMA_VERSION:  # whatever else such a header says
            raise JournalError(
                f"{path} has journal schema {schema_version}; this nodetrack reads up to "
                f"{SCHEMA_VERSION}: upgrade nodetrack to read it.",
                path,
            )
        header = _decode_header(payload)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return header if are_plain(header.summary) and are_labels(header.labels) else None


class Damage(msgspec.Struct):
    """What a scan had to leave out."""

    #: Damaged stretches in the middle, each at least one record.
    corrupt: int = 0
    #: Bytes behind the last whole record: a write that did not end, or is under way.
    torn_bytes: int = 0


def scan_frames(data: bytes, start: int, damage: Damage) -> Iterator[tuple[int, int, int]]:
    """Every whole frame of `data` from `start`, as (offset, begin of payload, end of payload).

    A frame that fails its checksum is counted and skipped; where its length cannot be believed either, the
    scan goes on at the next place where a whole frame stands. What is left behind the last one is
    `damage.torn_bytes`: the caller who is tailing comes back for it.
    """
    offset, end = start, len(data)
    unpack = FRAME_HEAD.unpack_from
    while offset + 8 <= end:
        marked, checksum = unpack(data, offset)
        length, remainder = divmod(marked, LENGTH_FACTOR)
        stop = offset + 8 + length
        believed = remainder == 0 and 0 < length <= MAX_PAYLOAD_BYTES
        if believed and stop <= end and crc32(data[offset + 8 : stop]) == checksum:
            yield offset, offset + 8, stop
            offset = stop
            continue
        if believed and stop >= end:  # torn or still being written: its values are not searched for frames
            break
        following = stop if believed and is_frame(data, stop) else find_frame(data, offset + 1)
        if following is None:
            break
        damage.corrupt += 1
        offset = following
    damage.torn_bytes = end - offset


def find_frame(data: bytes, start: int) -> int | None:
    """The first place at or behind `start` where a whole frame other than the header stands; None if none."""
    for payload in _PAYLOAD_START.finditer(data, start + FRAME_HEAD.size):
        if is_frame(data, payload.start() - FRAME_HEAD.size):
            return payload.start() - FRAME_HEAD.size
    return None


def find_last_frame(data: bytes, beginning: bytes, stop: int) -> int | None:
    """The last place before `stop` where a whole frame stands whose payload begins so; None if none."""
    stop += FRAME_HEAD.size + len(beginning) - 1
    payload = data.rfind(beginning, FRAME_HEAD.size, stop)
    while payload >= 0 and not is_frame(data, payload - FRAME_HEAD.size):
        payload = data.rfind(beginning, FRAME_HEAD.size, payload + len(beginning) - 1)
    return payload - FRAME_HEAD.size if payload >= 0 else None


def is_frame(data: bytes, offset: int) -> bool:
    """Whether a whole frame stands at `offset`."""
    if offset + FRAME_HEAD.size > len(data):
        return False
    marked, checksum = FRAME_HEAD.unpack_from(data, offset)
    length, remainder = divmod(marked, LENGTH_FACTOR)
    begin = offset + FRAME_HEAD.size
    if remainder or not 0 < length <= min(MAX_PAYLOAD_BYTES, len(data) - begin):
        return False
    return bool(crc32(data[begin : begin + length]) == checksum)


def payload_at(data: bytes, offset: int) -> bytes:
    """The payload of the frame that stands at `offset`."""
    marked, _ = FRAME_HEAD.unpack_from(data, offset)
    begin = offset + FRAME_HEAD.size
    return data[begin : begin + marked // LENGTH_FACTOR]
