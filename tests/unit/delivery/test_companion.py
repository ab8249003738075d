"""The samples of the machine in the journal, and that they leave everything else of a run as it is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nodetrack
from nodetrack.delivery.companion import companion_writer
from nodetrack.delivery.system import SystemRecorder, SystemSampler
from nodetrack.journal import disk
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import is_companion, read_header, recover
from nodetrack.journal.segment import Damage, segment_paths
from nodetrack.journal.views import all_rows, current_rows
from nodetrack.journal.writer import JournalWriter
from nodetrack.records import SegmentHeader, SystemRow

HEADER = SegmentHeader(
    schema_version=1,
    project="p",
    run="r",
    attempt="0001-aaaa",
    writer=1,
    segment=1,
    version="0.1.0",
    role="miner",
    step=70,
    counter=80,
    summary={"best": 1},
    labels={"name": "n"},
)


class Given:
    """Samples that a test gives."""

    def __init__(self, *samples: dict[str, float]) -> None:
        self.samples = list(samples)

    def sample(self) -> dict[str, float]:
        """The next one."""
        return self.samples.pop(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where an attempt lies."""
    return tmp_path / "0001-aaaa"


@pytest.fixture
def writer(folder: Path) -> Iterator[JournalWriter]:
    """The companion of that attempt."""
    made = companion_writer(folder, HEADER)
    yield made
    made.close()


def system_rows(folder: Path) -> list[SystemRow]:
    """All samples of an attempt; its segments must be whole."""
    found: list[SystemRow] = []
    for path in segment_paths(folder):
        reader = SegmentReader(path)
        found += [record for record in reader.read() if isinstance(record, SystemRow)]
        assert reader.damage == Damage()
        assert reader.unnamed_rows == 0
    return found


# -- writing --------------------------------------------------------------------------------------------


def test_a_sample_is_read_back_as_it_was(folder: Path, writer: JournalWriter) -> None:
    before = time.time_ns()
    recorder = SystemRecorder(writer, Given({"a": 1.5}, {"a": 2.5, "b": 7}, {"a": 3.5}, {}))
    for _ in range(4):
        recorder.record()
    rows = system_rows(folder)
    assert [dict(zip(row.names, row.values, strict=True)) for row in rows] == [
        {"a": 1.5},
        {"a": 2.5, "b": 7},
        {"a": 3.5},
    ]
    assert all(before <= row.time_ns <= time.time_ns() for row in rows)


def test_there_is_no_file_before_the_first_sample(folder: Path, writer: JournalWriter) -> None:
    writer.tend()
    assert not folder.exists()
    SystemRecorder(writer, Given({})).record()
    assert not folder.exists()
    SystemRecorder(writer, Given({"a": 1.0})).record()
    assert [path.name for path in segment_paths(folder)] == ["segment-000001.ntj"]


def test_its_header_names_the_attempt_and_nothing_of_its_standing(
    folder: Path, writer: JournalWriter
) -> None:
    SystemRecorder(writer, Given({"a": 1.0})).record()
    header = read_header(segment_paths(folder)[0])
    assert header is not None
    assert (header.project, header.run, header.attempt, header.role) == ("p", "r", "0001-aaaa", "miner")
    assert (header.step, header.counter, header.summary, header.labels) == (0, 0, {}, {})
    assert header.companion


def test_samples_go_on_in_the_next_segment(folder: Path) -> None:
    writer = companion_writer(folder, HEADER, segment_bytes=4096)
    recorder = SystemRecorder(writer, Given(*({"a": float(count)} for count in range(500))))
    for _ in range(500):
        recorder.record()
    writer.close()
    assert len(segment_paths(folder)) > 2
    assert [row.values for row in system_rows(folder)] == [[float(count)] for count in range(500)]
    assert writer.lost == 0


def test_a_sample_that_the_disk_refuses_is_lost_and_the_next_is_written(
    folder: Path, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = SystemRecorder(writer, Given(*({"a": float(count)} for count in range(4))))
    recorder.record()
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr("nodetrack.journal.writer._write", refuse)
        patch.setattr(disk, "_write", refuse)
        recorder.record()
        recorder.record()
    recorder.record()
    writer.tend()
    assert [row.values for row in system_rows(folder)] == [[0.0], [3.0]]
    assert writer.lost == 2
    assert not writer.failing


# -- beside a run ---------------------------------------------------------------------------------------


def header_of(run: nodetrack.Run) -> SegmentHeader:
    """The header of its first segment."""
    header = read_header(segment_paths(run.folder / run.attempt)[0])
    assert header is not None
    return header


def sampled(run: nodetrack.Run, times: int = 3) -> None:
    """Write samples beside a run, of this process."""
    writer = companion_writer(run.folder / run.attempt, header_of(run))
    recorder = SystemRecorder(writer, SystemSampler(os.getpid(), run.folder))
    for _ in range(times):
        recorder.record()
    writer.close()


def test_a_run_that_is_sampled_looks_as_one_that_is_not() -> None:
    """Same rows, same step, same summary and labels, same state."""
    seen = []
    for uid, is_sampled in ((1, False), (2, True)):
        run = nodetrack.init("p", role="miner", uid=uid, version="0.1.0", name="n", tags=["t"])
        for step in range(100):
            run.log({"loss": step / 8})
            if is_sampled and step % 40 == 0:
                sampled(run)
        run.summary["best"] = 1
        run.finish()
        detail = RunFolder(run.folder, "p").detail()
        recovered = recover(run.folder)
        rows = [(row.step, row.values) for row in current_rows(RunFolder(run.folder, "p"))]
        assert len(list(all_rows(RunFolder(run.folder, "p")))) == 100
        assert detail.damage.corrupt == detail.damage.unnamed_rows == 0
        seen.append(
            (
                rows,
                (recovered.step, recovered.counter, recovered.summary, recovered.labels),
                (detail.overview.state, detail.overview.step, detail.rows, detail.summary),
            )
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize("last_step", [41, -7])
def test_the_step_is_neither_lowered_nor_raised(last_step: int) -> None:
    """The next attempt goes on where the rows end, be it below zero after going back."""
    with nodetrack.init("p", version="0.1.0") as run:
        run.log({"a": 1.0}, step=41)
        run.rewind(last_step)
        sampled(run)
    assert recover(run.folder).step == last_step + 1
    with nodetrack.init("p", version="0.1.0") as again:
        assert again.step == last_step + 1


def test_samples_are_no_sign_of_life_of_the_node() -> None:
    """A node that hangs must become stale, although its delivery process goes on."""
    with nodetrack.init("p", version="0.1.0") as run:
        run.log({"a": 1.0})
    folder = run.folder / run.attempt
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    before = RunFolder(run.folder, "p").attempts[0].last_seen_ns
    sampled(run)
    assert is_companion(segment_paths(folder)[-1])
    assert not is_companion(segment_paths(folder)[0])
    assert RunFolder(run.folder, "p").attempts[0].last_seen_ns == before
