"""How the streams of a process are listened to: nothing of them is changed, and nobody waits."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodetrack.console import _Console, console
from nodetrack.journal.null import NullJournal
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.segment import segment_paths
from nodetrack.journal.writer import JournalWriter
from nodetrack.records import ConsoleLine
from nodetrack.run_state import Identity, RunState


class Heard:
    """A run that listens, without the rest of an attempt."""

    def __init__(self, folder: Path) -> None:
        identity = Identity(
            project="p",
            run="r",
            attempt="0001-aaaa",
            attempt_number=1,
            role="miner",
            uid="1",
            environment="prod",
            version="0.1.0",
            version_origin="test",
            folder=folder,
        )
        self.state = RunState(identity)
        self.state.journal = JournalWriter(identity.attempt_folder, self.state.header, self.state.warn)

    def lines(self, stream: str = "stdout") -> list[str]:
        """The lines of a stream in its journal."""
        return [line.text for line in self.records() if line.stream == stream]

    def records(self) -> list[ConsoleLine]:
        """All console records in its journal."""
        paths = segment_paths(self.state.identity.attempt_folder)
        records = (record for path in paths for record in SegmentReader(path).read())
        return [record for record in records if isinstance(record, ConsoleLine)]


class Stage:
    """Gives a test its own standard output and error, once the test itself asks; else they are pytest's."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.runs: list[Heard] = []
        self._folder = folder
        self._patch = patch

    def out(self) -> io.TextIOWrapper:
        """Standard output from now on, with standard error another such file: of the kind that both mostly
        are.
        """
        made = io.TextIOWrapper(io.BytesIO(), "utf-8", newline="")
        self._patch.setattr(sys, "stdout", made)
        error = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", newline="")
        self._patch.setattr(sys, "stderr", error)
        return made

    def silent_run(self) -> Heard:
        """A run that does not listen yet."""
        self.runs.append(Heard(self._folder / str(len(self.runs))))
        return self.runs[-1]

    def run(self) -> Heard:
        """A run that listens."""
        made = self.silent_run()
        console.watch(made.state)
        return made


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """See Stage. Its runs are forgotten behind the test."""
    with pytest.MonkeyPatch.context() as patch:
        made = Stage(tmp_path, patch)
        yield made
        for run in made.runs:
            console.forget(run.state)
            run.state.journal.close()


def printed(stream: io.TextIOWrapper) -> str:
    """What has arrived in it."""
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


# -- what is heard --------------------------------------------------------------------------------------


def test_every_way_of_writing_is_heard_and_written_as_before(stage: Stage) -> None:
    out = stage.out()
    run = stage.run()
    print("a", 1, sep="-")
    print("b", end="")
    print("c", flush=True)
    assert sys.stdout.write("four\n") == 5
    sys.stdout.writelines(["x\n", "y\n"])
    print("err", file=sys.stderr)
    assert printed(out) == "a-1\nbc\nfour\nx\ny\n"
    assert run.lines() == ["a-1", "bc", "four", "x", "y"]
    assert run.lines("stderr") == ["err"]


def test_a_wrong_call_fails_as_before(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.out()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    run = stage.run()
    with pytest.raises(TypeError):
        sys.stdout.write(5)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        sys.stdout.write()  # type: ignore[call-arg]
    with pytest.raises(UnicodeEncodeError):
        sys.stdout.write("\ud83d\n")
    sys.stdout.close()
    with pytest.raises(ValueError, match="closed"):
        print("late")
    assert run.records() == []


def test_the_stream_is_the_same_object_with_the_same_properties(stage: Stage) -> None:
    stage.out()
    before = sys.stdout
    properties = [before.encoding, before.errors, before.isatty(), before.newlines, before.line_buffering]
    stage.run()
    assert sys.stdout is before
    after = sys.stdout
    assert properties == [after.encoding, after.errors, after.isatty(), after.newlines, after.line_buffering]


def test_all_open_runs_get_the_lines(stage: Stage) -> None:
    stage.out()
    first = stage.run()
    print("to one")
    second = stage.run()
    print("to both")
    console.forget(first.state)
    print("to the other")
    assert first.lines() == ["to one", "to both"]
    assert second.lines() == ["to both", "to the other"]


def test_what_is_not_ended_is_kept_when_the_run_ends(stage: Stage) -> None:
    stage.out()
    run = stage.run()
    print("waiting", end="")
    assert run.lines() == []
    console.forget(run.state)
    assert run.lines() == ["waiting"]
    console.forget(run.state)  # harmless


def test_a_run_that_records_nothing_hears_nothing(stage: Stage) -> None:
    out = stage.out()
    muted = stage.silent_run()
    muted.state.disabled, muted.state.journal = True, NullJournal()
    console.watch(muted.state)
    assert "write" not in vars(out)


@pytest.mark.parametrize("stream", [None, object()])
def test_a_stream_that_cannot_be_listened_to_is_left_alone(
    stage: Stage, stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.out()
    monkeypatch.setattr(sys, "stderr", stream)
    run = stage.silent_run()
    console.watch(run.state)
    print("heard")
    console.forget(run.state)
    assert run.lines() == ["heard"]
    assert len(run.state.warnings) == (0 if stream is None else 1)
    run.state.journal.close()


def test_one_stream_under_both_names_is_heard_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    out = stage.out()
    monkeypatch.setattr(sys, "stderr", out)
    run = stage.silent_run()
    console.watch(run.state)
    print("once", file=sys.stderr)
    console.forget(run.state)
    assert [line.text for line in run.records()] == ["once"]
    run.state.journal.close()


# -- beside others that wrap ----------------------------------------------------------------------------


def wrap(stream: io.TextIOWrapper, heard: list[str]) -> Callable[[], None]:
    """As wandb does it; the result undoes it."""
    before = stream.write

    def write(text: str) -> int:
        heard.append(text)
        return before(text)

    stream.write = write  # type: ignore[method-assign]

    def undo() -> None:
        stream.write = before  # type: ignore[method-assign]

    return undo


def test_the_stream_is_as_it_was_behind_the_last_run(stage: Stage) -> None:
    out = stage.out()
    run = stage.run()
    assert "write" in vars(out)
    console.forget(run.state)
    assert "write" not in vars(out)


def test_a_wrapper_below_is_called_and_put_back(stage: Stage) -> None:
    out = stage.out()
    heard: list[str] = []
    wrap(out, heard)
    theirs = out.write
    run = stage.run()
    print("both")
    console.forget(run.state)
    assert out.write is theirs
    print("theirs alone")
    assert "".join(heard) == "both\ntheirs alone\n" == printed(out)
    assert run.lines() == ["both"]


def test_a_wrapper_above_is_left_where_it_is_and_later_runs_hear_each_line_once(stage: Stage) -> None:
    out = stage.out()
    heard: list[str] = []
    first = stage.run()
    undo = wrap(out, heard)
    print("first")
    console.forget(first.state)
    print("between")
    second = stage.run()
    print("second")
    console.forget(second.state)
    undo()
    third = stage.run()
    print("third")
    assert [first.lines(), second.lines(), third.lines()] == [["first"], ["second"], ["third"]]
    assert "".join(heard) == "first\nbetween\nsecond\n"
    assert printed(out) == "first\nbetween\nsecond\nthird\n"


def test_wrappers_do_not_pile_up(stage: Stage) -> None:
    """A program that starts run after run, with a wrapper that ends after ours each time."""
    out = stage.out()
    for _ in range(50):
        run = stage.run()
        undo = wrap(out, [])
        console.forget(run.state)
        undo()
    stage.run()
    depth, write = 0, vars(out).get("write")
    while write is not None:
        depth, write = depth + 1, getattr(write, "_original", None)
    assert depth <= 3


# -- locks, threads, signals, forks ---------------------------------------------------------------------


def test_a_print_does_not_wait_for_a_thread_that_logs(stage: Stage) -> None:
    """The other thread may wait for a lock that whoever prints holds, such as that of a logging handler."""
    stage.out()
    run = stage.run()
    holds, release = threading.Event(), threading.Event()

    def hold() -> None:
        with run.state.journal.lock:
            holds.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(30)
    print("meanwhile")
    assert run.lines() == []
    release.set()
    thread.join()
    console.tend()
    assert run.lines() == ["meanwhile"]


def test_a_print_below_the_journal_s_lock_is_heard(stage: Stage) -> None:
    stage.out()
    run = stage.run()
    with run.state.journal.lock:
        print("inside")
    assert run.lines() == ["inside"]


def test_lines_of_threads_are_all_kept_and_none_is_torn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.out()
    run = stage.run()
    monkeypatch.setattr("nodetrack.console_lines.BURST", 10_000)
    monkeypatch.setattr(
        console, "_streams", {name: type(stream)(name) for name, stream in console._streams.items()}
    )

    def say(name: int) -> None:
        for count in range(300):
            sys.stdout.write(f"{name} says {count}\n")

    threads = [threading.Thread(target=say, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    console.tend()
    lines = run.lines()
    assert len(lines) == 2400
    for name in range(8):
        own = [line for line in lines if line.startswith(f"{name} ")]
        assert own == [f"{name} says {count}" for count in range(300)]


def test_a_handler_of_a_signal_may_print_at_any_moment(stage: Stage) -> None:
    stage.out()
    run = stage.run()
    handled = 0

    def handle(*_: object) -> None:
        nonlocal handled
        handled += 1
        print(f"handled {handled}", file=sys.stderr)

    previous = signal.signal(signal.SIGALRM, handle)
    try:
        for count in range(400):
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (count % 200 + 1))
            print(f"line {count}")
            while handled <= count:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    console.tend()
    assert run.lines() == [f"line {count}" for count in range(400)]
    assert run.lines("stderr") == [f"handled {count + 1}" for count in range(400)]


def test_an_interrupted_print_locks_nobody_out(stage: Stage) -> None:
    stage.out()
    run = stage.run()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for count in range(400):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (count % 200 + 1))
                print(f"line {count}")
                while True:
                    pass
            interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted == 400

    others: list[str] = []
    thread = threading.Thread(target=lambda: (print("another thread"), others.extend(run.lines())))
    thread.start()
    thread.join(30)
    assert others[-1].endswith("another thread")
    assert run.state.journal.lock.acquire(timeout=5)
    run.state.journal.lock.release()


def test_a_child_of_a_fork_is_not_heard_and_prints_as_before(stage: Stage) -> None:
    out = stage.out()
    run = stage.run()
    print("parent", end="")
    pid = os.fork()
    if pid == 0:
        try:
            assert "write" not in vars(out)
            print("child")
            assert console._watched == []
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(" goes on")
    assert run.lines() == ["parent goes on"]


def test_a_child_of_a_fork_can_listen_for_a_run_of_its_own(stage: Stage) -> None:
    stage.out()
    run = stage.run()
    pid = os.fork()
    if pid == 0:
        own = stage.silent_run()
        console.watch(own.state)
        print("of the child")
        console.forget(own.state)
        os._exit(0 if own.lines() == ["of the child"] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert run.lines() == []


# -- faults of our own ----------------------------------------------------------------------------------


def test_a_fault_of_ours_never_reaches_the_print_and_is_told_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stage.out()
    run = stage.run()
    with monkeypatch.context() as patch:
        patch.setattr("nodetrack.console_lines.redact_text", lambda _: 1 / 0)
        print("one")
        print("two")
    print("three")
    assert printed(out) == "one\ntwo\nthree\n"
    assert run.lines() == ["three"]
    [warning] = run.state.warnings
    assert "ZeroDivisionError" in warning


def test_a_warning_of_the_journal_that_is_printed_does_not_go_in_circles(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is told of on standard error, whose lines the full disk has to take."""
    stage.out()
    run = stage.run()

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    run.state.journal.write([9])
    with monkeypatch.context() as patch:
        patch.setattr("nodetrack.journal.writer._write", refuse)
        for count in range(5):
            print(f"line {count}")
            while run.state.unsaid:
                print(run.state.unsaid.popleft(), file=sys.stderr)
    run.state.journal.tend()
    assert run.lines() == [f"line {count}" for count in range(5)]
    assert len(run.lines("stderr")) == 1


def test_a_queue_that_nobody_empties_is_bounded_and_what_it_lacks_is_counted(stage: Stage) -> None:
    """Whoever takes it to the journal may be held up by a disk for minutes."""
    out = stage.out()
    run = stage.run()
    holds, release = threading.Event(), threading.Event()

    def hold() -> None:
        with console._working:
            holds.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(30)
    for _ in range(100):
        print("\n".join(["x" * 99] * 1000))
    assert console._held <= 2_000_000
    release.set()
    thread.join()
    console.forget(run.state)
    lines = run.lines()
    counted = sum(int(line.split()[1]) for line in lines if line.startswith("[nodetrack"))
    assert counted + sum(not line.startswith("[nodetrack") for line in lines) == pytest.approx(
        100_000, abs=100
    )
    assert len(printed(out)) == 100 * 1000 * 100


def test_there_is_one_console_and_it_is_idle_between_runs() -> None:
    assert isinstance(console, _Console)
    assert console._watched == []
    assert console._writes == []
