"""The frames of a segment: what is written is found again, whatever was damaged between."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.errors import JournalError
from nodetrack.journal import segment
from nodetrack.journal.segment import (
    LENGTH_FACTOR,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    Damage,
    decode_header,
    encode_header,
    encode_payload,
    frame,
    scan_frames,
    segment_name,
    segment_paths,
)
from nodetrack.records import SegmentHeader

HEADER = SegmentHeader(
    schema_version=1, project="p", run="r", attempt="0001-aaaa", writer=1, segment=1, version="0.1.0"
)
ROWS = [msgspec.msgpack.encode([2, 1, [float(number), -1.5], number, 1_000 + number]) for number in range(6)]


def payloads_of(data: bytes) -> tuple[list[bytes], Damage]:
    """The payloads that a scan finds, and what it left out."""
    damage = Damage()
    return [data[begin:end] for _, begin, end in scan_frames(data, 0, damage)], damage


class Work:
    """Counts the bytes that are checksummed, in place of zlib's function."""

    def __init__(self) -> None:
        self.checksummed_bytes = 0

    def crc32(self, data: bytes) -> int:
        self.checksummed_bytes += len(data)
        return crc32(data)


# -- frames ---------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=300)))
def test_all_frames_are_found_in_the_order_written(payloads: list[bytes]) -> None:
    found, damage = payloads_of(b"".join(map(frame, payloads)))
    assert found == payloads
    assert damage == Damage()


@pytest.mark.parametrize("length", [1, 2, 92, 255, 256, 257, 65_535, 65_792, 1_000_003, MAX_PAYLOAD_BYTES])
def test_no_change_of_one_byte_turns_a_length_into_another(length: int) -> None:
    """That is what the factor is for: a reader may believe what is a multiple of it."""
    marked = struct.pack("<I", length * LENGTH_FACTOR)
    for position in range(4):
        for flip in range(1, 256):
            changed = bytearray(marked)
            changed[position] ^= flip
            assert struct.unpack("<I", changed)[0] % LENGTH_FACTOR != 0


def test_a_stretch_of_equal_bytes_is_no_length() -> None:
    """What disks and file systems leave where they lost something."""
    for byte in range(256):
        data = frame(ROWS[0]) + bytes((byte,)) * 4096 + frame(ROWS[1]) + frame(ROWS[2])
        assert payloads_of(data) == ([ROWS[0], ROWS[1], ROWS[2]], Damage(corrupt=1))


def test_the_largest_length_fits_into_its_four_bytes() -> None:
    assert MAX_PAYLOAD_BYTES * LENGTH_FACTOR < 2**32


@pytest.mark.case("C030")
@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("flip", [0x01, 0x55, 0x80, 0xFF])
def test_a_damaged_frame_head_costs_its_record_and_no_other(position: int, flip: int) -> None:
    data = bytearray(b"".join(map(frame, ROWS)))
    second = len(frame(ROWS[0]))
    data[second + position] ^= flip
    found, damage = payloads_of(bytes(data))
    assert found == [ROWS[0], *ROWS[2:]]
    assert damage == Damage(corrupt=1)


def test_a_length_that_points_to_a_later_frame_is_not_believed() -> None:
    """Rows of one size make it easy to hit: the row between must not be jumped over."""
    framed = frame(ROWS[1])
    reaches_over_the_next = struct.pack("<I", len(ROWS[1]) + len(frame(ROWS[2])))
    data = frame(ROWS[0]) + reaches_over_the_next + framed[4:] + frame(ROWS[2]) + frame(ROWS[3])
    assert payloads_of(data) == ([ROWS[0], ROWS[2], ROWS[3]], Damage(corrupt=1))


@pytest.mark.parametrize("length", [0xFFFF_FFFF, 0, MAX_PAYLOAD_BYTES * LENGTH_FACTOR + LENGTH_FACTOR])
def test_a_length_that_no_record_has_costs_one_record(length: int) -> None:
    """Four gigabytes, nothing, and one byte over the limit."""
    damaged = struct.pack("<I", length % 2**32) + frame(ROWS[1])[4:]
    data = frame(ROWS[0]) + damaged + frame(ROWS[2])
    assert payloads_of(data) == ([ROWS[0], ROWS[2]], Damage(corrupt=1))


def test_a_long_stretch_of_damage_is_counted_once() -> None:
    data = frame(ROWS[0]) + random.Random(1).randbytes(10_000) + frame(ROWS[1])
    assert payloads_of(data) == ([ROWS[0], ROWS[1]], Damage(corrupt=1))


def test_a_page_of_zeros_in_the_middle_costs_what_it_covers() -> None:
    """What a file system leaves where a block never reached the disk."""
    framed = [frame(row) for row in ROWS]
    data = framed[0] + framed[1][:5] + bytes(len(framed[2]) + 7) + framed[3][12:] + framed[4] + framed[5]
    assert payloads_of(data) == ([ROWS[0], ROWS[4], ROWS[5]], Damage(corrupt=1))


def test_zeros_behind_the_last_frame_are_a_torn_tail() -> None:
    data = frame(ROWS[0]) + bytes(4096)
    assert payloads_of(data) == ([ROWS[0]], Damage(torn_bytes=4096))


def test_a_last_frame_that_fails_its_checksum_waits_as_a_torn_tail() -> None:
    """On a network file system its bytes may still be on their way, so a tailing reader comes back to it."""
    last = bytearray(frame(ROWS[1]))
    last[-1] ^= 1
    assert payloads_of(frame(ROWS[0]) + bytes(last)) == ([ROWS[0]], Damage(torn_bytes=len(last)))


# -- frames inside of values ----------------------------------------------------------------------------


def text_that_holds_a_frame() -> str:
    """Text whose UTF-8 is a whole frame; its kind is 99, so that a reader that falls for it is found out."""
    for first in range(128):
        for second in range(128):
            framed = frame(bytes((0x93, 99, first, second)))
            try:
                return framed.decode()
            except UnicodeDecodeError:
                continue
    raise AssertionError("no such text")


CONSOLE = msgspec.msgpack.encode([6, 5, "stdout", f"before {text_that_holds_a_frame() * 3} behind"])


def test_a_frame_inside_of_a_text_is_text() -> None:
    assert payloads_of(frame(CONSOLE) + frame(ROWS[0])) == ([CONSOLE, ROWS[0]], Damage())


def test_a_frame_inside_of_a_torn_text_is_not_taken_for_a_record() -> None:
    """Else the reader of a record that is just being written would pass it by and never read it."""
    framed = frame(CONSOLE)
    for size in range(8, len(framed)):
        found, damage = payloads_of(frame(ROWS[0]) + framed[:size])
        assert found == [ROWS[0]]
        assert damage == Damage(torn_bytes=size)


@pytest.mark.parametrize("following", [b"", frame(ROWS[1])], ids=["last", "in the middle"])
def test_a_frame_inside_of_a_damaged_text_is_not_taken_for_a_record(following: bytes) -> None:
    for position in range(4, len(frame(CONSOLE))):
        damaged = bytearray(frame(CONSOLE))
        damaged[position] ^= 0x20
        found, _ = payloads_of(frame(ROWS[0]) + bytes(damaged) + following)
        assert found == [ROWS[0], *([ROWS[1]] if following else [])]


# -- bounded work ---------------------------------------------------------------------------------------


def small_numbers() -> bytes:
    """A table of small numbers: nearly every byte could begin a payload."""
    chosen = random.Random(3)
    cells = [[chosen.randrange(128), chosen.randrange(128)] for _ in range(350_000)]
    return msgspec.msgpack.encode([2, 1, [{"type": "table", "data": cells}], 1, 1])


@pytest.mark.parametrize(
    "tail",
    [random.Random(seed).randbytes(1024 * 1024) for seed in range(4)] + [small_numbers(), bytes(1024 * 1024)],
    ids=["random 0", "random 1", "random 2", "random 3", "table", "zeros"],
)
def test_a_megabyte_of_garbage_is_read_with_bounded_work(
    monkeypatch: pytest.MonkeyPatch, tail: bytes
) -> None:
    work = Work()
    monkeypatch.setattr(segment, "crc32", work.crc32)
    found, damage = payloads_of(frame(ROWS[0]) + tail)
    assert found == [ROWS[0]]
    assert damage == Damage(torn_bytes=len(tail))
    assert work.checksummed_bytes <= 64 * len(tail)


def test_a_torn_tail_is_not_searched_each_time_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large record that is being written, or never was finished, costs a tailing reader nothing."""
    work = Work()
    monkeypatch.setattr(segment, "crc32", work.crc32)
    torn = struct.pack("<II", 2_000_000 * LENGTH_FACTOR, 0) + small_numbers()
    assert payloads_of(torn)[1] == Damage(torn_bytes=len(torn))
    assert work.checksummed_bytes == 0


# -- payloads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("half a pair: \ud800", "half a pair: \\ud800"),
        (2**64, str(2**64)),
        (-(2**63) - 1, str(-(2**63) - 1)),
        ({"a": [1, (2.5, {"b": 2**70})]}, {"a": [1, [2.5, {"b": str(2**70)}]]}),
        ({2**80: True, "\udfff": None}, {str(2**80): True, "\\udfff": None}),
        ([Path("/x"), b"kept", 2**70], ["/x", b"kept", str(2**70)]),
    ],
)
def test_what_messagepack_cannot_hold_is_written_as_text(value: object, stored: object) -> None:
    """Whatever a value holds, nothing raises: a record with an odd text in it is better than no record."""
    assert msgspec.msgpack.decode(encode_payload(value)) == stored


def test_a_value_that_holds_itself_is_cut_off() -> None:
    endless: list[object] = [1]
    endless.append(endless)
    assert msgspec.msgpack.decode(encode_payload(endless))[0] == 1


# -- the header -----------------------------------------------------------------------------------------


def header_of(data: bytes) -> SegmentHeader | None:
    (payload,), damage = payloads_of(data[len(MAGIC) :])
    assert data.startswith(MAGIC)
    assert damage == Damage()
    return decode_header(payload, Path("segment"))


def test_a_header_comes_back_as_it_was() -> None:
    full = msgspec.structs.replace(
        HEADER,
        role="miner",
        uid="3",
        created_ns=5,
        step=7,
        counter=6,
        summary={"best": 0.5},
        labels={"name": "n"},
    )
    assert header_of(encode_header(full)) == full


def test_a_header_never_fails_for_what_a_person_set() -> None:
    odd = msgspec.structs.replace(HEADER, summary={"a": 2**70}, labels={"name": "\ud800"})
    header = header_of(encode_header(odd))
    assert header is not None
    assert header.labels == {"name": "\\ud800"}


def test_a_header_leaves_out_a_summary_that_no_record_can_hold() -> None:
    large = msgspec.structs.replace(HEADER, step=7, summary={"text": "x" * MAX_PAYLOAD_BYTES})
    assert header_of(encode_header(large)) == msgspec.structs.replace(HEADER, step=7)


def test_a_later_schema_is_refused_with_what_to_do() -> None:
    later = msgspec.msgpack.encode(msgspec.structs.replace(HEADER, schema_version=2))
    with pytest.raises(JournalError, match=r"schema 2.*up to 1: upgrade nodetrack"):
        decode_header(later, Path("segment"))


def test_a_later_schema_is_told_from_damage_whatever_else_its_header_says() -> None:
    later = msgspec.msgpack.encode({"schema_version": 2, "run": 5})
    with pytest.raises(JournalError, match="upgrade nodetrack"):
        decode_header(later, Path("segment"))


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": "1"},
        {"step": str(2**64)},
        {"writer": None},
        {"summary": [1]},
        {"summary": {"a": {1: 2}}},
        {"labels": {"tags": 5}},
        {"labels": {"name": ["n"]}},
    ],
)
def test_a_header_of_wrong_types_is_none(change: dict[str, object]) -> None:
    fields = msgspec.to_builtins(HEADER) | change
    assert decode_header(msgspec.msgpack.encode(fields), Path("segment")) is None
    assert decode_header(b"\x81", Path("segment")) is None


def test_a_field_that_a_later_version_adds_is_ignored() -> None:
    fields = msgspec.to_builtins(HEADER) | {"new": 1}
    assert decode_header(msgspec.msgpack.encode(fields), Path("segment")) == HEADER


# -- names ----------------------------------------------------------------------------------------------


ARABIC = "segment-\u0660\u0660\u0660\u0660\u0660\u0669.ntj"


def test_segments_are_listed_in_the_order_in_which_they_were_begun(tmp_path: Path) -> None:
    """By number, also where the number has outgrown its six digits."""
    numbers = [1, 2, 10, 999_999, 1_000_000, 10_000_000]
    for number in reversed(numbers):
        (tmp_path / segment_name(number)).touch()
    for other in ("segment-1.ntj", "segment-000003.ntj.tmp", "xsegment-000004.ntj", "heartbeat", ARABIC):
        (tmp_path / other).touch()
    assert segment_paths(tmp_path) == [tmp_path / segment_name(number) for number in numbers]


def test_a_folder_that_is_not_there_or_no_folder_has_no_segments(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert segment_paths(tmp_path / "missing") == []
    assert segment_paths(tmp_path / "file") == []
