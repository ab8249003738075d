"""Reading a segment that is whole, growing, torn, damaged, strange or of another kind."""

from __future__ import annotations

import itertools
import math
import random
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.errors import JournalError
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import (
    LENGTH_FACTOR,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    Damage,
    encode_header,
    frame,
    scan_frames,
)
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.records import (
    AttemptFinished,
    AttemptStarted,
    ConfigSet,
    ConsoleLine,
    Event,
    Kind,
    Payload,
    Record,
    Row,
    RunEdited,
    SegmentHeader,
    StoredValue,
    SummarySet,
    SystemRow,
)

HEADER = SegmentHeader(
    schema_version=1, project="p", run="r", attempt="0001-aaaa", writer=1, segment=1, version="0.1.0"
)
ATTEMPT = {"version": "0.1.0", "process": {"pid": 1}}


def segment_of(*payloads: object, header: SegmentHeader = HEADER) -> bytes:
    """A segment that holds these payloads."""
    return encode_header(header) + b"".join(frame(msgspec.msgpack.encode(payload)) for payload in payloads)


#: One record of each kind, every key set twice, and a rows-only end: small, and nothing is missing.
SMALL = segment_of(
    [Kind.ATTEMPT, 1, ATTEMPT],
    [Kind.TAGS, 2, {"name": "n", "tags": ["a"]}],
    [Kind.CONFIG, 3, {"lr": 0.1}],
    *([Kind.KEYSET, 1, ["loss", "val/ä\n"], {}],) * 2,
    [Kind.ROW, 1, [0.5, 1.5], 0, 10, True],
    [Kind.ROW, 1, [0.25, 7], 1, 11, True],
    *([Kind.KEYSET, 2, ["sample"], {"stage": "eval"}],) * 2,
    [Kind.ROW, 2, [{"type": "text", "text": "x"}], 1, 12],
    [Kind.SUMMARY, 13, {"best": 0.25}],
    *([Kind.KEYSET, 3, ["cpu_percent"], {}],) * 2,
    [Kind.SYSTEM, 3, [12.5], 14],
    [Kind.CONSOLE, 15, "stdout", "hello"],
    [Kind.EVENT, 16, "rewind", {"step": 0}],
    [Kind.ROW, 1, [0.125, 9], 1, 17, True],
    [Kind.FINISH, 18, "finished", 0, ""],
)


class Reading(NamedTuple):
    """All that a reader says of a segment."""

    records: list[Record]
    reader: SegmentReader

    @property
    def damage(self) -> Damage:
        return self.reader.damage


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], Reading]:
    """Reads bytes as a segment."""

    def read_bytes(data: bytes) -> Reading:
        path = tmp_path / "segment-000001.ntj"
        path.write_bytes(data)
        reader = SegmentReader(path)
        return Reading(list(reader.read()), reader)

    return read_bytes


class Placed(NamedTuple):
    """A frame of SMALL: where it stands, and the record that it holds, if it holds one."""

    begin: int
    end: int
    record: Record | None


def frames_of_small(read: Callable[[bytes], Reading]) -> list[Placed]:
    """The frames of SMALL; the first is the header's."""
    records = {record.offset: record for record in read(SMALL).records}
    found = scan_frames(SMALL, len(MAGIC), Damage())
    return [Placed(offset, end, records.get(offset)) for offset, _, end in found]


def flipped(data: bytes, *flips: tuple[int, int]) -> bytes:
    """The bytes with some positions changed."""
    changed = bytearray(data)
    for position, flip in flips:
        changed[position] ^= flip
    return bytes(changed)


# -- whole segments -------------------------------------------------------------------------------------


def test_every_kind_of_record_comes_back(read: Callable[[bytes], Reading]) -> None:
    reading = read(SMALL)
    places = [record.offset for record in reading.records]
    assert places == sorted(places)
    assert [msgspec.structs.replace(record, offset=0) for record in reading.records] == [
        AttemptStarted(offset=0, time_ns=1, attempt=ATTEMPT),
        RunEdited(offset=0, time_ns=2, fields={"name": "n", "tags": ["a"]}),
        ConfigSet(offset=0, time_ns=3, config={"lr": 0.1}),
        a_row(("loss", "val/ä\n"), [0.5, 1.5], 0, 10),
        a_row(("loss", "val/ä\n"), [0.25, 7], 1, 11),
        Row(
            offset=0,
            names=("sample",),
            values=[{"type": "text", "text": "x"}],
            step=1,
            time_ns=12,
            context={"stage": "eval"},
        ),
        SummarySet(offset=0, time_ns=13, summary={"best": 0.25}),
        SystemRow(offset=0, names=("cpu_percent",), values=[12.5], time_ns=14),
        ConsoleLine(offset=0, time_ns=15, stream="stdout", text="hello"),
        Event(offset=0, time_ns=16, name="rewind", data={"step": 0}),
        a_row(("loss", "val/ä\n"), [0.125, 9], 1, 17),
        AttemptFinished(offset=0, time_ns=18, state="finished", exit_code=0, reason=""),
    ]
    assert reading.reader.header == HEADER
    assert reading.damage == Damage()
    assert reading.reader.offset == len(SMALL)


def a_row(names: tuple[str, ...], values: list[StoredValue], step: int, time_ns: int) -> Row:
    return Row(offset=0, names=names, values=values, step=step, time_ns=time_ns, context={}, counted=True)


_Numbers = st.one_of(
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 5e-324]),
    st.sampled_from([-(2**63), 2**63 - 1, 2**64 - 1, 0]),
    st.integers(-(2**63), 2**64 - 1),
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(), "nonfinite": st.floats()}),
)
_Texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
_Names = st.lists(_Texts | st.sampled_from(["a\nb", "\0", "loss/ü", "\U0001f600"]), unique=True, min_size=1)


class Logged(NamedTuple):
    """One row as it is given to the writer."""

    values: dict[str, StoredValue]
    step: int
    time_ns: int
    context: dict[str, str]
    counted: bool


_Logged = st.builds(
    Logged,
    values=_Names.flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(names, _Numbers))),
    step=st.integers(-(2**63), 2**63 - 1),
    time_ns=st.integers(0, 2**63 - 1),
    context=st.dictionaries(_Texts, _Texts, max_size=3),
    counted=st.booleans(),
)


def same_bits(value: object) -> object:
    """Something that is equal for equal bits: NaN with its payload, and the sign of zero, are compared."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {key: same_bits(item) for key, item in value.items()}
    return value


@given(st.lists(_Logged, max_size=10))
def test_rows_come_back_bit_by_bit(logged: Sequence[Logged]) -> None:
    """Any names, any context, NaN with its payload, infinities, integers to the limits of 64 bits."""
    with tempfile.TemporaryDirectory() as folder:
        writer = JournalWriter(Path(folder), lambda *_: HEADER, lambda _: None)
        key_sets: dict[object, KeySet] = {}
        for row in logged:
            names = tuple(row.values)
            key_set = key_sets.setdefault((names, tuple(row.context.items())), KeySet(names, row.context))
            writer.write_row(
                key_set, row.step, row.time_ns, [*row.values.values()], row.counted, checked=True
            )
        writer.close()
        paths = [*Path(folder).iterdir()]
        read_back = [record for path in paths for record in SegmentReader(path).read()]
    assert [
        (same_bits(dict(row.items())), row.step, row.time_ns, dict(row.context), row.counted)
        for row in read_back
        if isinstance(row, Row)
    ] == [(same_bits(row.values), *row[1:]) for row in logged]


# -- growing --------------------------------------------------------------------------------------------

APPENDER = """
    import sys
    from pathlib import Path
    from nodetrack.journal.writer import JournalWriter, KeySet
    from nodetrack.records import SegmentHeader
    header = SegmentHeader(
        schema_version=1, project="p", run="r", attempt="a", writer=1, segment=1, version="0.1.0")
    writer = JournalWriter(Path(sys.argv[1]), lambda *_: header, lambda _: None)
    key_set, step = KeySet(("loss", "step"), {}), 0
    for line in sys.stdin:
        for step in range(step, step + int(line)):
            writer.write_row(key_set, step, step, [0.5, step], True)
        step += 1
        print("done", flush=True)
"""


@pytest.fixture
def appender(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that writes as many rows as it is told to."""
    command = [sys.executable, "-c", textwrap.dedent(APPENDER), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()
    assert process.returncode == 0


def tell(process: subprocess.Popen[str], rows: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{rows}\n")
    process.stdin.flush()


def steps_of(records: Sequence[Record]) -> list[int]:
    return [record.step for record in records if isinstance(record, Row)]


@pytest.mark.case("C031")
def test_rows_of_another_process_are_there_when_it_says_so_and_come_once(
    tmp_path: Path, appender: subprocess.Popen[str]
) -> None:
    """`read` called again returns only what is new."""
    reader = SegmentReader(tmp_path / "segment-000001.ntj")
    for first, count in ((0, 10), (10, 1), (11, 1000)):
        tell(appender, count)
        assert appender.stdout is not None
        assert appender.stdout.readline() == "done\n"
        assert steps_of([*reader.read()]) == list(range(first, first + count))
        assert [*reader.read()] == []
    assert reader.damage == Damage()


@pytest.mark.case("C031")
def test_a_segment_that_grows_while_it_is_read_loses_and_repeats_nothing(
    tmp_path: Path, appender: subprocess.Popen[str]
) -> None:
    tell(appender, 1)
    assert appender.stdout is not None
    assert appender.stdout.readline() == "done\n"
    tell(appender, 20_000)
    reader = SegmentReader(tmp_path / "segment-000001.ntj")
    steps: list[int] = []
    while len(steps) < 20_001:
        steps += steps_of([*reader.read()])
    assert steps == list(range(20_001))
    assert reader.damage == Damage()


def test_a_tail_that_is_completed_later_is_read_then(tmp_path: Path) -> None:
    """Byte by byte: each record comes exactly once, as soon as it is whole."""
    path = tmp_path / "segment-000001.ntj"
    reader = SegmentReader(path)
    came: list[int] = []
    for size in range(len(SMALL) + 1):
        path.write_bytes(SMALL[:size])
        came += [record.offset for record in reader.read()]
    path.write_bytes(SMALL)
    assert came == [record.offset for record in SegmentReader(path).read()]
    assert reader.damage == Damage()


def test_damage_is_counted_once_however_often_a_tail_is_read(tmp_path: Path) -> None:
    path = tmp_path / "segment-000001.ntj"
    data = flipped(SMALL, (len(SMALL) // 2, 0xFF))
    path.write_bytes(data[:-3])
    reader = SegmentReader(path)
    for _ in range(3):
        assert [*reader.read()] or reader.offset
        assert reader.damage.corrupt == 1
    path.write_bytes(data)
    assert [type(record) for record in reader.read()] == [AttemptFinished]
    assert reader.damage == Damage(corrupt=1)


def test_no_more_is_read_than_the_limit_says(read: Callable[[bytes], Reading], tmp_path: Path) -> None:
    """The rest comes with the next call."""
    everything = read(SMALL).records
    reader = SegmentReader(tmp_path / "segment-000001.ntj")
    first = [*reader.read(limit=len(SMALL) // 2)]
    assert 0 < len(first) < len(everything)
    assert reader.offset <= len(MAGIC) + len(SMALL) // 2
    assert [*first, *reader.read()] == everything


# -- torn and damaged -----------------------------------------------------------------------------------


@pytest.mark.case("C030")
def test_a_segment_torn_at_any_byte_gives_all_records_before_the_tear(
    read: Callable[[bytes], Reading],
) -> None:
    frames = frames_of_small(read)
    for size in range(len(MAGIC), len(SMALL)):
        reading = read(SMALL[:size])
        whole = [placed for placed in frames if placed.end <= size]
        assert reading.records == [placed.record for placed in whole if placed.record]
        end = whole[-1].end if whole else len(MAGIC)
        assert reading.damage == Damage(torn_bytes=size - end)


@pytest.mark.case("C030")
@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80, 0xFF])
def test_a_byte_changed_at_any_place_costs_the_record_it_is_in_and_no_other(
    read: Callable[[bytes], Reading], flip: int
) -> None:
    """The magic, the header and one copy of a key set cost no record at all."""
    frames = frames_of_small(read)
    for position in range(len(SMALL)):
        reading = read(flipped(SMALL, (position, flip)))
        untouched = [
            placed.record for placed in frames if placed.record and not placed.begin <= position < placed.end
        ]
        assert reading.records == untouched
        last = frames[-1]
        if position < last.begin:
            assert reading.damage == Damage(corrupt=1)
        else:
            assert reading.damage == Damage(torn_bytes=last.end - last.begin)
        assert reading.reader.unnamed_rows == 0


@pytest.mark.case("C030")
def test_two_changed_bytes_cost_the_records_they_are_in_and_no_other(
    read: Callable[[bytes], Reading],
) -> None:
    """Unless they hit both copies of a key set; then its rows are counted as unnamed."""
    frames = frames_of_small(read)
    chosen = random.Random(30)
    for _ in range(2000):
        flips = [(position, chosen.randrange(1, 256)) for position in chosen.sample(range(len(SMALL)), 2)]
        touched = [any(placed.begin <= at < placed.end for at, _ in flips) for placed in frames]
        lost_key_sets = any(
            itertools.starmap(both_copies, itertools.pairwise(zip(frames, touched, strict=True)))
        )
        reading = read(flipped(SMALL, *flips))
        untouched = [
            placed.record for placed, hit in zip(frames, touched, strict=True) if placed.record and not hit
        ]
        if lost_key_sets:
            assert reading.reader.unnamed_rows > 0
            assert all(record in untouched for record in reading.records)
        else:
            assert reading.records == untouched


def both_copies(one: tuple[Placed, bool], other: tuple[Placed, bool]) -> bool:
    """Whether two neighbours are the damaged copies of one key set."""
    same = SMALL[one[0].begin : one[0].end] == SMALL[other[0].begin : other[0].end]
    return same and one[1] and other[1]


def test_rows_of_a_key_set_that_is_lost_in_both_copies_are_counted(read: Callable[[bytes], Reading]) -> None:
    data = segment_of(
        [Kind.ROW, 7, [0.5], 0, 1], [Kind.SYSTEM, 7, [0.5], 1], [Kind.CONSOLE, 2, "stdout", "x"]
    )
    reading = read(data)
    assert [type(record) for record in reading.records] == [ConsoleLine]
    assert reading.reader.unnamed_rows == 2


def test_a_segment_without_its_header_gives_its_records(read: Callable[[bytes], Reading]) -> None:
    reading = read(flipped(SMALL, (len(MAGIC) + 20, 0xFF)))
    assert reading.reader.header is None
    assert reading.records == read(SMALL).records


@pytest.mark.parametrize("change", [{"step": str(2**64)}, {"labels": {"tags": 5}}, {"writer": None}])
def test_a_header_of_wrong_types_costs_no_record(
    read: Callable[[bytes], Reading], change: dict[str, object]
) -> None:
    header = msgspec.msgpack.encode(msgspec.to_builtins(HEADER) | change)
    reading = read(MAGIC + frame(header) + SMALL[len(encode_header(HEADER)) :])
    assert reading.reader.header is None
    assert len(reading.records) == len(read(SMALL).records)
    assert reading.damage == Damage(corrupt=1)


# -- strange --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", *(MAGIC[:size] for size in range(1, 9)), MAGIC + frame(b"\x80")[:5]])
def test_a_file_that_was_only_just_made_has_no_records(read: Callable[[bytes], Reading], data: bytes) -> None:
    reading = read(data)
    assert reading.records == []
    assert reading.damage.corrupt == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(500),
        b"\x1f\x8b\x08\x00" + random.Random(1).randbytes(5000),
        b"SQLite format 3\0" + bytes(4096),
        b"step,loss\n0,0.5\n" * 100,
        b"8 bytes!",
        b"short",
        b"\x89PN",
    ],
    ids=["png", "gzip", "sqlite", "csv", "eight bytes", "five bytes", "begins like one"],
)
def test_another_kind_of_file_is_refused_each_time(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "segment-000001.ntj"
    path.write_bytes(data)
    reader = SegmentReader(path)
    for _ in range(2):
        with pytest.raises(JournalError, match=r"segment-000001\.ntj is not a nodetrack journal segment"):
            list(reader.read())
        assert reader.damage == Damage(torn_bytes=reader.damage.torn_bytes)


def test_a_folder_in_place_of_a_segment_is_an_operating_system_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        list(SegmentReader(tmp_path).read())


def test_a_segment_of_a_later_schema_is_refused_with_what_to_do(read: Callable[[bytes], Reading]) -> None:
    later = msgspec.structs.replace(HEADER, schema_version=2)
    with pytest.raises(JournalError, match="upgrade nodetrack"):
        read(segment_of([Kind.ROW, 1, [0.5], 0, 1], header=later))


def test_a_kind_that_a_later_version_writes_is_counted_and_passed_by(
    read: Callable[[bytes], Reading],
) -> None:
    reading = read(segment_of([99, 1, "new"], [Kind.CONSOLE, 2, "stdout", "x"], [100, {}]))
    assert [type(record) for record in reading.records] == [ConsoleLine]
    assert reading.reader.unknown_records == 2
    assert reading.damage == Damage()


def test_items_that_a_later_version_adds_to_a_record_are_ignored(read: Callable[[bytes], Reading]) -> None:
    """So a record may grow at its end within one schema."""
    reading = read(
        segment_of(
            [Kind.KEYSET, 1, ["a"], {}, "new"],
            [Kind.ROW, 1, [0.5], 3, 4, True, "new"],
            [Kind.CONSOLE, 2, "stdout", "x", "new"],
        )
    )
    assert [type(record) for record in reading.records] == [Row, ConsoleLine]
    assert reading.damage == Damage()


@pytest.mark.parametrize(
    "payload",
    [
        [],
        [Kind.ROW],
        [Kind.KEYSET, 1],
        [Kind.KEYSET, [1], ["a"], {}],
        [Kind.KEYSET, 1, None, {}],
        [[1], 2],
        [Kind.CONSOLE, 1],
        5,
        "text",
        b"bytes",
        None,
        [Kind.ROW, 9, [1.0, 2.0], 0, 0],
        [Kind.ROW, 9, 1.0, 0, 0],
        [Kind.SYSTEM, 9, [], 0],
        [Kind.SYSTEM, 9, ["x"], 0],
        [Kind.SYSTEM, 9, [1.0], "x"],
        [Kind.SYSTEM, [9], [1.0], 0],
        [Kind.ROW, 9, [1.0], "7", 0],
        [Kind.ROW, 9, [1.0], 7, None],
        [Kind.ROW, 9, [1.0], 7.0, 0],
        [Kind.ROW, [9], [1.0], 7, 0],
        [Kind.ROW, 9, ["text"], 7, 0],
        [Kind.ROW, 9, [None], 7, 0],
        [Kind.ROW, 9, [True], 7, 0],
        [Kind.ROW, 9, [[1.0]], 7, 0],
        [Kind.ROW, 9, [{1: "text"}], 7, 0],
        [Kind.ROW, 9, {"a": 1.0}, 7, 0],
        [Kind.KEYSET, 8, "names", {}],
        [Kind.KEYSET, 8, [1], {}],
        [Kind.KEYSET, 8, ["a"], [1]],
        [Kind.KEYSET, 8, ["a"], {"stage": 1}],
        [Kind.KEYSET, 8, ["a"], {1: "eval"}],
        [Kind.KEYSET, True, ["a"], {}],
        [Kind.ATTEMPT, 1, "text"],
        [Kind.ATTEMPT, "1", {}],
        [Kind.ATTEMPT, 1, {"version": None}],
        [Kind.ATTEMPT, 1, {"uid": 3}],
        [Kind.ATTEMPT, 1, {"started_ns": "1"}],
        [Kind.ATTEMPT, 1, {"stale_after_seconds": None}],
        [Kind.ATTEMPT, 1, {"process": "text"}],
        [Kind.ATTEMPT, 1, {"process": {"pid": "1"}}],
        [Kind.ATTEMPT, 1, {"process": {"command": "text"}}],
        [Kind.ATTEMPT, 1, {"process_created_at": "1"}],
        [Kind.ATTEMPT, 1, {"host": None}],
        [Kind.ATTEMPT, 1, {"git": "text"}],
        [Kind.ATTEMPT, 1, {"previous_run": 5}],
        [Kind.CONFIG, 1, "text"],
        [Kind.CONFIG, 1, {"a": {1: 2}}],
        [Kind.CONFIG, None, {}],
        [Kind.SUMMARY, 1, [1]],
        [Kind.TAGS, 1, [1]],
        [Kind.TAGS, 1, {"tags": 5}],
        [Kind.TAGS, 1, {"tags": [5]}],
        [Kind.TAGS, 1, {"tags": "text"}],
        [Kind.TAGS, 1, {"name": 7}],
        [Kind.TAGS, 1, {"group": [1]}],
        [Kind.CONSOLE, 1, 2, "text"],
        [Kind.CONSOLE, 1, "stdout", b"bytes"],
        [Kind.EVENT, 1, "rewind"],
        [Kind.EVENT, 1, "rewind", {}],
        [Kind.EVENT, 1, "rewind", {"step": "x"}],
        [Kind.EVENT, 1, "rewind", {"step": True}],
        [Kind.EVENT, 1, "checkpoint", {"step": 3}],
        [Kind.EVENT, 1, "define_metric", {"summary": "max"}],
        [Kind.EVENT, 1, "define_metric", [1]],
        [Kind.EVENT, 1, 5, {}],
        [Kind.MARK, 1, "5", 5, {}, {}],
        [Kind.MARK, 1, 5, None, {}, {}],
        [Kind.MARK, 1, 5, 5, [], {}],
        [Kind.MARK, 1, 5, 5, {}, {"tags": 5}],
        [Kind.FINISH, 1, "exploded", 0, ""],
        [Kind.FINISH, 1, ["finished"], 0, ""],
        [Kind.FINISH, 1, "finished", "0", ""],
        [Kind.FINISH, 1, "finished", 0, 5],
        {"schema_version": 99},
    ],
    ids=repr,
)
def test_a_whole_record_that_makes_no_sense_is_counted_as_corrupt(
    read: Callable[[bytes], Reading], payload: Payload
) -> None:
    """Its checksum is right, so somebody else's program wrote it; the rest of the segment is read."""
    key_set = [Kind.KEYSET, 9, ["a"], {}]
    reading = read(segment_of(key_set, payload, [Kind.ROW, 9, [1.0], 0, 0]))
    assert [type(record) for record in reading.records] == [Row]
    assert reading.damage == Damage(corrupt=1)


def test_nesting_without_end_is_counted_as_corrupt(read: Callable[[bytes], Reading]) -> None:
    reading = read(encode_header(HEADER) + frame(b"\x91" * 100_000 + b"\x01"))
    assert reading.records == []
    assert reading.damage == Damage(corrupt=1)


@given(
    st.lists(
        st.binary(min_size=1, max_size=50)
        | st.lists(st.integers(0, 10) | st.text() | st.lists(st.floats()), min_size=1).map(
            msgspec.msgpack.encode
        )
    )
)
def test_no_content_of_a_segment_makes_the_reader_raise(payloads: Sequence[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "segment-000001.ntj")
        path.write_bytes(encode_header(HEADER) + b"".join(map(frame, payloads)))
        reader = SegmentReader(path)
        count = len([*reader.read()])
        assert count <= len(payloads)
        assert reader.read_finish() is None or count


# -- the end --------------------------------------------------------------------------------------------


def test_the_finish_record_is_found_from_the_end_of_the_file_alone(tmp_path: Path) -> None:
    """Also where the look begins in the middle of a record, and where torn bytes follow."""
    path = tmp_path / "segment-000001.ntj"
    text = text_like_lengths() * 12
    lines = [[Kind.CONSOLE, number, "stdout", text] for number in range(5000)]
    path.write_bytes(segment_of(*lines, [Kind.FINISH, 5, "crashed", 3, "exit code 3"]) + b"torn")
    for tail_bytes in range(300, 400):
        finish = SegmentReader(path).read_finish(tail_bytes)
        assert finish is not None
        assert (finish.state, finish.exit_code, finish.reason) == ("crashed", 3, "exit code 3")


def text_like_lengths() -> str:
    """Four characters that look like the length of a large record to whoever begins to read at them."""
    marked = (struct.pack("<I", length * LENGTH_FACTOR) for length in range(1_000_000, MAX_PAYLOAD_BYTES))
    return next(four for four in marked if max(four) < 128).decode()


@pytest.mark.parametrize("data", [b"", MAGIC, segment_of(), segment_of([Kind.CONSOLE, 1, "stdout", "x"])])
def test_an_attempt_that_was_killed_has_no_finish_record(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "segment-000001.ntj"
    path.write_bytes(data)
    assert SegmentReader(path).read_finish() is None


def test_a_last_record_of_one_byte_is_no_finish_record(tmp_path: Path) -> None:
    path = tmp_path / "segment-000001.ntj"
    path.write_bytes(segment_of([Kind.CONSOLE, 1, "stdout", "x"]) + frame(b"\x90"))
    assert SegmentReader(path).read_finish() is None
