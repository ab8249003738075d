"""Where a run stood: found from the ends of its journal, whatever is damaged, missing or strange."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import nodetrack
from nodetrack.journal.reader import SegmentReader
from nodetrack.journal.recover import Node, Recovered, attempt_folders, attempt_number, read_header, recover
from nodetrack.journal.segment import MAGIC, encode_header, frame, segment_name, segment_paths
from nodetrack.records import Kind, Row, SegmentHeader

if TYPE_CHECKING:
    from conftest import Journal

FIRST, SECOND = "0001-aaaa", "0002-bbbb"
#: Two nodes that log to one run.
A, B = Node("miner", "1"), Node("miner", "2")


class Segment:
    """A segment of a test: its header's fields, and its records."""

    def __init__(self, *records: list[object], writer: int = 1, **header: object) -> None:
        self.records = records
        self.writer = writer
        self.header = header

    def encoded(self, attempt: str, number: int) -> bytes:
        header = SegmentHeader(
            schema_version=1,
            project="p",
            run="r",
            attempt=attempt,
            writer=self.writer,
            segment=number,
            version="0.1.0",
            **self.header,
        )
        key_set = frame(msgspec.msgpack.encode([Kind.KEYSET, 1, ["loss"], {}]))
        frames = [frame(msgspec.msgpack.encode(record)) for record in self.records]
        return encode_header(header) + key_set * 2 + b"".join(frames)


def rows(*steps: int, counted: bool = True) -> list[list[object]]:
    """One row a step."""
    return [[Kind.ROW, 1, [0.5], step, 1, *([True] if counted else [])] for step in steps]


def rewind(step: int) -> list[object]:
    return [Kind.EVENT, 1, "rewind", {"step": step}]


def checkpoint(step: int, counter: int) -> list[object]:
    return [Kind.EVENT, 1, "checkpoint", {"step": step, "counter": counter}]


def summary(time_ns: int, **entries: object) -> list[object]:
    return [Kind.SUMMARY, time_ns, entries]


def labels(time_ns: int, **fields: object) -> list[object]:
    return [Kind.TAGS, time_ns, fields]


def write(run: Path, attempt: str, *segments: Segment) -> list[Path]:
    """Puts an attempt on the disk."""
    folder = run / attempt
    folder.mkdir(parents=True)
    paths = [folder / segment_name(number) for number in range(1, len(segments) + 1)]
    for number, (path, segment) in enumerate(zip(paths, segments, strict=True), start=1):
        path.write_bytes(segment.encoded(attempt, number))
    return paths


def flip(path: Path, position: int, bits: int = 0xFF) -> None:
    """Damages one byte."""
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


IN_HEADER = len(MAGIC) + 20


# -- the step -------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_or_without_attempts_begins_at_nothing(tmp_path: Path) -> None:
    assert recover(tmp_path / "missing") == Recovered()
    (tmp_path / "run.json").touch()
    assert recover(tmp_path) == Recovered()
    assert recover(tmp_path / "run.json") == Recovered()


def test_the_step_is_one_past_the_highest_and_the_counter_one_past_the_highest_counted(
    tmp_path: Path,
) -> None:
    write(tmp_path, FIRST, Segment(*rows(0, 1, 2), *rows(500, counted=False), *rows(3)))
    recovered = recover(tmp_path)
    assert (recovered.attempt_number, recovered.last_attempt) == (1, FIRST)
    assert (recovered.step, recovered.counter) == (501, 4)


def test_the_last_segment_of_the_last_attempt_is_all_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the other segments of that attempt the headers are looked at, of other attempts nothing."""
    write(tmp_path, FIRST, Segment(*rows(900)))
    write(tmp_path, SECOND, *(Segment(*rows(step), step=step, counter=step) for step in range(5)))
    read_bytes: dict[str, int] = {}
    real = Path.open

    def opened(path: Path, mode: str) -> object:
        file = real(path, mode)
        read = file.read

        class Counting:
            def __enter__(self) -> Counting:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def seek(self, offset: int) -> int:
                return file.seek(offset)

            def read(self, size: int = -1) -> bytes:
                data = read(size)
                name = f"{path.parent.name}/{path.name}"
                read_bytes[name] = read_bytes.get(name, 0) + len(data)
                return data

        return Counting()

    monkeypatch.setattr(Path, "open", opened)
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (5, 5)
    sizes = {f"{path.parent.name}/{path.name}": path.stat().st_size for path in (tmp_path / SECOND).iterdir()}
    assert set(read_bytes) == set(sizes)
    whole = {name for name, size in read_bytes.items() if size >= sizes[name]}
    assert whole == {f"{SECOND}/{segment_name(5)}"}


def test_a_segment_that_was_only_begun_says_where_the_run_stood(tmp_path: Path) -> None:
    """Its header does: killed right behind a rotation, a node must not use a step twice."""
    write(tmp_path, FIRST, Segment(*rows(0, 1, 2)), Segment(step=3, counter=3))
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (3, 3)


@pytest.mark.parametrize("segment_bytes", [1, 300, 4096])
def test_what_a_run_counted_is_what_the_next_attempt_finds_at_every_row(
    tmp_path: Path, new_journal: Callable[..., Journal], segment_bytes: int
) -> None:
    """Also when a segment has just been filled, or just been begun."""
    journal = new_journal(tmp_path / FIRST, segment_bytes=segment_bytes)
    for step in (0, 1, 2, 3, 10, 4, 11, 100, 101, 102, 50, 103):
        journal.log(step=step)
        recovered = recover(tmp_path)
        assert (recovered.step, recovered.counter) == (journal.step, journal.step)
    assert recovered.summary.keys() == {"best"}
    assert recovered.labels == {"name": "n"}


def test_a_run_that_went_back_goes_on_behind_the_step_it_went_to(tmp_path: Path) -> None:
    write(tmp_path, FIRST, Segment(*rows(*range(126)), rewind(120), *rows(121, 122)))
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (123, 123)


def test_going_back_behind_the_beginning_of_the_segment_counts_too(tmp_path: Path) -> None:
    write(tmp_path, FIRST, Segment(*rows(0, 99)), Segment(rewind(50), step=100, counter=100))
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (51, 51)


def test_going_back_in_an_earlier_segment_is_known_from_the_header(tmp_path: Path) -> None:
    write(tmp_path, FIRST, Segment(*rows(0, 99), rewind(50)), Segment(*rows(51), step=51, counter=51))
    assert recover(tmp_path).step == 52


def test_a_run_that_went_forward_to_a_checkpoint_goes_on_from_there(tmp_path: Path) -> None:
    """Also when it was killed before it logged anything there."""
    write(tmp_path, FIRST, Segment(*rows(0, 1), checkpoint(500, 400)))
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (500, 400)
    write(tmp_path, SECOND, Segment(checkpoint(500, 400), *rows(600), rewind(9), *rows(10)))
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (11, 11)


def test_a_step_beyond_64_bits_is_never_recovered(tmp_path: Path) -> None:
    write(tmp_path, FIRST, Segment(*rows(2**64 - 1)))
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (2**63 - 1, 2**63 - 1)


def test_a_step_below_zero_that_a_run_went_back_to_is_kept(tmp_path: Path) -> None:
    write(tmp_path, FIRST, Segment(*rows(0, 1), rewind(-5), *rows(-3, counted=False)))
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (-2, -4)


@pytest.mark.parametrize("data", [{}, {"step": "x"}, {"step": None}])
def test_a_rewind_that_makes_no_sense_does_not_raise(tmp_path: Path, data: dict[str, object]) -> None:
    write(tmp_path, FIRST, Segment(*rows(7), [Kind.EVENT, 1, "rewind", data]))
    assert recover(tmp_path).step == 8


def test_the_furthest_of_several_writers_counts(tmp_path: Path) -> None:
    """A forked child goes on in a segment of its own, so the last segment need not be the furthest."""
    write(
        tmp_path,
        FIRST,
        Segment(*rows(0), writer=1),
        Segment(*rows(1, 2), writer=2, step=1, counter=1),
        Segment(*rows(70, 71), writer=1, step=70, counter=70),
        Segment(*rows(3), writer=2, step=3, counter=3),
    )
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter) == (72, 72)


def test_an_attempt_that_wrote_nothing_readable_is_passed_over_and_still_counted(tmp_path: Path) -> None:
    write(tmp_path, FIRST, Segment(*rows(0, 1, 2)))
    (tmp_path / SECOND).mkdir()
    (tmp_path / SECOND / segment_name(1)).touch()
    (tmp_path / SECOND / segment_name(2)).write_bytes(MAGIC[:4])
    (tmp_path / SECOND / segment_name(3)).mkdir()
    (tmp_path / SECOND / segment_name(4)).write_bytes(b"another kind of file")
    (tmp_path / "0003-cccc").touch()
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.attempt_number, recovered.last_attempt) == (3, 3, "0003-cccc")


# -- what was set by hand -------------------------------------------------------------------------------


def test_the_summary_and_the_labels_are_the_header_s_and_what_came_behind_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        FIRST,
        Segment(
            summary(5, best=0.25, worst=9),
            labels(6, name="new", tags=["a", "b"]),
            summary={"best": 0.5, "other": 1},
            labels={"name": "old", "notes": "x"},
            created_ns=1,
        ),
    )
    recovered = recover(tmp_path)
    assert recovered.summary == {"best": 0.25, "other": 1, "worst": 9}
    assert recovered.labels == {"name": "new", "tags": ["a", "b"], "notes": "x"}


def test_a_summary_entry_that_was_taken_away_stays_away(tmp_path: Path) -> None:
    write(tmp_path, FIRST, Segment(summary(5, best=None), summary={"best": 0.5, "other": 1}, created_ns=1))
    assert recover(tmp_path).summary == {"other": 1}


def test_of_two_writers_the_newer_word_counts(tmp_path: Path) -> None:
    """The child's header repeats what its parent had set; what the parent set since is newer."""
    parent = Segment(summary(9, best=0.25), labels(9, name="new"), writer=1, created_ns=1)
    child = Segment(
        summary(7, child=1), writer=2, created_ns=5, summary={"best": 0.5}, labels={"name": "old"}
    )
    write(tmp_path / "one", FIRST, parent, child)
    write(tmp_path / "other", FIRST, child, parent)
    for run in ("one", "other"):
        recovered = recover(tmp_path / run)
        assert recovered.summary == {"best": 0.25, "child": 1}
        assert recovered.labels == {"name": "new"}


def test_a_clock_that_was_set_back_does_not_make_old_words_new(tmp_path: Path) -> None:
    write(
        tmp_path,
        FIRST,
        Segment(summary(900, best=1), summary(5, best=2), created_ns=800, summary={"best": 0}),
    )
    assert recover(tmp_path).summary == {"best": 2}


# -- several nodes in one run ---------------------------------------------------------------------------


def of(node: Node, *records: list[object], **header: object) -> Segment:
    """A segment of that node."""
    return Segment(*records, role=node.role, uid=node.uid, **header)


def test_a_node_goes_on_behind_its_own_steps_wherever_another_one_stands(tmp_path: Path) -> None:
    """Only the numbers of attempts are shared."""
    write(tmp_path, FIRST, of(A, *rows(0, 1, 2), *rows(500, counted=False)))
    write(tmp_path, SECOND, of(B, *rows(*range(10)), rewind(4)))
    write(tmp_path, "0003-cccc", of(Node("validator", "1"), *rows(900)))
    stand = {node: recover(tmp_path, node) for node in (A, B, Node("miner", "3"))}
    assert [(each.step, each.counter) for each in stand.values()] == [(501, 3), (5, 5), (0, 0)]
    assert {(each.attempt_number, each.last_attempt) for each in stand.values()} == {(3, "0003-cccc")}
    assert recover(tmp_path).step == 901


def test_the_node_s_own_last_attempt_that_can_be_read_counts(tmp_path: Path) -> None:
    write(tmp_path, FIRST, of(A, *rows(7)))
    write(tmp_path, SECOND, of(A, *rows(3)))
    write(tmp_path, "0003-cccc", of(B, *rows(100), summary(5, best=1)))
    (tmp_path / "0004-dddd").mkdir()
    recovered = recover(tmp_path, A)
    assert (recovered.step, recovered.attempt_number, recovered.summary) == (4, 4, {"best": 1})


def test_an_attempt_that_does_not_say_whose_it_is_may_be_the_node_s(tmp_path: Path) -> None:
    """A step too high does no harm, one that is used twice does."""
    write(tmp_path, FIRST, of(A, *rows(3)))
    [path] = write(tmp_path, SECOND, of(B, *rows(40)))
    assert recover(tmp_path, A).step == 4
    flip(path, IN_HEADER)
    assert recover(tmp_path, A).step == 41
    write(tmp_path, "0003-cccc", Segment(*rows(50)))
    assert recover(tmp_path, A).step == 51


def test_name_tags_and_summary_are_the_run_s_and_the_newest_word_counts(tmp_path: Path) -> None:
    """Whichever of the nodes said it."""
    write(tmp_path, FIRST, of(A, summary(20, best=1, a=1), labels(40, name="of a"), created_ns=10))
    write(
        tmp_path,
        SECOND,
        of(B, summary(35, best=2, b=1), labels(36, name="of b", tags=["b"]), created_ns=30),
    )
    for node in (A, B):
        recovered = recover(tmp_path, node)
        assert recovered.summary == ({"best": 2, "b": 1, "a": 1} if node == A else {"best": 2, "b": 1})
        assert recovered.labels == {"name": "of a" if node == A else "of b", "tags": ["b"]}


def test_what_another_node_repeats_is_not_newer_than_what_was_set_since_it_began(tmp_path: Path) -> None:
    """Its later segments begin with what it knows, which is what stood when it took up the run."""
    write(tmp_path, FIRST, of(A, summary(20, best=1), summary(40, best=3), created_ns=10))
    knows = {"best": 1, "b": 1}
    write(tmp_path, SECOND, of(B, created_ns=30, summary={"best": 1}), of(B, created_ns=50, summary=knows))
    assert recover(tmp_path, A).summary == {"best": 3, "b": 1}


def test_a_name_that_another_node_gave_when_it_took_up_an_ended_run_is_the_run_s(tmp_path: Path) -> None:
    write(tmp_path, FIRST, of(A, labels(15, name="old"), created_ns=10))
    write(tmp_path, SECOND, of(B, created_ns=30, labels={"name": "new"}))
    assert recover(tmp_path, A).labels == {"name": "new"}


def test_of_the_attempts_of_others_only_the_last_is_read_and_of_the_rest_one_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many restarts of one node cost another node little."""
    write(tmp_path, FIRST, of(A, *rows(0)), of(A, *rows(1), step=1))
    for number in range(2, 6):
        write(tmp_path, f"{number:04d}-bbbb", of(B, *rows(0)), of(B, *rows(1), step=1))
    read: list[str] = []
    real = SegmentReader.read

    def spied(reader: SegmentReader, **options: int) -> object:
        read.append(f"{reader.path.parent.name}/{reader.path.name}")
        return real(reader, **options)

    monkeypatch.setattr(SegmentReader, "read", spied)
    assert recover(tmp_path, A).step == 2
    assert set(read) == {f"0005-bbbb/{segment_name(2)}", f"{FIRST}/{segment_name(2)}"}


def test_a_node_that_starts_again_in_a_shared_run_uses_no_step_of_its_own_twice(tmp_path: Path) -> None:
    """Through `init`, while another node logs on."""

    def start(uid: int) -> nodetrack.Run:
        return nodetrack.init(project="p", role="miner", uid=uid, id="shared", dir=tmp_path, version="1")

    first, other = start(1), start(2)
    for _ in range(3):
        first.log({"a": 1.0})
    first.finish()
    for _ in range(10):
        other.log({"a": 1.0})
    other.summary["best"] = 1
    first = start(1)
    assert (first.step, first.summary["best"]) == (3, 1)
    first.log({"a": 1.0})
    first.finish()
    other.finish()
    other = start(2)
    assert other.step == 10
    other.finish()


# -- damage ---------------------------------------------------------------------------------------------


def test_a_damaged_header_costs_no_step(tmp_path: Path) -> None:
    """The rows say it. What the header alone knew comes from the segment before."""
    *_, last = write(
        tmp_path,
        FIRST,
        Segment(*rows(0, 1), summary(2, best=0.5), created_ns=1),
        Segment(*rows(2, 3), step=2, counter=2, summary={"best": 0.5}, created_ns=3),
    )
    flip(last, IN_HEADER)
    assert read_header(last) is None
    recovered = recover(tmp_path)
    assert (recovered.step, recovered.counter, recovered.summary) == (4, 4, {"best": 0.5})


def test_a_header_with_a_damaged_byte_is_not_believed(tmp_path: Path) -> None:
    """Most changes make another header that can be read: another step, another version, another writer."""
    (path,) = write(tmp_path, FIRST, Segment(step=1000, counter=1000, summary={"best": 0.5}))
    header = read_header(path)
    assert header is not None
    for position in range(len(MAGIC), len(encode_header(header))):
        flip(path, position, 0x01)
        assert read_header(path) in (None, header)
        flip(path, position, 0x01)


def test_a_byte_damaged_anywhere_in_the_last_segment_costs_at_most_its_own_row(tmp_path: Path) -> None:
    *_, last = write(
        tmp_path,
        FIRST,
        Segment(*rows(0, 1)),
        Segment(*rows(2, 3, 4), step=2, counter=2),
    )
    data = last.read_bytes()
    for position in range(len(data)):
        flip(last, position)
        assert recover(tmp_path).step in (4, 5)
        last.write_bytes(data)


def test_a_torn_last_segment_gives_what_is_whole(tmp_path: Path) -> None:
    *_, last = write(tmp_path, FIRST, Segment(*rows(0, 1)), Segment(*rows(2, 3), step=2, counter=2))
    data = last.read_bytes()
    steps = []
    for size in range(len(data) + 1):
        last.write_bytes(data[:size])
        steps.append(recover(tmp_path).step)
    assert steps == sorted(steps)
    assert set(steps) == {2, 3, 4}


@pytest.mark.parametrize(
    "data", [b"", MAGIC, MAGIC[:3], bytes(4096), b"x" * 100, random.Random(1).randbytes(10_000)]
)
def test_no_file_in_place_of_the_last_segment_makes_it_raise(tmp_path: Path, data: bytes) -> None:
    *_, last = write(tmp_path, FIRST, Segment(*rows(0, 1)), Segment())
    last.write_bytes(data)
    assert recover(tmp_path).step == 2


def test_a_segment_of_a_later_schema_is_passed_over(tmp_path: Path) -> None:
    *_, last = write(tmp_path, FIRST, Segment(*rows(0, 1)), Segment())
    header = SegmentHeader(
        schema_version=2, project="p", run="r", attempt=FIRST, writer=1, segment=2, version="1", step=50
    )
    last.write_bytes(encode_header(header))
    assert recover(tmp_path).step == 2


def test_a_folder_that_may_not_be_looked_at_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert recover(tmp_path) == Recovered()


# -- attempts -------------------------------------------------------------------------------------------


def test_attempts_are_ordered_by_number_and_two_of_one_number_by_name(tmp_path: Path) -> None:
    """Two processes that took up a run at once have one number and different names."""
    names = ["0001-aaaa", "0002-aaaa", "0002-bbbb", "0010-aaaa", "9999-aaaa", "10000-aaaa"]
    for name in [*reversed(names), "x0001-aaaa", "0001", "cursors", "\u0660\u0660\u0660\u0669-aaaa"]:
        (tmp_path / name).mkdir()
    assert [folder.name for folder in attempt_folders(tmp_path)] == names
    assert [attempt_number(name) for name in (*names[-2:], "cursors")] == [9999, 10000, 0]


ATTEMPT = """
    import sys
    import nodetrack
    run = nodetrack.init(dir=sys.argv[1], version="1", segment_bytes=4096)
    print(run.folder, run.starting_step, flush=True)
    while True:
        run.log({"loss": 0.5})
"""


@pytest.mark.slow
def test_attempts_that_are_killed_one_after_another_use_no_step_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ATTEMPT), str(tmp_path / "journals")]
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            folder, starting_step = process.stdout.readline().split()
            before = recover(Path(folder)) if int(starting_step) else Recovered()
            attempt = attempt_folders(Path(folder))[-1]
            while len(list(attempt.glob("segment-*"))) < 4:
                pass
            process.send_signal(signal.SIGKILL)
        assert before.step >= int(starting_step)
        steps = steps_of(attempt)
        assert steps == list(range(int(starting_step), int(starting_step) + len(steps)))
        assert recover(Path(folder)).step == steps[-1] + 1


def steps_of(attempt: Path) -> list[int]:
    records = [record for path in segment_paths(attempt) for record in SegmentReader(path).read()]
    return [record.step for record in records if isinstance(record, Row)]
