"""Many processes in one folder: nothing is shared, so nothing is locked, and nobody can hurt anybody."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import Damage, segment_paths
from nodetrack.records import Record, Row

WRITERS = 32
ROWS = 1000

#: Starts all writers, which begin together when their standard input ends, and waits for them.
STARTER = """
    import os, sys
    from pathlib import Path
    from nodetrack.journal.writer import JournalWriter, KeySet
    from nodetrack.records import SegmentHeader

    def header(writer, segment):
        return SegmentHeader(
            schema_version=1, project="p", run="r", attempt="a", writer=writer, segment=segment, version="1")

    def write(process):
        journal = JournalWriter(Path(folder), header, sys.exit, segment_bytes=20_000)
        key_set = KeySet((f"process {process}",), {})
        for step in range(rows):
            journal.write_row(key_set, step, step, [float(process)], True)
        journal.close()
        os._exit(journal.lost or journal.written != rows)

    folder, processes, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for process in range(processes):
        if os.fork() == 0:
            sys.stdin.read()
            write(process)
    sys.exit(sum(os.wait()[1] for _ in range(processes)))
"""

READER = """
    import sys
    from pathlib import Path
    from nodetrack.journal.reader import SegmentReader
    from nodetrack.journal.segment import segment_paths
    print("reading", flush=True)
    while True:
        for path in segment_paths(Path(sys.argv[1])):
            list(SegmentReader(path).read())
"""


class Poller:
    """A reader that comes again and again, and each time takes what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.readers: dict[Path, SegmentReader] = {}
        self.records: list[Record] = []

    def poll(self) -> None:
        for path in segment_paths(self.folder):
            self.records += self.readers.setdefault(path, SegmentReader(path)).read()

    @property
    def damage(self) -> list[Damage]:
        return [reader.damage for reader in self.readers.values() if reader.damage != Damage()]


@pytest.mark.case("C037")
def test_32_processes_that_start_at_once_in_one_folder_lose_no_row_while_it_is_read(tmp_path: Path) -> None:
    """Another reader is killed in the middle of it, which nobody notices."""
    command = [sys.executable, "-c", textwrap.dedent(STARTER), str(tmp_path), str(WRITERS), str(ROWS)]
    poller = Poller(tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as writers:
        with killed_reader(tmp_path) as reader:
            assert writers.stdin is not None
            writers.stdin.close()
            while writers.poll() is None:
                poller.poll()
                if len(poller.records) > WRITERS * ROWS // 2:
                    reader.kill()
            reader.kill()
        assert writers.stderr is not None
        assert (writers.returncode, writers.stderr.read()) == (0, b"")
    poller.poll()
    assert poller.damage == []
    rows = [record for record in poller.records if isinstance(record, Row)]
    assert len(rows) == WRITERS * ROWS
    assert Counter((row.names, row.values[0], row.step) for row in rows) == Counter(
        ((f"process {process}",), float(process), step) for process in range(WRITERS) for step in range(ROWS)
    )


def killed_reader(folder: Path) -> subprocess.Popen[bytes]:
    """A reader in another process, for the test to kill."""
    command = [sys.executable, "-c", textwrap.dedent(READER), str(folder)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"reading\n"
    return reader


def test_the_segments_of_32_writers_say_whose_they_are(tmp_path: Path) -> None:
    """Each writer is named after its first segment, and none has two writers."""
    command = [sys.executable, "-c", textwrap.dedent(STARTER), str(tmp_path), "32", "100"]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    headers = []
    for path in segment_paths(tmp_path):
        reader = SegmentReader(path)
        names = {record.names for record in reader.read() if isinstance(record, Row)}
        assert reader.header is not None
        assert len(names) == 1
        headers.append((reader.header.writer, reader.header.segment, names.pop()))
    assert [segment for _, segment, _ in headers] == list(range(1, len(headers) + 1))
    assert len({writer for writer, _, _ in headers}) == WRITERS
    assert len({(writer, names) for writer, _, names in headers}) == WRITERS


LOGGING = """
    import sys
    import nodetrack
    run = nodetrack.init(dir=sys.argv[1], version="1", segment_bytes=4096)
    for step in range(500):
        run.log({"loss": 0.5})
    run.flush()
    run.finish()
"""


@pytest.mark.case("C038")
def test_no_file_is_mapped_and_no_range_of_one_is_locked(tmp_path: Path) -> None:
    """Network file systems do neither well. All system calls of a run are looked at, `init` to `finish`."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    command = [strace, "-f", "-y", "-e", "trace=mmap,flock,fcntl,openat,write,rename", "-o", str(trace)]
    done = subprocess.run(
        [*command, sys.executable, "-c", textwrap.dedent(LOGGING), str(tmp_path / "journals")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "PTRACE" in done.stderr:
        pytest.skip(f"processes cannot be traced here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    ours = [line for line in trace.read_text(errors="replace").splitlines() if "/journals/" in line]
    assert sum("write(" in line and ".ntj>" in line for line in ours) > 500  # the trace sees what it should
    assert [line for line in ours if re.search(r"\b(mmap|flock)\(|F_(OFD_)?SETLK", line)] == []
    assert not [line for line in ours if "sqlite" in line]


def test_a_writer_that_was_killed_is_no_obstacle_to_others(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(STARTER), str(tmp_path), "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, str(10**9)], start_new_session=True, **pipes) as killed:
        assert killed.stdin is not None
        assert killed.stdout is not None
        killed.stdin.close()
        poller = Poller(tmp_path)
        while len(poller.records) < 1000:
            poller.poll()
        os.killpg(killed.pid, signal.SIGKILL)
        killed.stdout.read()  # ends when the last process of the group has ended
    poller.poll()
    before = len(poller.records)
    subprocess.run([*command, "1000"], stdin=subprocess.DEVNULL, check=True)
    poller.poll()
    assert len(poller.records) == before + 1000
