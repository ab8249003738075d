"""The writer where the disk does not work: full, read-only, limited, failing. No row is lost in silence."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodetrack.journal import writer as writer_module
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import segment_paths
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.records import Kind, Row, SegmentHeader

if TYPE_CHECKING:
    from conftest import Journal

DISK_BYTES = 4 * 1024 * 1024


def mount(*arguments: str) -> None:
    """Runs `mount`; skips the test where that is not allowed."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk))
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


# -- a real disk ----------------------------------------------------------------------------------------


def fill(disk: Path) -> Path:
    """A file that leaves no byte on the disk."""
    ballast = disk / "ballast"
    block = bytes(4096)
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(block):
            pass
    assert os.statvfs(disk).f_bavail == 0
    return ballast


def test_a_full_disk_costs_no_row_and_leaves_no_torn_bytes(
    small_disk: Path, new_journal: Callable[..., Journal]
) -> None:
    """Rows wait in memory, in order; what the backlog cannot hold is counted; with space, all are written."""
    journal = new_journal(small_disk / "run", backlog_records=5000)
    journal.log_many(100)
    ballast = fill(small_disk)
    journal.log_many(6000)
    journal.say("a line")
    written, pending, lost = journal.writer.written, journal.writer.pending, journal.writer.lost
    assert written + pending + lost == 6101
    assert pending == 5000
    assert journal.writer.tend() is False
    assert journal.steps() == list(range(written))
    ballast.unlink()
    journal.log_many(10)
    journal.writer.tend()
    journal.log_many(10)
    kept = written + pending
    assert journal.steps() == [*range(kept), *range(6110, 6120)]
    assert (journal.writer.pending, journal.writer.lost, journal.writer.failing) == (0, lost + 10, False)
    assert journal.writer.last_error.startswith("[Errno 28]")
    assert [message.split()[0] for message in journal.troubles] == ["cannot", str(journal.folder)]


def test_a_disk_that_fills_up_while_it_is_written_loses_nothing(
    small_disk: Path, new_journal: Callable[..., Journal]
) -> None:
    """The last write before the end is a short one: its bytes are cut off again."""
    journal = new_journal(small_disk / "run", segment_bytes=64 * 1024 * 1024)
    names = [f"metric {number}" for number in range(50)]
    while not journal.writer.pending:
        journal.log(dict.fromkeys(names, 0.5))
    journal.log(dict.fromkeys(names, 0.25))
    assert journal.writer.pending == 2
    assert sum(path.stat().st_size for path in journal.paths) > DISK_BYTES * 0.95
    assert journal.steps() == list(range(journal.writer.written))
    mount("-o", f"remount,size={DISK_BYTES * 2}", str(small_disk))
    journal.writer.tend()
    assert journal.steps() == list(range(journal.step))


@pytest.mark.parametrize("backlog_records", [0, 1, 10])
def test_a_disk_that_stays_full_is_told_of_once(
    small_disk: Path, new_journal: Callable[..., Journal], backlog_records: int
) -> None:
    """Also where nothing may wait: only a row that waits shows whether the disk works again."""
    journal = new_journal(small_disk / "run", backlog_records=backlog_records)
    journal.log()
    fill(small_disk)
    for _ in range(3):
        journal.log_many(500)
        journal.writer.tend()
    assert len(journal.troubles) == 1
    assert journal.writer.written + journal.writer.pending + journal.writer.lost == 1501


def test_what_still_waits_at_the_end_is_counted_as_lost(
    small_disk: Path, new_journal: Callable[..., Journal]
) -> None:
    journal = new_journal(small_disk / "run")
    journal.log()
    fill(small_disk)
    journal.log_many(1000)
    waiting = journal.writer.pending
    journal.writer.close()
    assert waiting > 0
    assert (journal.writer.lost, journal.writer.pending) == (waiting, 0)
    assert journal.steps() == list(range(1001 - waiting))


def test_a_run_can_begin_on_a_full_disk(small_disk: Path, new_journal: Callable[..., Journal]) -> None:
    ballast = fill(small_disk)
    journal = new_journal(small_disk / "run")
    journal.writer.open()
    journal.log_many(10)
    assert journal.writer.pending == 10
    assert journal.paths == []
    ballast.unlink()
    journal.writer.tend()
    assert journal.steps() == list(range(10))


def test_a_segment_that_is_full_on_a_full_disk_goes_on_in_memory(
    small_disk: Path, new_journal: Callable[..., Journal]
) -> None:
    """There is no room for the header of the next one; no file without a header stays behind."""
    journal = new_journal(small_disk / "run", segment_bytes=3000)
    while len(journal.paths) < 3:
        journal.log()
    ballast = fill(small_disk)
    journal.log_many(500)
    assert all(path.stat().st_size for path in journal.paths)
    ballast.unlink()
    journal.writer.tend()
    assert journal.steps() == list(range(journal.step))


def test_a_disk_that_becomes_read_only_costs_no_row(
    small_disk: Path, new_journal: Callable[..., Journal]
) -> None:
    """As a kernel does that has found an error on it. The open file is let go of, so that it can."""
    journal = new_journal(small_disk / "run")
    journal.log_many(10)
    journal.writer.close()  # a file that is open for writing keeps the disk writable
    mount("-o", "remount,ro", str(small_disk))
    again = new_journal(small_disk / "run")
    again.writer.open()
    again.log_many(10)
    again.writer.tend()
    assert (again.writer.pending, again.writer.written) == (10, 0)
    assert "Read-only" in again.writer.last_error
    assert again.steps() == list(range(10))
    mount("-o", "remount,rw", str(small_disk))
    again.writer.tend()
    assert again.steps() == [*range(10), *range(10)]
    assert len(again.troubles) == 2


LIMITED = """
    import resource, sys
    from pathlib import Path
    from nodetrack.journal.writer import JournalWriter, KeySet
    from nodetrack.records import SegmentHeader
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    header = SegmentHeader(
        schema_version=1, project="p", run="r", attempt="a", writer=1, segment=1, version="0.1.0")
    writer = JournalWriter(Path(sys.argv[1]), lambda *_: header, lambda _: None)
    key_set = KeySet(("loss",), {})
    for step in range(2000):
        writer.write_row(key_set, step, step, [0.5], True)
        if writer.pending > 5:
            writer.tend()
    writer.close()
    print(writer.written, writer.lost)
"""


def test_a_limit_on_the_size_of_files_begins_new_ones(tmp_path: Path) -> None:
    """`ulimit -f`: the old file can never grow again, so the rows must not wait for it."""
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["2000", "0"]
    paths = segment_paths(tmp_path)
    rows = [record for path in paths for record in SegmentReader(path).read() if isinstance(record, Row)]
    assert [row.step for row in rows] == list(range(2000))
    assert 2 < len(paths) < 20


# -- all faults, in any order ---------------------------------------------------------------------------


class FaultyDisk:
    """The calls of the writer that reach the disk, with faults that a test switches on.

    Under `write_fault` a write puts `torn_bytes` of what it was given into the file and says so; only the
    next one fails. That is how kernels do it.
    """

    def __init__(self) -> None:
        self.write_fault: int | None = None
        self.torn_bytes = 0
        self.open_fault: int | None = None
        self.cut_fault = False
        self._real_write, self._real_open, self._real_cut = os.write, os.open, os.ftruncate

    def write(self, fd: int, data: bytes) -> int:
        if self.write_fault is None:
            return self._real_write(fd, data)
        torn = data[: min(self.torn_bytes, len(data) - 1)]
        self.torn_bytes = 0
        if torn or self.write_fault == 0:
            return self._real_write(fd, torn)
        raise OSError(self.write_fault, os.strerror(self.write_fault))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if self.open_fault is not None:
            raise OSError(self.open_fault, os.strerror(self.open_fault))
        return self._real_open(path, flags, mode)

    def ftruncate(self, fd: int, size: int) -> None:
        if self.cut_fault:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._real_cut(fd, size)

    def heal(self) -> None:
        self.write_fault = self.open_fault = None
        self.cut_fault = False


_Faults = st.sampled_from([0, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ESTALE, errno.EROFS])
_Operations = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(1, 12)),
        st.just(("event",)),
        st.just(("tend",)),
        st.just(("forget",)),
        st.tuples(st.just("writes fail"), _Faults, st.integers(0, 200)),
        st.tuples(st.just("opens fail"), st.sampled_from([errno.EMFILE, errno.EROFS, errno.EACCES])),
        st.just(("cuts fail",)),
        st.just(("heal",)),
    ),
    max_size=40,
)


class Attacked:
    """A writer on a faulty disk, and what it was given."""

    def __init__(self, folder: Path, backlog_records: int) -> None:
        self.disk = FaultyDisk()
        self.folder = folder
        self.given: list[int] = []
        self.events = 0
        self.key_sets = [KeySet((f"{number}",), {}) for number in range(3)]
        self.writer = JournalWriter(
            folder, self._header, lambda _: None, segment_bytes=300, backlog_records=backlog_records
        )

    def _header(self, writer: int, segment: int) -> SegmentHeader:
        return SegmentHeader(
            schema_version=1, project="p", run="r", attempt="a", writer=writer, segment=segment, version="1"
        )

    def do(self, name: str, *arguments: int) -> None:
        disk, writer = self.disk, self.writer
        if name == "rows":
            for _ in range(arguments[0]):
                step = len(self.given)
                writer.write_row(self.key_sets[step % 3], step, step, [step], True)
                self.given.append(step)
        elif name == "event":
            self.events += 1
            writer.write([Kind.CONSOLE, 1, "stdout", "x"])
        elif name == "tend":
            writer.tend()
        elif name == "forget":
            writer.forget_key_sets()
        elif name == "writes fail":
            disk.write_fault, disk.torn_bytes = arguments
        elif name == "opens fail":
            disk.open_fault = arguments[0]
        elif name == "cuts fail":
            disk.cut_fault = True
        else:
            disk.heal()

    def rows(self) -> list[Row]:
        """The rows on disk. A tear that could not be cut off stands at the end of a segment, nowhere else."""
        found = []
        for path in segment_paths(self.folder):
            reader = SegmentReader(path)
            found += [record for record in reader.read() if isinstance(record, Row)]
            assert (reader.damage.corrupt, reader.unnamed_rows) == (0, 0)
        return found


@settings(max_examples=300, deadline=None)
@given(operations=_Operations, backlog_records=st.sampled_from([0, 1, 5, 1000]))
def test_under_any_faults_each_row_is_on_disk_or_counted_and_the_order_stays(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]], backlog_records: int
) -> None:
    attacked = Attacked(tmp_path_factory.mktemp("attempt"), backlog_records)
    writer = attacked.writer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "_write", attacked.disk.write)
        patch.setattr(os, "write", attacked.disk.write)
        patch.setattr(os, "open", attacked.disk.open)
        patch.setattr(os, "ftruncate", attacked.disk.ftruncate)
        for operation in operations:
            attacked.do(*operation)
        attacked.disk.heal()
        writer.tend()
        assert (writer.pending, writer.failing) == (0, False)
        writer.close()
    rows = attacked.rows()
    steps = [row.step for row in rows]
    assert steps == sorted(set(steps))
    assert all((row.names, row.values) == ((f"{row.step % 3}",), [row.step]) for row in rows)
    assert len(steps) == writer.written
    assert (
        len(attacked.given) - len(steps) <= writer.lost <= len(attacked.given) - len(steps) + attacked.events
    )
    if backlog_records == 1000:
        assert steps == attacked.given
        assert writer.lost == 0
