"""A forked child and its parent write to one attempt: neither hides the other, and a way back is of both."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nodetrack
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import recover
from nodetrack.journal.segment import encode_header, frame, segment_name
from nodetrack.journal.views import ViewRow, all_rows, current_rows
from nodetrack.live_run import Run
from nodetrack.records import Event, Kind, Mark, Row, SegmentHeader

ATTEMPT = "0001-aaaa"


class Process:
    """One writer of an attempt. It knows its own step and nothing of the other writers, as after a fork."""

    def __init__(self, folder: Path, now: int, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.step = step
        self.writer = len(list(folder.iterdir())) + 1
        self.rotate(now)

    def rotate(self, now: int) -> None:
        """Begin another segment."""
        number = len(list(self.folder.iterdir())) + 1
        header = SegmentHeader(
            schema_version=1,
            project="p",
            run="r",
            attempt=self.folder.name,
            writer=self.writer,
            segment=number,
            version="1",
            created_ns=now,
            step=self.step,
            counter=self.step,
        )
        self.path = self.folder / segment_name(number)
        self.path.write_bytes(encode_header(header))
        for key_set, name in enumerate("ab"):
            self.append([Kind.KEYSET, key_set, [name], {}])

    def append(self, record: list[object]) -> None:
        with self.path.open("ab") as file:
            file.write(frame(msgspec.msgpack.encode(record)))

    def log(self, now: int, step: int, value: float = 0.5, metric: str = "a") -> None:
        self.append([Kind.ROW, "ab".index(metric), [value], step, now, True])
        self.step = max(self.step, step + 1)

    def rewind(self, now: int, step: int) -> None:
        self.append([Kind.EVENT, now, "rewind", {"step": step}])
        self.step = step + 1

    def mark(self, now: int) -> None:
        self.append([Kind.MARK, now, self.step, self.step, {}, {}])


def current(run: Path) -> list[ViewRow]:
    return current_rows(RunFolder(run, "p"))


def steps(run: Path) -> list[int]:
    return [row.step for row in current(run)]


# -- two writers at one step ----------------------------------------------------------------------------


def in_a_child(run: Run, rows: int) -> None:
    """A forked child logs so many rows without a step."""
    child = os.fork()
    if child == 0:
        for _ in range(rows):
            run.log({"loss": -1.0})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_parent_and_child_that_count_the_same_steps_do_not_hide_each_other(tmp_path: Path) -> None:
    with nodetrack.init(project="p", dir=tmp_path, version="1") as run:
        for _ in range(3):
            run.log({"loss": 1.0})
        in_a_child(run, 3)
        for _ in range(3):
            run.log({"loss": 1.0})
    found = [(row.step, row.values["loss"]) for row in current(run.folder)]
    assert found == [(0, 1), (1, 1), (2, 1), (3, 1), (3, -1), (4, 1), (4, -1), (5, 1), (5, -1)]


def test_values_of_different_metrics_are_one_row_whoever_logged_them(tmp_path: Path) -> None:
    parent, child = Process(tmp_path / ATTEMPT, 1), Process(tmp_path / ATTEMPT, 2)
    child.log(3, 7, 1.0, "b")
    parent.log(4, 7, 2.0, "a")
    [row] = current(tmp_path)
    assert row.values == {"a": 2.0, "b": 1.0}
    assert row.time_ns == 4
    assert len(list(all_rows(RunFolder(tmp_path, "p")))) == 2


def test_a_writer_s_values_stay_together_when_one_of_them_is_another_s_too(tmp_path: Path) -> None:
    parent, child = Process(tmp_path / ATTEMPT, 1), Process(tmp_path / ATTEMPT, 2)
    parent.log(5, 7, 1.0, "a")
    child.log(3, 7, 2.0, "a")
    child.log(4, 7, 3.0, "b")
    child.log(6, 7, 4.0, "a")
    assert [row.values for row in current(tmp_path)] == [{"a": 1.0}, {"a": 4.0, "b": 3.0}]


def test_a_later_attempt_wins_over_all_writers_of_an_earlier_one(tmp_path: Path) -> None:
    parent, child = Process(tmp_path / ATTEMPT, 1), Process(tmp_path / ATTEMPT, 2)
    parent.log(3, 7, 1.0)
    child.log(4, 7, 2.0)
    Process(tmp_path / "0002-bbbb", 5).log(6, 7, 3.0)
    assert [(row.attempt, row.values) for row in current(tmp_path)] == [("0002-bbbb", {"a": 3.0})]


def test_calls_of_one_writer_at_one_step_are_one_row_across_its_segments(tmp_path: Path) -> None:
    process = Process(tmp_path / ATTEMPT, 1)
    process.log(2, 7, 1.0)
    process.rotate(3)
    process.log(4, 7, 2.0)
    assert [row.values for row in current(tmp_path)] == [{"a": 2.0}]


# -- going back -----------------------------------------------------------------------------------------


def test_a_way_back_concerns_what_another_writer_had_logged_before_and_not_what_it_logs_then(
    tmp_path: Path,
) -> None:
    parent, child = Process(tmp_path / ATTEMPT, 1), Process(tmp_path / ATTEMPT, 2)
    for now in range(10, 20):
        child.log(now, now)
    parent.rewind(50, 14)
    assert steps(tmp_path) == [10, 11, 12, 13, 14]
    assert recover(tmp_path).step == 15
    child.log(51, 30)
    assert steps(tmp_path) == [10, 11, 12, 13, 14, 30]
    assert recover(tmp_path).step == 31


def test_a_way_back_that_is_read_first_spares_what_another_writer_logged_later(tmp_path: Path) -> None:
    """The segments of two writers do not lie in the order of their records."""
    parent = Process(tmp_path / ATTEMPT, 1)
    parent.rewind(50, 14)
    child = Process(tmp_path / ATTEMPT, 2)
    child.log(49, 20)
    child.log(51, 30)
    assert steps(tmp_path) == [30]


def test_within_one_writer_the_order_counts_and_not_the_clock(tmp_path: Path) -> None:
    process = Process(tmp_path / ATTEMPT, 1)
    process.log(900, 20)
    process.rewind(100, 9)
    process.log(50, 10)
    process.rotate(60)
    process.log(70, 11)
    assert steps(tmp_path) == [10, 11]
    assert recover(tmp_path).step == 12


def test_a_way_back_concerns_all_of_earlier_attempts_whatever_the_clock_says(tmp_path: Path) -> None:
    """A run that goes on elsewhere goes on by another clock."""
    for process in Process(tmp_path / ATTEMPT, 900), Process(tmp_path / ATTEMPT, 900):
        process.log(901, 20)
    Process(tmp_path / "0002-bbbb", 1, step=21).rewind(2, 9)
    assert steps(tmp_path) == []
    assert recover(tmp_path).step == 10


def test_only_where_it_can_matter_is_a_way_back_of_another_writer_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that ended long ago must not cost every start a look through the whole attempt."""
    parent = Process(tmp_path / ATTEMPT, 1)
    child = Process(tmp_path / ATTEMPT, 2)
    child.log(3, 7)
    for now in range(10, 20):
        parent.log(now, now)
        parent.rotate(now)
    looked: list[str] = []

    def find_events(reader: SegmentReader, name: str) -> Iterator[Event]:
        looked.append(f"{reader.path.name} {name}")
        return iter(())

    monkeypatch.setattr(SegmentReader, "find_events", find_events)
    assert recover(tmp_path).step == 20
    assert looked == ["segment-000002.ntj rewind"]
    child.log(30, 50)
    child.rotate(31)
    looked.clear()
    assert recover(tmp_path).step == 51
    assert looked == [f"{parent.path.name} rewind"]


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_header_of_one_writer_hides_no_value(tmp_path: Path, damaged: int) -> None:
    parent, child = Process(tmp_path / ATTEMPT, 1), Process(tmp_path / ATTEMPT, 2)
    parent.log(3, 7, 1.0)
    child.log(4, 7, 2.0)
    path = tmp_path / ATTEMPT / segment_name(damaged)
    data = bytearray(path.read_bytes())
    data[30] ^= 0xFF
    path.write_bytes(data)
    assert [row.values for row in current(tmp_path)] == [{"a": 1.0}, {"a": 2.0}]
    assert recover(tmp_path).step == 8


# -- the end of a segment -------------------------------------------------------------------------------


def test_of_every_writer_only_what_stands_behind_its_last_mark_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far before the end that is; what stands before it is overwritten to show it."""
    monkeypatch.setattr("nodetrack.journal.recover.TAIL_BYTES", 200)
    for step in (1000, 2000):
        process = Process(tmp_path / ATTEMPT, 1)
        process.log(2, step)
        begin = process.path.stat().st_size
        process.mark(3)
        for now in range(50):
            process.log(now, now)
        data = process.path.read_bytes()
        head = len(data) - begin
        process.path.write_bytes(data[:100] + bytes(begin - 100) + data[-head:])
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (2001, 2001)


def test_the_last_mark_is_found_wherever_the_blocks_begin(tmp_path: Path) -> None:
    process = Process(tmp_path / ATTEMPT, 1)
    for now in range(4):
        process.log(now, now)
        process.mark(now)
    process.log(9, 9)
    expected = [Mark, Row]
    for block_bytes in range(1, process.path.stat().st_size + 10):
        found = list(SegmentReader(process.path).read_from_last_mark(block_bytes))
        assert [type(record) for record in found] == expected
        assert isinstance(found[0], Mark)
        assert found[0].step == 4


def test_a_segment_without_a_mark_has_none(tmp_path: Path) -> None:
    process = Process(tmp_path / ATTEMPT, 1)
    process.log(1, 1)
    assert list(SegmentReader(process.path).read_from_last_mark(16)) == []


@pytest.mark.parametrize("now", [0, 127, 2**8 - 1, 2**16 - 1, 2**32 - 1, 2**63, -1, -(2**63)])
def test_events_are_found_without_reading_what_stands_between(tmp_path: Path, now: int) -> None:
    """Nor is anything taken for one that only says its name."""
    process = Process(tmp_path / ATTEMPT, 1)
    process.append([Kind.CONSOLE, 1, "stdout", "rewind"])
    process.append([Kind.EVENT, 1, "alert", {"title": "rewind", "text": "rewind"}])
    process.rewind(now, 5)
    process.log(1, 1)
    process.rewind(7, 2**40)
    found = list(SegmentReader(process.path).find_events("rewind"))
    assert [(event.time_ns, event.data["step"]) for event in found] == [(now, 5), (7, 2**40)]


# -- both at once ---------------------------------------------------------------------------------------


class Act(NamedTuple):
    """What one of two processes does next."""

    process: int
    call: str
    step: int
    metric: str


ACTS = st.lists(
    st.builds(
        Act,
        st.integers(0, 1),
        st.sampled_from(["log", "log", "log", "rewind", "rotate", "mark"]),
        st.integers(-1, 6),
        st.sampled_from("ab"),
    ),
    max_size=30,
)


class Replayed:
    """What is left when the acts are done in the order of time, by one who sees both processes."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int, str], float] = {}
        self.step = 0
        #: Whether a process has said where it stands since the other went back: it does not know better.
        self.is_exact = True
        self._went_back: set[int] = set()

    def see(self, act: Act, value: float) -> None:
        if act.call == "log":
            self.values[act.process, act.step, act.metric] = value
            self.step = max(self.step, act.step + 1)
        elif act.call == "rewind":
            self.values = {place: kept for place, kept in self.values.items() if place[1] <= act.step}
            self.step = act.step + 1
            self._went_back.add(act.process)
        elif 1 - act.process in self._went_back:
            self.is_exact = False


@given(ACTS, st.sampled_from([200, 2**20]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_views_and_the_next_attempt_agree_on_what_two_writers_left(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    acts: list[Act],
    tail_bytes: int,
) -> None:
    """No value is hidden, and no step is used twice."""
    monkeypatch.setattr("nodetrack.journal.recover.TAIL_BYTES", tail_bytes)
    run = tmp_path_factory.mktemp("run")
    processes = Process(run / ATTEMPT, 1), Process(run / ATTEMPT, 2)
    replayed = Replayed()
    for now, act in enumerate(acts, start=3):
        process = processes[act.process]
        if act.call == "log":
            process.log(now, act.step, float(now), act.metric)
        elif act.call == "rewind":
            process.rewind(now, act.step)
        elif act.call == "rotate":
            process.rotate(now)
        else:
            process.mark(now)
        replayed.see(act, float(now))
    found = Counter((row.step, name, value) for row in current(run) for name, value in row.values.items())
    assert found == Counter((step, name, value) for (_, step, name), value in replayed.values.items())
    recovered = recover(run)
    assert recovered.step >= replayed.step
    if replayed.is_exact:
        assert (recovered.step, recovered.counter) == (replayed.step, replayed.step)
