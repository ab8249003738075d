"""What the delivery process does beside delivering: it syncs, shows that the node lives, records its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodetrack.delivery import child as child_module
from nodetrack.delivery.child import _Child
from nodetrack.delivery.life_line import LifeLine
from nodetrack.delivery.spec import End, Spec, TrainerProcess, encode_line
from nodetrack.journal import disk
from nodetrack.journal.folder import AttemptFolder
from nodetrack.journal.segment import SCHEMA_VERSION
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.machine import process_created_at, process_start_ticks
from nodetrack.records import SegmentHeader


def header(writer: int, segment: int) -> SegmentHeader:
    return SegmentHeader(
        schema_version=SCHEMA_VERSION,
        project="p",
        run="r1",
        attempt="0001-ab",
        writer=writer,
        segment=segment,
        version="1",
    )


def trainer(pid: int | None = None) -> TrainerProcess:
    return TrainerProcess(pid or os.getpid(), process_created_at(pid) or 0.0, process_start_ticks(pid))


@pytest.fixture
def pipes() -> Iterator[Callable[[], tuple[int, int]]]:
    """Makes pipes that are closed in the end."""
    made: list[int] = []

    def make() -> tuple[int, int]:
        ends = os.pipe()
        made.extend(ends)
        return ends

    yield make
    for fd in made:
        disk.close(fd)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[JournalWriter]:
    writer = JournalWriter(tmp_path / "r1" / "0001-ab", header, lambda _: None)
    writer.open()
    yield writer
    writer.close()


@pytest.fixture
def child(tmp_path: Path, writer: JournalWriter, pipes: Callable[[], tuple[int, int]]) -> _Child:
    spec = Spec(
        folder=os.fsencode(tmp_path / "r1"),
        header=header(0, 0),
        trainer=trainer(),
        finish_timeout=30,
        heartbeat_seconds=60,
        segment_bytes=2**26,
    )
    return _Child(spec, pipes()[0], pipes()[1])


def log(writer: JournalWriter, step: int = 0) -> None:
    writer.write_row(KeySet(("loss",), {}), step, 1, [0.5], False)


def test_what_was_written_is_synced_once(
    child: _Child, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    log(writer)
    for _ in range(3):
        child._sync()
    assert synced == [writer.folder / "segment-000001.ntj"]
    log(writer)
    writer.forget_key_sets()
    log(writer)
    child._sync()
    assert len(synced) == 3, "the segment that was left, and the new one"


def test_a_sign_of_life_is_shown_as_often_as_asked(child: _Child, writer: JournalWriter) -> None:
    child._beat()
    heartbeat = writer.folder / "heartbeat"
    assert heartbeat.exists()
    os.utime(heartbeat, (1, 1))
    child._beat()
    assert heartbeat.stat().st_mtime == 1, "not yet"
    child._next_beat = 0.0
    child._beat()
    assert heartbeat.stat().st_mtime > 1


def test_the_end_of_an_attempt_is_recorded_if_it_is_not(child: _Child, writer: JournalWriter) -> None:
    log(writer)
    child._record_crash(0.0)
    finish = AttemptFolder(writer.folder, is_last=True).finish_record()
    assert finish is not None
    assert (finish.state, finish.reason) == ("crashed", child_module.KILLED)
    child._record_crash(0.0)
    child._companion.close()
    records = list(AttemptFolder(writer.folder, is_last=True).records())
    assert len([record for record in records if type(record).__name__ == "AttemptFinished"]) == 1


def test_a_forked_child_that_still_logs_is_waited_for(child: _Child, writer: JournalWriter) -> None:
    """The end of the attempt is its last record, as far as can be known."""
    log(writer)
    other = JournalWriter(writer.folder, header, lambda _: None)
    other.open()
    stop = time.monotonic() + 1.0

    def log_on() -> None:
        while time.monotonic() < stop:
            log(other)
            time.sleep(0.02)

    thread = threading.Thread(target=log_on)
    thread.start()
    child._record_crash(time.monotonic() + 60)
    assert not thread.is_alive()
    other.close()
    child._companion.close()


def test_a_thing_that_fails_does_not_end_the_others(
    child: _Child, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(disk, "sync", fail)
    log(writer)
    for _ in range(3):
        child._tick()
    assert (writer.folder / "heartbeat").exists()
    assert len([record for record in caplog.records if "_sync failed" in record.message]) == 1


# -- the life line ------------------------------------------------------------------------------------------


def test_the_life_line_tells_the_end_in_words_from_the_end_of_the_file(
    pipes: Callable[[], tuple[int, int]],
) -> None:
    read, write = pipes()
    life = LifeLine(read, trainer())
    life.wait(0.0)
    life.look()
    assert not life.is_over
    line = encode_line(End(7.0))
    os.write(write, line[:5])
    life.wait(1.0)
    assert not life.is_over, "half a line"
    os.write(write, line[5:])
    life.wait(1.0)
    assert life.is_over
    assert life.end == End(7.0)
    os.close(write)
    life.wait(1.0)
    assert life.end == End(7.0)


def test_a_trainer_that_is_no_more_is_noticed_although_somebody_holds_its_pipe(
    pipes: Callable[[], tuple[int, int]],
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life = LifeLine(pipes()[0], trainer(process.pid))
    life.look()
    assert not life.is_over
    process.kill()
    assert life.trainer_is_gone(), "a zombie is gone"
    assert life.is_over
    process.communicate()


def test_a_trainer_that_only_closed_its_pipe_is_not_taken_for_dead(
    pipes: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodetrack.delivery.life_line._VANISHING_SECONDS", 0.1)
    read, write = pipes()
    life = LifeLine(read, trainer())
    os.close(write)
    life.wait(1.0)
    assert life.is_over
    assert not life.trainer_is_gone()
