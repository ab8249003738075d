"""What W&B is given of rows, tags and versions, and how rows that come again are recognised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodetrack.backends._wandb_rows import (
    Line,
    Sent,
    bytes_in_line,
    named,
    number_for,
    union,
    version_history,
)
from nodetrack.records import Row


def row(step: int, time_ns: int, *names: str) -> Row:
    return Row(offset=time_ns, names=names, values=[1.0] * len(names), step=step, time_ns=time_ns, context={})


def lines_of(rows: list[Row]) -> list[Line]:
    """As the backend makes them of one batch."""
    lines: list[Line] = []
    for record in rows:
        if not lines or not lines[-1].take("0.1.0", record):
            lines.append(Line("0.1.0", record.step, record.time_ns, named(record)))
    return lines


def stored(line: Line, number: int) -> dict[str, object]:
    """The line as the service gives it back."""
    return {**line.flat(), "_timestamp": line.seconds, "_step": number, "_runtime": 1.5}


CALLS = st.lists(
    st.tuples(st.integers(0, 3), st.sets(st.sampled_from(["a", "b", "step", "v1/x"]), min_size=1)),
    max_size=12,
)


@given(CALLS, st.data())
def test_rows_that_arrived_are_found_once_however_the_batch_is_cut(
    calls: list[tuple[int, set[str]]], data: st.DataObject
) -> None:
    """The service has the first lines of a batch; then its rows come again, and more after them."""
    first_ns = 1_795_983_508_611_388_123
    rows = [row(step, first_ns + 2_000 * place, *sorted(names)) for place, (step, names) in enumerate(calls)]
    lines = lines_of(rows)
    arrived = lines[: data.draw(st.integers(0, len(lines)))]
    sent = Sent()
    for number, line in enumerate(arrived):
        sent.add_stored(stored(line, number))
    found = []
    for record in rows:
        found.append(sent.take(record))
        sent = Sent(sent.copy().lines())  # kept with the cursor between two batches
    names_found = [
        name for record, is_there in zip(rows, found, strict=True) if is_there for name in record.names
    ]
    assert sorted(names_found) == sorted(name for line in arrived for name in line.values)
    assert sent.lines() == []


def test_a_row_at_the_same_step_and_another_time_is_another_row() -> None:
    sent = Sent()
    sent.add(Line("0.1.0", 1, 1_000_000_000, {"a": 1.0}))
    assert not sent.take(row(1, 2_000_000_000, "a"))
    assert sent.take(row(1, 1_000_000_000, "a"))
    assert not sent.take(row(1, 1_000_000_000, "a"))


def test_rows_of_others_are_passed_over() -> None:
    sent = Sent()
    sent.add_stored({"loss": 1, "_step": 3, "_timestamp": 5.0})
    sent.add_stored({"v0.1.0/loss": 1, "v0.1.0/step": 3})
    assert sent.lines() == []


def test_the_step_is_the_number_while_it_grows() -> None:
    assert [number_for(step, 5) for step in (7, 5, 4, -1, 2**53, 2**53 + 1)] == [7, 5, 5, 5, 2**53, 5]


def test_tags_are_a_union_in_order_and_long_ones_are_cut_with_a_mark() -> None:
    assert union(["a", "b"], ["b", "", "x" * 65]) == ["a", "b", "x" * 63 + "…"]


def test_the_version_history_keeps_what_the_service_knows() -> None:
    assert version_history({"version_history": ["0.1.0"]}, ["0.1.0", "0.2.0"], "0.3.0") == [
        "0.1.0",
        "0.2.0",
        "0.3.0",
    ]
    assert version_history({"version_history": "nonsense"}, [], "0.1.0") == ["0.1.0"]
    assert version_history({"version_history": ["0.1.0", "0.2.0"]}, [], "0.1.0") == [
        "0.1.0",
        "0.2.0",
        "0.1.0",
    ]


def test_files_do_not_count_as_bytes_of_a_row() -> None:
    image = {"type": "image", "format": "png", "data": b"x" * 1_000_000, "caption": None}
    text = {"type": "text", "text": "x" * 1_000_000}
    record = Row(offset=0, names=("a",), values=[image], step=0, time_ns=0, context={})
    assert bytes_in_line(record) < 1_000
    record = Row(offset=0, names=("a",), values=[text], step=0, time_ns=0, context={})
    assert bytes_in_line(record) > 2_000_000
