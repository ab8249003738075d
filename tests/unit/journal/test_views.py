"""The rows as a reader wants them: one a step, the later attempt wins, nothing is deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nodetrack
from nodetrack.journal.folder import RunFolder
from nodetrack.journal.segment import segment_paths
from nodetrack.journal.views import ViewRow, all_rows, current_rows
from nodetrack.live_run import Run

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts attempts of one run."""
    return lambda **arguments: nodetrack.init(
        **{"project": "p", "role": "miner", "uid": 1, "version": "0.1.0", "dir": tmp_path, **arguments}
    )


def log_steps(run: Run, steps: range, plus: float = 0) -> None:
    """Log a = step + plus."""
    for step in steps:
        run.log({"a": float(step + plus)}, step=step)


def folder(run: Run) -> RunFolder:
    """The run on disk."""
    return RunFolder(run.folder, "p")


def current(run: Run) -> list[ViewRow]:
    """The default view."""
    return current_rows(folder(run))


@pytest.mark.case("C001")
def test_a_later_attempt_wins_at_the_steps_that_it_logs_again(start: Start) -> None:
    """Restarting from an older checkpoint loses no point of either attempt."""
    with start() as first:
        log_steps(first, range(16))
    with start() as second:
        log_steps(second, range(10, 21), plus=100)
    every = list(all_rows(folder(second)))
    assert len(every) == 16 + 11
    rows = current(second)
    assert [row.step for row in rows] == list(range(21))
    assert rows[12].values == {"a": 112.0}
    assert {row.step: row.values for row in every if row.attempt == first.attempt}[12] == {"a": 12.0}


@pytest.mark.case("C002")
def test_a_rewind_supersedes_what_lies_behind_it_and_deletes_nothing(start: Start) -> None:
    with start() as first:
        log_steps(first, range(126))
    with start() as second:
        second.rewind(120)
        log_steps(second, range(121, 131), plus=100)
    rows = current(second)
    assert [row.step for row in rows] == list(range(131))
    assert [row.values["a"] for row in rows] == [
        *map(float, range(121)),
        *(float(s + 100) for s in range(121, 131)),
    ]
    superseded = [row for row in all_rows(folder(second)) if row not in rows]
    assert [row.step for row in superseded] == [121, 122, 123, 124, 125]


def test_values_that_nobody_logged_again_stay_beside_those_that_won(start: Start) -> None:
    """An attempt that logs only some of the metrics takes only those."""
    with start() as first:
        first.log({"a": 1.0, "b": 2.0}, step=5)
    with start(version="0.2.0") as second:
        second.log({"a": 3.0}, step=5)
    assert [(row.version, row.attempt, row.values) for row in current(second)] == [
        ("0.1.0", first.attempt, {"b": 2.0}),
        ("0.2.0", second.attempt, {"a": 3.0}),
    ]


def test_calls_at_one_step_are_one_row_and_the_last_value_counts(start: Start) -> None:
    with start() as run:
        run.log({"a": 1.0, "b": 1.0}, step=3)
        run.log({"c": 2.0}, step=3)
        run.log({"a": 4.0}, step=3)
    (row,) = current(run)
    assert row.values == {"a": 4.0, "b": 1.0, "c": 2.0}
    assert len(list(all_rows(folder(run)))) == 3
    assert row.time_ns == list(all_rows(folder(run)))[-1].time_ns


def test_contexts_do_not_win_over_each_other(start: Start) -> None:
    with start() as run:
        run.log({"a": 1.0}, step=3)
        run.bind(stage="eval").log({"a": 2.0}, step=3)
        run.bind(stage="train").log({"a": 3.0}, step=3)
    with start() as run:
        run.bind(stage="eval").log({"a": 4.0}, step=3)
    assert {tuple(row.context.values()): row.values["a"] for row in current(run)} == {
        (): 1.0,
        ("eval",): 4.0,
        ("train",): 3.0,
    }


def test_rows_come_in_the_order_of_steps_whatever_order_they_were_logged_in(start: Start) -> None:
    with start() as run:
        for step in (10**6, 3, -5, 2**62, 4):
            run.log({"a": 1.0}, step=step)
    assert [row.step for row in current(run)] == [-5, 3, 4, 10**6, 2**62]
    assert [row.step for row in all_rows(folder(run))] == [10**6, 3, -5, 2**62, 4]


def test_a_rewind_before_everything_leaves_nothing_current(start: Start) -> None:
    with start() as run:
        log_steps(run, range(5))
        run.rewind(-1)
    assert current(run) == []
    assert len(list(all_rows(folder(run)))) == 5


# -- several nodes in one run ---------------------------------------------------------------------------


def test_two_nodes_that_log_to_one_run_supersede_nothing_of_each_other(start: Start) -> None:
    """Each has a row of its own at every step; going back is the affair of the node that did it."""
    with start() as first, start(uid=2, id=first.id) as second:
        log_steps(first, range(20))
        log_steps(second, range(10), plus=100)
        both = [(row.step, row.attempt, row.values["a"]) for row in current(first)]
        of_first = [(step, first.attempt, float(step)) for step in range(20)]
        of_second = [(step, second.attempt, step + 100.0) for step in range(10)]
        assert both == sorted(of_first + of_second)
        second.rewind(4)
        both = [(row.step, row.attempt, row.values["a"]) for row in current(first)]
        assert both == sorted(of_first + of_second[:5])


def test_a_node_that_comes_back_supersedes_its_own_values_and_not_those_of_the_node_between(
    start: Start,
) -> None:
    with start() as first:
        first.log({"a": 1.0, "b": 1.0}, step=5)
        first.log({"a": 1.0}, step=6)
    with start(uid=2, id=first.id) as other:
        other.log({"a": 2.0, "b": 2.0}, step=5)
        other.log({"a": 2.0}, step=6)
    with start(id=first.id) as again:
        again.rewind(5)
        again.log({"a": 3.0}, step=5)
    assert [(row.step, row.attempt, row.values) for row in current(again)] == [
        (5, first.attempt, {"b": 1.0}),
        (5, other.attempt, {"a": 2.0, "b": 2.0}),
        (5, again.attempt, {"a": 3.0}),
        (6, other.attempt, {"a": 2.0}),
    ]


def test_one_uid_in_two_roles_is_two_nodes(start: Start) -> None:
    with start() as miner, start(role="validator", id=miner.id) as validator:
        miner.log({"a": 1.0}, step=0)
        validator.log({"a": 2.0}, step=0)
    assert [row.values["a"] for row in current(miner)] == [1.0, 2.0]


# -- damage, and all at once -------------------------------------------------------------------------------


def test_a_segment_that_cannot_be_read_costs_its_own_rows_only(start: Start) -> None:
    with start(segment_bytes=4096) as run:
        log_steps(run, range(300))
    first, second, *_ = segment_paths(run.folder / run.attempt)
    lost = second.stat().st_size
    second.write_bytes(b"x" * lost)
    rows = current(run)
    assert rows[0].step == 0
    assert rows[-1].step == 299
    assert 0 < len(rows) < 300
    assert first.exists()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["log", "log", "rewind", "restart"]),
        st.integers(0, 6),
        st.sampled_from("ab"),
        st.integers(0, 1),
    ),
    max_size=25,
)


@given(CALLS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_view_is_what_replaying_the_calls_in_order_leaves(
    start: Start, tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int, str, int]]
) -> None:
    """One value a node, metric and step: the newest that no rewind of the node came after."""
    place = tmp_path_factory.mktemp("calls")
    runs = [start(dir=place, uid=node, id="shared") for node in range(2)]
    expected: dict[tuple[int, int, str], float] = {}
    for value, (call, step, metric, node) in enumerate(calls):
        if call == "log":
            runs[node].log({metric: float(value)}, step=step)
            expected[node, step, metric] = float(value)
        elif call == "rewind":
            runs[node].rewind(step)
            expected = {key: kept for key, kept in expected.items() if key[0] != node or key[1] <= step}
        else:
            runs[node].finish()
            runs[node] = start(dir=place, uid=node, id="shared")
    for run in runs:
        run.finish()
    nodes = {attempt.id: int(str(attempt.facts["uid"])) for attempt in folder(runs[0]).attempts}
    found = [
        ((nodes[row.attempt], row.step, name), value)
        for row in current(runs[0])
        for name, value in row.values.items()
    ]
    assert len(found) == len(expected)
    assert dict(found) == expected
