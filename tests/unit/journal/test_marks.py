"""Marks: where a run stands, written now and then, so that a restart need not read a large segment."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import nodetrack
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import recover
from nodetrack.journal.segment import encode_header
from nodetrack.records import Mark


def test_of_a_large_segment_only_the_end_behind_a_mark_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands before the mark is overwritten with zeros: whoever still knows it took it from the mark."""
    run = nodetrack.init(project="p", dir=tmp_path)
    for _ in range(200):
        run.log({"a": 1.0})
    run.log({"a": 1.0}, step=5000)
    run.summary["best"] = 1
    run.tags = ("x",)
    with run._state.journal.lock:
        run._state.mark()
    run.log({"a": 1.0})
    run.summary["late"] = 2
    run.finish()
    [segment] = tmp_path.rglob("*.ntj")
    data = segment.read_bytes()
    monkeypatch.setattr("nodetrack.journal.recover.TAIL_BYTES", 700)
    segment.write_bytes(bytes(len(data) - 700) + data[-700:])
    recovered = recover(run.folder)
    assert (recovered.step, recovered.counter) == (5001, 201)
    assert recovered.summary == {"best": 1, "late": 2}
    assert recovered.labels["tags"] == ["x"]
    segment.write_bytes(data)
    assert recover(run.folder) == recovered
    monkeypatch.setattr("nodetrack.journal.recover.TAIL_BYTES", 100)
    assert recover(run.folder) == recovered, "the mark is looked for further ahead"


def test_a_run_is_marked_about_once_a_megabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodetrack.attempt.MARK_BYTES", 2000)
    run = nodetrack.init(project="p", dir=tmp_path)
    for _ in range(100):
        run.log({"a": 1.0})
    run._attempt._tend()
    run._attempt._tend()
    run.log({"a": 1.0})
    [segment] = tmp_path.rglob("*.ntj")
    marks = [record for record in SegmentReader(segment).read() if isinstance(record, Mark)]
    assert [mark.step for mark in marks] == [100]


def test_a_large_segment_of_a_later_schema_is_not_read_as_one_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = nodetrack.init(project="p", dir=tmp_path)
    run._state.mark()
    run.log({"a": 1.0})
    run.finish()
    [segment] = tmp_path.rglob("*.ntj")
    header = msgspec.structs.replace(run._state.header(1, 1), schema_version=99)
    reader = SegmentReader(segment)
    first = next(record.offset for record in reader.read())
    segment.write_bytes(encode_header(header) + segment.read_bytes()[first:])
    monkeypatch.setattr("nodetrack.journal.recover.TAIL_BYTES", 200)
    assert recover(run.folder).step == 0
