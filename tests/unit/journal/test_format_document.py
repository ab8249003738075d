"""docs/journal-format.md says what is so: its reader reads, its bytes are ours, its tables are complete."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import nodetrack
from nodetrack.journal import writer as writer_module
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import (
    LENGTH_FACTOR,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    SCHEMA_VERSION,
    Damage,
    scan_frames,
    segment_paths,
)
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.records import Kind, Row, SegmentHeader

DOCUMENT = Path(__file__).parents[3] / "docs" / "journal-format.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


def table_below(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    section = TEXT[TEXT.index(f"\n{heading}\n") :]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


# -- the reader -----------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """The document's reader as a program."""
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "reader.py"
    path.write_text(program)
    return path


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A real segment, as `nodetrack.init` and a little logging leave it."""
    with nodetrack.init(dir=tmp_path / "journals", version="0.1.0", config={"lr": 0.1}) as run:
        for step in range(20):
            run.log({"loss": 1 / (step + 1), "step": step, "names/ä\n": float("nan")})
        run.bind(stage="eval").log({"loss": float("inf"), "count": 2**64 - 1}, step=20)
        run.log({"text": nodetrack.Text("ü"), "histogram": nodetrack.Histogram([1, 2, 3], bins=3)})
        run.log({"image": nodetrack.Image(b"\x89PNG, or nearly")})
        run.alert("title", "text")
        run.summary["best"] = 0.5
    (path,) = segment_paths(Path(run.dir))
    return path


def theirs(reader: Path, paths: list[Path]) -> list[str]:
    """What the document's reader prints. It runs where there is no nodetrack to be imported."""
    blocked = "import sys; sys.modules['nodetrack'] = None; sys.argv = sys.argv[1:]; import runpy; "
    command = [sys.executable, "-c", f"{blocked}runpy.run_path(sys.argv[0])", str(reader), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def ours(paths: list[Path]) -> Iterator[str]:
    """What our reader finds, in the same words."""
    for path in paths:
        for record in SegmentReader(path).read():
            if isinstance(record, Row):
                row = {
                    "step": record.step,
                    "time_ns": record.time_ns,
                    "context": record.context,
                    "values": dict(record.items()),
                }
                yield json.dumps(row, default=repr)


def test_the_reader_has_at_most_40_lines(reader: Path) -> None:
    lines = [line for line in reader.read_text().splitlines() if line.strip()]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


def test_the_reader_imports_nothing_of_ours(reader: Path) -> None:
    imported = re.findall(r"^(?:import|from) (\w+)", reader.read_text(), re.MULTILINE)
    assert set(imported) - sys.stdlib_module_names == {"msgspec"}


def test_the_reader_prints_the_rows_of_a_real_segment(reader: Path, segment: Path) -> None:
    printed = theirs(reader, [segment])
    assert len(printed) == 23
    assert printed == list(ours([segment]))


def test_the_reader_reads_what_our_reader_reads_of_torn_and_damaged_segments(
    reader: Path, segment: Path, tmp_path: Path
) -> None:
    data = segment.read_bytes()
    chosen = random.Random(40)
    damaged = [data[: chosen.randrange(len(data))] for _ in range(40)]
    for _ in range(150):
        changed = bytearray(data)
        for position in chosen.sample(range(len(MAGIC), len(data)), chosen.choice([1, 1, 2, 5])):
            changed[position] ^= chosen.randrange(1, 256)
        damaged.append(bytes(changed))
    damaged += [data[:700] + bytes(size) + data[700:] for size in (1, 8, 4096)]
    paths = [tmp_path / f"segment-{number:06d}.ntj" for number in range(len(damaged))]
    for path, content in zip(paths, damaged, strict=True):
        path.write_bytes(content)
    assert theirs(reader, paths) == list(ours(paths))


# -- byte by byte ---------------------------------------------------------------------------------------


def dumped_segment() -> bytes:
    """The bytes of the hex dump."""
    (dump,) = re.findall(r"```\n(0000  .*?)```", TEXT, re.DOTALL)
    data = b""
    for line in dump.splitlines():
        place, shown, characters = line[:4], bytes.fromhex(line[6:53]), line[55:]
        assert int(place, 16) == len(data)
        assert characters == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in shown)
        data += shown
    return data


def tiny_header(writer: int, segment: int) -> SegmentHeader:
    return SegmentHeader(
        schema_version=1,
        project="demo",
        run="r1",
        attempt="0001-a1b2",
        writer=writer,
        segment=segment,
        version="0.1.0",
    )


def test_the_hex_dump_is_what_the_writer_writes(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, tiny_header, pytest.fail)
    writer.write_row(KeySet(("loss",), {}), 0, 1_764_547_200_000_000_000, [0.5], True)
    writer.write([Kind.FINISH, 1_764_547_201_000_000_000, "finished", 0, ""])
    writer.close()
    assert dumped_segment() == (tmp_path / "segment-000001.ntj").read_bytes()
    assert f"in {len(dumped_segment())} bytes" in TEXT


def test_the_explanation_of_the_hex_dump_names_each_frame_with_its_place_and_size() -> None:
    frames = scan_frames(dumped_segment(), len(MAGIC), Damage())
    expected = [(0, len(MAGIC)), *((offset, end - offset) for offset, _, end in frames)]
    explained = [(int(place, 16), int(size)) for place, size, _ in table_below("## Byte by byte")]
    assert explained == expected


def test_the_bytes_that_the_explanation_quotes_are_in_their_frames() -> None:
    data = dumped_segment()
    for place, size, words in table_below("## Byte by byte"):
        framed = data[int(place, 16) : int(place, 16) + int(size)]
        for quoted in re.findall(r"`((?:[0-9a-f]{2} )*[0-9a-f]{2})`", words):
            assert bytes.fromhex(quoted) in framed


# -- the tables -----------------------------------------------------------------------------------------


def test_every_field_of_the_header_is_explained_with_its_default() -> None:
    required = msgspec.NODEFAULT
    fields = {
        field.name: "" if field.default is required and field.default_factory is required else shown(field)
        for field in msgspec.structs.fields(SegmentHeader)
    }
    explained = {cells[0].strip("`"): cells[2].strip("`") for cells in table_below("## The header")}
    assert explained == fields
    assert list(explained) == list(fields)


def shown(field: msgspec.structs.FieldInfo) -> str:
    """A default as the document writes it."""
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return json.dumps(default)


def test_every_kind_of_record_is_explained_under_its_number() -> None:
    explained = [(int(number), name) for number, name, _ in table_below("## Records")]
    assert explained == [(kind.value, kind.name.lower()) for kind in Kind]


def test_every_kind_of_value_is_explained_with_its_entries() -> None:
    values = {
        "histogram": nodetrack.Histogram([1, 2]),
        "text": nodetrack.Text("x"),
        "table": nodetrack.Table(["a"], [[1]]),
        "image": nodetrack.Image(b"GIF89a"),
    }
    explained = {kind.strip("`"): entries for kind, entries in table_below("### Values")}
    assert list(explained) == list(values)
    for kind, value in values.items():
        stored = dict(value.stored())
        assert stored.pop("type") == kind
        assert all(f"`{entry}`" in explained[kind] for entry in stored)


def test_the_numbers_of_the_document_are_the_code_s() -> None:
    rows = {cells[0]: cells for cells in table_below("## A segment")}
    assert rows["magic"][2].startswith(f"`{MAGIC.hex(' ')}`")
    assert f"{LENGTH_FACTOR} times" in rows["marked length"][2]
    assert f"{MAX_PAYLOAD_BYTES:,}".replace(",", " ") in rows["marked length"][2]
    assert f"{writer_module.DEFAULT_SEGMENT_BYTES // 1024**2} MiB" in TEXT
    assert f"{SCHEMA_VERSION}; a reader refuses" in TEXT
