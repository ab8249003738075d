"""The writer as seen by a run whose disk works: types, sizes, rotation, threads, signals, forks."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodetrack.journal import disk
from nodetrack.journal import writer as writer_module
from nodetrack.journal.null import NullJournal
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import MAX_PAYLOAD_BYTES, segment_paths
from nodetrack.journal.writer import JournalWriter, KeySet
from nodetrack.records import Row, StoredValue

if TYPE_CHECKING:
    from conftest import Journal

#: What is neither an int nor a float, most of it made so that its encoding looks like a float's.
NO_NUMBERS: Sequence[object] = [
    True,
    None,
    [0.5],
    [[0.5]],
    (0.5,),
    {"b": 0.5},
    {"ё": 0.5},
    "\N{MODIFIER LETTER VERTICAL LINE}abcdefg",
    "\ud800",
    b"\xcbabcdefgh",
    b"abc\xcbabcdefgh",
    object(),
]


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that takes the first bytes of a row and then no more."""
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "_write", lambda fd, data: os.write(fd, data[:20]))
        patch.setattr(
            disk, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        yield


# -- which values are taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", NO_NUMBERS, ids=[type(value).__name__ for value in NO_NUMBERS])
@pytest.mark.parametrize("others", [[], [0.5], [0.5] * 14, [0.5] * 15, [1, 0.5]], ids=len)
def test_a_value_that_is_no_number_is_refused_and_nothing_is_written(
    journal: Journal, value: object, others: list[StoredValue]
) -> None:
    """The check goes by the encoding, so what is encoded like a float must not slip through it."""
    names = [str(number) for number in range(len(others) + 1)]
    journal.log(dict(zip(names, [0.25, *others], strict=True)))
    for place in range(len(names)):
        values = [*others[:place], value, *others[place:]]
        with pytest.raises(TypeError):
            journal.log(dict(zip(names, values, strict=True)))
    journal.log(dict(zip(names, [0.75, *others], strict=True)))
    assert [row.values[0] for row in journal.rows()] == [0.25, 0.75]
    assert journal.writer.written == 2


_Anything = st.recursive(
    st.floats() | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.text() | st.binary() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    values=st.lists(_Anything, min_size=1, max_size=20),
    number=st.sampled_from([1, 127, 128, 255, 256, 70_000]),
)
def test_a_row_is_taken_if_all_its_values_are_ints_or_floats_and_only_then(
    values: list[StoredValue], number: int
) -> None:
    """Whatever the number of its key set, which moves the place where its values begin."""
    taken: list[bytes] = []
    key_set = KeySet(tuple(map(str, range(len(values)))), {})
    writer = JournalWriter(Path(), lambda *_: pytest.fail("no segment is needed"), pytest.fail)
    writer._segment = key_set.segment = writer_module._Segment(-1, Path(), 0, rotate_at=10**9)
    key_set.number, key_set.types = number, key_set.places_of_types(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "_write", lambda _, data: taken.append(data) or len(data))
        try:
            writer.write_row(key_set, 1, 2, values, False)
        except TypeError:
            assert not taken
            assert not all(type(value) in (int, float) for value in values)
        else:
            assert len(taken) == 1
            assert all(type(value) in (int, float) for value in values)


@pytest.mark.parametrize("values", [[2**64], [-(2**63) - 1], [0.5, 2**64]])
def test_an_integer_beyond_64_bits_is_told_to_the_caller(journal: Journal, values: list[StoredValue]) -> None:
    names = ["a", "b"][: len(values)]
    journal.log(dict.fromkeys(names, 1))
    with pytest.raises(OverflowError):
        journal.log(dict(zip(names, values, strict=True)))
    assert len(journal.rows()) == 1


def test_a_step_beyond_64_bits_is_told_to_the_caller(journal: Journal) -> None:
    journal.log()
    with pytest.raises(OverflowError):
        journal.log({"loss": 0.5}, step=2**64)
    assert journal.steps() == [0]


@pytest.mark.parametrize("size", [MAX_PAYLOAD_BYTES - 100, MAX_PAYLOAD_BYTES])
def test_a_row_over_the_size_limit_is_counted_as_lost_and_no_other(journal: Journal, size: int) -> None:
    """A reader would take it for damage, so it must not be written."""
    journal.log({"sample": 0})
    with journal.writer.lock:
        large: StoredValue = {"type": "text", "text": "x" * size}
        journal.writer.write_row(journal.key_set("sample"), 1, 1, [large], False, checked=True)
    journal.log({"sample": 2}, step=2)
    fits = size < MAX_PAYLOAD_BYTES
    assert journal.steps() == ([0, 1, 2] if fits else [0, 2])
    assert journal.writer.lost == (not fits)
    assert ("over the limit" in journal.writer.last_error) is not fits


def test_a_record_over_the_size_limit_is_counted_as_lost(journal: Journal) -> None:
    journal.say("x" * MAX_PAYLOAD_BYTES)
    journal.say("short")
    assert len(journal.records()) == 1
    assert (journal.writer.lost, journal.writer.pending) == (1, 0)


def test_rows_of_a_key_set_over_the_size_limit_are_counted_as_lost(journal: Journal) -> None:
    """Their names cannot be written, and without names they are nothing."""
    names = [f"{number}{'x' * 1000}" for number in range(MAX_PAYLOAD_BYTES // 1000)]
    for _ in range(3):
        journal.log(dict.fromkeys(names, 0.5))
        journal.log()
    assert len(journal.rows()) == 3
    assert (journal.writer.lost, journal.writer.pending) == (3, 0)
    assert journal.troubles == []


def test_names_and_texts_that_utf_8_cannot_hold_do_not_raise(journal: Journal) -> None:
    journal.say("\ud800")
    with journal.writer.lock:
        journal.writer.write_row(KeySet(("a",), {"stage": "\ud800"}), 0, 0, [0.5], True)
        journal.writer.write_row(
            journal.key_set("t"), 1, 1, [{"type": "text", "text": "\udfff"}], True, checked=True
        )
    assert journal.rows()[0].context == {"stage": "\\ud800"}
    assert journal.rows()[1].values == [{"type": "text", "text": "\\udfff"}]


# -- rotation -------------------------------------------------------------------------------------------


def test_each_segment_can_be_read_alone(new_journal: Callable[..., Journal]) -> None:
    """Key sets are defined anew, and the header says where the run stood, behind all rows so far."""
    journal = new_journal(segment_bytes=4096)
    for number in range(1000):
        journal.log({"loss": 0.5} if number % 2 else {"accuracy": 0.25, "loss": 0.5}, step=number * 3)
    assert len(journal.paths) > 5
    expected = itertools.count(0, 3)
    for number, path in enumerate(journal.paths, start=1):
        reader = SegmentReader(path)
        steps = [record.step for record in reader.read() if isinstance(record, Row)]
        assert reader.header is not None
        assert (reader.header.segment, reader.header.writer) == (number, 1)
        assert reader.header.step == (steps[0] - 2 if number > 1 else 0)
        assert reader.header.summary == {"best": reader.header.step}
        assert reader.header.labels == {"name": "n"}
        assert steps == list(itertools.islice(expected, len(steps)))
    assert next(expected) == 3000


def test_a_segment_is_full_by_its_rows_and_not_by_its_key_sets(new_journal: Callable[..., Journal]) -> None:
    """Else a run with thousands of names would begin a segment with each row."""
    journal = new_journal(segment_bytes=4096)
    names = [f"a/long/metric/name/{number}" for number in range(300)]
    for _ in range(10):
        journal.log(dict.fromkeys(names, 1))
    assert len(journal.paths) <= 2
    assert len(journal.rows()) == 10


def test_records_that_are_no_rows_rotate_too(new_journal: Callable[..., Journal]) -> None:
    journal = new_journal(segment_bytes=4096)
    for _ in range(100):
        journal.say("x" * 200)
    assert 4 <= len(journal.paths) <= 7
    assert len(journal.records()) == 100


def test_a_segment_that_cannot_be_begun_leaves_the_rows_in_the_old_one(
    new_journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too long a segment is better than a lost row; later the next one is begun after all."""
    journal = new_journal(segment_bytes=4096)
    journal.log()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        journal.log_many(500)
    assert len(journal.paths) == 1
    journal.log({"large": 0})
    with journal.writer.lock:
        text: StoredValue = {"type": "text", "text": "x" * 2_000_000}
        journal.writer.write_row(journal.key_set("large"), 502, 0, [text], True, checked=True)
    journal.log(step=503)
    assert len(journal.paths) == 2
    assert journal.steps() == list(range(504))
    assert (journal.writer.lost, journal.writer.pending, journal.troubles) == (0, 0, [])


def test_key_sets_that_were_let_go_are_defined_under_fresh_numbers(journal: Journal) -> None:
    journal.log({"a": 1})
    journal.writer.forget_key_sets()
    journal.key_sets.clear()
    journal.log({"b": 2})
    journal.log({"a": 3})
    assert [dict(row.items()) for row in journal.rows()] == [{"a": 1}, {"b": 2}, {"a": 3}]


def test_tiny_segments_do_not_use_up_the_file_numbers_of_the_process(
    new_journal: Callable[..., Journal],
) -> None:
    """A child after a fork has no thread that tends its journal."""
    journal = new_journal(segment_bytes=1)
    journal.log()
    before = len(open_files())
    journal.log_many(200)
    assert len(open_files()) <= before + 20
    assert journal.steps() == list(range(201))


def open_files() -> list[str]:
    """The files that this process has open, by name."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [str(link.readlink()) for link in links]


# -- syncing --------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are synced from now on."""
    names: list[str] = []
    real = os.fdatasync

    def note(fd: int) -> None:
        names.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", note)
    return names


def test_sync_reaches_the_segments_that_are_full_and_the_one_that_is_written(
    new_journal: Callable[..., Journal], synced: list[str]
) -> None:
    journal = new_journal(segment_bytes=2000)
    while len(journal.paths) < 4:
        journal.log()
    journal.writer.sync()
    assert sorted(synced) == [path.name for path in journal.paths]


def test_nothing_is_synced_twice(journal: Journal, synced: list[str]) -> None:
    journal.log()
    journal.writer.sync()
    journal.writer.sync()
    assert len(synced) == 1
    journal.log()
    journal.writer.sync()
    assert len(synced) == 2


def test_sync_waits_for_a_segment_that_another_thread_is_syncing(
    new_journal: Callable[..., Journal], synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns only when the rows are on the disk, also where somebody else began to bring them there."""
    journal = new_journal(segment_bytes=1)
    journal.log_many(2)
    slow, real = threading.Event(), os.fdatasync

    def hang_in_other_threads(fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            slow.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", hang_in_other_threads)
    keeper = threading.Thread(target=journal.writer.tend)
    keeper.start()
    journal.writer.sync()
    assert {path.name for path in journal.paths} <= set(synced)
    slow.set()
    keeper.join()


@pytest.mark.parametrize("call", ["fstat", "fdatasync"])
def test_a_file_server_that_forgot_the_file_does_not_stop_the_tending(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    journal.log()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda _: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        assert journal.writer.tend() is False
    assert ("Stale" in journal.writer.last_error) is (call == "fdatasync")
    journal.log()
    assert journal.steps() == [0, 1]


# -- the end --------------------------------------------------------------------------------------------


def test_what_is_written_behind_the_end_is_counted_as_lost(journal: Journal) -> None:
    journal.log()
    journal.writer.close()
    journal.log()
    journal.say("late")
    journal.writer.tend()
    journal.writer.close()
    assert (journal.writer.written, journal.writer.lost, journal.writer.pending) == (1, 2, 0)
    assert len(journal.records()) == 1


def test_a_journal_that_was_only_opened_has_one_segment_with_a_header(journal: Journal) -> None:
    journal.writer.open()
    journal.writer.open()
    assert len(journal.paths) == 1
    assert journal.records() == []


def test_times_follow_the_clock_and_rows_the_order_of_the_calls(journal: Journal) -> None:
    """A clock that is set back changes no order."""
    times = [100, 50, 200, 0, 199]
    for step, time_ns in enumerate(times):
        journal.writer.write_row(journal.key_set("loss"), step, time_ns, [0.5], True)
    assert [(row.step, row.time_ns) for row in journal.rows()] == list(enumerate(times))


def test_the_null_journal_checks_values_and_touches_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    null = NullJournal()
    null.open()
    null.write_row(KeySet(("a",), {}), 0, 0, [0.5], True)
    with pytest.raises(TypeError):
        null.write_row(KeySet(("a",), {}), 0, 0, [[0.5]], True)  # type: ignore[list-item]  # that is the point
    null.write([6, 0, "stdout", "x"])
    null.forget_key_sets()
    null.sync()
    null.close()
    assert list(tmp_path.iterdir()) == []
    assert null.lost == 0


# -- a folder that is deleted ---------------------------------------------------------------------------


def test_a_deleted_folder_is_made_again_with_all_its_rows_and_one_warning(journal: Journal) -> None:
    journal.log_many(10)
    shutil.rmtree(journal.folder)
    journal.log_many(10)
    assert journal.writer.tend() is True
    journal.log_many(10)
    assert journal.writer.tend() is False
    assert journal.steps() == list(range(30))
    assert [path.name for path in journal.paths] == ["segment-000001.ntj"]
    assert [message.partition(" was deleted")[1] for message in journal.troubles] == [" was deleted"]
    assert (journal.writer.lost, journal.writer.pending) == (0, 0)


@pytest.mark.parametrize("replace", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_a_segment_whose_name_was_taken_goes_on_under_another(
    journal: Journal, replace: Callable[[Path], None]
) -> None:
    journal.log_many(10)
    journal.paths[0].unlink()
    replace(journal.folder / "segment-000001.ntj")
    assert journal.writer.tend() is True
    journal.log_many(10)
    reader = SegmentReader(journal.folder / "segment-000002.ntj")
    assert [record.step for record in reader.read() if isinstance(record, Row)] == list(range(20))


def test_a_deleted_file_that_cannot_be_made_again_is_kept_and_tried_again(journal: Journal) -> None:
    """A file stands where the folder was: the rows wait in the deleted one, and one warning says so."""
    journal.log_many(10)
    shutil.rmtree(journal.folder)
    journal.folder.touch()
    for _ in range(3):
        journal.log_many(10)
        assert journal.writer.tend() is False
    assert journal.writer.failing
    journal.folder.unlink()
    assert journal.writer.tend() is True
    assert journal.steps() == list(range(40))
    cannot, made_again, can = journal.troubles
    assert cannot.startswith("cannot write")
    assert "made again" in made_again
    assert "can be written again" in can
    assert (journal.writer.lost, journal.writer.failing) == (0, False)


# -- threads and signals --------------------------------------------------------------------------------


def test_eight_threads_lose_no_row_and_mix_up_no_names(new_journal: Callable[..., Journal]) -> None:
    journal = new_journal(segment_bytes=20_000)

    def work(thread: int) -> None:
        for number in range(1000):
            journal.log({f"metric {thread}": float(thread), f"{number % 7}": number}, step=number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        journal.writer.tend()
    rows = [dict(row.items()) for row in journal.rows()]
    assert len(rows) == 8000
    for thread in range(8):
        own = [row for row in rows if f"metric {thread}" in row]
        assert all(row.pop(f"metric {thread}") == thread for row in own)
        assert own == [{f"{number % 7}": number} for number in range(1000)]


def log_in_between(monkeypatch: pytest.MonkeyPatch, function: str, interrupt: Callable[[], None]) -> None:
    """Runs `interrupt` once when the writer calls a function, as a signal handler would run there."""
    real = getattr(writer_module, function)
    waiting = [interrupt]

    def interrupted(*arguments: object) -> object:
        if waiting:
            waiting.pop()()
        return real(*arguments)

    monkeypatch.setattr(writer_module, function, interrupted)


#: The calls of the writer on the way of a row, and of one that begins a segment.
CALLS = ("_encode", "crc32", "_pack_head")
CALLS_OF_A_SEGMENT = (*CALLS, "encode_payload", "frame", "segment_paths", "encode_header")


@pytest.mark.parametrize(
    ("function", "segment_bytes"),
    [*((call, 1_000_000) for call in CALLS), *((call, 1) for call in CALLS_OF_A_SEGMENT)],
)
def test_a_signal_handler_that_logs_changes_no_names(
    new_journal: Callable[..., Journal],
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    segment_bytes: int,
) -> None:
    """It may run between any two calls of the writer: between a row's encoding and its write, say."""
    journal = new_journal(segment_bytes=segment_bytes)
    journal.log({"a": 1.0})

    def handler() -> None:
        journal.log({"handler": 7.0})
        journal.log({"handler": 7.0})
        journal.log({"b": 2.0})
        journal.writer.sync()  # closes what is full

    log_in_between(monkeypatch, function, handler)
    journal.log({"a": 1.0})
    journal.log({"b": 2.0})
    journal.log({"a": 1.0})
    read_back = sorted(tuple(row.items()) for row in journal.rows())
    assert read_back == sorted([(("a", 1.0),)] * 3 + [(("b", 2.0),)] * 2 + [(("handler", 7.0),)] * 2)
    assert journal.troubles == []


@pytest.mark.parametrize("function", ["encode_payload", "frame", "_encode"])
def test_a_key_set_is_not_written_into_a_segment_that_was_begun_meanwhile(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Its number belongs to the segment before; here it is another's."""
    journal.writer.open()

    def handler() -> None:
        journal.writer.forget_key_sets()
        journal.log({"handler": 7.0})

    log_in_between(monkeypatch, function, handler)
    journal.log({"a": 1.0})
    journal.log({"handler": 7.0})
    journal.log({"a": 1.0})
    read_back = sorted(tuple(row.items()) for row in journal.rows())
    assert read_back == [(("a", 1.0),)] * 2 + [(("handler", 7.0),)] * 2


@pytest.mark.parametrize("function", ["encode_payload", "frame", "_encode"])
def test_a_signal_handler_with_new_names_does_not_take_the_number_of_others(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Both are about to be defined at once, in one segment."""
    log_in_between(monkeypatch, function, lambda: journal.log({"handler": 7.0}))
    for _ in range(3):
        journal.log({"a": 1.0})
        journal.log({"handler": 7.0})
    read_back = sorted(tuple(row.items()) for row in journal.rows())
    assert read_back == [(("a", 1.0),)] * 3 + [(("handler", 7.0),)] * 4


@pytest.mark.parametrize("function", [*CALLS_OF_A_SEGMENT, "_write"])
def test_a_ctrl_c_in_the_middle_of_a_call_costs_no_other_row(
    new_journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """A notebook goes on behind it. Later the disk is full, and only the torn bytes must be cut off."""
    journal = new_journal(segment_bytes=1 if function in ("segment_paths", "encode_header") else 1_000_000)
    journal.log_many(3)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if function == "_write":  # the bytes are in the file, and the writer never learns of it
            patch.setattr(writer_module, "_write", lambda fd, data: os.write(fd, data) and interrupt())
        else:
            log_in_between(patch, function, interrupt)
        with pytest.raises(KeyboardInterrupt):
            journal.log({"interrupted": 0.5})
    journal.log_many(3)
    with full_disk(monkeypatch):
        journal.log()
    journal.log_many(3)
    assert journal.writer.pending == 4
    journal.writer.tend()
    acknowledged = [row.step for row in journal.rows() if row.names == ("loss",)]
    assert acknowledged == list(range(10))


def test_real_signals_in_a_busy_loop_change_no_names(new_journal: Callable[..., Journal]) -> None:
    journal = new_journal(segment_bytes=3000)
    handled = [0]

    def handler(_number: int, _frame: FrameType | None) -> None:
        handled[0] += 1
        journal.log({f"handler {handled[0] % 3}": float(handled[0] % 3)})

    previous = signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        for number in range(5000):
            journal.log({f"loop {number % 5}": float(number % 5)})
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    rows = journal.rows()
    assert len([name for name in open_files() if name.startswith(str(journal.folder))]) <= 18
    assert len(rows) == 5000 + handled[0]
    assert all(row.names[0].endswith(f" {row.values[0]:.0f}") for row in rows)  # type: ignore[str-format]


# -- forks ----------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a forked child, and fails if it fails there."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # whatever it is, the child must not go on as a second test run
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestFork:
    """The writer's own part; that it is told of a fork is the run's part."""

    def test_a_child_goes_on_in_a_segment_of_its_own(self, journal: Journal) -> None:
        journal.log_many(10)

        def child() -> None:
            journal.writer.after_fork_in_child()
            journal.log_many(5)
            journal.writer.close()

        in_child(child)
        journal.log_many(10)
        first, second = map(SegmentReader, journal.paths)
        assert [record.step for record in first.read() if isinstance(record, Row)] == list(range(20))
        assert [record.step for record in second.read() if isinstance(record, Row)] == list(range(10, 15))
        assert first.header is not None
        assert second.header is not None
        assert (first.header.writer, second.header.writer) == (1, 2)

    def test_a_child_that_never_logs_leaves_no_file(self, journal: Journal) -> None:
        journal.log()

        def child() -> None:
            journal.writer.after_fork_in_child()
            journal.writer.tend()
            journal.writer.close()

        in_child(child)
        assert len(journal.paths) == 1

    def test_a_child_of_a_parent_whose_disk_refused_writes_when_it_can(
        self, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has no thread that would try again for it, and must not write its parent's waiting rows."""
        journal.log()
        with full_disk(monkeypatch):
            journal.log()
        assert journal.writer.failing

        def child() -> None:
            journal.writer.after_fork_in_child()
            journal.log(step=7)

        in_child(child)
        journal.writer.tend()
        assert journal.steps() == [0, 1, 7]

    def test_no_file_of_the_parent_stays_open_in_the_child(self, new_journal: Callable[..., Journal]) -> None:
        journal = new_journal(segment_bytes=1)
        journal.log_many(5)

        def child() -> None:
            journal.writer.after_fork_in_child()
            assert not [name for name in open_files() if name.endswith(".ntj")]

        in_child(child)


FORKING = """
    import os, sys, threading
    import nodetrack
    run = nodetrack.init(dir=sys.argv[1], version="1")
    run.log({"loss": 0.5})
    held, over = threading.Event(), threading.Event()

    def hold():
        with run._state.journal.lock:
            held.set()
            over.wait()

    threading.Thread(target=hold).start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        run.log({"loss": 0.25})
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    over.set()
    run.log({"loss": 0.125})
    print(run.dir)
    run.finish()
    sys.exit(status)
"""


def test_a_lock_that_another_thread_holds_while_the_process_forks_does_not_hang_the_child(
    tmp_path: Path,
) -> None:
    """The thread is not there in the child, so nobody would ever give the lock back."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKING), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert values_by_segment(Path(done.stdout.strip())) == [[0.5, 0.125], [0.25]]


def values_by_segment(folder: Path) -> list[list[StoredValue]]:
    return [
        [record.values[0] for record in SegmentReader(path).read() if isinstance(record, Row)]
        for path in segment_paths(folder)
    ]
